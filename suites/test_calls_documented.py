"""Chapter CALLS: what the documentation of ``FullyShardedDataParallel`` says of its calls besides."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardproof.suites.apis import fsdp1, trained
from shardproof.testing import Capability, Rank, contract, needs, world
from shardproof.testing.compare import check_bits

pytestmark = [needs(Capability.FSDP1_API), world(2)]


@contract("CALLS-18")
def test_wrappers_that_are_found(rank: Rank) -> None:
    """The wrappers in a module are returned with the module itself, and say after a forward which is the root."""
    fsdp = fsdp1(rank)
    model = fsdp.nested()
    inner, around = model.module[0], nn.Sequential(model)
    for given in (model, around):
        found = fsdp.kind.fsdp_modules(given)
        assert len(found) == 2 and found[0] is model and found[1] is inner, f"the wrappers are {len(found)} others"
    fsdp.forward(model)
    roots = [model.check_is_root(), inner.check_is_root()]
    assert roots == [True, False], f"the outer and the inner wrapper say that they are roots: {roots}"
    assert fsdp.kind.fsdp_modules(around, root_only=True) == [model], "the roots are others than the outer wrapper"


@contract("CALLS-18")
def test_wrapper_in_an_ignored_module(rank: Rank) -> None:
    """A wrapper inside a module that another one ignores goes on: its parameters are sharded, the module's are full."""
    fsdp = fsdp1(rank)
    inside, plain = fsdp.wrap(fsdp.layers()), fsdp.layers()
    ignored = nn.Sequential(inside, nn.Linear(4, 4).to(fsdp.device))
    model = fsdp.wrap(nn.Sequential(plain, ignored), ignored_modules=[ignored])
    shapes = [tuple(one.shape) for one in ignored[1].parameters()]
    assert shapes == [(4, 4), (4,)], f"the parameters of the ignored module have the shapes {shapes}"
    for number, part in enumerate((plain, inside)):
        held = sum(rank.exchange(sum(one.numel() for one in part.parameters())))
        assert held == 40, f"the ranks together hold {held} elements of part {number}, which has 40"
    fsdp.forward(model).sum().backward()
    assert not inside.check_is_root(), "the wrapper inside of the ignored module is a root of its own"
    without = [name for name, one in ignored.named_parameters() if one.numel() and one.grad is None]
    assert not without, f"without a gradient are {', '.join(without)}"


@contract("CALLS-18")
def test_answers_of_a_rule(rank: Rank) -> None:
    """A function that does not go into a module makes no unit inside it, and an empty dict makes none either."""
    fsdp = fsdp1(rank)
    asked: list[nn.Module] = []

    def rule(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if recurse:
            return module is not closed
        asked.append(module)
        return isinstance(module, nn.Linear)

    closed, opened = fsdp.layers(), fsdp.layers()
    inside = [*closed]
    model = fsdp.wrap(nn.Sequential(closed, opened), auto_wrap_policy=rule)
    assert not any(one is module for one in asked for module in inside), "the rule is asked about a closed module"
    number = len(fsdp.kind.fsdp_modules(model))
    assert number == 3, f"there are {number} units: the root and the two layers of the module that is open should be"
    layers = fsdp.layers()
    policy = fsdp.api.wrap.CustomPolicy(lambda module: {} if module is layers[0] else module is layers[1])
    units = [type(one).__name__ for one in fsdp.wrap(layers, auto_wrap_policy=policy).module]
    assert units == ["Linear", "FullyShardedDataParallel"], f"an empty dict and True make {units}"


@contract("CALLS-18")
def test_state_of_a_communication_hook(rank: Rank) -> None:
    """A communication hook gets the object that is registered with it, the same one in each call."""
    fsdp = fsdp1(rank)
    model, state = fsdp.nested(), {"calls": 0}

    def hook(given: Any, gradient: torch.Tensor, share: torch.Tensor) -> None:
        assert given is state, f"the hook gets {given}, not the object that was registered"
        given["calls"] += 1
        dist.reduce_scatter_tensor(share, gradient)

    model.register_comm_hook(state, hook)
    for _ in range(2):
        fsdp.forward(model).sum().backward()
    assert state["calls"] == 4, f"two units are reduced in two steps, and the hook has run {state['calls']} times"


@contract("CALLS-18")
@pytest.mark.parametrize("infinity", [float("inf"), "inf"], ids=["number", "word"])
def test_clipping_by_the_method(rank: Rank, infinity: Any) -> None:
    """The method takes infinity as a word too, and clips a model without shards as torch's function does."""
    fsdp = fsdp1(rank)
    layers = fsdp.layers()
    copies = [copy.deepcopy(layers) for _ in range(2)]
    models = [*map(fsdp.without_shards, copies), fsdp.wrap(layers)]
    norms = []
    for number, model in enumerate(models):
        fsdp.forward(model).sum().backward()
        if number == 1:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.125, infinity))
        else:
            largest = [float(one.grad.abs().max()) for one in model.parameters() if one.grad is not None]
            expected = max(rank.exchange(max(largest, default=0.0)))
            norms.append(model.clip_grad_norm_(0.125, infinity))
            assert float(norms[-1]) == expected, f"the largest gradient is {expected}, and the norm {float(norms[-1])}"
    check_bits("norm", *norms[:2])
    for found, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        check_bits("clipped gradient", found.grad, expected.grad)


@contract("CALLS-18")
def test_loading_calls_change_nothing_else(rank: Rank) -> None:
    """A state made ready to load changes no optimizer, and older calls shard a full state without communication."""
    fsdp, model, optimizer = trained(rank)
    with fsdp.full_states(model):
        saved = fsdp.kind.optim_state_dict(model, optimizer)
        for state in saved["state"].values():
            state["exp_avg"] = torch.full_like(state["exp_avg"], 5.0)
        before = copy.deepcopy(optimizer.state_dict()["state"])
        fsdp.kind.optim_state_dict_to_load(model, optimizer, saved)
    after = optimizer.state_dict()["state"]
    pairs = {key: [(one[name].cpu(), after[key][name].cpu()) for name in one] for key, one in before.items()}
    changed = [key for key, states in pairs.items() if not all(torch.equal(*pair) for pair in states)]
    assert not changed, f"the optimizer has other states of {changed}, although nothing was loaded"
    full = fsdp.kind.full_optim_state_dict(model, optimizer, rank0_only=False)
    if rank.index == 0:  # alone: a collective would wait for the other rank
        fsdp.kind.shard_full_optim_state_dict(copy.deepcopy(full), model, optim=optimizer)
    sharded = fsdp.kind.shard_full_optim_state_dict(copy.deepcopy(full), model, optim=optimizer)["state"]
    given = full if rank.index == 0 else None
    ways: dict[str, dict[str, Any]] = {
        "the optimizer": {"optim": optimizer},
        "a group": {"optim": optimizer, "group": fsdp.mesh.get_group()},
        "parameters": {"optim_input": [*model.parameters()]},
        "groups of parameters": {"optim_input": [{"params": [*model.parameters()], "lr": 0.1}]},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of parameters instead of the optimizer
        for way, options in ways.items():
            found = fsdp.kind.scatter_full_optim_state_dict(copy.deepcopy(given), model, **options)["state"]
            _check_states(found, sharded, f"scattered with {way}")
            if "optim_input" in options:
                again = fsdp.kind.full_optim_state_dict(model, optimizer, rank0_only=False, **options)["state"]
                _check_states(again, full["state"], f"saved with {way}")


def _check_states(found: dict[Any, Any], expected: dict[Any, Any], how: str) -> None:
    assert found.keys() == expected.keys(), f"{how}: states of {sorted(found)}"
    for key, one in expected.items():
        for name, value in one.items():
            check_bits(f"{name} of {key}, {how}", found[key][name].cpu(), value.cpu())


@contract("CALLS-18")
def test_classes_that_are_not_cast(rank: Rank) -> None:
    """With a rule, modules of the classes that a policy leaves out keep their dtype; without one, none does."""
    fsdp = fsdp1(rank)
    rule = fsdp.api.wrap.ModuleWrapPolicy({nn.Linear})
    for classes, chosen, expected in (
        ((nn.LayerNorm,), rule, torch.float32),
        ((nn.Tanh, nn.LayerNorm), rule, torch.float32),
        ([nn.Tanh, nn.LayerNorm], rule, torch.float32),
        ((), rule, torch.bfloat16),
        ([], rule, torch.bfloat16),
        ((nn.LayerNorm,), None, torch.bfloat16),
    ):
        layers, seen = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()).to(fsdp.device), list[Any]()
        layers[1].register_forward_pre_hook(lambda norm, _, seen=seen: seen.append(norm.weight.dtype))
        policy = fsdp.low_precision(_module_classes_to_ignore=classes)
        model = fsdp.wrap(layers, mixed_precision=policy, auto_wrap_policy=chosen)
        fsdp.forward(model)
        names = [one.__name__ for one in classes]
        assert seen == [expected], f"without casts of {names}, {'by a rule' if chosen else 'no rule'}: {seen}"


@contract("CALLS-18")
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_dtypes_of_buffers(rank: Rank, low: torch.dtype) -> None:
    """Among full parameters, and in a local state dict, buffers have the dtype of the policy; elsewhere their own."""
    fsdp = fsdp1(rank)
    full = torch.float32 if low == torch.bfloat16 else torch.float64
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False).to(full)).to(fsdp.device)
    policy = fsdp.low_precision(buffer_dtype=low)
    model = fsdp.wrap(layers, mixed_precision=policy, device_mesh=None, process_group=fsdp.mesh.get_group())
    fsdp.forward(model)
    with fsdp.kind.summon_full_params(model):
        found = {"full parameters": layers[1].running_mean.dtype, "a full weight": layers[0].weight.dtype}
    for form in fsdp.api.StateDictType:
        with fsdp.kind.state_dict_type(model, form):
            found[form.name] = model.state_dict()["1.running_mean"].dtype
    expected = {"full parameters": low, "a full weight": torch.float32, "FULL_STATE_DICT": full}
    expected |= {"LOCAL_STATE_DICT": low, "SHARDED_STATE_DICT": full}
    assert found == expected, f"the dtypes are {found} instead of {expected}"
