"""What torch's own FullyShardedDataParallel shows to users, ours shows too: names, shapes, texts."""

import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.fsdp import wrap as policies
from torch.distributed.fsdp._flat_param import FlatParameter

import fsdp_impl as ours
import fsdp_impl.wrap
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import NONE, wrap, wrap_children
from tests.fsdp_impl.replicas import MLP, batch, tower


def without_theirs_left(case: Callable[..., None]) -> Callable[..., None]:
    """torch's flat parameters hold what holds them through autograd, where nothing is collected (F-19)."""

    @functools.wraps(case)
    def run(*args: Any, **kwargs: Any) -> None:
        case(*args, **kwargs)
        for found in gc.get_objects():
            if issubclass(type(found), torch.Tensor) and isinstance(found, FlatParameter):
                found.__dict__.clear()

    return run


def rich() -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(5, 5, bias=False), nn.Conv2d(3, 5, 3), nn.Embedding(7, 3), MLP(5), nn.LayerNorm(9), nn.LSTM(3, 5)
    )
    model[1].to(memory_format=torch.channels_last)
    return model


@world(2, 4)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("policy", [None, policies.ModuleWrapPolicy({MLP, nn.LSTM}), policies.always_wrap_policy])
@without_theirs_left
def test_names_shapes_and_values(rank: Rank, policy: Any, dtype: Any, use_orig_params: bool, strategy: str) -> None:
    found = []
    for half in (theirs, ours):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"auto_wrap_policy": policy, "use_orig_params": use_orig_params, "device_id": rank.device}
            options["sharding_strategy"] = half.ShardingStrategy[strategy]
            options["mixed_precision"] = half.MixedPrecision(param_dtype=dtype)
            model = half.FullyShardedDataParallel(rich(), **options)
        sharded = {name: param.detach().clone() for name, param in model.named_parameters()}
        with half.FullyShardedDataParallel.summon_full_params(model):
            whole = {name: param.detach().clone() for name, param in model.named_parameters()}
        found.append((sharded, whole))
    for pair in zip(*found, strict=True):
        one, other = ([(name, value.shape, value.stride()) for name, value in each.items()] for each in pair)
        assert one == other and all(map(torch.equal, pair[0].values(), pair[1].values()))


class Nosy(nn.Module):
    def __init__(self, half: Any) -> None:
        super().__init__()
        self.half, self.linear = half, nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.half.FullyShardedDataParallel.summon_full_params(self.outer):
            return self.linear(x)


def nosy(half: Any, wrap: Any, rank: Rank) -> None:
    inner = Nosy(half)
    model = wrap(inner)
    inner.__dict__["outer"] = model
    with torch.no_grad():  # or torch's has hooks that nothing frees
        model(torch.ones(1, 3, device=rank.device))


def with_summon(half: Any, model: nn.Module, **options: Any) -> None:
    with half.FullyShardedDataParallel.summon_full_params(model, **options):
        pass


def hooked(model: Any) -> None:
    for _ in range(2):
        model.register_comm_hook(None, print)


def frozen() -> nn.Module:
    model = tower(5, 1)
    model[1].in_proj.weight.requires_grad_(False)
    return model


def hybrid(half: Any, wrap: Any, rank: Rank) -> Any:
    mesh = rank.mesh((1, 2), ("replicate", "shard"))
    return wrap(MLP(2), sharding_strategy=half.ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)


EACH_MLP = policies.ModuleWrapPolicy({MLP})
#: Those that no case of INIT-5 is about.
ERRORS: dict[str, Callable[[Any, Any, Rank], Any]] = {
    "scalar": lambda half, wrap, rank: wrap(nn.ParameterList([nn.Parameter(torch.tensor(1.0))])),
    "frozen in a policy's unit": lambda half, wrap, rank: wrap(frozen(), auto_wrap_policy=EACH_MLP),
    "hook twice": lambda half, wrap, rank: hooked(wrap(MLP(2))),
    "hook of hybrid": lambda half, wrap, rank: hybrid(half, wrap, rank).register_comm_hook(None, print),
    "rank 0 writes": lambda half, wrap, rank: with_summon(half, wrap(MLP(2)), rank0_only=True),
    "gradients on the CPU": lambda half, wrap, rank: with_summon(
        half, wrap(MLP(2), use_orig_params=True), with_grads=True, offload_to_cpu=True, writeback=False
    ),
    "summon in forward": nosy,
}


@world(2)
@pytest.mark.parametrize("name", sorted(ERRORS))
@without_theirs_left
def test_errors(rank: Rank, name: str) -> None:
    found = []
    for half in (theirs, ours):
        wrap = functools.partial(half.FullyShardedDataParallel, device_id=rank.device)
        with warnings.catch_warnings(), pytest.raises(Exception) as caught:
            warnings.simplefilter("ignore")
            ERRORS[name](half, wrap, rank)
        found.append((type(caught.value), str(caught.value)))
    (their_type, their_text), (our_type, our_text) = found
    assert our_type is their_type
    # Ours may say more, and shows a model with its own classes in it.
    assert our_text.startswith(their_text.split("\n")[0].rstrip(" .")), (their_text, our_text)


WARNINGS: dict[str, Callable[[Any, Any, Rank], Any]] = {
    "no sharding": lambda half, wrap, rank: wrap(MLP(2), sharding_strategy=half.ShardingStrategy.NO_SHARD),
    "container": lambda half, wrap, rank: wrap(nn.ModuleList([nn.Linear(2, 2)])),
    "ignoring all": lambda half, wrap, rank: wrap(model := nn.Linear(2, 2), ignored_modules=[model]),
    "nothing to clip": lambda half, wrap, rank: wrap(MLP(2)).clip_grad_norm_(1.0),
    "frozen beside trainable": lambda half, wrap, rank: wrap(frozen(), auto_wrap_policy=EACH_MLP, use_orig_params=True),
}


def warned(rank: Rank, make: Callable[[Any, Any, Rank], Any]) -> list[list[tuple[Any, str]]]:
    """The warnings of torch's and of ours."""
    found = []
    for half in (theirs, ours):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make(half, functools.partial(half.FullyShardedDataParallel, device_id=rank.device), rank)
        found.append([(warning.category, str(warning.message)) for warning in caught])
    return found


@world(2)
@pytest.mark.parametrize("name", sorted(WARNINGS))
@without_theirs_left
def test_warnings(rank: Rank, name: str) -> None:
    found = warned(rank, WARNINGS[name])
    assert found[0] == found[1]


@world(1)
@pytest.mark.parametrize("strategy", [None, "FULL_SHARD", "SHARD_GRAD_OP"])
@without_theirs_left
def test_one_rank(rank: Rank, strategy: str | None) -> None:
    def make(half: Any, wrap: Any, rank: Rank) -> Any:
        return wrap(MLP(2), sharding_strategy=None if strategy is None else half.ShardingStrategy[strategy])

    found = warned(rank, make)
    assert found[0] == found[1] != []


# Where ours has words of its own, or torch does something else

LOCAL = ours.StateDictType.LOCAL_STATE_DICT


@world(2)
def test_local_states(rank: Rank) -> None:
    """Of replicas, of which torch gives full states with a warning, and of optimizers."""
    model = wrap(tower(3), sharding_strategy=NONE, device_id=rank.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ours.FullyShardedDataParallel.state_dict_type(model, LOCAL):
        with pytest.raises(RuntimeError, match="``local_state_dict`` can only be used when parameters are flatten"):
            model.state_dict()
        with pytest.raises(NotImplementedError, match="its own"):
            ours.FullyShardedDataParallel.optim_state_dict(model, optimizer)


@world(2)
def test_states_of_other_models(rank: Rank) -> None:
    model = wrap(tower(3), device_id=rank.device)
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(ValueError, match=r"a parameter of shape \(3,\) that the model does not have"):
        ours.FullyShardedDataParallel.optim_state_dict(model, stranger)
    with pytest.raises(ValueError, match="Expects a module with FSDP modules"):
        ours.FullyShardedDataParallel.full_optim_state_dict(nn.Linear(2, 2), stranger)
    with pytest.raises(ValueError, match="Expects a module with FSDP modules"):
        ours.FullyShardedDataParallel.get_state_dict_type(nn.Linear(2, 2))


@world(2)
def test_hybrid_shards_on_the_cpu(rank: Rank) -> None:
    """All ranks on the CPU count as one host; torch counts by devices, of which a CPU has one."""
    if rank.device.type != "cpu":
        return
    hybrid, rule = ours.ShardingStrategy.HYBRID_SHARD, ours.wrap.ModuleWrapPolicy({nn.Linear})
    model = wrap(tower(3), sharding_strategy=hybrid, auto_wrap_policy=rule, device_id=rank.device)
    groups: list[Any] = [model.process_group, model._unit.options.ranks.across]
    assert [group.size() for group in groups] == [2, 1]
    for group in groups:
        dist.destroy_process_group(group)


@world(2)
def test_apply_while_parameters_are_gathered(rank: Rank) -> None:
    model = wrap_children(tower(5, 1), device_id=rank.device)
    refused = r"expected to be in states .* current state is "
    with ours.FullyShardedDataParallel.summon_full_params(model), pytest.raises(ValueError, match=refused + "SUMMONED"):
        model.apply(print)
    model[1].module.register_forward_hook(lambda module, args, output: model.apply(print))
    with pytest.raises(ValueError, match=refused + "FORWARD"):
        model(batch(rank, 0, (2, 5)))


@world(2)
def test_a_number_as_ignored_modules(rank: Rank) -> None:
    """By the name of the option; torch says only that a number is not iterable."""
    with pytest.raises(TypeError, match=r"`ignored_modules` should be an iterable .* got <class 'int'>"):
        wrap(tower(3), ignored_modules=3, device_id=rank.device)
