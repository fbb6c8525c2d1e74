"""Do ranks divide the rows of each epoch among them, and does each epoch shuffle them anew? (D29)

Judged when the training has ended, from what each rank has read in its whole run.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardproof.harness.judging import codes
from shardproof.harness.training.division import check_division
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding, count_of
from shardproof.harness.training.labels import check_tables
from shardproof.harness.watching.ledger import Epoch, Permutation, Read

#: The title of the note of ranks that read rows of one another.
OVERLAP = "ranks read rows of one another"

#: The title of the note of epochs that repeat the order of the first.
REPEATED = "each epoch has the order of the first"

#: How many rows two ranks read that are no chance where no rank reads one twice.
_FEWEST_AGAIN = 12

#: Of so many rows of a stream they are one at least: streams of shards that are drawn have some on two ranks.
_ONE_AGAIN_OF = 20

#: How many times as many as those that one rank reads twice they are at least.
_TIMES_OWN = 3

#: How many rows of an evaluation ranks train on that are no chance.
_FEWEST_LEAKED = 4

_BY_ONE_SEED = (
    "meant, as where each rank draws rows by itself? else shuffle on all ranks by one seed that nothing else uses, "
    "and take the rank's part then"
)


def check_rows(told: Sequence[Read], seen: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D29, after the loop: no two data-parallel ranks read one row in an epoch, and no two epochs have one order."""
    readers = [told[ranks[0]] for ranks in seen[-1].readers]
    if len(readers) > 1:
        yield from _overlaps(readers)
        yield from _of_held_out(readers)
        yield from _of_streams(readers)
        yield from _apart(readers, _rows_of_steps(seen))
        yield from check_tables(readers)
        yield from check_division(told)
    yield from _repeats(told[0])
    yield from _of_workers(told, seen)


def check_rows_ever(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D29, after the last step: what one rank reads in a watched step no other reads in another one.

    Rows that are drawn again and again come again on one rank as often as on two; where none does, each rank draws
    each row once, and two ranks draw the same ones.
    """
    readers = [ranks[0] for ranks in records[0].readers]
    if len(readers) < 2 or any(_read_together(one, readers) for one in records):
        return
    every = [_rows_by_place(records, rank) for rank in readers]
    for place in [one for one in every[0] if all(one in other for other in every)]:
        mine = [own[place] for own in every]
        if (again := _again(mine)) >= _FEWEST_AGAIN:
            line = (
                f"in the steps {records[0].step}-{records[-1].step} {len(readers)} ranks read {sum(map(len, mine))} "
                f"rows of argument {place}; {again} of them are read on more than one rank, and none twice on one rank"
            )
            yield DoctorFinding(
                (codes.ROWS,), codes.SHARED_DATA, records[0].step, OVERLAP, (line, _BY_ONE_SEED), is_note=True
            )
            return


def _again(ranks: Sequence[Sequence[int]]) -> int:
    """Return how many rows more than one rank has; 0 where one of them has some row twice, as where rows may repeat."""
    if any(len(own) != len(set(own)) for own in ranks):
        return 0
    times = Counter(row for own in ranks for row in own)
    return sum(times.values()) - len(times)


def _read_together(evidence: Evidence, ranks: Sequence[int]) -> bool:
    """Whether some ranks read one microbatch in the step, as ranks do that compute parts of one model."""
    read = [set(evidence.records[rank].forwards.batches) for rank in ranks]
    return len(set().union(*read)) < sum(map(len, read))


def _rows_by_place(records: Sequence[Evidence], rank: int) -> dict[int, list[int]]:
    """Return what stands for the rows that a rank reads in all steps, by the place of the argument."""
    found: dict[int, list[int]] = {}
    for one in records:
        for read in one.records[rank].forwards.inputs:
            for place, argument in enumerate(read.tensors):
                if argument.rows:
                    found.setdefault(place, []).extend(argument.rows)
    return found


def _of_workers(told: Sequence[Read], seen: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """Note workers of a loader that each give the rows of an IterableDataset anew: batches come once from each."""
    for name, workers in told[0].workers.items():
        batches = [[batch for one in seen for batch in one.records[rank].forwards.batches] for rank in range(len(told))]
        if workers > 1 and all(_come_by_workers(one, workers) for one in batches):
            lines = (
                f"a rank reads each microbatch {workers} times in turn, as the loader of {name} has {workers} workers",
                "meant? else give each worker its own part in __iter__(), by get_worker_info(), of the rank's part",
            )
            title = "workers read the same rows"
            yield DoctorFinding((codes.ROWS,), codes.SHARED_DATA, seen[0].step, title, lines, is_note=True)


def _come_by_workers(batches: Sequence[int], workers: int) -> bool:
    """Whether a batch is that before it, but for each that begins a turn of all workers."""
    pairs = list(enumerate(itertools.pairwise(batches), 1))
    return len(pairs) >= workers and all((one == other) == (number % workers > 0) for number, (one, other) in pairs)


def _by_loader(epochs: Sequence[Epoch]) -> dict[tuple[str, int, int], list[Epoch]]:
    found: dict[tuple[str, int, int], list[Epoch]] = {}
    for one in epochs:
        found.setdefault((one.data.kind, one.data.base, one.data.batch), []).append(one)
    return found


# Loaders ------------------------------------------------------------------------------------


class _Division(NamedTuple):
    """What ranks read in one epoch of data that they divide among them.

    Attributes:
        rows: of the data.
        given: how many rows samplers give all ranks together.
        twice: how many of these another rank has read as well, beyond those that fill the last batches up.
        never: how many rows no rank reads; None of an epoch that is not complete.
        is_all: whether the rows are all that were read, and no sample of them.
        base: of Subsets that differ between ranks, each of which is divided, the rows of the data; else 0.
    """

    rows: int
    given: int
    twice: int
    never: int | None
    is_all: bool
    base: int = 0


def _overlaps(readers: Sequence[Read]) -> Iterator[DoctorFinding]:
    """Note rows that more than one rank has read in an epoch, where ranks divide the data."""
    every = [_by_loader(one.epochs) for one in readers]
    for key in [one for one in every[0] if all(one in other for other in every)]:
        before = 0
        for number, epochs in enumerate(zip(*(one[key] for one in every), strict=False)):
            found = _division(epochs)
            if found is None:
                continue
            if not found.twice:
                before += 1
                continue
            yield _of_overlap(epochs[0], number, found, len(readers), before)
            break


def _of_overlap(epoch: Epoch, number: int, found: _Division, ranks: int, before: int) -> DoctorFinding:
    about = "" if found.is_all else "about "
    never = "" if found.never is None else f", and {about}{found.never} on none"
    lines = [
        f"epoch {number} of {epoch.data.kind} ({found.rows} rows): the {ranks} ranks divide the rows, and "
        f"{about}{found.twice} are read on more than one rank{never}"
    ]
    if before:
        lines.append(
            f"in {count_of(before, 'epoch', 'epochs')} before it none is: the random numbers of ranks go apart, as "
            "where one rank alone draws some to evaluate"
        )
    if found.base:
        lines.append(
            f"seen: ranks have {found.rows} rows each of one data set of {found.base}, and not the same ones: pass "
            "random_split() a generator of one seed"
        )
    lines.append(_BY_ONE_SEED)
    return DoctorFinding((codes.ROWS,), codes.SHARED_DATA, epoch.begins, OVERLAP, tuple(lines), is_note=True)


def _division(epochs: Sequence[Epoch]) -> _Division | None:
    """Return what ranks read of data that they divide; None where it does not show that they do, or rows may repeat."""
    counts = [count for one in epochs if (count := one.given) is not None]
    kept = [one.rows for one in epochs if one.rows is not None and not one.replaces]
    given, rows = sum(counts), _rows_of(epochs)
    is_known = min(len(counts), len(kept)) == len(epochs)
    return _divided(epochs, kept, given, rows) if is_known and _is_all_of(rows, given, epochs) else None


def _divided(epochs: Sequence[Epoch], kept: Sequence[Sequence[int]], given: int, rows: int) -> _Division:
    every = epochs[0].every
    again, read = _again(kept), len({row for one in kept for row in one})
    # Samplers fill up what does not divide, and loaders drop what is left after that.
    is_more = again > (max(0, given - rows) + len(epochs)) / every and again > 3
    base = epochs[0].data.base if _have_own_parts(epochs) and rows == epochs[0].data.size else 0
    is_known = all(one.is_complete for one in epochs) and not base
    never = max(0, rows - every * read) if is_known else None
    return _Division(rows, given, every * again if is_more else 0, never, every == 1, base)


def _is_all_of(rows: int, given: int, epochs: Sequence[Epoch]) -> bool:
    """Whether samplers of all ranks give together as many rows as there are, but for those of a batch on each rank."""
    slack = len(epochs) * max(1, epochs[0].data.batch)
    return abs(given - rows) <= slack and 3 * rows <= 4 * given < 6 * rows


def _rows_of(epochs: Sequence[Epoch]) -> int:
    """Return how many rows the data have of which ranks read parts: of the same Subset, or of what it is one of."""
    if not _have_own_parts(epochs):
        return epochs[0].data.size
    sizes, given = {one.data.size for one in epochs}, sum(one.given or 0 for one in epochs)
    # Each rank may divide a Subset of its own, which should be that of all.
    is_each_divided = len(sizes) == 1 and _is_all_of(epochs[0].data.size, given, epochs)
    return epochs[0].data.size if is_each_divided else epochs[0].data.base


def _have_own_parts(epochs: Sequence[Epoch]) -> bool:
    """Whether ranks have other Subsets of what these are Subsets of."""
    return len({(one.subset, one.data.size) for one in epochs}) > 1


def _of_held_out(readers: Sequence[Read]) -> Iterator[DoctorFinding]:
    """Note rows of a rank's evaluation by which another rank trains, where no rank trains by its own."""
    for split, base in dict.fromkeys((one.data.split, one.data.base) for one in readers[0].held_out):
        trained = [_rows_of_split(one.epochs, split, base) for one in readers]
        held = [_rows_of_split(one.held_out, split, base) for one in readers]
        if not all(trained) or not all(held) or any(own & kept for own, kept in zip(trained, held, strict=True)):
            continue
        both, first = set().union(*trained) & set().union(*held), readers[0].held_out[0]
        if len(both) >= _FEWEST_LEAKED:
            about = "" if first.every == 1 else "about "
            lines = (
                f"{len(readers)} ranks evaluate by Subsets of a data set of {base} rows; {about}"
                f"{first.every * len(both)} of these rows are in the Subsets by which other ranks train",
                "meant, as where ranks train models of their own? else split the data on all ranks by one seed: pass "
                "random_split() a generator",
            )
            title = "ranks train on rows that another evaluates"
            yield DoctorFinding((codes.ROWS,), codes.SHARED_DATA, first.begins, title, lines, is_note=True)


def _rows_of_split(epochs: Sequence[Epoch], split: int, base: int) -> set[int]:
    return {row for one in epochs if (one.data.split, one.data.base) == (split, base) for row in one.rows or ()}


def _of_streams(readers: Sequence[Read]) -> Iterator[DoctorFinding]:
    """Note rows of an IterableDataset that loaders of more than one rank give in an epoch."""
    every = [_by_loader(one.streams) for one in readers]
    for key in [one for one in every[0] if all(one in other for other in every)]:
        for number, epochs in enumerate(zip(*(one[key] for one in every), strict=False)):
            rows = [list(one.rows or ()) for one in epochs]
            count, parts = sum(map(len, rows)), [set(own) for own in rows]
            again, own = sum(map(len, parts)) - len(set().union(*parts)), count - sum(map(len, parts))
            # Rows that are alike by chance are so on one rank as often as on two.
            is_chance = again < max(_FEWEST_AGAIN + _TIMES_OWN * own, count / _ONE_AGAIN_OF)
            # Ranks that read the same from the begin on are seen in the steps.
            if is_chance or len(set(map(tuple, rows))) == 1:
                continue
            lines = (
                f"epoch {number} of {epochs[0].data.kind}: loaders give {len(readers)} ranks {count} rows; {again} of "
                f"them are given to more than one rank, and {own or 'none'} twice to one",
                "meant, as where each rank draws rows by itself? else divide the rows among all workers of all ranks: "
                "worker rank * num_workers + worker_id of world_size * num_workers",
            )
            yield DoctorFinding((codes.ROWS,), codes.SHARED_DATA, epochs[0].begins, OVERLAP, lines, is_note=True)
            break


def _repeats(read: Read) -> Iterator[DoctorFinding]:
    """Note that a sampler that shuffles gives each epoch of one training the same order."""
    for (kind, _, _), epochs in _by_loader(read.epochs).items():
        whole = [one for one in epochs if one.is_complete and one.batches > 1]
        first = whole[0] if whole else None
        if first is None or len(whole) < 2 or first.drawn < 8 or not all(_is_again(one, first) for one in whole[1:]):
            continue
        lines = (
            f"the {len(whole)} epochs of {kind} give a rank the same {first.drawn} rows in the same order",
            _why_again(first),
        )
        yield DoctorFinding((codes.ROWS,), codes.SHARED_DATA, whole[1].begins, REPEATED, lines, is_note=True)


def _is_again(one: Epoch, first: Epoch) -> bool:
    """Whether an epoch of the same training repeats the order of the first, which is meant to be shuffled."""
    is_same = one.order == first.order and one.drawn == first.drawn and one.optimizer == first.optimizer
    is_shuffled = first.rows is not None and list(first.rows) != sorted(first.rows)
    return is_same and is_shuffled and one.number == first.number and (first.shuffles or first.number is not None)


def _why_again(first: Epoch) -> str:
    if first.number is None:
        return "meant, as for a comparison of epochs? else seed its generator once, and not before each epoch"
    return "meant, as for a benchmark? else call set_epoch(epoch) of the sampler before each epoch"


# Permutations -------------------------------------------------------------------------------


def _rows_of_steps(seen: Sequence[Evidence]) -> int:
    """Return how many rows a rank reads in a step; 0 where steps or ranks differ in it."""
    counts = {sum(read.rows for read in record.forwards.inputs) for one in seen for record in one.records}
    return counts.pop() if len(counts) == 1 else 0


def _apart(readers: Sequence[Read], rows: int) -> Iterator[DoctorFinding]:
    """Note that ranks draw other permutations of as many rows as all of them read until the next one."""
    for size in dict.fromkeys(one.size for one in readers[0].permutations if rows):
        together = _together(readers, size)
        if _are_of_epochs([ranks[0] for ranks in together], readers[0].steps, size / (rows * len(readers))):
            apart = [number for number, ranks in enumerate(together) if len({one.bits for one in ranks}) > 1]
            for number in apart[:1]:
                yield _of_apart(together[number][0], number, len(readers))


def _together(readers: Sequence[Read], size: int) -> list[tuple[Permutation, ...]]:
    """Return the permutations of a size that all ranks draw, in order; none if some draw them at other steps."""
    drawn = [[one for one in read.permutations if one.size == size] for read in readers]
    together = list(zip(*drawn, strict=False))
    return together if all(len({one.step for one in ranks}) == 1 for ranks in together) else []


def _are_of_epochs(drawn: Sequence[Permutation], steps: int, expected: float) -> bool:
    """Whether each permutation serves as many steps as all ranks need to read its rows once."""
    lengths = [after.step - one.step for one, after in itertools.pairwise(drawn)]
    lengths = lengths or [steps - one.step for one in drawn]
    return expected >= 2 and bool(lengths) and all(abs(one - expected) < 1 for one in lengths)


def _of_apart(first: Permutation, number: int, ranks: int) -> DoctorFinding:
    lines = [
        f"the {ranks} ranks draw different permutations of {first.size} numbers before step {first.step}, and read as "
        "many rows together until the next one"
    ]
    if number:
        lines.append(
            f"{count_of(number, 'permutation', 'permutations')} before it "
            f"{'is' if number == 1 else 'are'} equal: the random numbers of ranks go apart, as where one rank alone "
            "draws some to evaluate"
        )
    lines.append(_BY_ONE_SEED)
    return DoctorFinding((codes.ROWS,), codes.SHARED_DATA, first.step, OVERLAP, tuple(lines), is_note=True)
