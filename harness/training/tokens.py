"""Does a token count as much as any other in the loss of a step? (D17)"""

import itertools
from collections.abc import Iterator, Sequence

from shardproof.harness.judging import codes, numerics
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding

_Counted = list[tuple[int, float]]
"""The labels of parts of a step, and the gradient of the loss with respect to that of one of them in each part."""

#: By which tokens the loss of a part of a step is divided, if it is neither all ranks nor all microbatches.
_OWN = "its own tokens"


def check_tokens(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D17: a token counts as much as any other, whichever rank and microbatch it is in."""
    calls = [record.losses.tokens for record in evidence.records]
    for who, whose, parts in _parts(evidence, calls):
        counts, alike = [count for count, _ in parts], [count * weight for count, weight in parts]
        if len(set(counts)) > 1 and _weigh_alike(alike):
            fewest, most = min(counts), max(counts)
            seen = f"the loss of each {who} is divided by {whose}"
            if all(record.losses.are_means for record in evidence.records) and whose == _OWN:
                seen = "seen: cross_entropy divides by its own tokens (reduction='mean')"
            more = f"a token of the {who} with {fewest} counts {most / fewest:.4g} x one of that with {most}"
            lines = (
                f"{', '.join(map(str, counts[:8]))} tokens: {more}",
                f"{seen}: sum, divide by those of all ranks and microbatches,",
                "and multiply by the ranks where gradients are averaged (docs/doctor.md has the lines)",
            )
            yield DoctorFinding(
                (codes.TOKENS,),
                codes.WEIGHTED,
                evidence.step,
                f"each {who} counts alike, whatever its tokens",
                lines,
                True,
            )
            return


def _parts(evidence: Evidence, calls: Sequence[_Counted]) -> Iterator[tuple[str, str, _Counted]]:
    """Yield the parts of a step that may count alike: their noun, the tokens that divide the loss of each, and all."""
    if are_microbatches := _are_microbatches(evidence, calls):
        yield "microbatch", _OWN, list(itertools.chain(*calls))
    yield "rank", _OWN, [(sum(n for n, _ in mine), mine[0][1]) for mine in calls if len({w for _, w in mine}) == 1]
    if are_microbatches and len(calls) > 1:
        yield "microbatch of all ranks", "its tokens on all ranks", _over_ranks(evidence, calls)


def _are_microbatches(evidence: Evidence, calls: Sequence[_Counted]) -> bool:
    """Whether each loss is that of a microbatch.

    Of several losses of one forward each may be divided by labels of its own kind, and of several roots a forward of
    one says nothing of the losses of another. The first of the first step is not seen where user code looks the
    function up before the forward in which watching begins.
    """
    if any(start.has_more for start in evidence.starts):
        return False
    most = [max(one.forwards.count, one.backwards) for one in evidence.after_drops.records]
    return all(len(mine) <= count for mine, count in zip(calls, most, strict=True))


def _over_ranks(evidence: Evidence, calls: Sequence[_Counted]) -> _Counted:
    """Return the tokens of each microbatch on all ranks; none where ranks do not weigh them alike."""
    if len({len(mine) for mine in calls}) > 1:
        return []
    over_ranks = list(zip(*calls, strict=True))
    first = [ranks[0] for ranks in evidence.readers]  # the others of a data-parallel rank read the same tokens
    are_alike = all(_weigh_alike([weight for _, weight in one]) for one in over_ranks)
    return [(sum(one[rank][0] for rank in first), one[0][1]) for one in over_ranks] if are_alike else []


def _weigh_alike(numbers: Sequence[float]) -> bool:
    """Whether numbers are above zero, and equal up to rounding."""
    return bool(numbers) and min(numbers) > 0 and max(numbers) < min(numbers) * (1 + numerics.ALIKE)
