"""What the matrix of a page needs: the contract, and the verdict of each case on each implementation in each run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardproof.contract import chapters
from shardproof.runfile import CaseRecord, Run, Verdict

NO_RECORD = "."
"""The character of a case without a record."""


@dataclass(frozen=True)
class Requirement:
    """A requirement that some case of a page checks."""

    id: str  # the chapter and the number
    chapter: str
    text: str  # what is required, in Markdown; empty if the contract of this version does not have it


class Contract:
    """The contract of this version of shardproof.

    Run files of other versions, and of cases in other projects, name requirements that it does not have.
    """

    def __init__(self) -> None:
        self._subjects = {name: subject for name, subject, _ in chapters()}
        rows = ((id_, name, said) for name, _, rows in chapters() for id_, said, _ in rows)
        self._requirements = {id_: Requirement(id_, name, said) for id_, name, said in rows}

    def subject(self, chapter: str) -> str:
        """What a chapter is about; empty if it is unknown."""
        return self._subjects.get(chapter, "")

    def in_order(self, ids: Iterable[str]) -> list[Requirement]:
        """Return requirements in the order of the contract, and behind them the unknown ones in the order of `ids`.

        Unknown requirements of one chapter stay together, behind the known ones of their chapter if there are any.
        """
        wanted = dict.fromkeys(ids)
        known = [one for id_, one in self._requirements.items() if id_ in wanted]
        unknown = [
            Requirement(id_, id_.rpartition("-")[0] or id_, "") for id_ in wanted if id_ not in self._requirements
        ]
        chapters = [*self._subjects, *dict.fromkeys(one.chapter for one in unknown)]
        position = {name: i for i, name in enumerate(dict.fromkeys(chapters))}
        return sorted([*known, *unknown], key=lambda one: position[one.chapter])


@dataclass(frozen=True)
class Column:
    """A column of the matrix."""

    implementation: str  # its name in the run
    version: str  # its version; may be empty
    run: int  # the position of the run
    records: Mapping[str, CaseRecord]  # its records by the id of the case


@dataclass(frozen=True)
class Table:
    """The cases of all runs."""

    requirements: tuple[Requirement, ...]  # those that the cases check, in the order of the contract
    # The id of each case with the positions of its requirements, ordered by the first of them and by id.
    cases: tuple[tuple[str, tuple[int, ...]], ...]
    columns: tuple[Column, ...]  # ordered by implementation, then by run


def table(runs: Sequence[Run], contract: Contract) -> Table:
    """Order the cases and the columns of several runs."""
    checked: dict[str, dict[str, None]] = {}
    for run in runs:
        for case in run.cases:
            # Runs of different versions may name different requirements for one case.
            checked.setdefault(case.id, {}).update(dict.fromkeys(filter(None, case.requirements)))
    requirements = contract.in_order(name for names in checked.values() for name in names or ("",))
    position = {one.id: i for i, one in enumerate(requirements)}
    placed = {id_: tuple(sorted(position[name] for name in names or ("",))) for id_, names in checked.items()}
    cases = sorted(placed.items(), key=lambda case: (case[1][0], case[0]))
    return Table(tuple(requirements), tuple(cases), tuple(_columns(runs)))


def _columns(runs: Sequence[Run]) -> Iterable[Column]:
    for name in dict.fromkeys(name for run in runs for name in run.implementations):
        for i, run in enumerate(runs):
            if name in run.implementations:
                known = run.environment.implementations.get(name)
                records = {case.id: case for case in run.cases if case.implementation == name}
                yield Column(name, known.version if known else "", i, records)


def as_data(table: Table, contract: Contract, *, run_labels: Sequence[str], chunks: Sequence[int]) -> dict[str, Any]:
    """Write a table for the script of the page.

    Each column has its verdicts as one string, with a digit for each case, its place in :class:`Verdict`; and for each
    case the number of the reason for the verdict, a position in the list of all reasons. ``chunks`` has the position of
    the first case of each chunk of details.
    """
    digits = {verdict: str(i) for i, verdict in enumerate(Verdict)}
    reasons: dict[str, int] = {"": 0}
    columns = []
    for column in table.columns:
        records = [column.records.get(id_) for id_, _ in table.cases]
        columns.append(
            {
                "implementation": column.implementation,
                "version": column.version,
                "run": column.run,
                "verdicts": "".join(NO_RECORD if one is None else digits[one.verdict] for one in records),
                "reasons": [0 if one is None else reasons.setdefault(reason(one), len(reasons)) for one in records],
            }
        )
    chapters = dict.fromkeys(one.chapter for one in table.requirements)
    return {
        "runs": list(run_labels), "chapters": [[name, contract.subject(name)] for name in chapters],
        "requirements": [[one.id, one.chapter, one.text] for one in table.requirements],
        "cases": [id_ for id_, _ in table.cases], "checks": [list(numbers) for _, numbers in table.cases],
        "columns": columns, "reasons": list(reasons), "chunks": list(chunks),
    }  # fmt: skip


def reason(case: CaseRecord) -> str:
    """Why the verdict is not a plain pass, in one line; empty for one that is."""
    why = case.reason
    if case.verdict is Verdict.EXPECTED_FAIL:
        return case.expected or why
    if case.verdict is Verdict.UNEXPECTED_PASS:
        return case.expected or why
    if case.verdict.is_skip:
        return ", ".join(case.missing)
    return why if case.verdict.fails else ""
