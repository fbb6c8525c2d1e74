"""Has the backward of a collective in autograd the gradients of other ranks? (D32)"""

from collections.abc import Iterator, Mapping, Sequence

from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding, count_of
from shardproof.harness.watching.records import Crossing, StepRecord

_MENDS = {
    "all_gather": "gathers in forward, and its backward passes on the gradient of the rank's own part alone",
    "all_reduce": "sums over the ranks in forward, and its backward passes on the rank's own gradient alone",
}


def check_crossings(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D32, in each step: what a rank sends has the gradients of all losses that use it, where these differ."""
    told = set()
    padded = {one.rank: found for one in evidence.records if (found := [e for e in _of(one) if e.padding])}
    if padded:
        yield _of_padding(evidence.step, padded)
    for record in evidence.records:
        for number, one in enumerate(_passed(record)):
            if one.kind not in told and _lacks_others(evidence, number, one):
                told.add(one.kind)
                yield _of_crossing(evidence.step, one)


def _of(record: StepRecord) -> list[Crossing]:
    return record.modules.beside.crossings


def _passed(record: StepRecord) -> list[Crossing]:
    return [one for one in _of(record) if not one.padding]


def _lacks_others(evidence: Evidence, number: int, crossing: Crossing) -> bool:
    """Whether all ranks of a group pass on their own part alone, and have losses of their own."""
    losses = []
    for rank in crossing.group:
        mine = _passed(evidence.records[rank])
        if number >= len(mine) or mine[number].kind != crossing.kind:
            return False
        if not (mine[number].is_own and mine[number].uses_others):
            return False
        losses.append(mine[number].loss)
    return max(losses) - min(losses) > numerics.ALIKE * max(map(abs, losses))


def _of_padding(step: int, padded: Mapping[int, Sequence[Crossing]]) -> DoctorFinding:
    first = next(iter(padded.values()))[0]
    count = ", ".join(count_of(some[0].padding, "row", "rows") for some in padded.values())
    lines = (
        f"{first.kind} gathers a tensor that is padded by a constant on {ranks_of(padded)}, and the loss has a "
        f"gradient for the padding ({count})",
        "meant, as where the constant is a value like others? else cut each gathered part to its own size, or mask the "
        "padding: it counts as data of that rank",
    )
    title = "padding of gathered tensors takes part in the loss"
    return DoctorFinding((codes.CROSSINGS,), "", step, title, lines, is_note=True)


def _of_crossing(step: int, one: Crossing) -> DoctorFinding:
    lines = (
        f"{one.kind} {_MENDS[one.collective]}, and the losses of {ranks_of(one.group)} differ: their "
        "gradients for the part of another rank are lost",
        "meant, as a limit to the gradient? else sum the gradients over these ranks in backward, as "
        "torch.distributed.nn.functional does",
    )
    title = "a collective in autograd lacks the gradients of other ranks"
    return DoctorFinding((codes.CROSSINGS,), codes.MISSING, step, title, lines, is_note=True)
