"""Adapters for fairscale: ``ShardedDataParallel``, which reduces each gradient to one rank, and its own FSDP."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import nn

from shardproof.harness.adapters.base import (
    Accumulation,
    Adapter,
    Config,
    OptimizerFactory,
    Piece,
    Traits,
    inner_first,
    original_name,
    state_pieces,
    tensors_of_state,
    uncut,
    whole,
)
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.flat import FlatLayout, flat_units
from shardproof.harness.adapters.replicas import class_and_options
from shardproof.harness.adapters.traits import padded_to_elements
from shardproof.harness.tensors.memory import free

_CAPABILITIES_OF_SDP = frozenset(
    {
        Capability.UNUSED_OUTPUT,
        Capability.UNUSED_MODULE,
        Capability.CONTAINER_OUTPUT,
        Capability.DATACLASS_OUTPUT,
        Capability.MULTIPLE_FORWARD,
        Capability.RECOMPUTATION,
        Capability.COMPILED_MODULES,
        Capability.TIED_PARAMETERS,
        Capability.DEFERRED_REDUCTION,
        Capability.SYNC_STATES,
        Capability.PROCESS_GROUPS,
        Capability.DEFAULT_MESH,
        Capability.CLIPPING,
        Capability.CLIP_BY_CALL,
        Capability.CLIP_ANY_NORM,
        Capability.CLIP_EMPTY_SHARDS,
        Capability.ADAM,
        Capability.OWN_OPTIMIZER,
        Capability.LOSS_SCALING,
    }
)
# Why the other capabilities are missing; those that are not listed have not been tried:
# - SHARDED and what builds on it (RESHARD_AFTER_FORWARD, COUNTED_UNITS, GATHER_ORDER, MANUAL_RESHARD, ...): every rank
#   holds all parameters.
# - HYBRID, UNIT_MESHES, TENSOR_PARALLEL: it takes one process group.
# - NON_ROOT_FORWARD: only the wrapper's forward prepares the reductions of the next backward.
# - POST_ACCUMULATE_GRAD_HOOK: the hooks run before the reduction, on this rank's own gradient.
# - CAST_AFTER_INIT: the optimizer is made before the model is wrapped, and its buffers keep the dtype.
# - MIXED_PRECISION, BUFFER_DTYPE, OFFLOAD: there are no such options but reduce_fp16 and broadcast_fp16.
# - CLIP_RAISES: clip_grad_norm has no such option.
# - SINGLE_RANK: gradients are reduced and parameters sent even among one rank.
# - DISTRIBUTED_CHECKPOINT, FULL_STATE_DICT: the optimizer collects its state on one rank by calls of its own, and
#   torch.distributed.checkpoint is not documented for it.
# - IGNORED_PARAMETERS, META_DEVICE, DIVIDE_FACTOR, UNIT_SETTINGS, REDUCTION_HOOK: there are no such options.


def fairscale_scaler(config: Config, *, init_scale: float, growth_interval: int) -> torch.amp.GradScaler:
    """Make fairscale's ``ShardedGradScaler``."""
    from fairscale.optim.grad_scaler import ShardedGradScaler

    group = config.mesh.get_group()
    scaler: torch.amp.GradScaler = ShardedGradScaler(
        init_scale=init_scale, growth_interval=growth_interval, process_group=group
    )
    return scaler


class FairscaleSdpAdapter(Adapter):
    """``fairscale.nn.ShardedDataParallel`` with ``fairscale.optim.OSS``, with the default buffers.

    The buffers hold 8 million elements, so that the gradients of small models are kept in them, whole, on every rank:
    what is claimed to be sharded is the optimizer.
    """

    name = "fairscale.sdp"
    # Gradients are views of the buffers, and stay there as zeros.
    traits = Traits(shards=frozenset({"optimizer"}), unused_gradient="zero")

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        if importlib.util.find_spec("fairscale") is None:
            return "fairscale is not installed; pip install 'shardproof[fairscale]' brings it"
        return None

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return _CAPABILITIES_OF_SDP

    @classmethod
    def version(cls) -> str:
        return metadata.version("fairscale")

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        from fairscale.nn import ShardedDataParallel
        from fairscale.optim import OSS

        super().__init__(model, optimizer=optimizer, config=config)
        assert config.mesh.ndim == 1, f"a mesh of {config.mesh.ndim} dimensions has no process group of its own"
        assert config.cast is None, "the optimizer's buffers have the dtype of the parameters"
        group = None if config.default_mesh else config.mesh.get_group()
        # It does not work without an optimizer, which has the owners of the gradients.
        factory = optimizer or functools.partial(torch.optim.SGD, lr=0.0)
        # OSS takes groups, a class and its options, and a case has a function that makes the optimizer of all groups.
        example: Any = factory(model.parameters())
        kind, options = class_and_options(example)
        self._owners = _owners(example.param_groups, config.mesh.size())
        self._rank = config.mesh.get_local_rank()
        # A buffer has room for less than the model. What does not fit is dropped by the other ranks.
        total = sum(parameter.numel() for parameter in self._owners)
        self._drops = any(
            sum(one.numel() for one, owner in self._owners.items() if owner == rank) == total
            for rank in range(config.mesh.size())
        )
        self._sharded: Any = OSS(example.param_groups, optim=kind, group=group, **options)
        self.optimizer = self._sharded if optimizer else None
        self.module = ShardedDataParallel(
            model,
            self._sharded,
            process_group=group,
            broadcast_buffers=False,
            sync_models_at_startup=config.sync_states,
        )

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Enter ``no_sync`` for every microbatch but the last."""
        module: Any = self.module
        with contextlib.nullcontext() if is_last else module.no_sync():
            yield

    def submodule(self, name: str) -> nn.Module:
        assert not name, "gradients are reduced only after a forward of the root"
        return self.module

    def clip(self) -> torch.Tensor:
        assert self.config.clip is not None
        norm: torch.Tensor = self._sharded.clip_grad_norm(self.config.clip.max_norm, self.config.clip.norm_type)
        return norm

    def grad_scaler(self, *, init_scale: float, growth_interval: int) -> torch.amp.GradScaler:
        """Make fairscale's scaler, which asks all ranks."""
        return fairscale_scaler(self.config, init_scale=init_scale, growth_interval=growth_interval)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Call the model's ``zero_grad``, as fairscale's examples do: that of the optimizer is findings/F135.py."""
        self.module.zero_grad(set_to_none=set_to_none)

    def gradients(self) -> dict[str, Piece | None]:
        """Return the gradients of the parameters that this rank updates; what other ranks have of them is not used."""
        found: dict[str, Piece | None] = {}
        for name, parameter in self.named_parameters().items():
            is_here = parameter.grad is not None or self._drops
            if self._owners.get(parameter, self._rank) != self._rank and is_here:
                found[name] = Piece(parameter.detach().new_empty(0), _nothing)
            else:
                found[name] = None if parameter.grad is None else whole(parameter.grad)
        return found

    def parameters(self) -> dict[str, Piece]:
        return {name: whole(parameter.detach()) for name, parameter in self.named_parameters().items()}

    def optimizer_state(self) -> dict[str, dict[str, Piece]] | None:
        """Return the state of the parameters that this rank updates, which the optimizer inside OSS has."""
        if self.optimizer is None:
            return None
        state = self._sharded.optim.state
        return {
            name: state_pieces(state.get(parameter, {}), uncut)
            for name, parameter in self.named_parameters().items()
            if self._owners.get(parameter) == self._rank
        }

    def named_parameters(self) -> dict[str, nn.Parameter]:
        model: Any = self.module
        return {original_name(name): value for name, value in model.module.named_parameters()}


def _owners(groups: list[dict[str, Any]], size: int) -> dict[nn.Parameter, int]:
    """Return which rank updates each parameter: in order, each goes to the rank that has the fewest elements.

    The rule is that of OSS; a frozen parameter counts as one element.
    """
    loads, owners = [0] * size, {}
    for group in groups:
        for parameter in group["params"]:
            owners[parameter] = loads.index(min(loads))
            loads[owners[parameter]] += parameter.numel() if parameter.requires_grad else 1
    return owners


def _nothing(full: torch.Tensor) -> torch.Tensor:
    """The cut of a rank that holds no element."""
    return full.flatten()[:0]


# Adapter for fairscale's ``FullyShardedDataParallel``, a module wrapper with one flat parameter per unit.


_CAPABILITIES_OF_FSDP = frozenset(
    {
        Capability.SHARDED,
        Capability.RESHARD_AFTER_FORWARD,
        Capability.ROOT_RESHARD,
        Capability.CONTAINER_OUTPUT,
        Capability.MULTIPLE_FORWARD,
        Capability.RECOMPUTATION,
        Capability.TIED_PARAMETERS,
        Capability.CAST_AFTER_INIT,
        Capability.FLAT_PARAMETERS,
        Capability.PROCESS_GROUPS,
        Capability.DEFAULT_MESH,
        Capability.DIVIDE_FACTOR,
        Capability.DEFERRED_REDUCTION,
        Capability.KEEP_AFTER_BACKWARD,
        Capability.CLIPPING,
        Capability.CLIP_BY_CALL,
        Capability.CLIP_ANY_NORM,
        Capability.CLIP_EMPTY_SHARDS,
        Capability.COUNTED_UNITS,
        Capability.SINGLE_RANK,
        Capability.ADAM,
        Capability.OWN_OPTIMIZER,
        Capability.LOSS_SCALING,
        Capability.OFFLOAD,
    }
)
# Why the other capabilities are missing; those that are not listed have not been tried:
# - RESHARD_TO_SIZE: parameters are kept after forward or freed.
# - GROUPED_UNIT: a wrapper takes one module.
# - HYBRID, UNIT_MESHES, TENSOR_PARALLEL: a wrapper takes one process group.
# - UNUSED_OUTPUT, UNUSED_MODULE: backward raises: findings/F148.py.
# - GATHER_ORDER: backward gathers a unit when it runs.
# - DATACLASS_OUTPUT: hooks are put on tensors in containers that it knows, as documented.
# - POST_ACCUMULATE_GRAD_HOOK, REGISTERED_STATE, DTENSOR_PARAMETERS, SHARD_DIMENSION: there are flat parameters only.
# - NON_ROOT_FORWARD: the wrapper that is called first becomes the root.
# - MIXED_PRECISION: reductions are in the dtype of compute or in float32, and in no lower one.
# - OFFLOAD_CHOICE, PAGEABLE_OFFLOAD: offloading always pins memory.
# - CLIP_RAISES, SYNC_STATES, IGNORED_PARAMETERS, META_DEVICE, REPLICAS_ALONE, GATHERS_AHEAD, WRAPPING_POLICY: there are
#   no such options.
# - WHOLE_PARAMETERS: the context has no options for gradients, for one rank alone and for the CPU.
# - DISTRIBUTED_CHECKPOINT, FULL_STATE_DICT: state dicts of the optimizer come from calls of its own, by numbers.
# - MANUAL_RESHARD, EXPLICIT_PREFETCH, UNIT_SETTINGS, RECOVERY: there are no such calls.


class FairscaleFsdpAdapter(Adapter):
    """``fairscale.nn.FullyShardedDataParallel``, which flattens the parameters of a unit into one.

    Units reduce one by one: by default those of small models would share a buffer of 25 MB.
    """

    name = "fairscale.fsdp"
    traits = Traits(local_numel=padded_to_elements, process_groups="kept", frees_models=False, isolation="adapter")
    module: Any

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        if device_type != "cuda":
            return "fairscale.fsdp runs on CUDA devices only: pass --device cuda"
        return FairscaleSdpAdapter.availability(device_type)

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return _CAPABILITIES_OF_FSDP

    @classmethod
    def version(cls) -> str:
        return FairscaleSdpAdapter.version()

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        keeps = Accumulation(keeps_gathered=True)
        assert config.accumulation in (None, Accumulation(), keeps), "no_sync defers all of the reduction, of all units"
        assert config.accumulation != keeps or config.reshard_after_forward is False, (
            "parameters that are freed after forward are freed after backward too"
        )
        assert config.reshard_after_forward in (None, True, False), "parameters are kept or freed"
        assert config.mesh.ndim == 1, f"a mesh of {config.mesh.ndim} dimensions has no process group of its own"
        names: list[str] = []
        for unit in inner_first(config.units):
            assert len(unit) == 1, f"a wrapper takes one module, and the unit {unit} has {len(unit)}"
            names += unit
        self._units = flat_units(model, [*names, ""])
        self._device = next(model.parameters()).device
        if config.offload:
            model.cpu()  # as documented: what is offloaded is wrapped on the CPU
        self._modules = dict(model.named_modules())
        self._wrappers: dict[str, Any] = {}
        for name in names:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, self._wrap(model.get_submodule(name), name))
        self.module = self._wrap(model, "")
        if config.cast is not None:
            self.module.to(config.cast)
        self._held = [(unit, self._wrappers[unit.module].params[0]) for unit in self._units]
        self.optimizer = optimizer(self.module.parameters()) if optimizer else None

    def _wrap(self, module: nn.Module, name: str) -> nn.Module:
        from fairscale.nn import FullyShardedDataParallel

        config = self.config
        options: dict[str, Any] = {} if config.default_mesh else {"process_group": config.mesh.get_group()}
        if config.reshard_after_forward is not None:
            options["reshard_after_forward"] = config.reshard_after_forward
            options["disable_reshard_on_root"] = not config.reshard_after_forward
        wrapper: Any = FullyShardedDataParallel(
            module,
            move_params_to_cpu=config.offload is not None,
            compute_device=self._device,
            bucket_cap_mb=0,
            **options,
        )
        if name in config.divide_factors:
            wrapper.set_gradient_divide_factors(config.divide_factors[name], 1.0, recursive=False)
        self._wrappers[name] = wrapper
        return wrapper  # type: ignore[no-any-return]

    def submodule(self, name: str) -> nn.Module:
        module: nn.Module = self._wrappers[name] if name in self._wrappers else self._modules[name]
        return module

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
        """Make fairscale's scaler, which asks all ranks."""
        return fairscale_scaler(self.config, init_scale=init_scale, growth_interval=growth_interval)

    def gradients(self) -> dict[str, Piece | None]:
        return self._pieces(lambda parameter: parameter.grad)

    def parameters(self) -> dict[str, Piece]:
        pieces = self._pieces(torch.Tensor.detach)
        return {name: piece for name, piece in pieces.items() if piece is not None}

    def _pieces(self, read: Callable[[nn.Parameter], torch.Tensor | None]) -> dict[str, Piece | None]:
        return {name: piece for unit, parameter in self._held for name, piece in self._pieces_of(unit, read(parameter))}

    def _pieces_of(self, unit: FlatLayout, shard: torch.Tensor | None) -> Iterator[tuple[str, Piece | None]]:
        config = self.config
        flat = None if shard is None else shard.view(-1)
        return unit.pieces(flat, index=config.shard_index, size=config.shard_size)

    def optimizer_state(self) -> dict[str, dict[str, Piece]] | None:
        if self.optimizer is None:
            return None
        found: dict[str, dict[str, Piece]] = {}
        for unit, parameter in self._held:
            state = tensors_of_state(self.optimizer.state.get(parameter, {}))
            for place in unit.places(index=self.config.shard_index, size=self.config.shard_size):
                parts = {key: one[place.first : place.last] if one.ndim else one for key, one in state.items()}
                found[place.name] = state_pieces(parts, place.cut)
        return found

    def own_gradients(self, names: Sequence[str]) -> list[torch.Tensor]:
        pieces = self.gradients()
        return [piece.tensor for name in names if (piece := pieces[name]) is not None]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the flat parameters, by the name of the unit's module."""
        return {f"{unit.module}.flat" if unit.module else "flat": parameter for unit, parameter in self._held}

    def teardown(self) -> None:
        """Free what the flat parameters hold: they stay, beside later cases (``Traits.frees_models``)."""
        free([(parameter, parameter.grad, vars(parameter)) for _, parameter in self._held])
