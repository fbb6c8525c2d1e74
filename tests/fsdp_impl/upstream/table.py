"""The table by file: what the tests say of the reference and of torch, and the reasons of those that say nothing."""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence

from tests.fsdp_impl.upstream import private
from tests.fsdp_impl.upstream.running import Outcome, Ran

# A test that ends so has failed; a process that crashed or hung in it has too.
_FAILED = ("fail", "crash", "hang")
# Of torch's FSDP1, whatever a test checks.
_REFUSES = "FSDP needs a non-CPU accelerator device"
_DEVICES = re.compile(r"[Nn]eed at least (\d+)")
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Success|Exit|Timeout)\b.*", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Compared:
    """A test with both implementations.

    Args:
        test: ``Class.method``.
        kind: ``agree`` (both pass), ``better`` or ``worse`` (of the reference), or ``undecided``.
        reason: Why it is undecided; else the error of the implementation that fails.
        private: The private names of torch's FSDP that the test uses.
    """

    test: str
    kind: str
    reason: str
    private: frozenset[str]


def compare(reference: Ran, theirs: Ran, names: Mapping[str, frozenset[str]]) -> list[Compared]:
    """Compare the outcomes of a file's tests; ``names`` are the private names by test, as the file writes them."""
    compared = []
    for test in sorted({*reference.outcomes, *theirs.outcomes}):
        ours, other = (ran.outcomes.get(test, Outcome("not run", "not run")) for ran in (reference, theirs))
        kind, reason = _judge(ours, other)
        written = private.written_name(test, names)
        compared.append(Compared(test, kind, reason, names[written] if written else frozenset()))
    return compared


def _judge(ours: Outcome, theirs: Outcome) -> tuple[str, str]:
    if ours.outcome == theirs.outcome == "pass":
        return "agree", ""
    if theirs.outcome == "fail" and _REFUSES in theirs.text:
        return "undecided", "torch refuses a CPU"
    if ours.outcome == "pass" and theirs.outcome in _FAILED:
        return "better", error_of(theirs)
    if theirs.outcome == "pass" and ours.outcome in _FAILED:
        return "worse", error_of(ours)
    if ours.outcome in _FAILED and theirs.outcome in _FAILED:
        return "undecided", "torch fails it too"
    unlike = theirs if ours.outcome in ("pass", *_FAILED) else ours
    needed = _DEVICES.search(unlike.text)
    if unlike.outcome == "skip" and needed:
        return "undecided", f"needs {needed[1]} devices"
    if unlike.outcome == "skip" and " lacks torch." in unlike.text:
        return "undecided", "torch lacks a name"
    return "undecided", "skips itself" if unlike.outcome == "skip" else unlike.text.strip().split("\n")[-1]


def error_of(outcome: Outcome) -> str:
    """Return the line that says how a test failed: the last error of a rank, or the end of a process."""
    if outcome.outcome in ("crash", "hang"):
        return outcome.outcome
    lines = _ERROR.findall(outcome.text) or [outcome.text.strip().split("\n")[-1]]
    return str(lines[-1])[:160]


def printed(files: Mapping[str, tuple[list[Compared], str]]) -> str:
    """Return the table by file, then the tests that differ, then the reasons of the undecided ones.

    Args:
        files: By file, its compared tests, and the error with which it could not be imported.
    """
    heads = ("file", "tests", "decided", "agree", "better", "worse", "of these private", "undecided, by reason")
    rows = [_row(file, tests, unusable) for file, (tests, unusable) in files.items()]
    everything = [one for tests, _ in files.values() for one in tests]
    rows.append(_row("all", everything, ""))
    lines = [f"| {' | '.join(heads)} |", "|---" + "|--:" * 6 + "|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    for kind in ("worse", "better"):
        lines += ["", f"The reference is {kind}:", ""]
        for file, (tests, _) in files.items():
            for one in tests:
                if one.kind == kind:
                    names = f" (private: {', '.join(sorted(one.private))})" if one.private else ""
                    lines.append(f"- `{file}` `{one.test}`: {one.reason}{names}")
    return "\n".join(lines)


def _row(file: str, tests: Sequence[Compared], unusable: str) -> list[str]:
    kinds = collections.Counter(one.kind for one in tests)
    decided = len(tests) - kinds["undecided"]
    closed = sum(one.kind == "worse" and bool(one.private) for one in tests)
    reasons = collections.Counter(one.reason for one in tests if one.kind == "undecided")
    said = "; ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    counts = (len(tests), decided, kinds["agree"], kinds["better"], kinds["worse"], closed)
    return [file, *map(str, counts), f"not usable: {unusable}" if unusable else said]
