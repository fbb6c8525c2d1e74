"""One run file: the environment of a run and a record for each case and implementation."""

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
    """A run file cannot be read. The message is one line that begins with the file's name."""


@dataclass(frozen=True)
class Accelerator:
    """One accelerator of the host that the run was on."""

    name: str
    memory_bytes: int

    @classmethod
    def parse(cls, data: object, where: str) -> "Accelerator":
        """Read an accelerator from JSON data. Raises RecordError, naming the field."""
        fields = Fields(data, where)
        return cls(name=fields.required("name", str), memory_bytes=fields.optional("memory_bytes", 0))


@dataclass(frozen=True)
class Implementation:
    """One implementation of the run: its version and the capabilities that its adapter declares."""

    version: str
    capabilities: tuple[str, ...]

    @classmethod
    def parse(cls, data: object, where: str) -> "Implementation":
        """Read an implementation from JSON data. Raises RecordError, naming the field."""
        fields = Fields(data, where)
        return cls(version=fields.optional("version", ""), capabilities=fields.items("capabilities", text))


@dataclass(frozen=True)
class Environment:
    """Where and how a run was made. What the writer did not say is empty, zero or None."""

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
        """Read an environment from JSON data. Raises RecordError, naming the field."""
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
    """One run: its environment and its records, in the order in which they were written."""

    environment: Environment
    cases: tuple[CaseRecord, ...]

    @property
    def implementations(self) -> list[str]:
        """The implementations' names: as the environment lists them, then any that only a record names."""
        return list(dict.fromkeys([*self.environment.implementations, *(case.implementation for case in self.cases)]))


def parse_run(data: object) -> Run:
    """Read a run from JSON data.

    Raises RecordError, one line that names the field and the value at fault. The version is looked at first: what an
    unknown version holds is not judged by the rules of a known one.
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
    """Read a run file, compressed if its name ends in ``.gz``. It is read as data: nothing in it is run or unpickled.

    Raises RunFileError, one line that begins with the path, if the file is missing, is no JSON or breaks the schema.
    """
    try:
        return parse_run(json.loads(_content(Path(path))))
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise RunFileError(f"{path}: not compressed by gzip: {error}") from error
    except OSError as error:
        raise RunFileError(f"{path}: {error.strerror or error}") from error
    except RecordError as error:
        raise RunFileError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:  # not JSON, not Unicode, a number of 5000 digits, nested too deep
        raise RunFileError(f"{path}: not a JSON file: {error}") from error


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def _refuse_duplicates(cases: tuple[CaseRecord, ...]) -> None:
    """Two verdicts for one cell of the matrix would hide one of them."""
    seen: set[tuple[str, str]] = set()
    for i, case in enumerate(cases):
        key = (case.id, case.implementation)
        if key in seen:
            raise RecordError(f"cases[{i}].id: {case.id!r} on {case.implementation!r} is in the file twice")
        seen.add(key)
