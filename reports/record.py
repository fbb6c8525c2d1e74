"""One case on one implementation, as the run file holds it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shardproof.reports.fields import Fields, RecordError, integer, number, shown, text


class Verdict(StrEnum):
    """What a case came to, gravest first."""

    HARNESS_ERROR = "harness-error"
    CRASH = "crash"
    FAIL = "fail"
    HANG = "hang"
    UNMET = "unmet"
    UNSUPPORTED = "unsupported"
    EXPECTED_FAIL = "expected-fail"
    UNEXPECTED_PASS = "unexpected-pass"
    PASS = "pass"

    @property
    def failed(self) -> bool:
        """Whether the verdict asks for somebody's work; an expected failure and a skip do not."""
        return self in _FAILED

    @property
    def skipped(self) -> bool:
        """Whether the case did not run, because a capability or hardware is missing."""
        return self in (Verdict.UNMET, Verdict.UNSUPPORTED)


# An unexpected pass is among them: an expectation that no longer holds must be taken out.
_FAILED = {Verdict.HARNESS_ERROR, Verdict.CRASH, Verdict.FAIL, Verdict.HANG, Verdict.UNEXPECTED_PASS}


@dataclass(frozen=True)
class Failure:
    """Where two runs part first, or what stopped the case. What is not known is None."""

    text: str
    stage: str | None = None
    step: int | None = None
    rank: int | None = None
    name: str | None = None
    element: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, data: object, where: str) -> "Failure":
        """Read a failure from JSON data. Raises RecordError, naming the field."""
        fields = Fields(data, where)
        return cls(
            text=fields.required("text", str),
            stage=fields.maybe("stage", str),
            step=fields.maybe("step", int),
            rank=fields.maybe("rank", int),
            name=fields.maybe("name", str),
            element=fields.items("element", integer) if fields.has("element") else None,
        )


@dataclass(frozen=True)
class Distance:
    """How far both runs' tensors are from the oracle at one stage, in ulps, and how far was allowed."""

    stage: str
    step: int
    name: str
    sharded_ulps: float
    baseline_ulps: float | None
    allowed_ulps: float

    @classmethod
    def parse(cls, data: object, where: str) -> "Distance":
        """Read a distance from JSON data. Raises RecordError, naming the field."""
        fields = Fields(data, where)
        return cls(
            stage=fields.required("stage", str),
            step=fields.required("step", int),
            name=fields.required("name", str),
            sharded_ulps=fields.required("sharded_ulps", float),
            baseline_ulps=fields.maybe("baseline_ulps", float),
            allowed_ulps=fields.required("allowed_ulps", float),
        )


@dataclass(frozen=True)
class Trace:
    """The ordered collectives, one line each, that the named ranks all issued."""

    ranks: tuple[int, ...]
    lines: tuple[str, ...]

    @classmethod
    def parse(cls, data: object, where: str) -> "Trace":
        """Read a trace from JSON data. Raises RecordError, naming the field."""
        fields = Fields(data, where)
        return cls(ranks=fields.items("ranks", integer), lines=fields.items("trace", text))


@dataclass(frozen=True)
class CaseRecord:
    """What one case came to on one implementation. `id` is the same for every implementation."""

    id: str
    implementation: str
    requirement: str
    world: int
    device: str
    parameters: Mapping[str, Any]
    verdict: Verdict
    seconds: float
    nodeid: str
    seeds: Mapping[str, int]
    missing: tuple[str, ...]
    expected: str
    failure: Failure | None
    losses: Mapping[str, tuple[float, ...]]
    distances: tuple[Distance, ...]
    collectives: tuple[Trace, ...]

    @property
    def requirements(self) -> list[str]:
        """The requirements that the case checks: `requirement` names one, or several with commas between."""
        return [name.strip() for name in self.requirement.split(",")]

    @classmethod
    def parse(cls, data: object, where: str) -> "CaseRecord":
        """Read a record from JSON data.

        Raises RecordError, one line that names the field and the value at fault.
        """
        fields = Fields(data, where)
        return cls(
            id=fields.required("id", str),
            implementation=fields.required("implementation", str),
            requirement=fields.required("requirement", str),
            world=_world(fields),
            device=fields.required("device", str),
            parameters=fields.required("parameters", dict),
            verdict=_verdict(fields),
            seconds=fields.required("seconds", float),
            nodeid=fields.optional("nodeid", ""),
            seeds=fields.mapping("seeds", integer),
            missing=fields.items("missing", text),
            expected=fields.optional("expected", ""),
            failure=Failure.parse(fields.data["failure"], fields.path("failure")) if fields.has("failure") else None,
            losses=fields.mapping("losses", _numbers),
            distances=fields.items("distances", Distance.parse),
            collectives=fields.items("collectives", Trace.parse),
        )


def _world(fields: Fields) -> int:
    world = fields.required("world", int)
    if world < 1:
        raise RecordError(f"{fields.path('world')}: {world} is not a number of ranks")
    return world


def _verdict(fields: Fields) -> Verdict:
    word = fields.required("verdict", str)
    try:
        return Verdict(word)
    except ValueError:
        raise RecordError(f"{fields.path('verdict')}: {shown(word)} is not one of {', '.join(Verdict)}") from None


def _numbers(value: object, where: str) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise RecordError(f"{where}: {shown(value)} is not a list")
    return tuple(number(element, f"{where}[{i}]") for i, element in enumerate(value))
