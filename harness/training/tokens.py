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
    for who, whose, parts in _counted_apart(evidence, calls):
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


def _counted_apart(evidence: Evidence, calls: Sequence[_Counted]) -> Iterator[tuple[str, str, _Counted]]:
    """Yield the parts of a step whose tokens a loss may be divided by: their noun, by what it would be, and each.

    Of several losses of one forward each may be divided by labels of its own kind, so that no part is a microbatch. The
    first loss is not seen where user code looks the function up before the forward in which watching begins.
    """
    kept = evidence.after_drops.records
    are_microbatches = all(
        len(mine) <= max(one.forwards.count, one.backwards) for mine, one in zip(calls, kept, strict=True)
    )
    if are_microbatches:
        yield "microbatch", _OWN, list(itertools.chain(*calls))
    yield "rank", _OWN, [(sum(n for n, _ in mine), mine[0][1]) for mine in calls if len({w for _, w in mine}) == 1]
    over_ranks = list(zip(*calls, strict=True)) if len({len(mine) for mine in calls}) == 1 else []
    if are_microbatches and len(calls) > 1 and all(_weigh_alike([weight for _, weight in one]) for one in over_ranks):
        first = [ranks[0] for ranks in evidence.readers]  # the others of a data-parallel rank read the same tokens
        parts = [(sum(one[rank][0] for rank in first), one[0][1]) for one in over_ranks]
        yield "microbatch of all ranks", "its tokens on all ranks", parts


def _weigh_alike(numbers: Sequence[float]) -> bool:
    """Whether numbers are above zero, and equal up to rounding."""
    return bool(numbers) and min(numbers) > 0 and max(numbers) < min(numbers) * (1 + numerics.ALIKE)
