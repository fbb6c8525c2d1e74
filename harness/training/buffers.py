"""Are buffers that training changes alike on data-parallel ranks? (D20)"""

from collections.abc import Iterator, Sequence

from shardproof.harness.judging import codes
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding, listed
from shardproof.harness.watching.records import Bits


def check_buffers_ever(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D20, after the last step: buffers that are equal when training begins are equal when each step begins.

    A note, because statistics of each rank's own data may be meant. Buffers of a module whose parameters differ between
    ranks are parts of one model.
    """
    last = records[-1]
    for ranks in _peers(last):
        if names := _apart(last, ranks):
            step = next(one.step for one in records if _apart(one, ranks))
            yield _of_buffers(last, ranks, names, step)


def check_standing(look: Evidence, watched: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D20, at a later step: buffers that are equal where the optimizer steps in the watched steps are equal then."""
    for ranks in _peers(watched[-1]):
        known = look.records[ranks[0]].modules.standing.buffers
        divided = {name.rpartition(".")[0] for name in look.parts}
        are_alike = [name for name in known if all(len(_standing(one, name, ranks)) == 1 for one in watched)]
        names = [name for name in are_alike if len(_standing(look, name, ranks)) > 1]
        if names := [name for name in names if name.rpartition(".")[0] not in divided]:
            yield _of_buffers(look, ranks, names, look.step)


def _standing(evidence: Evidence, name: str, ranks: Sequence[int]) -> set[Bits | None]:
    return {evidence.records[rank].modules.standing.buffers.get(name) for rank in ranks}


def _peers(evidence: Evidence) -> list[tuple[int, ...]]:
    """Return the sets of data-parallel ranks: by the groups where these are known, else all that reduce gradients."""
    everyone = range(len(evidence.records))
    if evidence.are_readers_known:
        return list(dict.fromkeys(evidence.data_peers(rank) for rank in everyone))
    read = {record.forwards.batches for record in evidence.records}
    is_data_parallel = len(read) == len(evidence.records) and not evidence.reduces_nothing and not evidence.parts
    return [tuple(everyone)] if is_data_parallel else []


def _apart(evidence: Evidence, ranks: Sequence[int]) -> list[str]:
    """Return the buffers that ranks had equal when training began, and that differ when the step begins."""
    divided = {name.rpartition(".")[0] for name in evidence.parts}
    found = []
    for name in evidence.starts[ranks[0]].buffers:
        began = {evidence.starts[rank].buffers.get(name) for rank in ranks}
        now = {bits for rank in ranks if (bits := evidence.records[rank].modules.buffers.get(name)) is not None}
        if len(began) == 1 and len(now) > 1 and name.rpartition(".")[0] not in divided:
            found.append(name)
    return found


def _of_buffers(evidence: Evidence, ranks: Sequence[int], names: list[str], step: int) -> DoctorFinding:
    of = ranks_of(ranks)
    lines = [f"buffer {listed(names)}: equal on {of} when training begins, and not when a later step begins"]
    if evidence.starts[ranks[0]].reducers.sends_buffers:
        lines.append(
            "seen: DistributedDataParallel broadcasts the buffers of one rank before each forward, so that updates of "
            "other ranks are lost"
        )
    lines.append(
        "meant, as for statistics of each rank's own data that training does not use? else reduce them over these "
        "ranks before they change the buffer"
    )
    title = "buffers differ between ranks"
    return DoctorFinding((codes.BUFFERS,), codes.APART, step, title, tuple(lines), is_note=True)
