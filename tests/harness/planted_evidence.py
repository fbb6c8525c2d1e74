"""Adapters that show too little: pieces that cover nothing, and full copies behind traits that excuse them.

Each would pass every case if a comparison trusted what an adapter shows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardproof.harness.adapters.base import Adapter, Piece, Traits, whole
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.replicas import DdpAdapter, ReplicatedAdapter

# Pieces


class _Shown(ReferenceAdapter):
    """Shards like the reference, and shows other pieces."""

    def shown(self, name: str, piece: Piece) -> Piece:
        raise NotImplementedError

    @property
    def index(self) -> int:
        return self.config.mesh.get_local_rank(self.config.mesh.ndim - 1)

    def gradients(self) -> dict[str, Piece | None]:
        found = super().gradients()
        return {name: None if piece is None else self.shown(name, piece) for name, piece in found.items()}

    def parameters(self) -> dict[str, Piece]:
        return {name: self.shown(name, piece) for name, piece in super().parameters().items()}

    def optimizer_state(self) -> None:
        return None


def nothing_of(piece: Piece) -> Piece:
    return Piece(piece.tensor.flatten()[:0], lambda full: full.flatten()[:0])


class Nothing(_Shown):
    name = "nothing"

    def shown(self, name: str, piece: Piece) -> Piece:
        return nothing_of(piece)


class NothingAndNoStep(Nothing):
    name = "nothing-and-no-step"

    def step(self) -> None:
        pass


class NothingOnRankOne(_Shown):
    name = "nothing-on-rank-one"

    def shown(self, name: str, piece: Piece) -> Piece:
        return nothing_of(piece) if self.index == 1 else piece


class AllOnRankZero(_Shown):
    """Gathers everything on every rank and shows it on the first alone."""

    name = "all-on-rank-zero"

    def gathered_pieces(self, found: dict[str, Any]) -> dict[str, Any]:
        full = {name: None if value is None else whole(value.full_tensor()) for name, value in found.items()}
        return {n: p if p is None or self.index == 0 else nothing_of(p) for n, p in full.items()}

    def gradients(self) -> dict[str, Piece | None]:
        return self.gathered_pieces({name: value.grad for name, value in self._held.items()})

    def parameters(self) -> dict[str, Piece]:
        return self.gathered_pieces({name: value.detach() for name, value in self._held.items()})


class ZerosCutFromZeros(_Shown):
    name = "zeros-cut-from-zeros"

    def shown(self, name: str, piece: Piece) -> Piece:
        shape = piece.tensor.shape
        return Piece(torch.zeros_like(piece.tensor), lambda full: full.new_zeros(shape))


class CutIsTheTensor(_Shown):
    name = "cut-is-the-tensor"

    def shown(self, name: str, piece: Piece) -> Piece:
        return Piece(piece.tensor, lambda full: piece.tensor.to(full.dtype))


class CutOfFloatsIsTheTensor(_Shown):
    """Positions are cut as they should be, floating-point tensors are not."""

    name = "cut-of-floats-is-the-tensor"

    def shown(self, name: str, piece: Piece) -> Piece:
        def cut(full: torch.Tensor) -> torch.Tensor:
            return piece.tensor.to(full.dtype) if full.is_floating_point() else piece.cut(full)

        return Piece(piece.tensor, cut)


class RankZerosPieces(_Shown):
    """Every rank shows what the first holds."""

    name = "rank-zeros-pieces"

    def shown(self, name: str, piece: Piece) -> Piece:
        (full,) = [v for n, v in self._held.items() if n == name]
        value = full.grad if full.grad is not None and self._reading == "gradients" else full.detach()
        assert isinstance(value, DTensor)
        rows = math.ceil(full.shape[0] / self.config.shard_size)
        return Piece(value.full_tensor()[:rows].clone(), lambda one: one[:rows])

    def gradients(self) -> dict[str, Piece | None]:
        self._reading = "gradients"
        return super().gradients()

    def parameters(self) -> dict[str, Piece]:
        self._reading = "parameters"
        return super().parameters()


class FirstRowEverywhere(RankZerosPieces):
    """A rank's own rows, and the first row on the other ranks too."""

    name = "first-row-everywhere"

    def shown(self, name: str, piece: Piece) -> Piece:
        full = self._held[name]
        value = full.grad if self._reading == "gradients" else full.detach()
        assert isinstance(value, DTensor)
        gathered = value.full_tensor()

        def cut(one: torch.Tensor) -> torch.Tensor:
            mine = piece.cut(one)
            return mine if self.index == 0 else torch.cat([one[:1], mine])

        return Piece(cut(gathered), cut)


class NoGradients(_Shown):
    """The parameters are shown as they should be, the gradients' pieces are empty."""

    name = "no-gradients"

    def parameters(self) -> dict[str, Piece]:
        return ReferenceAdapter.parameters(self)

    def shown(self, name: str, piece: Piece) -> Piece:
        return nothing_of(piece)


class LessFromTheSecondStep(_Shown):
    """From the second step on the pieces are empty."""

    name = "less-from-the-second-step"
    _shown = 0

    def gradients(self) -> dict[str, Piece | None]:
        self._shown += 1
        return super().gradients()

    def shown(self, name: str, piece: Piece) -> Piece:
        return piece if self._shown == 1 else nothing_of(piece)


# Claims


_SHARDED = frozenset({Capability.SHARDED})


class PlainDdp(DdpAdapter):
    """Declares nothing, which claims everything that a sharded implementation claims."""

    name = "plain-ddp"
    traits = Traits()

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return super().capabilities() | _SHARDED


class HoldsEverythingFromTheStart(PlainDdp):
    name = "holds-everything-from-the-start"
    traits = Traits(held_from_start=frozenset({"master", "gradients", "gathered"}))


class PaddedByAPage(PlainDdp):
    """So much padding that a small model is not larger than a share of it."""

    name = "padded-by-a-page"
    traits = Traits(collective_padding=4096)


class HiddenCopy(ReplicatedAdapter):
    """Registers no parameter: what it holds is found in memory only."""

    name = "hidden-copy"
    traits = Traits()

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return super().capabilities() | _SHARDED

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.hidden, self.module = self.module, torch.nn.Module()

    def forward(self, *args: Any, submodule: str = "") -> Any:
        return self.hidden.get_submodule(submodule)(*args)

    def named_parameters(self) -> Any:
        return dict(self.hidden.named_parameters())


class ClaimsOptimizerState(DdpAdapter):
    name = "claims-optimizer-state"
    traits = Traits(shards=frozenset({"optimizer"}))


class ClaimsGradients(DdpAdapter):
    name = "claims-gradients"
    traits = Traits(shards=frozenset({"gradients"}))


PIECES: list[type[Adapter]] = [
    Nothing, NothingAndNoStep, NothingOnRankOne, AllOnRankZero, ZerosCutFromZeros, CutIsTheTensor,
    CutOfFloatsIsTheTensor, RankZerosPieces, FirstRowEverywhere, NoGradients, LessFromTheSecondStep,
]  # fmt: skip
CLAIMS: list[type[Adapter]] = [
    PlainDdp, HoldsEverythingFromTheStart, PaddedByAPage, HiddenCopy, ClaimsOptimizerState, ClaimsGradients,
]  # fmt: skip
