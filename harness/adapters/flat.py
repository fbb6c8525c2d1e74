"""The base class of adapters whose implementation wraps modules and shards one flat parameter per wrapper."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from shardproof.harness.adapters.base import (
    Accumulation,
    Adapter,
    Config,
    OptimizerFactory,
    Piece,
    Traits,
    Units,
    inner_first,
)
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.dtensor import piece_of
from shardproof.harness.adapters.flat_layout import FlatLayout, flat_units

#: The prefix that a wrapper adds to the names of everything inside the wrapped module.
_WRAPPED = "_fsdp_wrapped_module."

#: With ``use_orig_params=True``, each parameter starts at a multiple of 16 bytes in its flat parameter. Counted in
#: elements, the padding is largest for a dtype of 2 bytes.
_ALIGNMENT = 8

CAPABILITIES = frozenset(
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
        Capability.KEEP_AFTER_BACKWARD,
        Capability.CLIP_BY_CALL,
        Capability.CLIP_ANY_NORM,
        Capability.CLIP_EMPTY_SHARDS,
        Capability.COUNTED_UNITS,
        Capability.ADAM,
        Capability.OFFLOAD,
        Capability.DISTRIBUTED_CHECKPOINT,
        Capability.FLAT_PARAMETERS,
        Capability.SYNC_STATES,
        Capability.ORDER_VALIDATION,
        Capability.TENSOR_PARALLEL,
        Capability.INPUTS_TO_DEVICE,
    }
)
"""What the interface of ``FullyShardedDataParallel`` offers in every implementation."""


def share_of_flat(shape: torch.Size, size: int) -> int:
    """Return a rank's share, in elements, of what one parameter adds to the flat parameter, alignment included."""
    return math.ceil((math.prod(shape) + _ALIGNMENT - 1) / size)


class FlatAdapter(Adapter):
    """Drives a ``FullyShardedDataParallel``, with ``use_orig_params=True`` unless the case wants flat parameters.

    Attributes:
        api: the module with ``FullyShardedDataParallel``, ``ShardingStrategy``, ``CPUOffload`` and ``StateDictType``.
    """

    traits = Traits(
        local_numel=share_of_flat,
        # The end of the flat parameter is padded to a multiple of the number of ranks: at most one element per rank.
        collective_padding=1,
    )

    api: ClassVar[Any]
    module: Any

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        return None

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return CAPABILITIES

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        keeps = Accumulation(keeps_gathered=True)
        assert config.accumulation in (None, Accumulation(), keeps), "no_sync defers all of the reduction, of all units"
        assert config.accumulation != keeps or config.reshard_after_forward is False, (
            "parameters that are freed after forward are freed after backward too"
        )
        names = _names(config.units)
        self._units = flat_units(model, [*names, ""])
        wrap = functools.partial(self.api.FullyShardedDataParallel, **self._options())
        for name in names:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, wrap(model.get_submodule(name)))
        self.module = wrap(model)
        if config.cast is not None:
            self.module.to(config.cast)
        self.optimizer = optimizer(self.module.parameters()) if optimizer else None

    def _options(self) -> dict[str, Any]:
        config = self.config
        return {
            "device_mesh": config.mesh,
            "sharding_strategy": self._strategy(),
            "cpu_offload": self.api.CPUOffload(offload_params=True) if config.offload else None,
            "device_id": _device(config.mesh.device_type),
            "use_orig_params": not config.flat_parameters,
            "sync_module_states": config.sync_states,
        }

    def _strategy(self) -> Any:
        reshards, strategies = self.config.reshard_after_forward, self.api.ShardingStrategy
        hybrid = self.config.mesh.ndim == 2
        assert reshards is None or isinstance(reshards, bool), (
            f"there is no strategy that reshards to groups of {reshards}"
        )
        if reshards is False:
            return strategies._HYBRID_SHARD_ZERO2 if hybrid else strategies.SHARD_GRAD_OP
        # None too: freeing after forward is the default of the implementations.
        return strategies.HYBRID_SHARD if hybrid else strategies.FULL_SHARD

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Enter ``no_sync`` for every microbatch but the last."""
        with contextlib.nullcontext() if is_last else self.module.no_sync():
            yield

    def clip(self) -> torch.Tensor:
        assert self.config.clip is not None
        norm: torch.Tensor = self.module.clip_grad_norm_(self.config.clip.max_norm, self.config.clip.norm_type)
        return norm

    def gradients(self) -> dict[str, Piece | None]:
        """Gather the gradients (collective), or cut views from the gradients of flat parameters."""
        if self.config.flat_parameters:
            return self._flat_gradients(self._picture_device)
        with self._full_parameters(with_grads=True) as named:
            return {
                name: None if parameter.grad is None else self._copied(parameter.grad)
                for name, parameter in named.items()
            }

    def parameters(self) -> dict[str, Piece]:
        """Gather the parameters (collective), or cut views from flat parameters."""
        if self.config.flat_parameters:
            return {
                name: piece
                for unit, parameter in self._flat_parameters()
                for name, piece in self._pieces_of(unit, parameter.detach(), self._picture_device)
                if piece is not None
            }
        with self._full_parameters() as named:
            return {name: self._copied(parameter.detach()) for name, parameter in named.items()}

    def own_gradients(self, names: Sequence[str]) -> list[torch.Tensor]:
        if self.config.flat_parameters:
            # Not moved: the case writes to these tensors, and writes to a copy on another device would be lost.
            pieces = self._flat_gradients(None)
            return [piece.tensor for name in names if (piece := pieces[name]) is not None]
        named = self.named_parameters()
        return [gradient for name in names if (gradient := named[name].grad) is not None]

    def checkpoint(self) -> dict[str, Any]:
        """Return sharded state dicts (collective)."""
        wrapper = self.api.FullyShardedDataParallel
        with wrapper.state_dict_type(self.module, self.api.StateDictType.SHARDED_STATE_DICT):
            return {
                "model": self.module.state_dict(),
                "optimizer": wrapper.optim_state_dict(self.module, self._checkpointed_optimizer()),
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Load sharded state dicts (collective)."""
        wrapper, optimizer = self.api.FullyShardedDataParallel, self._checkpointed_optimizer()
        with wrapper.state_dict_type(self.module, self.api.StateDictType.SHARDED_STATE_DICT):
            self.module.load_state_dict(state["model"])
            wrapper.optim_state_dict_to_load(self.module, optimizer, state["optimizer"], load_directly=True)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {name.replace(_WRAPPED, ""): value for name, value in super().named_parameters().items()}

    @contextlib.contextmanager
    def _full_parameters(self, *, with_grads: bool = False) -> Iterator[dict[str, nn.Parameter]]:
        """Gather all units (collective). The tensors are valid only inside the context.

        Args:
            with_grads: whether gradients are gathered as well.
        """
        options = {"writeback": False, "with_grads": with_grads}
        with self.api.FullyShardedDataParallel.summon_full_params(self.module, **options):
            yield self.named_parameters()

    def _copied(self, tensor: torch.Tensor) -> Piece:
        piece = piece_of(tensor, self._picture_device)
        return Piece(piece.tensor.clone(), piece.cut)

    def _flat_parameters(self) -> Iterator[tuple[FlatLayout, nn.Parameter]]:
        for unit in self._units:
            wrapper: Any = self.module.get_submodule(unit.module)
            (parameter,) = wrapper.module.parameters(recurse=False)
            yield unit, parameter

    def _flat_gradients(self, device: torch.device | None) -> dict[str, Piece | None]:
        return {
            name: piece
            for unit, parameter in self._flat_parameters()
            for name, piece in self._pieces_of(unit, parameter.grad, device)
        }

    def _pieces_of(
        self, unit: FlatLayout, shard: torch.Tensor | None, device: torch.device | None
    ) -> Iterator[tuple[str, Piece | None]]:
        mesh = self.config.mesh
        index = mesh.get_local_rank(mesh.ndim - 1)
        if shard is not None:
            shard = shard.to(device)
        yield from unit.pieces(shard, index=index, size=self.config.shard_size)

    @property
    def _picture_device(self) -> torch.device | None:
        """The device on which pieces are compared, or None if it is that of the shards."""
        return _device(self.config.mesh.device_type) if self.config.offload else None


def _device(device_type: str) -> torch.device:
    # Always passed explicitly: without a device_id, FullyShardedDataParallel looks for an accelerator even on the CPU.
    index = None if device_type == "cpu" else torch.accelerator.current_device_index()
    return torch.device(device_type) if index is None else torch.device(device_type, index)


def _names(units: Units) -> list[str]:
    """Return the module of each unit, nested modules before the modules that contain them: the order of wrapping."""
    for unit in units:
        assert len(unit) == 1, f"a wrapper takes one module, and the unit {unit} has {len(unit)}"
    return [name for (name,) in inner_first(units)]
