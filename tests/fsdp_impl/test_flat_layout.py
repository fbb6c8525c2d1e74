"""What holds of every flat parameter: of tensors of any sizes, in any order of their dimensions, over any world."""

from typing import Any

import torch

from fsdp_impl.flat.layout import FlatLayout, build_flat_layout, flattened, is_dense, stride_of
from tests.fsdp_impl.properties import given, st


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """With the dimensions in any order, and perhaps with gaps between the elements; no element is zero."""
    size = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    steps = draw(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=len(size), max_size=len(size)))
    order = draw(st.permutations(range(len(size))))
    whole = torch.empty([length * step for length, step in zip(size, steps, strict=True)]).permute(order)
    view = whole[tuple(slice(None, None, steps[dim]) for dim in order)]
    return view.copy_((torch.arange(view.numel()) + 1).view(view.size()))


def lay_out(found: list[torch.Tensor], world: int, alignment: int) -> tuple[FlatLayout, torch.Tensor]:
    """The layout of ``found``, and their flat parameter."""
    layout = build_flat_layout([t.size() for t in found], [stride_of(t) for t in found], world, alignment=alignment)
    flat = torch.zeros(layout.padded_numel)
    for tensor, piece in zip(found, layout.pieces, strict=True):
        flat[piece.offset : piece.offset + piece.numel] = flattened(tensor)
    return layout, flat


GROUPS = {
    "found": st.lists(tensors(), min_size=1, max_size=5),
    "world": st.integers(1, 8),
    "alignment": st.sampled_from([1, 2, 4, 8]),
}


@given(**GROUPS)
def test_parameters_are_aligned_and_come_back_as_they_were(
    found: list[torch.Tensor], world: int, alignment: int
) -> None:
    layout, flat = lay_out(found, world, alignment)
    end = 0
    for piece in layout.pieces:
        assert piece.offset % alignment == 0
        assert 0 <= piece.offset - end < alignment
        end = piece.offset + piece.numel
    assert 0 <= layout.padded_numel - layout.numel < world
    assert layout.numel == end
    for back, tensor in zip(layout.split(flat), found, strict=True):
        assert torch.equal(back, tensor)
        assert back.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert not is_dense(tensor) or back.stride() == tensor.stride()


@given(**GROUPS)
def test_spans_are_the_parts_that_shards_hold(found: list[torch.Tensor], world: int, alignment: int) -> None:
    layout, flat = lay_out(found, world, alignment)
    shards = flat.view(world, layout.shard_numel)
    held = 0
    for index, tensor in enumerate(found):
        parts = []
        for rank in range(world):
            span = layout.span(index, rank)
            if span.numel:
                assert span.start == sum(part.numel() for part in parts)
                parts.append(shards[rank][span.offset : span.offset + span.numel])
        held += sum(part.numel() for part in parts)
        whole = torch.cat(parts) if parts else torch.empty(0)
        assert torch.equal(whole, flattened(tensor))
    assert held == int(flat.count_nonzero()), "padding has values"
