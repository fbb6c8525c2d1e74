"""Joins the run files of several environments into one, so that their implementations stand in one matrix."""

import itertools
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardproof.door import BadFile
from shardproof.jsonfiles import encode
from shardproof.reports.texts import counted, short
from shardproof.runfile import (
    EFFORTS,
    MIXED,
    UNKNOWN,
    CaseRecord,
    Effort,
    End,
    Environment,
    Implementation,
    LeftOut,
    Part,
    Run,
    Verdict,
    load_run,
    public_version,
)  # fmt: skip

_FAILED = 1  # the exit code of a run in which a case failed


@dataclass(frozen=True)
class Column:
    """The subject of one column of the matrix: an implementation in one environment."""

    name: str  # the name of the implementation, as ``--impl`` takes it
    torch: str  # the version of torch, without its local part
    device: str  # the device type of the ranks
    version: str  # the version of the implementation; empty if it is torch's


@dataclass(frozen=True)
class _Source:
    path: Path
    run: Run

    @property
    def ran(self) -> set[tuple[Column, str]]:
        """The cases that ran, as their columns and ids."""
        return {(self.column(case.implementation), case.id) for case in self.run.cases if not case.verdict.is_skip}

    def commits(self, column: Column) -> dict[str, set[str]]:
        """Return the commits of shardproof and torch that this file names for a column; a merged one may have many."""
        parts = [
            part.environment
            for part in self.run.merged
            if column.name in part.environment.implementations
            and (public_version(part.environment.torch), part.environment.device) == (column.torch, column.device)
        ]
        environments = parts if self.run.merged else [self.run.environment]
        return {
            "shardproof": {env.shardproof_commit for env in environments} - {"", UNKNOWN},
            "torch": {env.torch_git_version for env in environments} - {"", UNKNOWN},
        }

    @property
    def names(self) -> list[str]:
        """The names of all implementations in this file."""
        selected, left_out = self.run.selected, (item.implementation for item in self.run.left_out)
        return list(dict.fromkeys([*self.run.implementations, *selected, *left_out]))

    def column(self, name: str) -> Column:
        """Return the column of an implementation of this file, which may be a merged one itself."""
        env = self.run.environment
        entry = env.implementations.get(name, Implementation())
        torch, version = public_version(entry.torch or env.torch), public_version(entry.version)
        return Column(entry.name or name, torch, entry.device or env.device, "" if version == torch else version)

    @property
    def parts(self) -> Sequence[Part]:
        """What a merged file keeps of each run in this file, which is one unless it is merged itself."""
        run = self.run
        alone = Part(
            file=self.path.name, run_id=run.run_id, environment=run.environment, effort=run.effort, suites=run.suites,
            end=run.end,
        )  # fmt: skip
        return run.merged or [alone]


@dataclass(frozen=True)
class Merged:
    """The result of joining run files."""

    data: dict[str, Any]  # a run file of version 2, as JSON values
    # How many cases several files have, by the name of their column, and when these runs were started.
    repeated: Mapping[str, tuple[int, tuple[str, ...]]]


def merge(paths: Sequence[Path], *, command: Sequence[str]) -> Merged:
    """Join run files, which may be merged ones themselves.

    An implementation of several files is one column if its name, its version, the version of torch and the device type
    are the same; otherwise it is several, whose names contain the difference. If several files have a case of one
    column, one record stays: one that ran rather than a skip, and then the one with the gravest verdict. No record is
    chosen between two commits of shardproof, whose built-in implementations change with it, or of torch. ``command`` is
    the command line, for the environment of the merged run.

    Raises:
        BadFile: a file cannot be read, is incomplete, is named twice, or compares with other constants; or a case of
            one column ran in two files at two commits.
    """
    sources = [_read(path) for path in paths]
    _check(sources)
    _check_commits(sources)
    columns = {column: None for source in sources for column in map(source.column, source.names)}
    labels = dict(zip(columns, _labels(list(columns)), strict=True))
    chosen, repeated = _chosen(sources, labels)
    left_out = {
        (labels[source.column(item.implementation)], item.id): item.reason
        for source in reversed(sources)
        for item in source.run.left_out
    }
    run = Run(
        run_id=uuid.uuid4().hex, environment=_environment(sources, labels, command), effort=_effort(sources, labels),
        suites=_joined(source.run.suites for source in sources), selected=_selected(sources, labels),
        unasked=_unasked(sources, labels), cases=[record for records in chosen.values() for record in records],
        left_out=[
            LeftOut(id=id_, implementation=label, reason=reason)
            for (label, id_), reason in left_out.items()
            if (label, id_) not in chosen
        ],
        end=_end(sources), merged=[part for source in sources for part in source.parts],
    )  # fmt: skip
    return Merged(encode(run), repeated)


def _read(path: Path) -> _Source:
    run = load_run(path)
    if run.incomplete:
        raise BadFile(f"{path}: is incomplete ({run.incomplete}); complete runs can be merged")
    return _Source(path, run)


def _check(sources: Sequence[_Source]) -> None:
    first = sources[0]
    seen: dict[str, Path] = {}
    for source in sources:
        for part in source.parts:
            if (other := seen.get(part.run_id)) is not None:
                started = part.environment.started
                raise BadFile(f"{other} and {source.path} have the same run, started {started}; name it once")
            seen[part.run_id] = source.path
        ours, theirs = dict(first.run.environment.numerics), dict(source.run.environment.numerics)
        if ours != theirs:
            raise BadFile(f"{source.path}: its numerics are {theirs}, {first.path} has {ours}; run one again")


def _check_commits(sources: Sequence[_Source]) -> None:
    """Refuse cases of one column that ran in two files at two commits, as far as the files name commits."""
    for one, other in itertools.combinations(sources, 2):
        both = Counter(column for column, _ in one.ran & other.ran)
        for column, count in both.items():
            ours, theirs = one.commits(column), other.commits(column)
            for what in ours:
                if len(found := ours[what] | theirs[what]) > 1:
                    commits = " and ".join(map(short, sorted(found)))
                    raise BadFile(
                        f"{one.path} and {other.path} both ran {counted(count, 'case')} of {column.name}, at two "
                        f"commits of {what} ({commits}); shardproof gate compares such runs"
                    )


def _labels(columns: Sequence[Column]) -> list[str]:
    """Name columns by their implementation, and by the properties that distinguish them."""
    torches = len({column.torch for column in columns}) > 1
    devices = len({column.device for column in columns}) > 1
    alike = Counter((column.name, column.torch, column.device) for column in columns)
    labels = []
    for column in columns:
        facts = [column.version] if alike[column.name, column.torch, column.device] > 1 and column.version else []
        facts += [f"torch {column.torch}"] if torches else []
        facts += [column.device] if devices else []
        labels.append(f"{column.name} ({', '.join(facts)})" if facts else column.name)
    return labels


def _chosen(
    sources: Sequence[_Source], labels: Mapping[Column, str]
) -> tuple[dict[tuple[str, str], list[CaseRecord]], dict[str, tuple[int, tuple[str, ...]]]]:
    """Return all attempts of each case, by column and id, and what several files have, as in :class:`Merged`."""
    chosen: dict[tuple[str, str], list[CaseRecord]] = {}
    several: dict[str, set[str]] = {}
    runs: dict[str, dict[str, set[str]]] = {}
    for source in sources:
        records: dict[tuple[str, str], list[CaseRecord]]
        records = {(labels[source.column(case.implementation)], case.id): [] for case in source.run.cases}
        for case in (*source.run.earlier, *source.run.cases):
            label = labels[source.column(case.implementation)]
            # The name that --impl takes, which the label may not be.
            command = case.reproduction if case.failure is not None else case.reproduce
            renamed = replace(case, implementation=label, reproduce=command)
            records[label, case.id].append(renamed)
        for key, attempts in records.items():
            label, id_ = key
            runs.setdefault(label, {}).setdefault(source.run.environment.started, set()).add(id_)
            if key in chosen:
                several.setdefault(label, set()).add(id_)
            if key not in chosen or _weight(attempts[-1].verdict) < _weight(chosen[key][-1].verdict):
                chosen[key] = attempts
    repeated = {
        label: (len(ids), tuple(sorted(when for when, theirs in runs[label].items() if theirs & ids)))
        for label, ids in sorted(several.items())
    }
    return chosen, repeated


def _weight(verdict: Verdict) -> tuple[bool, int]:
    """Order verdicts: cases that ran come before skipped ones, and the gravest first."""
    return verdict.is_skip, list(Verdict).index(verdict)


def _environment(sources: Sequence[_Source], labels: Mapping[Column, str], command: Sequence[str]) -> Environment:
    environments = [source.run.environment for source in sources]
    first = environments[0]
    devices = list(dict.fromkeys(one.device for one in environments))
    alone = len(sources) == 1
    return Environment(
        shardproof=_joined(one.shardproof for one in environments),
        shardproof_commit=_joined(one.shardproof_commit for one in environments),
        contract=_joined(one.contract for one in environments),
        torch_git_version=_joined(one.torch_git_version for one in environments),
        python=_joined(one.python for one in environments), torch=_joined(one.torch for one in environments),
        platform=_joined(one.platform for one in environments), cpu_count=first.cpu_count if alone else None,
        device=devices[0] if len(devices) == 1 else MIXED, accelerators=first.accelerators if alone else [],
        nccl=first.nccl if alone else None, started=min(one.started for one in environments), command=command,
        implementations=_implementations(sources, labels), numerics=first.numerics,
        mends={part: what for one in environments for part, what in one.mends.items()},
    )  # fmt: skip


def _joined(values: Iterable[str]) -> str:
    """Return the common value, or all values."""
    return ", ".join(dict.fromkeys(part for value in values if value for part in value.split(", ")))


def _implementations(sources: Sequence[_Source], labels: Mapping[Column, str]) -> dict[str, Implementation]:
    found: dict[str, Implementation] = {}
    for source in sources:
        for name in source.names:
            column = source.column(name)
            told = source.run.environment.implementations.get(name, Implementation())
            before = found.get(labels[column], told)
            found[labels[column]] = Implementation(
                version=before.version, capabilities=sorted({*before.capabilities, *told.capabilities}),
                shards=before.shards or told.shards, reads=before.reads or told.reads, name=column.name,
                torch=column.torch, device=column.device,
            )  # fmt: skip
    return found


def _selected(sources: Sequence[_Source], labels: Mapping[Column, str]) -> dict[str, list[str]]:
    selected: dict[str, dict[str, None]] = {}
    for source in sources:
        for name, ids in (source.run.selected).items():
            selected.setdefault(labels[source.column(name)], {}).update(dict.fromkeys(ids))
    return {label: list(ids) for label, ids in selected.items()}


def _unasked(sources: Sequence[_Source], labels: Mapping[Column, str]) -> dict[str, Mapping[str, str]]:
    """Return by label the requirements that no file of the column asks."""
    found: dict[str, Mapping[str, str]] = {}
    for source in sources:
        for name in source.names:
            needs, label = source.run.unasked.get(name, {}), labels[source.column(name)]
            found[label] = {one: found[label][one] for one in found[label] if one in needs} if label in found else needs
    return {label: needs for label, needs in found.items() if needs}


def _effort(sources: Sequence[_Source], labels: Mapping[Column, str]) -> Effort:
    """Return the least effort of all files, the cases that they left out, and their profile if they have one."""
    names = [source.run.effort.name if source.run.effort else EFFORTS[-1] for source in sources]
    deselected: dict[str, dict[str, int]] = {}
    for source in sources:
        for name, counts in (source.run.effort.deselected if source.run.effort else {}).items():
            mine = deselected.setdefault(labels[source.column(name)], {})
            # Two files that leave out cases of one chapter leave out the same ones.
            mine.update({file: max(count, mine.get(file, 0)) for file, count in counts.items()})
    profiles = {source.run.effort.profile if source.run.effort else "" for source in sources}
    profile = profiles.pop() if len(profiles) == 1 else ""
    return Effort(name=min(names, key=EFFORTS.index), deselected=deselected, profile=profile)


def _end(sources: Sequence[_Source]) -> End:
    codes = [source.run.end.exit_code for source in sources]
    seconds = sum(source.run.end.seconds for source in sources)
    code = _FAILED if _FAILED in codes else max(codes)
    return End(complete=True, reason="", exit_code=code, seconds=round(seconds, 3))
