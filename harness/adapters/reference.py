"""Adapter for the reference implementation."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_impl
import fsdp_impl.wrap
from fsdp_impl.common import streams
from shardproof.harness.adapters.base import Clip, Config, OptimizerFactory
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.dtensor import DTensorAdapter
from shardproof.harness.adapters.flat import BoundedGradScaler, FlatAdapter

# Streams and events that are not there, for the reference implementation in a simulated world.


class _Stream:
    """Orders nothing."""


class _Event:
    """Never happens by itself: what waits for it is kept until it is waited for."""

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return False


_CURRENT = _Stream()


@contextlib.contextmanager
def as_on_a_device() -> Iterator[None]:
    """Replace streams and events by stand-ins; buffers then live as long as on a device."""

    def create(device: torch.device, *, priority: int = 0) -> Any:
        return _Stream()

    replaced: dict[str, Any] = {
        "create": create,
        "current": lambda device: _CURRENT,
        "use": lambda stream: contextlib.nullcontext(),
        "record": lambda stream: None if stream is None else _Event(),
        "wait": lambda stream, event: None,
        "join": lambda stream, other: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, function in replaced.items():
            patch.setattr(streams, name, function)
        yield


class ReferenceAdapter(DTensorAdapter):
    """``fsdp_impl.fully_shard`` with ``fsdp_impl.clip_grad_norm_``.

    At ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` the order of the units is validated.
    """

    name = "reference"
    # Resharding to a smaller size makes its process groups once per mesh and reuses them.
    traits = dataclasses.replace(
        DTensorAdapter.traits,
        reduces_in="parameters",
        keeps_computed_gradients=True,
        process_groups="kept",
        simulates=True,
    )
    fully_shard = staticmethod(fsdp_impl.fully_shard)
    offload_policy = fsdp_impl.CPUOffloadPolicy
    precision_policy = fsdp_impl.MixedPrecisionPolicy
    mesh_dims = fsdp_impl.DataParallelMeshDims
    share_comm_ctx = staticmethod(fsdp_impl.share_comm_ctx)
    as_on_a_device = staticmethod(as_on_a_device)

    @staticmethod
    def mesh_class(name: str) -> Any:
        return getattr(fsdp_impl, name)

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            fsdp_impl.validate_order(self.module)

    @staticmethod
    def register(module: nn.Module, name: str) -> None:
        fsdp_impl.register_fsdp_forward_method(module, name)

    def clip(self) -> torch.Tensor:
        assert self.config.clip is not None
        return self.clip_parameters(self.module.parameters(), self.config.clip)

    def clip_parameters(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip: Clip, *, foreach: bool | None = None
    ) -> torch.Tensor:
        return fsdp_impl.clip_grad_norm_(parameters, clip.max_norm, clip.norm_type, clip.error_if_nonfinite, foreach)


class ReferenceFlatAdapter(FlatAdapter):
    """``fsdp_impl.FullyShardedDataParallel``."""

    name = "reference.flat"
    traits = dataclasses.replace(FlatAdapter.traits, simulates=True)
    api: ClassVar[Any] = fsdp_impl
    scaler = BoundedGradScaler

    as_on_a_device = staticmethod(as_on_a_device)

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return super().capabilities() | Capability.of(
            "non-root-forward single-rank recomputes-gathered compiled-modules tensor-parallel-counts "
            "tensor-parallel-checkpoint pageable-offload host-runs-ahead recovery any-combination"
        )
