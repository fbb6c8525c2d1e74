"""Are buffers that training changes, and constants, alike on data-parallel ranks? (D20)"""

from collections.abc import Iterator, Sequence

from shardproof.harness.judging import codes
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding, listed
from shardproof.harness.watching.records import Bits

#: The titles of the finding of constants that a rank has not filled, and of the note of others that differ.
EMPTY, CONSTANTS = "a rank has not filled its constants", "constants differ between ranks"

#: The fewest elements of a table, and the fewest values: a mask or a flag of each rank has few.
_FEW, _FEW_VALUES = 16, 8


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


def check_constants_ever(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D20, after the last step: tensors that forwards read, and that never change, are alike on data-parallel ranks.

    Zeros on one rank, and the same table of values on all others, are a table that this rank has not filled. Other
    differences may be meant, as of positions of a rank's part of a sequence.
    """
    if len(records) < 2:
        return
    last = records[-1]
    for ranks in _peers(last):
        names = [name for name in last.starts[ranks[0]].built.constants if _is_constant_apart(records, name, ranks)]
        empty = {name: found for name in names if (found := _empty_on(last, name, ranks))}
        for on in dict.fromkeys(empty.values()):
            yield _of_empty(last, ranks, on, [name for name, one in empty.items() if one == on])
        if rest := [name for name in names if name not in empty]:
            yield _of_constants(last, ranks, rest)


def _is_constant_apart(records: Sequence[Evidence], name: str, ranks: Sequence[int]) -> bool:
    """Whether a tensor of many elements differs between ranks, and does not change on any."""
    held = [records[-1].starts[rank].built.constants.get(name) for rank in ranks]
    sizes = [0 if one is None else one.numel for one in held]
    if min(sizes) < _FEW or len(set(sizes)) > 1 or not _is_of_all(records[-1], name.rpartition(".")[0], ranks):
        return False
    first, *rest = ([_bits(one, name, rank) for rank in ranks] for one in records)
    return None not in first and len(set(first)) > 1 and all(one == first for one in rest)


def _is_of_all(evidence: Evidence, owner: str, ranks: Sequence[int]) -> bool:
    """Whether forwards call a module, of which no rank has a part of its own."""
    idle = {one for rank in ranks for one in evidence.records[rank].modules.idle}
    divided = {name.rpartition(".")[0] for name in (*evidence.parts, *evidence.ignored)}
    return owner not in divided and not any(f"{owner}.".startswith(f"{one}.") for one in idle if one)


def _bits(evidence: Evidence, name: str, rank: int) -> Bits | None:
    standing = evidence.records[rank].modules.standing
    return standing.buffers.get(name) or standing.attributes.get(name)


def _empty_on(evidence: Evidence, name: str, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks on which a tensor is zeros or not a number, where others have one table; none without these."""
    held = {rank: evidence.starts[rank].built.constants[name] for rank in ranks}
    empty = tuple(rank for rank, one in held.items() if one.is_zero or one.has_nan)
    others = [rank for rank in ranks if rank not in empty]
    is_one = len({_bits(evidence, name, rank) for rank in others}) == 1
    return empty if is_one and all(held[rank].values >= _FEW_VALUES for rank in others) else ()


def _of_empty(evidence: Evidence, ranks: Sequence[int], on: Sequence[int], names: list[str]) -> DoctorFinding:
    held = evidence.starts[on[0]].built.constants[names[0]]
    others = [rank for rank in ranks if rank not in on]
    lines = [
        f"{listed(names)}: {'zeros' if held.is_zero else 'not a number'} on {ranks_of(on)}, a table of values on "
        f"{ranks_of(others)}, and unchanged in the watched steps; forwards read it"
    ]
    if not held.is_saved:
        lines.append("seen: no state dict has it, so a load or a broadcast of a state dict leaves it as it is")
    lines.append("fill it on each rank, as by the module's own function after to_empty(), or broadcast that of one")
    return DoctorFinding((codes.BUFFERS,), codes.APART, evidence.step, EMPTY, tuple(lines))


def _of_constants(evidence: Evidence, ranks: Sequence[int], names: list[str]) -> DoctorFinding:
    lines = (
        f"{listed(names)}: different on {ranks_of(ranks)}, and unchanged in the watched steps; forwards read it",
        "meant, as for positions of each rank's part of a sequence? else draw or compute it alike on all ranks, or "
        "broadcast that of one",
    )
    return DoctorFinding((codes.BUFFERS,), codes.APART, evidence.step, CONSTANTS, lines, is_note=True)


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
