"""Adapter for fairscale's ``ShardedDataParallel``, which reduces each gradient to the rank that updates it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
from torch import nn

from shardproof.harness.adapters.base import (
    Adapter,
    Config,
    OptimizerFactory,
    Piece,
    Traits,
    original_name,
    state_pieces,
    uncut,
    whole,
)
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.replicas import class_and_options

_CAPABILITIES = frozenset(
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
        return _CAPABILITIES

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
        """Call the model's ``zero_grad``, as fairscale's examples do: that of the optimizer is F-135 of findings.md."""
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
