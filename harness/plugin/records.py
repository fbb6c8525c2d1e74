"""The record of one case: the verdict from all ranks, the reason for it and the measurements, for the run file."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from shardproof.alike import ALIKE, LEAK, without_rank
from shardproof.harness.collectives.trace import rendered_difference
from shardproof.harness.judging.finding import Location, Stage
from shardproof.harness.judging.observations import Measured, keep_worst
from shardproof.harness.judging.texts import bounded, frames_of, gist, ranks_of
from shardproof.harness.worlds import flight_recorder
from shardproof.harness.worlds.jobs import Result
from shardproof.harness.worlds.watchdog import ADVICE, ends_of_stacks
from shardproof.harness.worlds.world import Outcome
from shardproof.jsonfiles import ASIDE, decode, encode
from shardproof.runfile import CaseRecord, Distance, Failure, Own, Trace, Verdict

#: Bytes of JSON that a record may have. The largest of the published runs have 61 kB, nearly all of it traces.
MOST_BYTES = 1 << 18

#: Characters of one string in the parameters of a case, such as the representation of an object.
MOST_OF_A_PARAMETER = 1000

#: Fields that are emptied in this order until a record is small enough; a verdict does not depend on them.
_DISPENSABLE = ("collectives", "distances", "losses", "parameters", "missing")


def bounded_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of at most ``MOST_BYTES``.

    Args:
        record: a record as JSON values.

    Returns:
        The record; if it was too large, with empty fields, which "shortened" names.
    """
    shortened: list[str] = []
    for name in _DISPENSABLE:
        if len(json.dumps(record)) <= MOST_BYTES:
            break
        record = record | {name: type(record[name])(), "shortened": [*shortened, name]}
        shortened.append(name)
    return record


#: What a rank's error contains if another rank's process ended: gloo's words for it, and NCCL's.
_LOST_CONNECTION = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe",
    "remote process exited or there was a network error",
)  # fmt: skip


@dataclasses.dataclass(kw_only=True)
class MadeRecord(CaseRecord):
    """The record of a case while it is made; only what :class:`CaseRecord` has gets into the run file.

    Attributes:
        text: the explanation of a verdict other than a pass or a skip.
        location: where two runs diverge, or the call of the training that raised, if that is the failure.
        failed_rank: the rank to blame where no location is known.
        outputs: what each rank printed; attached to pytest's report.
        results: what each rank returned with capture on.
        earlier: the record of an earlier attempt of a torchrun job, as JSON values, which this one repeats.
    """

    text: str = dataclasses.field(default="", metadata=ASIDE)
    location: Location | None = dataclasses.field(default=None, metadata=ASIDE)
    failed_rank: int | None = dataclasses.field(default=None, metadata=ASIDE)
    outputs: Sequence[str] = dataclasses.field(default=(), metadata=ASIDE)
    results: Sequence[Result] = dataclasses.field(default=(), metadata=ASIDE)
    earlier: dict[str, Any] | None = dataclasses.field(default=None, metadata=ASIDE)

    @classmethod
    def repeated(cls, earlier: dict[str, Any]) -> "MadeRecord":
        """Return the record that an earlier attempt of a torchrun job has written, as JSON values."""
        made = decode(cls, earlier)
        made.text, made.earlier = made.failure.text if made.failure is not None else "", earlier
        return made

    def take(self, outcome: Outcome) -> None:
        """Fill in the verdict, its explanation and the measurements from the results of all ranks."""
        results = outcome.results
        self.seconds, self.outputs, self.hosts = outcome.seconds, outcome.outputs, outcome.hosts
        for skip in (Verdict.UNSUPPORTED, Verdict.UNMET):
            if missing := [result.text for result in results if result.verdict == skip]:
                # A name that torch lacks may be used by one rank alone, for which the others then wait in vain.
                self.verdict, self.missing = skip, missing[:1]
                return
        cause = _cause(results)
        self.verdict = combine(Verdict(result.verdict) for result in results)
        if self.verdict != Verdict.PASS:
            self.location, self.failed_rank = cause.location, cause.rank
            if self.verdict == Verdict.HANG and outcome.diagnosis is not None:
                self.location, self.failed_rank = None, outcome.diagnosis.rank
            lines = [_text_of(results, cause, suspect=self.failed_rank)]
            if self.hosts:
                lines.append(f"hosts: {_placed(self.hosts)}")
            if self.verdict == Verdict.HANG and outcome.diagnosis is not None:
                recorded = flight_recorder.summary(outcome.dumps)
                lines = [outcome.diagnosis.text, *outcome.collectives, *recorded, *lines]
            elif self.verdict == Verdict.CRASH or ADVICE in outcome.collectives:
                lines += outcome.collectives
            self.text = bounded("\n".join(line.rstrip("\n") for line in lines))
        elif leaks := dict.fromkeys(line for result in results for line in result.left_behind):
            ranks = {line: ranks_of(result.rank for result in results if line in result.left_behind) for line in leaks}
            listed = "; ".join(f"{line} (on {ranks[line]})" for line in leaks)
            self.fail_if(f"{LEAK}{listed}\nall else that the case compares is right")
        elif difference := _different_collectives(results):
            self.fail_if(f"collectives differ between ranks: {difference}")
            self.location = Location(stage=Stage.COLLECTIVES)
        self.losses = results[0].observations.losses
        self.own = decode(Own, own) if (own := results[0].observations.own) is not None else None
        self.distances = _worst(results)
        self.collectives = _shared_traces(results)
        self.spent = _mean_spent(results)
        peaks = [result.observations.peak_bytes for result in results]
        self.peak_bytes = [peak for peak in peaks if peak is not None] if None not in peaks else []

    def fail_if(self, text: str | None) -> None:
        """Turn a pass into a failure if there is a reason.

        Args:
            text: the reason; without one nothing changes.
        """
        if text:
            self.verdict, self.text = Verdict.FAIL, bounded(text)

    @property
    def is_left_over(self) -> bool:
        """Whether the case failed only because of the state that it left behind."""
        return self.text.startswith(LEAK)

    def as_json(self) -> dict[str, Any]:
        """Return the record as plain JSON values of bounded size; non-finite numbers become strings such as "inf"."""
        if self.earlier is not None:
            return self.earlier
        self.failure = self._failure() if self.text else None
        record = encode(self)
        for name, value in record["parameters"].items():
            if isinstance(value, str):
                record["parameters"][name] = bounded(value, MOST_OF_A_PARAMETER)
        return bounded_record(record)

    def _failure(self) -> Failure:
        place = {"rank": self.failed_rank} if self.location is None else self.location.as_record()
        rank = place["rank"]
        return Failure(**place, text=self.text, host=self.hosts[rank] if self.hosts and rank is not None else "")


def combine(verdicts: Iterable[Verdict]) -> Verdict:
    """Combine the verdicts of all ranks to the verdict of the case.

    A skip on some ranks only is a failure, because the ranks did not run the same case.

    Args:
        verdicts: the verdict of each rank, in any order.

    Returns:
        The most severe verdict; ``FAIL`` if that is a skip and any rank has a different verdict.

    Raises:
        ValueError: there are no verdicts.
    """
    found = set(verdicts)
    if not found:
        raise ValueError("no rank has a verdict")
    worst = min(found, key=list(Verdict).index)
    return Verdict.FAIL if worst.is_skip and len(found) > 1 else worst


def _cause(results: Sequence[Result]) -> Result:
    """Return the result of the rank to blame: one that failed by itself before one that only waited for it."""
    order = [Verdict.HARNESS_ERROR, Verdict.CRASH, Verdict.FAIL, Verdict.HANG, Verdict.PASS]
    agreed = next((result for result in results if result.agreed), None)
    return agreed or min(results, key=lambda result: order.index(Verdict(result.verdict)))


def _text_of(results: Sequence[Result], cause: Result, *, suspect: int | None) -> str:
    """Render the texts of all ranks, that of the cause first, and what several ranks share only once.

    Of the ranks that did not answer only the suspect's stacks are shown whole.
    """
    if cause.agreed:
        return cause.text
    lost = [result.rank for result in results if cause.verdict == Verdict.CRASH and _lost_connection(result)]
    alike: dict[str, list[Result]] = {without_rank(cause.text): []}
    for result in results:
        if result.text and result.rank not in lost:
            alike.setdefault(without_rank(result.text), []).append(result)
    parts = [_part(same, cause.text, len(results), suspect) for same in alike.values()]
    if lost:
        parts.insert(1, f"{ranks_of(lost)} lost the connection to it")
    return "\n".join(parts)


def _placed(hosts: Sequence[str]) -> str:
    """Name the ranks of each host."""
    places: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        places.setdefault(host, []).append(rank)
    return "; ".join(f"{ranks_of(ranks)} on {host}" for host, ranks in places.items())


def _part(same: Sequence[Result], cause: str, size: int, suspect: int | None) -> str:
    """Render the text of ranks that failed alike."""
    who = "every rank" if len(same) == size else ranks_of(result.rank for result in same)
    text = same[0].text.rstrip("\n")
    if text != cause.rstrip("\n") and (frames := frames_of(text)) and frames == frames_of(cause):
        return f"{who} of {size}, at the same place: {gist(text)}"
    if same[0].verdict == Verdict.HANG and suspect not in [result.rank for result in same]:
        text = ends_of_stacks(text)
    differ = any(result.text != same[0].text for result in same)
    return f"{who} of {size}{ALIKE if differ else ''}:\n{text}"


def _lost_connection(result: Result) -> bool:
    """Whether a rank failed only because the process of another one ended."""
    return result.verdict == Verdict.FAIL and any(words in gist(result.text) for words in _LOST_CONNECTION)


def _worst(results: Sequence[Result]) -> list[Distance]:
    worst: dict[tuple[int, Stage], Measured] = {}
    for result in results:
        keep_worst(worst, result.observations.distances.values())
    return [Distance(**item.as_record()) for item in worst.values()]


def _mean_spent(results: Sequence[Result]) -> dict[str, float]:
    spent = [result.observations.spent for result in results]
    names = sorted({name for one in spent for name in one})
    return {name: round(sum(one.get(name, 0.0) for one in spent) / len(spent), 4) for name in names}


def _different_collectives(results: Sequence[Result]) -> str | None:
    """Compare what the members of each group issued on it over the whole case, also in runs that no pair checked."""
    if not all(result.observations.compares_collectives for result in results):
        return None
    return rendered_difference({result.rank: result.observations.trace for result in results})


def _shared_traces(results: Sequence[Result]) -> list[Trace]:
    """Each distinct trace once, with the ranks that issued it."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for result in results:
        if lines := tuple(" ".join(line.split()) for line in result.observations.trace):
            ranks.setdefault(lines, []).append(result.rank)
    return [Trace(ranks=issued, trace=lines) for lines, issued in ranks.items()]
