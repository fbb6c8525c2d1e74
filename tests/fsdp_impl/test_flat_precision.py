"""MixedPrecision: which dtype is where, and when."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_impl import CPUOffload, FullyShardedDataParallel, MixedPrecision
from fsdp_impl.common import collectives
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import FULL, NONE, ZERO2, assert_same_whole, texts, wrap, wrap_children
from tests.fsdp_impl.replicas import assert_close, average_gradients, batch, plain_copy, tower

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Spy(nn.Module):
    """Notes the dtypes of what forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("count", torch.ones(4, dtype=torch.int64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        self.seen = [x.dtype, indices.dtype, self.linear.weight.dtype, self.scale.dtype, self.count.dtype]
        return self.linear(x) * self.scale.to(x.dtype)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecision(F16, F16, F16),
        MixedPrecision(reduce_dtype=BF16),
        MixedPrecision(param_dtype=BF16, buffer_dtype=F16),
        MixedPrecision(param_dtype=BF16, reduce_dtype=F32),
        MixedPrecision(),
    ],
)
def test_dtypes(rank: Rank, policy: MixedPrecision, offload: bool, strategy: Any, use_orig_params: bool) -> None:
    model = wrap(
        Spy().to(rank.device),
        mixed_precision=policy,
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        cpu_offload=CPUOffload(offload),
        device_id=rank.device,
    )
    reduced: list[torch.dtype] = []
    reduce, all_reduce = collectives.reduce, collectives.all_reduce

    def spy(output: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        reduced.append(output.dtype)
        (all_reduce if strategy is NONE else reduce)(output, *args, **kwargs)

    rank.monkeypatch.setattr(collectives, "all_reduce" if strategy is NONE else "reduce", spy)
    inputs = batch(rank, 0, (2, 4)).requires_grad_()
    output = model(inputs, torch.zeros(2, dtype=torch.int64, device=rank.device))
    compute, buffers = policy.param_dtype or F32, policy.buffer_dtype or F32
    assert model.module.seen == [compute, torch.int64, compute, buffers, torch.int64]
    output.float().sum().backward()
    assert reduced == [policy.reduce_dtype or compute]
    assert inputs.grad is not None and inputs.grad.dtype == F32
    home = torch.device("cpu") if offload else rank.device
    for param in model.parameters():
        assert param.dtype == F32 and param.device == home
        assert param.grad is None or (param.grad.dtype == F32 and param.grad.device == home)
    with FullyShardedDataParallel.summon_full_params(model):
        assert {param.dtype for param in model.parameters()} == {F32}


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [FULL, NONE])
def test_gradients_may_stay_low(rank: Rank, strategy: Any, use_orig_params: bool) -> None:
    model = wrap_children(
        tower(5, 1),
        mixed_precision=MixedPrecision(F16, keep_low_precision_grads=True),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        device_id=rank.device,
    )
    for _ in range(2):  # and accumulate so
        model(batch(rank, 0, (2, 5))).sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F16}
    if all(p.grad is not None for p in model.parameters()):
        assert model.clip_grad_norm_(1.0).dtype == F16


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_trains_as_a_model_with_casts(rank: Rank, use_orig_params: bool, offload: bool) -> None:
    """In a world of two, bit for bit: a sum of two numbers does not depend on who adds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4))
    master = plain_copy(model)
    low = plain_copy(model).bfloat16()
    policy = MixedPrecision(param_dtype=BF16, reduce_dtype=F32)
    model[1] = wrap(
        model[1],
        mixed_precision=policy,
        cpu_offload=CPUOffload(offload),
        device_id=rank.device,
        use_orig_params=use_orig_params,
    )
    sharded = wrap(
        model,
        mixed_precision=policy,
        cpu_offload=CPUOffload(offload),
        device_id=rank.device,
        use_orig_params=use_orig_params,
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (master, sharded)]
    for step in range(3):
        inputs = batch(rank, step, (3, 5))
        for source, target in zip(master.parameters(), low.parameters(), strict=True):
            target.data.copy_(source.detach())
        low.zero_grad()
        expected = low(inputs.bfloat16())
        actual = sharded(inputs)
        assert torch.equal(actual, expected)
        expected.sum().backward()
        actual.sum().backward()
        for source, target in zip(low.parameters(), master.parameters(), strict=True):
            assert source.grad is not None
            target.grad = source.grad.float()
        average_gradients(master)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_whole(master, sharded, grads=False)


@world(2, 4)
@pytest.mark.parametrize("strategy", [FULL, NONE])
def test_a_narrow_range_is_divided_around_the_sum(rank: Rank, strategy: Any) -> None:
    """The sum is beyond float16, the mean is not; of four ranks, one part is divided out before and one after."""
    largest = 1024 * (40 if rank.world_size == 2 else 28)
    model = wrap(
        nn.Linear(4, 4, bias=False),
        mixed_precision=MixedPrecision(reduce_dtype=F16),
        sharding_strategy=strategy,
        device_id=rank.device,
    )
    model(torch.full((1, 4), float(largest - 2048 * rank.index), device=rank.device)).sum().backward()
    assert (model._flat_param.grad == largest - 1024 * (rank.world_size - 1)).all()


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_no_sync_accumulates_in_the_dtype_of_compute(rank: Rank, use_orig_params: bool) -> None:
    model = wrap(
        nn.Linear(4, 4),
        mixed_precision=MixedPrecision(F16),
        use_orig_params=use_orig_params,
        device_id=rank.device,
    )
    with model.no_sync():
        model(batch(rank, 0, (2, 4))).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {F16}
    assert sum(p.grad.numel() for p in model.parameters()) == 20
    model(batch(rank, 0, (2, 4))).sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F32}
    assert sum(p.grad.numel() for p in model.parameters() if p.grad is not None) == 10


@world(2)
@pytest.mark.parametrize("cast", [False, True])
def test_inner_units_cast_their_inputs_if_asked(rank: Rank, cast: bool) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wrap(
                Spy(),
                mixed_precision=MixedPrecision(BF16, cast_forward_inputs=cast),
                device_id=rank.device,
            )
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.linear(x), torch.zeros(1, dtype=torch.int64, device=rank.device))

    model = wrap(Outer(), device_id=rank.device)
    if cast:
        assert model(batch(rank, 0, (2, 4))).dtype == BF16
        assert model.inner.module.seen[0] == BF16
    else:
        with pytest.raises(RuntimeError, match="dtype"):
            model(batch(rank, 0, (2, 4)))


@world(2)
def test_batch_norm_runs_without_mixed_precision(rank: Rank) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    models: list[FullyShardedDataParallel] = []
    found = texts(
        lambda: models.append(
            FullyShardedDataParallel(
                inner,
                auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse,
                mixed_precision=MixedPrecision(F16),
                device_id=rank.device,
            )
        )
    )
    assert len(found) == 1 and "batch norm submodules will be wrapped as separate" in found[0]
    assert isinstance(inner[1], FullyShardedDataParallel) and not isinstance(inner[0], FullyShardedDataParallel)
    seen: list[torch.dtype] = []
    inner[1].module.register_forward_hook(
        lambda module, args, output: seen.extend([module.weight.dtype, module.running_mean.dtype])
    )
    output = models[0](batch(rank, 0, (8, 4)))
    assert output.dtype == F16 and seen == [F32, F32]
    output.float().sum().backward()


@world(2)
@pytest.mark.parametrize("strategy", [FULL, NONE])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_hooks_that_compress_do_as_a_reduce_dtype_does(rank: Rank, strategy: Any, kind: str) -> None:
    dtype = {"fp16": F16, "bf16": BF16}[kind]

    def hook(state: Any, grad: torch.Tensor, *shard: torch.Tensor) -> None:
        low = grad.to(dtype).div_(2)
        if shard:
            output = torch.empty(shard[0].shape, dtype=dtype, device=grad.device)
            # torch 2.13 has a new name for it, and warns of the old one.
            getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(output, low)
            shard[0].copy_(output)
        else:
            dist.all_reduce(low)
            grad.copy_(low)

    options = {"sharding_strategy": strategy, "use_orig_params": True, "device_id": rank.device}
    models = [
        wrap_children(tower(5, 2), **options),
        wrap_children(tower(5, 2), mixed_precision=MixedPrecision(reduce_dtype=dtype), **options),
    ]
    if rank.device.type == "cpu":  # torch's own need streams
        models[0].register_comm_hook(None, hook)
    else:
        from torch.distributed.algorithms._comm_hooks import default_hooks

        state = default_hooks.LowPrecisionState(process_group=dist.group.WORLD)
        models[0].register_comm_hook(state, getattr(default_hooks, f"{kind}_compress_hook"))
    for model in models:
        model(batch(rank, 0, (3, 5))).square().sum().backward()
    for hooked, cast in zip(*(model.parameters() for model in models), strict=True):
        assert (hooked.grad is None) == (cast.grad is None)
        if hooked.grad is not None:
            assert hooked.grad.dtype == F32
            assert_close("gradient", hooked.grad, cast.grad, rtol=2e-2, atol=1e-2)


@world(2)
@pytest.mark.parametrize("strategy", [FULL, NONE])
def test_a_hook_replaces_the_reduction(rank: Rank, strategy: Any) -> None:
    model = wrap_children(tower(5, 1), sharding_strategy=strategy, device_id=rank.device)
    calls: list[tuple[Any, ...]] = []

    def hook(state: Any, grad: torch.Tensor, *shard: torch.Tensor) -> None:
        calls.append((state, grad.numel(), *(each.numel() for each in shard)))
        for each in shard or (grad,):
            each.fill_(7.0)

    state = object()
    with pytest.raises(ValueError, match="The communication hook must be callable but got 3"):
        model.register_comm_hook(state, 3)
    model.register_comm_hook(state, hook)
    with pytest.raises(AssertionError, match="A communication hook is already registered"):
        model.register_comm_hook(state, hook)
    model(batch(rank, 0, (3, 5))).sum().backward()
    numels = [(group.shards.layout.padded_numel, group.shards.layout.shard_numel) for group in model._unit.groups()]
    expected = [(state, whole, shard) if strategy is FULL else (state, whole) for whole, shard in reversed(numels)]
    assert calls == expected
    assert all((param.grad == 7).all() for param in model.parameters())


@world(2)
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_evaluation_in_full_precision(rank: Rank, use_orig_params: bool, strategy: Any) -> None:
    """Where the environment asks for it when the model is wrapped: parameters, inputs, buffers and reductions."""
    rank.monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)).to(rank.device)
    plain = plain_copy(model)
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    options: dict[str, Any] = {"mixed_precision": policy, "use_orig_params": use_orig_params}
    sharded: Any = wrap_children(model, sharding_strategy=strategy, device_id=rank.device, **options)
    seen: list[Any] = []
    sharded[1].module.register_forward_hook(
        lambda module, args, output: seen.append({args[0].dtype, module.weight.dtype, module.running_mean.dtype})
    )
    x = batch(rank, 0, (3, 5))
    low, full = {torch.bfloat16}, {torch.float32}
    assert torch.equal(sharded.eval()(x), plain.eval()(x))
    sharded.train()(x).sum().backward()
    assert seen == [full, low]
    sharded.zero_grad()
    plain.load_state_dict(sharded.state_dict())
    sharded.eval()(x).sum().backward()
    plain.eval()(x).sum().backward()
    average_gradients(plain)
    assert seen == [full, low, full]
    if use_orig_params:
        assert_same_whole(plain, sharded)
    with torch.no_grad():
        sharded.train()(x)
        sharded.eval()(x)
        sharded.train()(x)
    assert seen == [full, low, full, low, full, low]


@world(2)
def test_evaluation_in_low_precision_by_default(rank: Rank) -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    sharded = wrap(nn.Linear(5, 5), mixed_precision=policy, device_id=rank.device)
    assert sharded.eval()(batch(rank, 0, (3, 5))).dtype == torch.bfloat16
