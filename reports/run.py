"""Run files: the environment of a run, and a record for each case and implementation."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardproof.reports.fields import Fields, RecordError, integer, kind_of, text
from shardproof.reports.loading import load
from shardproof.reports.record import CaseRecord

SUPPORTED_VERSIONS = (1, 2)

EFFORTS = ("quick", "standard", "full")
"""The efforts, least first. A file without one is of a version that ran everything."""

MIXED = "mixed"
"""The device type in the environment of a merged run whose parts have several."""

_KILLED = "the run is under way, or its process ended before it could write the reason"


class RunFileError(ValueError):
    """A run file cannot be read. The message is one line that begins with the path of the file."""


@dataclass(frozen=True)
class Accelerator:
    """One accelerator of the host of the run."""

    name: str
    memory_bytes: int

    @classmethod
    def parse(cls, data: object, where: str) -> "Accelerator":
        """Read an accelerator from JSON data.

        Args:
            data: the JSON object.
            where: the path of the object in the file, for messages.

        Raises:
            RecordError: the data violate the schema.
        """
        fields = Fields(data, where)
        return cls(name=fields.required("name", str), memory_bytes=fields.optional("memory_bytes", 0))


@dataclass(frozen=True)
class Implementation:
    """One implementation of a run.

    Attributes:
        version: the version of the implementation; may be empty.
        capabilities: the capabilities that its adapter declares.
    """

    version: str
    capabilities: tuple[str, ...]

    @classmethod
    def parse(cls, data: object, where: str) -> "Implementation":
        """Read an implementation from JSON data.

        Args:
            data: the JSON object.
            where: the path of the object in the file, for messages.

        Raises:
            RecordError: the data violate the schema.
        """
        fields = Fields(data, where)
        return cls(version=fields.optional("version", ""), capabilities=fields.items("capabilities", text))


@dataclass(frozen=True)
class Environment:
    """The host, versions and options of a run.

    Attributes:
        shardproof: the version of shardproof.
        shardproof_commit: its commit, followed by "-dirty" if the code differed from it; "unknown" without a commit.
        python: the version of Python.
        torch: the version of torch.
        torch_git_version: the commit from which torch was built; "unknown" if torch does not say.
        platform: the operating system.
        cpu_count: the number of CPU cores.
        device: the device type of the ranks.
        accelerators: the accelerators of the host.
        nccl: the version of NCCL.
        started: the time at which the run started, in ISO 8601.
        seconds: the duration of the run.
        command: the command line.
        implementations: the implementations by name, in the order of the command.
        numerics: the constants of the comparison.
        mends: features that were left out because torch lacks a private name, and why.

    A field that the writer left out is empty, zero or None.
    """

    shardproof: str
    shardproof_commit: str
    python: str
    torch: str
    torch_git_version: str
    platform: str
    cpu_count: int
    device: str
    accelerators: tuple[Accelerator, ...]
    nccl: str | None
    started: str
    seconds: float
    command: tuple[str, ...]
    implementations: Mapping[str, Implementation]
    numerics: Mapping[str, Any]
    mends: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: object, where: str) -> "Environment":
        """Read an environment from JSON data.

        Args:
            data: the JSON object.
            where: the path of the object in the file, for messages.

        Raises:
            RecordError: the data violate the schema.
        """
        fields = Fields(data, where)
        return cls(
            shardproof=fields.optional("shardproof", ""),
            shardproof_commit=fields.optional("shardproof_commit", ""),
            python=fields.optional("python", ""),
            torch=fields.optional("torch", ""),
            torch_git_version=fields.optional("torch_git_version", ""),
            platform=fields.optional("platform", ""),
            cpu_count=fields.optional("cpu_count", 0),
            device=fields.optional("device", ""),
            accelerators=fields.items("accelerators", Accelerator.parse),
            nccl=fields.maybe("nccl", str),
            started=fields.optional("started", ""),
            seconds=fields.optional("seconds", 0.0),
            command=fields.items("command", text),
            implementations=fields.mapping("implementations", Implementation.parse),
            numerics=fields.optional("numerics", {}),
            mends=fields.optional("mends", {}),
        )


@dataclass(frozen=True)
class LeftOut:
    """A selected case that pytest skipped without asking shardproof, as by ``@pytest.mark.skip``.

    Attributes:
        id: the name of the case.
        implementation: the name of the implementation.
        reason: pytest's reason.
    """

    id: str
    implementation: str
    reason: str

    @classmethod
    def parse(cls, data: object, where: str) -> "LeftOut":
        """Read a case that was left out from JSON data.

        Args:
            data: the JSON object.
            where: the path of the object in the file, for messages.

        Raises:
            RecordError: the data violate the schema.
        """
        fields = Fields(data, where)
        return cls(
            id=fields.required("id", str),
            implementation=fields.required("implementation", str),
            reason=fields.optional("reason", ""),
        )


@dataclass(frozen=True)
class Effort:
    """The effort of a run, and the cases that it left out.

    Attributes:
        name: "quick", "standard" or "full".
        deselected: the number of cases that were left out, by implementation and file.
    """

    name: str
    deselected: Mapping[str, Mapping[str, int]]

    @classmethod
    def parse(cls, data: object, where: str) -> "Effort":
        """Read an effort from JSON data.

        Args:
            data: the JSON object.
            where: the path of the object in the file, for messages.

        Raises:
            RecordError: the data violate the schema.
        """
        fields = Fields(data, where)
        return cls(name=fields.required("name", str), deselected=fields.mapping("deselected", _counts))


@dataclass(frozen=True)
class Part:
    """One of the runs of which a run was merged.

    Attributes:
        file: the name of its run file.
        run_id: identifies the run.
        environment: its environment.
        effort: the name of its effort; empty if its file has none.
    """

    file: str
    run_id: str
    environment: Environment
    effort: str

    @classmethod
    def parse(cls, data: object, where: str) -> "Part":
        """Read a part from JSON data.

        Args:
            data: the JSON object.
            where: the path of the object in the file, for messages.

        Raises:
            RecordError: the data violate the schema.
        """
        fields = Fields(data, where)
        end = Fields(fields.optional("end", {}), fields.path("end"))
        environment = Environment.parse(fields.required("environment", dict), fields.path("environment"))
        effort = Effort.parse(fields.data["effort"], fields.path("effort")) if fields.has("effort") else None
        return cls(
            file=fields.required("file", str),
            run_id=fields.required("run_id", str),
            environment=replace(environment, seconds=end.optional("seconds", 0.0)),
            effort=effort.name if effort else "",
        )


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        environment: the environment of the run.
        cases: the records, in the order of the file; of a case that was run again, the last one.
        run_id: identifies the run; empty in a file of version 1.
        suites: a hash of the files of the cases; empty in a file of an earlier version.
        selected: the ids of the selected cases by implementation; empty in a file of version 1.
        left_out: the selected cases that pytest skipped.
        earlier: the records of cases that were run again later.
        unasked: by implementation, the requirements of every implementation that no case of the run checks, with the
            needs of their cases.
        effort: the effort of the run; None in a file of a version without efforts, which had the full one.
        incomplete: why the run is incomplete; empty if it is complete. Files of version 1 do not say.
        exit_code: the exit code of the run; None if it is unknown.
        problems: reasons other than its cases for which the run failed, such as known failures that match no case.
        merged: the runs of which this one was merged; empty for a run of pytest.
    """

    environment: Environment
    cases: tuple[CaseRecord, ...]
    run_id: str = ""
    suites: str = ""
    selected: Mapping[str, tuple[str, ...]] | None = None
    left_out: tuple[LeftOut, ...] = ()
    earlier: tuple[CaseRecord, ...] = ()
    unasked: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    effort: Effort | None = None
    incomplete: str = ""
    exit_code: int | None = None
    problems: tuple[str, ...] = ()
    merged: tuple[Part, ...] = ()

    @property
    def implementations(self) -> list[str]:
        """The names of the implementations: those of the environment in its order, then those of records alone."""
        return list(dict.fromkeys([*self.environment.implementations, *(case.implementation for case in self.cases)]))

    @property
    def not_run(self) -> list[tuple[str, str]]:
        """The selected cases without a record that were not left out, as (implementation, id)."""
        known = {(case.implementation, case.id) for case in self.cases}
        known |= {(case.implementation, case.id) for case in self.left_out}
        pairs = ((name, id_) for name, ids in (self.selected or {}).items() for id_ in ids)
        return [pair for pair in pairs if pair not in known]


def public_version(version: str) -> str:
    """Return a version without its local part: builds of torch for CPUs and for CUDA are one version."""
    return version.partition("+")[0]


def parse_run(data: object) -> Run:
    """Read a run from JSON data.

    The schema version is checked first, because the rules of one version do not apply to the data of another.

    Args:
        data: the content of a run file.

    Returns:
        The run.

    Raises:
        RecordError: the data violate the schema, have an unknown version, have two records for one attempt of a case
            on an implementation, or call a run complete in which a selected case has no record. The message is one line
            with the field and its value.
    """
    fields = Fields(data, "")
    version = fields.required("schema_version", int)
    if version not in SUPPORTED_VERSIONS:
        supported = ", ".join(map(str, SUPPORTED_VERSIONS))
        raise RecordError(f"schema_version: {version} is not supported; supported: {supported}")
    return _version_1(fields) if version == 1 else _version_2(fields)


def _version_1(fields: Fields) -> Run:
    fields.required("cases", list)
    cases, earlier = _last_attempts(fields.items("cases", CaseRecord.parse))
    if earlier:
        raise RecordError(f"cases: attempts are of version 2, and {earlier[0].id!r} has several")
    environment = Environment.parse(fields.required("environment", dict), "environment")
    return Run(environment=environment, cases=cases)


def _version_2(fields: Fields) -> Run:
    """Read a run of version 2. Of an incomplete run, everything but the id may be missing."""
    end = Fields(fields.optional("end", {"complete": False, "reason": _KILLED}), "end")
    complete = end.required("complete", bool)
    if complete:
        for name, kind in (("environment", dict), ("selected", dict), ("cases", list)):
            fields.required(name, kind)
    cases, earlier = _last_attempts(fields.items("cases", CaseRecord.parse))
    environment = Environment.parse(fields.optional("environment", {}), "environment")
    run = Run(
        environment=replace(environment, seconds=end.optional("seconds", 0.0)),
        cases=cases,
        run_id=fields.required("run_id", str),
        suites=fields.optional("suites", ""),
        selected=fields.mapping("selected", _texts),
        left_out=fields.items("left_out", LeftOut.parse),
        earlier=earlier,
        unasked=fields.mapping("unasked", _needs),
        effort=Effort.parse(fields.data["effort"], "effort") if fields.has("effort") else None,
        incomplete="" if complete else end.required("reason", str) or "the run file gives no reason",
        exit_code=end.maybe("exit_code", int),
        problems=end.items("problems", text),
        merged=fields.items("merged", Part.parse),
    )
    if complete and run.not_run:
        name, id_ = run.not_run[0]
        raise RecordError(f"end.complete: true, but {id_!r} was selected for {name!r} and has no record")
    return run


def load_run(path: str | Path) -> Run:
    """Read a run file, or the journal that an incomplete run has left.

    A run file is data: nothing in it is executed or unpickled.

    Args:
        path: the path of the file. A file that is compressed by gzip is recognised by its content.

    Returns:
        The run.

    Raises:
        RunFileError: the file is missing, is no regular file, is too large, is not JSON, or violates the schema; or the
            journal of a newer, incomplete run exists next to it. The message is one line that begins with the path.
    """
    return load(path, parse_run, RunFileError)


def _last_attempts(cases: Iterable[CaseRecord]) -> tuple[tuple[CaseRecord, ...], tuple[CaseRecord, ...]]:
    """Separate the last attempt of each case from the earlier ones.

    Raises:
        RecordError: the attempts of a case are not numbered 1, 2, 3, ...: one cell of the matrix would hide a verdict.
    """
    last: dict[tuple[str, str], CaseRecord] = {}
    earlier = []
    for i, case in enumerate(cases):
        key = (case.id, case.implementation)
        before = last.pop(key, None)
        if case.attempt != (before.attempt if before else 0) + 1:
            raise RecordError(f"cases[{i}].id: {case.id!r} on {case.implementation!r} is in the file twice")
        if before:
            earlier.append(before)
        last[key] = case
    return tuple(last.values()), tuple(earlier)


def _counts(value: object, where: str) -> dict[str, int]:
    counts: dict[str, object] = kind_of(value, dict, where)
    return {name: integer(count, f"{where}.{name}") for name, count in counts.items()}


def _needs(value: object, where: str) -> Mapping[str, str]:
    needs: dict[object, object] = kind_of(value, dict, where)
    return {str(name): text(needed, f"{where}.{name}") for name, needed in needs.items()}


def _texts(value: object, where: str) -> tuple[str, ...]:
    elements: list[object] = kind_of(value, list, where)
    return tuple(text(element, f"{where}[{i}]") for i, element in enumerate(elements))
