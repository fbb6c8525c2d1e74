"""Adapter of torch's ``FullyShardedDataParallel``: a wrapper whose units are flat parameters."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from harness.adapters.base import Adapter, Config, OptimizerFactory, Piece, Traits, whole
from harness.adapters.capability import Capability

#: How a wrapped module's own name appears in the names of what is inside it.
_WRAPPED = "_fsdp_wrapped_module."

#: With original parameters each starts at a multiple of 16 bytes in its flat parameter; 2-byte elements need most.
_ALIGNMENT = 8

_LACKING = frozenset(
    {
        # FULL_SHARD frees and SHARD_GRAD_OP keeps; no strategy does something between the two.
        Capability.RESHARD_TO_SIZE,
        Capability.RESHARD_TO_SIZE_UNEVEN,
        # The root's unit is never freed after forward: backward is expected to want it first.
        Capability.ROOT_RESHARD,
        # A wrapper takes one module.
        Capability.GROUPED_UNIT,
        # Gradients accumulate in the flat parameter; the original ones are views of it, and their hooks never run.
        Capability.POST_ACCUMULATE_GRAD_HOOK,
        # Only the root's backward ends with the callback that puts gradients in place and units back to idle;
        # after any other the next collective call says "Cannot manually unshard parameters during forward/backward".
        Capability.NON_ROOT_FORWARD,
        # After forward the root's parameters show shards although its unit is still gathered.
        Capability.REGISTERED_STATE,
        # The root's gradients are reduced last, whenever in backward they are ready.
        Capability.GATHER_ORDER,
        # There is a context that gathers, and no call that frees.
        Capability.MANUAL_RESHARD,
        # It becomes NO_SHARD, which all-reduces each unit's gradients among the one rank.
        Capability.SINGLE_RANK,
    }
)


def share_of_flat(shape: torch.Size, size: int) -> int:
    """A rank's share, in elements, of what one parameter adds to its unit's flat parameter."""
    return math.ceil((math.prod(shape) + _ALIGNMENT - 1) / size)


class TorchFsdpAdapter(Adapter):
    """Drives ``FullyShardedDataParallel`` with ``use_orig_params=True``."""

    name = "torch.fsdp"
    traits = Traits(
        shards=frozenset({"parameters", "gradients", "optimizer"}),
        local_numel=share_of_flat,
        # The flat parameter's end is padded to a multiple of the ranks: at most one element on each.
        collective_padding=1,
    )

    module: FullyShardedDataParallel

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        return None

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return frozenset(Capability) - _LACKING

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        wrap = functools.partial(
            FullyShardedDataParallel,
            process_group=config.mesh.get_group(),
            sharding_strategy=_strategy(config.reshard_after_forward),
            device_id=_device(config.mesh.device_type),
            use_orig_params=True,
        )
        for name in _inner_first(config):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, wrap(model.get_submodule(name)))
        self.module = wrap(model)
        if config.cast is not None:
            self.module.to(config.cast)
        self.optimizer = optimizer(self.module.parameters()) if optimizer else None

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if is_last else self.module.no_sync():
            yield

    def clip(self) -> torch.Tensor:
        assert self.config.clip is not None
        return self.module.clip_grad_norm_(self.config.clip.max_norm, self.config.clip.norm_type)

    def gradients(self) -> dict[str, Piece | None]:
        with self._full_parameters(with_grads=True) as named:
            return {
                name: None if parameter.grad is None else whole(parameter.grad.clone())
                for name, parameter in named.items()
            }

    def parameters(self) -> dict[str, Piece]:
        with self._full_parameters() as named:
            return {name: whole(parameter.detach().clone()) for name, parameter in named.items()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {name.replace(_WRAPPED, ""): value for name, value in self.module.named_parameters()}

    @contextlib.contextmanager
    def _full_parameters(self, *, with_grads: bool = False) -> Iterator[dict[str, nn.Parameter]]:
        """All units gathered (collective); what is read inside lives no longer than the context."""
        options = {"writeback": False, "with_grads": with_grads}
        with FullyShardedDataParallel.summon_full_params(self.module, **options):
            yield self.named_parameters()


def _strategy(reshard_after_forward: bool | int | None) -> ShardingStrategy:
    assert reshard_after_forward is None or isinstance(reshard_after_forward, bool), (
        f"there is no strategy that reshards to groups of {reshard_after_forward}"
    )
    # Freed after forward is what it does by default.
    return ShardingStrategy.SHARD_GRAD_OP if reshard_after_forward is False else ShardingStrategy.FULL_SHARD


def _device(device_type: str) -> torch.device:
    # Told nothing, it looks for an accelerator, on the CPU too.
    index = None if device_type == "cpu" else torch.accelerator.current_device_index()
    return torch.device(device_type) if index is None else torch.device(device_type, index)


def _inner_first(config: Config) -> list[str]:
    """One name a unit, so that a module's parts are wrapped before the module itself."""
    for unit in config.units:
        assert len(unit) == 1, f"a wrapper takes one module, and the unit {unit} has {len(unit)}"
    return sorted((unit[0] for unit in config.units), key=lambda name: -name.count("."))
