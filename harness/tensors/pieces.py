"""The part of a named tensor that one rank holds: how it is cut from the full tensor, and its positions there."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardproof.harness.tensors import private

_STRIDED = "torch.distributed.tensor.placement_types._StridedShard"
StridedShard = private.take(_STRIDED)

#: The prefix that ``checkpoint_wrapper`` adds to the names of the parameters inside it.
_RECOMPUTED = "_checkpoint_wrapped_module."


def original_name(name: str) -> str:
    """Return a parameter's name in the original model, without the prefixes of activation checkpointing wrappers."""
    return name.replace(_RECOMPUTED, "")


Cut = Callable[[torch.Tensor], torch.Tensor]
"""Takes a full tensor of any dtype and returns the elements that this rank holds."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of one named tensor that one rank holds.

    The harness cuts the baseline's full tensor to this part and compares the two, so that shards need not be gathered.
    It also cuts the oracle's float64 tensor, and an int64 tensor of positions to name the element that differs.

    Attributes:
        tensor: the elements that this rank holds, in any shape.
        cut: takes a tensor of the full, unsharded shape and any dtype, and returns the elements at the places of
            ``tensor``, in the shape of ``tensor``. Compute it from the layout that the implementation documents and do
            not ask the implementation, or a wrong layout would define what is right.
    """

    tensor: torch.Tensor
    cut: Cut


def uncut(full: torch.Tensor) -> torch.Tensor:
    """The cut of a rank that holds the full tensor."""
    return full


def whole(tensor: torch.Tensor) -> Piece:
    """Return the piece of a rank that holds the full tensor."""
    return Piece(tensor, uncut)


def index_at(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index in a tensor of ``shape`` of a flat position; that of a tensor without dimensions is empty."""
    return tuple(map(int, torch.unravel_index(torch.tensor(position), tuple(shape)))) if shape else ()


def index_in_full(
    cut: Cut, shape: Sequence[int], offset: int, *, device: torch.device | None = None
) -> tuple[int, ...]:
    """Return the index in a full tensor of ``shape`` of the element at an offset in what a rank holds of it.

    The layout of a shard may be known only as the function ``cut``, so a tensor of positions is cut as the full one is,
    on ``device``, and the position is read at the offset.
    """
    positions = torch.arange(math.prod(shape), device=device).view(tuple(shape))
    return index_at(int(cut(positions).flatten()[offset]), shape)


def cut_like(full: torch.Tensor, *, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """Cut a full tensor to this rank's shard, by ``torch.chunk`` along each sharded mesh dimension in turn.

    Plain ``Shard`` placements are applied first, in the order of the mesh dimensions, then the strided ones in reverse
    order. A strided placement on the data-parallel dimension means that tensor parallelism, a later mesh dimension, has
    sharded the tensor first, and that data parallelism shards the local part. The rule is computed here instead of by
    DTensor, so that a wrong layout shows up as a difference and does not define what is right. An empty shard has size
    0 in the sharded dimension and keeps the other dimensions.

    Raises:
        AssertionError: a placement is neither ``Shard`` nor ``Replicate`` nor a strided shard whose ``split_factor``
            equals the number of parts into which the later mesh dimensions divide the same tensor dimension.
    """
    strided = []
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, StridedShard):
            strided.append(mesh_dim)
        elif not isinstance(placement, Replicate):
            if type(placement) is not Shard:
                private.need(_STRIDED)  # where torch has another class for it, that is what this is
                raise AssertionError(f"no rule to cut a full tensor by {placement}")
            full = chunk_of(full, mesh, mesh_dim, placement.dim)
    for mesh_dim in reversed(strided):
        placement = placements[mesh_dim]
        assert isinstance(placement, StridedShard)
        later = [d for d in range(mesh_dim + 1, len(placements)) if _is_cut(placements[d], placement.dim)]
        parts = math.prod(mesh.size(d) for d in later)
        assert placement.split_factor == parts, f"{placement} in {placements}: the factor should be {parts}"
        full = chunk_of(full, mesh, mesh_dim, placement.dim)
    return full


def _is_cut(placement: Placement, dim: int) -> bool:
    return isinstance(placement, (Shard, StridedShard)) and placement.dim == dim


def chunk_of(full: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, dim: int) -> torch.Tensor:
    """Return this rank's chunk, by ``torch.chunk`` along ``dim``, over one dimension of a mesh; it may be empty."""
    chunks = torch.chunk(full, mesh.size(mesh_dim), dim=dim)
    index = mesh.get_local_rank(mesh_dim)
    return chunks[index] if index < len(chunks) else full.narrow(dim, 0, 0)


def piece_of(tensor: torch.Tensor) -> Piece:
    """Return what this rank holds of a parameter or a gradient, cut by the placements that the tensor itself has."""
    if not isinstance(tensor, DTensor):
        return whole(tensor)
    cut = functools.partial(cut_like, mesh=tensor.device_mesh, placements=tuple(tensor.placements))
    return Piece(tensor.to_local(), cut)


def cut_before_sharding(parameter: torch.Tensor) -> Cut:
    """Return how user code has cut a parameter: by its placements, or, of a plain one, its attribute ``user_cut``."""
    cut: Cut = getattr(parameter, "user_cut", None) or piece_of(parameter.detach()).cut
    return cut


Spans = tuple[tuple[int, int], ...]
"""Sorted ranges of flat positions in a full tensor: the first position of each, and the one behind its last."""


def spans_of(positions: torch.Tensor) -> Spans:
    """Return the spans of different positions, in any order and shape."""
    flat = positions.flatten()
    if not flat.numel():
        return ()
    flat = flat.sort().values
    ends = (flat[1:] != flat[:-1] + 1).nonzero().flatten()
    first = flat[torch.cat([ends.new_zeros(1), ends + 1])].tolist()
    last = flat[torch.cat([ends, ends.new_full((1,), flat.numel() - 1)])].tolist()
    return tuple((start, stop + 1) for start, stop in zip(first, last, strict=True))
