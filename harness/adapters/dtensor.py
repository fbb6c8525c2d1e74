"""What adapters of implementations with DTensor parameters have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from harness.adapters.base import Adapter, Config, OptimizerFactory, Piece, Traits, whole
from harness.adapters.capability import Capability


def cut_like(full: torch.Tensor, *, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """This rank's shard of ``full``, by ``torch.chunk`` along each sharded mesh dimension in turn.

    An empty shard keeps the other dimensions. Written here, not asked of DTensor, so that a wrong
    layout is a difference and not a definition.

    Raises:
        AssertionError: a placement other than plain ``Shard`` and ``Replicate``.
    """
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        assert type(placement) is Shard, f"no rule to cut a full tensor by {placement}"
        chunks = torch.chunk(full, mesh.size(mesh_dim), dim=placement.dim)
        index = mesh.get_local_rank(mesh_dim)
        full = chunks[index] if index < len(chunks) else full.narrow(placement.dim, 0, 0)
    return full


def piece_of(tensor: torch.Tensor) -> Piece:
    """The piece that a parameter or a gradient is on this rank."""
    if not isinstance(tensor, DTensor):
        return whole(tensor)
    cut = functools.partial(cut_like, mesh=tensor.device_mesh, placements=tuple(tensor.placements))
    return Piece(tensor.to_local(), cut)


class DTensorAdapter(Adapter):
    """Drives a ``fully_shard`` with the signature of ``torch.distributed.fsdp``."""

    traits = Traits(shards=frozenset({"parameters", "gradients", "optimizer"}))

    fully_shard: ClassVar[Callable[..., Any]]
    """The function under test, as a staticmethod."""

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        return None

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return frozenset(Capability)

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        # Looked up before anything is sharded: the class of a sharded module changes, its name does not.
        groups = [[model.get_submodule(name) for name in unit] for unit in _inner_first(config.units)]
        options = {"mesh": config.mesh, "reshard_after_forward": config.reshard_after_forward}
        for modules in groups:
            type(self).fully_shard(modules if len(modules) > 1 else modules[0], **options)
        type(self).fully_shard(model, **options)
        self.module = model if config.cast is None else model.to(config.cast)
        self.optimizer = optimizer(model.parameters()) if optimizer else None

    def gradients(self) -> dict[str, Piece | None]:
        return {
            name: None if parameter.grad is None else piece_of(parameter.grad)
            for name, parameter in self._sharded_parameters().items()
        }

    def parameters(self) -> dict[str, Piece]:
        return {name: piece_of(parameter.detach()) for name, parameter in self._sharded_parameters().items()}

    def registered(self) -> dict[str, Piece]:
        return {name: piece_of(parameter.detach()) for name, parameter in self.named_parameters().items()}

    def gathered(self) -> dict[str, bool]:
        return {name: not isinstance(value, DTensor) for name, value in self.named_parameters().items()}

    def reshard(self) -> None:
        for module in self.module.modules():
            if callable(reshard := getattr(module, "reshard", None)):
                reshard()

    def _sharded_parameters(self) -> dict[str, nn.Parameter]:
        """The sharded parameters, also while gathered ones are registered.

        After a forward that did not reshard, ``.grad`` and the optimizer's values live on the sharded
        ones; freeing the copies is what ``reshard`` is for, and the next forward gathers again anyway
        only if the step changed them, which the caller has just done.
        """
        if any(self.gathered().values()):
            self.reshard()
        return self.named_parameters()


def _inner_first(units: tuple[tuple[str, ...], ...]) -> list[tuple[str, ...]]:
    """Units so that a module's parts are sharded before the module itself; otherwise in the case's order."""
    return sorted(units, key=lambda unit: -max(name.count(".") for name in unit))
