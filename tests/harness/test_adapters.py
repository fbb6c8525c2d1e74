"""Adapters: how they are found, what they declare, what they are told, and what the documents say of them."""

import functools
import importlib.util
import inspect
import re
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardproof.harness.models.plain
from shardproof.harness.adapters import capability, config, registry
from shardproof.harness.adapters.base import Adapter, Config, Traits
from shardproof.harness.adapters.capability import EVERY, OPTIONS, Capability
from shardproof.harness.adapters.torch_fsdp import TorchFsdpAdapter
from shardproof.harness.adapters.torch_fully_shard import gradient_traits
from tests.errors import error_of
from tests.harness.inner import ROOT

DOCUMENT = (ROOT / "docs/implementations.md").read_text()
#: By module, an implementation that needs it and the name of what brings it.
PEERS = {
    "accelerate": ("accelerate.fsdp", "pip install 'accelerate>=1.15'"),
    "deepspeed": ("deepspeed.zero1", "pip install 'deepspeed>=0.19.8'"),
    "lightning_fabric": ("lightning.fabric", "pip install 'lightning-fabric>=2.6.6'"),
    "olmo_core": ("olmo_core.fsdp", "pip install --no-deps 'ai2-olmo-core==3.0.0'"),
    "veomni": ("veomni.fsdp2", "pip install --no-deps 'veomni==0.1.12'"),
    "torchtitan": ("torchtitan.simple_fsdp", "pip install --no-deps 'torchtitan==0.3.0'"),
}


# Finding them


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_built_in_adapter_loads_under_its_own_name(name):
    assert registry.load(name).name == name
    assert not PEERS.keys() & sys.modules.keys(), "the controller must not import what patches torch"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torch.fsdp1", "unknown implementation 'torch.fsdp1': did you mean torch.fsdp"),
        ("deepspeed", "did you mean deepspeed.zero"),
        ("horovod", f"known are {', '.join(registry.BUILT_IN)}. Pass"),
        ("horovod", "Pass your own adapter as module:Class"),
        (":Adapter", "unknown implementation"),
        ("module:", "unknown implementation"),
        ("no_such.module:Adapter", "there is no module 'no_such' in the current folder"),
        ("shardproof.harness.adapters.replicas:DpdAdapter", "has no 'DpdAdapter'; it has DdpAdapter"),
        ("json:Adapter", "module 'json' has no 'Adapter' and no other adapter"),
        ("json:JSONDecoder", "'JSONDecoder' is the class JSONDecoder; expected a class derived from shardproof."),
        ("shardproof.harness.adapters.base:whole", "'whole' is of type function; expected a class"),
        ("shardproof.harness.adapters.base:Adapter", "the adapter 'Adapter' does not define __init__, "),
    ],
)
def test_what_is_no_adapter_is_refused_in_one_line(name, says):
    assert says in error_of(registry.load, name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "my_adapters",
            "'my_adapters' is a module; pass the class of the adapter after a colon, as in my_adapters:Mine",
        ),
        ("my_adapters:", "after a colon, as in my_adapters:MineAdapter or my_adapters:OtherAdapter"),
        ("my_adapters.py", "'my_adapters' is a module; pass the class of the adapter after a colon, as in my_ad"),
        ("my_adapters.Helper", "after a colon, as in my_adapters:Helper"),
        ("package.inside", "after a colon, as in package.inside:Class"),
        ("my_adapters.Nothing", "unknown implementation 'my_adapters.Nothing'"),
    ],
)
def test_a_module_without_a_class(tmp_path, monkeypatch, name, says):
    """It is found and read, and not imported: a typo must not wait for torch."""
    classes = "".join(f"class {one}: pass\n" for one in ("Helper", "MineAdapter", "OtherAdapter"))
    (tmp_path / "my_adapters.py").write_text(f"{classes}raise SystemExit\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("raise SystemExit\n")
    (tmp_path / "package/inside.py").write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert says in error_of(registry.target_of, name)


@pytest.mark.parametrize("module", PEERS)
def test_what_is_missing_says_how_to_install_it(module, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find_spec(name))
    name, how = PEERS[module]
    reason = registry.load(name).availability("cpu")
    assert "is not installed" in reason and reason.endswith(f"; {how} brings it")


# What they declare


def test_each_capability_is_in_one_family():
    members = [one for *_, members in capability.families() for one in members]
    assert [one for one in members if one not in OPTIONS] == list(Capability)
    assert sorted(one for one in members if one in OPTIONS) == sorted(OPTIONS)
    assert all(name and recipe and all(members.values()) for name, recipe, members in capability.families())


def documented_as_lacking(name):
    """The capabilities in the list of an adapter's section, those of other torch versions left out."""
    section = re.search(rf"^### {re.escape(name)}$(.*?)(?=^### |\Z)", DOCUMENT, flags=re.DOTALL | re.MULTILINE)
    assert section, f"docs/implementations.md has no section ### {name}"
    items = re.findall(r"^- (?:before torch (\S+), )?([^:]+):", section[1], flags=re.MULTILINE)
    version = torch.torch_version.TorchVersion
    applies = [names for before, names in items if not before or torch.__version__ < version(before)]
    return {found for names in applies for found in re.findall(r"`([^`]+)`", names)}


@pytest.mark.parametrize("name", [name for name in registry.BUILT_IN if name != "ddp"])
def test_what_the_document_says_is_lacking_is_not_declared(name):
    lacking = documented_as_lacking(name)
    assert lacking <= EVERY, "there is no such capability"
    assert not lacking & set(map(str, registry.load(name).capabilities()))


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_only_adapters_with_ranks_of_their_own_change_a_process(name):
    adapter = registry.load(name)
    overrides = adapter.prepare.__func__ is not Adapter.prepare.__func__
    assert not overrides or adapter.traits.isolation != "shared", "prepare is not called where ranks are shared"


@pytest.fixture
def rank_of():
    """Make this process one rank of a world of which no other rank exists; the world's mesh."""

    def enter(rank, size):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return init_device_mesh("cpu", (size,))

    yield enter
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_flat_shards_are_as_large_as_declared(rank_of, size, dtype):
    traits = TorchFsdpAdapter.traits
    for shapes in [((7, 5), (5, 3)), ((1, 1), (1, 1)), ((2, 9), (9, 1))]:
        model = shardproof.harness.models.plain.two_linear(*shapes).to(dtype)
        declared = sum(traits.local_numel(parameter.shape, size) for parameter in model.parameters())
        sharded = TorchFsdpAdapter(model, optimizer=None, config=Config(mesh=rank_of(0, size)))
        storages = {s.data_ptr(): s for p in sharded.module.parameters() if (s := p.untyped_storage()).nbytes()}
        held = sum(storage.nbytes() for storage in storages.values()) // dtype.itemsize
        assert 0 < held <= declared + traits.collective_padding


@pytest.mark.parametrize(
    ("version", "reduces_in"),
    [("2.14.1+cu130", "compute"), ("2.15.0.dev20260901", "parameters"), ("2.17.0.dev1+git", "parameters")],
)
def test_what_torch_does_with_gradients_depends_on_its_release(version, reduces_in):
    assert Traits(**gradient_traits(version)).reduces_in == reduces_in


def test_what_fsdp_cannot_express_raises(rank_of):
    make = functools.partial(TorchFsdpAdapter, shardproof.harness.models.plain.MLP(4), optimizer=None)
    with pytest.raises(AssertionError, match="no strategy that reshards to groups of 2"):
        make(config=Config(mesh=rank_of(0, 4), reshard_after_forward=2))
    with pytest.raises(AssertionError, match=r"the unit \('in_proj', 'out_proj'\) has 2"):
        make(config=Config(mesh=rank_of(0, 4), units=(("in_proj", "out_proj"),)))


def test_fsdp_wraps_inner_units_first_and_keeps_the_models_names(rank_of):
    model = nn.Sequential(shardproof.harness.models.plain.Tower(dim=4, depth=1), nn.Linear(4, 4))
    names = set(dict(model.named_parameters()))
    units = (("0",), ("0.layers.0.in_proj",), ("0.layers.0",))
    adapter = TorchFsdpAdapter(model, optimizer=None, config=Config(mesh=rank_of(0, 2), units=units))
    assert set(adapter.named_parameters()) == names
    assert {type(adapter.submodule(name)) for (name,) in units} == {type(adapter.module)}
    flat = {storage.data_ptr() for p in adapter.module.parameters() if (storage := p.untyped_storage()).nbytes()}
    assert len(flat) == 4, "each unit, and the root, has a flat parameter of its own"


# Runs with ranks


CHANGES_A_VARIABLE = """
import dataclasses
import os
from shardproof.harness.adapters.reference import ReferenceAdapter

class InPrepare(ReferenceAdapter):
    traits = dataclasses.replace(ReferenceAdapter.traits, isolation="adapter")

    @classmethod
    def prepare(cls, device_type):
        os.environ["A_VARIABLE"] = device_type

class InPrepareButShared(InPrepare):
    traits = ReferenceAdapter.traits

class InInit(ReferenceAdapter):
    traits = InPrepare.traits

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        os.environ["A_VARIABLE"] = "cpu"
"""

SEES_A_VARIABLE = """
import os
from shardproof.testing import models, world

@world(2)
def test_case(rank):
    rank.run(models.MLP(4))
    assert os.environ.get("A_VARIABLE") == "cpu"
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        ("InPrepare", "*1 passed*"),
        ("InPrepareButShared", "*assert None == 'cpu'*"),
        ("InInit", "fail: leak: environment variables changed: A_VARIABLE*"),
    ],
)
def test_process_is_changed_in_prepare_and_in_ranks_of_its_own_only(run, pytester, adapter, says):
    pytester.makepyfile(adapters=CHANGES_A_VARIABLE)
    result = run(SEES_A_VARIABLE, "--impl", f"adapters:{adapter}", "--device", "cpu", own_process=True)
    result.stdout.fnmatch_lines([says])


def test_each_option_is_a_field_that_says_so():
    """``capability.OPTIONS`` imports no torch, so it repeats the names of fields."""
    kinds = {
        "": Config, "clip.": config.Clip, "accumulation.": config.Accumulation, "precision.": config.Precision,
        "settings.": config.Settings,
    }  # fmt: skip
    said = {
        f"{begins}{name}"
        for begins, kind in kinds.items()
        for name, text in re.findall(r'^    (\w+): [^\n]+\n    """(.*?)"""', inspect.getsource(kind), re.M | re.S)
        if "Declared by name" in text
    }
    assert said == OPTIONS
