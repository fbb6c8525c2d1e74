"""Pictures of flat parameters: which part of each original one a rank's shard has."""

import pytest
import torch
from torch import nn

from shardproof.harness import models
from shardproof.harness.adapters.flat import flat_units


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
    (unit,) = flat_units(model, [""], alignment=4)
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
