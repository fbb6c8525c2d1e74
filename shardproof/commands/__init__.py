"""The commands of the command line, one module each: each is imported when it is chosen.

``run``, ``plan``, ``doctor``, ``record``, ``compare``, ``implementations`` and ``torch_names`` import torch or the
harness; the others read files, and ``findings`` runs some. Each takes the arguments after its name and returns the exit
code; argparse exits with 2 for unknown arguments and with 0 for ``--help``.
"""

import argparse
import dataclasses
import functools
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from shardproof.contract import NoList
from shardproof.door import BadFile, printable

BAD_INPUT = 2
_COLUMNS = 100  # of a help


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are printable: a shell's pattern puts foreign file names on a command line."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def parser(prog: str, *, description: str, epilog: str) -> argparse.ArgumentParser:
    """Make the parser of a command, whose help has lines of a terminal's width.

    The description has no line breaks; the epilog, with examples and exit codes, is printed as it is.
    """
    return _Parser(
        prog=prog,
        description=textwrap.fill(description, _COLUMNS),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def refuse(reason: object) -> int:
    """Print on stderr, in one line, why a command cannot do what it was asked; returns its exit code."""
    print(f"shardproof: {printable(str(reason))}", file=sys.stderr)
    return BAD_INPUT


INTERNAL = "internal error, please report it"
"""What a command that reads files says of an exception that nothing expects."""


def reader(command: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """Make a command that reads foreign files, and whose exit codes are answers, end in one line for each bad file.

    An exception that nothing expects ends it alike. Python's own exit code would be 1, with which a command says that a
    run is worse, or that two diverge.
    """

    @functools.wraps(command)
    def read(arguments: Sequence[str]) -> int:
        try:
            return command(arguments)
        except (BadFile, NoList) as error:
            return refuse(error)
        except BrokenPipeError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(frame.filename)}, line {frame.lineno}"
            return refuse(BadFile(f"{command.__name__}: {INTERNAL}: {type(error).__name__}: {error} ({where})"))

    return read


def values_of(options: argparse.Namespace, kind: type) -> dict[str, Any]:
    """Return the options that have the name of a field of a dataclass, by these names."""
    names = (one.name for one in dataclasses.fields(kind))
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def positive(text: str) -> int:
    """Read an argument that is a number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def split(
    arguments: Sequence[str], *, flags: Collection[str] = (), optional: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Split arguments into the options of a command, and a script with its own arguments.

    Args:
        flags: the command's options that take no value.
        optional: those whose value may be left out, before an option or a script "*.py".
    """
    without_value = {*flags, "-h", "--help", "--"}
    for place, one in enumerate(arguments):
        following = arguments[place + 1 : place + 2]
        if one in optional and (not following or following[0].startswith("-") or following[0].endswith(".py")):
            without_value.add(one)
    position = 0
    while position < len(arguments) and arguments[position].startswith("-") and arguments[position] != "-m":
        position += 1 if arguments[position] in without_value or "=" in arguments[position] else 2
        if arguments[min(position, len(arguments)) - 1] == "--":
            return list(arguments[: position - 1]), list(arguments[position:])
    return list(arguments[:position]), list(arguments[position:])


def numbers(command: str, text: str) -> tuple[int, ...]:
    """Read the numbers of steps.

    Raises:
        NotWatchable: they are none; in one line.
    """
    if not all(part.strip().isdecimal() for part in text.split(",")):
        from shardproof.harness.watching.records import NotWatchable

        raise NotWatchable(f"{command}: steps={text!r}: expected steps counted from 0, such as 0,1,2")
    return tuple(int(part) for part in text.split(","))
