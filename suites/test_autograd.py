"""Chapter AUTOGRAD: backward through whatever a forward returned, used or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.models import optim
from shardproof.harness.parity import Rank, check_exact, exact_difference
from shardproof.harness.plugin.axes import RESHARD


@contract("AUTOGRAD-1")
@world(2, 4)
@needs(Capability.UNUSED_OUTPUT)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_unused_output_keeps_other_gradients(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A forward output that the loss ignores must not stop the other gradients.

    Gradients are zeroed after even steps and forgotten after odd ones: the unused head then has a
    zero gradient with momentum to move it, or none and stands still, as the baseline does.
    """
    pair = rank.pair(
        models.TwoHeads(dim=25),
        units=[["head0"]],
        baseline="replicated",
        reshard_after_forward=reshard_after_forward,
        find_unused=True,
    )
    for step in range(6):
        loss = models.both_heads if step < 3 else models.first_head
        pair.step(rank.batch(step, (2, 25)), loss=loss, set_to_none=step % 2 == 1)
        pair.check()


@contract("AUTOGRAD-2")
@world(2, 4)
@needs(Capability.UNUSED_MODULE)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_unused_module_gets_no_gradient(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """A unit that never ran has no gradient, does not move, and leaves the others alone."""
    pair = rank.pair(
        models.SkippedModule(dim=25),
        units=[["head0"], ["head1"]],
        baseline="replicated",
        reshard_after_forward=reshard_after_forward,
        find_unused=True,
    )
    for step in range(3):
        pair.step(rank.batch(step, (2, 25)))
        pair.check()


@contract("AUTOGRAD-3")
@world(2, 4)
@needs(Capability.CONTAINER_OUTPUT)
@pytest.mark.parametrize(
    "container",
    ["list", "namedtuple", "tuple", "dict", pytest.param("dataclass", marks=needs(Capability.DATACLASS_OUTPUT))],
)
def test_containers_between_units(rank: Rank, container: models.Container) -> None:
    """Hooks find the tensors in any container that passes between units, and keep its type."""
    depth = 3
    pair = rank.pair(
        models.packed_stack(dim=25, container=container, depth=depth),
        units=[[str(index)] for index in range(depth + 2)],
    )
    for step in range(3):
        pair.step(rank.batch(step, (2, 25)))
        pair.check()


@contract("AUTOGRAD-4")
@world(2)
@needs(Capability.POST_ACCUMULATE_GRAD_HOOK)
def test_post_accumulate_hook_runs_once(rank: Rank) -> None:
    """A hook on each parameter runs once in a backward, and sees the ranks' average gradient.

    What it saw must be, bit for bit, what the optimizer's step finds: the same tensor, which the pair compares.
    """
    pair = rank.pair(models.MLP(9), units=[["in_proj"], ["out_proj"]])
    named = pair.adapter.named_parameters()
    seen: dict[str, torch.Tensor] = {}

    def note(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, f"the hook of {name!r} ran before there was a gradient"
        assert parameter.grad.shape == parameter.shape, f"the hook of {name!r} saw a gradient of another layout"
        assert name not in seen, f"the hook of {name!r} ran twice in one backward"
        seen[name] = _local(parameter.grad).clone()

    def compare(*_: Any) -> None:
        assert seen.keys() == named.keys(), "each parameter's hook runs once in one backward"
        for name, parameter in named.items():
            assert parameter.grad is not None
            difference = exact_difference(seen.pop(name), _local(parameter.grad))
            assert difference is None, f"the hook of {name!r} saw another gradient: element, seen, final: {difference}"

    for name, parameter in named.items():
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: note(name, parameter))
    assert pair.adapter.optimizer is not None
    pair.adapter.optimizer.register_step_pre_hook(compare)
    for step in range(3):
        pair.step(rank.batch(step, (2, 9)), set_to_none=step % 2 == 0)
        pair.check()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part; asking a DTensor for more would communicate."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@contract("AUTOGRAD-5")
@world(2)
@needs(Capability.POST_ACCUMULATE_GRAD_HOOK, Capability.ADAM)
def test_optimizer_in_hook_equals_optimizer_after_backward(rank: Rank) -> None:
    """Stepping each parameter in its hook trains the same bits as one step after backward."""
    model = models.Transformer()
    ordinary = rank.run(models.copy_of(model), units=model.units(), optimizer=optim.adamw())
    hooked = rank.run(models.copy_of(model), units=model.units())
    _step_in_hooks(hooked.adapter.named_parameters().values())
    tokens = rank.tokens(0, (2, 8), vocabulary=11)
    for step in range(10):
        pictures = [run.step([(tokens,)], loss=models.mean_square) for run in (ordinary, hooked)]
        check_exact(
            rank, *pictures, step=step, why="the same kernels on the same shards, in another order of parameters"
        )


def _step_in_hooks(parameters: Any) -> None:
    for parameter in parameters:
        optimizer = optim.adamw()([parameter])

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
