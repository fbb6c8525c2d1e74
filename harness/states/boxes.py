"""Which elements of a full tensor a rank's DTensor or ShardedTensor in a file holds, by what the file says of it."""

import math
from typing import Any

from shardproof.harness.states.names import DTENSORS, SHARDED_TENSOR, View, Wrapper, is_kind, positions, sequence
from shardproof.harness.states.pickles import PickleError, Record
from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.tensors.pieces import Spans

_MOST_SPANS = 1 << 16


def block(shape: tuple[int, ...], offsets: Any, sizes: Any) -> Box:
    """Return the box of one block of a tensor.

    Raises:
        PickleError: it does not lie within the tensor.
    """
    first, held = positions(offsets, "offset"), positions(sizes, "shape")
    ends = [start + size for start, size in zip(first, held, strict=False)]
    if not len(first) == len(held) == len(shape) or any(end > size for end, size in zip(ends, shape, strict=True)):
        raise PickleError(f"a part at {first} of shape {held} does not lie within a tensor of shape {shape}")
    return _box(shape, [((start, end),) if start < end else () for start, end in zip(first, ends, strict=True)])


def _box(shape: tuple[int, ...], dims: list[Spans]) -> Box:
    is_full = all(spans == (((0, size),) if size else ()) for spans, size in zip(dims, shape, strict=True))
    return Box(shape, None if is_full else tuple(dims))


def held_by(name: str, wrapper: Wrapper) -> list[tuple[Box, View]]:
    """Return the parts of a tensor that the file of one rank has, and their boxes.

    Raises:
        PickleError: the class is not known, or the parts do not fit what is said of them.
    """
    if wrapper.kind in DTENSORS:
        found = [_of_dtensor(wrapper)]
    elif wrapper.kind == SHARDED_TENSOR:
        found = _of_sharded_tensor(wrapper)
    else:
        raise PickleError(f"{name} is a {wrapper.kind}, whose parts are not known")
    for box, view in found:
        shape = box.held_shape
        if view.shape != shape or view.dtype != wrapper.dtype:
            raise PickleError(
                f"the part of {name} has the shape {view.shape} and {view.dtype}, and is said to have {shape} and "
                f"{wrapper.dtype}"
            )
    return found


def _of_sharded_tensor(wrapper: Wrapper) -> list[tuple[Box, View]]:
    found = []
    for shard in sequence(sequence(wrapper.state)[0] if wrapper.state else None):
        metadata = shard.get("metadata") if is_kind(shard, "Shard") else None
        if not is_kind(metadata, "ShardMetadata") or not isinstance(view := shard.get("tensor"), View):
            raise PickleError("a shard of a ShardedTensor is damaged")
        found.append((block(wrapper.shape, metadata.get("shard_offsets"), metadata.get("shard_sizes")), view))
    return found


def _of_dtensor(wrapper: Wrapper) -> tuple[Box, View]:
    fields: dict[str, Any] = {}
    for part in wrapper.state if type(wrapper.state) is tuple else (wrapper.state,):
        fields |= part if isinstance(part, dict) else {}
    view, spec = fields.get("_local_tensor"), fields.get("_spec")
    if not isinstance(view, View) or not is_kind(spec, "DTensorSpec"):
        raise PickleError("a DTensor is damaged")
    sizes, at = _mesh(spec.get("mesh"))
    placements = sequence(spec.get("placements"))
    if not len(placements) == len(sizes) == len(at):
        raise PickleError(f"a DTensor has {len(placements)} placements on a mesh of shape {sizes}")
    dims: list[Spans] = [((0, size),) if size else () for size in wrapper.shape]
    for placement, size, own in zip(placements, sizes, at, strict=True):
        if is_kind(placement, "Shard", "_StridedShard"):
            dim = positions([placement.get("dim")], "dimension")[0]
            if dim >= len(dims):
                raise PickleError(f"a DTensor of shape {wrapper.shape} is sharded along dimension {dim}")
            dims[dim] = _chunk(dims[dim], size, own, placement)
        elif is_kind(placement, "Partial", "_Partial"):
            raise PickleError("a DTensor has values that are still to be summed over ranks (Partial)")
        elif not is_kind(placement, "Replicate"):
            raise PickleError("a DTensor has a placement that is not known")
    return _box(wrapper.shape, dims), view


def _mesh(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a device mesh and the coordinate of the rank that has written it."""
    if not is_kind(mesh, "DeviceMesh"):
        raise PickleError("a DTensor has no mesh")
    at, sizes = mesh.get("_coordinate_on_dim"), _sizes(mesh)
    if at is None or not sizes:
        raise PickleError("the mesh of a DTensor does not say where the rank is that has written it")
    shape = tuple(math.prod(positions(one if isinstance(one, tuple) else [one], "mesh")) for one in sizes)
    own = positions(at, "coordinate")
    if any(size < 1 or place >= size for size, place in zip(positions(shape, "mesh"), own, strict=False)):
        raise PickleError(f"a rank at {own} is not in a mesh of shape {shape}")
    return shape, own


def _sizes(mesh: Record) -> list[Any]:
    """Return the sizes of a mesh's dimensions, or those of which each is a product, as versions of torch write them."""
    layout, ranks = mesh.get("_layout"), mesh.get("mesh")
    if not is_kind(layout, "_MeshLayout"):
        return list(ranks.shape) if isinstance(ranks, View) else []
    axes = layout.get("axes") if "axes" in layout.fields else layout.get("shape")
    axes = (axes,) if type(axes) is int else sequence(axes)
    return [axis.get("shape") if isinstance(axis, Record) else axis for axis in axes]


def _chunk(spans: Spans, count: int, own: int, placement: Record) -> Spans:
    """Return the positions of a rank along a dimension, of those that were left, as torch cuts them."""
    split = placement.get("split_factor") if is_kind(placement, "_StridedShard") else 1
    if type(split) is not int or not 0 < split * count <= _MOST_SPANS:
        raise PickleError("a placement has a split factor that is not possible")
    total = sum(stop - start for start, stop in spans)
    outer = -(-total // split)
    found: list[tuple[int, int]] = []
    for number in range(split):
        begin, end = min(outer * number, total), min(outer * (number + 1), total)
        step = -(-(end - begin) // count)
        first, last = min(begin + step * own, end), min(begin + step * (own + 1), end)
        found.extend(_between(spans, first, last))
        if len(found) > _MOST_SPANS:
            raise PickleError("a placement has too many pieces")
    merged: list[tuple[int, int]] = []
    for start, stop in found:
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return tuple(merged)


def _between(spans: Spans, first: int, last: int) -> list[tuple[int, int]]:
    """Return the spans of a range of the positions that some spans have."""
    found, done = [], 0
    for start, stop in spans:
        begin, end = max(first - done, 0) + start, min(last - done, stop - start) + start
        if begin < end:
            found.append((begin, end))
        done += stop - start
    return found
