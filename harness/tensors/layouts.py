"""Which elements of its full tensor a rank holds: for DTensors by the house's own rule, not by DTensor's offsets."""

import dataclasses
import functools
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.tensors.pieces import Spans, cut_like, spans_of


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the elements of one rank's local tensor belong.

    Attributes:
        box: which elements of the full tensor they are.
        pending: the global ranks over which the values are a sum that is still to be made, as of a ``Partial``
            placement; empty if they are values.
        mesh: the global ranks among which the tensor is distributed; empty for a plain tensor.
    """

    box: Box
    pending: tuple[int, ...] = ()
    mesh: tuple[int, ...] = ()


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of a parameter or a gradient: full for a plain tensor, by its placements for a DTensor."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Layout(Box(shape))
    mesh = tensor.device_mesh
    at = mesh.get_coordinate()
    return _layout(shape, mesh, tuple(tensor.placements), None if at is None else tuple(at))


@functools.lru_cache(maxsize=1024)
def _layout(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...], at: tuple[int, ...] | None
) -> Layout:
    """Return the layout at a coordinate of a mesh; gradients of one shape ask again in each backward."""
    dims = []
    for dim, size in enumerate(shape):
        # A placement divides one dimension; the positions along it are cut as the tensor is.
        mine = tuple(_along(placement, dim) for placement in placements)
        dims.append(spans_of(cut_like(torch.arange(size), mesh=mesh, placements=mine)))
    full = all(spans == (((0, size),) if size else ()) for spans, size in zip(dims, shape, strict=True))
    pending = _pending(mesh, placements, at)
    return Layout(Box(shape, None if full else tuple(dims)), pending, tuple(mesh.mesh.flatten().tolist()))


def _along(placement: Placement, dim: int) -> Placement:
    """Return what a placement does to the positions along one dimension, which become dimension 0."""
    if getattr(placement, "dim", None) != dim or isinstance(placement, (Replicate, Partial)):
        return Replicate()
    split, kind = getattr(placement, "split_factor", None), cast(Any, type(placement))
    return cast(Placement, kind(0) if split is None else kind(0, split_factor=split))


def _pending(mesh: DeviceMesh, placements: tuple[Placement, ...], at: tuple[int, ...] | None) -> tuple[int, ...]:
    if at is None or not any(isinstance(one, Partial) for one in placements):
        return ()
    index = tuple(slice(None) if isinstance(one, Partial) else own for one, own in zip(placements, at, strict=True))
    ranks = mesh.mesh[index].flatten().tolist()
    return tuple(sorted(ranks)) if len(ranks) > 1 else ()  # the sum of one rank is made


def sharers_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the global ranks that have the parts of one replica of a DTensor; empty where the rank has all of it."""
    if not isinstance(tensor, DTensor) or (at := tensor.device_mesh.get_coordinate()) is None:
        return ()
    pairs = zip(tensor.placements, at, strict=True)
    index = tuple(own if isinstance(one, (Replicate, Partial)) else slice(None) for one, own in pairs)
    ranks = tuple(sorted(tensor.device_mesh.mesh[index].flatten().tolist()))
    return ranks if len(ranks) > 1 else ()


def part_of(full: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the elements of a full tensor that a box has, in their order: a view where they are one block."""
    if box.flat is not None:
        return full.reshape(-1)[slice(*box.flat)]
    return full if box.dims is None else full[_index(box.dims, full.device)]


def put_into(full: torch.Tensor, box: Box, part: torch.Tensor) -> None:
    """Write what :func:`part_of` returns to its places in a full, contiguous tensor."""
    if box.flat is not None:
        full.view(-1)[slice(*box.flat)] = part.reshape(-1)
    elif box.dims is None:
        full.copy_(part.view(full.shape))
    else:
        full[_index(box.dims, full.device)] = part.to(full.dtype)


def _index(dims: tuple[Spans, ...], device: torch.device) -> tuple[Any, ...]:
    if all(len(spans) <= 1 for spans in dims):
        return tuple(slice(*spans[0]) if spans else slice(0, 0) for spans in dims)
    held = [torch.cat([torch.arange(*one, device=device) for one in spans] or [torch.arange(0)]) for spans in dims]
    return tuple(torch.meshgrid(*held, indexing="ij"))
