"""A finding of the doctor, and what a check returns besides."""

import dataclasses
import shlex
import sys
from collections.abc import Sequence

from shardproof.door import printable


@dataclasses.dataclass(frozen=True)
class DoctorFinding:
    """Something that no right training does, or that nobody but the user can judge.

    Attributes:
        checks: the numbers of the checks that found it: ("D11",).
        signature: the number of the mistake it looks like, "S2"; empty if it looks like none.
        step: the step, counted from 0.
        title: what is wrong, in a few words.
        lines: what was seen, one line each.
        is_note: whether it may be meant; notes are no failure.
        is_open: whether its cause is not known: then a comparison with one rank shows where it begins.
        root: of several roots that a loop trains the one that it is of, as messages name it; empty for one alone.
    """

    checks: tuple[str, ...]
    signature: str
    step: int
    title: str
    lines: tuple[str, ...]
    is_note: bool = False
    is_open: bool = False
    root: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """The same for the same finding in another step."""
        return (*self.checks, self.signature, self.title)

    def render(self) -> str:
        """Return the text, whose first line ends with the numbers of checks and signature."""
        numbers = ", ".join(filter(None, [*self.checks, self.signature]))
        kind = "note: " if self.is_note else ""
        of = f"{self.root}: " if self.root else ""
        lines = [f"{kind}step {self.step}: {of}{self.title} [{numbers}]", *(f"  {line}" for line in self.lines)]
        return "\n".join(map(printable, lines))


def listed(names: list[str], most: int = 3) -> str:
    """Return names for a message, with the number of those that are left out."""
    shown = ", ".join(map(repr, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def count_of(number: int, one: str, more: str) -> str:
    """Return a number with its noun: "1 backward pass", "2 backward passes"."""
    return f"{number} {one if number == 1 else more}"


def next_lines(ranks: int) -> tuple[str, ...]:
    """Return what to run where a finding does not show its cause: the script of this process, recorded and compared."""
    return (
        "next: record one rank and these ranks, and see where the runs first diverge; the rows of a step must be",
        "the same in both: one rank reads those of all (data that a script seeds or draws by rank are not the same)",
        f"  {launched('record --out ref', 1, sys.argv)}",
        f"  {launched('record --out run', ranks, sys.argv)}",
        "  shardproof compare ref run",
    )


def launched(command: str, ranks: int, script: Sequence[str]) -> str:
    """Return the command line of one of our commands on so many ranks, with a script and its arguments."""
    words = [word for word in script if word != "-c"] or ["train.py"]
    return f"torchrun --nproc-per-node {ranks} -m shardproof {command} {shlex.join(words)}"
