"""Mistakes that implementations do not refuse, as tutorials lead to them: a case finds each, at the stage of it."""

import contextlib
import dataclasses
import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.adapters import deepspeed_stages
from shardproof.harness.adapters.base import Adapter, Config, OptimizerFactory, Piece, Traits, original_name, whole
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.deepspeed import DeepSpeedEngineAdapter
from shardproof.harness.adapters.megatron_fsdp import MegatronFsdpAdapter
from shardproof.harness.adapters.torchtitan_simple_fsdp import TorchtitanSimpleFsdpAdapter
from tests.harness.inner import name_of, run_cases


class _StepsAtTheBoundary(DeepSpeedEngineAdapter):
    """Steps the engine after the last microbatch alone, as one steps any other optimizer."""

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        yield


class Zero1AtTheBoundary(_StepsAtTheBoundary, deepspeed_stages.DeepSpeedZero1Adapter):
    name = "zero1-at-the-boundary"


class Zero2AtTheBoundary(_StepsAtTheBoundary, deepspeed_stages.DeepSpeedZero2Adapter):
    name = "zero2-at-the-boundary"


class Zero3AtTheBoundary(_StepsAtTheBoundary, deepspeed_stages.DeepSpeedZero3Adapter):
    name = "zero3-at-the-boundary"


class SimpleFsdpInSharedProcesses(TorchtitanSimpleFsdpAdapter):
    """Shares rank processes between cases, so that each model after the first has the first one's mesh."""

    name = "simple-fsdp-in-shared-processes"
    traits = dataclasses.replace(TorchtitanSimpleFsdpAdapter.traits, isolation="shared")


class MegatronClippedByTorch(MegatronFsdpAdapter):
    """Clips by torch's function, which stacks a norm for each gradient that this rank has a row of."""

    name = "megatron-clipped-by-torch"

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return super().capabilities() | {Capability.CLIPPING, Capability.CLIP_BY_CALL}


class AccelerateOnCpu(Adapter):
    """Asks accelerate for FSDP2 on a CPU, gets ``DistributedDataParallel``, and believes that it is sharded."""

    name = "accelerate-on-cpu"
    traits = Traits(process_groups="kept", frees_models=False, isolation="case")

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        return None

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return frozenset({Capability.SHARDED, Capability.CLIPPING, Capability.CLIP_BY_CALL})

    @classmethod
    def prepare(cls, device_type: str) -> None:
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        super().__init__(model, optimizer=optimizer, config=config)
        factory = optimizer or functools.partial(torch.optim.SGD, lr=0.0)
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        self._model = model
        prepared: tuple[Any, Any] = accelerator.prepare(model, factory(model.parameters()))
        self.module, theirs = prepared
        self.optimizer = theirs.optimizer

    def gradients(self) -> dict[str, Piece | None]:
        named = self.named_parameters().items()
        return {name: None if value.grad is None else whole(value.grad) for name, value in named}

    def parameters(self) -> dict[str, Piece]:
        return {name: whole(value.detach()) for name, value in self.named_parameters().items()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {original_name(name): value for name, value in self._model.named_parameters()}


ACCUMULATION = "suites/test_accumulation.py::test_microbatches_add_up"


def needing(module):
    """Skip what needs a package that is not installed."""
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed; it has a tox environment of its own")


@needing("deepspeed")
@pytest.mark.parametrize(
    ("adapter", "stage", "words"),
    [
        (Zero1AtTheBoundary, "gradient", "diverges from the baseline"),
        # Stage 2 has no gradients then. It raises where they are read, and nowhere else.
        (Zero2AtTheBoundary, None, "Gradients are only available immediately after backward"),
        (Zero3AtTheBoundary, "parameter after step", "diverges from the baseline"),
    ],
)
def test_engine_that_is_stepped_at_the_boundary_alone(adapter, stage, words, tmp_path):
    ((case,), _) = run_cases(tmp_path, [name_of(adapter)], ACCUMULATION, "-k", "shards-default", code=1)
    assert case["verdict"] == "fail", case["failure"]
    assert case["failure"]["stage"] == stage and words in case["failure"]["text"], case["failure"]


@needing("torchtitan")
def test_second_model_of_a_process_has_the_mesh_of_the_first(tmp_path):
    """One model has replicas, the other has none: in the same processes the one that comes second is wrong."""
    names = [name_of(SimpleFsdpInSharedProcesses), "torchtitan.simple_fsdp"]
    cases, _ = run_cases(tmp_path, names, ACCUMULATION, "-k", "default", code=1)
    verdicts = [[case["verdict"] for case in cases if case["implementation"] == name] for name in names]
    assert verdicts == [["pass", "fail"], ["pass", "pass"]]


@needing("megatron_fsdp")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_norm_of_gradients_of_which_a_rank_has_no_row(tmp_path):
    """findings/F139.py: the ranks issue different collectives."""
    chosen = ("suites/test_clipping.py::test_total_norm_and_clipped_gradients", "-k", "w2 and 2.0")
    ((case,), _) = run_cases(tmp_path, [name_of(MegatronClippedByTorch)], *chosen, device="cuda", code=1)
    # Where the harness sees in time that the ranks are about to issue different collectives, none of them hangs.
    assert case["verdict"] in ("fail", "hang"), case["failure"]["text"]
    assert "clip" in case["failure"]["text"], case["failure"]["text"]


@needing("accelerate")
def test_plain_ddp_that_is_taken_for_fsdp(tmp_path):
    chosen = ("suites/test_autograd.py::test_inputs_by_keyword", "-k", "w2")
    ((case,), _) = run_cases(tmp_path, [name_of(AccelerateOnCpu)], *chosen, code=1)
    assert case["verdict"] == "fail", case["failure"]
    assert case["failure"]["stage"] == "sharding", case["failure"]["text"]
    assert "the model is not sharded" in case["failure"]["text"]
