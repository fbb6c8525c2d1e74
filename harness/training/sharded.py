"""Is a parameter that ``fully_shard()`` has sharded one rank's, or a mixture of what ranks had? (D21)"""

from collections.abc import Iterator, Mapping, Sequence

from shardproof.harness.judging import codes
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training.evidence import Start
from shardproof.harness.training.findings import DoctorFinding, count_of, listed
from shardproof.harness.watching.sharding import Sharding

#: The fewest elements of which no rank draws equal ones by chance.
_FEW = 16

_MEND = (
    "load on each rank before fully_shard(), or after it: set_model_state_dict() with full_state_dict=True and "
    "broadcast_from_rank0=True"
)


def check_mixed(starts: Sequence[Start]) -> Iterator[DoctorFinding]:
    """D21: full parameters that differ between ranks are replaced after ``fully_shard()``, which mixes them.

    Ranks that draw values of their own differ too, and a mixture of such values is as good as each. A parameter that is
    constant on one rank and not on another shows that one of them has loaded it; another number of writes makes a note.
    """
    for ranks in dict.fromkeys(place[1] for start in starts for place in start.bits.values() if len(place[1]) > 1):
        mixed = dict(_mixed(starts, ranks))
        constant = [name for name, held in mixed.items() if _is_constant_on_some(held)]
        written = [name for name, held in mixed.items() if len({one.writes for one in held.values()}) > 1]
        if constant or written:
            yield _of_mixed(ranks, mixed, constant, written)


def _mixed(starts: Sequence[Start], ranks: Sequence[int]) -> Iterator[tuple[str, Mapping[int, Sharding]]]:
    """Yield the parameters that ranks had differently, and of which each still has its part of its own."""
    for name, (_, mesh, _) in starts[ranks[0]].bits.items():
        if tuple(mesh) != tuple(ranks):
            continue
        held = {rank: one for rank in ranks if (one := starts[rank].built.sharded.get(name)) is not None}
        parts = {rank: one for rank, one in held.items() if one.is_kept is not None}
        is_kept = len(held) == len(ranks) and all(one.is_kept for one in parts.values())
        if is_kept and len({one.bits for one in parts.values()}) > 1:
            yield name, parts


def _is_constant_on_some(held: Mapping[int, Sharding]) -> bool:
    is_long = all(one.count >= _FEW for one in held.values())
    return is_long and len({one.is_constant for one in held.values()}) > 1


def _of_mixed(
    ranks: Sequence[int], mixed: Mapping[str, Mapping[int, Sharding]], constant: list[str], written: list[str]
) -> DoctorFinding:
    names = constant or written
    lines = [
        f"{listed(names)}: {ranks_of(ranks)} had different values of {count_of(len(mixed), 'parameter', 'parameters')} "
        "when fully_shard() sharded them, and training begins with a part of each rank's",
    ]
    held = mixed[names[0]]
    if constant:
        one_value = [rank for rank, one in held.items() if one.is_constant]
        rest = [rank for rank in held if rank not in one_value]
        has = "has" if len(one_value) == 1 else "have"
        lines.append(
            f"seen: of {constant[0]!r} {ranks_of(one_value)} {has} one value, as it is initialized, and "
            f"{ranks_of(rest)} others, as they are loaded"
        )
    else:
        counts = ", ".join(f"{one.writes} on rank {rank}" for rank, one in list(held.items())[:4])
        lines.append(f"seen: {written[0]!r} was written by another number of calls before: {counts}")
    lines.append(_MEND if constant else f"meant, as where each rank draws initial values of its own? else {_MEND}")
    title = "parameters are a mixture of ranks' values"
    return DoctorFinding(
        (codes.INITIAL,), codes.APART, 0, title, tuple(lines), is_note=not constant, is_open=not constant
    )
