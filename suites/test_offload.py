"""Chapter OFFLOAD: shards, gradients and the optimizer on the CPU."""

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from shardproof.testing import Capability, Hardware, Rank, contract, models, needs, world
from shardproof.testing.axes import DELAYED, DELAYS, RESHARD
from shardproof.testing.compare import local_of, step_label
from shardproof.testing.make import pair_by_units, run_by_units, tower
from shardproof.testing.measure import memory
from shardproof.testing.train import batches, optim, shapes, tokens, train_and_check

WIDTH = 512

PINNED = pytest.param("pinned", marks=needs(Hardware.ACCELERATOR))
KINDS = pytest.mark.parametrize("offload", [pytest.param("pageable", marks=needs(Capability.PAGEABLE_OFFLOAD)), PINNED])

pytestmark = [needs(Capability.OFFLOAD), world(2, 4)]


@contract("OFFLOAD-1")
@KINDS
@pytest.mark.parametrize("delays", DELAYED)
def test_offloaded(rank: Rank, delays: tuple[str, ...], offload: str) -> None:
    """Shards that live on the CPU train as DDP does, also when streams run at other speeds."""
    config = models.TransformerConfig(layers=3, vocabulary=61, length=16, heads=4)
    pair = pair_by_units(rank, models.Transformer(config), delays=[DELAYS[name] for name in delays], offload=offload)
    batches = [rank.tokens(step, (3, config.length), vocabulary=config.vocabulary) for step in range(3)]
    for step, batch in enumerate(batches):
        pair.step(batch, set_to_none=step % 2 == 0)
    pair.check()


@contract("OFFLOAD-1")
@needs(Capability.ADAM)
@KINDS
def test_adam_of_offloaded_shards(rank: Rank, offload: str) -> None:
    """Adam steps shards that live on the CPU as it does those of DDP, and its state lives with them."""
    pair = rank.pair(models.MLP(5), units=[["in_proj"], ["out_proj"]], offload=offload, optimizer=optim.adam())
    train_and_check(pair, batches(rank, 1, (2, 5)))
    optimizer = pair.adapter.optimizer
    if optimizer is not None:
        held = pair.adapter.held_parameters()
        state = {name: optimizer.state[value].get("exp_avg") for name, value in held.items()}
        _assert_on_cpu("first moment of", state, is_pinned=None)


@contract("OFFLOAD-1")
@needs(Capability.TIED_PARAMETERS)
@KINDS
def test_offloaded_tied_parameters(rank: Rank, offload: str) -> None:
    """An offloaded tied embedding trains as DDP does, with gradients of several microbatches."""
    config = models.TransformerConfig(vocabulary=61, is_tied=True)
    pair = pair_by_units(rank, models.Transformer(config), offload=offload, microbatches=2)
    steps = tokens(rank, 3, (3, config.length), vocabulary=config.vocabulary, microbatches=2)
    train_and_check(pair, steps, set_to_none="even")


@contract("OFFLOAD-2")
@pytest.mark.parametrize(
    "offload", [pytest.param("pageable", marks=needs(Capability.PAGEABLE_OFFLOAD, Capability.OFFLOAD_CHOICE)), PINNED]
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_memory_of_shards(rank: Rank, microbatches: int, offload: str) -> None:
    """Between steps parameters, gradients and optimizer state are on the CPU, pinned exactly if that is configured."""
    run = run_by_units(rank, models.Tower(dim=9), offload=offload, optimizer=optim.sgd(), microbatches=microbatches)
    is_pinned = offload == "pinned"
    for step in range(2):
        for number in range(microbatches):
            run.forward_backward((rank.batch(step, (4, 9), microbatch=number),), loss=models.mean_square)
        parameters = run.adapter.held_parameters()
        _assert_on_cpu("parameter", parameters, is_pinned=is_pinned)
        _assert_on_cpu("gradient of", {name: value.grad for name, value in parameters.items()}, is_pinned=is_pinned)
        run.adapter.step()
        optimizer = run.adapter.optimizer
        if optimizer is not None:
            state = {name: optimizer.state[value].get("momentum_buffer") for name, value in parameters.items()}
            # Whether the optimizer's own state is pinned is the optimizer's matter.
            _assert_on_cpu("momentum of", state, is_pinned=None)
        run.adapter.zero_grad(set_to_none=step == 1)


@contract("OFFLOAD-2")
@needs(Capability.REGISTERED_STATE, Capability.RESHARD_AFTER_FORWARD)
@KINDS
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_offloaded_units_after_forward(rank: Rank, reshard_after_forward: bool | int | None, offload: str) -> None:
    """After forward, units are gathered or freed as without offloading; after backward they are on the CPU again."""
    model = models.Tower(dim=8)
    options: Any = {"units": model.units(), "reshard_after_forward": reshard_after_forward}
    run, plain = rank.run(models.copy_of(model), offload=offload, **options), rank.run(model, **options)
    for step in range(2):
        losses = [models.mean_square(one.adapter.forward(rank.batch(step, (4, 8)))) for one in (run, plain)]
        found, expected = run.adapter.gathered(), plain.adapter.gathered()
        wrong = [name for name in expected if found[name] != expected[name]]
        assert not wrong, f"after the forward of {step_label(step)} these are gathered with or without: {wrong}"
        for one, loss in zip((run, plain), losses, strict=True):
            one.adapter.backward(loss)
        after = [name for name, is_gathered in run.adapter.gathered().items() if is_gathered]
        assert not after, f"after the backward of {step_label(step)} these are gathered: {after}"
        _assert_on_cpu("parameter", run.adapter.named_parameters(), is_pinned=None)


@contract("OFFLOAD-2")
@needs(Hardware.ACCELERATOR)
@KINDS
def test_device_holds_nothing_between_steps(rank: Rank, offload: str) -> None:
    """Between steps the device holds no parameter, gradient or optimizer state."""
    model = shapes.EqualLayers(WIDTH, depth=3)
    # The first backward on a device allocates workspaces that stay, however it is offloaded.
    copied = models.copy_of(model).to(rank.device)
    models.mean_square(copied(rank.batch(0, (1, WIDTH)))).backward()
    del copied

    before = memory.held_bytes(rank.device)
    run = rank.run(model, units=model.units(), offload=offload, optimizer=optim.sgd(), pictures=False)
    for step in range(3):
        run.step([(rank.batch(step, (1, WIDTH)),)], loss=models.mean_square, set_to_none=step == 1)
        held = memory.held_bytes(rank.device) - before
        # The step's output and loss are small; a rank's share of one layer is not.
        share = 4 * WIDTH * WIDTH // rank.world_size
        assert held < share // 2, f"after {step_label(step)} the device holds {held} bytes; a layer's shard has {share}"


@contract("OFFLOAD-3")
@needs(Capability.OFFLOAD_CHOICE)
def test_memory_that_cannot_be_pinned(rank: Rank) -> None:
    """If pinned memory is chosen and there is no accelerator, sharding raises."""
    model = models.Tower(dim=9)
    refused = pytest.raises(RuntimeError, match=r"accelerator|CUDA|NVIDIA driver|pin")
    with contextlib.nullcontext() if torch.accelerator.is_available() else refused:
        rank.run(model, units=model.units(), offload="pinned")


@contract("OFFLOAD-2")
@needs(Capability.POST_ACCUMULATE_GRAD_HOOK)
@KINDS
def test_hooks_find_gradients_on_the_cpu(rank: Rank, offload: str) -> None:
    """A hook on a parameter runs once in a backward and sees there, on the CPU, the gradient that the step uses."""
    pair = tower(rank, offload=offload)
    seen: dict[str, list[torch.Tensor]] = {}

    def note(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, f"the hook of {name!r} ran before there was a gradient"
        _assert_on_cpu("gradient of", {name: parameter.grad}, is_pinned=None)
        seen[name].append(local_of(parameter.grad).clone())

    for name, parameter in pair.adapter.named_parameters().items():
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: note(name, parameter))

    def compare(*_: object) -> None:
        for name, parameter in pair.adapter.named_parameters().items():
            times = len(seen[name])
            assert parameter.grad is not None and times == 1, f"the hook of {name!r} ran {times} times"
            assert torch.equal(seen[name][0], local_of(parameter.grad)), f"the hook of {name!r} saw another gradient"

    assert pair.adapter.optimizer is not None
    pair.adapter.optimizer.register_step_pre_hook(compare)
    for step in range(2):
        seen.update({name: [] for name in pair.adapter.named_parameters()})
        pair.checked_step(rank.batch(step, (4, 9)))


def _assert_on_cpu(what: str, tensors: Mapping[str, torch.Tensor | None], *, is_pinned: bool | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None or not (local := local_of(tensor)).numel():
            continue
        assert local.device.type == "cpu", f"{what} {name} is on {local.device}"
        if is_pinned is not None and torch.accelerator.is_available():
            assert local.is_pinned() == is_pinned, f"{what} {name}: is_pinned() is {local.is_pinned()}"
