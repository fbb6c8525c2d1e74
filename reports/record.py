"""The record of one case on one implementation in a run file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shardproof.reports.fields import Fields, RecordError, integer, number, shown, text

#: The last line of a traceback, which begins with the name of the exception.
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b")


class Verdict(StrEnum):
    """The outcome of a case, gravest first.

    The harness has the same list; the two packages do not import each other, and a test compares them.
    """

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
        """Whether the verdict requires action; an expected failure and a skip do not."""
        return self in _FAILED

    @property
    def skipped(self) -> bool:
        """Whether the case did not run, because a capability or hardware is missing."""
        return self in (Verdict.UNMET, Verdict.UNSUPPORTED)


# An unexpected pass is a failure: the expectation no longer holds and must be removed.
_FAILED = {Verdict.HARNESS_ERROR, Verdict.CRASH, Verdict.FAIL, Verdict.HANG, Verdict.UNEXPECTED_PASS}


@dataclass(frozen=True)
class Failure:
    """The first place where two runs diverge, or the reason why the case stopped.

    Attributes:
        text: the message of the failure.
        stage: the stage at which the runs diverge.
        step: the number of the step.
        rank: the rank that failed.
        name: the name of the parameter or other tensor.
        element: the index of the element.

    An attribute other than `text` is None if it is unknown.
    """

    text: str
    stage: str | None = None
    step: int | None = None
    rank: int | None = None
    name: str | None = None
    element: tuple[int, ...] | None = None

    @property
    def line(self) -> str:
        """Why the case failed, in one line: where the runs first diverge, or the error of a traceback."""
        if self.stage is not None:
            name = f" of {self.name}" if self.name is not None else ""
            step = f" in step {self.step}" if self.step is not None else ""
            rank = f" on rank {self.rank}" if self.rank is not None else ""
            return f"{self.stage}{name} diverges{step}{rank}"
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        errors = [line for line in lines if _ERROR.match(line)]
        return (errors or lines or ["no text"])[0]

    @classmethod
    def parse(cls, data: object, where: str) -> "Failure":
        """Read a failure from JSON data.

        Args:
            data: the JSON object.
            where: the path of the object in the file, for messages.

        Raises:
            RecordError: the data violate the schema.
        """
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
class Explanation:
    """The result of a second run of a failed case, with capture on (``--explain``).

    Attributes:
        again: the verdict of the second run.
        alike: whether it failed in the same way, with the same bits.
        text: all of it in words; the failure's text ends with it.
        first: where the runs first diverge; None if all compared tensors agree.
        module: the module of the tensor that diverges first; empty if it belongs to none.
        parameter: the parameter or buffer that it is, or whose gradient or state it is; may be empty.
        where: the microbatch and the call of the module, where they are not the first.
        offset: the flat index of the element in the rank's part; None if no element differs.
        values: the element by the name of a run.
        ulps: the distances by the name of a run, and the allowed one.
        also: the names of the tensors that diverge at the same stage of the step on the same rank.
        compared: the number of tensors that were compared.
        unseen: why tensors were not compared, one line each.
        stopped: the last tensor of a step that an error interrupted; may be empty.
        collectives: collectives with marks: "-" is missing, "+" is extra.
    """

    again: Verdict
    alike: bool
    text: str
    first: Failure | None
    module: str
    parameter: str
    where: str
    offset: int | None
    values: Mapping[str, float]
    ulps: Mapping[str, float]
    also: tuple[str, ...]
    compared: int
    unseen: tuple[str, ...]
    stopped: str
    collectives: tuple[str, ...]

    @property
    def line(self) -> str | None:
        """Why the case failed, in one line; None if the second run does not tell."""
        if self.again is Verdict.PASS:
            return "passed when it ran again: the failure is not steady"
        return None if self.first is None else f"first, {self.first.line}"

    @classmethod
    def parse(cls, data: object, where: str) -> "Explanation":
        """Read an explanation from JSON data.

        Args:
            data: the JSON object.
            where: the path of the object in the file, for messages.

        Raises:
            RecordError: the data violate the schema.
        """
        fields = Fields(data, where)
        first = Fields(fields.data["first"] if fields.has("first") else {}, fields.path("first"))
        told = fields.required("text", str)
        place = Failure.parse({"text": told, **first.data}, fields.path("first")) if fields.has("first") else None
        return cls(
            again=_verdict(fields, "again"),
            alike=fields.required("alike", bool),
            text=told,
            first=place,
            module=first.optional("module", ""),
            parameter=first.optional("parameter", ""),
            where=first.optional("where", ""),
            offset=first.maybe("offset", int),
            values=first.mapping("values", number),
            ulps=first.mapping("ulps", number),
            also=first.items("also", text),
            compared=fields.optional("compared", 0),
            unseen=fields.items("unseen", text),
            stopped=fields.optional("stopped", ""),
            collectives=fields.items("collectives", text),
        )


@dataclass(frozen=True)
class Distance:
    """The errors of both runs against the oracle at one stage, in ulps.

    Attributes:
        stage: the stage of the training step.
        step: the number of the step.
        name: the name of the parameter or other tensor.
        sharded_ulps: the error of the sharded run.
        baseline_ulps: the error of the baseline, if it was measured.
        allowed_ulps: the largest error of the sharded run that passes.
    """

    stage: str
    step: int
    name: str
    sharded_ulps: float
    baseline_ulps: float | None
    allowed_ulps: float

    @classmethod
    def parse(cls, data: object, where: str) -> "Distance":
        """Read a distance from JSON data.

        Args:
            data: the JSON object.
            where: the path of the object in the file, for messages.

        Raises:
            RecordError: the data violate the schema.
        """
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
    """The collectives that some ranks issued, all in the same order.

    Attributes:
        ranks: the ranks that issued them.
        lines: the collectives in order, one line each.
    """

    ranks: tuple[int, ...]
    lines: tuple[str, ...]

    @classmethod
    def parse(cls, data: object, where: str) -> "Trace":
        """Read a trace from JSON data.

        Args:
            data: the JSON object.
            where: the path of the object in the file, for messages.

        Raises:
            RecordError: the data violate the schema.
        """
        fields = Fields(data, where)
        return cls(ranks=fields.items("ranks", integer), lines=fields.items("trace", text))


@dataclass(frozen=True)
class KnownFailure:
    """The entry by which a case was expected to fail.

    Attributes:
        source: the file, and the number of the entry in it.
        case: its pattern for ids of cases.
        link: the place where the failure is described.
        torch: the versions of torch to which it applies; empty for all.
    """

    source: str
    case: str
    link: str
    torch: str

    @classmethod
    def parse(cls, data: object, where: str) -> "KnownFailure":
        """Read an entry from JSON data.

        Args:
            data: the JSON object.
            where: the path of the object in the file, for messages.

        Raises:
            RecordError: the data violate the schema.
        """
        fields = Fields(data, where)
        source, case = fields.required("source", str), fields.required("case", str)
        return cls(source, case, link=fields.required("link", str), torch=fields.required("torch", str))


@dataclass(frozen=True)
class CaseRecord:
    """The record of one case on one implementation.

    Attributes:
        id: the name of the case, the same for every implementation.
        implementation: the name of the implementation.
        requirement: the requirements that the case checks, separated by commas.
        world: the number of ranks.
        device: the device type of the ranks.
        parameters: the parameters of the case.
        verdict: the outcome.
        seconds: the time that the case took.
        nodeid: the id of the pytest item; may be empty.
        reproduce: the command that repeats a failure; empty where the writer gave none.
        seeds: the seeds by purpose.
        missing: the capabilities or the hardware that a skipped case lacked.
        expected: the verdict and the reason of an expected failure; otherwise empty.
        failure: the failure, if there is one.
        losses: the loss of each step, by run.
        distances: the errors against the oracle.
        collectives: the traces of all ranks; ranks with the same trace share one.
        spent: the seconds of each activity, the mean of the ranks.
        attempt: 1, or more if the case was run again.
        shortened: the fields that were emptied because the record was too large.
        explanation: where the runs first diverge; None unless the run had ``--explain``.
        peak_bytes: by rank, the most bytes that a step held at a time beyond those before it; empty if not measured.
        known_failure: the entry that expects the case to fail, if one was applied.
    """

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
    spent: Mapping[str, float]
    attempt: int = 1
    shortened: tuple[str, ...] = ()
    reproduce: str = ""
    explanation: Explanation | None = None
    peak_bytes: tuple[int, ...] = ()
    known_failure: KnownFailure | None = None

    @property
    def requirements(self) -> list[str]:
        """The requirements that the case checks, one by one."""
        return [name.strip() for name in self.requirement.split(",")]

    @property
    def why(self) -> str:
        """Why the case failed, in one line."""
        return self.failure.line if self.failure is not None else "no text"

    @property
    def reason(self) -> str:
        """Why the case failed, in one line: where its runs first diverge if that is known, or as :attr:`why`."""
        told = self.explanation.line if self.explanation is not None else None
        return told or self.why

    @property
    def reproduction(self) -> str:
        """The command that repeats the case: that of the run file or, for older files, one made from the fields."""
        if self.reproduce or not self.nodeid:
            return self.reproduce
        return f'python -m pytest "{self.nodeid}" --impl {self.implementation} --device {self.device}'

    @classmethod
    def parse(cls, data: object, where: str) -> "CaseRecord":
        """Read a record from JSON data.

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
            spent=fields.mapping("spent", number),
            attempt=fields.optional("attempt", 1),
            shortened=fields.items("shortened", text),
            reproduce=fields.optional("reproduce", ""),
            explanation=Explanation.parse(fields.data["explanation"], fields.path("explanation"))
            if fields.has("explanation")
            else None,
            peak_bytes=fields.items("peak_bytes", integer),
            known_failure=KnownFailure.parse(fields.data["known_failure"], fields.path("known_failure"))
            if fields.has("known_failure")
            else None,
        )


def _world(fields: Fields) -> int:
    world = fields.required("world", int)
    if world < 1:
        raise RecordError(f"{fields.path('world')}: {world} is not a number of ranks")
    return world


def _verdict(fields: Fields, name: str = "verdict") -> Verdict:
    word = fields.required(name, str)
    try:
        return Verdict(word)
    except ValueError:
        raise RecordError(f"{fields.path(name)}: {shown(word)} is not one of {', '.join(Verdict)}") from None


def _numbers(value: object, where: str) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise RecordError(f"{where}: {shown(value)} is not a list")
    return tuple(number(element, f"{where}[{i}]") for i, element in enumerate(value))
