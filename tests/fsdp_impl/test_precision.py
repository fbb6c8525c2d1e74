"""Mixed precision: dtypes of compute, of reductions, and at the borders of forward."""

import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_impl import MixedPrecisionPolicy, fully_shard
from fsdp_impl.common import collectives
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import MLP, assert_same, batch, tower

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@world(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize(
    "param_dtype, reduce_dtype",
    [(BF16, None), (BF16, BF16), (BF16, FP32), (FP16, None), (FP16, FP32), (None, BF16), (FP32, BF16)],
    ids=str,
)
def test_compute_and_reduce(
    rank: Rank, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, reshard_after_forward: bool
) -> None:
    """Exactly a copy in the compute dtype whose gradients are averaged in the reduce dtype: two ranks, one sum.

    Without a reduce dtype they are averaged in the dtype of the parameters.
    """
    seen = spy_on_reductions(rank)
    plain = tower(4, 2).to(rank.device)
    model = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype)
    for layer in model[1:]:
        fully_shard(layer, mesh=rank.mesh(), mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=rank.mesh(), mp_policy=policy, reshard_after_forward=reshard_after_forward)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    compute = param_dtype or FP32
    for step in range(2):
        inputs = batch(rank, step, (3, 4))
        output = model(inputs)
        assert output.dtype == compute
        output.square().sum().backward()
        low = copy.deepcopy(plain).to(compute)
        low(inputs.to(compute)).square().sum().backward()
        for param, low_param in zip(plain.parameters(), low.parameters(), strict=True):
            reduced = low_param.grad.to(reduce_dtype or FP32).div_(2)
            dist.all_reduce(reduced)
            param.grad = reduced.to(FP32)
        assert_same(plain, model, rtol=0, atol=0)
        assert set(seen) == {reduce_dtype or FP32}
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def spy_on_reductions(rank: Rank) -> list[torch.dtype]:
    seen: list[torch.dtype] = []
    reduce = collectives.reduce

    def spy(output: torch.Tensor, contributions: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        seen.append(contributions.dtype)
        reduce(output, contributions, *args, **kwargs)

    rank.monkeypatch.setattr(collectives, "reduce", spy)
    return seen


@world(2)
def test_the_reduce_dtype_is_asked_for_at_each_reduction(rank: Rank) -> None:
    """All parameters are frozen at the first forward, next to one that has no gradients at all."""
    seen = spy_on_reductions(rank)
    model = nn.Linear(4, 4)
    model.steps = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    model.requires_grad_(False)
    fully_shard(model, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(BF16, FP32))
    model(batch(rank, 0, (2, 4)))
    assert model.steps.dtype == torch.int64, "integers are not cast"
    model.reshard()
    for name in ("weight", "bias"):
        getattr(model, name).requires_grad_(True)
    model(batch(rank, 0, (2, 4))).sum().backward()
    assert seen == [FP32]
    assert model.weight.grad.dtype == FP32


@world(2)
def test_a_model_that_is_cast_later_still_reduces_in_the_policys_dtype(rank: Rank) -> None:
    seen = spy_on_reductions(rank)
    model = nn.Linear(4, 4).to(BF16)
    fully_shard(model, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(BF16, BF16))
    model.float()
    model(batch(rank, 0, (2, 4))).sum().backward()
    assert seen == [BF16]
    assert model.weight.grad.dtype == FP32


@world(2)
def test_without_a_reduce_dtype_a_cast_decides(rank: Rank) -> None:
    seen = spy_on_reductions(rank)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(FP16))
    for dtype in (FP32, BF16):
        model.to(dtype)
        model(batch(rank, 0, (2, 4))).sum().backward()
        assert model.weight.grad.dtype == dtype
        model.zero_grad()
    assert seen == [FP32, BF16]


class Product(nn.Module):
    """Of float32, its weight's gradient is the input, in float32 whatever the weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.offset = nn.Parameter(torch.zeros(4, dtype=BF16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.offset


@world(1)
def test_two_dtypes_without_a_reduce_dtype_are_refused_by_name(rank: Rank) -> None:
    """Also after the first forward, which would have refused a second one that is trainable then."""
    model = Product()
    fully_shard(model, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(FP16))
    inputs = batch(rank, 0, (4,))
    model(inputs).sum().backward()
    model.offset.requires_grad_(True)
    with pytest.raises(ValueError, match=r"expects one dtype, .*weight.: torch.float32, .offset.: torch.bfloat16"):
        model(inputs).sum().backward()


@world(1)
@pytest.mark.parametrize("reduce_dtype, total", [(None, 1 + 2**-7 + 2**-9), (BF16, 1 + 2**-6)], ids=str)
def test_gradients_are_rounded_to_the_reduce_dtype_alone(
    rank: Rank, reduce_dtype: torch.dtype | None, total: float
) -> None:
    """Not to that of compute; and where they add up, the sum is rounded, not what is added to it."""
    model = Product()
    fully_shard(model, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(BF16, reduce_dtype, cast_forward_inputs=False))
    for value in (1 + 2**-8 + 2**-9, 2**-8):
        model.set_requires_gradient_sync(value < 1)
        model(torch.full((4,), value, device=rank.device)).sum().backward()
    assert torch.equal(model.weight.grad.to_local().cpu(), torch.full((4,), total))


class Recorder(nn.Module):
    """A linear layer that notes the dtype of its input."""

    def __init__(self, seen: list[torch.dtype]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return self.linear(x.to(self.linear.weight.dtype))


@world(2)
@pytest.mark.parametrize(
    "policies, expected",
    [
        ({2: MixedPrecisionPolicy(FP16)}, [FP32, FP32, FP16]),
        ({1: MixedPrecisionPolicy(FP16, output_dtype=FP32)}, [FP32, FP16, FP32]),
        ({1: MixedPrecisionPolicy(FP16)}, [FP32, FP16, FP16]),
        ({1: MixedPrecisionPolicy(BF16, cast_forward_inputs=False, output_dtype=FP32)}, [FP32, FP32, FP32]),
    ],
    ids=["last", "middle and back", "middle", "no cast"],
)
def test_inputs_of_nested_units(rank: Rank, policies: dict[int, MixedPrecisionPolicy], expected: list[Any]) -> None:
    seen: list[torch.dtype] = []
    model = nn.Sequential(*(Recorder(seen) for _ in range(3)))
    for index, policy in policies.items():
        fully_shard(model[index], mesh=rank.mesh(), mp_policy=policy)
    fully_shard(model, mesh=rank.mesh())
    output = model(batch(rank, 0, (2, 4)))
    assert seen == expected
    output.sum().backward()
    assert all(param.grad.dtype == FP32 for param in model.parameters())


@world(2)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_casts_as_the_forward_did(rank: Rank, use_reentrant: bool) -> None:
    seen: list[torch.dtype] = []

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Recorder(seen)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    model = Root()
    fully_shard(model.inner, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(BF16, output_dtype=FP32))
    fully_shard(model, mesh=rank.mesh())
    output = model(batch(rank, 0, (2, 4)).requires_grad_())
    assert output.dtype == FP32
    output.sum().backward()
    assert seen == [BF16, BF16]


class Named(NamedTuple):
    x: Any
    mask: Any


@dataclasses.dataclass
class Data:
    x: Any
    mask: Any


class Nested(NamedTuple):
    inner: Any


class Carrier(nn.Module):
    def __init__(self, make: Any, get: Any) -> None:
        super().__init__()
        self.mlp, self.make, self.get = MLP(4), make, get

    def forward(self, value: Any) -> Any:
        inner = self.get(value)
        assert inner.x.dtype == BF16
        assert inner.mask.dtype == torch.bool
        return self.make(self.mlp(inner.x), inner.mask)


KINDS = {
    "namedtuple": (Named, lambda value: value),
    "dataclass": (Data, lambda value: value),
    "nested": (lambda *args: Nested([{"a": Data(*args)}]), lambda value: value.inner[0]["a"]),
}


@world(2)
@pytest.mark.parametrize("kind", KINDS)
def test_containers_are_cast_inside_and_their_gradients_flow(rank: Rank, kind: str) -> None:
    make, get = KINDS[kind]
    torch.manual_seed(0)
    model = nn.Sequential(Carrier(make, get), Carrier(make, get))
    policy = MixedPrecisionPolicy(BF16, FP32, output_dtype=FP32)
    for layer in model:
        fully_shard(layer, mesh=rank.mesh(), mp_policy=policy)
    fully_shard(model, mesh=rank.mesh(), mp_policy=policy)
    output = model(make(batch(rank, 0, (2, 4)), torch.ones(2, dtype=torch.bool, device=rank.device)))
    assert get(output).x.dtype == FP32
    get(output).x.sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@world(2)
def test_a_norm_with_buffers_computes_in_its_own_dtype_between_units_of_another(rank: Rank) -> None:
    low, own = MixedPrecisionPolicy(BF16, FP32), MixedPrecisionPolicy(FP32, output_dtype=BF16)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, mesh=rank.mesh(), mp_policy=own if isinstance(layer, nn.BatchNorm1d) else low)
    fully_shard(model, mesh=rank.mesh(), mp_policy=low)
    model(batch(rank, 0, (4, 4))).sum().backward()
    assert {buffer.dtype for buffer in model.buffers()} == {FP32, torch.int64}, "buffers are not cast"
    assert all(param.grad.dtype == FP32 for param in model.parameters())


@world(2)
def test_frozen_parameters_may_be_of_any_dtype(rank: Rank) -> None:
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.ones(5).to(torch.float8_e4m3fn), requires_grad=False)
    model.table = nn.Parameter(torch.arange(7), requires_grad=False)
    fully_shard(model, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(BF16))
    model(batch(rank, 0, (2, 4))).sum().backward()
    model.unshard()
    assert torch.equal(model.table.cpu(), torch.arange(7))
    assert torch.equal(model.scale.float().cpu(), torch.ones(5))
    assert model.weight.dtype == model.scale.dtype == BF16
