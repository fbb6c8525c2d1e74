"""The tables of transitions of units and of backwards have the rows that trainings take, and no others."""

from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_impl import fully_shard
from fsdp_impl.common import iteration
from fsdp_impl.common.iteration import BACKWARDS, PHASES, Backward, BackwardEvent
from fsdp_impl.per_parameter import unit
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import MLP

DIM = 4


class Calls(nn.Module):
    """A model whose forward is ``forward``, which gets the model and the inputs; each child is a unit."""

    def __init__(self, rank: Rank, forward: Callable[[Any, torch.Tensor], Any], **children: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(DIM))
        self._forward = forward
        for name, child in children.items():
            setattr(self, name, fully_shard(child.to(rank.device), mesh=rank.mesh()))
        fully_shard(self.to(rank.device), mesh=rank.mesh())

    def forward(self, inputs: torch.Tensor) -> Any:
        return self._forward(self, inputs * self.scale)


class Twice(MLP):
    """It calls itself last: its parameters are sharded when the inner call returns."""

    def forward(self, x: torch.Tensor, *, again: bool = True) -> torch.Tensor:
        x = super().forward(x)
        return self(x, again=False) if again else x


class TwoOutputs(MLP):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.in_proj(x)


def inputs_of(rank: Rank) -> torch.Tensor:
    return torch.ones(2, DIM, device=rank.device, requires_grad=True)


def backward(model: Any, rank: Rank) -> None:
    model(inputs_of(rank)).sum().backward()


def chain(model: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model.b(model.a(x))
    return result


def fail(*_: Any) -> None:
    raise ZeroDivisionError


def fails_between(model: Any, x: torch.Tensor) -> torch.Tensor:
    between = model.a(x)
    if between.requires_grad:
        between.register_hook(fail)
    result: torch.Tensor = model.b(between)
    return result


def step_and_evaluation(rank: Rank) -> None:
    model = Calls(rank, chain, a=MLP(DIM), b=MLP(DIM))
    backward(model, rank)
    with torch.no_grad():
        model(inputs_of(rank))


def unit_that_runs_twice(rank: Rank) -> None:
    backward(Calls(rank, lambda model, x: model.a(model.a(x)), a=MLP(DIM)), rank)


def unit_that_calls_itself(rank: Rank) -> None:
    backward(Calls(rank, lambda model, x: model.a(x), a=Twice(DIM)), rank)


def unit_of_two_outputs(rank: Rank) -> None:
    backward(Calls(rank, lambda model, x: torch.cat(model.a(x), -1), a=TwoOutputs(DIM)), rank)


def gradients_within_a_forward(rank: Rank) -> None:
    """Of the first of a unit's modules, before the second runs."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(model.a(x).sum(), x)
        result: torch.Tensor = model.b(model.a(grad))
        return result

    model = Calls(rank, forward)
    model.a, model.b = MLP(DIM).to(rank.device), MLP(DIM).to(rank.device)
    fully_shard([model.a, model.b], mesh=rank.mesh())
    backward(model, rank)


def units_without_use_or_parameters(rank: Rank) -> None:
    backward(Calls(rank, lambda model, x: model.b(x), a=MLP(DIM), b=nn.Tanh(), c=nn.Tanh()), rank)


def recomputation(rank: Rank) -> None:
    """Each unit by itself, of which one runs twice, re-entrant and not."""
    for reentrant in (True, False):

        def forward(model: Any, x: torch.Tensor, reentrant: bool = reentrant) -> torch.Tensor:
            for child in (model.a, model.b, model.a):
                x = checkpoint(child, x, use_reentrant=reentrant)
            return x

        backward(Calls(rank, forward, a=MLP(DIM), b=MLP(DIM)), rank)


def recomputation_that_stops_early(rank: Rank) -> None:
    """It stops within ``b``, for which no backward comes: the end of backward passes it, or, by hand, leaves it."""

    def span(model: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model.a(x)
        model.b(x)
        return result

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(span, model, x, use_reentrant=False)
        return result

    model: Any = Calls(rank, forward, a=MLP(DIM), b=MLP(DIM))
    for by_hand in (False, True):
        model.set_manual_backward_finalization(by_hand)
        backward(model, rank)
    model.finalize_backward()


def exceptions(rank: Rank) -> None:
    """In forward, left behind by a reset or, after a change, by the next forward; in backward, by a reset."""
    model: Any = Calls(rank, lambda model, x: fail(model.a(x)), a=MLP(DIM))
    for _ in range(2):
        for param in model.parameters():
            param.data.mul_(0.5)
        with pytest.raises(ZeroDivisionError):
            model(inputs_of(rank))
    model.reset_iter_state()
    for by_hand in (False, True):
        model = Calls(rank, fails_between, a=MLP(DIM), b=MLP(DIM))
        model.set_manual_backward_finalization(by_hand)
        with pytest.raises(ZeroDivisionError):
            backward(model, rank)
        for _ in range(2):  # of which the second finds nothing
            model.reset_iter_state()


def reset_in_a_hook(rank: Rank) -> None:
    """The end of that backward then has no backward to end."""
    model: Any = Calls(rank, chain, a=MLP(DIM), b=MLP(DIM))
    inputs = inputs_of(rank)
    inputs.register_hook(lambda _: model.reset_iter_state())
    model(inputs).sum().backward()
    backward(model, rank)


def backwards_before_the_last(rank: Rank) -> None:
    model: Any = Calls(rank, chain, a=MLP(DIM), b=MLP(DIM))
    for is_last in (False, False, True, False):
        model.set_is_last_backward(is_last)
        backward(model, rank)
    model.reset_iter_state()


def finalization_by_hand(rank: Rank) -> None:
    model: Any = Calls(rank, chain, a=MLP(DIM), b=MLP(DIM))
    model.set_manual_backward_finalization(True)
    for _ in range(2):
        backward(model, rank)
    model.finalize_backward()
    model.finalize_backward()  # of nothing
    backward(model, rank)
    model.reset_iter_state()
    backward(model, rank)
    model.finalize_backward(async_op=True)
    model.reset_iter_state()


def backward_while_reducing(rank: Rank) -> None:
    """The handle is waited for after that backward or within it; or that backward raises, and all is reset."""
    model: Any = Calls(rank, chain, a=MLP(DIM), b=MLP(DIM))
    model.set_manual_backward_finalization(True)
    for waits_within in (False, True):
        first, second = (model(inputs_of(rank)) for _ in range(2))
        first.sum().backward()
        handle = model.finalize_backward(async_op=True)
        if waits_within:
            second.register_hook(lambda _, handle=handle: handle.wait())
        second.sum().backward()
        handle.wait()
        model.finalize_backward()
    first, second = (model(inputs_of(rank)) for _ in range(2))
    second.register_hook(fail)
    first.sum().backward()
    model.finalize_backward(async_op=True)
    with pytest.raises(ZeroDivisionError):
        second.sum().backward()
    model.reset_iter_state()


TRAININGS = [
    step_and_evaluation, unit_that_runs_twice, unit_that_calls_itself, unit_of_two_outputs, gradients_within_a_forward,
    units_without_use_or_parameters, recomputation, recomputation_that_stops_early, exceptions,
    reset_in_a_hook, backwards_before_the_last, finalization_by_hand, backward_while_reducing,
]  # fmt: skip


class Watched(dict[Any, Any]):
    """A table that notes which rows are looked up."""

    def __init__(self, table: Any) -> None:
        super().__init__(table)
        self.taken: set[tuple[Enum, Enum]] = set()

    def get(self, row: Any, default: Any = None) -> Any:
        self.taken.add(row)
        return super().get(row, default)


@world(1)
def test_trainings_take_every_row(rank: Rank) -> None:
    """And no others: a row that is not there is an error of the training that asks for it."""
    phases, backwards = Watched(PHASES), Watched(BACKWARDS)
    rank.monkeypatch.setattr(unit, "PHASES", phases)
    rank.monkeypatch.setattr(iteration, "BACKWARDS", backwards)
    for training in TRAININGS:
        training(rank)
    for table in (phases, backwards):
        unused = [f"{event.name} in the state {state.name}" for state, event in set(table) - table.taken]
        assert not unused, f"rows that no training takes: {sorted(unused)}"
        assert table.taken == set(table)


def test_an_event_without_a_row_is_named_with_its_state() -> None:
    with pytest.raises(AssertionError, match=r"^WAITED in the state OPEN$"):
        iteration.after(BACKWARDS, Backward.OPEN, BackwardEvent.WAITED)
