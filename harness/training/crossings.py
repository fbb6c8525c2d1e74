"""Has the backward of a collective in autograd the gradients of other ranks? (D32)"""

from collections.abc import Iterator

from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding
from shardproof.harness.watching.records import Crossing

_MENDS = {
    "all_gather": "gathers in forward, and its backward passes on the gradient of the rank's own part alone",
    "all_reduce": "sums over the ranks in forward, and its backward passes on the rank's own gradient alone",
}


def check_crossings(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D32, in each step: what a rank sends has the gradients of all losses that use it, where these differ."""
    told = set()
    for record in evidence.records:
        for number, one in enumerate(record.modules.beside.crossings):
            if one.kind not in told and _lacks_others(evidence, number, one):
                told.add(one.kind)
                yield _of_crossing(evidence.step, one)


def _lacks_others(evidence: Evidence, number: int, crossing: Crossing) -> bool:
    """Whether all ranks of a group pass on their own part alone, and have losses of their own."""
    losses = []
    for rank in crossing.group:
        mine = evidence.records[rank].modules.beside.crossings
        if number >= len(mine) or mine[number].kind != crossing.kind:
            return False
        if not (mine[number].is_own and mine[number].uses_others):
            return False
        losses.append(mine[number].loss)
    return max(losses) - min(losses) > numerics.ALIKE * max(map(abs, losses))


def _of_crossing(step: int, one: Crossing) -> DoctorFinding:
    lines = (
        f"{one.kind} {_MENDS[one.collective]}, and the losses of {ranks_of(one.group)} differ: their "
        "gradients for the part of another rank are lost",
        "meant, as a limit to the gradient? else sum the gradients over these ranks in backward, as "
        "torch.distributed.nn.functional does",
    )
    title = "a collective in autograd lacks the gradients of other ranks"
    return DoctorFinding((codes.CROSSINGS,), codes.MISSING, step, title, lines, is_note=True)
