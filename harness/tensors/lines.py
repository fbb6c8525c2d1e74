"""Boxes of tensors in lines of JSON: the types of their fields, and how they are checked when they are read."""

import math
from collections.abc import Sequence
from typing import Annotated

from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.tensors.pieces import Spans
from shardproof.jsonfiles import RecordError, shown

Count = Annotated[int, ("minimum", 0), ("maximum", (1 << 63) - 1)]
Shape = Annotated[Sequence[Count], ("maxItems", 64)]
Spanned = Annotated[Sequence[Sequence[int]], ("maxItems", 4096)]
Name = Annotated[str, ("maxLength", 1 << 16)]


def box_of(shape: Sequence[int], dims: Sequence[Spanned] | None, flat: Sequence[int] | None) -> Box:
    """Return the box of a line.

    Raises:
        RecordError: it is none of a tensor of this shape, or the tensor is too large; in one line.
    """
    full = size_checked(shape)
    held = span = None
    if dims is not None:
        if len(dims) != len(full):
            raise RecordError(f"dims: it has {len(dims)} dimensions, and shape {len(full)}")
        held = tuple(_spans(spans, size) for spans, size in zip(dims, full, strict=True))
    if flat is not None:
        [span] = _spans([flat], math.prod(full))
    return Box(full, held, span)


def size_checked(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape; of one with more than 2^63 elements a RecordError says so."""
    if math.prod(shape) >= 1 << 63:
        raise RecordError(f"shape: {shown(list(shape))} has more than 2^63 elements")
    return tuple(shape)


def _spans(spans: Sequence[Sequence[int]], size: int) -> Spans:
    """Check ranges of positions along a dimension."""
    for span in spans:
        if len(span) != 2 or not 0 <= span[0] <= span[1] <= size:
            raise RecordError(f"{shown(list(span))} is no range of {size} positions")
    if sum(stop - start for start, stop in spans) > size:
        raise RecordError(f"ranges of more than {size} positions")
    return tuple((start, stop) for start, stop in spans)
