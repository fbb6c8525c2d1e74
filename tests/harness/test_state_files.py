"""Readers of checkpoints: as the libraries write them, and damaged, cut, huge and hostile ones, each in one line."""

import collections
import functools
import importlib
import io
import json
import math
import os
import pathlib
import pickle
import random
import re
import struct
import sys
import time
import warnings
import zipfile

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from shardproof.door import BadFile
from shardproof.harness.states import boxes, entries, files, folders, names, pickles
from shardproof.harness.states.pickles import Record
from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.tensors.layouts import put_into
from tests.errors import error_of
from tests.harness.inner import ROOT, torchrun


def by_name(path):
    """The entries of a path; no two have one name."""
    found = files.read(path)
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}


def full_of(entry):
    """The full tensor of all parts of an entry, which must be all of it."""
    found = torch.empty(entry.shape, dtype=entry.dtype)
    for part in entry.parts:
        values = part.load()
        assert values.dtype == entry.dtype
        put_into(found, part.box, values)
    assert {part.box.shape for part in entry.parts} == {entry.shape}
    covered = torch.zeros(entry.shape, dtype=torch.bool)
    for part in entry.parts:
        put_into(covered, part.box, torch.ones(part.load().shape, dtype=torch.bool))
    assert covered.all()
    return found


def bits(tensor):
    """The bytes of a tensor, and what they are."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def refused(path):
    """The one line by which a path is refused, without its beginning."""
    text = error_of(files.read, path, kind=BadFile)
    assert text.startswith(str(path)), text
    return text.removeprefix(str(path)).lstrip("/")


# Files of torch.save ----------------------------------------------------------------------------------------------

BASE = torch.arange(24.0).view(4, 6)
TENSORS = {
    "plain": BASE, "tied": BASE, "view": BASE[1:3, 2:5], "transposed": BASE.t(), "half": BASE.half(),
    "expanded": torch.ones(1, 4).expand(3, 4), "bf16": BASE.to(torch.bfloat16), "f8": BASE.to(torch.float8_e4m3fn),
    "complex": torch.randn(3, dtype=torch.complex64), "conj": torch.randn(3, dtype=torch.complex64).conj(),
    "neg": torch.randn(3, dtype=torch.complex64).conj().imag, "none": torch.empty(0, 4), "scalar": torch.tensor(3),
    "bool": torch.tensor([True, False]), "u16": torch.arange(3).to(torch.uint16), "e5": BASE.to(torch.float8_e5m2),
    "parameter": torch.nn.Parameter(torch.ones(2)), "large": torch.arange(1 << 19, dtype=torch.float64),
    "channels": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), "i8": torch.arange(-3, 3).to(torch.int8),
}  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_tensors_of_each_kind_come_back_bit_by_bit(tmp_path, protocol):
    path = tmp_path / "x.whatever"
    torch.save(TENSORS, path, pickle_protocol=protocol)
    found = by_name(path)
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        entry = found[name]
        [part] = entry.parts
        assert (entry.shape, entry.dtype, entry.value) == (tuple(tensor.shape), tensor.dtype, None)
        assert (part.box, part.source) == (Box(entry.shape), "x.whatever")
        assert bits(part.load()) == bits(tensor), name
    assert {name: one.tied for name, one in found.items() if one.tied} == {"tied": "plain"}


def test_reading_takes_no_memory_for_values_and_leaves_the_file(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(torch.zeros(1 << 20), path)
    before = path.read_bytes()
    [entry] = files.read(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry.parts[0].load().fill_(1)
    assert entry.parts[0].load().sum() == 0
    assert path.read_bytes() == before


def test_a_nested_state_has_dotted_names_in_order(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 5, "big": 1 << 90}, tmp_path / "x.pt"
    )
    found = by_name(tmp_path / "x.pt")
    assert list(found)[:7] == [f"model.{name}" for name in model.state_dict()]
    for name, tensor in model.state_dict().items():
        assert bits(full_of(found[f"model.{name}"])) == bits(tensor)
    assert bits(full_of(found["optim.state.0.exp_avg"])) == bits(optimizer.state[model[0].weight]["exp_avg"])
    assert found["optim.param_groups.0.betas"].value == (0.9, 0.999)
    assert found["optim.param_groups.0.params.1"].value == 1
    assert (found["step"].value, found["step"].shape, found["big"].value) == (5, None, 1 << 90)


VALUES = {
    "none": (None, None), "yes": (True, True), "nan": (math.inf, math.inf), "text": ("größe\n", "größe\n"),
    "complex": (1 + 2j, (1.0, 2.0)), "set": ({3, 1}, (1, 3)), "size": (torch.Size([2, 3]), (2, 3)),
    "dtype": (torch.bfloat16, "torch.bfloat16"), "device": (torch.device("cpu"), "torch.device(cpu)"),
    "path": (pathlib.Path("a/b"), "a/b"), "numpy": (numpy.float64(0.5), 0.5), "int": (numpy.int32(-7), -7),
    "bool": (numpy.bool_(True), True), "python": (random.Random(3).getstate(), random.Random(3).getstate()),
}  # fmt: skip


def test_plain_values_are_read(tmp_path):
    torch.save({name: value for name, (value, _) in VALUES.items()}, tmp_path / "x.pt")
    assert {one.name: one.value for one in files.read(tmp_path / "x.pt")} == {
        name: value for name, (_, value) in VALUES.items()
    }


def test_other_objects_of_torch_and_numpy_become_tensors_and_values(tmp_path):
    array = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    state = {
        "array": array, "fortran": numpy.asfortranarray(array), "bytes": b"abc", "bytearray": bytearray(b"de"),
        "default": collections.defaultdict(list, a=1), "counter": collections.Counter("aab"),
        "sparse": torch.eye(2).to_sparse(), "quantized": torch.quantize_per_tensor(torch.ones(2), 0.5, 3, torch.qint8),
        "meta": torch.empty(3, device="meta"), "slice": slice(1, 2), "empty": {}, "random": numpy.random.get_state(),
        "a": {"b": 1}, "a.b": 2,
    }  # fmt: skip
    torch.save(state, tmp_path / "x.pt")
    found = by_name(tmp_path / "x.pt")
    for name in ("array", "fortran"):
        assert full_of(found[name]).tolist() == array.tolist()
    assert full_of(found["bytes"]).tolist() == [*b"abc"]
    assert full_of(found["bytearray"]).tolist() == [*b"de"]
    assert (found["counter.a"].value, found["default.a"].value) == (2, 1)
    assert full_of(found["sparse.values"]).tolist() == [1, 1]
    assert full_of(found["quantized.int_repr"]).tolist() == [5, 5]
    assert (found["quantized.scale"].value, found["quantized.zero_point"].value) == (0.5, 3)
    assert (found["meta"].shape, found["meta"].parts) == ((3,), ())
    assert full_of(found["random.1"]).dtype == torch.uint32
    assert (found["a.b"].value, found["a.b (2)"].value) == (1, 2)


def test_a_bare_tensor_has_a_name(tmp_path):
    torch.save(torch.ones(2), tmp_path / "x.pt")
    assert list(by_name(tmp_path / "x.pt")) == ["state"]


# Two ranks ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with the states of two ranks, and the full tensors that they have."""
    folder = tmp_path_factory.mktemp("ranks")
    torchrun(2, ROOT / "tests/harness/state_writers.py", folder, code=0)
    return folder, pickle.loads((folder / "truth.pickle").read_bytes())


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "dcp"])
def test_parts_of_two_ranks_are_the_full_tensors(written, kind):
    folder, truth = written
    found = by_name(folder / kind)
    assert truth[kind]
    for name, tensor in truth[kind].items():
        assert bits(full_of(found[name])) == bits(tensor), name
        assert len(found[name].parts) == 2, name
    sizes = {part.source: part.box for part in found["model.0.weight"].parts}
    spans = {"fsdp2": "rank_{}.pt", "fsdp1": "part{}.pt", "dcp": "__{}_0.distcp"}[kind]
    assert sizes == {
        spans.format(0): Box((5, 3), (((0, 3),), ((0, 3),))),
        spans.format(1): Box((5, 3), (((3, 5),), ((0, 3),))),
    }


def test_values_and_replicas_of_ranks(written):
    found = by_name(written[0] / "fsdp2")
    assert [part.box for part in found["own.same"].parts] == [Box((2,)), Box((2,))]
    assert (found["own.rank (rank_0.pt)"].value, found["own.rank (rank_1.pt)"].value) == (0, 1)
    assert "own.rank" not in found
    assert [part.box for part in found["own.replicas"].parts] == [Box((3, 5)), Box((3, 5))]
    assert found["own.tied"].tied == "own.both"


def test_one_file_of_a_rank_has_its_part(written):
    [part] = by_name(written[0] / "fsdp2/rank_1.pt")["model.0.bias"].parts
    assert part.box == Box((5,), (((3, 5),),))


def test_several_files_of_each_rank_have_prefixes(written):
    found = by_name(written[0] / "verl")
    assert found["extra_state.step"].value == 3
    assert len(found["model.0.weight"].parts) == 2


def test_bytes_of_a_distributed_checkpoint(written):
    found = by_name(written[0] / "dcp")
    assert {name: found[name].value for name in ("step", "note", "rates.1", "pair", "object")} == {
        "step": 7, "note": "text", "rates.1": 0.2, "pair": (1, None), "object": "x",
    }  # fmt: skip
    assert full_of(found["rng"]).tolist() == list(range(9))
    other = found["other"]
    assert (other.shape, other.value, other.parts) == (None, None, ())
    assert (
        "asks for __main__.Other, which is not a name of torch's state: refused, nothing was executed" in other.unread
    )


def copied(folder, to):
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_a_damaged_distributed_checkpoint_is_one_line(written, tmp_path):
    folder = copied(written[0] / "dcp", tmp_path / "x")
    first = folder / "__0_0.distcp"
    content = first.read_bytes()
    found = by_name(folder)["model.0.weight"]
    first.write_bytes(content[:-1])
    assert re.fullmatch(r"__0_0.distcp: it is cut off: .* lies at bytes \d+ to \d+, and it has \d+", refused(folder))
    first.write_bytes(content.replace(b"data.pkl", b"data.plk"))
    assert "one data.pkl of torch.save" in error_of(found.parts[0].load, kind=BadFile)
    second = folder / "__1_0.distcp"
    sound = second.read_bytes()
    second.write_bytes(sound.replace(b"data.pkl", b"data.plk"))
    assert "one data.pkl of torch.save" in refused(folder), "an entry of bytes"
    second.write_bytes(sound)
    first.unlink()
    assert refused(folder) == "__0_0.distcp: No such file or directory"
    metadata = (folder / ".metadata").read_bytes()
    first.write_bytes(content)
    for old, new, message in [
        (b"__0_0.distcp", b"../0_.distcp", "it names the file '../0_.distcp', which is not inside the folder: refused"),
        (b"__0_0.distcp", b"/_0_0.distcp", "it names the file '/_0_0.distcp', which is not inside the folder: refused"),
        (b"_StorageInfo", b"_StorageImpl", "asks for torch.distributed.checkpoint.filesystem._StorageImpl"),
        (b"\x8c\x06chunks", b"\x8c\x06chonks", "a list is missing in what describes a tensor"),
    ]:
        assert old in metadata
        (folder / ".metadata").write_bytes(metadata.replace(old, new, 1))
        assert message in refused(folder)
    (folder / ".metadata").write_bytes(metadata[:-30])
    assert "its pickle is cut off" in refused(folder)


@pytest.mark.parametrize("size", [1, 5, 8, 16, 37])
@pytest.mark.parametrize("mesh", [(2, 2), (4, 2), (2, 3)])
@pytest.mark.parametrize("split", [0, 1, 2, 3])
def test_boxes_are_those_of_torch(size, mesh, split):
    """Two placements of one dimension; the first may be strided, as FSDP2 makes it over tensor parallelism."""
    placements = [_StridedShard(0, split_factor=split) if split else Shard(0), Shard(0)]
    records = []
    for one in placements:
        record = Record(f"x.{type(one).__name__}")
        record.fields = {"dim": 0} | ({"split_factor": split} if type(one) is _StridedShard else {})
        records.append(record)
    for at in [(x, y) for x in range(mesh[0]) for y in range(mesh[1])]:
        positions, spans = list(range(size)), ((0, size),)
        for placement, record, count, own in zip(placements, records, mesh, at, strict=True):
            if type(placement) is Shard:
                length, start = Shard.local_shard_size_and_offset(len(positions), count, own)
                positions = positions[start : start + length]
            else:
                _, mine = placement.local_shard_size_and_offset(len(positions), count, own, offset_mode=1)
                positions = [positions[one] for one in mine]
            spans = boxes._chunk(spans, count, own, record)
        assert [one for start, stop in spans for one in range(start, stop)] == positions


RANKS = [
    ("a_rank0.pt a_rank1.pt", {"a_rank*.pt": [0, 1]}),
    ("0.pt 1.pt 10.pt", {"*.pt": [0, 1, 10]}),
    ("m_world_size_2_rank_1.pt m_world_size_2_rank_0.pt", {"m_world_size_2_rank*.pt": [0, 1]}),
    ("zero_pp_rank_0_mp_rank_00.pt zero_pp_rank_1_mp_rank_00.pt", {"zero_pp_rank*_mp_rank*.pt": [0, 1]}),
    ("tp_rank_0_pp_rank_1.pt tp_rank_1_pp_rank_0.pt", {"tp_rank_0_pp_rank_1.pt": [0], "tp_rank_1_pp_rank_0.pt": [0]}),
    ("rank0.pt rank00.pt", {"rank0.pt": [0], "rank00.pt": [0]}),
    ("model.pt optim.pt", {"model.pt": [0], "optim.pt": [0]}),
]


@pytest.mark.parametrize(("names", "found"), RANKS)
def test_ranks_in_names(names, found):
    paths = [pathlib.Path(name) for name in sorted(names.split())]
    assert {family: list(one) for family, one in folders.by_rank(paths).items()} == found


def test_files_that_differ_in_a_number_and_are_no_ranks(tmp_path):
    for step in (0, 1):
        torch.save({"w": torch.ones(2)}, tmp_path / f"step_{step}.pt")
    text = "step_0.pt to step_1.pt differ in a number, and neither their names nor their tensors say that it is a rank"
    assert refused(tmp_path) == f": {text}; name one file"
    (tmp_path / "step_1.pt").rename(tmp_path / "step_200.pt")
    assert refused(tmp_path).endswith("and no file of rank 1; name one file if they are no ranks")
    for rank, size in ((0, 2), (1, 3)):
        (tmp_path / "x").mkdir(exist_ok=True)
        torch.save({"w": torch.ones(size), "v": torch.ones(1)}, tmp_path / f"x/model-rank{rank}.pt")
    found = by_name(tmp_path / "x")
    assert {name: len(one.parts) for name, one in found.items()} == {
        "w (model-rank0.pt)": 1, "w (model-rank1.pt)": 1, "v": 2,
    }  # fmt: skip


# Safetensors and Hugging Face ---------------------------------------------------------------------------------------

SAFE = {"b": BASE.clone(), "a": BASE.to(torch.bfloat16), "none": torch.empty(0, 3), "scalar": torch.tensor(3)}
SAFE |= {"f8": BASE.to(torch.float8_e4m3fn), "bool": torch.tensor([True]), "c": torch.ones(2, dtype=torch.complex64)}


def test_a_file_of_safetensors_comes_back(tmp_path):
    save_file(SAFE, tmp_path / "x.st", metadata={"format": "pt"})
    found = by_name(tmp_path / "x.st")
    assert found.keys() == SAFE.keys()
    for name, tensor in SAFE.items():
        assert bits(full_of(found[name])) == bits(tensor)
        assert found[name].parts[0].source == "x.st"


def indexed(folder, name="model.safetensors.index.json", **weights):
    save_file({"a": BASE.clone()}, folder / "m-1.safetensors")
    save_file({"b": BASE + 1, "unnamed": BASE + 2}, folder / "m-2.safetensors")
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return folder


def test_an_index_and_what_it_does_not_name(tmp_path):
    found = by_name(indexed(tmp_path, a="m-1.safetensors", b="m-2.safetensors"))
    assert {name: one.parts[0].source for name, one in found.items()} == {
        "a": "m-1.safetensors", "b": "m-2.safetensors", "unnamed": "m-2.safetensors",
    }  # fmt: skip
    assert full_of(found["unnamed"])[0, 0] == 2


INDEXES = [
    ({"a": "../m-1.safetensors"}, "it names the file '../m-1.safetensors', which is not inside the folder: refused"),
    ({"a": "/etc/passwd"}, "it names the file '/etc/passwd', which is not inside the folder: refused"),
    ({"a": "x/../../y"}, "it names the file 'x/../../y', which is not inside the folder: refused"),
    ({"a": "m-3.safetensors"}, "it names the file m-3.safetensors, which is missing"),
    ({"c": "m-1.safetensors"}, "it names c, which m-1.safetensors does not have"),
    ({"a": 3}, "weight_map.a: 3 is not a string"),
]


@pytest.mark.parametrize(("weights", "message"), INDEXES)
def test_a_wrong_index_is_one_line(tmp_path, weights, message):
    assert refused(indexed(tmp_path, **weights)) == f"model.safetensors.index.json: {message}"


def test_folders_of_hugging_face(tmp_path):
    torch.save({"a": BASE}, tmp_path / "pytorch_model.bin")
    assert list(by_name(tmp_path)) == ["a"]
    save_file({"a": BASE + 1}, tmp_path / "adapter_model.safetensors")
    assert "a is in pytorch_model.bin and in adapter_model.safetensors" in refused(tmp_path)
    save_file({"lora": BASE + 1}, tmp_path / "adapter_model.safetensors")
    save_file({"a": BASE + 2}, tmp_path / "model.safetensors")
    torch.save({"state": {0: {"step": 4}}}, tmp_path / "optimizer.pt")
    torch.save(pathlib.Path("a"), tmp_path / "training_args.bin")
    found = by_name(tmp_path)
    assert list(found) == ["a", "lora", "optimizer.state.0.step"]
    assert full_of(found["a"])[0, 0] == 2
    (tmp_path / "x").mkdir()
    torch.save({"lora": BASE}, tmp_path / "x/adapter_model.bin")
    assert list(by_name(tmp_path / "x")) == ["lora"]


def header(told, data=b"", length=None):
    text = told if isinstance(told, bytes) else json.dumps(told).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def told(shape, *offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS = [
    (header({"a": told([2], 0, 8), "b": told([2], 4, 12)}, b"x" * 12), "the bytes 4 to 12 of b overlap others"),
    (header({"a": told([2], 0, 8), "b": told([2], 12, 20)}, b"x" * 20), "the bytes 12 to 20 of b follow a gap"),
    (header({"a": told([2], 0, 8)}, b"x" * 7), "the bytes 0 to 8 of a pass its end, 7"),
    (header({"a": told([2], 0, 8)}, b"x" * 9), "it has 1 bytes after its last tensor"),
    (header({"a": told([1 << 40], 0, 1 << 42)}), "the bytes 0 to 4398046511104 of a pass its end, 0"),
    (header({"a": told([3], 0, 8)}, b"x" * 8), "the header: a: 8 bytes, and a tensor of this shape and dtype has 12"),
    (header({"a": told([-2], 0, -8)}), "the header: a: the shape of a tensor has -2, which is not possible"),
    (header({"a": told([2], 0, 8, dtype="F9")}), "the header: a: the dtype F9 is not supported"),
    (header({"a": 3}), "the header: a: 3 is not an object"),
    (header({"a": told("x", 0, 8)}), "the header: a: the shape of a tensor is not a few numbers"),
    (header({}, length=1 << 62), "not a file of safetensors, or cut off: a header of 4611686018427387904 bytes"),
    (header(b'{"a": 1, "a": 2}'), "an object has two values of one name"),
    (header(b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}"), "lists and objects more than 64 deep"),
    (header(b'{"a": '), "not a file of safetensors: Expecting value"),
]


@pytest.mark.parametrize(("content", "message"), HEADERS, ids=range(len(HEADERS)))
def test_a_wrong_header_is_one_line(tmp_path, content, message):
    (tmp_path / "x").write_bytes(content)
    assert refused(tmp_path / "x").startswith(f": {message}")


# Hostile and damaged files --------------------------------------------------------------------------------------------


def archive(path, pickled, storages=None, root="x", **options):
    """Write an archive as torch.save does, with this pickle."""
    with zipfile.ZipFile(path, "w", **options) as found:
        found.writestr(f"{root}/data.pkl", pickled)
        for key, content in (storages or {}).items():
            found.writestr(f"{root}/data/{key}", content)
    return path


class Evil:
    """An object that runs a function where it is unpickled."""

    def __init__(self, function, *args, state=None):
        self.made = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.made


def evil(function, *args, protocol=2, state=None):
    return pickle.dumps({"a": Evil(function, *args, state=state)}, protocol)


def named(module, name):
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"."


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def tensor(offset, shape, stride, key="0", numel=4, kind="FloatStorage"):
    """A pickle of one tensor, with numbers that torch would not write."""

    def numbers(values):
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", one) for one in values) + b"t"

    storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + numbers([numel])[1:-1]
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"tQ" + numbers([offset])[1:-1] + numbers(shape)
        + numbers(stride) + b"\x89N" + b"tR."
    )  # fmt: skip


REFUSED = "which is not a name of torch's state: refused, nothing was executed"
MADE = 1 << 19
CANARY = "canary-of-the-test"
DEEP_KEY = b"\x80\x02}K\x01" + b"\x85" * 200_000 + b"Ns."
LAUGHS = b"\x80\x02]" + b"q\x000]h\x00ah\x00a" * 40 + b"."

HOSTILE = [
    (evil(os.system, f"touch {CANARY}"), f"it asks for {os.name}.system, {REFUSED}"),
    (evil(os.system, f"touch {CANARY}", protocol=4), f"it asks for {os.name}.system, {REFUSED}"),
    (evil(eval, f"open({CANARY!r}, 'w')"), f"it asks for builtins.eval, {REFUSED}"),
    (evil(exec, f"open({CANARY!r}, 'w')", protocol=5), f"it asks for builtins.exec, {REFUSED}"),
    (evil(open, CANARY, "w"), f"it asks for io.open, {REFUSED}"),
    (evil(pathlib.Path.touch, pathlib.Path(CANARY), protocol=4), "it asks for pathlib.Path.touch, "),
    (evil(torch.save, 1, CANARY), f"it asks for torch.serialization.save, {REFUSED}"),
    (evil(torch.load, CANARY), f"it asks for torch.serialization.load, {REFUSED}"),
    (named("os", "system.__call__"), f"it asks for os.system.__call__, {REFUSED}"),
    (named("torch", "os.system"), f"it asks for torch.os.system, {REFUSED}"),
    (named("torch.distributed.tensor", "DTensor.from_local"), "it asks for torch.distributed.tensor.DTensor.f"),
    (named("collections", "OrderedDict.__init__"), f"it asks for collections.OrderedDict.__init__, {REFUSED}"),
    (named("\x1b[31m", "::error::x"), r"it asks for \x1b[31m.::error::x, " + REFUSED),
    (evil(getattr, torch.Size, "mro"), f"it asks for torch.Size.mro, {REFUSED}"),
    (evil(torch.Tensor, 3), "it calls torch.Tensor, which makes no state of torch: refused"),
    (b"\x80\x02ctorch\nSize\n}" + text("call") + b"K\x01sb.", "it sets attributes of torch.Size: refused"),
    (b"\x80\x02ctorch\ndevice\n}" + text("__class__") + b"K\x01sb.", "it sets attributes of torch.device: refused"),
    (b"\x80\x02]}" + text("x") + b"K\x01sb.", "it sets attributes of a list: refused"),
    (b"\x80\x02" + text("storage") + b"Q.", "it has a persistent id that is no storage of torch: refused"),
    (b"\x80\x02(" + text("module") + b"NNNNtQ.", "it has a persistent id that is no storage of torch: refused"),
    (b"\x80\x02(" + text("storage") + b"ctorch\nSize\n" + text("0") + text("cpu") + b"K\x01tQ.", "it has a persist"),
    (b"Pstorage\n.", "its pickle has the opcode 0x50, which torch does not write: refused"),
    (b"(ios\nsystem\n.", "its pickle has the opcode 0x69, which torch does not write: refused"),
    (b"(cos\nsystem\no.", f"it asks for os.system, {REFUSED}"),
    (b"\x80\x02\x82\x01.", "its pickle has the opcode 0x82, which torch does not write: refused"),
    (evil(bytearray, 1 << 40), "bytes are damaged"),
    (evil(bytes, 1 << 40, protocol=4), "bytes are damaged"),
    (b"\x80\x02c_codecs\nencode\n(" + text("x") + text("zip") + b"tR.", "it encodes something that is no text"),
    (DEEP_KEY, "its pickle has a tuple as a key: refused"),
    (b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", "lists and dictionaries more than 64 deep"),
    (b"\x80\x02]q\x00h\x00a.", "lists and dictionaries more than 64 deep"),
    (LAUGHS, "it has more than 16384 containers and entries"),
    (b"\x80\x02" + b"K\x01" + b"\x85" * 1000 + b".", "lists and dictionaries more than 64 deep"),
    (b"\x80\x04\x8e" + b"\xff" * 8 + b".", "its pickle is cut off"),
    (b"\x80\x02j\xff\xff\xff\xff.", "its pickle is cut off or damaged (KeyError)"),
    (b"\x80\x02" + b"K\x01K\x01.", "its pickle is damaged"),
    (b"\x80\x02", "its pickle is cut off or damaged (IndexError)"),
    (b"", "its pickle is cut off or damaged (IndexError)"),
    (b"\x80\x02" + b"]" * (MADE + 1) + b".", f"its pickle makes more than {MADE} objects"),
    (b"\x80\x04N" + b"\x94" * (MADE + 1) + b".", f"its pickle keeps more than {MADE} objects"),
    (tensor(0, [2], [-1]), "the stride of a tensor has -1, which is not possible"),
    (tensor(-1, [2], [1]), "the offset of a tensor has -1, which is not possible"),
    (tensor(0, [-2], [1]), "the shape of a tensor has -2, which is not possible"),
    (tensor(3, [2], [1]), "a tensor of shape (2,) has elements up to 5, and its storage 4"),
    (tensor(0, [2, 2], [1, 1 << 60]), "a tensor of shape (2, 2) has elements up to "),
    (tensor(0, [1 << 40], [0]), "a tensor of shape (1099511627776,) has more elements than its storage, 4, many times"),
    (tensor(0, [1 << 61] * 3, [0] * 3), "a tensor of shape"),
    (tensor(0, [2, 2], [1]), "a tensor of shape (2, 2) has the stride (1,)"),
    (tensor(0, [1], [1], key="1"), "the storage data/1 is missing"),
    (tensor(0, [1], [1], numel=5), "the storage data/0 has 16 bytes, and its tensors need 20"),
    (tensor(0, [1], [1], numel=1 << 62), "the storage data/0 has 16 bytes, and its tensors need"),
    (tensor(0, [1], [1], numel=-1), "it has a persistent id that is no storage of torch: refused"),
    (tensor(0, [1], [1], key="../0"), "the storage data/../0 is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("pickled", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_pickle_is_one_line_and_runs_nothing(tmp_path, monkeypatch, pickled, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pickles, "MOST_MADE", MADE)
    monkeypatch.setattr(entries, "MOST_ENTRIES", 1 << 12)
    modules, started = set(sys.modules), time.process_time()
    assert refused(archive(tmp_path / "x.pt", pickled, {"0": b"x" * 16})).startswith(f": {message}")
    assert os.listdir() == ["x.pt"]
    assert set(sys.modules) == modules
    assert time.process_time() - started < 30


def test_the_canary_sings_where_python_unpickles(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(HOSTILE[0][0])
    assert os.listdir() == [CANARY]


def test_a_state_on_an_object_of_the_table_stays_data(tmp_path):
    state = b"\x80\x02ctorch\ndevice\n)\x81}" + text("__class__") + b"cargparse\nNamespace\nsb."
    [entry] = files.read(archive(tmp_path / "x.pt", state))
    assert (entry.value, entry.unread) == (None, "an object of torch.device, which is not plain")


def test_a_place_in_the_memo_takes_no_memory(tmp_path):
    [entry] = files.read(archive(tmp_path / "x.pt", b"\x80\x02K\x07r\xff\xff\xff\xff0j\xff\xff\xff\xff."))
    assert entry.value == 7


def test_members_that_are_compressed_are_not_unpacked(tmp_path):
    pickled = tensor(0, [4], [1], numel=1 << 24)
    path = archive(tmp_path / "x.pt", pickled, {"0": bytes(1 << 26)}, compression=zipfile.ZIP_DEFLATED)
    started = time.process_time()
    assert refused(path) == ": its data.pkl is compressed, which torch.save does not do"
    with zipfile.ZipFile(path, "w") as found:
        found.writestr("x/data.pkl", pickled)
        found.writestr("x/data/0", bytes(1 << 26), compress_type=zipfile.ZIP_DEFLATED)
    started = time.process_time()
    assert refused(path) == ": the storage data/0 is compressed, which torch.save does not do"
    assert time.process_time() - started < 5


def saved(state, **options):
    found = io.BytesIO()
    torch.save(state, found, **options)
    return found.getvalue()


def scripted():
    found = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), found)
    return found.getvalue()


def zipped(**members):
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return found.getvalue()


FOREIGN = [
    (lambda: saved(BASE, _use_new_zipfile_serialization=False), "a file of torch.save before torch 1.6; convert it"),
    (lambda: b"x" * 257 + b"ustar" + b"x" * 300, "a file of torch.save before torch 1.6; convert it"),
    (lambda: pickle.dumps({"a": 1}), "a plain pickle, which has no tensors by themselves; save the state"),
    (scripted, "a model of TorchScript, which has code; save its state_dict() by torch.save"),
    (lambda: zipped(a="x"), "an archive of zip without the one data.pkl of torch.save"),
    (lambda: b"PK\x03\x04" + b"x" * 99, "it is cut off or damaged: the list of its members is missing"),
    (lambda: b"", "an empty file; read can be a file of torch.save or safetensors, or a folder"),
    (lambda: b"\x7fELF", "no state; read can be a file of torch.save or safetensors, or a folder"),
    (lambda: b'{"log": 1}' * 99, "no state; read can be a file of torch.save or safetensors, or a folder"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), FOREIGN, ids=range(len(FOREIGN)))
def test_another_file_is_one_line(tmp_path, content, message):
    (tmp_path / "x.pt").write_bytes(content())
    assert refused(tmp_path / "x.pt").startswith(f": {message}")


def test_other_paths_are_one_line(tmp_path):
    assert refused(tmp_path / "x") == ": No such file or directory"
    os.mkfifo(tmp_path / "x")
    assert refused(tmp_path / "x") == ": not a regular file"
    assert refused(tmp_path).startswith(": no state; read can be a file of torch.save or safetensors, or a folder")


def test_a_file_that_is_cut_later_is_one_line(tmp_path):
    torch.save({"a": torch.ones(1 << 20)}, tmp_path / "x.pt")
    [entry] = files.read(tmp_path / "x.pt")
    os.truncate(tmp_path / "x.pt", 4096)
    assert "it is cut off" in error_of(entry.parts[0].load, kind=BadFile)


def pickle_of(path):
    """The pickle of a file of torch.save, and its storages."""
    with zipfile.ZipFile(path) as found:
        content = {name.partition("/")[2]: found.read(name) for name in found.namelist()}
    return content.pop("data.pkl"), {name[5:]: one for name, one in content.items() if name.startswith("data/")}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["archive", "tensors", "fsdp1", "fsdp2", "safetensors", "metadata"])
def test_damage_anywhere_is_one_line_or_is_read(tmp_path, written, kind):
    """Bytes that change, and a file that ends early; values that are read have the shape that is said."""
    read = path = tmp_path / "x"
    torch.save({name: value for name, value in TENSORS.items() if name != "large"} | {"x": [1, (2.0, "a")]}, path)
    storages = None
    if kind == "safetensors":
        save_file(SAFE, path)
    elif kind == "metadata":
        path.unlink()
        path = copied(written[0] / "dcp", read) / ".metadata"
    elif kind != "archive":
        source = {"tensors": path, "fsdp1": written[0] / "fsdp1/part1.pt", "fsdp2": written[0] / "fsdp2/rank_1.pt"}[
            kind
        ]
        content, storages = pickle_of(source)
    content = path.read_bytes() if storages is None else content
    draw, seen = random.Random(kind), collections.Counter()
    for number in range(400):
        damaged = bytearray(content)
        if number % 4 == 0:
            del damaged[draw.randrange(len(content)) :]
        for _ in range(draw.choice((1, 1, 3))):
            if damaged:
                damaged[draw.randrange(min(len(damaged), 6000))] = draw.randrange(256)
        if storages is None:
            path.write_bytes(damaged)
        else:
            archive(path, bytes(damaged), storages)
        try:
            for entry in files.read(read):
                for part in entry.parts:
                    assert part.load().numel() == part.box.numel
            seen["read"] += 1
        except BadFile as error:
            assert "\n" not in str(error)
            seen["refused"] += 1
    print(dict(seen))
    assert seen["refused"] > 50 and seen["read"] + seen["refused"] == 400


#: Names of other versions of torch, numpy and Python.
OTHER_VERSIONS = {
    "builtins.long", "pathlib._local.PosixPath", "torch.storage._TypedStorage", "torch.storage._UntypedStorage",
    *(f"torch.distributed._tensor.placement_types.{name}" for name in ("_Partial", "_StridedShard")),
}  # fmt: skip


def test_each_name_of_the_table_is_one_of_a_library():
    def is_there(full):
        parts = full.split(".")
        for count in range(len(parts) - 1, 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:count]))
            except ImportError:
                continue
            return functools.reduce(lambda owner, name: getattr(owner, name, None), parts[count:], found) is not None
        return False

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert {full for full in names._table() if not is_there(full)} == OTHER_VERSIONS
