"""Unsharded training with a full copy of the model on every rank: the two baselines, and controls."""

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardproof.harness.adapters.base import ByParameter, Config, OptimizerFactory, Traits
from shardproof.harness.adapters.capability import COMMON_AND_CLIPPING, Capability
from shardproof.harness.tensors import private
from shardproof.harness.tensors.pieces import Piece, original_name, whole

UNSHARDED = COMMON_AND_CLIPPING | {
    "clip.error_if_nonfinite",
    Capability.CLIP_SOME,
    Capability.OWN_OPTIMIZER,
    Capability.LOSS_SCALING,
    Capability.DEFERRED_REDUCTION,
}
"""What training on plain copies offers, whoever averages their gradients."""


REPLICA = Traits(shards=frozenset())
"""The traits of what shards nothing."""


def class_and_options(optimizer: torch.optim.Optimizer) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return an optimizer's class and the options that its constructor takes, for what takes those in place of it.

    What a case's factory makes is not stepped then: it serves for these and for its groups, which have options too.
    """
    known = inspect.signature(type(optimizer)).parameters
    return type(optimizer), {name: value for name, value in optimizer.defaults.items() if name in known}


class ReplicaAdapter(ByParameter):
    """A full copy of the model on every rank; its pieces are the parameters and gradients themselves."""

    traits = REPLICA

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        return None

    @classmethod
    def source(cls) -> str | None:
        return torch.__file__

    def piece(self, name: str, tensor: torch.Tensor) -> Piece:
        return whole(tensor)


class ReplicatedAdapter(ReplicaAdapter):
    """Plain copies whose gradients are averaged over the data-parallel group after the last microbatch.

    The baseline where DDP cannot express the case. It averages by its own all-reduce and division, so that it shares no
    reduction code with the implementation under test.
    """

    name = "replicated"

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return UNSHARDED | {Capability.UNUSED_OUTPUT, Capability.NON_ROOT_FORWARD}

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        self.module = model if config.cast is None else model.to(config.cast)
        self.optimizer = optimizer(model.parameters()) if optimizer else None

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        yield
        if is_last:
            self._average_gradients()

    def _average_gradients(self) -> None:
        groups = self.config.mesh.get_all_groups()
        for parameter in self.module.parameters():
            if parameter.requires_grad and _has_gradient_on_any_rank(parameter, groups):
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for group in groups:
                    dist.all_reduce(gradient, group=group)
                parameter.grad = gradient.div_(self.config.mesh.size())


def _has_gradient_on_any_rank(parameter: nn.Parameter, groups: list[dist.ProcessGroup]) -> bool:
    used = torch.tensor(float(parameter.grad is not None), device=parameter.device)
    for group in groups:
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    return bool(used)


def group_of(config: Config) -> dist.ProcessGroup | None:
    """Return the process group over which DDP averages; None stands for the default group of the whole world."""
    mesh = config.mesh
    if mesh.ndim == 1:
        return None if config.default_mesh else mesh.get_group()
    assert mesh.ndim == 2, f"DDP averages over a mesh of replicas, or of replicas and shards, not over {mesh}"
    assert mesh.size() == dist.get_world_size(), "a 2-D mesh over a part of the world has no group of its own"
    return None


OF_DDP = UNSHARDED | Capability.of(
    "clip-empty-shards compiled-modules default_mesh distributed-checkpoint full-state-dict as_groups "
    "recomputation state-helpers"
)
"""What ``DistributedDataParallel`` offers, as a wrapper or in place."""


class DdpAdapter(ReplicaAdapter):
    """``DistributedDataParallel`` with ``broadcast_buffers=False``: the usual baseline.

    Where ranks begin with the first one's values it is True: without it DDP sends parameters alone.

    As an implementation under test it is the control: it shards nothing and must never diverge from the baseline.
    """

    name = "ddp"

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return OF_DDP | {"sync_module_states"}

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        self.group = group_of(config)
        with warnings.catch_warnings():
            # torch 2.13 deprecates the argument in favour of one that 2.11 lacks and that also synchronizes at
            # construction.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
            self._ddp = self.module = DistributedDataParallel(
                model,
                process_group=self.group,
                broadcast_buffers=bool(config.sync_module_states),
                find_unused_parameters=config.find_unused_parameters,
            )
        self.optimizer = optimizer(self.module.parameters()) if optimizer else None

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if is_last else self._ddp.no_sync():
            yield

    def submodule(self, name: str) -> nn.Module:
        assert not name, "DDP reduces gradients only after a forward of the root"
        return self.module

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {original_name(name): value for name, value in self._ddp.module.named_parameters()}


class TorchReplicateAdapter(ReplicaAdapter):
    """``torch.distributed._composable.replicate``, DDP in place, on the root alone. A control: it shards nothing."""

    name = "torch.replicate"

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return OF_DDP | {Capability.CAST_AFTER_INIT}

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        replicate = private.need("torch.distributed._composable.replicate.replicate")
        super().__init__(model, optimizer=optimizer, config=config)
        self.module = replicate(model, find_unused_parameters=config.find_unused_parameters, **self._ranks())
        if config.cast is not None:
            self.module.to(config.cast)
        self.optimizer = optimizer(self.module.parameters()) if optimizer else None

    def _ranks(self) -> dict[str, Any]:
        if self.config.default_mesh:
            return {}
        mesh = self.config.mesh
        return {"process_group": mesh.get_group()} if self.config.as_groups else {"device_mesh": mesh}

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        root: Any = self.module
        root.set_requires_gradient_sync(is_last)
        yield

    def submodule(self, name: str) -> nn.Module:
        assert not name, "replicate() reduces gradients only after a forward of the root"
        return self.module
