"""How the parameters of a unit lie in its flat parameter, and which part of each a rank holds.

The layout is computed here from its specification and not read from the implementation: the parameters follow each
other in the order of ``named_parameters()``, the end is padded to a multiple of the number of ranks, and each rank
holds one of the equal parts.
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
"""Takes a full tensor and returns the part that this rank holds, as in :class:`Piece`."""


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """The parameters of one flat parameter, in the order in which they lie.

    Attributes:
        module: the name of the wrapped module; "" is the root.
        names: the names of the parameters in the original model.
        numels: for each parameter, the number of elements that go into the flat parameter: those of this rank's
            tensor-parallel shard, or all elements of a parameter that is not tensor-parallel.
        cuts: for each parameter, the cut from its full tensor to these elements.
    """

    module: str
    names: tuple[str, ...]
    numels: tuple[int, ...]
    cuts: tuple[Cut, ...]

    def pieces(self, shard: torch.Tensor | None, *, index: int, size: int) -> Iterator[tuple[str, Piece | None]]:
        """Yield the name and the piece of each parameter in one rank's shard of the flat parameter.

        Args:
            shard: the 1-D shard; None where the rank holds none, as for the gradient of an unused unit.
            index: the position of the rank among those that share the flat parameter.
            size: the number of ranks that share it.

        Yields:
            For each parameter its name and a piece whose tensor is a view of ``shard``, or None without a shard.
        """
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
        """Yield the name and the piece of each parameter, joined from the parts that all ranks hold.

        Args:
            parts: takes the name of a parameter and returns its parts in rank order; empty if no rank holds any.

        Yields:
            For each parameter its name and a piece with all of its elements, or None if there are no parts.
        """
        for name, numel, cut in zip(self.names, self.numels, self.cuts, strict=True):
            found = parts(name)
            part = functools.partial(_part, cut=cut, first=0, last=numel)
            yield name, Piece(torch.cat([one.flatten() for one in found]), part) if found else None


def _part(full: torch.Tensor, *, cut: Cut, first: int, last: int) -> torch.Tensor:
    flat = cut(full).flatten()
    return flat[min(first, flat.numel()) : min(last, flat.numel())] if last > first else flat[:0]


def flat_units(model: nn.Module, modules: Sequence[str]) -> list[FlatLayout]:
    """Return the layouts of the flat parameters that wrapping makes.

    Args:
        model: the model before anything is wrapped.
        modules: the names of the modules in the order of wrapping; "" is the root. A parameter belongs to the first of
            them that contains it.

    Returns:
        One layout for each module, without the modules that are left with no parameters.
    """
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
