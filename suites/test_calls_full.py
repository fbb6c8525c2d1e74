"""Chapter CALLS: full parameters of wrappers, with tensor parallelism too."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.suites.apis import NAMES, fsdp1
from shardproof.testing import Capability, Rank, Run, contract, models, needs, world
from shardproof.testing.axes import FLAT, RESHARD, SHARDS
from shardproof.testing.compare import full_of
from shardproof.testing.make import FullParams, cut_over, run_by_units, two_runs
from shardproof.testing.train import mixed, optim, shapes

pytestmark = [needs("flat_parameters", Capability.SUMMON_FULL_PARAMS), world(2)]


@contract("CALLS-3")
@SHARDS
@pytest.mark.parametrize("writeback", [False, True])
def test_full_parameters_are_the_models_own(rank: Rank, writeback: bool, shards: bool) -> None:
    """With original parameters, the full ones are the model's own objects, which the optimizer knows."""
    run = run_by_units(rank, models.Tower(dim=9), shards=shards)
    for _ in range(2):
        run.evaluate((rank.batch(0, (2, 9)),))
        held = dict(run.adapter.held_parameters())
        with run.adapter.summon_full_params(FullParams(writeback=writeback)) as found:
            others = [name for name, parameter in found.items() if parameter is not held[name]]
        assert not others, f"full parameters that are not the model's own objects: {', '.join(others)}"


@contract("CALLS-3")
@FLAT
@SHARDS
def test_attributes_after_summoning_full_params(rank: Rank, shards: bool, flat: bool) -> None:
    """After full parameters were read, modules have attributes of their former dtypes, and none is full.

    The same holds after a forward. While they are read, a backward of other code through the input of a frozen unit,
    which an earlier step had as well, frees none of them.
    """
    model = models.Tower(dim=9)
    model.layers[0].requires_grad_(False)
    shape = model.get_parameter("layers.0.in_proj.weight").shape
    run = rank.run(model, units=model.units(), shards=shards, flat_parameters=flat)
    layer: Any = run.original_module("layers.0.in_proj")

    def kind() -> tuple[type, torch.Size, torch.dtype]:
        return type(layer.weight), layer.weight.shape, layer.weight.dtype

    before = kind()
    run.evaluate((rank.batch(0, (4, 9)),))
    assert kind() == before, f"the weight was {before}, and is {kind()} after a forward"
    batch = rank.batch(1, (4, 9)).requires_grad_()
    run.forward_backward((batch,), loss=models.mean_square)
    with run.adapter.summon_full_params(FullParams()):
        assert layer.weight.shape == shape, f"the full weight has the shape {tuple(layer.weight.shape)}"
        batch.sum().backward()
        assert layer.weight.shape == shape, f"another backward leaves the shape {tuple(layer.weight.shape)}"
    assert kind() == before, f"the weight was {before} and is {kind()}"


@contract("CALLS-3")
@needs(Capability.FSDP1_API)
def test_full_parameters_of_one_wrapper(rank: Rank) -> None:
    """With ``recurse=False`` the wrapper's own parameters are full, and those of a wrapper inside it stay sharded.

    By default both are, also if the wrapper is not the root, and writes to them are kept. A plain module around it has
    no parameters of its own.
    The wrapper names its parameters and buffers without wrappers while they are full, and by their paths afterwards.
    """
    fsdp = fsdp1(rank)
    model = fsdp.nested()
    for layer in model.module:
        layer.register_buffer("spare", torch.zeros(2, device=fsdp.device))
    fsdp.forward(fsdp.wrap(nn.Sequential(model)))

    def counts(module: nn.Module, **options: bool) -> list[int]:
        with fsdp.kind.summon_full_params(module, **options):
            return [sum(one.numel() for one in layer.parameters()) for layer in model.module]

    inside, own = counts(model, recurse=False)
    assert own == 20 and inside < 20, f"the inner and the outer unit, of 20 parameters each, show {[inside, own]}"
    inside, own = counts(nn.Sequential(model), recurse=False)
    assert own < 20 and inside < 20, f"called on a plain module around them, they show {[inside, own]}"
    found = counts(model)
    assert found == [20, 20], f"called on the outer unit with recurse=True, they show {found}"
    for kind, expected in (("named_parameters", NAMES), ("named_buffers", ["0.spare", "1.spare"])):
        with fsdp.kind.summon_full_params(model):
            names = [name for name, _ in getattr(model, kind)()]
        assert sorted(names) == expected, f"{kind}() has the full {names}"
        names, paths = ([name for name, _ in getattr(one, kind)(model)] for one in (fsdp.kind, nn.Module))
        assert names == paths, f"once they are freed, {kind}() has {names}, and the modules are at {paths}"
    with fsdp.kind.summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3)
    lost = [name for name, parameter in model.named_parameters() if not torch.all(parameter == 3)]
    assert not lost, f"written while they were full, these are as before: {lost}"


@contract("CALLS-3")
@SHARDS
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
@pytest.mark.parametrize("writeback", [False, True])
def test_full_parameters_before_backward(
    rank: Rank, writeback: bool, reshard_after_forward: bool | None, shards: bool
) -> None:
    """Full parameters that are read between forward and backward change no gradient, written back or not."""
    run, twin = two_runs(rank, models.Tower(dim=9), reshard_after_forward=reshard_after_forward, shards=shards)
    for step in range(2):
        for one in (run, twin):
            output = one.adapter.forward(rank.batch(step, (4, 9)))
            if one is run:
                with run.adapter.summon_full_params(FullParams(writeback=writeback)):
                    pass
            one.adapter.backward(models.mean_square(output))
        _check_same_gradients(run, twin)


@contract("CALLS-3")
@SHARDS
def test_full_parameters_between_two_forwards(rank: Rank, shards: bool) -> None:
    """Full parameters that are read between two forwards change no gradient of their common backward."""
    run, twin = two_runs(rank, models.Tower(dim=9), shards=shards)
    for one in (run, twin):
        loss = models.mean_square(one.adapter.forward(rank.batch(0, (4, 9))))
        if one is run:
            with run.adapter.summon_full_params(FullParams()):
                pass
        one.adapter.backward(loss + models.mean_square(one.adapter.forward(rank.batch(1, (4, 9)))))
    _check_same_gradients(run, twin)


def _check_same_gradients(run: Run, twin: Run) -> None:
    expected = twin.adapter.gradients()
    for name, piece in run.adapter.gradients().items():
        other = expected[name]
        assert (piece is None) == (other is None), f"{name} has a gradient in one of the runs"
        if piece is not None and other is not None:
            assert torch.equal(piece.tensor, other.tensor), f"{name} has another gradient"


@contract("CALLS-3")
@SHARDS
def test_full_gradients_of_columns(rank: Rank, shards: bool) -> None:
    """Writes to full gradients reach the same elements of the shards, in any memory layout."""
    model = models.Tower(dim=9)
    shapes.by_columns(model)
    run = rank.run(model, units=model.units(), shards=shards, optimizer=None)
    run.forward_backward((rank.batch(0, (4, 9)),), loss=models.mean_square)
    how, expected = FullParams(with_grads=True), {}
    with run.adapter.summon_full_params(how) as found:
        for name, parameter in found.items():
            assert parameter.grad is not None, f"{name} has no full gradient"
            numbers = torch.arange(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
            expected[name] = numbers.view(parameter.shape)
            parameter.grad.copy_(expected[name])
    for name, piece in run.adapter.gradients().items():
        if piece is not None:
            assert torch.equal(piece.tensor, piece.cut(expected[name])), f"{name} has another gradient than was written"


def _split_run(rank: Rank, **options: Any) -> tuple[Run, DeviceMesh]:
    """A run of a model that is cut over ``mesh["tp"]`` too, and all of the mesh (collective)."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    return rank.run(mixed.Mixed(), units=[["low"]], **cut_over(mesh, mixed.split_columns), **options), mesh


@contract("CALLS-3")
@world(4)
@needs(Capability.TENSOR_PARALLEL)
def test_full_parameters_with_tensor_parallelism(rank: Rank) -> None:
    """Writes to the full parameters and gradients of a tensor-parallel model reach the shards."""
    run, mesh = _split_run(rank)
    run.forward_backward((rank.batch(0, (6, 4), mesh=mesh["dp"]),), loss=torch.sum)

    def values() -> dict[str, torch.Tensor]:
        found = {name: piece.tensor.clone() for name, piece in run.adapter.parameters().items()}
        gradients = {f"gradient of {name}": piece for name, piece in run.adapter.gradients().items()}
        return found | {name: piece.tensor.clone() for name, piece in gradients.items() if piece is not None}

    before = values()
    with run.adapter.summon_full_params(FullParams(with_grads=True)) as whole, torch.no_grad():
        for parameter in whole.values():
            parameter.mul_(2)
            if parameter.grad is not None:
                parameter.grad.mul_(2)
    for name, value in values().items():
        assert torch.equal(value, 2 * before[name]), f"{name} was doubled while it was full, and the shard was not"


@contract("CALLS-3")
@world(4)
@needs(Capability.TENSOR_PARALLEL, Capability.FULL_STATE_DICT)
def test_full_states_with_tensor_parallelism(rank: Rank) -> None:
    """A full state dict has tensor-parallel parameters and their optimizer state in full; a sharded one is loaded."""
    run, mesh = _split_run(rank, optimizer=optim.sgd(momentum=0.9))
    run.step([(rank.batch(0, (6, 4), mesh=mesh["dp"]),)], loss=torch.sum)
    saved = run.adapter.checkpoint(form="full")
    pairs = [(name, piece, saved["model"][name]) for name, piece in run.adapter.parameters().items()]
    for name, pieces in (run.adapter.optimizer_state() or {}).items():
        pairs += [(f"{key} of {name}", piece, saved["optimizer"]["state"][name][key]) for key, piece in pieces.items()]
    assert len(pairs) > 5, "this rank holds no momentum"
    for name, piece, value in pairs:
        # Some implementations leave it to user code to join the tensor-parallel parts.
        is_equal = torch.equal(piece.cut(full_of(value)), piece.tensor)
        assert is_equal, f"{name} is another one in the state dict than on this rank"
    loaded, _ = _split_run(rank)
    loaded.adapter.restore({"model": run.adapter.checkpoint(form="sharded")["model"]}, form="sharded")
    held = loaded.adapter.parameters()
    other = [
        name for name, piece in run.adapter.parameters().items() if not torch.equal(held[name].tensor, piece.tensor)
    ]
    assert not other, f"a sharded state dict gives another model other values of {', '.join(other)}"


@contract("CALLS-3")
@world(4)
@needs(Capability.TENSOR_PARALLEL)
def test_full_frozen_unit_with_tensor_parallelism(rank: Rank) -> None:
    """The full tensor-parallel parameters of a unit that user code has frozen are frozen, and no others."""
    run, _ = _split_run(rank)
    for name, parameter in run.adapter.held_parameters().items():
        parameter.requires_grad_(not name.startswith("low."))
    with run.adapter.summon_full_params(FullParams()) as whole:
        frozen = sorted(name for name, parameter in whole.items() if not parameter.requires_grad)
    assert frozen == ["low.shift", "low.weight"], f"frozen full parameters: {frozen}"


@contract("CALLS-3")
@world(4)
@needs(Capability.TENSOR_PARALLEL)
def test_full_frozen_parameters_with_tensor_parallelism(rank: Rank) -> None:
    """Among full tensor-parallel parameters, exactly those are frozen that user code has frozen."""
    run, _ = _split_run(rank)
    run.adapter.held_parameters()["low.weight"].requires_grad_(False)
    with run.adapter.summon_full_params(FullParams()) as whole:
        frozen = [name for name, parameter in whole.items() if not parameter.requires_grad]
    assert frozen == ["low.weight"], f"frozen full parameters: {frozen}"
