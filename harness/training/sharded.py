"""Are the shards of parameters those of one model, and not a mixture of ranks' (D21), or copies (D23)?"""

from collections.abc import Iterator, Mapping, Sequence

from shardproof.harness.judging import codes
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.training.evidence import Evidence, Start
from shardproof.harness.training.findings import DoctorFinding, count_of, listed
from shardproof.harness.watching.records import Bits
from shardproof.harness.watching.sharding import FLAT, FULLY_SHARD, NO_VALUES, Sharding

#: The fewest elements of which no rank draws equal ones by chance.
_FEW = 16

_MENDS = {
    FULLY_SHARD: "load on each rank before fully_shard(), or after it: set_model_state_dict() with "
    "full_state_dict=True and broadcast_from_rank0=True",
    FLAT: "load on each rank before FullyShardedDataParallel, or have it send those of rank 0: sync_module_states=True",
}


def check_mixed(starts: Sequence[Start]) -> Iterator[DoctorFinding]:
    """D21: full parameters that differ between ranks are replaced after FSDP2 or FSDP1 shards them, which mixes them.

    Ranks that draw values of their own differ too, and a mixture of such values is as good as each. A parameter that is
    constant on one rank and not on another shows that one of them has loaded it; another number of writes makes a note.
    """
    sets = dict.fromkeys(_ranks_of(start, name) for start in starts for name in start.built.sharded)
    for ranks in (one for one in sets if len(one) > 1):
        mixed = dict(_mixed(starts, ranks))
        constant = [name for name, held in mixed.items() if _is_constant_on_some(held)]
        written = [name for name, held in mixed.items() if len({one.writes for one in held.values()}) > 1]
        if constant or written:
            yield _of_mixed(ranks, mixed, constant, written)


def _ranks_of(start: Start, name: str) -> tuple[int, ...]:
    """Return the ranks that divide a parameter which was sharded."""
    return start.built.sharded[name].ranks or (tuple(start.bits[name][1]) if name in start.bits else ())


def _mixed(starts: Sequence[Start], ranks: Sequence[int]) -> Iterator[tuple[str, Mapping[int, Sharding]]]:
    """Yield the parameters that ranks had differently, of those ranks that have a part of their own of some of them.

    Of a flat parameter a rank has some of the parameters in it alone.
    """
    kept: dict[str, dict[int, Sharding]] = {}
    for name in starts[ranks[0]].built.sharded:
        held = _held(starts, name, ranks)
        if _are_apart(held) and False not in [one.is_kept for one in held.values()]:
            kept[name] = held
    having = {rank for held in kept.values() for rank, one in held.items() if one.is_kept}
    for name, held in kept.items():
        parts = {rank: one for rank, one in held.items() if rank in having}
        if _are_apart(parts):
            yield name, parts


def _held(starts: Sequence[Start], name: str, ranks: Sequence[int]) -> dict[int, Sharding]:
    """Return what these ranks had of a parameter; nothing where others divide it."""
    held = {rank: one for rank in ranks if (one := starts[rank].built.sharded.get(name)) is not None}
    are_all = len(held) == len(ranks) and {_ranks_of(starts[rank], name) for rank in held} == {tuple(ranks)}
    return held if are_all else {}


def _are_apart(held: Mapping[int, Sharding]) -> bool:
    return len({one.bits for one in held.values()}) > 1


def _is_constant_on_some(held: Mapping[int, Sharding]) -> bool:
    is_long = all(one.count >= _FEW for one in held.values())
    return is_long and len({one.is_constant for one in held.values()}) > 1


def _of_mixed(
    ranks: Sequence[int], mixed: Mapping[str, Mapping[int, Sharding]], constant: list[str], written: list[str]
) -> DoctorFinding:
    names = constant or written
    held = mixed[names[0]]
    by = next(iter(held.values())).by
    mend = _MENDS[by]
    lines = [
        f"{listed(names)}: {ranks_of(ranks)} had different values of {count_of(len(mixed), 'parameter', 'parameters')} "
        f"when {by} sharded them, and training begins with a part of each rank's",
    ]
    if constant:
        one_value = [rank for rank, one in held.items() if one.is_constant]
        rest = [rank for rank in held if rank not in one_value]
        has = "has" if len(one_value) == 1 else "have"
        lines.append(
            f"seen: of {constant[0]!r} {ranks_of(one_value)} {has} one value, as it is initialized, and "
            f"{ranks_of(rest)} others, as they are loaded"
        )
    elif without := [rank for rank, one in held.items() if one.writes == NO_VALUES]:
        lines.append(f"seen: {written[0]!r} had no values on {ranks_of(without)}, where it was on the meta device")
    else:
        counts = ", ".join(f"{one.writes} on rank {rank}" for rank, one in list(held.items())[:4])
        lines.append(f"seen: {written[0]!r} was written by another number of calls before: {counts}")
    lines.append(mend if constant else f"meant, as where each rank draws initial values of its own? else {mend}")
    title = "parameters are a mixture of ranks' values"
    return DoctorFinding(
        (codes.INITIAL,), codes.APART, 0, title, tuple(lines), is_note=not constant, is_open=not constant
    )


def check_copied(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D23, in the first step: the shards of a parameter on different ranks are not copies of each other.

    Rows that are all equal may be meant to be: those of zeros, or of one row that is repeated. Where some parameters
    alone are copied, these may be meant to begin alike, as experts that are made of one layer.
    """
    judged = {name: is_copied for name in evidence.names if (is_copied := _is_copied(evidence, name)) is not None}
    copied = [name for name, is_copied in judged.items() if is_copied]
    if not copied:
        return
    is_note = len(copied) < len(judged) or len(copied) == 1
    ranks = [rank for rank, start in enumerate(evidence.starts) if copied[0] in start.bits]
    all_of = f"all {len(copied)}" if not is_note else f"{len(copied)} of {len(judged)}"
    mend = "draw the full parameter on each rank by one seed and take its part, or draw shards by a seed for each rank"
    lines = (
        f"{listed(copied)}: {ranks_of(ranks)} hold different elements, and the same bits, as of {all_of} sharded "
        "parameters whose rows are not all equal",
        f"meant, as where parts of a parameter begin as copies? else {mend}" if is_note
        else f"as where each rank draws its shard by the same seed: {mend}",
    )  # fmt: skip
    yield DoctorFinding((codes.COPIED,), "", evidence.step, "shards are copies", lines, is_note)


def _is_copied(evidence: Evidence, name: str) -> bool | None:
    """Whether shards of other elements and equal sizes have the same bits; None where that cannot be told."""
    found: dict[Box, Bits] = {}
    for start, record in zip(evidence.starts, evidence.records, strict=True):
        held = record.parameters.get(name)
        if held is None or name not in start.bits:
            continue
        # What is loaded after training began is not judged.
        if held.box is None or name not in start.varied or held.before != start.bits[name][2]:
            return None
        # Random numbers of DTensors that torch draws alike on CPUs are other ones on accelerators.
        if start.varied[name] == "cpu" and start.built.draws_alike:
            return None
        found[held.box] = start.bits[name][2]
    by_size: dict[int, list[Bits]] = {}
    for box, bits in found.items():
        by_size.setdefault(box.numel, []).append(bits)
    large = [bits for size, bits in by_size.items() if size >= _FEW and len(bits) > 1]
    return all(len(set(bits)) == 1 for bits in large) if large else None
