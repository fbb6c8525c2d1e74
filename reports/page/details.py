"""What a page shows of a case when it is opened, in chunks: a page decodes only the one with that case."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardproof.jsonfiles import encode
from shardproof.reports.page.assets import packed_json
from shardproof.reports.page.table import Table
from shardproof.runfile import CaseRecord, Distance, Explanation, Own, Run, Trace

#: Characters of JSON from which on a new chunk begins: some milliseconds of decoding.
_CHUNK = 1 << 19

_DIGITS = 6  # of a distance
_PLACE = ("stage", "step", "rank", "name", "element")  # where a failure is, and where runs first diverge


@dataclass(frozen=True)
class Chunk:
    """The records of successive cases."""

    first: int  # the position of the first case
    # Compressed JSON. ``lines`` are the lines of all traces, ``traces`` lists of positions in them, and ``records`` an
    # object for each case, with the record of each column by its position.
    packed: str


class _Writer:
    """Writes records whose traces are shared: cases of one function, and implementations, issue the same ones."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.traces: dict[tuple[int, ...], int] = {}

    def record(self, case: CaseRecord) -> dict[str, Any]:
        """Write a record, without empty fields."""
        fields = {
            "verdict": str(case.verdict), "world": case.world, "device": case.device,
            "parameters": dict(case.parameters), "seconds": case.seconds, "seeds": dict(case.seeds),
            "missing": case.missing, "expected": case.expected,
            "failure": None if case.failure is None else {name: vars(case.failure)[name] for name in ("text", *_PLACE)},
            "explanation": None if case.explanation is None else _explanation(case.explanation),
            "peak_bytes": case.peak_bytes, "reproduce": case.reproduction, "losses": dict(case.losses),
            "distances": [_distance(one) for one in case.distances],
            "own": None if case.own is None else _own(case.own),
            "collectives": [[one.ranks, self._trace(one)] for one in case.collectives], "spent": dict(case.spent),
            "attempt": case.attempt if case.attempt > 1 else None, "shortened": case.shortened,
        }  # fmt: skip
        return {name: value for name, value in fields.items() if value not in (None, "", (), [], {})}

    def _trace(self, trace: Trace) -> int:
        numbers = tuple(self.lines.setdefault(line, len(self.lines)) for line in trace.trace)
        return self.traces.setdefault(numbers, len(self.traces))


def _explanation(explanation: Explanation) -> dict[str, Any]:
    """What a second run of a failed case showed, without its text: that of the failure ends with it."""
    first = {} if explanation.first is None else vars(explanation.first)
    place = {name: first[name] for name in _PLACE if first}
    found = vars(explanation) | {"text": "", "first": place} | {k: v for k, v in first.items() if k not in place}
    return {name: value for name, value in found.items() if value not in (None, "", (), [], {})}


def _distance(one: Distance) -> list[Any]:
    ulps = (one.sharded_ulps, one.baseline_ulps, one.allowed_ulps)
    return [one.stage, one.step, one.name, *map(_rounded, ulps)]


def _own(own: Own) -> dict[str, Any]:
    """What a check found of the user's own training, without empty fields."""
    found = vars(own) | {"mesh": dict(own.mesh), "distances": [[*_distance(one), one.module] for one in own.distances]}
    return {name: value for name, value in found.items() if value not in (None, "", (), [], {})}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def chunks(table: Table, runs: Sequence[Run]) -> Iterator[Chunk]:
    """Pack the records of all cases, in the order of the table, with the verdicts of earlier attempts in the runs."""
    earlier = _earlier_verdicts(runs)
    writer, records, size, first = _Writer(), [], 0, 0
    for i, (id_, _) in enumerate(table.cases):
        of_case: dict[str, dict[str, Any]] = {}
        for number, column in enumerate(table.columns):
            if (case := column.records.get(id_)) is not None:
                of_case[str(number)] = writer.record(case)
                if before := earlier.get((column.run, column.implementation, id_)):
                    of_case[str(number)]["earlier"] = before
        records.append(of_case)
        size += len(json.dumps(encode(of_case)))
        if size >= _CHUNK:
            yield _chunk(first, writer, records)
            writer, records, size, first = _Writer(), [], 0, i + 1
    if records:
        yield _chunk(first, writer, records)


def _chunk(first: int, writer: _Writer, records: Sequence[Mapping[str, Any]]) -> Chunk:
    data = {"lines": list(writer.lines), "traces": [list(one) for one in writer.traces], "records": list(records)}
    return Chunk(first, packed_json(data))


def _earlier_verdicts(runs: Sequence[Run]) -> dict[tuple[int, str, str], list[str]]:
    found: dict[tuple[int, str, str], list[str]] = {}
    for number, run in enumerate(runs):
        for case in run.earlier:
            found.setdefault((number, case.implementation, case.id), []).append(str(case.verdict))
    return found
