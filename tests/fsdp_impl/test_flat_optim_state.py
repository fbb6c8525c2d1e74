"""State dicts of the optimizers of FullyShardedDataParallel: those of the plain model's, from any wrapping into any."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_impl import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from fsdp_impl.common import dtensor
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import FULL, NONE, wrap, wrap_children
from tests.fsdp_impl.replicas import average_gradients, batch, plain_copy, tower

WHOLE, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
ORIGINALS = pytest.mark.parametrize("use_orig_params", [False, True])
Trained = tuple[FullyShardedDataParallel, torch.optim.Optimizer]


def adam(model: Any, *, splits: bool = False) -> torch.optim.Optimizer:
    """In another order than the model's; with ``splits`` the last child's parameters are a group of their own."""
    last = set(model[-1].parameters()) if splits else set()
    rest = [param for param in model.parameters() if param not in last]
    groups: list[Any] = [{"params": list(reversed(rest))}]
    return torch.optim.Adam([{"params": list(last), "lr": 1e-3}, *groups] if splits else groups, lr=1e-2)


def step(
    rank: Rank, model: nn.Module, optimizer: torch.optim.Optimizer, number: int, *, index: int | None = None
) -> Any:
    loss = model(batch(rank, number, (3, 5), index=index)).square().sum()
    loss.backward()
    if not isinstance(model, FullyShardedDataParallel):
        average_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def states_of_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {param: name for name, param in model.named_parameters()}
    return {names[param]: state for param, state in optimizer.state.items()}


def assert_close_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, state in expected.items():
        assert found[name].keys() == state.keys(), name
        for key, value in state.items():
            # Averages of gradients are added in another order than the plain model's.
            torch.testing.assert_close(found[name][key].cpu(), value.cpu(), rtol=1e-4, atol=1e-7)


def saved(model: nn.Module, optimizer: torch.optim.Optimizer, kind: StateDictType, **config: Any) -> dict[str, Any]:
    options = (FullStateDictConfig(), FullOptimStateDictConfig(**config)) if config else ()
    with FullyShardedDataParallel.state_dict_type(model, kind, *options):
        return FullyShardedDataParallel.optim_state_dict(model, optimizer)


@world(2)
@ORIGINALS
@pytest.mark.parametrize("strategy", [FULL, NONE])
@pytest.mark.parametrize("kind", [WHOLE, SHARDED])
def test_state_is_that_of_the_plain_model(
    rank: Rank, kind: StateDictType, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    model = tower(5, 2).to(rank.device)
    plain = plain_copy(model)
    sharded = wrap_children(model, sharding_strategy=strategy, use_orig_params=use_orig_params, device_id=rank.device)
    optimizers = [adam(plain, splits=True), adam(sharded, splits=True)]
    for number in range(3):
        for one, optimizer in zip((plain, sharded), optimizers, strict=True):
            step(rank, one, optimizer, number)
    found = saved(sharded, optimizers[1], kind)
    tensors = [state["exp_avg"] for state in found["state"].values()]
    assert all(isinstance(tensor, DTensor) == (kind is SHARDED) for tensor in tensors)
    whole = {
        name: {key: dtensor.whole(value) for key, value in state.items()} for name, state in found["state"].items()
    }
    assert_close_states(whole, states_of_plain(plain, optimizers[0]))
    assert [group["lr"] for group in found["param_groups"]] == [1e-3, 1e-2]
    names = [name for group in found["param_groups"] for name in group["params"]]
    assert sorted(names) == sorted(name for name, _ in plain.named_parameters())


@world(2)
@ORIGINALS
@pytest.mark.parametrize("kind", [WHOLE, SHARDED])
@pytest.mark.parametrize("onto", ["same", "other"])
def test_training_goes_on(rank: Rank, onto: str, kind: StateDictType, use_orig_params: bool) -> None:
    """Into a new model of the same wrapping bit for bit, because shards are as they were; into another one closely."""
    source = wrap_children(tower(5, 2).to(rank.device), use_orig_params=use_orig_params, device_id=rank.device)
    optimizer = adam(source)
    step(rank, source, optimizer, 0)
    with FullyShardedDataParallel.state_dict_type(source, kind):
        state = source.state_dict()
    given = saved(source, optimizer, kind)
    torch.manual_seed(1)
    same = onto == "same"
    model = tower(5, 2).to(rank.device)
    options: dict[str, Any] = {"use_orig_params": use_orig_params == same, "device_id": rank.device}
    target = wrap_children(model, **options) if same else wrap(model, **options)
    other = adam(target)
    with FullyShardedDataParallel.state_dict_type(target, kind):
        target.load_state_dict(state)
        FullyShardedDataParallel.optim_state_dict_to_load(target, other, given, load_directly=True)
    for number in (1, 2):
        losses = [step(rank, one, by, number) for one, by in ((source, optimizer), (target, other))]
        torch.testing.assert_close(losses[1], losses[0], **({"rtol": 0, "atol": 0} if same else {}))
    if same:
        shards = [torch.cat([param.detach().flatten() for param in one.parameters()]) for one in (source, target)]
        assert torch.equal(shards[0], shards[1])


@world(2)
@ORIGINALS
def test_only_the_first_rank_gives_and_takes(rank: Rank, use_orig_params: bool) -> None:
    model = wrap_children(tower(5, 2).to(rank.device), use_orig_params=use_orig_params, device_id=rank.device)
    optimizer = adam(model)
    step(rank, model, optimizer, 0)
    found = saved(model, optimizer, WHOLE, rank0_only=True)
    assert bool(found) == (rank.index == 0)
    expected = saved(model, optimizer, WHOLE)
    other = adam(model)
    config = FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, WHOLE, *config):
        FullyShardedDataParallel.optim_state_dict_to_load(model, other, found, load_directly=True)
    assert_close_states(saved(model, other, WHOLE)["state"], expected["state"])
    legacy = FullyShardedDataParallel.full_optim_state_dict(model, optimizer)
    assert bool(legacy) == (rank.index == 0)
    third = adam(model)
    third.load_state_dict(FullyShardedDataParallel.scatter_full_optim_state_dict(legacy or None, model, optim=third))
    assert_close_states(saved(model, third, WHOLE)["state"], expected["state"])
    shards = FullyShardedDataParallel.sharded_optim_state_dict(model, optimizer)
    fourth = adam(model)
    fourth.load_state_dict(FullyShardedDataParallel.flatten_sharded_optim_state_dict(shards, model, fourth))
    assert_close_states(saved(model, fourth, WHOLE)["state"], expected["state"])


@world(4)
@ORIGINALS
@pytest.mark.parametrize("kind", [WHOLE, SHARDED])
def test_goes_to_another_number_of_ranks(rank: Rank, kind: StateDictType, use_orig_params: bool) -> None:
    """Saved by four ranks, loaded by groups of two of them."""
    model = wrap_children(tower(5, 2).to(rank.device), use_orig_params=use_orig_params, device_id=rank.device)
    optimizer = adam(model)
    step(rank, model, optimizer, 0)
    given = saved(model, optimizer, kind)
    half = rank.mesh((2, 2), ("replicate", "shard"))["shard"]
    target = wrap(tower(5, 2).to(rank.device), device_mesh=half, use_orig_params=use_orig_params, device_id=rank.device)
    other = adam(target)
    with FullyShardedDataParallel.state_dict_type(target, kind):
        FullyShardedDataParallel.optim_state_dict_to_load(target, other, given, load_directly=True)
    assert_close_states(saved(target, other, WHOLE)["state"], saved(model, optimizer, WHOLE)["state"])


@world(4)
@ORIGINALS
@pytest.mark.parametrize("kind", [WHOLE, SHARDED])
def test_beside_tensor_parallelism(rank: Rank, kind: StateDictType, use_orig_params: bool) -> None:
    mesh = rank.mesh((2, 2), ("dp", "tp"))

    def make() -> Trained:
        model = tower(5, 1).to(rank.device)
        parallelize_module(model[1], mesh["tp"], {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()})
        sharded = wrap_children(model, device_mesh=mesh["dp"], use_orig_params=use_orig_params, device_id=rank.device)
        return sharded, adam(sharded)

    (model, optimizer), (target, other) = make(), make()
    step(rank, model, optimizer, 0, index=rank.index // 2)
    given = saved(model, optimizer, kind)
    moment = given["state"]["1.in_proj.weight"]["exp_avg"]
    assert moment.shape == (10, 5)
    with FullyShardedDataParallel.state_dict_type(target, kind):
        target_state = FullyShardedDataParallel.optim_state_dict_to_load(target, other, given)
    other.load_state_dict(target_state)
    for one, two in zip(optimizer.param_groups, other.param_groups, strict=True):
        for param, copy in zip(one["params"], two["params"], strict=True):
            assert optimizer.state[param].keys() == other.state[copy].keys()
            for key, value in optimizer.state[param].items():
                assert torch.equal(value, other.state[copy][key]), key


@world(2)
def test_frozen_and_unmanaged_parameters(rank: Rank) -> None:
    """What was never trained has no state; what no wrapper has keeps its own."""
    model = tower(5, 2).to(rank.device)
    model[1].in_proj.requires_grad_(False)
    whole = nn.Sequential(nn.Linear(5, 5).to(rank.device), wrap(model, use_orig_params=True, device_id=rank.device))
    optimizer = torch.optim.Adam(whole.parameters(), lr=1e-2)
    whole(batch(rank, 0, (3, 5))).sum().backward()
    optimizer.step()
    found = saved(whole, optimizer, WHOLE)
    assert {"0.weight", "1.0.weight", "1.2.in_proj.bias"} < found["state"].keys()
    assert not {"1.1.in_proj.weight", "1.1.in_proj.bias"} & found["state"].keys()
    other = torch.optim.Adam(whole.parameters(), lr=1e-2)
    FullyShardedDataParallel.optim_state_dict_to_load(whole, other, found, load_directly=True)
    assert_close_states(saved(whole, other, WHOLE)["state"], found["state"])


class WithExtra(nn.Module):
    """A wrapper beside a parameter that it does not manage."""

    def __init__(self, rank: Rank, *, extra: bool = True, **options: Any) -> None:
        super().__init__()
        self.inner = wrap(tower(5, 1).to(rank.device), device_id=rank.device, **options)
        self.extra = nn.Linear(5, 5).to(rank.device) if extra else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.extra(self.inner(x))


@world(2)
@ORIGINALS
def test_parameters_that_were_not_saved_are_added_by_the_script(rank: Rank, use_orig_params: bool) -> None:
    """State of a model, into the same model with parameters that no wrapper manages: append them, then load."""
    before = WithExtra(rank, extra=False, use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(before.parameters(), lr=1e-2)
    before(batch(rank, 0, (3, 5))).sum().backward()
    optimizer.step()
    found = FullyShardedDataParallel.full_optim_state_dict(before, optimizer, rank0_only=False)
    model = WithExtra(rank, use_orig_params=use_orig_params)
    other = torch.optim.Adam(model.parameters(), lr=1e-2)
    ready = FullyShardedDataParallel.shard_full_optim_state_dict(found, model, optim=other)
    params = list(model.parameters())
    added = [number for number, param in enumerate(params) if any(param is one for one in model.extra.parameters())]
    assert [group["params"] for group in ready["param_groups"]] == [
        [number for number in range(len(params)) if number not in added]
    ]
    for number in added:
        ready["param_groups"][0]["params"].append(number)
        ready["state"][number] = {
            "step": torch.tensor(7.0),
            "exp_avg": torch.ones_like(params[number]),
            "exp_avg_sq": torch.ones_like(params[number]),
        }
    other.load_state_dict(ready)
    assert [float(other.state[params[number]]["step"]) for number in added] == [7, 7]
    again = FullyShardedDataParallel.full_optim_state_dict(model, other, rank0_only=False)
    assert_close_states({name: again["state"][name] for name in found["state"]}, found["state"])


@world(2)
@ORIGINALS
@pytest.mark.parametrize("kind", [WHOLE, SHARDED])
def test_parameters_outside_may_be_on_some_ranks_only(rank: Rank, kind: StateDictType, use_orig_params: bool) -> None:
    """As under another kind of parallelism: each rank saves and loads its own, beside what all ranks share."""
    model = WithExtra(rank, extra=False, use_orig_params=use_orig_params)
    model.extra = nn.ModuleDict({f"only{rank.index}": nn.Linear(5, 5).to(rank.device)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model.extra[f"only{rank.index}"](model.inner(batch(rank, 0, (3, 5)))).sum().backward()
    optimizer.step()
    found = saved(model, optimizer, kind)
    outside = {name for name in found["state"] if name.startswith("extra")}
    assert outside == {f"extra.only{rank.index}.{name}" for name in ("weight", "bias")}
    assert {name for name in found["state"] if name.startswith("inner")} == {
        f"inner.{name}" for name, _ in tower(5, 1).named_parameters()
    }
    other = torch.optim.Adam(model.parameters(), lr=1e-2)
    with FullyShardedDataParallel.state_dict_type(model, kind):
        FullyShardedDataParallel.optim_state_dict_to_load(model, other, found, load_directly=True)
    for param in model.parameters():
        for key, value in optimizer.state[param].items():
            assert torch.equal(other.state[param][key], value), key


@world(2)
@ORIGINALS
def test_without_groups_the_state_alone_is_saved_and_loaded(rank: Rank, use_orig_params: bool) -> None:
    model = wrap_children(tower(5, 1).to(rank.device), use_orig_params=use_orig_params, device_id=rank.device)
    optimizer = adam(model)
    step(rank, model, optimizer, 0)
    expected = saved(model, optimizer, WHOLE)
    given = {"state": optimizer.state_dict()["state"]}
    found = FullyShardedDataParallel.optim_state_dict(model, optimizer, given)
    assert found.keys() == {"state"}
    assert_close_states(found["state"], expected["state"])
    ready = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, found)
    assert ready.keys() == {"state"}
    assert ready["state"].keys() == optimizer.state_dict()["state"].keys()


@world(2)
@ORIGINALS
@pytest.mark.parametrize("lacks", ["everything", "steps", "a moment", "other steps", "other dtype"])
def test_parameters_of_one_flat_parameter_must_agree(rank: Rank, lacks: str, use_orig_params: bool) -> None:
    """One flat parameter has one number of steps; original parameters have one each."""
    model = wrap_children(tower(5, 1).to(rank.device), use_orig_params=use_orig_params, device_id=rank.device)
    optimizer = adam(model)
    step(rank, model, optimizer, 0)
    found = saved(model, optimizer, WHOLE)
    state = found["state"]["1.in_proj.bias"]
    if lacks == "everything":
        del found["state"]["1.in_proj.bias"]
    elif lacks == "steps":
        del state["step"]
    elif lacks == "a moment":
        state["exp_avg"] = torch.zeros(1, 2)
    else:
        state["step"] = torch.tensor(5.0) if lacks == "other steps" else state["step"].double()
    if use_orig_params:
        FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, found)
        return
    expected = {
        "everything": r"must have scalar state .* values \[1.0, None, 1.0, 1.0\] .* for state step .*1.in_proj.bias",
        "steps": "Differing optimizer state names for the unflattened parameters: .*1.in_proj.bias",
        "a moment": "Differing optimizer state types for state exp_avg of the parameters .*1.in_proj.bias",
        "other steps": r"must have scalar state .* values \[1.0, 5.0, 1.0, 1.0\]",
        "other dtype": r"must have scalar state .* dtypes \[torch.float32, torch.float64, ",
    }
    with pytest.raises(ValueError, match=expected[lacks]):
        FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, found)


@world(2)
@ORIGINALS
def test_a_parameter_without_momentum_has_zeros_in_a_flat_parameter(rank: Rank, use_orig_params: bool) -> None:
    model = wrap(nn.Linear(5, 5).to(rank.device), use_orig_params=use_orig_params, device_id=rank.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(rank, model, optimizer, 0)
    found = saved(model, optimizer, WHOLE)
    del found["state"]["bias"]
    FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, found, load_directly=True)
    again = saved(model, optimizer, WHOLE)["state"]
    assert torch.equal(again["weight"]["momentum_buffer"], found["state"]["weight"]["momentum_buffer"])
    if not use_orig_params:
        assert torch.equal(again["bias"]["momentum_buffer"], torch.zeros(5, device=rank.device))


@world(2)
def test_by_names_and_by_numbers(rank: Rank) -> None:
    """A sharded model's state dict into the plain model's optimizer and back."""
    model = tower(5, 2).to(rank.device)
    plain = plain_copy(model)
    sharded = wrap_children(model, device_id=rank.device)
    optimizer, other = adam(sharded, splits=True), adam(plain, splits=True)
    step(rank, sharded, optimizer, 0)
    found = saved(sharded, optimizer, WHOLE)
    numbers = FullyShardedDataParallel.rekey_optim_state_dict(found, OptimStateKeyType.PARAM_ID, plain, optim=other)
    other.load_state_dict(numbers)
    assert_close_states(states_of_plain(plain, other), found["state"])
    names = FullyShardedDataParallel.rekey_optim_state_dict(
        other.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=other
    )
    again = adam(sharded, splits=True)
    FullyShardedDataParallel.optim_state_dict_to_load(sharded, again, names, load_directly=True)
    assert_close_states(saved(sharded, again, WHOLE)["state"], found["state"])
    assert [group["lr"] for group in again.param_groups] == [1e-3, 1e-2]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FullyShardedDataParallel.shard_full_optim_state_dict(found, sharded, optim_input=list(sharded.parameters()))
    assert [str(one.message)[:42] for one in caught] == ["The `optim_input` argument is deprecated: g"[:42]]
    assert caught[0].category is FutureWarning


@world(2)
@ORIGINALS
def test_what_a_user_can_get_wrong(rank: Rank, use_orig_params: bool) -> None:
    model = wrap_children(tower(5, 2).to(rank.device), use_orig_params=use_orig_params, device_id=rank.device)
    params = list(model.parameters())
    optimizer = torch.optim.Adam(params if rank.index == 0 else params[:-1])
    with pytest.raises(
        RuntimeError,
        match=r"^FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer "
        r"but some ranks are missing some of those states\nRank 1 is missing states for the parameters: .*out_proj",
    ):
        FullyShardedDataParallel.optim_state_dict(model, optimizer)
    with pytest.raises(ValueError, match="Expects a module with FSDP modules"):
        FullyShardedDataParallel.full_optim_state_dict(nn.Linear(2, 2), optimizer)
    stranger = torch.optim.Adam([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match=r"a parameter of shape \(3,\) that the model does not have"):
        FullyShardedDataParallel.optim_state_dict(model, stranger)
    with FullyShardedDataParallel.state_dict_type(model, LOCAL), pytest.raises(NotImplementedError, match="its own"):
        FullyShardedDataParallel.optim_state_dict(model, optimizer)
