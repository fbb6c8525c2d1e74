"""The base class of adapters whose implementation wraps modules and shards one flat parameter per wrapper."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from shardproof.harness.adapters.base import (
    Accumulation,
    Adapter,
    Config,
    OptimizerFactory,
    Piece,
    Precision,
    Traits,
    Units,
    inner_first,
    state_pieces,
    tensors_of_state,
    uncut,
)
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.flat_layout import FlatLayout, Place, flat_units

#: The prefix that a wrapper adds to the names of everything inside the wrapped module.
_WRAPPED = "_fsdp_wrapped_module."

#: With ``use_orig_params=True``, each parameter starts at a multiple of 16 bytes in its flat parameter.
_ALIGNMENT_BYTES = 16
#: Counted in elements, the padding is largest for a dtype of 2 bytes.
_MOST_ALIGNMENT = 8

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
        Capability.MIXED_PRECISION,
        Capability.IGNORED_PARAMETERS,
        Capability.BUFFER_DTYPE,
        Capability.FULL_PRECISION_EVALUATION,
        Capability.LOW_PRECISION_GRADIENTS,
        Capability.DEFERRED_REDUCTION,
        Capability.KEEP_AFTER_BACKWARD,
        Capability.CLIPPING,
        Capability.CLIP_BY_CALL,
        Capability.CLIP_ANY_NORM,
        Capability.CLIP_EMPTY_SHARDS,
        Capability.COUNTED_UNITS,
        Capability.ADAM,
        Capability.OWN_OPTIMIZER,
        Capability.LOSS_SCALING,
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
    return math.ceil((math.prod(shape) + _MOST_ALIGNMENT - 1) / size)


class FlatAdapter(Adapter):
    """Drives a ``FullyShardedDataParallel``, with ``use_orig_params=True`` unless the case wants flat parameters.

    Attributes:
        api: the module with ``FullyShardedDataParallel``, ``ShardingStrategy``, ``CPUOffload``, ``MixedPrecision`` and
            ``StateDictType``.
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
        assert not config.divide_factors, "FullyShardedDataParallel divides by the number of ranks"
        keeps = Accumulation(keeps_gathered=True)
        assert config.accumulation in (None, Accumulation(), keeps), "no_sync defers all of the reduction, of all units"
        assert config.accumulation != keeps or config.reshard_after_forward is False, (
            "parameters that are freed after forward are freed after backward too"
        )
        names = _names(config.units)
        itemsize = max((parameter.element_size() for parameter in model.parameters()), default=1)
        alignment = 1 if config.flat_parameters else _ALIGNMENT_BYTES // itemsize
        self._units = flat_units(model, [*names, ""], alignment=alignment, ignored=config.ignored)
        options = self._options()
        if config.ignored:
            options["ignored_states"] = [model.get_parameter(name) for name in config.ignored]
        for name in names:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, self._wrap(model.get_submodule(name), name, options))
        self.module = self._wrap(model, "", options)
        if config.cast is not None:
            self.module.to(config.cast)
        # The optimizer's references: modules register views of gathered parameters in their place while they compute.
        self._held = self.named_parameters()
        self._held_flat = [(unit, _flat_parameter(self.module, unit)) for unit in self._units if config.flat_parameters]
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

    def _wrap(self, module: nn.Module, unit: str, options: dict[str, Any]) -> nn.Module:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", str(int(self.config.precision_of(unit).full_in_evaluation)))
            wrapper: nn.Module = self.api.FullyShardedDataParallel(
                module, mixed_precision=self._mixed_precision(unit), **options
            )
        return wrapper

    def _mixed_precision(self, unit: str) -> Any:
        precision = self.config.precision_of(unit)
        assert precision.output is None, "FullyShardedDataParallel leaves outputs alone"
        if precision == Precision():
            return None
        return self.api.MixedPrecision(
            param_dtype=precision.compute,
            reduce_dtype=precision.reduce,
            buffer_dtype=precision.buffers,
            keep_low_precision_grads=precision.keeps_gradients,
            # The root's inputs are cast if either is set, and those of other units do not depend on the second.
            cast_forward_inputs=precision.casts_inputs and unit != "",
            cast_root_forward_inputs=precision.casts_inputs == (unit == ""),
        )

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

    def grad_scaler(self, *, init_scale: float, growth_interval: int) -> torch.amp.GradScaler:
        """Make a scaler that asks all ranks: gradients are plain tensors, of which each rank sees its own part."""
        device = self.config.mesh.device_type
        return ShardedGradScaler(device, init_scale=init_scale, growth_interval=growth_interval)

    def gradients(self) -> dict[str, Piece | None]:
        """Return the local parts of the gradients, where the optimizer finds them.

        With ``use_orig_params=True`` a rank that holds no element of a parameter has no gradient of it either.
        """
        if self.config.flat_parameters:
            return self._flat_pieces(lambda parameter: parameter.grad)
        return {
            place.name: None if (grad := self._held[place.name].grad) is None else Piece(grad, place.cut)
            for place in self._places()
        }

    def parameters(self) -> dict[str, Piece]:
        """Return the local parts of the parameters, where the optimizer updates them."""
        if self.config.flat_parameters:
            pieces = self._flat_pieces(torch.Tensor.detach)
            return {name: piece for name, piece in pieces.items() if piece is not None}
        return {place.name: Piece(self._held[place.name].detach(), place.cut) for place in self._places()}

    def held_parameters(self) -> dict[str, nn.Parameter]:
        return self._held

    def optimizer_state(self) -> dict[str, dict[str, Piece]] | None:
        if self.optimizer is None or not self.config.flat_parameters:
            return super().optimizer_state()
        found: dict[str, dict[str, Piece]] = {}
        for unit, parameter in self._held_flat:
            state = tensors_of_state(self.optimizer.state.get(parameter, {}))
            for place in self._places_in(unit):
                parts = {key: one[place.first : place.last] if one.ndim else one for key, one in state.items()}
                found[place.name] = state_pieces(parts, place.cut)
        return found

    def own_gradients(self, names: Sequence[str]) -> list[torch.Tensor]:
        pieces = self.gradients()
        return [piece.tensor for name in names if (piece := pieces[name]) is not None]

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

    def _places(self) -> Iterator[Place]:
        for unit in self._units:
            yield from self._places_in(unit)
        for name in self.config.ignored:
            yield Place(name, 0, self._held[name].numel(), uncut)

    def _places_in(self, unit: FlatLayout) -> Iterator[Place]:
        mesh = self.config.mesh
        if self.config.shard_size > 1 or self.config.flat_parameters:
            yield from unit.places(index=mesh.get_local_rank(mesh.ndim - 1), size=self.config.shard_size)
            return
        # A group of one rank shards nothing, and the original parameters keep their shapes.
        for name, numel, cut in zip(unit.names, unit.numels, unit.cuts, strict=True):
            yield Place(name, 0, numel, cut)

    def _flat_pieces(self, read: Callable[[nn.Parameter], torch.Tensor | None]) -> dict[str, Piece | None]:
        """Return the pieces of all parameters in what ``read`` returns of each flat parameter."""
        mesh = self.config.mesh
        index = mesh.get_local_rank(mesh.ndim - 1)
        return {
            name: piece
            for unit, parameter in self._held_flat
            for name, piece in unit.pieces(read(parameter), index=index, size=self.config.shard_size)
        }


def _flat_parameter(module: nn.Module, unit: FlatLayout) -> nn.Parameter:
    wrapper: Any = module.get_submodule(unit.module)
    (parameter,) = wrapper.module.parameters(recurse=False)
    assert isinstance(parameter, nn.Parameter)
    return parameter


def _device(device_type: str) -> torch.device:
    # Always passed explicitly: without a device_id, FullyShardedDataParallel looks for an accelerator even on the CPU.
    index = None if device_type == "cpu" else torch.accelerator.current_device_index()
    return torch.device(device_type) if index is None else torch.device(device_type, index)


def _names(units: Units) -> list[str]:
    """Return the module of each unit, nested modules before the modules that contain them: the order of wrapping."""
    for unit in units:
        assert len(unit) == 1, f"a wrapper takes one module, and the unit {unit} has {len(unit)}"
    return [name for (name,) in inner_first(units)]
