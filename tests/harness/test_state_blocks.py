"""Digests of blocks of rows: they add over any parts exactly, and see every bit at its place."""

import pytest
import torch

from shardproof.harness.states import blocks
from shardproof.harness.tensors.fingerprints import Box, digest, on_host

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool),
    *(torch.complex64, torch.float64),
]


def made(shape, dtype):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    if dtype.is_complex:
        return torch.complex(values, values.flip(0)).to(dtype)
    if dtype == torch.bool:
        return values > 0
    return (values.abs() if dtype == torch.uint8 else values).to(dtype)


def sums_of(full, boxes):
    """The sums of all parts, each cut by its box."""
    parts = []
    for box in boxes:
        if box.flat is not None:
            parts.append(full.reshape(-1)[slice(*box.flat)])
            continue
        part = full
        for dim, spans in enumerate(box.dims):
            part = torch.cat([part.narrow(dim, start, stop - start) for start, stop in ((0, 0), *spans)], dim)
        parts.append(part)
    return blocks.total(blocks.sums(parts, boxes))


def flat(shape, *ends):
    return [Box(shape, flat=pair) for pair in zip((0, *ends[:-1]), ends, strict=True)]


def along(shape, dim, *sets):
    whole = [((0, size),) for size in shape]
    return [Box(shape, dims=(*whole[:dim], spans, *whole[dim + 1 :])) for spans in sets]


CUTS = {
    "flat ranges": ((7, 5), lambda shape: flat(shape, 4, 19, 35)),
    "flat ranges of many rows": ((130, 3), lambda shape: flat(shape, 2, 3, 200, 390)),
    "flat ranges of rows of pairs": ((130, 4), lambda shape: flat(shape, 3, 21, 204, 520)),
    "rows": ((130, 3, 4), lambda shape: along(shape, 0, ((0, 65),), ((65, 130),))),
    "rows in turn": ((12, 3), lambda shape: along(shape, 0, ((0, 3), (6, 9)), ((3, 6), (9, 12)))),
    "columns": ((9, 8), lambda shape: along(shape, 1, ((0, 3),), ((3, 8),))),
    "last dimension": ((3, 4, 6), lambda shape: along(shape, 2, ((0, 1), (4, 6)), ((1, 4),))),
    "a rank without any": ((3,), lambda shape: along(shape, 0, ((0, 3),), ())),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", CUTS)
def test_sums_of_parts_add_to_those_of_the_full_tensor(cut, dtype):
    shape, boxes = CUTS[cut]
    full = made(shape, dtype)
    (expected,) = blocks.sums([full], [Box(shape)])
    found = sums_of(full, boxes(shape))
    assert {number: (one.hash, one.numel) for number, one in found.blocks.items()} == {
        number: (one.hash, one.numel) for number, one in expected.blocks.items()
    }
    assert found.squares == pytest.approx(expected.squares)
    assert found.sketch == pytest.approx(expected.sketch)


def test_equal_blocks_have_equal_hashes_wherever_they_stand():
    rows = made((64, 5), torch.float32)
    rows[40] = rows[3]
    (found,) = blocks.sums([rows], [Box((64, 5))])
    assert found.blocks[40].hash == found.blocks[3].hash
    assert len({one.hash for one in found.blocks.values()}) == 63


@pytest.mark.parametrize("position", [(0, 0), (17, 4), (129, 2)])
def test_one_bit_changes_the_hash_of_its_block_alone(position):
    full = made((130, 5), torch.float32)
    (before,) = blocks.sums([full], [Box((130, 5))])
    full.view(torch.int32)[position] ^= 1
    (after,) = blocks.sums([full], [Box((130, 5))])
    changed = [number for number, one in after.blocks.items() if one.hash != before.blocks[number].hash]
    assert changed == [position[0] // blocks.rows_of_block((130, 5))]


def test_exchanged_elements_and_signs_change_the_hash():
    full = made((1, 6), torch.float32)
    others = [full.flip(1), -full, torch.cat([-full[:, :2], full[:, 2:]], 1)]
    found = blocks.sums([full, *others], [Box((1, 6))] * 4)
    assert len({one.blocks[0].hash for one in found}) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8])
def test_exchanged_rows_and_columns_change_the_hash_of_their_block(dtype):
    full = torch.arange(130 * 6).view(130, 6).to(dtype)
    rows, columns = full.clone(), full.clone()
    rows[[0, 1]] = full[[1, 0]]  # of three rows of a block
    columns[0, [2, 3]] = full[0, [3, 2]]
    before, *found = [one.blocks for one in blocks.sums([full, rows, columns], [Box((130, 6))] * 3)]
    for one in found:
        assert [number for number in before if one[number].hash != before[number].hash] == [0]


@pytest.mark.parametrize("shape", [(7,), (600_000,), (5, 4), (20, 3, 2, 2), (600_000, 2)])
def test_the_sketch_is_that_of_fingerprints(shape):
    full = made(shape, torch.float32)
    (found,) = blocks.sums([full], [Box(shape)])
    assert found.sketch == pytest.approx(on_host([digest(full)])[0].sketch)


def test_a_number_is_one_block():
    (found,) = blocks.sums([torch.tensor(3.0)], [Box(())])
    assert (found.blocks[0].numel, found.squares) == (1, 9.0)


def test_blocks_have_as_many_elements_as_they_say():
    for shape in [(), (1,), (64, 2), (65, 2), (130, 3), (0, 3)]:
        (found,) = blocks.sums([torch.zeros(shape)], [Box(shape)])
        sizes = [blocks.numel_of(number, shape) for number in range(64 if shape else 1)]
        assert [one.numel for one in found.blocks.values()] == [size for size in sizes if size]


@pytest.mark.parametrize("wide", [1 << 11, 1 << 14, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_parts_that_are_read_together_have_their_own_sums(dtype, wide, monkeypatch):
    # Wide enough for what is read of several to be added at the end; in pieces, one by one, and together.
    shape, full = (130, 66), [made((130, 66), dtype) * factor for factor in range(1, 6)]
    alone = [blocks.sums([one], [Box(shape)])[0] for one in full]
    monkeypatch.setattr(blocks, "_WIDE", wide)
    monkeypatch.setattr(blocks, "_FIRST", 256)
    found = blocks.sums([full[0], torch.ones(3), *full[1:]], [Box(shape), Box((3,)), *[Box(shape)] * 4])
    assert found.pop(1) == blocks.sums([torch.ones(3)], [Box((3,))])[0]
    for mine, its in zip(found, alone, strict=True):
        assert {n: one.hash for n, one in mine.blocks.items()} == {n: one.hash for n, one in its.blocks.items()}
        assert [mine.squares, *mine.sketch] == pytest.approx([its.squares, *its.sketch])
        assert mine.digits == its.digits


def test_digits_are_seen_wherever_they_are(monkeypatch):
    monkeypatch.setattr(blocks, "_FIRST", 4)
    parts = [torch.zeros(9) for _ in range(6)]
    for part, place, value in [
        (parts[1], 0, 1 / 3),
        (parts[2], 8, 1 / 3),
        (parts[3], 0, 1 + 2**-9),
        (parts[4], 8, 1 + 2**-9),
    ]:
        part[place] = value
    assert [one.digits for one in blocks.sums(parts, [Box((9,))] * 6)] == [0, 3, 3, 1, 1, 0]
    # Of a small part all elements are asked at once.
    assert [one.digits for one in blocks.sums([part[5:] for part in parts], [Box((4,))] * 6)] == [0, 0, 3, 0, 1, 0]
