"""Do labels belong to the inputs, and do ranks draw what they add to the data? (D30, and D9 for each argument)"""

from collections.abc import Iterator, Sequence

from shardproof.harness.judging import codes
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding
from shardproof.harness.watching.ledger import Read
from shardproof.harness.watching.records import Argument, Labels

#: The fewest rows of which all labels are rolled that are no chance.
_FEWEST_ROWS = 6

_Steps = Sequence[Sequence[Argument]]
"""One argument of the forward by step and rank."""

#: The title of the note of an argument that ranks share and that varies.
DRAWN_ALIKE = "ranks draw the same numbers"

#: The title of the note of columns of an argument that ranks have alike.
ALIKE_IN_PART = "ranks have the same values in some columns"


def check_labels_ever(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D30, after the last step: labels of tokens are the next tokens, and those of columns are columns of the rank."""
    every = [[one.records[rank].losses.labels for rank in range(len(one.records))] for one in records]
    of_tokens = [one for step in every for mine in step for one in mine if one.rows]
    rolled = [one for one in of_tokens if one.are_rolled]
    # Each loss of a step counts: where some are of other labels, the rest are still rolled in all steps.
    if sum(one.rows for one in rolled) >= _FEWEST_ROWS and len(rolled) == len(of_tokens):
        count, each = sum(one.rows for one in rolled), rolled[0].count // rolled[0].rows
        lines = (
            f"the label of the last token of a row is the row's first token, in all of {count} rows of {each} tokens",
            "meant? else shift before a row is cut or divided among ranks, so that the last label is the next token, "
            "or ignore it (-100)",
        )
        yield DoctorFinding((codes.LABELS,), "", records[0].step, "labels are the inputs rolled", lines, is_note=True)
    yield from _of_columns(records)


def _of_columns(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """Note labels that count columns gathered from ranks, and do not begin at those of the rank."""
    readers = [ranks[0] for ranks in records[0].readers]
    if len(readers) < 2:
        return
    every = [[one.records[rank].losses.labels for rank in readers] for one in records]
    firsts = [_firsts(step) for step in every]
    if not firsts[0] or any(one != firsts[0] for one in firsts):
        return
    (of_first,) = firsts[0]
    count = next(one.count for one in every[0][0] if one.first is not None)
    if sorted(of_first) != [number * count for number in range(len(readers))]:
        lines = (
            f"cross_entropy has {count} rows and {count * len(readers)} columns, those of {len(readers)} ranks, and "
            f"labels that count up from {', '.join(map(str, of_first[:8]))} on these ranks",
            "meant, as where each rank has its own columns first? else add the rank's number times its rows to the "
            "labels",
        )
        yield DoctorFinding(
            (codes.LABELS,), "", records[0].step, "labels are columns of another rank", lines, is_note=True
        )


def check_tables(readers: Sequence[Read]) -> Iterator[DoctorFinding]:
    """D30, after the loop: note tables of the same names that give them other numbers on other ranks."""
    for name in readers[0].tables:
        tables = [one.tables.get(name) for one in readers]
        known = [one for one in tables if one is not None]
        if len(known) < len(readers) or len({(one.size, one.members) for one in known}) > 1:
            continue
        if len({one.order for one in known}) > 1:
            other = next(one for one in known if one.order != known[0].order)
            lines = (
                f"{name}: {known[0].size} names, the same on {len(readers)} ranks and in different orders: "
                f"{', '.join(map(repr, known[0].first))} on one, {', '.join(map(repr, other.first))} on another",
                "meant? else sort the names before they are numbered: a set of str has another order in each process, "
                "so that ranks learn different labels",
            )
            title = "ranks number names differently"
            yield DoctorFinding((codes.LABELS,), codes.APART, 0, title, lines, is_note=True)
            return


def _firsts(step: Sequence[Sequence[Labels]]) -> set[tuple[int, ...]]:
    """Return where labels begin on each rank that count the columns of all ranks; nothing where some do not."""
    counted = [
        [one.first for one in mine if one.first is not None and one.columns == one.count * len(step)] for mine in step
    ]
    if not all(counted) or len({len(one) for one in counted}) > 1:
        return set()
    return {tuple(one) for one in zip(*counted, strict=True) if None not in one}


def check_arguments_ever(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D9, after the last step: what varies from step to step and is no position varies from rank to rank too."""
    readers = [ranks[0] for ranks in records[0].readers]
    if len(records) < 2 or len(readers) < 2:
        return
    seen = _by_place([[_arguments(one, rank) for rank in readers] for one in records])
    differ = [place for place, steps in enumerate(seen) if _are_each_ranks_own(steps)]
    shared = [place for place, steps in enumerate(seen) if differ and _is_drawn_alike(steps)]
    if shared:
        lines = (
            f"argument {shared[0]} of the forward ({seen[shared[0]][0][0].kind}) is the same on {len(readers)} ranks "
            f"in each of the steps {records[0].step}-{records[-1].step}, another one in each step, and argument "
            f"{differ[0]} ({seen[differ[0]][0][0].kind}) is each rank's own",
            "meant? else draw noise, times and masks on each rank by a seed of its own",
        )
        yield DoctorFinding((codes.DATA,), codes.SHARED_DATA, records[-1].step, DRAWN_ALIKE, lines, is_note=True)


def check_columns_ever(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D9, after the last step: columns of an argument that vary from row to row are each rank's own, as others are."""
    readers = [ranks[0] for ranks in records[0].readers]
    seen = _by_place([[_arguments(one, rank) for rank in readers] for one in records]) if len(readers) > 1 else []
    for place, steps in enumerate(seen):
        by_column = _by_column(steps)
        alike = [number for number, one in enumerate(by_column) if all(map(_is_alike, one))]
        apart = [number for number, one in enumerate(by_column) if all(map(_is_apart, one))]
        if alike and apart:
            argument = f"argument {place} of the forward ({steps[0][0].kind})"
            yield _of_alike(records, len(readers), argument, alike, apart)
            return


def _by_column(steps: _Steps) -> list[Sequence[Sequence[int]]]:
    """Return for each column of an argument what ranks have there in each step; nothing where shapes differ."""
    if len({(one.kind, len(one.columns)) for step in steps for one in step}) > 1:
        return []
    return [[[one.columns[number] for one in step] for step in steps] for number in range(len(steps[0][0].columns))]


def _is_alike(ranks: Sequence[int]) -> bool:
    """Whether a column that varies is one on all ranks."""
    return len(set(ranks)) == 1 and ranks[0] % 2 == 1


def _is_apart(ranks: Sequence[int]) -> bool:
    """Whether a column is none of one value, and another one on some ranks."""
    return len(set(ranks)) > 1 and all(ranks)


def _of_alike(
    records: Sequence[Evidence], readers: int, argument: str, alike: Sequence[int], apart: Sequence[int]
) -> DoctorFinding:
    """Make the note of columns that ranks have alike."""
    if alike[-1] < apart[0]:
        meant = "meant, as where ranks share prompts, and each has completions of its own?"
    else:
        meant = "meant?"
    lines = (
        f"{len(alike)} columns of {argument} have the same values in the same rows on {readers} ranks in each of the "
        f"steps {records[0].step}-{records[-1].step} (the first is {alike[0]}), and {len(apart)} columns are each "
        f"rank's own (the first is {apart[0]})",
        f"{meant} else each rank must take its own rows of both, as of what one rank has sent to all",
    )
    return DoctorFinding((codes.DATA,), codes.SHARED_DATA, records[-1].step, ALIKE_IN_PART, lines, is_note=True)


def _by_place(steps: Sequence[Sequence[Sequence[Argument]]]) -> list[_Steps]:
    """Return for each place among the arguments of a step what ranks have there; nothing where these are not as many.

    Args:
        steps: the arguments by step and rank.
    """
    counts = {len(mine) for step in steps for mine in step}
    places = range(counts.pop() if len(counts) == 1 else 0)
    return [[[mine[place] for mine in step] for step in steps] for place in places]


def _are_each_ranks_own(steps: _Steps) -> bool:
    """Whether an argument differs between ranks in each step."""
    return all(len({one.bits for one in step}) > 1 for step in steps)


def _arguments(evidence: Evidence, rank: int) -> list[Argument]:
    return [argument for one in evidence.records[rank].forwards.inputs for argument in one.tensors]


def _is_drawn_alike(steps: _Steps) -> bool:
    """Whether an argument is equal on all ranks in each step, and other drawn numbers in each."""
    alike = all(len({one.bits for one in step}) == 1 and all(one.varies for one in step) for step in steps)
    return alike and len({step[0].bits for step in steps}) == len(steps)
