"""One case's record and the run file: JSON that later pages read without a rerun."""

from __future__ import annotations

import dataclasses
import datetime
import gzip
import json
import math
import os
import pathlib
import platform
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.verdict import Verdict, combine

if TYPE_CHECKING:
    from harness.jobs import Result
    from harness.pool import Outcome
    from harness.selection import Selection

SCHEMA_VERSION = 1


@dataclasses.dataclass
class CaseRecord:
    """What is known of one case and one implementation."""

    id: str
    nodeid: str
    implementation: str
    requirement: str
    world: int
    device: str
    parameters: dict[str, Any]
    seeds: dict[str, int]
    verdict: Verdict = Verdict.PASS
    seconds: float = 0.0
    missing: list[str] = dataclasses.field(default_factory=list)
    text: str = ""
    place: dict[str, Any] = dataclasses.field(default_factory=dict)
    expected: str = ""
    """Of an expected failure: its verdict, and why it was expected."""
    losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    distances: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    collectives: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    outputs: list[str] = dataclasses.field(default_factory=list)
    """What each rank printed; attached to pytest's report, not part of the run file."""

    def take(self, outcome: Outcome) -> None:
        """Make one verdict of what the ranks said."""
        results = outcome.results
        self.seconds, self.outputs = outcome.seconds, outcome.outputs
        cause = _cause(results)
        self.verdict = combine(Verdict(result.verdict) for result in results)
        if self.verdict != Verdict.PASS:
            self.text, self.place = _text_of(results, cause), cause.place or {"rank": cause.rank}
            if self.verdict == Verdict.HANG and outcome.diagnosis is not None:
                self.place = {"rank": outcome.diagnosis.rank}
                self.text = f"{outcome.diagnosis.text}\n{self.text}"
        elif leaks := [f"rank {r.rank}: {line}" for r in results for line in r.left_behind]:
            self.fail_if("left behind: " + "; ".join(leaks))
        self.losses = results[0].observations.losses
        self.distances = _worst([list(r.observations.distances.values()) for r in results])
        self.collectives = _shared_traces(results)

    def fail_if(self, text: str | None) -> None:
        """Turn a pass into a failure, if there is something to say."""
        if text:
            self.verdict, self.text = Verdict.FAIL, text

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; numbers that JSON cannot write become their names."""
        fields = dataclasses.asdict(self)
        text, place = fields.pop("text"), fields.pop("place")
        fields.pop("outputs")
        empty = {"stage": None, "step": None, "rank": None, "name": None, "element": None}
        fields["failure"] = {**empty, **place, "text": text} if text else None
        plain: dict[str, Any] = _plain(fields)
        return plain


def _cause(results: Sequence[Result]) -> Result:
    """The rank to blame: one that failed by itself before one that only waited for it."""
    order = [Verdict.HARNESS_ERROR, Verdict.CRASH, Verdict.FAIL, Verdict.HANG, Verdict.PASS]
    agreed = next((result for result in results if result.agreed), None)
    return agreed or min(results, key=lambda result: order.index(Verdict(result.verdict)))


def _text_of(results: Sequence[Result], cause: Result) -> str:
    if cause.agreed:
        return cause.text
    alike = [result for result in results if result.text == cause.text]
    who = (
        "every rank"
        if len(alike) == len(results)
        else f"rank{'s' * (len(alike) > 1)} " + ", ".join(str(result.rank) for result in alike)
    )
    parts = [f"{who} of {len(results)}:\n{cause.text}"]
    parts += [f"rank {r.rank} of {len(results)}:\n{r.text}" for r in results if r.text and r.text != cause.text]
    return "\n".join(parts)


def _worst(by_rank: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    worst: dict[tuple[int, str], dict[str, Any]] = {}
    for distance in (item for distances in by_rank for item in distances):
        key = distance["step"], distance["stage"]
        if key not in worst or _ratio(distance) > _ratio(worst[key]):
            worst[key] = distance
    return list(worst.values())


def _ratio(distance: dict[str, Any]) -> float:
    return float(distance["sharded_ulps"] / distance["allowed_ulps"])


def _shared_traces(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Each distinct trace once, with the ranks that issued it."""
    shared: list[dict[str, Any]] = []
    for result in results:
        lines = [" ".join(line.split()) for line in result.observations.trace]
        same = next((item for item in shared if item["trace"] == lines), None)
        if same is not None:
            same["ranks"].append(result.rank)
        elif lines:
            shared.append({"ranks": [result.rank], "trace": lines})
    return shared


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    return getattr(value, "__qualname__", None) or repr(value)


class RunFile:
    """The run so far; written once, at its end, whole or not at all."""

    def __init__(self, selection: Selection, *, command: Sequence[str]) -> None:
        self.selection = selection
        self.command = list(command)
        self.cases: list[dict[str, Any]] = []
        self._started = datetime.datetime.now(datetime.UTC)
        self._clock = time.monotonic()

    def write(self, path: pathlib.Path) -> None:
        """Write the run file, with its environment; compressed if its name ends in ``.gz``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        run = {"schema_version": SCHEMA_VERSION, "environment": self._environment(), "cases": self.cases}
        unfinished = path.with_name(path.name + ".unfinished")
        content = (json.dumps(run, indent=1, allow_nan=False) + "\n").encode()
        unfinished.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        os.replace(unfinished, path)

    def _environment(self) -> dict[str, Any]:
        import torch

        from harness import numerics

        cuda = self.selection.device == "cuda"
        devices = [torch.cuda.get_device_properties(i) for i in range(self.selection.device_count)] if cuda else []
        return {
            "shardproof": _own_version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "platform": platform.platform(),
            "cpu_count": os.cpu_count(),
            "device": self.selection.device,
            "accelerators": [{"name": d.name, "memory_bytes": d.total_memory} for d in devices],
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
            "started": self._started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self._clock, 3),
            "command": self.command,
            "implementations": {
                name: {"version": adapter.version(), "capabilities": sorted(map(str, adapter.capabilities()))}
                for name, adapter in self.selection.implementations.items()
            },
            "numerics": {
                "baseline_factor": numerics.BASELINE_FACTOR,
                "slack_ulps": numerics.SLACK_ULPS,
                "adam_noise_ulps": numerics.ADAM_NOISE_ULPS,
            },
        }


def _own_version() -> str:
    from importlib import metadata

    try:
        return metadata.version("shardproof")
    except metadata.PackageNotFoundError:
        return "not installed"
