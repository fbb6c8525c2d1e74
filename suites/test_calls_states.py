"""Chapter CALLS: state dicts by the API of ``FullyShardedDataParallel``, of the model and of the optimizer."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.suites.apis import NAMES, Fsdp1, fsdp1, hybrid, trained
from shardproof.testing import Capability, Rank, contract, needs, world
from shardproof.testing.axes import subjects
from shardproof.testing.make import as_fsdp1
from shardproof.testing.states import check_left

pytestmark = [needs(Capability.FSDP1_API), world(2)]

ON_CPU = needs(Capability.FULL_PARAMS_ON_CPU)


# State dicts of the model


@contract("CALLS-4")
def test_setting_a_form_returns_the_previous_one(rank: Rank) -> None:
    """Each call that sets the form of state dicts returns the previous settings; a context restores them.

    Calls that save or load leave them as they are, also where they save in another form.
    """
    fsdp = fsdp1(rank)
    model, forms = fsdp.nested_on_groups(), fsdp.api.StateDictType
    configs = [kind(rank0_only=True) for kind in (fsdp.api.FullStateDictConfig, fsdp.api.FullOptimStateDictConfig)]
    before = [
        fsdp.kind.set_state_dict_type(model, forms.SHARDED_STATE_DICT),
        fsdp.kind.set_state_dict_type(model, forms.FULL_STATE_DICT, *configs),
    ]
    with fsdp.kind.state_dict_type(model, forms.LOCAL_STATE_DICT):
        before.append(fsdp.kind.get_state_dict_type(model))
    before.append(fsdp.kind.get_state_dict_type(model))
    names = [one.state_dict_type.name for one in before]
    expected = ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "FULL_STATE_DICT"]
    assert names == expected, f"the forms before each change were {names}, not {expected}"
    assert before[-1].state_dict_config.rank0_only is True, "the configuration of the form is lost"
    optimizers = before[-1].optim_state_dict_config
    assert optimizers.rank0_only is True, "the configuration of the optimizer's form is lost"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model without shards is saved in full; the older call is deprecated
        wrong = changed_settings(fsdp)
    assert not wrong, "\n".join(wrong)


def changed_settings(fsdp: Fsdp1) -> list[str]:
    """Which calls leave a model, sharded or not, with other settings than they found: each may need its own a while."""
    api, kind, wrong = fsdp.api, fsdp.kind, list[str]()
    for model in (fsdp.nested(), fsdp.without_shards()):
        optimizer = fsdp.train(model)
        calls: dict[str, Callable[[], Any]] = {
            "state_dict()": model.state_dict,
            "load_state_dict()": functools.partial(model.load_state_dict, model.state_dict()),
            "optim_state_dict()": functools.partial(kind.optim_state_dict, model, optimizer),
            "full_optim_state_dict()": functools.partial(kind.full_optim_state_dict, model, optimizer),
        }
        for form, options in (("Sharded", {"offload_to_cpu": True}), ("Full", {"rank0_only": True})):
            configs = [getattr(api, f"{form}{one}")(**options) for one in ("StateDictConfig", "OptimStateDictConfig")]
            for name, call in calls.items():
                if name == "load_state_dict()" and form == "Sharded":
                    continue  # of a full state dict
                kind.set_state_dict_type(model, api.StateDictType[f"{form.upper()}_STATE_DICT"], *configs)
                before = [copy.copy(kind.get_state_dict_type(one)) for one in kind.fsdp_modules(model)]
                call()
                after = [kind.get_state_dict_type(one) for one in kind.fsdp_modules(model)]
                wrong += [f"{name} changes the settings {before} to {after}"] if after != before else []
    return wrong


@contract("CALLS-4")
def test_state_dict_arguments_by_position(rank: Rank) -> None:
    """``state_dict`` takes its destination and its prefix by position."""
    fsdp, given = fsdp1(rank), dict[str, Any]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about the positions
        found = fsdp.nested().state_dict(given, "model.")
    assert found is given, "the state dict is not written into the given one"
    assert sorted(given) == [f"model.{name}" for name in NAMES], f"the names in the state dict are {sorted(given)}"


@contract("CALLS-4")
@pytest.mark.parametrize(
    ("rank0_only", "on_cpu"),
    [(True, False), pytest.param(True, True, marks=ON_CPU), pytest.param(False, True, marks=ON_CPU)],
    ids=["first-rank", "first-rank-on-the-cpu", "on-the-cpu"],
)
def test_destination_with_entries_of_the_caller(rank: Rank, rank0_only: bool, on_cpu: bool) -> None:
    """``state_dict`` leaves alone the entries that its destination has already, on ranks that save nothing too."""
    fsdp = fsdp1(rank)
    model, config = fsdp.nested(), fsdp.api.FullStateDictConfig(offload_to_cpu=on_cpu, rank0_only=rank0_only)
    own = {"step": 3, "average.0.weight": torch.zeros(2, device="meta"), "zeros": torch.zeros(2, device=fsdp.device)}
    given = dict(own)
    with fsdp.kind.state_dict_type(model, fsdp.api.StateDictType.FULL_STATE_DICT, config):
        found = model.state_dict(destination=given)
    assert found is given, "the state dict is not written into the given one"
    changed = [name for name, value in own.items() if given.get(name) is not value]
    assert not changed, f"these entries of the caller are gone or replaced: {', '.join(changed)}"
    saved = [] if rank0_only and rank.index else NAMES
    assert sorted(given.keys() - own.keys()) == sorted(saved), f"the names beside them are {sorted(given)}"


@contract("CALLS-4")
def test_state_dict_has_the_versions_of_modules(rank: Rank) -> None:
    """A state dict's metadata has the version of a wrapped module under its own name, in a plain module too."""
    fsdp = fsdp1(rank)
    model, expected = fsdp.wrap(nn.BatchNorm1d(4).to(fsdp.device)), nn.BatchNorm1d._version
    around: Any = nn.Sequential(model)
    for name, saved in (("", model), ("0", around)):
        found = saved.state_dict()._metadata.get(name, {}).get("version")
        assert found == expected, f"the version of a wrapped BatchNorm1d is saved as {found}, not {expected}"


@contract("CALLS-4")
def test_ignored_parameters_as_variables(rank: Rank) -> None:
    """With ``keep_vars`` a state dict has an ignored parameter itself, without it a detached tensor."""
    fsdp = fsdp1(rank)
    layers = fsdp.layers()
    model = fsdp.wrap(layers, ignored_states=[layers[0].weight])
    same = [model.state_dict(keep_vars=keeps)["0.weight"] is layers[0].weight for keeps in (True, False)]
    assert same == [True, False], f"with keep_vars and without, the ignored parameter itself is saved: {same}"


@contract("CALLS-4")
def test_names_in_a_local_state_dict(rank: Rank) -> None:
    """A local state dict has flat parameters only, also of a model with its original parameters."""
    fsdp = fsdp1(rank)
    model = fsdp.nested_on_groups()
    with fsdp.kind.state_dict_type(model, fsdp.api.StateDictType.LOCAL_STATE_DICT):
        names = sorted(model.state_dict())
    assert names == ["0._flat_param", "_flat_param"], f"the names in the local state dict are {names}"


@contract("CALLS-7")
def test_sharded_values_over_a_process_group(rank: Rank) -> None:
    """Over a process group, values of a sharded state dict say which rank has which rows, and on which device.

    They load in their dtype. A full state dict has the same names.
    """
    fsdp = fsdp1(rank)
    groups: Any = {"device_mesh": None, "process_group": fsdp.mesh.get_group()}
    model, other = (fsdp.wrap(fsdp.layers().double(), **groups) for _ in range(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(3)  # which float32 does not have
    with fsdp.sharded_states(model):
        saved = model.state_dict()
    names = sorted(model.state_dict())
    assert names == sorted(saved), f"the full state dict has {names}, and the sharded one {sorted(saved)}"
    devices = rank.exchange(str(rank.device))
    for name, value in saved.items():
        rows = 4 // rank.world_size
        expected = [(index * rows, index, device) for index, device in enumerate(devices)]
        found = _rows_of_shards(value)
        assert found == expected, f"first rows, ranks and devices of {name} are {found}, not {expected}"
    with fsdp.sharded_states(other):
        other.load_state_dict(saved)
    batch = torch.ones(2, 4, dtype=torch.float64, device=fsdp.device)
    assert torch.equal(model(batch), other(batch)), "the model does not compute with the loaded values"


def _rows_of_shards(value: Any) -> list[tuple[int, int, str]]:
    """Of each shard of a value that is cut evenly by rows: its first row, its rank, and its device there."""
    if not isinstance(value, DTensor):
        shards = value.metadata().shards_metadata
        return [(one.shard_offsets[0], one.placement.rank(), str(one.placement.device())) for one in shards]
    ranks = value.device_mesh.mesh.tolist()
    rows = value.size(0) // len(ranks)
    return [(index * rows, one, str(value.to_local().device)) for index, one in enumerate(ranks)]


@contract("CALLS-4")
def test_keys_that_do_not_fit(rank: Rank) -> None:
    """A load reports missing and unexpected names as the original model has them, without those of wrappers."""
    fsdp = fsdp1(rank)
    model = fsdp.nested()
    renamed = {name.replace("0.", "2."): value for name, value in model.state_dict().items()}
    found = model.load_state_dict(renamed, strict=False)
    assert sorted(found.missing_keys) == NAMES[:2], f"the missing keys are {sorted(found.missing_keys)}"
    assert sorted(found.unexpected_keys) == ["2.bias", "2.weight"], f"unexpected are {sorted(found.unexpected_keys)}"


@contract("CALLS-4")
def test_load_of_full_parameters(rank: Rank) -> None:
    """A state dict that is loaded while parameters are full (summoned) is used, or refused, never lost."""
    fsdp = fsdp1(rank)
    model, other = fsdp.nested(), fsdp.layers()
    with fsdp.kind.summon_full_params(model):
        try:
            model.load_state_dict(other.state_dict())
        except AssertionError:
            return
    assert torch.equal(fsdp.forward(model), fsdp.forward(other)), "the model does not compute with the loaded values"


@contract("CALLS-4")
def test_load_after_new_data(rank: Rank) -> None:
    """A state dict is loaded also into parameters whose ``data`` user code has replaced since the last forward."""
    fsdp = fsdp1(rank)
    model, other = fsdp.nested(), fsdp.layers()
    fsdp.forward(model)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    model.load_state_dict(other.state_dict())
    assert torch.equal(fsdp.forward(model), fsdp.forward(other)), "the model does not compute with the loaded values"


# State dicts of the optimizer


@contract("CALLS-5")
@subjects("has_groups", [True, False])
def test_given_optimizer_state_is_saved(rank: Rank, has_groups: bool) -> None:
    """A state dict of the optimizer that user code passes is saved as it is and made ready to load, groups or not."""
    fsdp, model, optimizer = trained(rank)
    given = optimizer.state_dict()
    given["state"] = {
        number: {**one, "exp_avg": torch.full_like(one["exp_avg"], 3.0)} for number, one in given["state"].items()
    }
    if not has_groups:
        del given["param_groups"]
    with fsdp.full_states(model):
        found = fsdp.kind.optim_state_dict(model, optimizer, given)
        expected = ["param_groups", "state"] if has_groups else ["state"]
        assert sorted(found) == expected, f"saved are {sorted(found)}, not {expected}"
        averages = {value for one in found["state"].values() for value in one["exp_avg"].flatten().tolist()}
        assert averages == {3.0}, f"the given averages are 3.0, and {sorted(averages)} are saved"
        loaded = fsdp.kind.optim_state_dict_to_load(model, optimizer, found)
    assert sorted(loaded) == expected, f"to load are {sorted(loaded)}, not {expected}"


@contract("CALLS-5")
def test_given_options_are_saved(rank: Rank) -> None:
    """If user code has changed the learning rate in the passed state dict of an optimizer, that rate is saved."""
    fsdp, model, optimizer = trained(rank)
    given = optimizer.state_dict()
    given["param_groups"] = [{**group, "lr": 7.0} for group in given["param_groups"]]
    with fsdp.sharded_states(model):
        rates = [group["lr"] for group in fsdp.kind.optim_state_dict(model, optimizer, given)["param_groups"]]
    assert rates == [7.0], f"the given learning rate is 7.0, and {rates} is saved"


@contract("CALLS-5")
@subjects("use_orig_params", [True, False])
def test_optimizer_state_keeps_its_dtype(rank: Rank, use_orig_params: bool) -> None:
    """State of the optimizer in float64, of parameters in float32, is saved and loaded in float64."""
    fsdp = fsdp1(rank)
    model = fsdp.wrap(fsdp.layers(), use_orig_params=use_orig_params)
    optimizer = fsdp.train(model)
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].double()
    with fsdp.full_states(model):
        saved = fsdp.kind.optim_state_dict(model, optimizer)
        kept = copy.deepcopy(saved)
        loaded = fsdp.kind.optim_state_dict_to_load(model, optimizer, saved)
    for what, states in (("saved", kept["state"]), ("loaded", loaded["state"])):
        dtypes = {one["exp_avg"].dtype for one in states.values()}
        assert dtypes == {torch.float64}, f"averages of float64 are {what} as {dtypes}"


@contract("CALLS-5")
def test_loaded_optimizer_state_is_returned(rank: Rank) -> None:
    """A state dict that is loaded directly into the optimizer is returned too."""
    fsdp, model, optimizer = trained(rank)
    with fsdp.full_states(model):
        saved = fsdp.kind.optim_state_dict(model, optimizer)
        for state in saved["state"].values():
            state["exp_avg"] = torch.full_like(state["exp_avg"], 5.0)
        found = fsdp.kind.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)
    assert sorted(found) == ["param_groups", "state"], f"the loaded state dict is returned with {sorted(found)}"
    averages = {value for state in optimizer.state.values() for value in state["exp_avg"].flatten().tolist()}
    assert averages == {5.0}, f"the loaded averages are 5.0, and the optimizer has {sorted(averages)}"


@contract("CALLS-5")
def test_states_of_fewer_parameters(rank: Rank) -> None:
    """A parameter that the saved optimizer did not have is in none of the groups to load; user code adds it."""
    fsdp = fsdp1(rank)
    model = nn.Sequential(fsdp.nested())
    optimizer = fsdp.train(model)
    saved = fsdp.kind.full_optim_state_dict(model, optimizer, rank0_only=False)
    model.append(nn.Linear(4, 4).to(fsdp.device))
    larger = torch.optim.Adam(model.parameters())
    found = fsdp.kind.shard_full_optim_state_dict(saved, model, optim=larger)
    numbers = [group["params"] for group in found["param_groups"]]
    assert numbers == [[0, 1, 2, 3]], f"the groups to load have the parameters {numbers}, and 0 to 3 were saved"


@contract("CALLS-5")
def test_flat_momentum_of_some_parameters(rank: Rank) -> None:
    """If one flat parameter's state has the momentum of some of its parameters only, that of the others is zero."""
    fsdp = fsdp1(rank)
    model = fsdp.wrap(fsdp.layers(), use_orig_params=False)
    optimizer = fsdp.train(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with fsdp.full_states(model):
        saved = fsdp.kind.optim_state_dict(model, optimizer)
        expected = {name: state["momentum_buffer"].clone() for name, state in saved["state"].items()}
        del saved["state"]["0.bias"]
        fsdp.kind.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)
        found = fsdp.kind.optim_state_dict(model, optimizer)["state"]
    expected["0.bias"].zero_()
    wrong = [name for name, value in expected.items() if not torch.equal(found[name]["momentum_buffer"], value)]
    assert not wrong, f"there is another momentum of {', '.join(wrong)} than was loaded"


@contract("CALLS-5")
def test_parameters_instead_of_the_optimizer(rank: Rank) -> None:
    """The older call for shards of a full state takes parameters (``optim_input``), in their order, and warns."""
    fsdp, model, optimizer = trained(rank)
    full = fsdp.kind.full_optim_state_dict(model, optimizer, rank0_only=False)
    expected = fsdp.kind.shard_full_optim_state_dict(full, model, optim=optimizer)["state"]
    order = [*reversed([*model.parameters()])]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = fsdp.kind.shard_full_optim_state_dict(full, model, optim_input=order)["state"]
    assert len(found) == len(expected), f"of {len(expected)} states {len(found)} are returned"
    others = [number for number, state in found.items() if not _is_same(state, expected[len(order) - 1 - number])]
    assert not others, f"the states of the parameters {others} in the given order are those of other parameters"
    assert any("optim_input" in str(one.message) for one in warned), "no warning names the older argument"


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@contract("CALLS-5")
def test_full_states_are_on_every_rank_by_default(rank: Rank) -> None:
    """With full state dicts chosen and no other option, every rank has all states of the optimizer."""
    fsdp, model, optimizer = trained(rank)
    with fsdp.kind.state_dict_type(model, fsdp.api.StateDictType.FULL_STATE_DICT):
        names = sorted(fsdp.kind.optim_state_dict(model, optimizer)["state"])
    assert names == NAMES, f"this rank has the states of {names}"


@contract("CALLS-5")
def test_states_of_a_small_unit(rank: Rank) -> None:
    """A sharded state dict names all states on every rank, also of a parameter of which the rank has no element."""
    fsdp = fsdp1(rank)
    layers = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1, bias=False)).to(fsdp.device)
    layers[1] = fsdp.wrap(layers[1])
    model = fsdp.wrap(layers)
    optimizer = fsdp.train(model)
    with fsdp.sharded_states(model):
        names = sorted(fsdp.kind.optim_state_dict(model, optimizer)["state"])
    assert names == ["0.bias", "0.weight", "1.weight"], f"this rank has the states of {names}"


class _Around(nn.Module):
    """Calls its only child, which has the name that it has in wrappers such as that of DDP."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: torch.Tensor) -> Any:
        return self.module(batch)


@contract("CALLS-5")
@subjects("use_orig_params", [True, False])
def test_states_of_a_child_called_module(rank: Rank, use_orig_params: bool) -> None:
    """The states of an optimizer have the names of the model's parameters, also below a child called ``module``."""
    fsdp, options = fsdp1(rank), {"use_orig_params": use_orig_params}
    model = _Around(fsdp.nested(options, **options))
    optimizer = fsdp.train(model)
    with fsdp.full_states(model):
        saved = fsdp.kind.optim_state_dict(model, optimizer)
        loaded = fsdp.kind.optim_state_dict_to_load(model, optimizer, copy.deepcopy(saved))
    names, expected = sorted(saved["state"]), sorted(model.state_dict())
    assert names == expected, f"the states have the names {names}, and the parameters {expected}"
    _check_loaded(optimizer, loaded)


@contract("CALLS-5")
def test_states_of_one_element(rank: Rank) -> None:
    """The state of a parameter with one element, and of one that has one element on a rank, is saved in full."""
    fsdp = fsdp1(rank)
    model = fsdp.wrap(nn.Linear(4, 1).to(fsdp.device))
    optimizer = fsdp.train(model)
    with fsdp.full_states(model):
        saved = fsdp.kind.optim_state_dict(model, optimizer)["state"]
    found = {name: sorted(state) for name, state in saved.items()}
    expected = {name: ["exp_avg", "exp_avg_sq", "step"] for name in ("weight", "bias")}
    assert found == expected, f"saved are {found}, not {expected}"


@contract("CALLS-7")
@subjects("use_orig_params", [True, False])
def test_states_of_no_parameter(rank: Rank, use_orig_params: bool) -> None:
    """States that user code puts beside those of parameters are loaded on each rank as it has them."""
    fsdp = fsdp1(rank)
    model = fsdp.wrap(fsdp.layers(), use_orig_params=use_orig_params)
    optimizer = fsdp.train(model)
    with fsdp.full_states(model):  # of the first rank alone they arrive as descriptions: findings/F429.py
        saved = fsdp.kind.optim_state_dict(model, optimizer)
        saved["state"]["seen"] = torch.full((2,), rank.index + 1.0, device=fsdp.device)
        found = fsdp.kind.optim_state_dict_to_load(model, optimizer, saved)["state"].get("seen")
    expected = [rank.index + 1.0] * 2
    assert found is not None and found.tolist() == expected, f"the state {expected} is loaded as {found}"


@contract("CALLS-5")
def test_states_for_an_optimizer_with_names(rank: Rank) -> None:
    """The state to load into an optimizer with names of its own (``is_named_optimizer``) has the model's names.

    The model has its original parameters or flat ones.
    """
    fsdp = fsdp1(rank)
    for use_orig_params in (True, False):
        options: dict[str, Any] = {"use_orig_params": use_orig_params}
        model = fsdp.nested(options, **options)
        optimizer = fsdp.train(model)
        with fsdp.sharded_states(model):
            saved = fsdp.kind.optim_state_dict(model, optimizer)
            states = fsdp.kind.optim_state_dict_to_load(model, optimizer, saved, is_named_optimizer=True)["state"]
        known = dict(model.named_parameters()).keys()
        assert states and states.keys() <= known, (
            f"the states have the keys {sorted(states)}, and the model {sorted(known)}"
        )


@contract("CALLS-5")
@needs(Capability.DISTRIBUTED_CHECKPOINT)
@subjects(
    "call",
    [
        *("load_state_dict", "optim_state_dict_to_load", "load_directly", "optim_state_dict", "shard_full"),
        *("flatten_sharded", "rekey", "for-any-model", "for-any-optimizer"),
    ],
)
def test_calls_leave_their_arguments_unchanged(rank: Rank, call: str) -> None:
    """A state dict that a call takes has the same entries and tensors afterwards."""
    fsdp, model, optimizer = trained(rank)
    kind = fsdp.kind
    calls: dict[str, Any] = {
        "load_state_dict": (model.state_dict, model.load_state_dict),
        "optim_state_dict_to_load": (
            lambda: kind.optim_state_dict(model, optimizer),
            lambda state: kind.optim_state_dict_to_load(model, optimizer, state),
        ),
        "load_directly": (
            lambda: kind.optim_state_dict(model, optimizer),
            lambda state: kind.optim_state_dict_to_load(model, optimizer, state, load_directly=True),
        ),
        "optim_state_dict": (optimizer.state_dict, lambda state: kind.optim_state_dict(model, optimizer, state)),
        "shard_full": (
            lambda: kind.full_optim_state_dict(model, optimizer, rank0_only=False),
            lambda state: kind.shard_full_optim_state_dict(state, model, optim=optimizer),
        ),
        "flatten_sharded": (
            lambda: kind.sharded_optim_state_dict(model, optimizer),
            lambda state: kind.flatten_sharded_optim_state_dict(state, model, optimizer),
        ),
        "rekey": (
            lambda: kind.full_optim_state_dict(model, optimizer, rank0_only=False),
            lambda state: as_fsdp1(fsdp.adapter).rekey_optim_state_dict(
                state, by="number", model=model, optimizer=optimizer
            ),
        ),
        "for-any-model": (lambda: fsdp.nested().state_dict(), lambda state: fsdp.load_model(model, state)),
        "for-any-optimizer": (
            lambda: fsdp.save(model, optimizer),
            lambda state: fsdp.load(model, optimizer, state),
        ),
    }
    save, load = calls[call]
    with fsdp.full_states(model):
        state = save()
        check_left(state, lambda: load(state))


@contract("CALLS-6")
@subjects("place", ["first", "between", "last"])
def test_group_without_parameters(rank: Rank, place: str) -> None:
    """By functions for any model, each group gets its own options, wherever one without parameters stands."""
    fsdp = fsdp1(rank)

    def grouped(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        given = [*model.parameters()]
        groups: list[Any] = [{"params": given[:2], "lr": rate}, {"params": given[2:], "lr": 2 * rate}]
        groups.insert(["first", "between", "last"].index(place), {"params": [], "lr": 4 * rate})
        return fsdp.train(model, optimizer=torch.optim.Adam(groups))

    saved, loaded = fsdp.nested(), fsdp.nested()
    first, second = grouped(saved, 0.25), grouped(loaded, 0.125)
    fsdp.load(loaded, second, fsdp.save(saved, first))
    rates, expected = ([group["lr"] for group in one.param_groups] for one in (second, first))
    assert rates == expected, f"the groups have the learning rates {rates} instead of {expected}"


@contract("CALLS-6")
def test_groups_in_another_order_by_name(rank: Rank) -> None:
    """A state dict by names loads into an optimizer with its groups in another order: options and states by name."""
    fsdp = fsdp1(rank)
    saved, loaded = fsdp.nested(), fsdp.nested()
    given, taking = _mark(_with_groups(fsdp, saved, 0, 1)), _with_groups(fsdp, loaded, 1, 0)
    with fsdp.sharded_states(saved):
        state = fsdp.kind.optim_state_dict(saved, given)
    with fsdp.sharded_states(loaded):
        taking.load_state_dict(fsdp.kind.optim_state_dict_to_load(loaded, taking, state))
    found, expected = _rates_and_averages(taking), [[20.0, 2.0], [10.0, 1.0]]
    assert found == expected, f"the groups have these learning rates and averages: {found}, not {expected}"


@contract("CALLS-6")
def test_groups_in_another_order_by_number(rank: Rank) -> None:
    """A state dict by numbers, for an unsharded optimizer with its groups in another order, has that one's numbers."""
    fsdp = fsdp1(rank)
    model, plain = fsdp.nested(), fsdp.layers()
    by_number = fsdp.api.OptimStateKeyType.PARAM_ID
    state = fsdp.kind.full_optim_state_dict(model, _mark(_with_groups(fsdp, model, 1, 0)), rank0_only=False)
    taking = _with_groups(fsdp, plain, 0, 1)
    taking.load_state_dict(fsdp.kind.rekey_optim_state_dict(state, by_number, plain, optim=taking))
    found, expected = _rates_and_averages(taking), [[10.0, 1.0], [20.0, 2.0]]
    assert found == expected, f"the groups have these learning rates and averages: {found}, not {expected}"


def _with_groups(fsdp: Fsdp1, model: nn.Module, *layers: int) -> torch.optim.Optimizer:
    """Adam after one step, with one group per layer, whose learning rate is the layer's number plus 1."""
    named = dict(model.named_parameters())
    groups = [
        {"params": [one for name, one in named.items() if f"{layer}." in name], "lr": layer + 1.0} for layer in layers
    ]
    return fsdp.train(model, optimizer=torch.optim.Adam(groups))


def _states_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """The states of a group's parameters, without those of which this rank has no element."""
    return [optimizer.state[one] for one in group["params"] if optimizer.state.get(one)]


def _mark(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Write the learning rate of each group into its parameters' averages, and then raise the rate tenfold."""
    for group in optimizer.param_groups:
        for state in _states_of(optimizer, group):
            state["exp_avg"].fill_(group["lr"])
        group["lr"] *= 10
    return optimizer


def _rates_and_averages(optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """The learning rate of each group, and its parameters' averages, reduced to one value if they are marked."""
    return [
        [group["lr"], *sorted({float(state["exp_avg"].mean()) for state in _states_of(optimizer, group)})]
        for group in optimizer.param_groups
    ]


# Which ranks save


@contract("CALLS-7")
def test_mesh_of_a_sharded_state_dict(rank: Rank) -> None:
    """The values of a sharded state dict lie on the mesh that the wrapper was given."""
    _check_mesh(fsdp1(rank), "FULL_SHARD")


@contract("CALLS-7")
@world(4)
@needs(Capability.HYBRID)
def test_mesh_of_a_sharded_state_dict_of_replicas(rank: Rank) -> None:
    """The values of a sharded state dict lie on the (replicate, shard) mesh that the wrapper was given."""
    _check_mesh(hybrid(rank), "HYBRID_SHARD")


def _check_mesh(fsdp: Fsdp1, strategy: str) -> None:
    model = fsdp.wrap(fsdp.layers(), sharding_strategy=fsdp.api.ShardingStrategy[strategy])
    with fsdp.sharded_states(model):
        others = {str(one.device_mesh) for one in model.state_dict().values() if one.device_mesh != fsdp.mesh}
    assert not others, f"sharded values lie on {others}, not on the mesh that was given"


@contract("CALLS-7")
@world(4)
@needs(Capability.HYBRID)
def test_group_whose_first_rank_saves(rank: Rank) -> None:
    """The first rank of the given group saves the optimizer's full state: of all ranks, or of each replica."""
    fsdp = hybrid(rank)
    model = fsdp.wrap(fsdp.layers(), sharding_strategy=fsdp.api.ShardingStrategy.HYBRID_SHARD)
    optimizer = fsdp.train(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    of_all, of_a_replica = dist.group.WORLD, fsdp.mesh.get_group(1)
    with fsdp.full_states(model, first_rank=True):
        found = [fsdp.kind.optim_state_dict(model, optimizer, group=group) for group in (of_all, of_a_replica)]
    found.append(fsdp.kind.full_optim_state_dict(model, optimizer, group=of_all))
    saved = [sorted(one.get("state", {})) for one in found]
    first, each = NAMES if rank.index == 0 else [], NAMES if rank.index % 2 == 0 else []
    expected = [first, each, first]
    assert saved == expected, (
        f"saved by the first of all, of its replica, and of all by the older call: {saved} on this rank, not {expected}"
    )


@contract("CALLS-7")
@world(4)
@needs(Capability.HYBRID)
@subjects("given", ["nothing", "all", "replica"])
def test_states_of_the_first_rank_on_replicas(rank: Rank, given: str) -> None:
    """Every rank of replicas loads the optimizer's state that only first ranks have saved, with the same group."""
    fsdp = hybrid(rank)
    model = fsdp.wrap(fsdp.layers(), sharding_strategy=fsdp.api.ShardingStrategy.HYBRID_SHARD)
    optimizer = fsdp.train(model)
    group = {"nothing": None, "all": dist.group.WORLD, "replica": fsdp.mesh.get_group(1)}[given]
    with fsdp.full_states(model, first_rank=True):
        saved = fsdp.kind.optim_state_dict(model, optimizer, group=group)
        loaded = fsdp.kind.optim_state_dict_to_load(model, optimizer, saved, group=group)
    _check_loaded(optimizer, loaded)


@contract("CALLS-7")
@world(4)
@needs(Capability.HYBRID)
def test_first_rank_of_each_replica(rank: Rank) -> None:
    """If full parameters or states are for the first rank only, that is the first rank of each replica."""
    fsdp = hybrid(rank)
    model = fsdp.wrap(fsdp.layers(), sharding_strategy=fsdp.api.ShardingStrategy.HYBRID_SHARD)
    fsdp.forward(model)
    is_first = rank.index % 2 == 0
    saved = fsdp.saved_by_the_first_rank(model)
    assert saved == (NAMES if is_first else []), f"rank {rank.index} saves {saved}"
    with fsdp.kind.summon_full_params(model, rank0_only=True, writeback=False):
        is_full = model.module[0].weight.shape == (4, 4)
    assert is_full == is_first, f"rank {rank.index} has {'' if is_full else 'no '}full parameters"


@contract("CALLS-7")
@world(4)
@needs(Capability.HYBRID)
def test_states_of_a_submesh(rank: Rank) -> None:
    """For a model on a sub-mesh, the sub-mesh's first rank saves the optimizer's state, and all its ranks load it."""
    fsdp = hybrid(rank)
    ranks = fsdp.mesh["shard"]
    model = fsdp.wrap(fsdp.layers(), device_mesh=ranks)
    optimizer = fsdp.train(model)
    with fsdp.full_states(model, first_rank=True):
        saved = fsdp.kind.optim_state_dict(model, optimizer)
        loaded = fsdp.kind.optim_state_dict_to_load(model, optimizer, saved)
    states, expected = len(saved.get("state", {})), len(NAMES) if ranks.get_local_rank() == 0 else 0
    assert states == expected, f"rank {ranks.get_local_rank()} of the sub-mesh saves {states} states, not {expected}"
    assert loaded["state"], "a rank of the sub-mesh loads no state"


@contract("CALLS-7")
@world(4)
@needs(Capability.HYBRID)
def test_sharded_states_of_a_part_of_the_world(rank: Rank) -> None:
    """States of flat parameters over a process group of half of the ranks are saved in shards and load there."""
    fsdp = hybrid(rank)
    group = fsdp.mesh["shard"].get_group()
    model = fsdp.wrap(fsdp.layers(), device_mesh=None, process_group=group, use_orig_params=False)
    optimizer = fsdp.train(model)
    with fsdp.sharded_states(model):
        saved = fsdp.kind.optim_state_dict(model, optimizer)
        loaded = fsdp.kind.optim_state_dict_to_load(model, optimizer, saved)
    _check_loaded(optimizer, loaded)  # given as `group=`, one without rank 0 is refused: findings/F428.py


@contract("CALLS-7")
@world(4)
@needs(Capability.HYBRID)
@subjects("loads", [(), (0, 1), (0,)], ids=["saves", "loads", "loads-alone"])
def test_general_functions_on_a_submesh(rank: Rank, loads: tuple[int, ...]) -> None:
    """By functions for any model, too, the first rank of a sub-mesh saves, and the others load what it has.

    A sub-mesh may load alone, without the ranks of the other.
    """
    fsdp = hybrid(rank)
    ranks = fsdp.mesh["shard"]
    model = fsdp.wrap(fsdp.layers(), device_mesh=ranks)
    optimizer = fsdp.train(model)
    saved, before = fsdp.save(model, optimizer), copy.deepcopy(optimizer.state_dict()["state"])
    found, expected = sorted(saved.get("state", {})), NAMES if ranks.get_local_rank() == 0 else []
    assert found == expected, f"rank {ranks.get_local_rank()} of the sub-mesh saves the states of {found}"
    if fsdp.mesh["replicate"].get_local_rank() in loads:
        fsdp.train(model, optimizer=optimizer)
        fsdp.load(model, optimizer, saved)
        after = optimizer.state_dict()["state"]
        others = [number for number, state in before.items() if not _is_same(state, after[number])]
        assert not others, f"the states of the parameters {others} are loaded with other values than were saved"


@contract("CALLS-7")
def test_plain_modules_are_saved_by_every_rank(rank: Rank) -> None:
    """If only the first rank saves full values, every rank still saves the plain modules next to a wrapper."""
    fsdp = fsdp1(rank)
    model = nn.Sequential(nn.Linear(4, 4).to(fsdp.device), fsdp.wrap(fsdp.layers()))
    names = [name for name in fsdp.saved_by_the_first_rank(model) if name.startswith("0.")]
    assert names == NAMES[:2], f"of the plain module this rank saves {names}"


@contract("CALLS-7")
def test_states_of_modules_of_one_rank(rank: Rank) -> None:
    """For modules next to a wrapper that differ between ranks, each rank saves and loads its own optimizer states."""
    fsdp = fsdp1(rank)
    own = f"of-rank-{rank.index}"
    model = nn.Sequential()
    model.add_module("all", fsdp.nested())
    model.add_module(own, nn.Linear(4, 4).to(fsdp.device))
    optimizer = fsdp.train(model)
    with fsdp.full_states(model):
        saved = fsdp.kind.optim_state_dict(model, optimizer)
        loaded = fsdp.kind.optim_state_dict_to_load(model, optimizer, saved)
    names = sorted(saved["state"])
    expected = sorted([*(f"all.{name}" for name in NAMES), f"{own}.bias", f"{own}.weight"])
    assert names == expected, f"this rank saves the states of {names}"
    _check_loaded(optimizer, loaded)


def _check_loaded(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
    """Check that what is to be loaded has this rank's states, which were saved."""
    before, after = optimizer.state_dict()["state"], loaded["state"]
    others = [number for number, state in before.items() if not _is_same(state, after.get(number, {}))]
    assert not others, f"the states of the parameters {others} are loaded with other values than were saved"


@contract("CALLS-7")
def test_first_rank_saves_a_root_without_parameters(rank: Rank) -> None:
    """If only the first rank saves, a wrapper without parameters of its own saves nothing on the other ranks."""
    fsdp = fsdp1(rank)
    saved = fsdp.saved_by_the_first_rank(fsdp.without_parameters())
    expected = 5 if rank.index == 0 else 0
    assert len(saved) == expected, f"rank {rank.index} saves {saved}, {expected} values were expected"
