"""Chapter SHARDING: an optimizer that gives each rank whole parameters to step, as cases call it themselves."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from shardproof.testing import Capability, Rank, contract, models, needs, world
from shardproof.testing.compare import check_bits, step_label
from shardproof.testing.make import sharded
from shardproof.testing.refuse import Refusal
from shardproof.testing.train import optim, shapes

pytestmark = [needs(Capability.ZERO_API), world(2, 4)]


class Scaled(torch.optim.AdamW):
    """AdamW whose step takes a factor for the gradients, and a closure as the optimizers of torch do."""

    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        super().step()
        return loss


@dataclasses.dataclass(frozen=True)
class Use:
    """A way to make the optimizer and to step it.

    Attributes:
        given: the parameters of a model, in what holds them.
        options: further arguments of the optimizer.
        scale: an argument of each step; None for a step without it.
        closes: whether the step gets a closure, which computes the gradients.
        is_part: whether only two of the ranks, or one of two, share the parameters.
        prepare: changes the model first.
        adds: whether the parameters of ``out`` are a group that is added after the first step.
        renews: whether another optimizer goes on after the first step, with the states of the first one.
        schedules: whether the rate is halved after each step.
    """

    given: Callable[[nn.Module], Any] = nn.Module.parameters
    options: tuple[tuple[str, Any], ...] = ()
    scale: float | None = None
    closes: bool = False
    is_part: bool = False
    prepare: Callable[[nn.Module], Any] = nn.Module.train
    adds: bool = False
    renews: bool = False
    schedules: bool = False


def in_groups(model: nn.Module, holder: Callable[[Any], Any] = list) -> list[dict[str, Any]]:
    """The layers of a :class:`models.Tower` with a rate of their own, and the rest with a decay."""
    layers, rest = (model.get_submodule(name).parameters() for name in ("layers", "out"))
    return [{"params": holder(layers), "lr": 0.5}, {"params": holder(rest), "weight_decay": 0.25}]


def of_layers(model: nn.Module) -> Any:
    """All parameters of a :class:`models.Tower` but those of ``out``."""
    return model.get_submodule("layers").parameters()


def freeze_one(model: nn.Module) -> None:
    """Freeze the largest parameter of a :class:`models.Tower`."""
    max(model.parameters(), key=torch.Tensor.numel).requires_grad_(False)


BUCKETS = (("parameters_as_bucket_view", True),)
USES = {
    "iterator": Use(),
    "list": Use(lambda model: [*model.parameters()]),
    "groups": Use(in_groups),
    "groups-of-iterators": Use(functools.partial(in_groups, holder=iter)),
    "buckets": Use(options=BUCKETS),
    "groups-in-buckets": Use(in_groups, BUCKETS),
    "closure": Use(closes=True),
    "argument": Use(scale=0.5),
    "closure-and-argument": Use(closes=True, scale=0.5, options=BUCKETS),
    "part": Use(is_part=True),
    "part-in-buckets": Use(is_part=True, options=BUCKETS),
    "added": Use(of_layers, adds=True),
    "added-in-buckets": Use(of_layers, BUCKETS, adds=True),
    "renewed": Use(in_groups, renews=True),
    "renewed-in-buckets": Use(in_groups, BUCKETS, renews=True),
    "scheduled": Use(in_groups, schedules=True),
    "frozen": Use(prepare=freeze_one),
    "frozen-in-buckets": Use(prepare=freeze_one, options=BUCKETS),
    "columns": Use(prepare=shapes.by_columns),
}


@contract("SHARDING-6")
@pytest.mark.parametrize("use", USES)
def test_uses(rank: Rank, use: str) -> None:
    """Three steps leave the parameters and the states that an ordinary optimizer leaves, on every rank."""
    how, model = USES[use], models.Tower(dim=9, depth=2).to(rank.device)
    half = rank.world_size // 2
    group = rank.mesh((2, half), ("copy", "dp"))["dp"].get_group() if how.is_part else dist.group.WORLD
    how.prepare(model)
    zero, ordinary = (wrapped(models.copy_of(model), group) for _ in range(2))
    zero_optimizer = type(adapter_of(rank)).zero_optimizer
    places = [one.data_ptr() for one in zero.parameters()]

    def make() -> list[Any]:
        made = zero_optimizer(how.given(zero.module), Scaled, process_group=group, lr=0.125, **dict(how.options))
        return [made, Scaled(how.given(ordinary.module), lr=0.125)]

    optimizers = make()
    given = {} if how.scale is None else {"scale": how.scale}
    for step in range(3):
        losses = []
        for one, optimizer in zip((zero, ordinary), optimizers, strict=True):
            compute = functools.partial(backward, one, optimizer, rank.batch(step, (4, 9)))
            if how.closes:
                losses.append(optimizer.step(compute, **given))
            else:
                compute()
                losses.append(optimizer.step(**given))
        compare(zero, ordinary, step_label(step))
        if how.closes:
            assert losses[0] is not None, "the step returns nothing, where the closure has returned the loss"
            check_bits(f"loss of {step_label(step)}", losses[0], losses[1])
        if how.renews and step == 0:
            saved, optimizers = [everywhere(optimizers[0], group), optimizers[1].state_dict()], make()
            for optimizer, state in zip(optimizers, saved, strict=True):
                optimizer.load_state_dict(state)
        for one, optimizer in zip((zero, ordinary), optimizers, strict=True):
            if how.adds and step == 0:
                optimizer.add_param_group({"params": one.module.out.parameters(), "lr": 0.25})
            for options in optimizer.param_groups if how.schedules else ():
                options["lr"] /= 2
    blocks = {one.untyped_storage().data_ptr() for one in zero.parameters() if one.requires_grad}
    if how.options == BUCKETS:
        ranks = dist.get_world_size(group)
        assert len(blocks) <= ranks, f"parameters lie in {len(blocks)} blocks of memory instead of {ranks} buckets"
    else:
        assert places == [one.data_ptr() for one in zero.parameters()], "the data of parameters have moved"
    optimizers[0].consolidate_state_dict(to=dist.get_world_size(group) - 1)
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        found, expected = (one.state_dict() for one in optimizers)
        assert found["state"].keys() == expected["state"].keys(), f"there are states of {sorted(found['state'])}"
        for number, state in expected["state"].items():
            for key, value in state.items():
                check_bits(f"{key} of parameter {number}", found["state"][number][key], value)
        for one, other in zip(found["param_groups"], expected["param_groups"], strict=True):
            assert one == other, f"a group has the options {one} instead of {other}"


def everywhere(optimizer: Any, group: Any) -> dict[str, Any]:
    """The state dict of an optimizer on every rank of the group (collective)."""
    state: dict[str, Any] = {}
    for target in range(dist.get_world_size(group)):
        optimizer.consolidate_state_dict(to=target)
        if dist.get_rank(group) == target:
            state = copy.deepcopy(optimizer.state_dict())
    return state


class Received(Joinable, JoinHook):
    """Gives the gradients of the last rank to ranks that have ended, while others go on.

    Args:
        model: a replica.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters = [*model.parameters()]

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook, which is this object."""
        return self

    def main_hook(self) -> None:
        """Take part in :meth:`share`."""
        self.share()

    def share(self) -> None:
        """Send the last rank's gradients to all ranks (collective)."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.broadcast(parameter.grad, src=dist.get_world_size() - 1)

    @property
    def join_device(self) -> torch.device:
        """The device of the parameters."""
        return self._parameters[0].device

    @property
    def join_process_group(self) -> Any:
        """All ranks."""
        return dist.group.WORLD


@contract("SHARDING-6")
@pytest.mark.parametrize("shares", [True, False], ids=["gradients-shared", "gradients-not-shared"])
@pytest.mark.parametrize("buckets", [False, True])
def test_unequal_inputs(rank: Rank, buckets: bool, shares: bool) -> None:
    """Ranks that have ended step their parameters with the gradients of those that go on, shared by user code or not.

    The last rank has most inputs, so that an ordinary optimizer makes all steps there.
    """
    model = models.Tower(dim=9, depth=2).to(rank.device)
    zero, ordinary = (wrapped(copy.deepcopy(model), dist.group.WORLD) for _ in range(2))
    make = type(adapter_of(rank)).zero_optimizer
    optimizer: Any = make(zero.parameters(), torch.optim.AdamW, lr=0.125, parameters_as_bucket_view=buckets)
    received = Received(zero)
    runs: list[tuple[nn.Module, torch.optim.Optimizer, list[Any]]] = [
        (zero, optimizer, [zero, *([received] if shares else []), optimizer]),
        (ordinary, torch.optim.AdamW(ordinary.parameters(), lr=0.125), [ordinary]),
    ]
    for one, stepping, joined in runs:
        with Join(joined):
            for step in range(1 + rank.index):
                stepping.zero_grad(set_to_none=False)
                models.mean_square(one(rank.batch(step, (4, 9)))).backward()
                if one is zero and shares:
                    received.share()
                stepping.step()
    compare(zero, ordinary, "the last step")


@contract("SHARDING-6")
def test_the_largest_parameters_are_given_first(rank: Rank) -> None:
    """Of parameters that grow, the largest of which has most elements, one rank steps that one and no other."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.ones(size)) for size in (1, 2, 3, 4, 5, 6, 100))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x.sum() * part.sum() for part in self.parts]).sum()

    run = rank.run(Growing(), optimizer=optim.sgd())
    run.forward_backward((rank.batch(0, (4, 9)),), loss=torch.sum)
    run.adapter.step()
    mine = sum(state["momentum_buffer"].tensor.numel() for state in (run.adapter.optimizer_state() or {}).values())
    held = sorted(rank.exchange(mine))
    assert held[-1] == 100, f"the ranks step {held} elements; the largest parameter has 100, and all others 21"
    assert held[-2] <= 21 // (rank.world_size - 1) + 6, f"the ranks step {held} elements, which could be more equal"


REFUSED: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "two-dtypes": (lambda: [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).bfloat16())], ("type",)),
    "none": (list, ("empty",)),
    "one-tensor": (lambda: nn.Parameter(torch.ones(2)), ("iterable",)),
}


@contract("SHARDING-6")
@world(2)
@pytest.mark.parametrize("what", REFUSED)
def test_parameters_that_cannot_be(rank: Rank, what: str) -> None:
    """Parameters of two dtypes, no parameters and a single tensor are refused."""
    made, words = REFUSED[what]
    make = type(adapter_of(rank)).zero_optimizer
    Refusal(rank, lambda: make(made(), torch.optim.SGD, lr=0.1)).check_names(*words)


@contract("SHARDING-6")
@world(2)
def test_states_that_are_elsewhere(rank: Rank) -> None:
    """A rank to which the states were not brought refuses to show them; the last one to which they were has them."""
    model = wrapped(models.Tower(dim=9).to(rank.device), dist.group.WORLD)
    optimizer: Any = type(adapter_of(rank)).zero_optimizer(model.parameters(), torch.optim.AdamW)
    Refusal(rank, optimizer.state_dict).check_names("consolidate")
    models.mean_square(model(rank.batch(0, (4, 9)))).backward()
    optimizer.step()
    for target in (0, 1):
        optimizer.consolidate_state_dict(to=target)
        text = ""
        try:
            assert optimizer.state_dict()["state"], "there is no state"
        except RuntimeError as error:
            text = str(error)
        everyone = rank.exchange("consolidate" in text)
        assert everyone == [target == 1, target == 0], f"brought to rank {target}, refused by each rank: {everyone}"


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    """Compute gradients anew, and return the loss."""
    optimizer.zero_grad()
    loss: torch.Tensor = models.mean_square(model(batch))
    loss.backward()
    return loss


def wrapped(model: nn.Module, group: Any) -> DistributedDataParallel:
    """A replica whose gradients are averaged over a group."""
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def adapter_of(rank: Rank) -> Any:
    """An adapter of a model that the case does not use; making it lets the harness watch the implementation."""
    return sharded(rank, models.MLP(5).to(rank.device))


def compare(zero: nn.Module, ordinary: nn.Module, when: str) -> None:
    """Check that two replicas have the same bits: the same kernels on the same numbers."""
    for (name, found), expected in zip(zero.named_parameters(), ordinary.parameters(), strict=True):
        check_bits(f"{name} after {when}", found.detach(), expected.detach())
