"""Joins the run files of several environments into one, so that their implementations stand in one matrix."""

import itertools
import json
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof.reports import files
from shardproof.reports.origins import UNKNOWN, short
from shardproof.reports.record import CaseRecord, Verdict
from shardproof.reports.run import EFFORTS, MIXED, Run, RunFileError, load_run, public_version

_VERSION = 2
_FAILED = 1  # the exit code of a run in which a case failed


class MergeError(ValueError):
    """Run files cannot be joined. The message is one line that names the file."""


@dataclass(frozen=True)
class Column:
    """The subject of one column of the matrix: an implementation in one environment.

    Attributes:
        name: the name of the implementation, as ``--impl`` takes it.
        torch: the version of torch, without its local part.
        device: the device type of the ranks.
        version: the version of the implementation; empty if it is torch's.
    """

    name: str
    torch: str
    device: str
    version: str


@dataclass(frozen=True)
class _Source:
    """One run file, as it was read: its raw content, and the same content parsed."""

    path: Path
    data: Mapping[str, Any]
    run: Run

    @property
    def ran(self) -> set[tuple[Column, str]]:
        """The cases that ran, as their columns and ids."""
        return {(self.column(case.implementation), case.id) for case in self.run.cases if not case.verdict.skipped}

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
        selected, left_out = self.run.selected or {}, (item.implementation for item in self.run.left_out)
        return list(dict.fromkeys([*self.run.implementations, *selected, *left_out]))

    def column(self, name: str) -> Column:
        """Return the column of an implementation of this file, which may be a merged one itself."""
        environment, entry = self.run.environment, self.entry(name)
        torch = public_version(entry.get("torch", environment.torch))
        version = public_version(entry.get("version", ""))
        device = entry.get("device", environment.device)
        return Column(entry.get("name", name), torch, device, "" if version == torch else version)

    def entry(self, name: str) -> Mapping[str, Any]:
        """Return what the environment of this file has about an implementation; empty if it has nothing."""
        found: Mapping[str, Any] = self.data["environment"].get("implementations", {}).get(name, {})
        return found


@dataclass(frozen=True)
class Merged:
    """The result of joining run files.

    Attributes:
        data: a run file of version 2, as JSON values.
        repeated: how many cases several files have, by the name of their column, and when these runs were started.
    """

    data: dict[str, Any]
    repeated: Mapping[str, tuple[int, tuple[str, ...]]]


def merge(paths: Sequence[Path], *, command: Sequence[str]) -> Merged:
    """Join run files.

    An implementation of several files is one column if its name, its version, the version of torch and the device type
    are the same; otherwise it is several, whose names contain the difference. If several files have a case of one
    column, one record stays: one that ran rather than a skip, and then the one with the gravest verdict. No
    record is chosen between two commits of shardproof, whose built-in implementations change with it, or of torch.

    Args:
        paths: the files, which may be merged ones themselves.
        command: the command line, for the environment of the merged run.

    Raises:
        RunFileError: a file cannot be read.
        MergeError: a file is of version 1 or incomplete, is named twice, or compares with other constants; or a case of
            one column ran in two files at two commits.
    """
    sources = [_read(path) for path in paths]
    _check(sources)
    _check_commits(sources)
    columns = {column: None for source in sources for column in map(source.column, source.names)}
    labels = dict(zip(columns, _labels(list(columns)), strict=True))
    chosen, repeated = _chosen(sources, labels)
    known = set(chosen)
    left_out = {
        (labels[source.column(item.implementation)], item.id): item.reason
        for source in reversed(sources)
        for item in source.run.left_out
    }
    data: dict[str, Any] = {
        "schema_version": _VERSION,
        "run_id": uuid.uuid4().hex,
        "environment": _environment(sources, labels, command),
        "effort": _effort(sources, labels),
        **_known(suites=_joined(source.run.suites for source in sources)),
        "selected": _selected(sources, labels),
        "cases": [record for records in chosen.values() for record in records],
        "left_out": [
            {"id": id_, "implementation": label, "reason": reason}
            for (label, id_), reason in left_out.items()
            if (label, id_) not in known
        ],
        "end": _end(sources),
        "merged": [part for source in sources for part in _parts(source)],
    }
    return Merged(data, repeated)


def _read(path: Path) -> _Source:
    run = load_run(path)
    try:
        data = json.loads(files.read(path))
    except (OSError, ValueError) as error:  # removed or replaced since it was read
        raise RunFileError(f"{path}: {error}") from error
    if data["schema_version"] != _VERSION:
        raise MergeError(f"{path}: has version {data['schema_version']}; files of version {_VERSION} can be merged")
    if run.incomplete:
        raise MergeError(f"{path}: is incomplete ({run.incomplete}); complete runs can be merged")
    return _Source(path, data, run)


def _check(sources: Sequence[_Source]) -> None:
    first = sources[0]
    seen: dict[str, Path] = {}
    for source in sources:
        for part in _parts(source):
            if (other := seen.get(part["run_id"])) is not None:
                raise MergeError(_same_run(other, source.path, part["environment"].get("started", "")))
            seen[part["run_id"]] = source.path
        ours, theirs = dict(first.run.environment.numerics), dict(source.run.environment.numerics)
        if ours != theirs:
            raise MergeError(f"{source.path}: compares by {theirs}, and {first.path} by {ours}; run one of them again")


def _same_run(one: Path, other: Path, started: str) -> str:
    return f"{one} and {other} have the same run, started {started}; name it once"


def _check_commits(sources: Sequence[_Source]) -> None:
    """Refuse cases of one column that ran in two files at two commits, as far as the files name commits."""
    for one, other in itertools.combinations(sources, 2):
        both = Counter(column for column, _ in one.ran & other.ran)
        for column, count in both.items():
            ours, theirs = one.commits(column), other.commits(column)
            for what in ours:
                if len(found := ours[what] | theirs[what]) > 1:
                    cases = f"{count} case{'' if count == 1 else 's'} of {column.name}"
                    commits = " and ".join(map(short, sorted(found)))
                    raise MergeError(
                        f"{one.path} and {other.path} both ran {cases}, at two commits of {what} ({commits}); "
                        "shardproof gate compares such runs"
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
) -> tuple[dict[tuple[str, str], list[dict[str, Any]]], dict[str, tuple[int, tuple[str, ...]]]]:
    """Return all attempts of each case, by column and id, and what several files have, as in :class:`Merged`."""
    chosen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    verdicts: dict[tuple[str, str], Verdict] = {}
    several: dict[str, set[str]] = {}
    runs: dict[str, dict[str, set[str]]] = {}
    for source in sources:
        records: dict[tuple[str, str], list[dict[str, Any]]] = {}
        last = {(case.implementation, case.id): case for case in source.run.cases}
        for record in source.data["cases"]:
            key = record["implementation"], record["id"]
            label = labels[source.column(key[0])]
            records.setdefault((label, key[1]), []).append(_renamed(record, label, source, last[key]))
        for (name, id_), case in last.items():
            label = labels[source.column(name)]
            key = label, id_
            runs.setdefault(label, {}).setdefault(source.run.environment.started, set()).add(id_)
            if key in chosen:
                several.setdefault(label, set()).add(id_)
            if key not in chosen or _weight(case.verdict) < _weight(verdicts[key]):
                chosen[key], verdicts[key] = records[key], case.verdict
    repeated = {
        label: (len(ids), tuple(sorted(when for when, theirs in runs[label].items() if theirs & ids)))
        for label, ids in sorted(several.items())
    }
    return chosen, repeated


def _renamed(record: Mapping[str, Any], label: str, source: _Source, case: CaseRecord) -> dict[str, Any]:
    # The name that --impl takes, which the label may not be.
    again = {"reproduce": case.reproduction} if case.failure is not None and case.reproduction else {}
    return again | dict(record) | {"implementation": label}


def _weight(verdict: Verdict) -> tuple[bool, int]:
    """Order verdicts: cases that ran come before skipped ones, and the gravest first."""
    return verdict.skipped, list(Verdict).index(verdict)


def _environment(sources: Sequence[_Source], labels: Mapping[Column, str], command: Sequence[str]) -> dict[str, Any]:
    environments = [source.run.environment for source in sources]
    first = environments[0]
    devices = list(dict.fromkeys(one.device for one in environments))
    alone = len(sources) == 1
    return {
        "shardproof": _joined(one.shardproof for one in environments),
        **_known(
            shardproof_commit=_joined(one.shardproof_commit for one in environments),
            torch_git_version=_joined(one.torch_git_version for one in environments),
        ),
        "python": _joined(one.python for one in environments),
        "torch": _joined(one.torch for one in environments),
        "platform": _joined(one.platform for one in environments),
        "cpu_count": first.cpu_count if alone else None,
        "device": devices[0] if len(devices) == 1 else MIXED,
        "accelerators": [vars(one) for one in first.accelerators] if alone else [],
        "nccl": first.nccl if alone else None,
        "started": min(one.started for one in environments),
        "command": list(command),
        "implementations": _implementations(sources, labels),
        "numerics": dict(first.numerics),
    }


def _joined(values: Iterable[str]) -> str:
    """Return the common value, or all values."""
    return ", ".join(dict.fromkeys(part for value in values if value for part in value.split(", ")))


def _known(**fields: str) -> dict[str, str]:
    """Return the fields that any of the files has; earlier versions did not write them."""
    return {name: value for name, value in fields.items() if value}


def _implementations(sources: Sequence[_Source], labels: Mapping[Column, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for source in sources:
        for name in source.names:
            column = source.column(name)
            told = {"version": "", "capabilities": []} | dict(source.entry(name))
            before = found.get(labels[column], told)
            capabilities = sorted({*before["capabilities"], *told["capabilities"]})
            of = {"name": column.name, "torch": column.torch, "device": column.device}
            found[labels[column]] = told | before | of | {"capabilities": capabilities}
    return found


def _selected(sources: Sequence[_Source], labels: Mapping[Column, str]) -> dict[str, list[str]]:
    selected: dict[str, dict[str, None]] = {}
    for source in sources:
        for name, ids in (source.run.selected or {}).items():
            selected.setdefault(labels[source.column(name)], {}).update(dict.fromkeys(ids))
    return {label: list(ids) for label, ids in selected.items()}


def _effort(sources: Sequence[_Source], labels: Mapping[Column, str]) -> dict[str, Any]:
    """Return the least effort of all files, and the cases that they left out."""
    names = [source.run.effort.name if source.run.effort else EFFORTS[-1] for source in sources]
    deselected: dict[str, dict[str, int]] = {}
    for source in sources:
        for name, counts in (source.run.effort.deselected if source.run.effort else {}).items():
            mine = deselected.setdefault(labels[source.column(name)], {})
            # Two files that leave out cases of one chapter leave out the same ones.
            mine.update({file: max(count, mine.get(file, 0)) for file, count in counts.items()})
    return {"name": min(names, key=EFFORTS.index), "deselected": deselected}


def _end(sources: Sequence[_Source]) -> dict[str, Any]:
    codes = [source.run.exit_code or 0 for source in sources]
    seconds = sum(source.run.environment.seconds for source in sources)
    code = _FAILED if _FAILED in codes else max(codes)
    return {"complete": True, "reason": "", "exit_code": code, "seconds": round(seconds, 3)}


def _parts(source: _Source) -> list[dict[str, Any]]:
    """Return the entries of a merged file about the runs in this file: one run, unless the file is merged itself."""
    if "merged" in source.data:
        return list(source.data["merged"])
    kept = {
        name: source.data[name] for name in ("run_id", "environment", "effort", "suites", "end") if name in source.data
    }
    return [{"file": source.path.name} | kept]
