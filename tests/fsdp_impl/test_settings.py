"""What else a user may set, call, or put in place of something."""

import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState

from fsdp_impl import FSDPModule, clip_grad_norm_, fully_shard, register_fsdp_forward_method, share_comm_ctx
from fsdp_impl.common import collectives, streams
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import (
    GATHER,
    MLP,
    REDUCE,
    assert_same,
    average_gradients,
    batch,
    counts,
    full,
    plain_copy,
    tower,
)


def sharded_tower(rank: Rank, dim: int = 4, depth: int = 2, **options: Any) -> tuple[Any, nn.Module]:
    model = tower(dim, depth)
    plain = plain_copy(model)
    for layer in model[1:]:
        fully_shard(layer, mesh=rank.mesh(), **options)
    fully_shard(model, mesh=rank.mesh(), **options)
    return model, plain


def check_step(rank: Rank, model: Any, plain: nn.Module, *, step: int = 0, dim: int = 4) -> None:
    inputs = batch(rank, step, (3, dim))
    for which in (model, plain):
        which.zero_grad()
        which(inputs).square().sum().backward()
    average_gradients(plain)
    assert_same(plain, model)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return getattr(self, which)(x)


@world(2)
def test_ranks_may_use_other_parameters_when_zeros_are_reduced(rank: Rank) -> None:
    torch.manual_seed(0)
    model = Branches()
    plain = plain_copy(model)
    fully_shard(model, mesh=rank.mesh())
    model.set_reduce_scatter_unused_params(True)
    inputs, which = batch(rank, 0, (3, 4)), "left" if rank.index == 0 else "right"
    model(inputs, which).square().sum().backward()
    plain(inputs, which).square().sum().backward()
    for param in plain.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    average_gradients(plain)
    assert_same(plain, model)


@world(2)
@pytest.mark.parametrize("number", [1, 3])
def test_more_reductions_in_flight_change_nothing(rank: Rank, number: int) -> None:
    model, plain = sharded_tower(rank)
    model.set_reduce_scatter_max_input_buffers(number)
    check_step(rank, model, plain)
    assert model._unit().comm.max_reduce_inputs == number
    model[1].set_reduce_scatter_max_input_buffers(5)
    assert model._unit().comm.max_reduce_inputs == 5
    check_step(rank, model, plain, step=1)


@pytest.mark.parametrize(
    "value, error, text", [(0, ValueError, "int, got 0"), (2.5, TypeError, "2.5"), (True, TypeError, "True")]
)
@world(1)
def test_a_wrong_number_of_reductions_is_refused(rank: Rank, value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fully_shard(nn.Linear(2, 2), mesh=rank.mesh()).set_reduce_scatter_max_input_buffers(value)


class Comm:
    """Counts, and hands out the same memory again."""

    def __init__(self) -> None:
        self.calls = 0
        self.buffers: dict[Any, torch.Tensor] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **options: Any) -> Any:
        self.calls += 1
        if "op" in options:
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=options["op"])
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=options["async_op"])


@world(2)
def test_communication_of_the_users_own(rank: Rank) -> None:
    model, plain = sharded_tower(rank, reshard_after_forward=True)
    gather, reduce = Comm(), Comm()
    model[1].set_custom_all_gather(gather)
    model[1].set_custom_reduce_scatter(reduce)
    check_step(rank, model, plain)
    assert (gather.calls, reduce.calls) == (2, 1)
    model[1].unshard(async_op=True).wait()
    assert gather.calls == 3
    model[1].reshard()
    with pytest.raises(AssertionError, match="all-gather is custom: Comm"):
        model[1].set_allocate_memory_from_process_group_for_comm(True)
    model.set_allocate_memory_from_process_group_for_comm(True)
    check_step(rank, model, plain, step=1)
    model.set_allocate_memory_from_process_group_for_comm(False)
    check_step(rank, model, plain, step=2)
    if rank.device.type == "cpu":
        with pytest.raises(NotImplementedError, match="NCCL on cuda, not NCCL on cpu"):
            model.set_symm_mem_for_comm()


@world(4)
def test_reductions_on_a_group_of_their_own(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    model = tower(4, 1)
    plain = plain_copy(model)
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    groups: list[Any] = []
    reduce = collectives.reduce

    def spy(output: torch.Tensor, contributions: torch.Tensor, group: Any, op: Any, *, unit: str) -> None:
        groups.append(group)
        reduce(output, contributions, group, op, unit=unit)

    rank.monkeypatch.setattr(collectives, "reduce", spy)
    model.set_separate_reduce_scatter_group()
    check_step(rank, model, plain)
    (own,) = set(groups)
    assert own is not mesh.get_group("shard")
    assert dist.get_process_group_ranks(own) == dist.get_process_group_ranks(mesh.get_group("shard"))
    groups.clear()
    model.set_separate_reduce_scatter_group(False)
    check_step(rank, model, plain, step=1)
    assert set(groups) == {mesh.get_group("shard")}


class Encoder(MLP):
    def features(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return self.in_proj(x) * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(4), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder.features(x, scale=2.0))


@world(2)
def test_another_forward_method(rank: Rank) -> None:
    torch.manual_seed(0)
    model = Model()
    plain = plain_copy(model)
    fully_shard(model.encoder, mesh=rank.mesh())
    fully_shard(model.head, mesh=rank.mesh())
    register_fsdp_forward_method(model, "forward_features")  # not a unit yet: nothing happens
    fully_shard(model, mesh=rank.mesh())
    register_fsdp_forward_method(model.encoder, "features")
    found = counts(lambda: check_step(rank, model, plain))
    assert (found[GATHER], found[REDUCE]) == (4, 2)
    with pytest.raises(ValueError, match=r"FSDPModel.* does not have a method other"):
        register_fsdp_forward_method(model, "other")


@world(2)
def test_a_method_is_registered_of_one_module_alone(rank: Rank) -> None:
    encoders = [fully_shard(Encoder(4), mesh=rank.mesh()) for _ in range(3)]
    register_fsdp_forward_method(encoders[0], "features")
    encoders[2].features = types.MethodType(Encoder.features, encoders[2])  # of the object, not of the class
    register_fsdp_forward_method(encoders[2], "features")
    encoders[1].unshard()
    found = [
        counts(lambda encoder=encoder: encoder.features(batch(rank, 0, (3, 4)), scale=2.0)) for encoder in encoders
    ]
    assert [one.get(GATHER, 0) for one in found] == [1, 0, 1]


@world(2)
@pytest.mark.parametrize("smaller", [False, True])
def test_unshard_by_hand_after_an_evaluation(rank: Rank, smaller: bool) -> None:
    """An evaluation leaves a unit gathered, wholly or within fewer ranks; a call gathers it as it is after a step."""
    model, _ = sharded_tower(rank, reshard_after_forward=1 if smaller else False)
    held = list(model[1].parameters())
    with torch.no_grad():
        model(batch(rank, 0, (3, 4)))
        model[1].unshard()
        for param in held:
            param.zero_()
        model[1].unshard()
        assert [float(param.abs().max()) for param in model[1].parameters()] == [0.0] * len(held)


@world(2)
def test_recovery_from_an_exception(rank: Rank) -> None:
    """In forward, and in backward; what was accumulated is forgotten."""
    model, plain = sharded_tower(rank, reshard_after_forward=False)
    inputs = batch(rank, 0, (3, 4))
    fail = model[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(inputs)
    fail.remove()
    model.reset_iter_state()
    check_step(rank, model, plain)
    model.set_requires_gradient_sync(False)
    model(inputs).sum().backward()
    output = model(inputs)
    output.register_hook(lambda grad: grad)
    middle = model[1].out_proj.register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(inputs).sum().backward()
    middle.remove()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    check_step(rank, model, plain, step=1)
    with pytest.raises(RuntimeError, match="reset_iter_state must be called on the root FSDP module"):
        model[1].reset_iter_state()


@world(2)
def test_roots_may_share_streams_and_buffers(rank: Rank) -> None:
    pairs = [sharded_tower(rank) for _ in range(2)]
    share_comm_ctx([model for model, _ in pairs])
    for step, (model, plain) in enumerate(pairs):
        check_step(rank, model, plain, step=step)
    units = [module._unit() for model, _ in pairs for module in model.modules() if isinstance(module, FSDPModule)]
    assert len({id(unit.comm) for unit in units}) == len({id(unit.group.comm) for unit in units}) == 1
    share_comm_ctx([])
    with pytest.raises(ValueError, match=r"Expects list of FSDPModules but got Linear"):
        share_comm_ctx([pairs[0][0], nn.Linear(1, 1)])


@world(2)
def test_gathers_on_the_current_stream_and_a_later_event(rank: Rank) -> None:
    model, plain = sharded_tower(rank)
    model._set_unshard_async_op(True)
    for step in range(2):
        check_step(rank, model, plain, step=step)
        for which in (model, plain):
            torch.optim.SGD(which.parameters(), lr=0.1).step()
        if rank.device.type != "cpu":
            model.set_post_optim_event(torch.accelerator.current_stream().record_event())


@world(1, 2)
def test_gathers_wait_once_for_the_given_event(rank: Rank) -> None:
    """Not for what follows it on the current stream. Which wait is asked for shows on the CPU too."""
    model, plain = sharded_tower(rank)
    check_step(rank, model, plain)
    asked: list[Any] = []
    with rank.monkeypatch.context() as patch:
        patch.setattr(streams, "wait", lambda _, event: asked.append(event))
        patch.setattr(streams, "join", lambda *_: asked.append("the current stream"))
        event: Any = object()
        model.set_post_optim_event(event)
        for first in (event, "the current stream"):
            asked.clear()
            with torch.no_grad():
                model(batch(rank, 0, (3, 4)))
            assert asked[0] is first
            assert asked.count(event) == (first is event)
    model.reshard()  # the root's own are shown gathered, and zero_grad is for the shards
    check_step(rank, model, plain)


@world(2)
@pytest.mark.parametrize("has_inf", [False, True])
def test_loss_scaling_shares_what_it_found(rank: Rank, has_inf: bool) -> None:
    """An infinity in one rank's shard makes every rank skip the step and lower the scale."""
    model, plain = sharded_tower(rank)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    scaler = GradScaler(device=rank.device.type, init_scale=2.0, growth_interval=100)
    inputs = batch(rank, 0, (3, 4))
    plain(inputs).square().sum().backward()
    average_gradients(plain)
    scaler.scale(model(inputs).square().sum()).backward()
    if has_inf and rank.index == 1:
        model[0].weight.grad.to_local()[0, 0] = torch.inf
    scaler.unscale_(optimizers[1])
    state = scaler._per_optimizer_states[id(optimizers[1])]
    assert state["stage"] is OptState.UNSCALED
    found = [float(full(value)) for value in state["found_inf_per_device"].values()]
    assert bool(sum(found)) == has_inf
    if not has_inf:
        assert_same(plain, model)
        clip_grad_norm_(model.parameters(), 1.0)
    before = [param.to_local().clone() for param in model.parameters()]
    scaler.step(optimizers[1])
    scaler.update()
    unchanged = [torch.equal(old, param.to_local()) for old, param in zip(before, model.parameters(), strict=True)]
    assert all(unchanged) if has_inf else not any(unchanged)
    assert scaler.get_scale() == (1.0 if has_inf else 2.0)


@world(2)
def test_chunks_of_a_head_that_shares_its_unit(rank: Rank) -> None:
    """Forward leaves the head out; the loss calls it chunk by chunk, each with a backward of its own."""

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.head = MLP(4), nn.LayerNorm(4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.layer(x))

    torch.manual_seed(0)
    model = Body()
    plain = plain_copy(model)
    fully_shard(model.layer, mesh=rank.mesh())
    fully_shard([model.norm, model.head], mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    for step in range(2):
        inputs = batch(rank, step, (4, 4))
        for which in (model, plain):
            which.zero_grad()
            hidden = which(inputs)
            cut = hidden.detach().requires_grad_()
            for chunk in cut.chunk(2):
                which.head(chunk).square().sum().backward()
            hidden.backward(cut.grad)
        average_gradients(plain)
        assert_same(plain, model)


@world(2, 4)
@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_clipping_with_shards_that_are_empty_on_a_rank(rank: Rank, p: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2))
    plain = plain_copy(model)
    fully_shard(model, mesh=rank.mesh())
    check_step(rank, model, plain)
    norm = clip_grad_norm_(model.parameters(), 0.1, p)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1, p))
    assert_same(plain, model)


@world(2)
def test_values_of_an_evaluation_are_older_than_a_fused_step(rank: Rank) -> None:
    """Whose kernels do not count what they write as new versions; nor does a DTensor what its local tensor gets."""
    model, _ = sharded_tower(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    inputs = batch(rank, 0, (3, 4))

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            output: torch.Tensor = model(inputs)
        return output

    def changed(change: Callable[[], object]) -> None:
        before = evaluate()
        change()
        assert not torch.equal(evaluate(), before)
        model.reshard()

    model(inputs).sum().backward()
    changed(optimizer.step)
    local = model[0].weight.to_local()
    changed(lambda: torch._foreach_mul_([local.detach()], 2.0))
