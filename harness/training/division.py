"""Is data that are a rank's own part divided among ranks once more? (D29)"""

from collections.abc import Iterator, Mapping, Sequence

from shardproof.harness.judging import codes
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training.findings import DoctorFinding
from shardproof.harness.watching.division import Division
from shardproof.harness.watching.ledger import Read

#: The title of the finding, and that of the note of parts that no rank reads.
DIVIDED_AGAIN, UNREAD = "the part of each rank is divided again", "a sampler has parts that no rank reads"

_Samples = Mapping[str, tuple[int, ...]]


def check_division(told: Sequence[Read]) -> Iterator[DoctorFinding]:
    """D29, after the loop: of data that a sampler divides, ranks together read each part."""
    by_loader = [_by_loader(one.divisions) for one in told]
    for key in by_loader[0]:
        if all(key in one for one in by_loader):
            ranks = [one[key] for one in by_loader]
            parts = max(one.parts for one in ranks)
            classes = _by_data(ranks)
            if any(len({ranks[rank].part for rank in members}) < parts for members in classes):
                found = list(_of_unread(ranks, classes) if len(classes) == 1 else _of_again(ranks, classes))
                yield from found[:1]


def _by_loader(divisions: Sequence[Division]) -> dict[tuple[str, int, int], Division]:
    """Return the divisions by kind, parts, and how many of this kind there were before."""
    found: dict[tuple[str, int, int], Division] = {}
    for one in divisions:
        number = sum(kind == one.kind and parts == one.parts for kind, parts, _ in found)
        found[one.kind, one.parts, number] = one
    return found


def _by_data(ranks: Sequence[Division]) -> list[list[int]]:
    """Return the sets of ranks that have data of the same rows, as far as they are known."""
    sets: list[list[int]] = []
    for rank, one in enumerate(ranks):
        same = (members for members in sets if (ranks[members[0]].indices, ranks[members[0]].content) ==
                (one.indices, one.content))  # fmt: skip
        if (members := next(same, None)) is None:
            sets.append([rank])
        else:
            members.append(rank)
    return sets


def _of_again(ranks: Sequence[Division], classes: Sequence[Sequence[int]]) -> Iterator[DoctorFinding]:
    """Find parts of a data set, or note data that may be, of which a sampler gives each rank some rows only."""
    firsts = [ranks[members[0]] for members in classes]
    of_indices = _are_apart([one.indices for one in firsts], some=True)
    if not of_indices and not _are_apart([one.content for one in firsts], some=False):
        return
    unread = sum(_unread(ranks, members) for members in classes)
    rows = sum(one.rows for one in firsts)
    first = ranks[0]
    source = "other rows of a data set" if of_indices else "other rows"
    lines = [
        f"{first.kind}: {' and '.join(ranks_of(members) for members in classes[:3])} have {source} each, and the "
        f"sampler divides them among {first.parts}: about {unread} of {rows} rows are read on no rank in an epoch"
    ]
    mend = "give the sampler the data set of all ranks, or give each rank's part a sampler without ranks"
    lines.append(mend if of_indices else f"meant, as where each rank makes rows of its own? else {mend}")
    yield DoctorFinding((codes.ROWS,), "", first.step, DIVIDED_AGAIN, tuple(lines), is_note=not of_indices)


def _of_unread(ranks: Sequence[Division], classes: Sequence[Sequence[int]]) -> Iterator[DoctorFinding]:
    """Note parts of a sampler that are no rank's, as where it counts other ranks than there are."""
    first, read = ranks[0], {one.part for one in ranks}
    if first.parts > len(ranks) and len(read) > 1:
        lines = (
            f"{first.kind}: the sampler divides {first.rows} rows among {first.parts}, and {len(ranks)} ranks read "
            f"{len(read)} of these parts: about {_unread(ranks, classes[0])} rows are read on no rank in an epoch",
            "meant, as in a trial on few ranks? else give the sampler the number of ranks that read",
        )
        yield DoctorFinding((codes.ROWS,), "", first.step, UNREAD, lines, is_note=True)


def _unread(ranks: Sequence[Division], members: Sequence[int]) -> int:
    first = ranks[members[0]]
    return first.rows - first.rows * len({ranks[rank].part for rank in members}) // first.parts


def _are_apart(samples: Sequence[_Samples], *, some: bool) -> bool:
    """Whether data have no row in common in one of their tables or in each; of those that differ all have none."""
    places = set(samples[0])
    if not places or any(set(one) != places for one in samples):
        return False
    every = [[set(one[place]) for one in samples] for place in places]
    apart = [len(set().union(*table)) == sum(map(len, table)) for table in every]
    is_clear = all(one or all(own == table[0] for own in table) for one, table in zip(apart, every, strict=True))
    return is_clear and (any(apart) if some else all(apart))
