"""Adapter for fairscale's ``FullyShardedDataParallel``, a module wrapper with one flat parameter per unit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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
    state_pieces,
    tensors_of_state,
)
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.fairscale_sdp import FairscaleSdpAdapter, fairscale_scaler
from shardproof.harness.adapters.flat_layout import FlatLayout, flat_units
from shardproof.harness.adapters.freeing import free
from shardproof.harness.adapters.traits import padded_to_elements

_CAPABILITIES = frozenset(
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
# - UNUSED_OUTPUT, UNUSED_MODULE: backward raises: F-148 of docs/findings.md.
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
        return _CAPABILITIES

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
