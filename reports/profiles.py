"""How far implementations are from the profiles of the contract: passed of all items that a hardware class can have."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from shardproof import contract
from shardproof.door import printable
from shardproof.reports.texts import cause, table
from shardproof.runfile import Implementation, Run, Verdict, public_version

LEGEND = "reached, or items passed of all that the hardware class can have, + those without a record"


@dataclasses.dataclass(frozen=True)
class Standing:
    """How far an implementation is from a profile, by the items of the newest version of the contract.

    ``lacks`` counts skipped items by what was missing, ``fails`` those that ran and did not pass by their findings or
    ids. ``not_run`` are the items without a record, ``seconds`` what the others took; ``unsharded`` is to be sharded
    and not known to be so.
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
    seconds: float
    unsharded: Sequence[str]

    @property
    def cell(self) -> str:
        """``reached``, or passed of all, and behind a plus what did not run: ``70/83 +13``."""
        absent = f" +{self.not_run}" if self.not_run else ""
        return f"{self.passed}/{self.items}{absent}" if self.missing else "reached"

    @property
    def missing(self) -> str:
        """What is missing, in one line; empty if the profile is reached."""
        fails, lacks = (", ".join(f"{what} ({n})" for what, n in found.items()) for found in (self.fails, self.lacks))
        parts = {"not known to shard": ", ".join(self.unsharded), "fails": fails, "lacks": lacks}
        parts["not run:"] = str(self.not_run or "")
        return "; ".join(f"{word} {what}" for word, what in parts.items() if what)


def standings(run: Run) -> list[Standing]:
    """Return the standings of each implementation of a run, in the order of the profiles.

    They are those of the profiles all of whose items the run asked for: of some by ``--profile``, or of all as by
    ``--contract``. What another run selects depends on what the implementation declares, and so would its figures. Runs
    from before the first version asked for all that there was. A run on hardware of no class, such as GPUs without
    NCCL, has none.
    """
    found = []
    environments = [run.environment, *(part.environment for part in run.merged)]
    for name in run.implementations:
        told = run.environment.implementations.get(name, Implementation())
        # Files of earlier versions do not say what is sharded; who shards parameters shards what belongs to them.
        shards = told.shards or (contract.SHARDS if "sharded" in told.capabilities else ())
        records = {case.id: case for case in run.cases if case.implementation == name}
        devices = {case.device for case in records.values()}
        has_nccl = any(one.nccl for one in environments)
        torch = public_version(told.torch or run.environment.torch)
        kinds = {contract.class_of(device, has_nccl=has_nccl) for device in devices}
        hardware = kinds.pop() if len(kinds) == 1 else ""
        version = contract.version_of(run.environment.contract)
        asked = _asked(run, name)
        # For other records, as those of a user's training, no items of an open version are collected.
        may_be = any(re.fullmatch(r"[A-Z]+-\d+", said) for one in records.values() for said in one.requirements)
        have = may_be and records.keys() & contract.items(version).keys()
        for profile, what in contract.profiles().items() if have else ():
            ids = contract.items_of_profile(profile, hardware, of=version)
            if asked is not None and not (ids <= asked and profile in (asked_for(run) or [profile])):
                continue
            ran = [records[id_] for id_ in ids if id_ in records]
            others = [case for case in ran if case.verdict is not Verdict.PASS]
            skipped = [case for case in others if case.verdict.is_skip]
            if ids:
                lacks = _counts(one for case in skipped for one in case.missing or ["what it does not name"])
                fails = _counts(cause(case) for case in others if not case.verdict.is_skip)
                seconds = sum(case.seconds for case in ran)
                counts = (len(ids), len(ran) - len(others), lacks, fails, len(ids) - len(ran), seconds)
                unsharded = [one for one in contract.SHARDS if one in what.shards - {*shards}]
                found.append(Standing(profile, hardware, name, torch, *counts, unsharded))
    return found


def _asked(run: Run, implementation: str) -> frozenset[str] | None:
    """The ids of what a run selected; None for one from before the first version, or merged of several."""
    known = run.environment.contract in contract.versions()
    return frozenset(run.selected.get(implementation, ())) if known else None


def asked_for(run: Run) -> list[str]:
    """Return the profiles that a run asked for by their names."""
    return contract.named(run.effort.profile) if run.effort else []


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items(), key=lambda one: (-one[1], one[0])))


def places(runs: Iterable[Run]) -> dict[tuple[str, str], list[list[Standing]]]:
    """Return the standings of several runs by hardware class and torch: a row for each implementation of each run."""
    found: dict[tuple[str, str], list[list[Standing]]] = {}
    for run in runs:
        for _, row in groupby(standings(run), key=lambda one: one.implementation):
            first, *others = row
            found.setdefault((first.hardware, first.torch), []).append([first, *others])
    return found


def _cells(row: Iterable[Standing], profiles: Iterable[str]) -> list[str]:
    """The cells of a row; a dash for a profile that its run did not ask for."""
    cells = {one.profile: one.cell for one in row}
    return [cells.get(name, "-") for name in profiles]


def _why_none(run: Run) -> str:
    version = contract.version_of(run.environment.contract)
    return f"the run did not ask for all items of one: run --profile NAME, or --contract {version}"


def render_profiles(runs: Iterable[Run]) -> str:
    """Render standings: for each class and torch a table of implementations by profiles, and what is missing."""
    runs = [*runs]
    lines = [f"contract {', '.join(sorted({contract.version_of(run.environment.contract) for run in runs}))}: {LEGEND}"]
    for (hardware, torch), rows in places(runs).items():
        profiles = list(dict.fromkeys(one.profile for row in rows for one in row))
        cells = [[row[0].implementation, *_cells(row, profiles)] for row in rows]
        lines += ["", f"{hardware}, torch {torch}:", *table([["", *profiles], *cells])]
        lines += [f"{one.implementation}, {one.profile}: {one.missing}" for row in rows for one in row if one.missing]
    for run in runs:
        mine = standings(run)
        if asked_for(run):
            costs = (f"{one.implementation}, {one.profile}: {one.items} items in {one.seconds:.0f} s" for one in mine)
            lines += ["", *costs]
        elif not mine:
            lines += ["", f"{', '.join(run.implementations)}: no profile, because {_why_none(run)}"]
    return "\n".join(map(printable, lines)) + "\n"
