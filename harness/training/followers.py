"""Is a copy of a root, such as a moving average, a teacher or a reference, what it is taken for? (D31)"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding, listed
from shardproof.harness.watching.records import Follower, Look

#: A sample of fewer elements shows nothing.
_ENOUGH = 16

_OfRanks = Mapping[int, Follower]
"""One follower, by rank."""


def check_followers_ever(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D31, after the last step: copies of a root are alike on ranks, and are written as copies are."""
    seen = {record.rank: record.modules.beside.followers for record in records[-1].records}
    yield from check_followers(seen, records[-1].step)


def check_followers(seen: Mapping[int, Sequence[Follower]], step: int) -> Iterator[DoctorFinding]:
    """Judge the followers that ranks have seen by a step."""
    found: list[DoctorFinding] = list(_of_shards(seen, step))
    for members in _by_key(seen):
        if _is_one(members):
            of_ranks = list(_of_ranks(members, step))
            found += of_ranks or _of_begin(members, step)
            for check in (_of_rounding, _of_modes, _of_microbatches, _of_gradients):
                found += check(members, step)
    yield from found


def check_followers_later(before: Evidence, look: Evidence) -> Iterator[DoctorFinding]:
    """D31, at a look: note copies that were alike on ranks after the watched steps, and are written apart since.

    Args:
        before: the last of the watched steps.
    """
    then, now = ({one.rank: one.modules.beside.followers for one in step.records} for step in (before, look))
    alike = _alike(then)
    for members in _by_key(now):
        is_known = len(members) > 1 and next(iter(members.values())).key in alike and _is_one(members)
        if is_known and len({len(one.looks) for one in members.values()}) == 1:
            since = {rank: _since_last(one) for rank, one in members.items()}
            yield from _of_last(since, look.step)
    if not any(True for _ in _of_shards(then, before.step)):
        yield from _of_shards({rank: [*map(_since_last, some)] for rank, some in now.items()}, look.step)


def _alike(seen: Mapping[int, Sequence[Follower]]) -> set[tuple[str, str, str]]:
    """Return the keys of followers that several ranks have, which did not differ at the last look."""
    return {
        next(iter(members.values())).key
        for members in _by_key(seen)
        if len(members) > 1 and not _differ({rank: one.looks[-1] for rank, one in members.items()})
    }


def _since_last(one: Follower) -> Follower:
    return dataclasses.replace(one, looks=one.looks[-1:])


def _by_key(seen: Mapping[int, Sequence[Follower]]) -> Iterator[_OfRanks]:
    """Yield the followers of ranks; those of which a rank has several by one name are judged by themselves."""
    every: dict[tuple[str, str, str], dict[int, list[Follower]]] = {}
    for rank, followers in seen.items():
        for one in followers:
            every.setdefault(one.key, {}).setdefault(rank, []).append(one)
    for of_ranks in every.values():
        if all(len(some) == 1 for some in of_ranks.values()):
            yield {rank: one for rank, (one,) in of_ranks.items()}
        else:
            yield from ({rank: one} for rank, some in of_ranks.items() for one in some)


def _is_one(members: _OfRanks) -> bool:
    """Whether what has the shapes of the root's parameters has to do with them: by values on a rank, or by movement."""
    return any(_is_like(look) or look.toward > numerics.COPY_FOLLOWS for one in members.values() for look in one.looks)


def _is_like(look: Look) -> bool:
    return look.likeness is not None and look.likeness > numerics.COPY_IS_LIKE


def _follows(one: Follower) -> bool:
    """Whether something moves a follower toward its original."""
    return any(look.is_written and look.toward > numerics.COPY_FOLLOWS for look in one.looks)


def _name(one: Follower) -> str:
    what = {"list": "a list of tensors", "tuple": "a tuple of tensors", "dict": "a dict of tensors"}.get(
        one.kind, f"a {one.kind}"
    )
    of = f"the shapes of {one.place!r}" if one.place else "the shapes of the model"
    named = f"{one.name}, {what}" if one.name else what
    return f"{named} with {of}, which no optimizer steps"


# Ranks ------------------------------------------------------------------------------------------


def _of_ranks(members: _OfRanks, step: int) -> Iterator[DoctorFinding]:
    """Yield what is wrong where ranks whose parameters are equal have different copies of them."""
    if len(members) < 2:
        return
    first = {rank: one.looks[0] for rank, one in members.items()}
    if all(one.is_from_begin for one in members.values()) and _differ(first):
        yield _began_apart(members, first, step)
    elif len({len(one.looks) for one in members.values()}) == 1:
        yield from _of_last(members, step)


def _of_last(members: _OfRanks, step: int) -> Iterator[DoctorFinding]:
    """Yield what is wrong where ranks have different copies at last."""
    if not _differ({rank: one.looks[-1] for rank, one in members.items()}):
        return
    written = [rank for rank, one in members.items() if any(look.is_written for look in one.looks)]
    used = [rank for rank, one in members.items() if rank not in written and one.calls]
    if len(written) == len(members):
        yield _drift(members, step)
    elif used:
        yield _not_written(members, written, used, step)


def _differ(looks: Mapping[int, Look]) -> bool:
    """Whether ranks have equal parameters and different copies."""
    return len({one.root for one in looks.values()}) == 1 and len({one.own for one in looks.values()}) > 1


def _began_apart(members: _OfRanks, first: Mapping[int, Look], step: int) -> DoctorFinding:
    one = next(iter(members.values()))
    copies = [rank for rank, look in first.items() if look.distance == 0]
    others = [rank for rank in members if rank not in copies]
    are_drawn = all(
        first[rank].likeness is not None and (first[rank].likeness or 0) < numerics.COPY_IS_UNLIKE for rank in others
    )
    is_sure = bool(copies) and are_drawn and all(map(_follows, members.values()))
    lines = [f"{_name(one)}: different values on ranks whose parameters are equal, when training begins"]
    if copies and are_drawn:
        has = "have" if len(others) > 1 else "has"
        lines.append(
            f"seen: {ranks_of(copies)} {'have' if len(copies) > 1 else 'has'} a copy of the parameters, and "
            f"{ranks_of(others)} {has} other values, as before a broadcast of what {ranks_of(copies[:1])} has"
        )
    mend = "copy the parameters after they are equal on all ranks, as after DistributedDataParallel is made"
    lines.append(mend if is_sure else f"meant, as for opponents or best states of each rank? else {mend}")
    return _found(step, "copies of the model differ between ranks", lines, codes.APART, is_note=not is_sure)


def _drift(members: _OfRanks, step: int) -> DoctorFinding:
    one = next(iter(members.values()))
    lines = [
        f"{_name(one)}: equal on {ranks_of(members)} at first, and written to different values, while the parameters "
        "are equal",
        "meant, as where each rank has a rate of its own? else compute it from what all ranks have alike",
    ]
    return _found(step, "copies of the model drift apart", lines, codes.APART)


def _not_written(members: _OfRanks, written: Sequence[int], used: Sequence[int], step: int) -> DoctorFinding:
    one = next(iter(members.values()))
    lines = [
        f"{_name(one)}: written on {ranks_of(written)} alone, and called on {ranks_of(used)} in training",
        "meant, as where the copy is fixed on these ranks? else write it on all ranks",
    ]
    return _found(step, "copies of the model are written on some ranks only", lines, codes.APART)


# Shards -----------------------------------------------------------------------------------------


def _of_shards(seen: Mapping[int, Sequence[Follower]], step: int) -> Iterator[DoctorFinding]:
    """Yield what is wrong where the ranks that have the shards of one copy do not write all of them alike."""
    for of_ranks in _shards(seen):
        moving = [rank for rank, some in of_ranks.items() if some and all(map(_moves, some))]
        still = [rank for rank, some in of_ranks.items() if not any(map(_is_written, some))]
        if moving and still and not _may_be_unseen(still, seen):
            yield _of_part(of_ranks, moving, still, step)
        elif len(moving) == len(of_ranks) and all(len(some) == 1 for some in of_ranks.values()):
            yield from _of_rates({rank: one for rank, (one,) in of_ranks.items()}, step)


def _shards(seen: Mapping[int, Sequence[Follower]]) -> Iterator[Mapping[int, Sequence[Follower]]]:
    """Yield for each name, and each set of ranks that has the shards of one copy, the followers of these ranks."""
    every = [one for some in seen.values() for one in some if one.sharers]
    for key, sharers in dict.fromkeys((one.key, one.sharers) for one in every):
        yield {rank: [one for one in seen[rank] if one.key == key] for rank in sharers if rank in seen}


def _may_be_unseen(ranks: Sequence[int], seen: Mapping[int, Sequence[Follower]]) -> bool:
    return any(one.is_full for rank in ranks for one in seen[rank])


def _is_written(one: Follower) -> bool:
    return any(look.is_written for look in one.looks)


def _moves(one: Follower) -> bool:
    """Whether something moves shards toward their originals, and, if nothing calls them, does not only copy these."""
    looks = [look for look in one.looks if look.is_written]
    is_snapshot = one.kind in ("list", "tuple", "dict") and all(
        look.distance == 0 or (look.rate is not None and abs(look.rate - 1) < numerics.ONE_FACTOR) for look in looks
    )
    return _is_one({0: one}) and _follows(one) and not is_snapshot


def _of_part(
    of_ranks: Mapping[int, Sequence[Follower]], moving: Sequence[int], still: Sequence[int], step: int
) -> DoctorFinding:
    is_there = any(of_ranks[rank] for rank in still)
    lines = [
        f"{_name(of_ranks[moving[0]][0])}: each rank has shards of the model; written on {ranks_of(moving)}, and "
        f"{'unchanged' if is_there else 'not there'} on {ranks_of(still)}",
        f"meant, as where {'these shards are fixed' if is_there else 'others have theirs elsewhere'}? else update it "
        "on all ranks: each has its shards of the copy, and none has all of it",
    ]
    return _found(step, "shards of a copy of the model are written on some ranks only", lines, codes.APART)


def _of_rates(members: _OfRanks, step: int) -> Iterator[DoctorFinding]:
    """Note shards that are moved by other parts of the way on each rank, in each look that shows it."""
    looks = [one.looks for one in members.values()]
    rates = [[look.rate for look in some] for some in zip(*looks, strict=False) if all(one.is_written for one in some)]
    known = [[one for one in some if one is not None] for some in rates]
    if not known or any(len(some) < len(members) for some in known):
        return
    if all(max(some) - min(some) > numerics.COPY_RATES_DIFFER * max(some) for some in known):
        listed_rates = ", ".join(f"{one:.3g}" for one in known[-1])
        lines = [
            f"{_name(next(iter(members.values())))}: an update moves the shards of {ranks_of(members)} by "
            f"{listed_rates} of the way to the parameters",
            "meant? else compute the decay from numbers that all ranks have alike",
        ]
        yield _found(step, "shards of a copy of the model follow by different rates", lines, codes.APART)


# One rank ---------------------------------------------------------------------------------------


def _of_begin(members: _OfRanks, step: int) -> list[DoctorFinding]:
    """Find a copy that is moved to the parameters, and began with values that have nothing to do with them."""
    for one in members.values():
        first, is_copied = one.looks[0], any(look.distance == 0 for look in one.looks)
        if not one.is_from_begin or is_copied or first.likeness is None or not _follows(one):
            continue
        if first.likeness < numerics.COPY_IS_UNLIKE:
            lines = [
                f"{_name(one)}: moved toward the parameters in each step, and began with values of its own (a "
                f"correlation of {first.likeness:.2f} with them)",
                "meant, as for a target with a draw of its own? else copy the parameters once they are loaded or drawn",
            ]
            return [_found(step, "a copy of the model began with other values", lines, "")]
    return []


def _of_rounding(members: _OfRanks, step: int) -> list[DoctorFinding]:
    """Find a copy that is written, and stays as it is, because the update is below the spacing of its values."""
    for one in members.values():
        looks = [look for look in one.looks if look.is_written and look.sampled >= _ENOUGH]
        lost, sampled = sum(look.unchanged for look in looks), sum(look.sampled for look in looks)
        if one.dtype in numerics.EPS and one.dtype != "float32" and sampled and lost > numerics.MOST_LOST * sampled:
            lines = [
                f"{_name(one)}: in {one.dtype}, {lost} of {sampled} sampled elements that differ from the parameters "
                "are unchanged after it was written",
                "meant, as where it is rounded stochastically? else keep it in float32: an update below half of the "
                "spacing is lost",
            ]
            return [_found(step, "updates of a copy of the model are lost to rounding", lines, codes.ROUNDED)]
    return []


def _of_modes(members: _OfRanks, step: int) -> list[DoctorFinding]:
    """Find a copy that is called and drops elements at random, or moves statistics that nothing else writes."""
    for one in members.values():
        is_fixed = not any(look.is_written for look in one.looks)
        norms = list(one.norms) if is_fixed else []
        if one.dropouts or norms:
            lines = [f"{_name(one)}: called in training mode"]
            lines += [f"{listed(list(one.dropouts))}: drops elements at random"] if one.dropouts else []
            lines += [f"{listed(norms)}: normalizes by its batch, and moves its running statistics"] if norms else []
            lines.append("meant, as for a teacher with noise of its own? else call .eval() of it, also after .train()")
            return [_found(step, "a copy of the model computes in training mode", lines, "")]
    return []


def _of_microbatches(members: _OfRanks, step: int) -> list[DoctorFinding]:
    """Find a moving average that is written after each backward of a step."""
    for one in members.values():
        steps = [(backwards, written) for backwards, written in one.writes if backwards > 1]
        if len(steps) > 1 and len(steps) == len(one.writes) and all(a == b for a, b in steps) and _follows(one):
            lines = [
                f"{_name(one)}: written once for each of the {steps[-1][0]} backward passes of a step",
                "meant? else write it once, after the optimizer's step: its decay is applied for each microbatch",
            ]
            return [_found(step, "a copy of the model is written for each microbatch", lines, codes.SOME_MICROBATCHES)]
    return []


def _of_gradients(members: _OfRanks, step: int) -> list[DoctorFinding]:
    """Find a copy to whose gradients each step adds, and which nothing reads or clears."""
    for one in members.values():
        if one.gathers:
            lines = [
                f"{_name(one)}: {one.gathers} of its tensors have a gradient, to which each step adds",
                "meant? else set requires_grad=False, or call it under no_grad: nothing steps by it or clears it",
            ]
            return [_found(step, "a copy of the model gets gradients", lines, codes.UNMOVED)]
    return []


def _found(step: int, title: str, lines: Sequence[str], signature: str, *, is_note: bool = True) -> DoctorFinding:
    return DoctorFinding((codes.FOLLOWERS,), signature, step, title, tuple(lines), is_note)
