"""Gradient accumulation: the setters, the collectives that they save, and sums in the reduce dtype."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_impl import MixedPrecisionPolicy, fully_shard
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import (
    ALL_REDUCE,
    GATHER,
    REDUCE,
    assert_same,
    average_gradients,
    batch,
    counts,
    plain_copy,
    tower,
)

DIM, MLPS, MICROBATCHES = 5, 3, 3


def combinations() -> list[Any]:
    found = []
    for hybrid in (False, True):
        for raf in (None, True, False):
            for mode in ("all", "root_only", "some"):
                for rab in (True, False):
                    for scatter_only in (False, True):
                        if not rab and (raf is not False or mode == "some"):
                            continue
                        if scatter_only and not hybrid:
                            continue
                        found.append((hybrid, raf, mode, rab, scatter_only))
    return found


def configure(model: Any, *, mode: str, last: bool, rab: bool, scatter_only: bool) -> None:
    targets, recurse = {"all": ([model], True), "root_only": ([model], False), "some": (list(model[1:3]), True)}[mode]
    for target in targets:
        setter = target.set_requires_all_reduce if scatter_only else target.set_requires_gradient_sync
        setter(last, recurse=recurse)
        if not rab:
            target.set_reshard_after_backward(last, recurse=recurse)


def expected_counts(hybrid: bool, raf: Any, mode: str, rab: bool, scatter_only: bool) -> dict[str, int]:
    units, extra = MLPS + 1, MICROBATCHES - 1
    reduces = units + {"all": 0, "root_only": MLPS * extra, "some": (MLPS - 2 + 1) * extra}[mode]
    gathers = {True: 2 * units, None: 2 * units - 1, False: units}[raf] * MICROBATCHES
    if raf is False and not rab:
        gathers = units if mode == "all" else units + MLPS * extra
    found = {GATHER: gathers, REDUCE: units * MICROBATCHES if scatter_only else reduces}
    return {**found, ALL_REDUCE: reduces} if hybrid else found


def check(rank: Rank, mesh: Any, case: tuple[Any, ...], *, steps: int = 2) -> None:
    _, raf, mode, rab, scatter_only = case
    model = tower(DIM, MLPS)
    plain = plain_copy(model)
    for layer in model[1:]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=raf)
    fully_shard(model, mesh=mesh, reshard_after_forward=raf)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    for step in range(steps):
        found: Counter[str] = Counter()
        for microbatch in range(MICROBATCHES):
            last = microbatch == MICROBATCHES - 1
            configure(model, mode=mode, last=last, rab=rab, scatter_only=scatter_only)
            inputs = batch(rank, step * MICROBATCHES + microbatch, (2, DIM))
            found.update(counts(lambda inputs=inputs: model(inputs).square().sum().backward()))
            plain(inputs).square().sum().backward()
        assert dict(found) == expected_counts(*case)
        average_gradients(plain)
        assert_same(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 1)


SETTINGS = "trains with every combination of the settings of resharding and synchronisation"


@pytest.mark.slow(SETTINGS)
@world(2)
@pytest.mark.parametrize("mode", ["all", "root_only", "some"])
def test_counts_and_gradients(rank: Rank, mode: str) -> None:
    for case in combinations():
        if not case[0] and case[2] == mode:
            check(rank, rank.mesh(), case)


@pytest.mark.slow(SETTINGS)
@world(4)
@pytest.mark.parametrize("mode", ["all", "root_only", "some"])
def test_counts_and_gradients_of_replicas(rank: Rank, mode: str) -> None:
    for case in combinations():
        if case[0] and case[2] == mode:
            # The second step, onto gradients that exist, is one dimension's business.
            check(rank, rank.mesh((2, 2), ("replicate", "shard")), case, steps=1)


@world(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_sums_are_kept_in_the_reduce_dtype(rank: Rank, reshard_after_forward: bool) -> None:
    """1 + many small gradients: in bfloat16 the small ones vanish."""
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=rank.mesh(), mp_policy=policy, reshard_after_forward=reshard_after_forward)
    small, microbatches = 2.0**-10, 9
    for microbatch in range(microbatches):
        model.set_requires_gradient_sync(microbatch == microbatches - 1)
        model(torch.full((1, 4), 1.0 if microbatch == 0 else small, device=rank.device)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32
    torch.testing.assert_close(
        model.weight.grad.full_tensor().cpu(), torch.full((4, 4), 1 + (microbatches - 1) * small), rtol=0, atol=0
    )


@world(1, 2)
def test_a_parameter_first_used_on_the_last_microbatch_joins_those_accumulated(rank: Rank) -> None:
    """Its gradient is new and in the dtype of compute, the others are sums in the reduce dtype."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.ModuleDict({"early": nn.Linear(3, 3), "late": nn.Linear(3, 3)})
    model.forward = lambda x, late: model["early"](x) + (model["late"](x) if late else 0)  # type: ignore[method-assign]
    root = nn.Sequential(nn.Identity())
    root.inner = model
    root.forward = lambda x, late: model.forward(x, late)  # type: ignore[method-assign]
    fully_shard(root, mesh=rank.mesh(), mp_policy=policy)
    for last in (False, True):
        root.set_requires_gradient_sync(last)
        root(torch.ones(2, 3, device=rank.device), last).sum().backward()
    torch.testing.assert_close(model["early"].bias.grad.full_tensor().cpu(), torch.full((3,), 4.0))
    torch.testing.assert_close(model["late"].bias.grad.full_tensor().cpu(), torch.full((3,), 2.0))


@world(4)
def test_partial_sums_of_other_parameters_are_merged(rank: Rank) -> None:
    """Replicas that reduce late: microbatches may use different parameters, the last one none of the group's."""
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    model = tower(3, 2)
    plain = plain_copy(model)
    fully_shard([model[1], model[2]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    parts = [[0, 1], [0, 2], [0]]
    for microbatch, used in enumerate(parts):
        model.set_requires_all_reduce(microbatch == len(parts) - 1)
        for which in (plain, model):
            out = batch(rank, microbatch, (2, 3))
            if which is model:
                run_parts(which, used, out).backward()
            else:
                for index in used:
                    out = which[index](out)
                out.square().sum().backward()
    average_gradients(plain)
    assert_same(plain, model)


def run_parts(model: Any, used: list[int], inputs: torch.Tensor) -> torch.Tensor:
    layers = list(model)

    def forward(out: torch.Tensor) -> torch.Tensor:
        for index in used:
            out = layers[index](out)
        return out

    model.forward = forward
    return model(inputs).square().sum()


@world(2)
def test_only_the_last_backward_waits_and_forgets(rank: Rank) -> None:
    """As a pipeline does: forwards ahead of backwards, and one wait at the end."""
    model = tower(4, 2)
    plain = plain_copy(model)
    for layer in model[1:]:
        fully_shard(layer, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    inputs = [batch(rank, index, (2, 4)) for index in range(3)]
    outputs = [model(part) for part in inputs]
    for index, output in enumerate(outputs):
        last = index == len(outputs) - 1
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        output.square().sum().backward()
        plain(inputs[index]).square().sum().backward()
    average_gradients(plain)
    assert_same(plain, model)
