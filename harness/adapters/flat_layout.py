"""How the parameters of a unit lie in its flat parameter, and which part of each a rank holds.

The layout is computed here from its specification and not read from the implementation: the parameters follow each
other in the order of ``named_parameters()``, each as it lies in memory and at a multiple of an alignment, the end is
padded to a multiple of the number of ranks, and each rank holds one of the equal parts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from shardproof.harness.adapters.base import Cut, Piece, original_name
from shardproof.harness.adapters.dtensor import piece_of


@dataclasses.dataclass(frozen=True)
class Place:
    """The part of one parameter in one rank's shard of a flat parameter.

    Attributes:
        name: the name of the parameter in the original model.
        first: its first element in the shard.
        last: the element of the shard behind its last; equal to ``first`` if the rank holds nothing of the parameter.
        cut: the cut from the full tensor to the part, as a 1-D tensor.
    """

    name: str
    first: int
    last: int
    cut: Cut


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """The parameters of one flat parameter, in the order in which they lie.

    Attributes:
        module: the name of the wrapped module; "" is the root.
        names: the names of the parameters in the original model.
        numels: for each parameter, the number of elements that go into the flat parameter: those of this rank's
            tensor-parallel shard, or all elements of a parameter that is not tensor-parallel.
        cuts: for each parameter, the cut from its full tensor to these elements.
        orders: for each parameter, its dimensions in the order of memory.
        alignment: each parameter starts at a multiple of this number of elements.
    """

    module: str
    names: tuple[str, ...]
    numels: tuple[int, ...]
    cuts: tuple[Cut, ...]
    orders: tuple[tuple[int, ...], ...]
    alignment: int = 1

    def places(self, *, index: int, size: int) -> Iterator[Place]:
        """Yield the part of each parameter in one rank's shard.

        Args:
            index: the position of the rank among those that share the flat parameter.
            size: the number of ranks that share it.
        """
        starts, end = self._extents()
        length = math.ceil(end / size)
        parameters = zip(self.names, starts, self.numels, self.cuts, self.orders, strict=True)
        for name, start, numel, cut, order in parameters:
            offset = start - index * length
            first, last = (min(max(0, place), length) for place in (offset, offset + numel))
            part = functools.partial(_part, cut=cut, order=order, first=first - offset, last=last - offset)
            yield Place(name, first, last, part)

    def pieces(self, shard: torch.Tensor | None, *, index: int, size: int) -> Iterator[tuple[str, Piece | None]]:
        """Yield the name and the piece of each parameter in one rank's shard of the flat parameter.

        Args:
            shard: the 1-D shard; None where the rank holds none, as for the gradient of an unused unit.
            index: the position of the rank among those that share the flat parameter.
            size: the number of ranks that share it.

        Yields:
            For each parameter its name and a piece whose tensor is a view of ``shard``, or None without a shard.
        """
        length = math.ceil(self._extents()[1] / size)
        assert shard is None or shard.shape == (length,), (
            f"a shard of {tuple(shard.shape)} instead of {length} elements"
        )
        for place in self.places(index=index, size=size):
            yield place.name, None if shard is None else Piece(shard[place.first : place.last], place.cut)

    def _extents(self) -> tuple[list[int], int]:
        """Return the first element of each parameter in the flat parameter, and the one behind the last parameter."""
        starts, end = [], 0
        for numel in self.numels:
            starts.append(math.ceil(end / self.alignment) * self.alignment)
            end = starts[-1] + numel
        return starts, end


def _part(full: torch.Tensor, *, cut: Cut, order: tuple[int, ...], first: int, last: int) -> torch.Tensor:
    flat = cut(full).permute(order).flatten()
    return flat[min(first, flat.numel()) : min(last, flat.numel())] if last > first else flat[:0]


def flat_units(
    model: nn.Module, modules: Sequence[str], *, alignment: int = 1, ignored: Sequence[str] = ()
) -> list[FlatLayout]:
    """Return the layouts of the flat parameters that wrapping makes.

    Args:
        model: the model before anything is wrapped.
        modules: the names of the modules in the order of wrapping; "" is the root. A parameter belongs to the first of
            them that contains it.
        alignment: each parameter starts at a multiple of this number of elements.
        ignored: the names of the parameters that belong to none.

    Returns:
        One layout for each module, without the modules that are left with no parameters.
    """
    claimed = {id(model.get_parameter(name)) for name in ignored}
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
            names, cuts = tuple(name for name, _ in named), tuple(piece.cut for piece in pieces)
            orders = tuple(_order(piece.tensor) for piece in pieces)
            found.append(FlatLayout(module, names, numels, cuts, orders, alignment))
    return found


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor in the order of memory: the widest stride first."""
    if tensor.is_contiguous():
        return tuple(range(tensor.ndim))
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
