"""Adapters for fairscale: ``ShardedDataParallel``, which reduces each gradient to one rank, and its own FSDP."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from shardproof.harness.adapters.base import Config, OptimizerFactory, Packaged, Traits, state_pieces
from shardproof.harness.adapters.capability import COMMON_AND_CLIPPING, Capability
from shardproof.harness.adapters.flat import WrappingAdapter, flat_units, names_of
from shardproof.harness.adapters.replicas import class_and_options
from shardproof.harness.adapters.traits import padded_to_elements
from shardproof.harness.tensors.memory import free
from shardproof.harness.tensors.pieces import Piece, original_name, uncut, whole


class FairscaleAdapter(Packaged):
    """What both wrappers share: the package, and its scaler, which asks all ranks."""

    package, extra = "fairscale", "fairscale"

    def grad_scaler(self, *, init_scale: float, growth_interval: int, **options: Any) -> torch.amp.GradScaler:
        from fairscale.optim.grad_scaler import ShardedGradScaler

        group = self.config.mesh.get_group()
        scaler: torch.amp.GradScaler = ShardedGradScaler(
            process_group=group, init_scale=init_scale, growth_interval=growth_interval, **options
        )
        return scaler


class FairscaleSdpAdapter(FairscaleAdapter):
    """``fairscale.nn.ShardedDataParallel`` with ``fairscale.optim.OSS``, with the default buffers.

    The buffers hold 8 million elements, so that the gradients of small models are kept in them, whole, on every rank:
    what is claimed to be sharded is the optimizer.
    """

    name = "fairscale.sdp"
    # Gradients are views of the buffers, and stay there as zeros.
    traits = Traits(shards=frozenset({"optimizer"}), unused_gradient="zero")

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return COMMON_AND_CLIPPING | Capability.of(
            "unused-output recomputation compiled-modules deferred-reduction sync_module_states as_groups "
            "default_mesh clip-empty-shards own-optimizer loss-scaling"
        )

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
            sync_models_at_startup=config.sync_module_states,
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
        return cast(torch.Tensor, self._sharded.clip_grad_norm(self.config.clip.max_norm, self.config.clip.norm_type))

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


class FairscaleFsdpAdapter(FairscaleAdapter, WrappingAdapter):
    """``fairscale.nn.FullyShardedDataParallel``, which flattens the parameters of a unit into one.

    Units reduce one by one: by default those of small models would share a buffer of 25 MB.
    """

    name = "fairscale.fsdp"
    traits = Traits(local_numel=padded_to_elements, process_groups="kept", frees_models=False, isolation="adapter")

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        if device_type != "cuda":
            return "fairscale.fsdp runs on CUDA devices only: pass --device cuda"
        return super().availability(device_type)

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return COMMON_AND_CLIPPING - {Capability.UNUSED_MODULE, Capability.DATACLASS_OUTPUT} | Capability.of(
            "sharded reshard-after-forward root-reshard recomputation cast-after-init flat_parameters "
            "as_groups default_mesh gradient_divide_factors deferred-reduction accumulation.reshard_after_backward "
            "clip-empty-shards counted-units single-rank own-optimizer loss-scaling offload"
        )

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        self._check(config)
        assert config.reshard_after_forward in (None, True, False), "parameters are kept or freed"
        assert config.mesh.ndim == 1, f"a mesh of {config.mesh.ndim} dimensions has no process group of its own"
        names = names_of(config.units)
        units = flat_units(model, [*names, ""])
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
        self._held_flat = [(unit, self._wrappers[unit.module].params[0]) for unit in units]
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
        if name in config.gradient_divide_factors:
            wrapper.set_gradient_divide_factors(config.gradient_divide_factors[name], 1.0, recursive=False)
        self._wrappers[name] = wrapper
        return wrapper  # type: ignore[no-any-return]

    def submodule(self, name: str) -> nn.Module:
        return cast(nn.Module, self._wrappers[name] if name in self._wrappers else self._modules[name])

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return for each parameter the flat one that has it."""
        return {name: parameter for unit, parameter in self._held_flat for name in unit.names}

    def teardown(self) -> None:
        """Free what the flat parameters hold: they stay, beside later cases (``Traits.frees_models``)."""
        free([(parameter, parameter.grad, vars(parameter)) for _, parameter in self._held_flat])
