"""How full tensors are cut by placements, against rows written by hand, and which parts flat shards have of them."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardproof.harness.adapters.flat import flat_units
from shardproof.harness.tensors.pieces import cut_like
from shardproof.testing import models


class Mesh:
    """A mesh as one of its ranks sees it, at these coordinates."""

    def __init__(self, shape, at):
        self._shape, self._at = shape, at

    def size(self, dim):
        return self._shape[dim]

    def get_local_rank(self, dim):
        return self._at[dim]


def rows(length, shape, placements):
    """For each rank of the mesh, in order, the rows that it holds of a tensor with ``length`` rows."""
    full = torch.arange(length)
    places = itertools.product(*(range(size) for size in shape))
    return [cut_like(full, mesh=Mesh(shape, at), placements=placements).tolist() for at in places]


STRIDED = (_StridedShard(0, split_factor=2), Shard(0))
CUTS = [
    # Rank (dp, tp) holds the dp-th part of the tp-th part; a plain Shard holds the tp-th part of the dp-th.
    (8, STRIDED, [[0, 1], [4, 5], [2, 3], [6, 7]]),
    (8, (Shard(0), Shard(0)), [[0, 1], [2, 3], [4, 5], [6, 7]]),
    # Nine rows: tensor parallelism makes five and four, and each is cut by its own size.
    (9, STRIDED, [[0, 1, 2], [5, 6], [3, 4], [7, 8]]),
    (3, STRIDED, [[0], [2], [1], []]),
    (1, STRIDED, [[0], [], [], []]),
    (8, (Replicate(), *STRIDED), [[0, 1], [4, 5], [2, 3], [6, 7]] * 2),
    # The innermost cuts first, the outermost last.
    (8, (_StridedShard(0, split_factor=4), *STRIDED), [[0], [4], [2], [6], [1], [5], [3], [7]]),
]


@pytest.mark.parametrize(("length", "placements", "expected"), CUTS, ids=str)
def test_rows_that_ranks_hold(length, placements, expected):
    assert rows(length, (2,) * len(placements), placements) == expected


@pytest.mark.parametrize("length", range(1, 20))
@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (2, 3), (3, 4)])
def test_every_row_is_held_once(shape, length):
    found = rows(length, shape, (_StridedShard(0, split_factor=shape[1]), Shard(0)))
    assert sorted(itertools.chain(*found)) == list(range(length))
    assert max(map(len, found)) == math.ceil(math.ceil(length / shape[1]) / shape[0])


def test_other_dimensions_do_not_count_for_the_factor():
    """A row-wise weight is cut along its columns by tensor parallelism, along its rows by data parallelism."""
    full = torch.arange(12).view(3, 4)
    mesh = Mesh((2, 2), (1, 0))
    assert cut_like(full, mesh=mesh, placements=(Shard(0), Shard(1))).tolist() == [[8, 9]]


def test_a_wrong_factor_is_refused():
    with pytest.raises(AssertionError, match="the factor should be 2"):
        rows(8, (2, 2), (_StridedShard(0, split_factor=4), Shard(0)))


def test_what_cannot_be_cut_is_refused():
    from torch.distributed.tensor import Partial

    with pytest.raises(AssertionError, match="no rule"):
        rows(8, (2,), (Partial(),))


# Flat parameters: which part of each original one a rank's shard has


def shards_of(parameters, size):
    """What the layout promises, by its definition: one after the other, padded, in equal parts."""
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    length = -(-flat.numel() // size)
    return torch.cat([flat, torch.zeros(length * size - flat.numel())]).split(length)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 64])
def test_pieces_are_cut_where_the_shards_are(size):
    model = models.two_linear((3, 5), (5, 2))
    named = dict(model.named_parameters())
    (unit,) = flat_units(model, [""])
    held = dict.fromkeys(named, 0)
    for index, shard in enumerate(shards_of(named.values(), size)):
        pieces = dict(unit.pieces(shard, index=index, size=size))
        assert list(pieces) == list(named)
        for name, piece in pieces.items():
            held[name] += piece.tensor.numel()
            assert torch.equal(piece.tensor, piece.cut(named[name]))
            # A view: the optimizer must see the changes that user code makes in it.
            assert piece.tensor.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
    assert held == {name: parameter.numel() for name, parameter in named.items()}


def test_without_a_shard_there_is_nothing():
    (unit,) = flat_units(nn.Linear(2, 2), [""])
    assert dict(unit.pieces(None, index=0, size=2)) == {"weight": None, "bias": None}


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_aligned_parameters_start_at_multiples(size):
    model = models.two_linear((3, 5), (5, 2))
    named = dict(model.named_parameters())
    (unit,) = flat_units(model, [""], alignments={"": 4})
    aligned = [nn.functional.pad(value.detach().flatten(), (0, -value.numel() % 4)) for value in named.values()]
    # 15, 5, 10 and 2 elements at 0, 16, 24 and 36; nothing follows the last.
    for index, shard in enumerate(shards_of([torch.cat(aligned)[:38]], size)):
        for place in unit.places(index=index, size=size):
            assert torch.equal(shard[place.first : place.last], place.cut(named[place.name]))


def test_a_shard_of_another_length_is_refused():
    (unit,) = flat_units(nn.Linear(2, 2), [""])
    with pytest.raises(AssertionError, match=r"a shard of \(4,\) instead of 3 elements"):
        list(unit.pieces(torch.zeros(4), index=0, size=2))


def test_each_parameter_belongs_to_the_first_unit_that_has_it():
    model = models.Tower(dim=3, depth=2)
    model.out.weight = model.layers[0].in_proj.weight  # one parameter with two names
    units = flat_units(model, ["layers.0", "layers.1", ""])
    assert [unit.module for unit in units] == ["layers.0", "layers.1", ""]
    assert units[2].names == ("out.bias",)
