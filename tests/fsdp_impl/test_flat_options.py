"""The constructor's arguments: what to wrap, what to leave alone, where to compute, which values to begin with."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import wrap as policies

from fsdp_impl import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import FULL, NONE, ZERO2, assert_same_whole, texts, wrap, wrap_children
from tests.fsdp_impl.replicas import MLP, average_gradients, batch, plain_copy, tower


def is_mlp(module: nn.Module) -> bool:
    return isinstance(module, MLP)


def has_30_left(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or nonwrapped_numel == 30


def wrapped(model: nn.Module) -> list[str]:
    return [
        name.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "")
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    ]


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    "policy, expected",
    [
        (policies.always_wrap_policy, ["", "0", "1", "1.in_proj", "1.out_proj", "2", "2.in_proj", "2.out_proj"]),
        (policies.ModuleWrapPolicy({MLP}), ["", "1", "2"]),
        (functools.partial(policies.transformer_auto_wrap_policy, transformer_layer_cls={MLP}), ["", "1", "2"]),
        # in_proj has 60 elements, out_proj 55: neither reaches 100, both together do.
        (functools.partial(policies.size_based_auto_wrap_policy, min_num_params=100), ["", "1", "2"]),
        (functools.partial(policies.size_based_auto_wrap_policy, min_num_params=60), ["", "1.in_proj", "2.in_proj"]),
        (policies.CustomPolicy(is_mlp), ["", "1", "2"]),
        (has_30_left, ["", "0"]),
    ],
)
def test_policies_choose_the_units(rank: Rank, policy: Any, expected: list[str], use_orig_params: bool) -> None:
    model = tower(5, 2)
    plain = plain_copy(model)
    sharded = wrap(model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=rank.device)
    assert wrapped(sharded) == expected
    for each in (plain, sharded):
        each(batch(rank, 0, (2, 5))).sum().backward()
    average_gradients(plain)
    for each in (plain, sharded):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_same_whole(plain, sharded, grads=False)


@world(2)
def test_a_policy_may_give_other_options(rank: Rank) -> None:
    model = tower(5, 2)
    policy = policies.CustomPolicy(lambda module: {"sharding_strategy": ZERO2} if module is model[1] else False)
    sharded = wrap(model, auto_wrap_policy=policy, device_id=rank.device)
    assert sharded[1].sharding_strategy is ZERO2 and sharded.sharding_strategy is FULL


@world(2)
def test_a_module_that_stands_twice_is_wrapped_once(rank: Rank) -> None:
    shared = MLP(5)
    model = nn.Sequential(shared, nn.Linear(5, 5), shared)
    sharded = wrap(model, auto_wrap_policy=policies.ModuleWrapPolicy({MLP}), device_id=rank.device)
    assert isinstance(model[0], FullyShardedDataParallel) and model[0] is model[2]
    sharded(batch(rank, 0, (2, 5))).sum().backward()


@world(2)
def test_wrapping_by_hand_and_by_policy_do_not_mix(rank: Rank) -> None:
    model = tower(5, 2)
    model[1] = wrap(model[1], device_id=rank.device)
    with pytest.raises(ValueError, match="requires modules to not already have FSDP applied but found 1 in"):
        wrap(model, auto_wrap_policy=policies.always_wrap_policy, device_id=rank.device)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_policy_is_told_of_frozen_parameters(rank: Rank, use_orig_params: bool) -> None:
    model = tower(5, 1)
    model[1].in_proj.bias.requires_grad_(False)
    policy = policies.ModuleWrapPolicy({MLP})
    options = {"auto_wrap_policy": policy, "use_orig_params": use_orig_params, "device_id": rank.device}
    text = "1 has both parameters with requires_grad=True and False."
    if use_orig_params:
        (found,) = texts(lambda: FullyShardedDataParallel(model, **options))
        assert found.startswith(text) and "(115 numel instead of 105 numel before" in found
    else:
        with pytest.raises(ValueError, match=text) as caught:
            FullyShardedDataParallel(model, **options)
        assert "requires_grad=False:\n['1.in_proj.bias']" in str(caught.value)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("how", ["ignored_modules", "modules as states", "parameters as states"])
def test_what_is_ignored_stays(rank: Rank, how: str, use_orig_params: bool) -> None:
    model = tower(5, 2).to(rank.device)  # device_id moves nothing that is ignored
    plain = plain_copy(model)
    left = list(model[1].in_proj.parameters())
    options: dict[str, Any] = {
        "ignored_modules": {"ignored_modules": [model[1].in_proj]},
        "modules as states": {"ignored_states": [model[1].in_proj]},
        "parameters as states": {"ignored_states": left},
    }[how]
    options |= {"use_orig_params": use_orig_params, "device_id": rank.device}
    model[1] = wrap(model[1], **options)
    sharded = wrap(model, use_orig_params=use_orig_params, device_id=rank.device)
    assert [param for param in sharded.parameters() if any(param is other for other in left)] == left
    assert sharded[1]._unit.group.shards.names == ("out_proj.weight", "out_proj.bias")
    inputs = batch(rank, 0, (2, 5), index=0)  # nobody averages the gradients of what is ignored
    for each in (plain, sharded):
        each(inputs).sum().backward()
    average_gradients(plain)
    for each in (plain, sharded):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_same_whole(plain, sharded, grads=False)


@world(1)
def test_what_cannot_be_ignored(rank: Rank) -> None:
    def build(model: nn.Module | None = None, **options: Any) -> FullyShardedDataParallel:
        return wrap(model or tower(5, 1), sharding_strategy=NONE, device_id=rank.device, **options)

    with pytest.raises(ValueError, match="Cannot pass both ignored_modules and ignored_states at the same time"):
        build(ignored_modules=[], ignored_states=[])
    mixed = tower(5, 1)
    with pytest.raises(ValueError, match=r"expects all nn.Parameter or all nn.Module list elements but got types"):
        build(mixed, ignored_states=[mixed[0], mixed[1].in_proj.weight])
    with pytest.raises(ValueError, match=r"ignored_modules expects nn.Module list elements but got types"):
        build(mixed, ignored_modules=[mixed[0].weight])
    with pytest.raises(TypeError, match=r"should be an iterable of `torch.nn.Module`s but got <class 'int'>"):
        build(mixed, ignored_modules=3)
    mixed[1] = build(mixed[1])
    with pytest.raises(ValueError, match="`ignored_modules` should not include FSDP modules"):
        build(mixed, ignored_modules=[mixed[1]])
    whole = tower(5, 1)
    with pytest.warns(UserWarning, match="Trying to ignore the top-level module passed into the FSDP constructor"):
        sharded = build(whole, ignored_modules=[whole])
    assert sharded._flat_param is None and sharded.params == []


@world(2)
def test_a_wrapper_without_parameters_runs(rank: Rank) -> None:
    model = wrap(nn.Sequential(wrap(nn.Tanh(), device_id=rank.device), nn.Linear(4, 4)), device_id=rank.device)
    model(batch(rank, 0, (2, 4)).requires_grad_()).sum().backward()
    assert model[0]._flat_param is None and model._flat_param.grad is not None
    with FullyShardedDataParallel.summon_full_params(model, with_grads=False):
        pass
    model.clip_grad_norm_(1.0)


@world(2)
def test_groups_and_meshes_exclude_each_other(rank: Rank) -> None:
    mesh = rank.mesh()
    hybrid = ShardingStrategy.HYBRID_SHARD
    for options, text in (
        ({"process_group": mesh.get_group(), "device_mesh": mesh}, "Cannot pass both process_group and device_mesh"),
        ({"sharding_strategy": hybrid}, "requires explicit specification of process group or device_mesh"),
        ({"sharding_strategy": hybrid, "process_group": mesh.get_group()}, "Expected process_group to be passed in as"),
        ({"sharding_strategy": hybrid, "device_mesh": mesh}, "Expected device_mesh to have ndim=2 but got 1"),
        ({"device_mesh": rank.mesh((1, 2), ("a", "b"))}, "expects a 1D device_mesh"),
    ):
        with pytest.raises(ValueError, match=text):
            wrap(nn.Linear(2, 2), device_id=rank.device, **options)


@world(2)
def test_hybrid_groups_are_shared_by_the_units_of_a_policy(rank: Rank) -> None:
    before = len(dist.distributed_c10d._world.pg_map)
    model = wrap(
        tower(5, 2),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=policies.ModuleWrapPolicy({MLP}),
        device_id=rank.device,
    )
    made = list(dist.distributed_c10d._world.pg_map)[before:]
    assert model.process_group.size() == 2
    assert {unit.process_group for unit in model.fsdp_modules(model)} == {model.process_group}
    model(batch(rank, 0, (2, 5))).sum().backward()
    for group in made:
        dist.destroy_process_group(group)


@world(2)
@pytest.mark.parametrize("strategy", [FULL, NONE])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_first_rank_gives_the_values(rank: Rank, strategy: Any, use_orig_params: bool) -> None:
    torch.manual_seed(rank.index)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last))
    nn.init.normal_(model[1].weight)
    model[1].running_mean.normal_()
    model[0].weight = nn.Parameter(model[0].weight.t())
    expected = rank.exchange([tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())])[0]
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params, "device_id": rank.device}
    model[1] = wrap(model[1], sync_module_states=True, **options)
    sharded = wrap(model, sync_module_states=True, **options)
    with FullyShardedDataParallel.summon_full_params(sharded):
        for tensor, other in zip((*model.parameters(), *model.buffers()), expected, strict=True):
            assert torch.equal(tensor.cpu(), other.cpu())


@world(4)
def test_the_first_rank_gives_the_values_to_replicas_too(rank: Rank) -> None:
    torch.manual_seed(rank.index)
    model = MLP(5).to(rank.device)
    expected = rank.exchange([param.detach().clone() for param in model.parameters()])[0]
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    sharded = wrap(
        model,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        sync_module_states=True,
        device_id=rank.device,
    )
    with FullyShardedDataParallel.summon_full_params(sharded):
        for param, other in zip(sharded.parameters(), expected, strict=True):
            assert torch.equal(param.cpu(), other.cpu())


class Own(nn.Module):
    def __init__(self, device: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, device=device)
        self.scale = nn.Parameter(torch.empty(4, device=device))
        self.register_buffer("offset", torch.empty(4, device=device))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 2.0)
        nn.init.constant_(self.offset, 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + self.offset


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("by", ["reset_parameters", "param_init_fn"])
def test_modules_without_values_get_some(rank: Rank, by: str, use_orig_params: bool) -> None:
    def init(module: nn.Module) -> None:
        if list(module.parameters(recurse=False)):
            module.to_empty(device=rank.device, recurse=False)
            module.reset_parameters()  # type: ignore[operator]

    torch.manual_seed(0)
    expected = Own(rank.device)
    expected.reset_parameters()
    model = Own("meta")
    options: dict[str, Any] = {"use_orig_params": use_orig_params, "device_id": rank.device}
    options["param_init_fn"] = init if by == "param_init_fn" else None
    torch.manual_seed(0)
    expected.linear.reset_parameters()
    torch.manual_seed(0)
    model.linear = wrap(model.linear, **options)
    sharded = wrap(model, **options)
    assert_same_whole(expected, sharded, grads=False)
    assert torch.equal(sharded.offset, expected.offset)
    if by == "param_init_fn":
        with pytest.raises(ValueError, match="Expected 3 to be callable but got <class 'int'>"):
            wrap(Own("meta"), device_id=rank.device, param_init_fn=3)


@world(1)
def test_without_a_way_to_values_it_says_whose(rank: Rank) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, device="meta"))

    with (
        pytest.warns(UserWarning, match=r"Unable to call `reset_parameters\(\)` for module on meta device with error"),
        pytest.raises(AttributeError),
    ):
        wrap(Bare(), sharding_strategy=NONE, device_id=rank.device)


@world(1)
def test_parameters_that_cannot_be_flattened(rank: Rank) -> None:
    def build(*params: torch.Tensor) -> FullyShardedDataParallel:
        model = nn.Module()
        model.params = nn.ParameterList([nn.Parameter(param, param.is_floating_point()) for param in params])
        return wrap(model, sharding_strategy=NONE, device_id=rank.device)

    scalar = r"FSDP doesn't support scalar parameters. Change params.1 to a 1D tensor with numel equal to 1."
    for params, text in (
        ((torch.ones(2), torch.ones(())), scalar),
        ((torch.ones(2, dtype=torch.int64),), "Cannot flatten integer dtype tensors: params.0 is torch.int64"),
        ((torch.ones(2), torch.ones(2).half()), "uniform dtype but got torch.float32 and torch.float16"),
    ):
        with pytest.raises(ValueError, match=text):
            build(*params)


@world(2)
def test_options_that_all_units_must_share(rank: Rank) -> None:
    for name, option in (("limit_all_gathers", "limit_all_gathers"), ("_use_orig_params", "use_orig_params")):
        model = tower(5, 1)
        model[1] = wrap(model[1], device_id=rank.device, **{option: False})
        sharded = wrap(model, device_id=rank.device, **{option: True})
        with pytest.raises(ValueError, match=f"Expects one homogeneous value for {name} but got"):
            sharded(batch(rank, 0, (2, 5)))


@world(2)
def test_containers_without_forward_are_reported(rank: Rank) -> None:
    with pytest.warns(UserWarning, match="FSDP will not all-gather parameters for containers that do not implement"):
        wrap(nn.ModuleList([nn.Linear(2, 2)]), device_id=rank.device)


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_cpu_needs_no_asking(rank: Rank, use_orig_params: bool) -> None:
    if rank.device.type != "cpu":
        return
    assert texts(lambda: FullyShardedDataParallel(tower(5, 1))) == []
    model = wrap_children(tower(5, 1), use_orig_params=use_orig_params, cpu_offload=CPUOffload(True))
    assert model.compute_device == torch.device("cpu")
    model(batch(rank, 0, (2, 5))).sum().backward()


@world(2)
def test_on_accelerators_devices_must_agree(rank: Rank) -> None:
    if rank.device.type == "cpu":
        return
    (found,) = texts(lambda: FullyShardedDataParallel(nn.Linear(2, 2)))
    assert "passed-in `module` is on CPU" in found
    cpu = wrap(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"unexpectedly has parameters on cpu. Make sure to move the module to"):
        cpu(torch.ones(1, 2))
    with pytest.warns(UserWarning, match="does not have an explicit index"):
        wrap(nn.Linear(2, 2), device_id=rank.device.type)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(rank.device))
    with pytest.raises(RuntimeError, match="please pass in device_id argument"):
        wrap(mixed)
    with pytest.raises(ValueError, match="Inconsistent compute device and `device_id`"):
        wrap(nn.Linear(2, 2).to(rank.device), device_id=torch.device(rank.device.type, rank.device.index + 1))
    with pytest.raises(ValueError, match="has CPU parameters or buffers when `sync_module_states=True`"):
        wrap(nn.Linear(2, 2), sync_module_states=True)
    offloaded = wrap(nn.Linear(2, 2), cpu_offload=CPUOffload(True), device_id=rank.device).to(rank.device)
    with pytest.raises(RuntimeError, match="with parameter CPU offloading enabled has parameters on"):
        offloaded(torch.ones(1, 2))


@world(2)
@pytest.mark.parametrize("when", ["before the first forward", "after it"])
def test_offloaded_shards_that_were_moved_are_named(rank: Rank, when: str) -> None:
    """The meta device stands for an accelerator."""
    model = wrap_children(tower(5, 1), device_id=rank.device, cpu_offload=CPUOffload(offload_params=True))
    if when == "after it":
        model(batch(rank, 0, (2, 5)))
    model.to("meta")
    with pytest.raises(RuntimeError, match=r"offloading enabled has parameters on meta.*\['0.weight', '0.bias'\]"):
        model(batch(rank, 0, (2, 5)))
    model.to_empty(device="cpu")
    model(batch(rank, 0, (2, 5)))
