"""Runs a failed case once more with capture on, and says where its runs first diverge: ``--explain``."""

import dataclasses
from collections.abc import Iterator, Sequence

import pytest

from shardproof import runfile
from shardproof.harness.collectives.differences import between_ranks, between_texts
from shardproof.harness.judging.explanation import Explanation, earliest
from shardproof.harness.judging.texts import MOST_CHARACTERS, bounded, gist, ranks_of
from shardproof.harness.plugin import cases
from shardproof.harness.plugin.records import MadeRecord
from shardproof.harness.plugin.selection import Selection
from shardproof.harness.worlds.jobs import Result
from shardproof.harness.worlds.pool import Pool
from shardproof.runfile import Verdict

#: What a second run with capture on can say more of.
_EXPLAINED = (Verdict.FAIL, Verdict.CRASH, Verdict.HANG)

#: The most characters that an explanation adds to the text of a failure.
_MOST_OF_AN_EXPLANATION = MOST_CHARACTERS // 2

#: The most reasons why tensors were not compared that a text lists.
_MOST_REASONS = 8


def explain(
    item: pytest.Function, pool: Pool, selection: Selection, made: MadeRecord, *, numbers: Iterator[int]
) -> None:
    """Run a case that has failed once more with capture on, and add what that shows to its record.

    The verdict stays that of the first run. Nothing happens to a record of another verdict.
    """
    if made.verdict not in _EXPLAINED:
        return
    again = cases.run_again(item, pool, selection, made, number=next(numbers))
    found = _found(made, again)
    text = bounded("\n".join(_rendered(made, again, found)), _MOST_OF_AN_EXPLANATION)
    made.explanation = dataclasses.replace(found, text=text)
    made.text = f"{bounded(made.text.rstrip(), MOST_CHARACTERS - len(text))}\n{text}"


def _found(made: MadeRecord, again: MadeRecord) -> runfile.Explanation:
    """Return what the run file stores of an explanation, without its text."""
    seen = [result.explanation for result in again.results if result.explanation is not None]
    first = earliest([one.first for one in seen if one.first is not None])
    shown = next((one for one in seen if one.first is first), seen[0] if seen else Explanation())
    return runfile.Explanation(
        again=again.verdict,
        alike=_is_alike(made, again),
        first=None if first is None else first.as_record(),
        compared=shown.compared,
        unseen=shown.unseen,
        stopped=next((one.stopped for one in seen if one.stopped), ""),
        collectives=_collectives(made, again, seen, shown),
        text="",
    )


def _is_alike(made: MadeRecord, again: MadeRecord) -> bool:
    """Whether both runs have the same verdict, the same error, and losses and distances of the same bits."""
    one, two = made.as_json(), again.as_json()
    same = all(one[name] == two[name] for name in ("verdict", "losses", "distances"))
    return same and gist(made.text) == gist(again.text)


def _rendered(made: MadeRecord, again: MadeRecord, found: runfile.Explanation) -> list[str]:
    lines = [_what_happened(made, again, is_alike=found.alike)]
    seen = [result.explanation for result in again.results if result.explanation is not None]
    places = [one.first for one in seen if one.first is not None]
    if (first := earliest(places)) is not None:
        others = [place for place in places if place is not first]
        lines += first.render(others, made.world)
        lines += [f"  tensors that matched before this one: {found.compared}"]
    elif seen and again.verdict != Verdict.PASS:
        lines += [f"no divergence in the {found.compared} tensors that were compared"]
    if found.stopped:
        lines += [f"a step stopped after the {found.stopped}"]
    lines += [f"not seen: {reason}" for reason in found.unseen[:_MOST_REASONS]]
    if errors := {one.error: None for one in seen if one.error}:
        lines += [f"the explanation is incomplete: {error}" for error in errors]
    return [*lines, *found.collectives]


def _what_happened(made: MadeRecord, again: MadeRecord, *, is_alike: bool) -> str:
    begin = "explained: run again with capture on"
    if again.verdict == Verdict.PASS:
        return f"{begin}: it passed, so the failure is not steady (flaky)"
    if is_alike:
        return f"{begin}: same failure, bit for bit"
    if again.verdict != made.verdict:
        return f"{begin}: another verdict, {again.verdict}: {gist(again.text)}"
    return f"{begin}: it failed in another way: {gist(again.text)}"


def _collectives(made: MadeRecord, again: MadeRecord, seen: Sequence[Explanation], shown: Explanation) -> list[str]:
    """Mark what is missing and what is extra: against what the case expects, else between ranks and between units."""
    if expected := next((one.expected for one in seen if one.expected), []):
        return expected
    results = again.results
    if texts := _expected_texts(results):
        return texts
    traces = {rank: item.trace for item in again.collectives for rank in item.ranks}
    compares = all(result.observations.compares_collectives for result in results)
    if compares and (lines := between_ranks(traces)):
        return lines
    lines = []
    if traces and compares:
        who = "every rank" if len(traces) == made.world else ranks_of(traces)
        counts = sorted({len(trace) for trace in traces.values()})
        lines = [f"collectives: {who} issued the same on each group ({', '.join(map(str, counts))} in all)"]
    if shown.units:
        lines += ["collectives of the unit of that parameter, against those of other units:", *shown.units]
    return lines


def _expected_texts(results: Sequence[Result]) -> list[str]:
    for result in results:
        for item in result.observations.expected_texts:
            if " ranks " in item.expected and (lines := between_texts(*map(_lines, (item.text, item.expected)))):
                return lines
    return []


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() not in ("", "\\")]
