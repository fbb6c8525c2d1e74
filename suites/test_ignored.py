"""Chapter IGNORED: parameters that are not sharded."""

import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.suites.apis import fsdp1
from shardproof.testing import Capability, Rank, contract, models, needs, world
from shardproof.testing.axes import RESHARD
from shardproof.testing.casts import check_equal, run_and_replica
from shardproof.testing.compare import step_label
from shardproof.testing.make import Precision, tower
from shardproof.testing.measure import private
from shardproof.testing.refuse import Refusal
from shardproof.testing.train import batches, mixed, optim, shapes, train_and_check

pytestmark = world(2)

SHAPE = (6, 4)
IGNORED = {"of-a-unit": ("low.shift",), "of-the-root": ("gain",), "a-whole-unit": ("high.weight", "high.shift")}


@contract("IGNORED-1")
@needs("ignored_params")
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.parametrize("ignored", IGNORED)
def test_ignored_parameters(rank: Rank, ignored: str, reshard_after_forward: bool | int | None) -> None:
    """An ignored parameter is the same object, full on every rank, and its gradient is the rank's own."""
    names = IGNORED[ignored]
    model = mixed.Mixed().to(rank.device)
    objects: dict[str, nn.Parameter] = {name: model.get_parameter(name) for name in names}
    options: dict[str, Any] = {"ignored_params": names, "reshard_after_forward": reshard_after_forward}
    run, replica = run_and_replica(rank, model, units=[["low"], ["high"]], optimizer=optim.sgd(), **options)
    for step in range(3):
        batch = [(rank.batch(step, SHAPE),)]
        expected = replica.step(batch, loss=torch.sum)
        check_equal(rank, run, run.step(batch, loss=torch.sum), expected, number=step)
        found = run.adapter.named_parameters()
        replaced = [name for name in names if found[name] is not objects[name]]
        assert not replaced, f"after {step_label(step)} another parameter is registered as {', '.join(replaced)}"
    other = [str(item) for item in run.trace if item.kind in ("all_gather", "reduce_scatter") and not item.unit]
    assert not other, f"the sizes of these collectives are those of no unit without its ignored parameters: {other}"


@contract("IGNORED-1")
@needs("ignored_params", Capability.SHARDED)
def test_ignored_next_to_another(rank: Rank) -> None:
    """If one parameter of a module is ignored, the other is sharded, also if the module has no buffers."""
    model = models.Tower(dim=9)
    numels = {name: value.numel() for name, value in model.named_parameters()}
    run = rank.run(model, units=model.units(), ignored_params=("layers.1.in_proj.bias",))
    held = {name: piece.tensor.numel() for name, piece in run.adapter.parameters().items()}
    assert held.pop("layers.1.in_proj.bias") == numels.pop("layers.1.in_proj.bias"), "the ignored parameter is not full"
    everyone = rank.exchange(held)
    wrong = [name for name in numels if sum(one[name] for one in everyone if name in one) != numels[name]]
    assert not wrong, f"the ranks together hold more or less than all of {', '.join(wrong)}"


@contract("IGNORED-1")
@needs(Capability.FSDP1_API)
def test_ignored_modules_as_states(rank: Rank) -> None:
    """Modules that user code ignores as states keep their full parameters on every rank."""
    fsdp = fsdp1(rank)
    layers = fsdp.layers()
    before = [*layers[0].parameters()]
    fsdp.forward(fsdp.wrap(layers, ignored_states=[layers[0]])).sum().backward()
    assert all(map(operator.is_, layers[0].parameters(), before)), "an ignored module has other parameters"
    shapes = [tuple(parameter.shape) for parameter in before]
    assert shapes == [(4, 4), (4,)], f"the ignored parameters have the shapes {shapes}"


def ignoring(name: str) -> dict[str, Any]:
    """Options for a model in which a ``Drawn`` is ignored, and buffers are cast."""
    options: dict[str, Any] = {"ignored_params": (f"{name}.weight", f"{name}.shift"), "ignored_modules": (name,)}
    return options | {"precision": Precision(buffer_dtype=torch.bfloat16)}


@contract("IGNORED-1")
@needs("ignored_modules", Capability.META_DEVICE, "precision.buffer_dtype")
@pytest.mark.parametrize("own_function", [False, True], ids=["reset", "function"])
def test_ignored_module(rank: Rank, own_function: bool) -> None:
    """An ignored module next to one on the meta device is not materialized again, nor are its buffers cast."""
    model = shapes.DrawnStack(dim=9)
    ignored = model.layers[1]
    with torch.no_grad():
        for tensor in ignored.state_dict(keep_vars=True).values():
            tensor.mul_(3)  # other values than the module's initialization
    ignored.to(rank.device)
    before = {name: value.clone() for name, value in [*ignored.named_parameters(), *ignored.named_buffers()]}

    def to_meta(plain: nn.Module) -> nn.Module:
        # The whole unit around the ignored module: FSDP takes no unit that is on the meta device and on a GPU.
        plain.get_submodule("out").to("meta")
        plain.register_parameter("factor", nn.Parameter(plain.get_parameter("factor").to("meta")))
        return plain

    def make(module: nn.Module) -> None:
        if isinstance(module, (shapes.Drawn, shapes.DrawnStack)):
            module.to_empty(device=rank.device, recurse=False)
            module.reset_parameters()

    options: dict[str, Any] = {"prepare": to_meta, "param_init_fn": make if own_function else None}
    run = rank.run(model, units=[["layers.0"], ["layers.2"]], **ignoring("layers.1"), **options)
    run.forward_backward((rank.batch(0, (4, 9)),), loss=models.mean_square)
    dtype = run.original_module("layers.0").get_buffer("gain").dtype
    assert dtype == torch.bfloat16, f"a buffer of a module that is not ignored is of {dtype}"
    for name, value in [*ignored.named_parameters(), *ignored.named_buffers()]:
        assert value.dtype == before[name].dtype, f"{name!r} of the ignored module is of {value.dtype}"
        assert torch.equal(value, before[name]), f"{name!r} of the ignored module has other values"


@contract("IGNORED-1")
@needs("ignored_modules", "precision.buffer_dtype", Capability.TIED_PARAMETERS)
def test_ignored_inside_a_unit(rank: Rank) -> None:
    """Buffers, and a shared parameter, that one unit ignores by its own options are ignored by the root too."""
    model = nn.Sequential(shapes.DrawnStack(dim=9), shapes.DrawnStack(dim=9)).to(rank.device)
    ignored, shared = model.get_submodule("0.layers.1"), model.get_parameter("0.layers.1.weight")
    model.get_submodule("1.out").weight = shared
    before = {name: value.dtype for name, value in ignored.named_buffers()}
    run = rank.run(model, units=[["0"]], ignored_inside=True, **ignoring("0.layers.1"))
    held = run.original_module("1.out").get_parameter("weight")
    assert held is shared and shared.shape == (9, 9), f"the shared parameter is {type(held)} of {tuple(held.shape)}"
    run.forward_backward((rank.batch(0, (4, 9)),), loss=models.mean_square)
    found = {name: value.dtype for name, value in ignored.named_buffers()}
    assert found == before, f"the buffers of the ignored module are of {found}"
    assert shared.grad is not None and shared.grad.shape == (9, 9), "the shared parameter has no gradient"


@contract("IGNORED-2")
@world(2, 4)
@needs("replicated", "ignored_params")
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_replicated_module(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A module that torch's ``replicate`` manages, amid units, keeps full parameters, and all train as DDP does."""
    model = models.Tower(dim=9)
    names = tuple(f"layers.1.{name}" for name, _ in model.layers[1].named_parameters())
    options: dict[str, Any] = {"replicated": ("layers.1",), "reshard_after_forward": reshard_after_forward}
    pair = rank.pair(model, units=[["layers.0"], ["layers.2"]], ignored_params=names, **options)
    train_and_check(pair, batches(rank, 3, (4, 9)))
    parameters = pair.adapter.named_parameters()
    divided = [name for name in names if isinstance(parameters[name], DTensor)]
    assert not divided, f"parameters of the replicated module are DTensors: {', '.join(divided)}"


@contract("IGNORED-2")
@needs("replicated")
@pytest.mark.parametrize("name", ["", "layers.1"], ids=["the-root", "a-unit"])
def test_replicating_a_sharded_module(rank: Rank, name: str) -> None:
    """``replicate`` refuses a module that is sharded already, and the module trains on."""
    pair = tower(rank)
    replicate = private.need("torch.distributed._composable.replicate.replicate")
    Refusal(rank, lambda: replicate(pair.adapter.submodule(name))).check_names("fully_shard")
    pair.checked_step(rank.batch(0, (4, 9)))
