"""Unsharded training with a full copy of the model on every rank: the two baselines. DDP is also a control."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardproof.harness.adapters.base import Adapter, Config, OptimizerFactory, Piece, Traits, original_name, whole
from shardproof.harness.adapters.capability import Capability

_UNSHARDED = frozenset(
    {
        Capability.UNUSED_MODULE,
        Capability.CONTAINER_OUTPUT,
        Capability.DATACLASS_OUTPUT,
        Capability.MULTIPLE_FORWARD,
        Capability.CLIPPING,
        Capability.CLIP_BY_CALL,
        Capability.CLIP_ANY_NORM,
        Capability.CLIP_RAISES,
        Capability.ADAM,
        Capability.OWN_OPTIMIZER,
        Capability.LOSS_SCALING,
        Capability.HYBRID,
        Capability.TIED_PARAMETERS,
        Capability.DEFERRED_REDUCTION,
    }
)


class _Replica(Adapter):
    """A full copy of the model on every rank; its pieces are the parameters and gradients themselves."""

    traits = Traits(shards=frozenset())

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        return None

    def gradients(self) -> dict[str, Piece | None]:
        return {
            name: None if parameter.grad is None else whole(parameter.grad)
            for name, parameter in self.named_parameters().items()
        }

    def parameters(self) -> dict[str, Piece]:
        return {name: whole(parameter.detach()) for name, parameter in self.named_parameters().items()}


class ReplicatedAdapter(_Replica):
    """Plain copies whose gradients are averaged over the data-parallel group after the last microbatch.

    The baseline where DDP cannot express the case. It averages by its own all-reduce and division, so that it shares no
    reduction code with the implementation under test.
    """

    name = "replicated"

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return _UNSHARDED | {Capability.UNUSED_OUTPUT, Capability.NON_ROOT_FORWARD}

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


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the process group of all ranks of the mesh; None stands for the default group of the whole world."""
    if mesh.ndim == 1:
        return mesh.get_group()
    assert mesh.size() == dist.get_world_size(), "a 2-D mesh over a part of the world has no group of its own"
    return None


class DdpAdapter(_Replica):
    """``DistributedDataParallel`` with ``broadcast_buffers=False``: the usual baseline.

    As an implementation under test it is the control: it shards nothing and must never diverge from the baseline.
    """

    name = "ddp"

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return _UNSHARDED | {Capability.DISTRIBUTED_CHECKPOINT, Capability.FULL_STATE_DICT}

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        with warnings.catch_warnings():
            # torch 2.13 deprecates the argument in favour of one that 2.11 lacks and that also synchronizes at
            # construction.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
            self._ddp = self.module = DistributedDataParallel(
                model,
                process_group=_group_of(config.mesh),
                broadcast_buffers=False,
                find_unused_parameters=config.find_unused,
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
