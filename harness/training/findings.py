"""A finding of the doctor, and what a check returns besides."""

import dataclasses

from shardproof.door import printable


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that no right training does, or that nobody but the user can judge.

    Attributes:
        checks: the numbers of the checks that found it: ("D11",).
        signature: the number of the mistake it looks like, "S2"; empty if it looks like none.
        step: the step, counted from 0.
        title: what is wrong, in a few words.
        lines: what was seen, one line each.
        is_note: whether it may be meant; notes are no failure.
    """

    checks: tuple[str, ...]
    signature: str
    step: int
    title: str
    lines: tuple[str, ...]
    is_note: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        """The same for the same finding in another step."""
        return (*self.checks, self.signature, self.title)

    def render(self) -> str:
        """Return the text, whose first line ends with the numbers of checks and signature."""
        numbers = ", ".join(filter(None, [*self.checks, self.signature]))
        kind = "note: " if self.is_note else ""
        lines = [f"{kind}step {self.step}: {self.title} [{numbers}]", *(f"  {line}" for line in self.lines)]
        return "\n".join(map(printable, lines))


def listed(names: list[str], most: int = 3) -> str:
    """Return names for a message, with the number of those that are left out."""
    shown = ", ".join(map(repr, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
