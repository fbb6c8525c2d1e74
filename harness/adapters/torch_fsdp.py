"""Adapter of torch's ``FullyShardedDataParallel``: a wrapper whose units are flat parameters."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from harness.adapters.base import Accumulation, Adapter, Config, OptimizerFactory, Piece, Traits, inner_first, whole
from harness.adapters.capability import Capability

#: How a wrapped module's own name appears in the names of what is inside it.
_WRAPPED = "_fsdp_wrapped_module."

#: With original parameters each starts at a multiple of 16 bytes in its flat parameter; 2-byte elements need most.
_ALIGNMENT = 8

_CAPABILITIES = frozenset(
    {
        Capability.SHARDED,
        Capability.RESHARD_AFTER_FORWARD,
        Capability.HYBRID,
        Capability.UNUSED_OUTPUT,
        Capability.UNUSED_MODULE,
        Capability.CONTAINER_OUTPUT,
        Capability.DATACLASS_OUTPUT,
        Capability.MULTIPLE_FORWARD,
        Capability.RECOMPUTATION,
        Capability.TIED_PARAMETERS,
        Capability.CAST_AFTER_INIT,
        Capability.DEFERRED_REDUCTION,
        Capability.CLIP_BY_CALL,
        Capability.CLIP_ANY_NORM,
        Capability.CLIP_EMPTY_SHARDS,
        Capability.COUNTED_UNITS,
        Capability.ADAM,
    }
)
# And why not the others, as far as they were tried:
# - RESHARD_TO_SIZE, RESHARD_TO_SIZE_UNEVEN: no strategy does something between keeping and freeing.
# - ROOT_RESHARD: the root's unit is never freed after forward, because backward is expected to want it first.
# - GROUPED_UNIT: a wrapper takes one module.
# - POST_ACCUMULATE_GRAD_HOOK: gradients accumulate in the flat parameter; the original ones are views of it, and
#   their hooks never run.
# - NON_ROOT_FORWARD: only the root's backward ends with the callback that puts gradients in place and units back to
#   idle; after any other the next collective call raises "Cannot manually unshard parameters during forward/backward".
# - REGISTERED_STATE: after forward the root's parameters show shards although its unit is still gathered.
# - MANUAL_RESHARD: there is a context that gathers, and no call that frees.
# - GATHER_ORDER: the root's gradients are reduced last, whenever in backward they are ready.
# - SINGLE_RANK: it becomes NO_SHARD, which all-reduces each unit's gradients among the one rank.
# - DEFERRED_PER_UNIT: no_sync is for the root, and for all.


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
        return _CAPABILITIES

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        assert config.offload is None, "shards stay on the device"
        assert config.accumulation in (None, Accumulation()), "no_sync is for the whole reduction of all units"
        hybrid = config.mesh.ndim == 2
        wrap = functools.partial(
            FullyShardedDataParallel,
            process_group=None if hybrid else config.mesh.get_group(),
            device_mesh=config.mesh if hybrid else None,
            sharding_strategy=_strategy(config.reshard_after_forward, hybrid=hybrid),
            device_id=_device(config.mesh.device_type),
            use_orig_params=True,
        )
        for unit in inner_first(config.units):
            assert len(unit) == 1, f"a wrapper takes one module, and the unit {unit} has {len(unit)}"
            (name,) = unit
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
        return {name.replace(_WRAPPED, ""): value for name, value in super().named_parameters().items()}

    @contextlib.contextmanager
    def _full_parameters(self, *, with_grads: bool = False) -> Iterator[dict[str, nn.Parameter]]:
        """All units gathered (collective); what is read inside lives no longer than the context."""
        options = {"writeback": False, "with_grads": with_grads}
        with FullyShardedDataParallel.summon_full_params(self.module, **options):
            yield self.named_parameters()


def _strategy(reshard_after_forward: bool | int | None, *, hybrid: bool) -> ShardingStrategy:
    assert reshard_after_forward is None or isinstance(reshard_after_forward, bool), (
        f"there is no strategy that reshards to groups of {reshard_after_forward}"
    )
    if reshard_after_forward is False:
        return ShardingStrategy._HYBRID_SHARD_ZERO2 if hybrid else ShardingStrategy.SHARD_GRAD_OP
    # Freed after forward is what it does by default.
    return ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD


def _device(device_type: str) -> torch.device:
    # Told nothing, it looks for an accelerator, on the CPU too.
    index = None if device_type == "cpu" else torch.accelerator.current_device_index()
    return torch.device(device_type) if index is None else torch.device(device_type, index)
