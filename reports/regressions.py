"""Compares two runs: regressions of the later one, improvements, and cases that cannot be compared."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shardproof.alike import without_numbers_and_names
from shardproof.door import BadFile
from shardproof.reports.texts import counted, kind_of
from shardproof.runfile import CaseRecord, Run, Trace, Verdict, public_version

_COLLECTIVE = re.compile(r"(?P<phase>\S+)\s+(?P<kind>\S+)\s+\S+\s+(?P<bytes>\d{1,18}) B\b")


class RegressionKind(StrEnum):
    """A way in which a run is worse than an earlier one."""

    FAILURE = "new failure"
    GRAVER = "graver failure"
    PASSED = "unexpected pass"
    EXCUSED = "became a known failure"
    VANISHED = "vanished"
    SKIPPED = "became skipped"
    BUDGET = "more skips"
    SILENT = "nothing ran"
    COLLECTIVES = "more collectives"
    BYTES = "more bytes"
    MEMORY = "more memory"
    TIME = "slower"

    @property
    def is_failure(self) -> bool:
        """Whether a case failed, so that a command can repeat the failure."""
        return self in (RegressionKind.FAILURE, RegressionKind.GRAVER)


@dataclass(frozen=True)
class Worse:
    """One thing that got worse."""

    kind: RegressionKind
    implementation: str
    case: str  # the id of the case; empty if it concerns the whole implementation
    text: str  # what changed, in one line
    nodeid: str = ""  # the pytest item, for the place of an annotation; may be empty
    reproduce: str = ""  # the command that repeats the case; may be empty
    cause: str = ""  # equal where several cases got worse alike; empty if it stands alone


@dataclass(frozen=True)
class Group:
    """What got worse alike, as by one collective that was added: one thing, or several of one implementation."""

    members: tuple[Worse, ...]  # by kind

    @property
    def first(self) -> Worse:
        """The one that stands for the others."""
        return self.members[0]

    @property
    def also(self) -> tuple[Worse, ...]:
        """The first of each further kind, as where a collective that was added sends bytes."""
        firsts = {one.kind: one for one in reversed(self.members)}
        return tuple(one for kind, one in sorted(firsts.items(), key=_position) if kind is not self.first.kind)

    @property
    def cases(self) -> tuple[str, ...]:
        """The ids of the cases, each once."""
        return tuple(dict.fromkeys(one.case for one in self.members))


def grouped(worse: Iterable[Worse]) -> tuple[Group, ...]:
    """Group what got worse alike, in the order of the first of each group."""
    groups: dict[object, list[Worse]] = {}
    for one in worse:
        groups.setdefault((one.implementation, one.cause) if one.cause else id(one), []).append(one)
    return tuple(Group(tuple(members)) for members in groups.values())


def _position(found: tuple[RegressionKind, Worse]) -> int:
    return list(RegressionKind).index(found[0])


@dataclass(frozen=True)
class Accepted:
    """A regression that is intended."""

    worse: Worse
    reason: str  # why that is intended


@dataclass(frozen=True)
class RunComparison:
    """The result of comparing two runs."""

    worse: tuple[Worse, ...]  # regressions by kind, without the accepted ones
    better: tuple[str, ...]  # one line for each case that failed before and passes now
    # One line for each quantity that a file did not measure, or that only the later one has.
    not_compared: tuple[str, ...]
    compared: int  # the number of cases that ran in both
    expected: int = 0  # of these, the cases that are expected to fail in both: nothing that they check was compared
    changed: tuple[str, ...] = ()  # one line for each of those that fails with another text than before
    effort: str = "full"  # of HEAD
    accepted: tuple[Accepted, ...] = ()  # intended regressions by kind
    runs: tuple[str, ...] = ()  # one line about each of the two runs, and one if their suites differ
    verbose: bool = False  # whether each regression is a group of its own

    @property
    def groups(self) -> tuple[Group, ...]:
        """The regressions, those that are alike together."""
        return tuple(Group((one,)) for one in self.worse) if self.verbose else grouped(self.worse)


ALLOWED = ("device", "effort", "torch")
"""What two runs may be allowed to differ in."""


def check_comparable(base: Run, head: Run, *, allowed: Iterable[str] = ()) -> None:
    """Check that two runs ran the same cases on the same implementations under the same conditions.

    ``allowed`` names the conditions that may differ, out of :data:`ALLOWED`.

    Raises:
        BadFile: a run is incomplete, the two are one run or have one in common, or they differ in a condition that
            is not allowed to differ.
    """
    for name, run in (("BASE", base), ("HEAD", head)):
        if run.incomplete:
            raise BadFile(f"{name} is incomplete ({run.incomplete}); run it again to its end")
        if not run.cases:
            raise BadFile(f"{name} has no case")
    ours, theirs = _started(base), _started(head)
    if shared := [started for run_id, started in ours.items() if run_id in theirs]:
        what = "are the same run" if len(ours) == len(theirs) == 1 else "have a run in common"
        raise BadFile(f"BASE and HEAD {what}, started {shared[0]}; no run is compared with itself")
    for name, (one, other) in _conditions(base, head).items():
        if one != other and name not in allowed:
            raise BadFile(f"BASE has {name} {one}, HEAD {other}; --allow {name} compares them anyway")


def _started(run: Run) -> dict[str, str]:
    """When a run, or each run of which it was merged, was started, by their ids."""
    parts = {part.run_id: part.environment.started for part in run.merged}
    return parts or {run.run_id: run.environment.started}


def _conditions(base: Run, head: Run) -> dict[str, tuple[str, str]]:
    """The conditions that decide which cases run and how: ``(of base, of head)`` by the names of :data:`ALLOWED`."""
    return {
        "device": (base.environment.device, head.environment.device),
        "torch": (public_version(base.environment.torch), public_version(head.environment.torch)),
        # Files without an effort are of versions that ran everything.
        "effort": (base.effort.name if base.effort else "full", head.effort.name if head.effort else "full"),
    }


def compare(base: Run, head: Run, *, more_skips: int = 0, time_ratio: float | None = None) -> RunComparison:
    """Compare two runs of comparable conditions (:func:`check_comparable`) case by case.

    Args:
        more_skips: how many more ``unsupported`` and ``unmet`` cases an implementation may have.
        time_ratio: how many times as long the cases that ran in both may take, for each implementation; None compares
            no times.
    """
    before, after = _by_key(base), _by_key(head)
    both = [
        key for key in before if key in after and not before[key].verdict.is_skip and not after[key].verdict.is_skip
    ]
    worse = [
        *_verdicts(before, after, head),
        *_vanished(before, after, head),
        *_budget(base, head, more_skips),
        *_silent(base, head),
    ]
    not_compared = [*_new(before, after), *_other_files(before, after)]
    expected = [(before[key], after[key]) for key in both if _are_expected(before[key], after[key])]
    pairs = [(before[key], after[key]) for key in both]
    unmeasured: Counter[tuple[str, str]] = Counter()
    for then, now in pairs:
        if reason := _fails(then, now):
            unmeasured["collectives, bytes and peak memory", reason] += 1
            continue
        for what, why_not, grown in _MEASURED:
            if reason := why_not(then, now):
                unmeasured[what, reason] += 1
            else:
                worse += grown(then, now)
    for (what, reason), count in sorted(unmeasured.items()):
        not_compared.append(f"{what} of {counted(count, 'case')}: {reason}")
    if time_ratio is None:
        not_compared.append("time: no --time-ratio was given")
    else:
        worse += _times(pairs, time_ratio)
    order = list(RegressionKind)
    return RunComparison(
        worse=tuple(sorted(worse, key=lambda one: order.index(one.kind))),
        better=tuple(_better(before, after)),
        not_compared=tuple(not_compared),
        compared=len(both),
        expected=len(expected),
        changed=tuple(_changed(then, now) for then, now in expected if then.why != now.why),
        effort=head.effort.name if head.effort else "full",
    )


_Key = tuple[str, str]
_Cases = Mapping[_Key, CaseRecord]


def _by_key(run: Run) -> dict[_Key, CaseRecord]:
    return {(case.implementation, case.id): case for case in run.cases}


def _worse(kind: RegressionKind, case: CaseRecord, text: str, *, cause: str = "") -> Worse:
    """Say how a case got worse; the cause is, unless it is given, the text but for its numbers and names."""
    cause = cause or f"{kind}: {without_numbers_and_names(text)}"
    return Worse(kind, case.implementation, case.id, text, case.nodeid, case.reproduction, cause)


def _failed(kind: RegressionKind, case: CaseRecord, was: str) -> Worse:
    cause = ": ".join((kind, was, *kind_of(case)))
    return _worse(kind, case, f"{case.verdict}, {was}: {case.why}", cause=cause)


def _verdicts(before: _Cases, after: _Cases, head: Run) -> Iterator[Worse]:
    """Cases whose verdict is worse than before; a case that only the later run has must not fail either."""
    left_out = {(item.implementation, item.id): item.reason for item in head.left_out}
    for key, now in after.items():
        then = before.get(key)
        if now.verdict.fails and (then is None or not then.verdict.fails):
            was = f"was {then.verdict}" if then else "is new"
            yield _failed(
                RegressionKind.PASSED if now.verdict is Verdict.UNEXPECTED_PASS else RegressionKind.FAILURE, now, was
            )
        elif now.verdict.fails and then and _gravity(now.verdict) < _gravity(then.verdict):
            yield _failed(RegressionKind.GRAVER, now, f"was {then.verdict}")
        elif then and then.verdict is Verdict.PASS and now.verdict is Verdict.EXPECTED_FAIL:
            yield _worse(
                RegressionKind.EXCUSED, now, f"passed before; {now.expected or 'the run file gives no reason'}"
            )
        elif then and now.verdict.is_skip and not then.verdict.is_skip:
            lacks = ", ".join(now.missing) or "the run file does not name it"
            yield _worse(RegressionKind.SKIPPED, now, f"{now.verdict}, was {then.verdict}; missing: {lacks}")
    for key, then in before.items():
        if key in left_out and not then.verdict.is_skip:
            yield _worse(RegressionKind.SKIPPED, then, f"skipped by pytest, was {then.verdict}: {left_out[key]}")


def _gravity(verdict: Verdict) -> int:
    return list(Verdict).index(verdict)


def _vanished(before: _Cases, after: _Cases, head: Run) -> Iterator[Worse]:
    left_out = {(item.implementation, item.id) for item in head.left_out}
    present = {name for name, _ in after}
    for key, then in before.items():
        if key not in after and key not in left_out and key[0] in present:
            yield _worse(RegressionKind.VANISHED, then, f"was {then.verdict}, and is not in HEAD")


def _budget(base: Run, head: Run, more_skips: int) -> Iterator[Worse]:
    """Implementations with more skips than before: a new case may be one for hardware that nobody has."""
    then, now = _skips(base.cases), _skips(head.cases)
    for name in head.implementations:
        if name in base.implementations and (more := now[name] - then[name]) > more_skips:
            budget = f", --more-skips is {more_skips}" if more_skips else ""
            skipped = counted(now[name], "case")
            text = f"unsupported or unmet: {skipped}, {then[name]} before{budget}; --more-skips {more} allows it"
            yield Worse(RegressionKind.BUDGET, name, "", text)


def _skips(cases: Iterable[CaseRecord]) -> Counter[str]:
    return Counter(case.implementation for case in cases if case.verdict.is_skip)


def _silent(base: Run, head: Run) -> Iterator[Worse]:
    """Implementations of which no case ran: an adapter that declares nothing fails nothing."""
    ran = {case.implementation for case in head.cases if not case.verdict.is_skip}
    for name in dict.fromkeys([*base.implementations, *head.implementations]):
        if name not in ran:
            why = "all of its cases are skipped" if name in head.implementations else "HEAD does not have it"
            yield Worse(RegressionKind.SILENT, name, "", f"no case ran: {why}")


def _new(before: _Cases, after: _Cases) -> Iterator[str]:
    known = {name for name, _ in before}
    counts = Counter(name for name, id_ in after if (name, id_) not in before)
    for name, count in sorted(counts.items()):
        new = f"{name}: not in BASE: {counted(count, 'case')}"
        yield new if name in known else f"{new}; BASE does not have it at all"


def _other_files(before: _Cases, after: _Cases) -> Iterator[str]:
    """Files of which only one run has cases: the runs had other arguments."""
    names = [{(name, id_.partition("::")[0]) for name, id_ in cases if "::" in id_} for cases in (before, after)]
    for run, own, others in (("HEAD", names[1], names[0]), ("BASE", names[0], names[1])):
        files = sorted({file for name, file in others - own if any(name == one for one, _ in own)})
        if files:
            yield f"{run} ran nothing of {', '.join(files)}: give both runs the same arguments"


def _are_expected(then: CaseRecord, now: CaseRecord) -> bool:
    return then.verdict is now.verdict is Verdict.EXPECTED_FAIL


def _changed(then: CaseRecord, now: CaseRecord) -> str:
    return f"{now.implementation} {now.id}: {now.why}; was: {then.why}"


def _better(before: _Cases, after: _Cases) -> Iterator[str]:
    for key, then in before.items():
        now = after.get(key)
        if now and now.verdict is Verdict.PASS and (then.verdict.fails or then.verdict is Verdict.EXPECTED_FAIL):
            yield f"{key[0]} {key[1]} passes, was {then.verdict}"


def _unmeasured(then: CaseRecord, now: CaseRecord) -> str:
    """Why the collectives of a case cannot be compared; empty if they can."""
    for name, case in (("BASE", then), ("HEAD", now)):
        if "collectives" in case.shortened:
            return f"too many for the record in {name}"
    if bool(then.collectives) != bool(now.collectives):
        return f"{'HEAD' if then.collectives else 'BASE'} did not record them"
    return ""


def _fails(then: CaseRecord, now: CaseRecord) -> str:
    """Why the measurements of a case cannot be compared: it may have ended early. Empty if it passed in both."""
    failed = [name for name, case in (("BASE", then), ("HEAD", now)) if case.verdict is not Verdict.PASS]
    return f"they do not pass in {failed[0]}" if failed else ""


def _without_memory(then: CaseRecord, now: CaseRecord) -> str:
    """Why the peak memory of a case cannot be compared; empty if it can."""
    if then.peak_bytes and now.peak_bytes:
        return ""
    if not then.peak_bytes and not now.peak_bytes:
        return "neither run measured it (docs/gate.md)"
    return f"{'HEAD' if then.peak_bytes else 'BASE'} did not measure it"


def _memory(then: CaseRecord, now: CaseRecord) -> Iterator[Worse]:
    """Whether a case holds more memory at a time than before, on the rank where it grew most."""
    grown = [
        (after - before, -rank, before, after)
        for rank, (before, after) in enumerate(zip(then.peak_bytes, now.peak_bytes, strict=False))
        if after > before
    ]
    if grown:
        _, rank, before, after = max(grown)
        text = f"rank {-rank}{_others(grown)}: {after} bytes are held at a time, {before} before"
        yield _worse(RegressionKind.MEMORY, now, text, cause=RegressionKind.MEMORY)


def _others(grown: Sequence[object]) -> str:
    return f" and {counted(len(grown) - 1, 'other rank')}" if len(grown) > 1 else ""


_Sort = tuple[str, str]  # kind and phase of a collective


def _sums(traces: Sequence[Trace]) -> dict[int, dict[RegressionKind, Counter[_Sort]]]:
    """The number and the bytes of the collectives of each rank, by their sort."""
    found: dict[int, dict[RegressionKind, Counter[_Sort]]] = {}
    for trace in traces:
        number: Counter[_Sort] = Counter()
        size: Counter[_Sort] = Counter()
        for line in trace.trace:
            if match := _COLLECTIVE.match(line):
                sort = match["kind"], match["phase"]
                number[sort] += 1
                size[sort] += int(match["bytes"])
        found |= {rank: {RegressionKind.COLLECTIVES: number, RegressionKind.BYTES: size} for rank in trace.ranks}
    return found


def _by_name(sums: Counter[_Sort]) -> Counter[str]:
    """Sums by the kind of the collective alone."""
    found: Counter[str] = Counter()
    for (name, _), number in sums.items():
        found[name] += number
    return found


def _grown(before: Counter[_Sort], after: Counter[_Sort]) -> list[_Sort]:
    return sorted(sort for sort in after if after[sort] > before[sort])


def _traffic(then: CaseRecord, now: CaseRecord) -> Iterator[Worse]:
    """The collectives of which a case sends more than before, on the rank with the largest increase."""
    before, after = _sums(then.collectives), _sums(now.collectives)
    for kind in (RegressionKind.COLLECTIVES, RegressionKind.BYTES):
        grown = []
        for rank in sorted(before.keys() & after.keys()):
            one, other = _by_name(before[rank][kind]), _by_name(after[rank][kind])
            if (more := other.total() - one.total()) > 0:
                parts = [f"{other[name]} {name}, {one[name]} before" for name in other if other[name] > one[name]]
                grown.append((more, -rank, parts))
        if grown:
            _, rank, parts = max(grown)
            # Collectives that were added send bytes: the cause of both is what was added.
            causes = (_grown(before[-rank][one], after[-rank][one]) for one in (RegressionKind.COLLECTIVES, kind))
            sorts = next(filter(None, causes), [])
            unit = " (bytes)" if kind is RegressionKind.BYTES else ""
            text = f"rank {-rank}{_others(grown)}{unit}: {'; '.join(parts)}"
            yield _worse(kind, now, text, cause=f"collectives: {sorts}")


#: The measurements of a case that passes in both runs: name, why they cannot be compared, and how they got worse.
_MEASURED: tuple[
    tuple[str, Callable[[CaseRecord, CaseRecord], str], Callable[[CaseRecord, CaseRecord], Iterator[Worse]]], ...
] = (("collectives and bytes", _unmeasured, _traffic), ("peak memory", _without_memory, _memory))


def _times(pairs: Sequence[tuple[CaseRecord, CaseRecord]], ratio: float) -> Iterator[Worse]:
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    for then, now in pairs:
        # Counter is typed for whole numbers; milliseconds lose nothing that matters here.
        before[then.implementation] += round(then.seconds * 1000)
        after[now.implementation] += round(now.seconds * 1000)
    for name in sorted(before):
        if after[name] > ratio * before[name]:
            took = f"{after[name] / 1000:.1f} s instead of {before[name] / 1000:.1f} s"
            count = sum(then.implementation == name for then, _ in pairs)
            yield Worse(
                RegressionKind.TIME, name, "", f"{took} for {counted(count, 'case')}; the ratio allowed is {ratio:g}"
            )
