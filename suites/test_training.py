"""Chapter TRAINING: a sharded run trains the same model as its baseline."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardproof.harness import Capability, Hardware, contract, models, needs, world
from shardproof.harness.models import optim
from shardproof.harness.parity import Rank
from shardproof.harness.plugin.axes import DELAYED, DELAYS, RESHARD, RESHARD_TO_PARTS


@contract("TRAINING-1")
@world(2, 4, 8)
@pytest.mark.parametrize(
    "shapes",
    [((16, 15), (15, 8)), ((7, 15), (15, 3)), ((16, 17), (17, 8))],
    ids=["16x15-15x8", "7x15-15x3", "16x17-17x8"],
)
def test_single_unit(rank: Rank, shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """One unit with uneven sizes, some smaller than the world, trains as DDP does."""
    pair = rank.pair(models.two_linear(*shapes))
    for step in range(3):
        pair.step(rank.batch(step, (4, shapes[0][0])), set_to_none=step % 2 == 0)
        pair.check()


@contract("TRAINING-2")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.parametrize("delays", DELAYED)
def test_many_units(rank: Rank, delays: tuple[str, ...], reshard_after_forward: bool | int | None) -> None:
    """A transformer of several units trains as DDP does, also when streams run at other speeds."""
    config = models.TransformerConfig(layers=3, vocabulary=61, length=16, heads=4)
    model = models.Transformer(config)
    pair = rank.pair(
        model,
        units=model.units(),
        delays=[DELAYS[name] for name in delays],
        reshard_after_forward=reshard_after_forward,
    )
    # Made in advance: copying them to the device would wait for the step before.
    batches = [rank.tokens(step, (3, config.length), vocabulary=config.vocabulary) for step in range(3)]
    for step, tokens in enumerate(batches):
        pair.step(tokens, set_to_none=step % 2 == 0)
    pair.check()


@contract("TRAINING-2")
@world(8)
@pytest.mark.parametrize("reshard_after_forward", RESHARD_TO_PARTS)
def test_many_units_on_eight_ranks(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """The same on more ranks, where groups of two and of four are both less than all."""
    model = models.Transformer()
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward)
    for step in range(3):
        pair.step(rank.tokens(step, (3, model.config.length), vocabulary=model.config.vocabulary))
        pair.check()


@contract("TRAINING-3")
@world(2, 4)
@needs(Capability.NON_ROOT_FORWARD)
def test_unit_called_directly(rank: Rank) -> None:
    """Training one unit by calling it alone reduces its gradients and leaves the others without."""
    model = models.Tower(dim=33)
    pair = rank.pair(model, units=model.units(), baseline="replicated", find_unused=True)
    for step, submodule in enumerate(["", "layers.0", "", "layers.0"]):
        pair.step(rank.batch(step, (8, 33)), submodule=submodule)
        pair.check()


@contract("TRAINING-4")
@world(2, 4)
@needs(Capability.MULTIPLE_FORWARD)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_unit_called_twice(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A unit that runs twice in a forward sums both contributions and is reduced with both."""
    pair = rank.pair(models.ReusedInner(dim=5), units=[["inner"]], reshard_after_forward=reshard_after_forward)
    for step in range(3):
        pair.step(rank.batch(step, (32, 5)))
        pair.check()


@contract("TRAINING-5")
@world(2)
@needs(Capability.CAST_AFTER_INIT)
def test_cast_after_sharding(rank: Rank) -> None:
    """A model cast to float64 once it is sharded trains in float64: parameters, gradients and losses."""
    pair = rank.pair(models.MLP(5), units=[["in_proj"], ["out_proj"]], baseline="replicated", cast=torch.float64)
    for step in range(3):
        pair.step(rank.batch(step, (2, 5)).double(), set_to_none=step % 2 == 0)
        pair.check()


@contract("TRAINING-6")
@world(2, 4)
@needs(Capability.ADAM)
def test_first_step_of_adam(rank: Rank) -> None:
    """Adam's state starts at step one on every shard: its first update is the baseline's."""
    model = models.Tower(dim=17)
    pair = rank.pair(model, units=model.units(), optimizer=optim.adamw())
    pair.step(rank.batch(0, (8, 17)))
    pair.check()


@contract("TRAINING-7")
@world(2, 4)
@needs(Capability.GROUPED_UNIT)
def test_unit_of_several_modules(rank: Rank) -> None:
    """Modules that share a unit are gathered once, together, and train as DDP does."""
    pair = rank.pair(models.Tower(dim=9), units=[["layers.0", "layers.1"], ["layers.2"]])
    for step in range(3):
        pair.step(rank.batch(step, (4, 9)))
        pair.check()


@contract("TRAINING-8")
@world(2, 4)
@needs(Capability.FORWARD_METHOD)
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_other_forward_methods(rank: Rank, reshard_after_forward: bool | None) -> None:
    """A registered method, called by a parent instead of forward, gathers, frees and trains as forward does."""
    pair = rank.pair(
        models.TwoStage(dim=9), units=[["encoder"], ["projector"]], reshard_after_forward=reshard_after_forward
    )
    pair.adapter.register_forward_method("encoder", "features")
    for step in range(3):
        pair.step(rank.batch(step, (4, 9)))
        pair.check()


@contract("TRAINING-9")
@world(2)
@needs(Capability.INPUTS_TO_DEVICE, Hardware.ACCELERATOR)
def test_inputs_move_to_device(rank: Rank) -> None:
    """Tensors on the CPU, alone or in a tuple, reach the root's forward on the device."""
    seen: list[torch.device] = []

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            seen.extend(tensor.device for tensor in (x, *pair))
            return x + pair[0] * pair[1]

    run = rank.run(Inner())
    inputs = [rank.batch(step, (2, 3)).cpu() for step in range(3)]
    output = run.adapter.forward(inputs[0], (inputs[1], inputs[2]))
    assert seen == [rank.device] * 3
    assert torch.equal(output.cpu(), inputs[0] + inputs[1] * inputs[2])


@contract("TRAINING-9")
@world(2)
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_root_without_inputs(rank: Rank, reshard_after_forward: bool | None) -> None:
    """A root whose forward takes nothing trains as any other."""
    pair = rank.pair(models.NoInputs(dim=5), baseline="replicated", reshard_after_forward=reshard_after_forward)
    for _ in range(3):
        pair.step(())
        pair.check()


@contract("TRAINING-10")
@world(2, 4)
@needs(Capability.POST_OPTIM_EVENT, Hardware.STREAMS)
def test_gathers_wait_for_the_step(rank: Rank) -> None:
    """Gathers that wait for an event after the optimizer's step, instead of its stream, still see the new values."""
    model = models.Transformer()
    pair = rank.pair(model, units=model.units(), delays=[DELAYS["before-step"]])
    optimizer = pair.adapter.optimizer
    assert optimizer is not None
    streams = torch.get_device_module(rank.device)
    optimizer.register_step_post_hook(lambda *_: pair.adapter.after_step(streams.current_stream().record_event()))
    batches = [rank.tokens(step, (2, 8), vocabulary=11) for step in range(3)]
    for tokens in batches:
        pair.step(tokens)
    pair.check()
