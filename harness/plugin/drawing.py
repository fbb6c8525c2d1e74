"""Cases with a drawn parameter: the controller draws examples, the ranks run each as a case, and a failure shrinks.

hypothesis proposes examples and this module judges them, each once: what an example did is kept, so that hypothesis
meets no example that fails and then passes. Shrinking keeps to failures of one kind, so that it does not slip from one
error to another, and ends when its time is over.
"""

import dataclasses
import importlib
import importlib.util
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from shardproof.harness.judging.texts import MOST_OF_A_RANK, bounded, gist
from shardproof.harness.plugin.records import MadeRecord
from shardproof.runfile import Verdict

EXAMPLES = 10
"""The examples of a case in a run without ``--fuzz``, unless what is drawn has numbers of its own."""

SHRINK_SECONDS = 60.0
"""How long shrinking may take, besides the example that runs when the time is over."""

#: The examples of one search by hypothesis; with ``--fuzz`` one follows the other until the time is over.
_EXAMPLES_AT_ONCE = 100

#: While a hang shrinks, an example has this many times the longest time that an example took so far, and at least so
#: many seconds.
_DEADLINE_FACTOR, _LEAST_DEADLINE = 5.0, 2.0

Run = Callable[[Any, float | None], MadeRecord]
"""Runs an example with a deadline in seconds, or that of the case, and returns its record."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The value of a drawn parameter in the pytest process; in a rank, an example of the class takes its place."""

    kind: type

    def __repr__(self) -> str:
        return "drawn"


def drawn_parameter(item: pytest.Item) -> tuple[str, type] | None:
    """Return the name of the parameter of a case that is drawn and the class of what is drawn, or None."""
    mark = item.get_closest_marker("drawn")
    return next(iter(mark.kwargs.items())) if mark is not None else None


def missing() -> list[str]:
    """Return what drawing lacks on this host."""
    return [] if importlib.util.find_spec("hypothesis") else ["hypothesis (the extra 'fuzz')"]


def examples_of(kind: type, effort: str) -> int:
    """Return how many examples of a kind an item draws in a run without ``--fuzz``."""
    own: dict[str, int] = getattr(kind, "EXAMPLES", {})
    return own.get(effort, EXAMPLES)


def strategy_of(kind: type, *, capabilities: frozenset[str], wrong_calls: frozenset[str], world_size: int) -> Any:
    """Return the strategy that draws what an implementation claims on so many ranks, without what it gets wrong."""
    # By name, so that a host without the extra can import this module.
    strategies = importlib.import_module("shardproof.harness.plugin.strategies")
    return strategies.strategy_of(kind, capabilities=capabilities, wrong_calls=wrong_calls, world_size=world_size)


@dataclasses.dataclass
class Found:
    """A failing example, shrunk.

    Attributes:
        shrinking: how many examples ran after the first that failed.
        seconds: how long the shrinking took.
        is_out_of_time: whether the shrinking ended for lack of time.
        repeats: whether the example failed again when it ran once more.
        others: failures of other kinds that were met on the way, one line each.
    """

    example: Any
    record: MadeRecord
    shrinking: int = 0
    seconds: float = 0.0
    is_out_of_time: bool = False
    repeats: bool = True
    others: list[str] = dataclasses.field(default_factory=list)


class _Stopped(BaseException):
    """Carries an exception of the pytest process, such as that of pytest-timeout, through hypothesis."""


class _Broken(BaseException):
    """Carries an example, and its record, that the harness could not run."""


class Search:
    """One search for an example that fails; ``examples`` have run, those of the shrinking excepted."""

    def __init__(self, run: Run, *, shrink_seconds: float = SHRINK_SECONDS) -> None:
        self._run = run
        self._shrink_seconds = shrink_seconds
        #: The records of the examples that failed; None of those that passed.
        self._records: dict[Any, MadeRecord | None] = {}
        self._longest = 0.0
        self._failed_at: float | None = None
        self._kind: tuple[str, str] | None = None
        self._seconds: float | None = None
        self._until: float | None = None
        self._others: dict[str, None] = {}
        self._is_out_of_time = False
        self.examples = 0

    def find(self, strategy: Any, *, seed: int, examples: int = EXAMPLES, seconds: float | None = None) -> Found | None:
        """Draw examples until one fails, and shrink it; None if no example failed.

        Args:
            strategy: a strategy of hypothesis; examples are hashable.
            seed: with the version of hypothesis it determines what is drawn.
            examples: how many to draw.
            seconds: how long to draw instead, however many.

        Raises:
            BaseException: whatever ``run`` raises.
        """
        generator = random.Random(seed)
        if seconds is None:
            return self._find_once(strategy, generator, examples)
        self._seconds = seconds
        found = None
        while found is None and not self._is_over():
            found = self._find_once(strategy, generator, _EXAMPLES_AT_ONCE)
        return found

    def _find_once(self, strategy: Any, generator: random.Random, examples: int) -> Found | None:
        hypothesis = importlib.import_module("hypothesis")
        settings = hypothesis.settings(
            max_examples=examples,
            database=None,
            deadline=None,
            derandomize=False,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        )
        try:
            example = hypothesis.find(strategy, self._fails, settings=settings, random=generator)
        except hypothesis.errors.NoSuchExample:
            return None
        except _Stopped as stopped:
            assert stopped.__cause__ is not None
            raise stopped.__cause__ from None
        except _Broken as broken:
            return Found(*broken.args)
        return self._confirmed(example)

    def _fails(self, example: Any) -> bool:
        """Whether an example fails, in the way in which the first did."""
        if example not in self._records:
            if self._until is None and self._seconds is not None:
                # From here: on a busy host the import of hypothesis can take as long as a short search.
                self._until = time.monotonic() + self._seconds
            if self._is_over():
                return False
            self._records[example] = self._judge(example)
        record = self._records[example]
        if record is None:
            return False
        kind = _kind(record)
        if self._kind is None:
            self._kind, self._failed_at = kind, time.monotonic()
        elif kind != self._kind:
            self._others[f"{record.verdict}: {gist(record.text)}"] = None
        return kind == self._kind

    def _is_over(self) -> bool:
        if self._failed_at is None:
            return self._until is not None and time.monotonic() > self._until
        self._is_out_of_time = time.monotonic() > self._failed_at + self._shrink_seconds
        return self._is_out_of_time

    def _judge(self, example: Any) -> MadeRecord | None:
        """Run an example, and return its record if it failed."""
        shrinks_a_hang = self._kind is not None and self._kind[0] == Verdict.HANG
        deadline = max(_LEAST_DEADLINE, _DEADLINE_FACTOR * self._longest) if shrinks_a_hang else None
        try:
            record = self._run(example, deadline)
        except BaseException as error:
            raise _Stopped from error
        self.examples += self._failed_at is None
        if record.verdict == Verdict.HARNESS_ERROR or record.verdict.is_skip:
            raise _Broken(example, record)
        if record.verdict.fails:
            return record
        self._longest = max(self._longest, record.seconds)
        return None

    def _confirmed(self, example: Any) -> Found:
        """Run the shrunk example once more, with the deadline of the case."""
        assert self._failed_at is not None
        seconds = time.monotonic() - self._failed_at
        again, record = self._run(example, None), self._records[example]
        assert record is not None, "the example that hypothesis found has failed"
        repeats = again.verdict.fails
        return Found(
            example=example,
            record=again if repeats else record,
            shrinking=len(self._records) - self.examples,
            seconds=seconds,
            is_out_of_time=self._is_out_of_time,
            repeats=repeats,
            others=list(self._others),
        )


def report(found: Found, *, examples: int, case: str) -> str:
    """Return the text of a failure: that of the shrunk example, how it was found, and a case to paste.

    ``examples`` had run when the first failed; ``case`` is the source of a case that runs the shrunk example.
    """
    lines = [bounded(found.record.text, MOST_OF_A_RANK).rstrip("\n")]
    if found.record.verdict == Verdict.HARNESS_ERROR:
        return lines[0]
    ending = ", when the time was up" if found.is_out_of_time else ""
    lines.append(
        f"drawn: example {examples} failed first; {found.shrinking} more shrank it in {found.seconds:.0f} s{ending}"
    )
    if not found.repeats:
        lines.append("it passed when it was run again: whether it fails depends on timing")
    lines += [f"on the way: {line}" for line in found.others]
    return "\n".join([*lines, "a case to paste into a file of its own:", "", case, ""])


def _kind(record: MadeRecord) -> tuple[str, str]:
    """The kind of a failure: its verdict, and the beginning of its one line, which names the error."""
    line = gist(record.text) if record.verdict == Verdict.FAIL else ""
    return record.verdict, line.partition(":")[0]
