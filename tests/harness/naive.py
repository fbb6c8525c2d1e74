"""Adapters with a mistake that the implementation does not refuse, as a user may write them from a tutorial."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.adapters.base import Adapter, Config, OptimizerFactory, Piece, Traits, original_name, whole
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.deepspeed import (
    DeepSpeedEngineAdapter,
    DeepSpeedZero1Adapter,
    DeepSpeedZero2Adapter,
    DeepSpeedZero3Adapter,
)
from shardproof.harness.adapters.megatron_fsdp import MegatronFsdpAdapter
from shardproof.harness.adapters.torchtitan_simple_fsdp import TorchtitanSimpleFsdpAdapter


class _StepsAtTheBoundary(DeepSpeedEngineAdapter):
    """Steps the engine after the last microbatch alone, as one steps any other optimizer."""

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        yield


class Zero1AtTheBoundary(_StepsAtTheBoundary, DeepSpeedZero1Adapter):
    name = "zero1-at-the-boundary"


class Zero2AtTheBoundary(_StepsAtTheBoundary, DeepSpeedZero2Adapter):
    name = "zero2-at-the-boundary"


class Zero3AtTheBoundary(_StepsAtTheBoundary, DeepSpeedZero3Adapter):
    name = "zero3-at-the-boundary"


class SimpleFsdpInSharedProcesses(TorchtitanSimpleFsdpAdapter):
    """Shares rank processes between cases, so that each model after the first has the first one's mesh."""

    name = "simple-fsdp-in-shared-processes"
    traits = dataclasses.replace(TorchtitanSimpleFsdpAdapter.traits, isolation="shared")


class MegatronClippedByTorch(MegatronFsdpAdapter):
    """Clips by torch's function, which stacks a norm for each gradient that this rank has a row of."""

    name = "megatron-clipped-by-torch"

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return super().capabilities() | {Capability.CLIPPING, Capability.CLIP_BY_CALL}


class AccelerateOnCpu(Adapter):
    """Asks accelerate for FSDP2 on a CPU, gets ``DistributedDataParallel``, and believes that it is sharded."""

    name = "accelerate-on-cpu"
    traits = Traits(process_groups="kept", frees_models=False, isolation="case")

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        return None

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
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
