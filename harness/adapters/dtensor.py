"""What adapters of implementations with DTensor parameters have in common."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardproof.harness.adapters.base import (
    Accumulation,
    Adapter,
    Config,
    OptimizerFactory,
    Piece,
    Traits,
    inner_first,
    whole,
)
from shardproof.harness.adapters.capability import Capability


def cut_like(full: torch.Tensor, *, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """This rank's shard of ``full``, by ``torch.chunk`` along each sharded mesh dimension in turn.

    A plain ``Shard`` is cut after the mesh dimensions before it. A strided one is cut last, after the dimensions
    behind it: tensor parallelism, the inner dimension, has cut the tensor before data parallelism cuts what it is
    given. An empty shard keeps the other dimensions. Written here, not asked of DTensor, so that a wrong layout is a
    difference and not a definition.

    Raises:
        AssertionError: a placement other than ``Shard``, ``Replicate`` and a strided shard whose factor is the number
            of pieces into which the dimensions behind it cut.
    """
    strided = []
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            strided.append(mesh_dim)
        elif not isinstance(placement, Replicate):
            assert type(placement) is Shard, f"no rule to cut a full tensor by {placement}"
            full = _chunk(full, mesh, mesh_dim, placement.dim)
    for mesh_dim in reversed(strided):
        placement = placements[mesh_dim]
        assert isinstance(placement, _StridedShard)
        behind = [d for d in range(mesh_dim + 1, len(placements)) if _is_cut(placements[d], placement.dim)]
        pieces = math.prod(mesh.size(d) for d in behind)
        assert placement.split_factor == pieces, f"{placement} in {placements}: the factor should be {pieces}"
        full = _chunk(full, mesh, mesh_dim, placement.dim)
    return full


def _is_cut(placement: Placement, dim: int) -> bool:
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def _chunk(full: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, dim: int) -> torch.Tensor:
    chunks = torch.chunk(full, mesh.size(mesh_dim), dim=dim)
    index = mesh.get_local_rank(mesh_dim)
    return chunks[index] if index < len(chunks) else full.narrow(dim, 0, 0)


def piece_of(tensor: torch.Tensor, device: torch.device | None = None) -> Piece:
    """The piece that a parameter or a gradient is on this rank, on ``device`` if it is given."""
    if not isinstance(tensor, DTensor):
        return whole(tensor)
    cut = functools.partial(cut_like, mesh=tensor.device_mesh, placements=tuple(tensor.placements))
    return Piece(tensor.to_local().to(device), cut)


class DTensorAdapter(Adapter):
    """Drives a ``fully_shard`` with the signature of ``torch.distributed.fsdp``."""

    traits = Traits(shards=frozenset({"parameters", "gradients", "optimizer"}))

    fully_shard: ClassVar[Callable[..., Any]]
    """The function under test, as a staticmethod."""

    offload_policy: ClassVar[Callable[..., Any]]
    """Its policy of shards on the CPU."""

    register: ClassVar[Callable[..., None]]
    """Its ``register_fsdp_forward_method``, as a staticmethod."""

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        return None

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        # One flat parameter a unit is what these implementations do without, and nothing is sent when they shard.
        return frozenset(Capability) - {Capability.FLAT_PARAMETERS, Capability.SYNC_STATES}

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        assert not (config.flat_parameters or config.sync_states), "every parameter stays one of its own"
        # Looked up before anything is sharded: the class of a sharded module changes, its name does not.
        groups = [[model.get_submodule(name) for name in unit] for unit in inner_first(config.units)]
        options: dict[str, Any] = {"mesh": config.mesh, "reshard_after_forward": config.reshard_after_forward}
        if config.offload:
            options["offload_policy"] = type(self).offload_policy(pin_memory=config.offload == "pinned")
        for modules in groups:
            type(self).fully_shard(modules if len(modules) > 1 else modules[0], **options)
        type(self).fully_shard(model, **options)
        self.module = model if config.cast is None else model.to(config.cast)
        self.optimizer = optimizer(model.parameters()) if optimizer else None

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        if self.config.accumulation is not None:
            self._accumulate(self.config.accumulation, is_last=is_last)
        yield

    def _accumulate(self, how: Accumulation, *, is_last: bool) -> None:
        root: Any = self.module
        recurse = how.units != "root-only"
        targets = [root] if isinstance(how.units, str) else [root.get_submodule(name) for name in how.units]
        for target in targets:
            reduces = target.set_requires_gradient_sync if how.skips == "reduction" else target.set_requires_all_reduce
            reduces(is_last, recurse=recurse)
            if how.keeps_gathered:
                target.set_reshard_after_backward(is_last, recurse=recurse)
        if how.marks_last:
            root.set_is_last_backward(is_last)

    def gradients(self) -> dict[str, Piece | None]:
        return {
            name: None if parameter.grad is None else piece_of(parameter.grad, self._device)
            for name, parameter in self._sharded_parameters().items()
        }

    def parameters(self) -> dict[str, Piece]:
        return {
            name: piece_of(parameter.detach(), self._device) for name, parameter in self._sharded_parameters().items()
        }

    def own_gradients(self, names: Sequence[str]) -> list[torch.Tensor]:
        named = self._sharded_parameters()
        gradients = [gradient for name in names if (gradient := named[name].grad) is not None]
        return [one.to_local() if isinstance(one, DTensor) else one for one in gradients]

    def registered(self) -> dict[str, Piece]:
        return {name: piece_of(parameter.detach()) for name, parameter in self.named_parameters().items()}

    def gathered(self) -> dict[str, bool]:
        return {name: not isinstance(value, DTensor) for name, value in self.named_parameters().items()}

    def reshard(self) -> None:
        for module in self._sharded_modules():
            module.reshard()

    def unshard(self) -> None:
        for module in self._sharded_modules():
            module.unshard(async_op=True)

    def prefetch(self, *, forward: Mapping[str, Sequence[str]], backward: Mapping[str, Sequence[str]]) -> None:
        for name, ahead in forward.items():
            self._unit(name).set_modules_to_forward_prefetch([self._unit(other) for other in ahead])
        for name, ahead in backward.items():
            self._unit(name).set_modules_to_backward_prefetch([self._unit(other) for other in ahead])

    def register_forward_method(self, submodule: str, method: str) -> None:
        type(self).register(self._unit(submodule), method)

    def after_step(self, event: torch.Event) -> None:
        self._unit("").set_post_optim_event(event)

    def _unit(self, name: str) -> Any:
        return self.module.get_submodule(name)

    def _sharded_modules(self) -> list[Any]:
        return [module for module in self.module.modules() if callable(getattr(module, "reshard", None))]

    @property
    def _device(self) -> torch.device | None:
        """Where pictures are compared, if not where the shards are."""
        if not self.config.offload or self.config.mesh.device_type == "cpu":
            return None
        return torch.device(self.config.mesh.device_type, torch.accelerator.current_device_index())

    def _sharded_parameters(self) -> dict[str, nn.Parameter]:
        """The sharded parameters, also while gathered ones are registered.

        After a forward that did not reshard, ``.grad`` and the optimizer's values live on the sharded
        ones; freeing the copies is what ``reshard`` is for, and the next forward gathers again anyway
        only if the step changed them, which the caller has just done.
        """
        if any(self.gathered().values()):
            self.reshard()
        return self.named_parameters()
