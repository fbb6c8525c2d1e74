"""The run file: what it contains, as dataclasses from which it is written, read and described.

The dataclasses are the one description of the format: the plugin writes run files from them, reports read run files
into them, and :func:`schema` makes the JSON Schema of them; ``jsonfiles`` has the rules. docs/run-files.md explains
the fields. ``python -m shardproof.runfile`` prints the schema.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from shardproof import door, renamed
from shardproof.jsonfiles import (
    ASIDE,
    Number,
    RecordError,
    check_version,
    decode,
    describe,
    described,
    missing,
    says,
    written,
)  # fmt: skip

VERSION = 2

EFFORTS = ("quick", "standard", "full")
"""The efforts, least first. A file without one is of a run of everything."""

MIXED = "mixed"
"""The device type in the environment of a merged run whose parts have several."""

UNKNOWN = "unknown"
"""What a run file has for a commit that nothing named to its writer."""


# Types, with what the schema demands beside them.

Count = Annotated[int, ("minimum", 0)]
Positive = Annotated[int, ("minimum", 1)]
Seconds = Annotated[float, ("minimum", 0)]
Device = Annotated[str, ("pattern", r"^[a-z]\w*$")]
EffortName = Annotated[str, ("enum", EFFORTS)]
Reads = Annotated[str, ("enum", ("in-place", "gathering"))]
Version = Annotated[int, ("const", VERSION)]
RunId = Annotated[str, ("pattern", "^[0-9a-f]{32}$")]
Digest = Annotated[str, ("pattern", "^[0-9a-f]{64}$")]
Hashes = Annotated[str, ("pattern", "^[0-9a-f]{12}(, [0-9a-f]{12})*$")]
_COMMIT = f"([0-9a-f]{{40}}(-dirty)?|{UNKNOWN})"
Commits = Annotated[str, ("pattern", f"^{_COMMIT}(, {_COMMIT})*$")]


class Verdict(StrEnum):
    """The verdict on one case, most severe first: where ranks differ, the first in this order wins."""

    HARNESS_ERROR = "harness-error"  # the harness could not run the case
    CRASH = "crash"  # the process of a rank ended
    FAIL = "fail"  # the case raised, or it left something behind in the process of a rank
    HANG = "hang"  # a rank did not finish before the deadline, or soon after another rank had failed
    UNMET = "unmet"  # skipped: the host lacks hardware that the case needs
    UNSUPPORTED = "unsupported"  # skipped: the implementation lacks a capability that the case needs
    EXPECTED_FAIL = "expected-fail"  # the case failed as expected
    UNEXPECTED_PASS = "unexpected-pass"  # it passed, and was expected to fail: remove the expectation
    PASS = "pass"  # the case passed on every rank

    @property
    def is_skip(self) -> bool:
        """Whether the case did not run because a capability or hardware is missing."""
        return self in (Verdict.UNMET, Verdict.UNSUPPORTED)

    @property
    def fails(self) -> bool:
        """Whether the verdict fails the run."""
        return self not in (Verdict.PASS, Verdict.EXPECTED_FAIL) and not self.is_skip


@dataclasses.dataclass(frozen=True)
class Tally:
    """How many of some cases passed, failed, failed as expected, and were skipped."""

    passed: int
    failed: int
    known: int
    skipped: int


def tally(verdicts: Iterable[str]) -> Tally:
    """Count verdicts by what they mean for the run."""
    found = [Verdict(one) for one in verdicts]
    return Tally(
        passed=found.count(Verdict.PASS),
        failed=sum(one.fails for one in found),
        known=found.count(Verdict.EXPECTED_FAIL),
        skipped=sum(one.is_skip for one in found),
    )


#: Begins the stage of a failure that is an exception; its call of the training follows.
_EXCEPTION = "exception"

#: The last line of a traceback, which begins with the name of the exception.
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b")


@described()
class Location:
    """Where two runs diverge."""

    stage: str | None = written(
        "the stage at which they diverge, or of an exception the call, as in 'exception in forward'; null, as the "
        "others, if it is unknown",
        default=None,
    )
    step: int | None = written("the number of the step, from 0", default=None)
    rank: int | None = written("the rank that failed", default=None)
    name: str | None = written("the name of the parameter or other tensor", default=None)
    element: Sequence[int] | None = written("the index of the element in the full tensor", default=None)

    @property
    def line(self) -> str:
        """The place in one line; that of an unknown stage says nothing."""
        return self._told(" diverges")

    @property
    def place(self) -> str:
        """The place in words."""
        return self._told("")

    def _told(self, verb: str) -> str:
        name = f" of {self.name}" if self.name is not None else ""
        step = f" in step {self.step}" if self.step is not None else ""
        rank = f" on rank {self.rank}" if self.rank is not None else ""
        return f"{self.stage}{name}{verb}{step}{rank}"


@described()
class Failure(Location):
    """The first place where two runs diverge, or the reason why the case stopped."""

    text: str = says("the message of the failure")
    host: str = says("in a torchrun job of several hosts, that of the rank", default="")

    @property
    def line(self) -> str:
        """Why the case failed, in one line: where the runs first diverge, or the error of a traceback."""
        if self.stage is not None and not self.stage.startswith(_EXCEPTION):
            return super().line
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        errors = [line for line in lines if _ERROR.match(line)]
        line = (errors or lines or ["no text"])[0]
        if self.stage is not None:
            return f"{line} ({self.place})"
        if not line.endswith(":"):
            return line
        # What was expected of a text, and what there was: the lines of its difference.
        after = lines[lines.index(line) + 1 :]
        return " ".join([line, *([one for one in after if one[0] in "+-"] or after)[:2]])


@described()
class FirstDivergence(Location):
    """The first tensor that diverges."""

    module: str = written("the module of the tensor; empty if it belongs to none", default="")
    parameter: str = written("the parameter or buffer that it is, or whose gradient or state; may be empty", default="")
    where: str = written("the microbatch and the call of the module, where they are not the first", default="")
    offset: int | None = written("its flat index in what the rank holds; null if no element differs", default=None)
    values: Mapping[str, Number] = written("the element by the name of a run", default={})
    ulps: Mapping[str, Number] = written("the distances by the name of a run, and what is allowed", default={})
    also: Sequence[str] = written("the tensors that diverge at the same stage of the step on this rank", default=())


@described()
class Explanation:
    """What a second run of a failed case, with capture on, showed (``--explain``)."""

    again: Verdict = says("the verdict of the second run")
    alike: bool = says("whether it failed with the same error, and with losses and distances of the same bits")
    first: FirstDivergence | None = written("where the runs first diverge; null if they agree", default=None)
    compared: Count = written("the number of tensors that were compared", default=0)
    unseen: Sequence[str] = written("why tensors were not compared, one line each", default=())
    stopped: str = written("the last tensor of a step that an error interrupted; may be empty", default="")
    collectives: Sequence[str] = written('collectives with marks: "-" is missing, "+" is extra', default=())
    text: str = says("all of it in words; the failure's text ends with it")

    @property
    def line(self) -> str | None:
        """Why the case failed, in one line; None if the second run does not tell."""
        if self.again is Verdict.PASS:
            return "passed when it ran again: the failure is not steady"
        return None if self.first is None else f"first, {self.first.line}"


@described()
class Distance:
    """The errors of both runs against the oracle at one stage, in ulps: those that used most of what is allowed."""

    stage: str = says("the stage of the training step")
    step: Count = says("the number of the step, from 0")
    name: str = says("the name of the parameter or other tensor")
    sharded_ulps: Number = says("the error of the sharded run")
    baseline_ulps: Number = says("the error of the baseline")
    allowed_ulps: Number = says("the largest error of the sharded run that passes")


@described()
class ModuleDistance(Distance):
    """The distance of a module's tensor of one stage and step that used most of what is allowed."""

    module: str = says("the name of the module; empty for the root")


@described()
class Own:
    """What `shardproof check` has found of the user's own training."""

    model: str = says("the model")
    mesh: Mapping[str, Positive] = says("the names and the sizes of the mesh's dimensions")
    data: Sequence[str] = says("the dimensions over which ranks read different data")
    factor: Number | None = says("the gradients over those of the reference; missing if no one factor", default=None)
    loss_factor: Number | None = says("the losses over those of the reference", default=None)
    signature: str = says("the number of the mistake that it looks like, such as S1; empty for none", default="")
    lines: Sequence[str] = says("what the first stage that diverges shows as a whole", default=())
    axes: Sequence[str] = says("with --bisect, what of the training --off can turn off", default=())
    compared: Count = says("the number of tensors that were compared")
    distances: Sequence[ModuleDistance] = says("the worst distances by module, stage and step", default=())
    notes: Sequence[str] = says("what was not judged, and why", default=())


@described()
class Trace:
    """The collectives that some ranks issued, all in the same order."""

    ranks: Sequence[Count] = says("the ranks that issued them")
    trace: Sequence[str] = says("the collectives in order, one line each")


@described()
class KnownFailure:
    """The entry by which a case was expected to fail."""

    source: str = says("the file, and the number of the entry in it")
    case: str = says("its pattern that matches the id of the case")
    link: str = says("where the failure is described")
    torch: str = says("the versions of torch to which it applies; empty for all")


@described(frozen=False)
class CaseRecord:
    """The record of one attempt of a case on one implementation."""

    id: str = says("the name of the case, the same for every implementation")
    nodeid: str = written("the id of the pytest item", default="")
    implementation: str = says("the name of the implementation")
    requirement: str = says("the requirements of the contract that the case checks, separated by commas")
    world: Positive = says("the number of ranks")
    device: Device = says("the device type of the ranks")
    parameters: Mapping[str, Any] = says('the parameters of the case, without "rank"')
    seeds: Mapping[str, int] = written('the seeds by purpose, "init" and "data"', default={})
    verdict: Verdict = says("the verdict on the case")
    seconds: Seconds = says("the duration on the world")
    missing: Sequence[str] = written("the capabilities and then the hardware that a skipped case lacked", default=())
    expected: str = written("the verdict and the reason of an expected failure; otherwise empty", default="")
    known_failure: KnownFailure | None = says("the entry that expects the failure, if one applied", default=None)
    losses: Mapping[str, Sequence[Number]] = written(
        "the loss of each step on rank 0, by the name of a run", default={}
    )
    distances: Sequence[Distance] = written("the worst errors against the oracle by step and stage", default=())
    collectives: Sequence[Trace] = written("the traces of all ranks; ranks with the same trace share one", default=())
    spent: Mapping[str, Seconds] = says("seconds by activity, the mean of the ranks", default={}, is_written=True)
    examples: Count | None = says("of a case that draws them, how many ran until one failed", default=None)
    reproduce: str = says("of a failure, the command that repeats it", default="")
    explanation: Explanation | None = says("of a failure with --explain, what a second run showed", default=None)
    peak_bytes: Sequence[Count] = says(
        "by rank, the most bytes of a device in a step beyond those before it; on a CPU, of the sharded parameters",
        default=(),
    )
    hosts: Sequence[str] = says("in a torchrun job of several hosts, the host of each rank", default=())
    failure: Failure | None = written("why the case failed; null if it did not", default=None)
    own: Own | None = says("of a check of the user's own training, what it found", default=None)
    shortened: Sequence[str] = says("the fields that were emptied because the record was too large", default=())
    attempt: Positive = says("more than 1 if the case was run again", default=1)

    @property
    def requirements(self) -> list[str]:
        """The requirements that the case checks, one by one."""
        return [name.strip() for name in self.requirement.split(",")]

    @property
    def why(self) -> str:
        """Why the case failed, in one line."""
        if self.failure is None and self.verdict is Verdict.UNEXPECTED_PASS:
            return "passed; the expected failure did not happen"  # as of a strict xfail mark
        return self.failure.line if self.failure is not None else "no text"

    @property
    def reason(self) -> str:
        """Why the case failed, in one line: where its runs first diverge if that is known, or as :attr:`why`."""
        told = self.explanation.line if self.explanation is not None else None
        return told or self.why

    @property
    def reproduction(self) -> str:
        """The command that repeats the case: that of the run file or, where it has none, what its fields give."""
        if self.reproduce or not self.nodeid:
            return self.reproduce
        return f'python -m pytest "{self.nodeid}" --impl {self.implementation} --device {self.device}'


@described()
class Torchrun:
    """The job of a run that torchrun started."""

    run_id: str = says("its id")
    attempt: Count = says("how often torchrun had restarted the job")
    agent: str = says("identifies the process of torchrun on the host of rank 0")
    ranks: Positive = says("the number of ranks")
    hosts: Positive = says("the number of hosts")


@described()
class Accelerator:
    """One accelerator of the host of the run."""

    name: str = says("its name")
    memory_bytes: int = written("its memory", default=0)


@described()
class Implementation:
    """One implementation of a run."""

    version: str = written("the version of the implementation; may be empty", default="")
    capabilities: Sequence[str] = written("the capabilities that its adapter declares", default=())
    shards: Sequence[str] = says("what it shards: gradients, optimizer, parameters", default=())
    reads: Reads = says("how its tensors are read; gathering ones run no cases about streams", default="")
    name: str = says("in a merged run, the name that --impl takes, where the key has more", default="")
    torch: str = says("in a merged run, the version of torch beside it", default="")
    device: Device = says("in a merged run, the device type of its ranks", default="")


@described()
class Environment:
    """The host, versions and options of a run. In a merged run a field may have several values."""

    torchrun: Torchrun | None = says("the job of a run that torchrun started", default=None)
    mends: Mapping[str, str] = says("what was left out for a private name that torch lacks, and why", default={})
    shardproof: str = written("the version of shardproof", default="")
    shardproof_commit: Commits = says('its commit, "-dirty" if a tracked file differs, or "unknown"', default="")
    contract: str = says("the newest version of the contract that it has (docs/contract.md)", default="")
    python: str = written("the version of Python", default="")
    torch: str = written("the version of torch", default="")
    torch_git_version: str = says('the commit from which torch was built; "unknown" if torch does not say', default="")
    platform: str = written("the operating system", default="")
    cpu_count: int | None = written("the number of CPU cores; null if it is unknown", default=None)
    device: Device = written('the device type of the ranks; "mixed" in a merged run of several', default="")
    accelerators: Sequence[Accelerator] = written("the accelerators of the host", default=())
    nccl: str | None = written("the version of NCCL; null if the run does not use it", default=None)
    backend: str = says("the backend of the process groups of the ranks; missing in a merged run", default="")
    started: str = written("the time at which the run started, in ISO 8601 and UTC", default="")
    command: Sequence[str] = written("the command line", default=())
    implementations: Mapping[str, Implementation] = written("by name, in the order of the command", default={})
    numerics: Mapping[str, Any] = says("the constants of the comparison", default={})


@described()
class Effort:
    """How much of what was asked for a run ran."""

    name: EffortName = says("the effort")
    deselected: Mapping[str, Mapping[str, Positive]] = written("cases left out, by implementation and file", default={})
    profile: str = says("profiles of the contract whose items ran, with commas; missing of other runs", default="")


SPENT = "--seconds"
"""With this begins the reason of a case that was left out because the time of the run was over."""


@described()
class LeftOut:
    """A selected case that pytest skipped without asking shardproof, as by ``@pytest.mark.skip``."""

    id: str = says("the name of the case")
    implementation: str = says("the name of the implementation")
    reason: str = written("pytest's reason", default="")


@described()
class End:
    """How a run ended."""

    complete: bool = says("whether every selected case has a record or was left out")
    reason: str = says("why the run is incomplete; empty if it is complete")
    exit_code: int = written("the exit code of the run; -1 if pytest had none", default=-1)
    seconds: Seconds = written("the duration of the run", default=0.0)
    problems: Sequence[str] = says("what fails the run beside cases, such as known failures without one", default=())


_KILLED = End(complete=False, reason="the run is under way, or its process ended before it could write the reason")


@described()
class Part:
    """One of the runs of which a run was merged."""

    file: str = says("the name of its run file")
    run_id: str = says("identifies the run")
    environment: Environment = says("its environment")
    effort: Effort | None = says("its effort", default=None)
    suites: str = says("the hash of its suites", default="")
    end: End = written("how it ended", default=_KILLED)


@described()
class Run:
    """A run file. Of an incomplete run everything but the version and the id may be missing."""

    schema_version: Version = written("the version of the format", default=VERSION)
    run_id: RunId = says("identifies the run")
    environment: Environment = says("the environment of the run", default=Environment())
    suites: Hashes = says("a hash of the files of the cases (docs/run-files.md)", default="")
    effort: Effort | None = says("how much ran of what was asked for; missing if all", default=None)
    unasked: Mapping[str, Mapping[str, str]] = says("required and asked by no case, and its needs", default={})
    selected: Mapping[str, Sequence[str]] = says("the ids of the selected cases, by implementation", default={})
    cases: Sequence[CaseRecord] = says("one record for each attempt of a case, in the order of their ends", default=())
    left_out: Sequence[LeftOut] = says("selected cases that pytest itself skipped", default=(), is_written=True)
    digest: Digest = says("of a complete run, a digest of its records (docs/results.md)", default="")
    end: End = written("how the run ended; missing if its process was killed", default=_KILLED)
    merged: Annotated[Sequence[Part], ("minItems", 1)] = says("the runs of which it was merged, if it was", default=())
    earlier: Sequence[CaseRecord] = field(default=(), metadata=ASIDE)

    @property
    def incomplete(self) -> str:
        """Why the run is incomplete; empty if it is complete."""
        return "" if self.end.complete else self.end.reason or "the run file gives no reason"

    @property
    def implementations(self) -> list[str]:
        """The names of the implementations: those of the environment in its order, then those of records alone."""
        return list(dict.fromkeys([*self.environment.implementations, *(case.implementation for case in self.cases)]))

    @property
    def not_run(self) -> list[tuple[str, str]]:
        """The selected cases without a record that were not left out, as (implementation, id)."""
        known = {(case.implementation, case.id) for case in self.cases}
        known |= {(case.implementation, case.id) for case in self.left_out}
        return [(name, id_) for name, ids in self.selected.items() for id_ in ids if (name, id_) not in known]


#: What a complete run must have beside what every run has.
_OF_COMPLETE = ("environment", "selected", "cases")


def load_run(path: str | Path) -> Run:
    """Read a run file, or the journal that an incomplete run has left.

    Raises:
        BadFile: the file cannot be read.
    """
    return door.load(path, parse_run)


def parse_run(data: Any) -> Run:
    """Read a run from the content of a run file.

    The schema version is checked first, because the rules of one version do not apply to the data of another.

    Raises:
        RecordError: the data violate the schema, have another version, have two records for one attempt of a case on an
            implementation, or call a run complete in which a selected case has no record. The message is one line with
            the field and its value.
    """
    check_version(data, "schema_version", VERSION)
    run = decode(Run, data)
    if run.end.complete and (lacking := [name for name in _OF_COMPLETE if name not in data]):
        raise missing(lacking[0])
    cells = len({case.id for case in run.cases}) + len({name for case in run.cases for name in case.requirements})
    if cells * len(run.implementations) > _MOST_CELLS:
        count = len(run.implementations)
        raise RecordError(f"cases: a matrix of {count} implementations and {cells} cases and requirements is too large")
    run = _by_new_names(run)
    cases, earlier = _last_attempts(run.cases)
    run = dataclasses.replace(run, cases=cases, earlier=earlier)
    if run.end.complete and run.not_run:
        name, id_ = run.not_run[0]
        raise RecordError(f"end.complete: true, but {id_!r} was selected for {name!r} and has no record")
    return run


def _by_new_names(run: Run) -> Run:
    """Replace names that a run of an older version has (shardproof/renamed.tsv), so that readers know one name each."""

    def capabilities(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(new for one in names for new in renamed.capability(one))

    def case(record: CaseRecord) -> CaseRecord:
        new = renamed.item(record.id)
        known = record.known_failure
        if known is not None:
            known = dataclasses.replace(known, case=renamed.item(known.case))
        missing = capabilities(record.missing)
        if (new, missing, known) == (record.id, tuple(record.missing), record.known_failure):
            return record
        return dataclasses.replace(record, id=new, missing=missing, known_failure=known)

    named = {
        name: dataclasses.replace(one, capabilities=capabilities(one.capabilities))
        for name, one in run.environment.implementations.items()
    }
    return dataclasses.replace(
        run,
        environment=dataclasses.replace(run.environment, implementations=named),
        selected={name: tuple(map(renamed.item, ids)) for name, ids in run.selected.items()},
        cases=tuple(map(case, run.cases)),
        left_out=tuple(dataclasses.replace(one, id=renamed.item(one.id)) for one in run.left_out),
    )


#: Cells of the matrices of cases and of requirements; the largest known one has 200,000.
_MOST_CELLS = 1 << 22


def _last_attempts(cases: Iterable[CaseRecord]) -> tuple[tuple[CaseRecord, ...], tuple[CaseRecord, ...]]:
    """Separate the last attempt of each case from the earlier ones; RecordError if they are not numbered 1, 2, 3."""
    last: dict[tuple[str, str], CaseRecord] = {}
    earlier = []
    for i, case in enumerate(cases):
        key = (case.id, case.implementation)
        before = last.pop(key, None)
        if case.attempt != (before.attempt if before else 0) + 1:
            # One cell of the matrix would hide a verdict.
            raise RecordError(f"cases[{i}].id: {case.id!r} on {case.implementation!r} is in the file twice")
        if before:
            earlier.append(before)
        last[key] = case
    return tuple(last.values()), tuple(earlier)


def fingerprint(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record, given as JSON values, as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def digest_of(fingerprints: Iterable[str]) -> str:
    """Return the digest of records by their fingerprints; it is the same in whatever order the cases ended."""
    return hashlib.sha256("\n".join(sorted(fingerprints)).encode()).hexdigest()


def public_version(version: str) -> str:
    """Return a version without its local part: builds of torch for CPUs and for accelerators are one version."""
    return version.partition("+")[0]


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a run file."""
    classes: dict[type, dict[str, Any]] = {}
    whole = describe(Run, classes)
    end = {"properties": {"end": {"properties": {"complete": {"const": True}}}}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A run file of shardproof, version {VERSION}",
        "description": "Readers ignore fields that they do not know: later additions to this version are optional.",
        **{name: value for name, value in whole.items() if name != "description"},
        "if": end,
        "then": {"required": [*_OF_COMPLETE], "properties": {"end": {"properties": {"reason": {"const": ""}}}}},
        "else": {"properties": {"end": {"properties": {"reason": {"minLength": 1}}}}},
        "$defs": {cls.__name__: told for cls, told in classes.items()},
    }


def _lines(value: Any, before: str = "") -> str:
    """Return JSON in which an object that is too long for a line has a line for each field."""
    text = json.dumps(value)
    if len(before + text) <= 100 or not isinstance(value, dict):
        return text
    fields = [f"{before}  {json.dumps(name)}: {_lines(one, f'{before}  ')}" for name, one in value.items()]
    return "{\n" + ",\n".join(fields) + f"\n{before}}}"


def schema_text() -> str:
    """Return the JSON Schema as the text of a file."""
    return _lines(schema()) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
