"""The commands of the command line, one module each: each is imported when it is chosen.

``run``, ``plan``, ``implementations`` and ``torch_names`` import torch or the harness; the others read files, and
``findings`` runs some. Each takes the arguments after its name and returns the exit code; argparse exits with 2 for
unknown arguments and with 0 for ``--help``.
"""

import argparse
import textwrap

_COLUMNS = 100  # of a help


def parser(prog: str, *, description: str, epilog: str) -> argparse.ArgumentParser:
    """Make the parser of a command, whose help has lines of a terminal's width.

    The description has no line breaks; the epilog, with examples and exit codes, is printed as it is.
    """
    return argparse.ArgumentParser(
        prog=prog,
        description=textwrap.fill(description, _COLUMNS),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
