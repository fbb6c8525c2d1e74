"""Adapters of a reference with one bug planted at a seam; each lives in ranks of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp_impl.common import collectives, divide, norm
from fsdp_impl.per_parameter import accumulation
from shardproof.harness.adapters.base import Adapter
from shardproof.harness.adapters.reference import ReferenceAdapter
from tests.harness.inner import PYTHONPATH

ROOT = pathlib.Path(__file__).parents[2]
DROPPED_UNIT = "layers.1"
GATHERED_TWICE = "layers.2"


class _Planted(ReferenceAdapter):
    """Replaces a seam before the first model of the process is sharded, for good."""

    traits = dataclasses.replace(ReferenceAdapter.traits, isolation="adapter")
    module_: Any
    seam: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if getattr(self.module_, self.seam) is not type(self).wrong:
            setattr(self.module_, self.seam, type(self).wrong)
        super().__init__(*args, **kwargs)


class ForgottenDivision(_Planted):
    """Gradients are summed and never divided."""

    name = "forgotten-division"
    module_, seam = divide, "divide"

    @staticmethod
    def wrong(dtype: torch.dtype, shard_size: int, replicate_size: int = 1) -> divide.Division:
        return divide.Division(before=1, reduce_op=dist.ReduceOp.SUM, all_reduce_op=dist.ReduceOp.SUM, after=1)


_reduce, _gather, _all_reduce = collectives.reduce, collectives.gather, collectives.all_reduce
_add = accumulation.Accumulator.add


class DroppedReduction(_Planted):
    """One unit's gradients are divided and never summed: each rank keeps its own part of its own."""

    name = "dropped-reduction"
    module_, seam = collectives, "reduce"

    @staticmethod
    def wrong(output: torch.Tensor, contributions: torch.Tensor, group: Any, op: Any, *, unit: str) -> None:
        if unit != DROPPED_UNIT:
            return _reduce(output, contributions, group, op, unit=unit)
        output.copy_(contributions.view(group.size(), -1)[group.rank()])


class AverageIsSum(_Planted):
    """The backend's average is a sum."""

    name = "average-is-sum"
    module_, seam = collectives, "reduce"

    @staticmethod
    def wrong(output: torch.Tensor, contributions: torch.Tensor, group: Any, op: Any, *, unit: str) -> None:
        _reduce(output, contributions, group, dist.ReduceOp.SUM, unit=unit)


class LocalNorm(_Planted):
    """The norm's reduction over the ranks is skipped."""

    name = "local-norm"
    module_, seam = norm, "reduce_norm"

    @staticmethod
    def wrong(shares: torch.Tensor, group: Any, p: float) -> torch.Tensor:
        return shares


class SecondGather(_Planted):
    """One unit is gathered twice each time."""

    name = "second-gather"
    module_, seam = collectives, "gather"

    @staticmethod
    def wrong(output: torch.Tensor, shard: torch.Tensor, group: Any, *, unit: str, async_op: bool = False) -> Any:
        if unit == GATHERED_TWICE:
            _gather(output, shard, group, unit=unit)
        return _gather(output, shard, group, unit=unit, async_op=async_op)


class LonelyReplicas(_Planted):
    """One unit is not reduced over the replicas, although the collective is issued."""

    name = "lonely-replicas"
    module_, seam = collectives, "all_reduce"

    @staticmethod
    def wrong(tensor: torch.Tensor, group: Any, op: Any, *, unit: str) -> None:
        _all_reduce(tensor.clone() if unit == DROPPED_UNIT else tensor, group, op, unit=unit)


class ReplacedGradient(_Planted):
    """A reduced gradient takes the place of the one that is there, instead of being added to it."""

    name = "replaced-gradient"
    module_, seam = accumulation.Accumulator, "add"

    @staticmethod
    def wrong(self: accumulation.Accumulator, params: Any, layout: Any, shards: torch.Tensor) -> bool:
        self._last = None
        for param in params:
            param.sharded.grad = None
        return _add(self, params, layout, shards)


class DeafToPrefetch(ReferenceAdapter):
    """Whatever a unit is told to gather ahead, it does not."""

    name = "deaf-to-prefetch"

    def prefetch(self, **_: Any) -> None:
        pass


class ForgottenFlags(ReferenceAdapter):
    """No unit ever waits for the last microbatch."""

    name = "forgotten-flags"

    def _accumulate(self, *_: Any, **__: Any) -> None:
        pass


def failures_of(
    bugs: Sequence[type[Adapter]], cases: str, folder: pathlib.Path, suites: Sequence[str] = ("suites",)
) -> dict[str, dict[str, Any]]:
    """What the suites' cases say of each bug and of the sound reference: ``{bug: {test: failure or None}}``.

    Args:
        bugs: adapters, with names of their own.
        cases: an expression as of pytest's ``-k``, which leaves one case of each test.
        folder: where the run file may be written.
        suites: what to collect the cases from.
    """
    report = folder / "run.json"
    names = ["reference", *(f"{bug.__module__}:{bug.__name__}" for bug in bugs)]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *suites, "-k", cases]
    command += ["--impl", ",".join(names), "--device", "cpu", "--report", str(report)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    failures: dict[str, dict[str, Any]] = {}
    for case in json.loads(report.read_text())["cases"]:
        found = failures.setdefault(case["implementation"].rpartition(":")[2], {})
        test = case["id"].partition("::")[2].partition("[")[0]
        assert test not in found, f"{cases!r} leaves two cases of {test}"
        found[test] = case["failure"]
    return failures
