"""How far implementations are from the profiles of the contract: passed of all items that a hardware class can have."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from shardproof import contract
from shardproof.reports.texts import cause, printable, table
from shardproof.runfile import CaseRecord, Implementation, Run, Verdict, public_version

LEGEND = "reached, or items passed of all that the hardware class can have, + those without a record"

UNNAMED = "(the run file does not name what is missing)"


@dataclasses.dataclass(frozen=True)
class Standing:
    """How far an implementation is from a profile, by the items of the newest version of the contract.

    Attributes:
        items: how many items the profile has on this class of hardware.
        passed: how many of them passed. An expected failure did not.
        lacks: the capabilities and whatever else was missing, with the number of items that were skipped for each.
        fails: the findings, or else the cases, with the number of items that failed.
        not_run: how many items the run file does not have, as one of other cases or of a part.
        unsharded: what the profile wants sharded and the implementation, as far as the run file says, does not shard.
    """

    profile: str
    hardware: str
    implementation: str
    torch: str
    items: int
    passed: int
    lacks: Mapping[str, int]
    fails: Mapping[str, int]
    not_run: int
    unsharded: tuple[str, ...]

    @property
    def is_reached(self) -> bool:
        """Whether nothing is missing."""
        return self.passed == self.items and not self.unsharded

    @property
    def cell(self) -> str:
        """``reached``, or passed of all, and behind a plus what did not run: ``70/83 +13``."""
        absent = f" +{self.not_run}" if self.not_run else ""
        return "reached" if self.is_reached else f"{self.passed}/{self.items}{absent}"

    @property
    def missing(self) -> str:
        """What is missing, in one line; empty if it is reached."""
        shards = f"not known to shard {', '.join(self.unsharded)}" if self.unsharded else ""
        absent = f"{self.not_run} not run" if self.not_run else ""
        return "; ".join(filter(None, [shards, _listed("fails", self.fails), _listed("lacks", self.lacks), absent]))


def _listed(word: str, found: Mapping[str, int]) -> str:
    return f"{word} {', '.join(f'{what} ({count})' for what, count in found.items())}" if found else ""


def standings(run: Run) -> list[Standing]:
    """Return the standings of each implementation of a run, in the order of the profiles.

    A run of other cases, or on hardware of no class, such as GPUs without NCCL, has none.
    """
    found = []
    for name in run.implementations:
        records = {case.id: case for case in run.cases if case.implementation == name}
        hardware = _class_of(run, records.values()) if records.keys() & contract.items().keys() else ""
        for profile, what in contract.profiles().items():
            if hardware in what.classes:
                ids = [id_ for id_, item in contract.items().items() if what.has(item, contract.CLASSES[hardware])]
                found.append(_standing(profile, hardware, name, run, [records.get(id_) for id_ in ids]))
    return found


def _standing(profile: str, hardware: str, name: str, run: Run, cases: Sequence[CaseRecord | None]) -> Standing:
    """The standing by the records of all items of a profile; None is an item that did not run."""
    told = run.environment.implementations.get(name, Implementation())
    # Files of earlier versions do not say what is sharded; who shards parameters shards what belongs to them.
    shards = told.shards or (contract.SHARDS if "sharded" in told.capabilities else ())
    ran = [case for case in cases if case is not None]
    lacks = _counts(one for case in ran if case.verdict.is_skip for one in case.missing or [UNNAMED])
    fails = _counts(cause(case) for case in ran if not case.verdict.is_skip and case.verdict is not Verdict.PASS)
    return Standing(
        profile=profile,
        hardware=hardware,
        implementation=name,
        torch=public_version(told.torch or run.environment.torch),
        items=len(cases),
        passed=sum(case.verdict is Verdict.PASS for case in ran),
        lacks=lacks,
        fails=fails,
        not_run=len(cases) - len(ran),
        unsharded=tuple(one for one in contract.SHARDS if one in contract.profiles()[profile].shards - {*shards}),
    )


def _class_of(run: Run, cases: Iterable[CaseRecord]) -> str:
    devices = {case.device for case in cases}
    environments = [part.environment for part in run.merged] or [run.environment]
    if devices == {"cpu"}:
        return "cpu-4"
    return "nccl-2" if devices == {"cuda"} and any(one.nccl for one in environments) else ""


def _counts(names: Iterable[str]) -> dict[str, int]:
    """Count names, the most frequent first."""
    return dict(sorted(Counter(names).items(), key=lambda one: (-one[1], one[0])))


def places(runs: Iterable[Run]) -> dict[tuple[str, str], list[list[Standing]]]:
    """Return the standings of several runs by hardware class and torch: a row for each implementation of each run."""
    found: dict[tuple[str, str], list[list[Standing]]] = {}
    for run in runs:
        for _, row in groupby(standings(run), key=lambda one: one.implementation):
            first, *others = row
            found.setdefault((first.hardware, first.torch), []).append([first, *others])
    return found


def render_profiles(runs: Iterable[Run]) -> str:
    """Render standings: for each class and torch a table of implementations by profiles, and what is missing."""
    lines = [f"contract {contract.version()}: {LEGEND}"]
    for (hardware, torch), rows in places(runs).items():
        lines += ["", printable(f"{hardware} ({contract.CLASSES[hardware].title}), torch {torch}:")]
        cells = [[row[0].implementation, *(one.cell for one in row)] for row in rows]
        lines += [printable(f"  {line}") for line in table([["", *(one.profile for one in rows[0])], *cells])]
        standing = [one for row in rows for one in row if one.missing]
        lines += [printable(f"  {one.implementation}, {one.profile}: {one.missing}") for one in standing]
    return "\n".join(lines) + "\n"
