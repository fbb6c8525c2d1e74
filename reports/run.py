"""Run files: the environment of a run, and a record for each case and implementation."""

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardproof.reports.fields import Fields, RecordError, text
from shardproof.reports.record import CaseRecord

SUPPORTED_VERSIONS = (1,)


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
        python: the version of Python.
        torch: the version of torch.
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

    A field that the writer left out is empty, zero or None.
    """

    shardproof: str
    python: str
    torch: str
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
            python=fields.optional("python", ""),
            torch=fields.optional("torch", ""),
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
        )


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        environment: the environment of the run.
        cases: the records, in the order of the file.
    """

    environment: Environment
    cases: tuple[CaseRecord, ...]

    @property
    def implementations(self) -> list[str]:
        """The names of the implementations: those of the environment in its order, then those of records alone."""
        return list(dict.fromkeys([*self.environment.implementations, *(case.implementation for case in self.cases)]))


def parse_run(data: object) -> Run:
    """Read a run from JSON data.

    The schema version is checked first, because the rules of one version do not apply to the data of another.

    Args:
        data: the content of a run file.

    Returns:
        The run.

    Raises:
        RecordError: the data violate the schema, have an unknown version, or have two records for one case and
            implementation. The message is one line with the field and its value.
    """
    fields = Fields(data, "")
    version = fields.required("schema_version", int)
    if version not in SUPPORTED_VERSIONS:
        supported = ", ".join(map(str, SUPPORTED_VERSIONS))
        raise RecordError(f"schema_version: {version} is not supported; supported: {supported}")
    fields.required("cases", list)
    run = Run(
        environment=Environment.parse(fields.required("environment", dict), "environment"),
        cases=fields.items("cases", CaseRecord.parse),
    )
    _refuse_duplicates(run.cases)
    return run


def load_run(path: str | Path) -> Run:
    """Read a run file.

    A run file is data: nothing in it is executed or unpickled.

    Args:
        path: the path of the file; the file is compressed if its name ends in ``.gz``.

    Returns:
        The run.

    Raises:
        RunFileError: the file is missing, is not compressed although its name ends in ``.gz``, is not JSON, or violates
            the schema. The message is one line that begins with the path.
    """
    try:
        return parse_run(json.loads(_content(Path(path))))
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise RunFileError(f"{path}: not compressed by gzip: {error}") from error
    except OSError as error:
        raise RunFileError(f"{path}: {error.strerror or error}") from error
    except RecordError as error:
        raise RunFileError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:  # not JSON, not Unicode, a number of 5000 digits, nested too deeply
        raise RunFileError(f"{path}: not a JSON file: {error}") from error


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def _refuse_duplicates(cases: tuple[CaseRecord, ...]) -> None:
    """Reject a second record for one case and implementation: one cell of the matrix would hide one of the two."""
    seen: set[tuple[str, str]] = set()
    for i, case in enumerate(cases):
        key = (case.id, case.implementation)
        if key in seen:
            raise RecordError(f"cases[{i}].id: {case.id!r} on {case.implementation!r} is in the file twice")
        seen.add(key)
