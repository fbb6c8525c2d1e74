"""How a unit's parameters lie in its flat parameter, and which part of each a rank holds.

Written here, from what the layout should be: the parameters one after the other in the order of
``named_parameters()``, the end padded to a multiple of the ranks, one equal part a rank.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from shardproof.harness.adapters.base import Piece, original_name
from shardproof.harness.adapters.dtensor import piece_of

Cut = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """The parameters of one flat parameter, by the original model's names, in the order in which they lie."""

    module: str
    """The module that is wrapped; "" is the root."""

    names: tuple[str, ...]
    numels: tuple[int, ...]
    """Their elements on this rank, before they are sharded: those of its tensor-parallel part."""

    cuts: tuple[Cut, ...]
    """From a full tensor to that part."""

    def pieces(self, shard: torch.Tensor | None, *, index: int, size: int) -> Iterator[tuple[str, Piece | None]]:
        """What rank ``index`` of ``size`` holds of each parameter in its ``shard`` of the flat one, as views of it."""
        length = math.ceil(sum(self.numels) / size)
        offset = -index * length
        for name, numel, cut in zip(self.names, self.numels, self.cuts, strict=True):
            first, last = (min(max(0, place), length) for place in (offset, offset + numel))
            piece = None
            if shard is not None:
                assert shard.shape == (length,), f"a shard of {tuple(shard.shape)} instead of {length} elements"
                part = functools.partial(_part, cut=cut, first=first - offset, last=last - offset)
                piece = Piece(shard[first:last], part)
            yield name, piece
            offset += numel

    def joined(self, parts: Callable[[str], Sequence[torch.Tensor]]) -> Iterator[tuple[str, Piece | None]]:
        """All of each parameter, from the ``parts`` of it that ranks hold, in their order; of nothing, ``None``."""
        for name, numel, cut in zip(self.names, self.numels, self.cuts, strict=True):
            found = parts(name)
            part = functools.partial(_part, cut=cut, first=0, last=numel)
            yield name, Piece(torch.cat([one.flatten() for one in found]), part) if found else None


def _part(full: torch.Tensor, *, cut: Cut, first: int, last: int) -> torch.Tensor:
    flat = cut(full).flatten()
    return flat[min(first, flat.numel()) : min(last, flat.numel())] if last > first else flat[:0]


def flat_units(model: nn.Module, modules: Sequence[str]) -> list[FlatLayout]:
    """The flat parameters of an unwrapped model if ``modules`` are wrapped in this order; empty ones are left out."""
    claimed: set[int] = set()
    found = []
    for module in modules:
        prefix = f"{module}." if module else ""
        named = [
            (original_name(prefix + name), parameter)
            for name, parameter in model.get_submodule(module).named_parameters()
            if id(parameter) not in claimed
        ]
        claimed |= {id(parameter) for _, parameter in named}
        if named:
            pieces = [piece_of(parameter.detach()) for _, parameter in named]
            numels = tuple(piece.tensor.numel() for piece in pieces)
            found.append(FlatLayout(module, tuple(name for name, _ in named), numels, tuple(p.cut for p in pieces)))
    return found
