"""Where parameters lie in a flat parameter."""

import pytest
import torch

from fsdp_impl.flat.layout import alignment_of, build_flat_layout, flattened, is_dense, stride_of


def layout_of(*sizes: tuple[int, ...], world: int = 2, alignment: int = 1):
    tensors = [torch.empty(size) for size in sizes]
    return build_flat_layout([t.size() for t in tensors], [t.stride() for t in tensors], world, alignment=alignment)


def test_without_alignment_there_are_no_gaps():
    layout = layout_of((3, 2), (5,), (2,))
    assert [piece.offset for piece in layout.pieces] == [0, 6, 11]
    assert (layout.numel, layout.shard_numel, layout.padded_numel) == (13, 7, 14)


def test_each_parameter_is_aligned_and_the_end_is_padded_for_the_ranks_only():
    layout = layout_of((5, 7), (7,), alignment=alignment_of(torch.float32))
    assert [piece.offset for piece in layout.pieces] == [0, 36]
    assert (layout.numel, layout.shard_numel) == (43, 22)
    spans = [[layout.span(index, rank).numel for index in range(2)] for rank in range(2)]
    assert spans == [[22, 0], [13, 7]]


@pytest.mark.parametrize("dtype, expected", [(torch.float64, 2), (torch.float32, 4), (torch.bfloat16, 8)])
def test_alignment_is_16_bytes(dtype, expected):
    assert alignment_of(dtype) == expected


@pytest.mark.parametrize("world", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("alignment", [1, 4])
def test_spans_cover_every_element_once(world, alignment):
    sizes = [(3, 2), (5,), (1, 1, 1), (4,)]
    layout = layout_of(*sizes, world=world, alignment=alignment)
    flat = torch.arange(layout.padded_numel)
    shards = flat.view(world, layout.shard_numel)
    for index, tensor in enumerate(layout.split(flat)):
        parts = []
        for rank in range(world):
            span = layout.span(index, rank)
            parts.append(shards[rank][span.offset : span.offset + span.numel])
            assert span.numel == 0 or span.start == sum(len(part) for part in parts[:-1])
        assert torch.equal(torch.cat(parts), tensor.reshape(-1))
        assert tensor.size() == torch.Size(sizes[index])


def test_dense_parameters_keep_their_order_of_dimensions():
    channels_last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    gaps = torch.randn(4, 6)[:, ::2]
    assert is_dense(channels_last) and not is_dense(gaps)
    for tensor in (channels_last, gaps, torch.randn(3, 4).t()):
        layout = build_flat_layout([tensor.size()], [stride_of(tensor)], 1)
        (back,) = layout.split(flattened(tensor))
        assert torch.equal(back, tensor)
    assert stride_of(channels_last) == channels_last.stride()
    assert stride_of(gaps) == (3, 1)
