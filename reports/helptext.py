"""The help of a command: its purpose, in lines of a terminal's width, its arguments, and examples."""

import argparse
import textwrap

_COLUMNS = 100


def parser(prog: str, *, description: str, epilog: str) -> argparse.ArgumentParser:
    """Make the parser of a command.

    Args:
        prog: how the command is called.
        description: its purpose, without line breaks.
        epilog: examples and exit codes, as they are printed.
    """
    return argparse.ArgumentParser(
        prog=prog,
        description=textwrap.fill(description, _COLUMNS),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
