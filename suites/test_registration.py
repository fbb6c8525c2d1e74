"""Chapter REGISTRATION: which parameters a module has registered between the phases of a step."""

import copy
import pathlib
import time
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.testing import Capability, Rank, Run, contract, meaningful_from, models, needs, world
from shardproof.testing.axes import RESHARD, RESHARD_ROOT, RESHARD_UNEVEN, subjects, with_first
from shardproof.testing.compare import check_bits, step_label
from shardproof.testing.make import Settings, run_by_units
from shardproof.testing.train import batches, checked_steps

pytestmark = [needs(Capability.REGISTERED_STATE), world(2, 4)]

#: Groups of one rank have full parameters, as without resharding.
TO_ONE_RANK = pytest.param(8, 1, marks=needs(Capability.RESHARD_TO_SIZE, Capability.ROOT_RESHARD))
LAYERS = ("layers.0", "layers.1")
UNITS = pytest.mark.parametrize("units", [[], [["layers.0"], ["layers.1"]]], ids=["root-only", "three-units"])


def tower(rank: Rank, dim: int, **options: Any) -> tuple[Run, nn.Module]:
    """A run of two layers of a width, by default each a unit, and a copy of the model (collective)."""
    model = models.Tower(dim=dim, depth=2)
    original = copy.deepcopy(model).to(rank.device)
    return rank.run(model, **{"units": [["layers.0"], ["layers.1"]]} | options), original


@contract("REGISTRATION-1")
@needs(Capability.MANUAL_RESHARD)
@UNITS
@pytest.mark.parametrize(
    ("dim", "reshard_after_forward"), [*with_first(8, RESHARD_ROOT), *with_first(5, RESHARD_UNEVEN), TO_ONE_RANK]
)
def test_after_forward(rank: Rank, dim: int, units: list[list[str]], reshard_after_forward: bool | int | None) -> None:
    """After forward a unit has shards registered if it reshards, else gathered parameters; values never change.

    By default every unit but the root's reshards; an explicit choice applies to the root's too. The sizes divide by
    the number of ranks of every group, or of none.
    """
    run, original = tower(rank, dim, units=units, reshard_after_forward=reshard_after_forward)
    _assert_sharded(run, "before forward", original)

    run.adapter.forward(rank.batch(0, (3, dim)))
    _assert_as_after_forward(run, reshard_after_forward, has_units=bool(units))
    _assert_values(run, original)

    run.adapter.reshard()
    _assert_sharded(run, "after reshard()", original)


@contract("REGISTRATION-1")
@needs(Capability.MANUAL_RESHARD, Capability.RESHARD_TO_SIZE, Capability.ROOT_RESHARD)
@pytest.mark.parametrize("replicas", [False, pytest.param(True, marks=[needs(Capability.HYBRID), meaningful_from(4)])])
def test_size_of_the_mesh(rank: Rank, replicas: bool) -> None:
    """Resharding to groups of all ranks is full resharding: after forward the optimizer's parameters are registered."""
    model, size = models.Tower(dim=8, depth=2), 2 if replicas else rank.world_size
    mesh = rank.mesh((rank.world_size // 2, 2), ("replicate", "shard")) if replicas else rank.mesh()
    run = rank.run(model, units=model.units(), mesh=mesh, reshard_after_forward=size)
    run.adapter.forward(rank.batch(0, (3, 8)))
    held = run.adapter.held_parameters()
    others = [name for name, shown in run.adapter.named_parameters().items() if shown is not held[name]]
    assert not others, f"after forward other parameters than the optimizer's are registered: {', '.join(others)}"


@contract("REGISTRATION-1")
@needs(Capability.FSDP2_API, Capability.MANUAL_RESHARD, Capability.ASYNC_UNSHARD)
@pytest.mark.parametrize("waits", [True, False])
def test_calls_on_one_unit(rank: Rank, waits: bool) -> None:
    """``unshard()`` and ``reshard()`` of one unit, the root's too, act on its own parameters and on no other unit's."""
    run, _ = tower(rank, 8)
    names = {name: [one for one in run.adapter.named_parameters() if one.startswith(name)] for name in LAYERS}
    names[""] = [one for one in run.adapter.named_parameters() if not one.startswith(LAYERS)]

    def check(when: str, expected: list[str]) -> None:
        found = [name for name, is_gathered in run.adapter.gathered().items() if is_gathered]
        assert sorted(found) == sorted(expected), f"{when} {sorted(found)} are gathered instead of {sorted(expected)}"

    for unit, own in names.items():
        module: Any = run.original_module(unit)
        handle = module.unshard(async_op=not waits)
        assert (handle is None) == waits, f"unshard(async_op={not waits}) returns {handle}"
        if handle is not None:
            handle.wait()
        check(f"after unshard() of {unit or '(root)'}", own)
        module.reshard()
        check(f"after reshard() of {unit or '(root)'}", [])
        run.adapter.unshard(waits=True)
        module.reshard()
        others = [name for other in names if other != unit for name in names[other]]
        check(f"after unshard() of all units and reshard() of {unit or '(root)'}", others)
        run.adapter.reshard()


@contract("REGISTRATION-1")
@needs(Capability.FSDP2_API, Capability.MANUAL_RESHARD, Capability.ASYNC_UNSHARD, Capability.UNIT_SETTINGS)
def test_unshard_does_not_wait_for_other_ranks(rank: Rank) -> None:
    """``unshard(async_op=True)`` returns before another rank has called it, whatever memory its buffers are in."""
    run, _ = tower(rank, 8)
    unit: Any = run.original_module("layers.0")
    for memory in ("torch", "group"):
        run.adapter.change(Settings(allocate_memory_from_process_group_for_comm=memory == "group"), unit="layers.0")
        returned = rank.tmp_path / memory
        if rank.index != 0:
            _wait_for(returned)
        was_first = rank.index == 0 or returned.exists()
        handle = unit.unshard(async_op=True)
        if rank.index == 0:
            returned.touch()
        handle.wait()
        unit.reshard()
        assert all(rank.exchange(was_first)), (
            f"with buffers in memory of the {memory}, unshard(async_op=True) on rank 0 returns only when the other "
            "ranks have called it"
        )


def _wait_for(path: pathlib.Path) -> None:
    """Wait until a file is there, or for so long that it does not come."""
    last = time.monotonic() + 8
    while not path.exists() and time.monotonic() < last:
        time.sleep(0.001)


@contract("REGISTRATION-2")
@UNITS
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_after_backward(rank: Rank, units: list[list[str]], reshard_after_forward: bool | int | None) -> None:
    """After backward every unit has its shards registered, whatever it did after forward."""
    run, original = tower(rank, 5, units=units, reshard_after_forward=reshard_after_forward)
    for step in range(2):
        run.forward_backward((rank.batch(step, (3, 5)),), loss=models.mean_square)
        _assert_sharded(run, f"after the backward of {step_label(step)}", original)


@contract("REGISTRATION-3")
@pytest.mark.parametrize("reshard_after_forward", RESHARD_ROOT)
def test_after_forward_without_gradients(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A forward without gradients leaves the same parameters registered as one with gradients, between steps too."""
    run, original = tower(rank, 8, reshard_after_forward=reshard_after_forward)
    for step in range(2):
        with torch.no_grad():
            run.adapter.forward(rank.batch(step, (3, 8)))
        _assert_as_after_forward(run, reshard_after_forward, has_units=True)
        _assert_values(run, original)
        run.forward_backward((rank.batch(step, (3, 8)),), loss=models.mean_square)
        _assert_sharded(run, f"after the backward of {step_label(step)}", original)


@contract("REGISTRATION-3")
@needs(Capability.UNIT_SETTINGS, Capability.RESHARD_AFTER_FORWARD, Capability.ROOT_RESHARD)
def test_after_forwards_of_two_settings(rank: Rank) -> None:
    """Whether forward frees a unit can be set while the unit is gathered; the next forward follows the setting."""
    run = run_by_units(rank, models.Tower(dim=8, depth=2), reshard_after_forward=False)
    for choice in (False, True, False):
        run.adapter.change(Settings(reshard_after_forward=choice), recurse=True)
        with torch.no_grad():
            run.adapter.forward(rank.batch(0, (3, 8)))
        _assert_as_after_forward(run, choice, has_units=True)


@contract("REGISTRATION-4")
@needs(Capability.NON_ROOT_FORWARD)
@pytest.mark.parametrize("reshard_after_forward", RESHARD_ROOT)
def test_after_partial_forward(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A unit that is called directly leaves the others sharded, and its backward leaves itself sharded."""
    run, original = tower(rank, 8, reshard_after_forward=reshard_after_forward)
    run.forward_backward((rank.batch(0, (3, 8)),), loss=models.mean_square)
    for step in range(2):
        output = run.adapter.forward(rank.batch(step, (3, 8)), submodule="layers.1")
        for name, gathered in run.adapter.gathered().items():
            expected = name.startswith("layers.1.") and reshard_after_forward is False
            assert gathered == expected, f"{name}: gathered is {gathered} after a forward of layers.1 alone"
        _assert_values(run, original)
        run.adapter.backward(models.mean_square(output))
        _assert_sharded(run, f"after the backward of layers.1 in {step_label(step)}", original)


@contract("REGISTRATION-4")
@needs(Capability.NON_ROOT_FORWARD, Capability.GROUPED_UNIT)
@subjects("name", ["layers.0", "layers.1"])
@pytest.mark.parametrize("reshard_after_forward", RESHARD_ROOT[:3])
def test_after_the_forward_of_one_module(rank: Rank, reshard_after_forward: bool | None, name: str) -> None:
    """After an evaluation of one module of a unit of several, the root's forwards are right, and it still trains."""
    model = models.Tower(dim=9, depth=3)
    units = [["layers.0", "layers.1"], ["layers.2"]]
    pair = rank.pair(model, units=units, baseline="replicated", reshard_after_forward=reshard_after_forward)
    for step in checked_steps(pair, batches(rank, 3, (4, 9))):
        batch = rank.batch(step, (4, 9), microbatch=1)
        pair.evaluate(batch, submodule=name)
        pair.evaluate(batch)
        pair.check()


@contract("REGISTRATION-4")
@needs(Capability.NON_ROOT_FORWARD, Capability.GROUPED_UNIT)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["data", "input-with-gradient"])
@pytest.mark.parametrize("name", ["layers.0", "layers.1"])
def test_training_of_one_module(rank: Rank, name: str, requires_grad: bool) -> None:
    """One module of a unit of several, trained by itself, has the baseline's gradients, and is freed after them."""
    model = models.Tower(dim=9, depth=3)
    pair = rank.pair(model, units=[["layers.0", "layers.1"], ["layers.2"]], baseline="replicated")
    for step, submodule in enumerate(("", name, name, "")):
        pair.step(rank.batch(step, (4, 9)).requires_grad_(requires_grad), submodule=submodule)
        _assert_sharded(pair.sharded, f"after {step_label(step)}")
        pair.check()


@contract("REGISTRATION-5")
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_attributes_of_parameters(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """Sharded or gathered, a parameter keeps its name, shape, dtype, device and requires_grad."""
    model = models.Tower(dim=8, depth=2)
    model.get_parameter("layers.1.in_proj.weight").requires_grad_(False)
    model.out.requires_grad_(False)
    model.out.empty = torch.nn.Parameter(torch.zeros(2, 0), requires_grad=False)
    original = copy.deepcopy(model).to(rank.device)
    run = rank.run(model, units=[["layers.0"], ["layers.1"]], reshard_after_forward=reshard_after_forward)
    _assert_attributes(run, original, "before forward")
    for step in range(2):
        output = run.adapter.forward(rank.batch(step, (3, 8)))
        _assert_attributes(run, original, f"after the forward of {step_label(step)}")
        run.adapter.backward(models.mean_square(output))
        _assert_attributes(run, original, f"after the backward of {step_label(step)}")
        for name, parameter in run.adapter.named_parameters().items():
            has_gradient = parameter.grad is not None
            assert has_gradient == parameter.requires_grad, f"{name}: has a gradient: {has_gradient}"
            assert parameter.grad is None or parameter.grad.shape == parameter.shape, f"{name}: shapes differ"
    kept = {id(value) for value in run.adapter.module.state_dict(keep_vars=True).values()}
    copied = [name for name, parameter in run.adapter.named_parameters().items() if id(parameter) not in kept]
    assert not copied, f"a state dict that keeps variables has others than the parameters: {', '.join(copied)}"


@contract("REGISTRATION-5")
@needs(Capability.DTENSOR_PARAMETERS, Capability.OWN_OPTIMIZER)
@pytest.mark.parametrize("replaced", ["", "in_proj.bias"], ids=["nothing", "one-parameter"])
def test_state_dict_follows_parameters(rank: Rank, replaced: str) -> None:
    """A state dict shares the parameters' memory, as that of any module, also after a load has replaced some."""
    run = rank.run(models.MLP(9))
    module = run.adapter.module
    state = module.state_dict()
    if replaced:
        module.load_state_dict({replaced: state[replaced].clone()}, strict=False, assign=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        run.forward_backward((rank.batch(step, (4, 9)),), loss=models.mean_square)
        optimizer.step()
        optimizer.zero_grad()
        now = {name: piece.tensor for name, piece in run.adapter.parameters().items() if name != replaced}
        stale = [name for name, value in now.items() if not torch.equal(state[name].to_local(), value)]
        assert not stale, f"after {step_label(step)} a state dict has outdated values of {', '.join(stale)}"


def _assert_attributes(run: Run, original: nn.Module, when: str) -> None:
    parameters = [dict(original.named_parameters()), run.adapter.named_parameters()]
    expected, found = ({name: _attributes(value) for name, value in one.items()} for one in parameters)
    assert list(found) == list(expected), f"{when} the parameters have other names, or another order"
    for name in expected:
        assert found[name] == expected[name], f"{when} {name} has {found[name]}, the original {expected[name]}"


def _attributes(parameter: torch.Tensor) -> dict[str, Any]:
    names = ("shape", "dtype", "device", "requires_grad", "is_leaf")
    of_all = {"stride": parameter.stride(), "type": isinstance(parameter, nn.Parameter)}
    return {name: getattr(parameter, name) for name in names} | of_all


def _assert_as_after_forward(run: Run, reshard_after_forward: bool | int | None, *, has_units: bool) -> None:
    """Units that do not reshard after forward are gathered, the others are not."""
    stays = not reshard_after_forward if isinstance(reshard_after_forward, bool) else reshard_after_forward == 1
    keeps = {"root": stays or reshard_after_forward is None, "others": stays}
    for name, gathered in run.adapter.gathered().items():
        owner = "others" if has_units and name.startswith("layers.") else "root"
        assert gathered == keeps[owner], f"{name}: gathered is {gathered} after forward with {reshard_after_forward!r}"


def _assert_sharded(run: Run, when: str, original: nn.Module | None = None) -> None:
    """Every registered parameter is sharded, perhaps with the values of a model; if not, name the gathered units."""
    units = {name: unit.label for unit in run.units for name in unit.names}
    gathered = sorted({units[name] for name, is_gathered in run.adapter.gathered().items() if is_gathered})
    assert not gathered, f"{when} every parameter is sharded, but units are gathered: {', '.join(gathered)}"
    if original is not None:
        _assert_values(run, original)


def _assert_values(run: Run, original: nn.Module) -> None:
    """Every registered parameter is, bit for bit, this rank's part of the original."""
    full = dict(original.named_parameters())
    pieces = run.adapter.registered()
    assert pieces.keys() == full.keys()
    for name, piece in pieces.items():
        check_bits(name, piece.tensor, piece.cut(full[name].detach()), sides="shown and original")
