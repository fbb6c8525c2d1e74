"""The commands of the command line, one module each: each is imported when it is chosen.

``run``, ``plan``, ``implementations`` and ``torch_names`` import torch or the harness; the others read files, and
``findings`` runs some.
"""

import argparse
import textwrap

_COLUMNS = 100  # of a help


def parser(prog: str, *, description: str, epilog: str) -> argparse.ArgumentParser:
    """Make the parser of a command, whose help has lines of a terminal's width.

    Args:
        prog: how the command is called.
        description: what it does, without line breaks.
        epilog: examples and exit codes, as they are printed.
    """
    return argparse.ArgumentParser(
        prog=prog,
        description=textwrap.fill(description, _COLUMNS),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
