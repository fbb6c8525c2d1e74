"""Are gradients a sum over ranks where the loss of each is a mean? (D11)"""

from collections.abc import Iterator

from shardproof.harness.judging import codes, numerics
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding
from shardproof.harness.training.reduction import Reduced


def check_sums(evidence: Evidence, reduced: Reduced) -> Iterator[DoctorFinding]:
    """D11, in each step: a note of a sum that user code makes, of ranks whose losses are means that nothing scales."""
    readers, reducers = len(evidence.readers), evidence.starts[0].reducers
    if len(reduced.factors) != 1 or readers < 2 or not _are_means(evidence):
        return
    is_by_hand = not reducers.names and not evidence.are_others_reduced and not evidence.reduces_nothing
    factor = reduced.factors[0]
    if not (evidence.hooks or is_by_hand) or abs(factor.value - 1) > max(numerics.ONE_SCALE, factor.residual):
        return
    who = f"the communication hook {' and '.join(map(repr, evidence.hooks))}" if evidence.hooks else "user code"
    lines = (
        f"{who} makes the sum over {readers} ranks of all gradients, and the loss of each rank is a mean: they are "
        f"{readers} times those of the mean over all ranks",
        "meant, as where the learning rate is for a sum? else divide by the number of ranks",
    )
    yield DoctorFinding(
        (codes.REDUCED_ONCE,), codes.SCALED, evidence.step, "gradients are a sum, not a mean", lines, True
    )


def _are_means(evidence: Evidence) -> bool:
    """Whether the loss of each backward pass is a mean over its microbatch, of as many as a step has."""
    for record in evidence.records:
        factors = record.losses.factors
        if not factors or len(factors) != record.backwards:
            return False
        if any(one is None or abs(one * record.backwards - 1) > numerics.ONE_FACTOR for one in factors):
            return False
    return True
