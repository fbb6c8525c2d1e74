"""Chapter CALLS: options of ``FullyShardedDataParallel`` of each kind, in each container and at their bounds.

A case goes through a table, and names what is wrong of it.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.suites.apis import NAMES, Fsdp1, fsdp1, trained
from shardproof.testing import Capability, Rank, contract, needs, world
from shardproof.testing.refuse import Refusal
from shardproof.testing.states import whole_on_cpu

pytestmark = [needs(Capability.FSDP1_API), world(2)]

#: The same values, in any container that an iterable argument may be.
CONTAINERS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "generator": iter,
    "keys of a dict": lambda given: dict.fromkeys(given).keys(),
}


# Rules that wrap


def _model() -> nn.Module:
    """Modules of 0, 6, 10, 20 and 30 elements, of which the last has the first ones in it."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    return nn.Sequential(inner, nn.ModuleList([nn.Linear(2, 2)]), nn.BatchNorm1d(2))


def _rules(api: Any) -> dict[str, tuple[Any, list[str]]]:
    """Rules, and the names of the modules that each wraps besides the root."""
    made = api.wrap

    def size(number: Any, **options: Any) -> Any:
        return functools.partial(made.size_based_auto_wrap_policy, min_num_params=number, **options)

    def chosen(answer: Any) -> Any:
        return made.CustomPolicy(lambda module: answer if isinstance(module, nn.Linear) else False)

    everything, linear = ["0", "0.0", "0.1", "0.2", "1.0", "2"], ["0.0", "0.2", "1.0"]
    rules = {
        "a size of 0": (size(0), everything),
        "a negative size": (size(-1), everything),
        "a size of 1": (size(1), [*linear, "2"]),
        "a size of 6": (size(6), linear),
        "a size of 6.5": (size(6.5), ["0.0", "0.2"]),
        "a size of 21": (size(21), ["0"]),
        "an infinite size": (size(math.inf), []),
        "a size beyond 64 bits": (size(2**64), []),
        "no leaves and nothing excluded": (
            size(0, force_leaf_modules=set(), exclude_wrap_modules=set()),
            sorted([*everything, "1"]),
        ),
        "a leaf": (size(0, force_leaf_modules={nn.Sequential}), []),
        "two leaves": (size(0, force_leaf_modules={nn.ModuleList, nn.Linear}), ["0", "0.1", "2"]),
        "what is excluded": (size(0, exclude_wrap_modules={nn.Linear, nn.Sequential, nn.Tanh}), ["1", "2"]),
        "a function of a module": (
            functools.partial(made.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Tanh)),
            ["0.1"],
        ),
        "classes": (
            functools.partial(made.transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear, nn.Tanh}),
            sorted([*linear, "0.1"]),
        ),
        "no classes": (functools.partial(made.transformer_auto_wrap_policy, transformer_layer_cls=set()), []),
        "a function of one's own": (
            lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel == 10,
            ["0.2"],
        ),
        "a function that never goes deeper": (lambda module, recurse, nonwrapped_numel: not recurse, []),
        "the answer True": (chosen(True), linear),
        "an empty dict": (chosen({}), []),
        "a dict": (chosen({"forward_prefetch": True}), linear),
    }
    for name, container in CONTAINERS.items():
        rules[f"classes in a {name}"] = (made.ModuleWrapPolicy(container([nn.Linear])), linear)
        rules[f"no class in a {name}"] = (made.ModuleWrapPolicy(container([])), [])
    return rules


@contract("CALLS-15")
def test_rules_that_wrap(rank: Rank) -> None:
    """Rules by size, class, function and answer wrap the modules that they describe, also at the bounds of sizes."""
    fsdp, wrong = fsdp1(rank), list[str]()
    for name, (rule, expected) in _rules(fsdp.api).items():
        found = _wrapped(fsdp, rule)
        if found != ["", *expected]:
            wrong.append(f"by {name} are wrapped {found}, not {['', *expected]}")
    assert not wrong, "\n".join(wrong)


@contract("CALLS-15")
def test_rules_and_batch_normalisation(rank: Rank) -> None:
    """In lower precision a batch normalisation is wrapped besides what a rule chooses, unless it is ignored."""
    fsdp, wrong = fsdp1(rank), list[str]()
    made = fsdp.api.wrap
    rules = {
        "classes": made.ModuleWrapPolicy({nn.Linear}),
        "answers": made.CustomPolicy(lambda module: isinstance(module, nn.Linear)),
        "a size": functools.partial(made.size_based_auto_wrap_policy, min_num_params=6),
    }
    linear = ["", "0.0", "0.2", "1.0"]
    for name, rule in rules.items():
        for ignores in (False, True):
            found = _wrapped(fsdp, rule, ignores=ignores, mixed_precision=fsdp.low_precision())
            expected = linear if ignores else [*linear, "2"]
            if found != expected:
                wrong.append(f"by {name}, {'' if ignores else 'not '}ignored, are wrapped {found}, not {expected}")
    assert not wrong, "\n".join(wrong)


def _wrapped(fsdp: Fsdp1, rule: Any, *, ignores: bool = False, **options: Any) -> list[str]:
    """The names of the modules that a rule wraps."""
    model: Any = _model().to(fsdp.device)
    names = {child: name for name, child in model.named_modules()}
    if ignores:
        options["ignored_modules"] = [model[2]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a container, and of batch normalisation
        wrapper = fsdp.wrap(model, auto_wrap_policy=rule, **options)
    return sorted(names[one.module] for one in fsdp.kind.fsdp_modules(wrapper))


@contract("CALLS-15")
def test_any_wrapper_by_hand(rank: Rank) -> None:
    """By hand, ``wrap`` calls any wrapper, a function too, with the context's arguments and its own before those."""
    made, calls = fsdp1(rank).api.wrap, list[tuple[nn.Module, dict[str, Any]]]()
    layer = nn.Linear(4, 4)

    def wrapper(module: nn.Module, **options: Any) -> nn.Module:
        calls.append((module, options))
        return nn.Sequential(module)

    with made.enable_wrap(wrapper_cls=wrapper, first=1, second=2):
        found = [made.wrap(layer), made.wrap(layer, second=3, third=4)]
    options = [one for _, one in calls]
    assert all(module is layer for module, _ in calls) and all(isinstance(one, nn.Sequential) for one in found), (
        f"the wrapper was called with {calls}, and {found} is returned"
    )
    assert options == [{"first": 1, "second": 2}, {"first": 1, "second": 3, "third": 4}], f"its options are {options}"
    assert made.wrap(layer, second=3) is layer, "after the context a module is still wrapped"


# What is ignored


@contract("CALLS-16")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_containers_of_ignored_modules(rank: Rank, use_orig_params: bool) -> None:
    """Modules or parameters to ignore may come in any container, also an empty one, and keep their objects."""
    fsdp, wrong = fsdp1(rank), list[str]()
    for name, container in CONTAINERS.items():
        for what in ("modules", "module states", "parameters", "nothing"):
            layers = fsdp.layers()
            given = {
                "modules": {"ignored_modules": container([layers[0]])},
                "module states": {"ignored_states": container([layers[0]])},
                "parameters": {"ignored_states": container([*layers[0].parameters()])},
                "nothing": {"ignored_states": container([])},
            }[what]
            own, expected = layers[0].weight, fsdp.forward(layers).detach()
            model = fsdp.wrap(layers, use_orig_params=use_orig_params, **given)
            keeps = layers[0]._parameters.get("weight") is own and own.shape == (4, 4)
            if keeps != (what != "nothing"):
                wrong.append(f"of {what} in a {name}, the weight is {'ignored' if keeps else 'sharded'}")
            if not torch.equal(fsdp.forward(model), expected):
                wrong.append(f"with {what} in a {name} to ignore, the output differs")
            sharded = [one.numel() for one in model.parameters() if one is not own]
            if max(sharded) > 20:
                wrong.append(f"with {what} in a {name} to ignore, parameters have {sharded} elements on this rank")
    assert not wrong, "\n".join(wrong)


# What stands for an optimizer


@contract("CALLS-13")
def test_containers_instead_of_an_optimizer(rank: Rank) -> None:
    """Older calls take parameters in any ordered container, groups, or nothing, which means those of the model."""
    fsdp, model, optimizer = trained(rank)
    kind, parameters = fsdp.kind, [*model.parameters()]
    groups = [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}]
    given: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        **{name: functools.partial(make, parameters) for name, make in CONTAINERS.items() if name != "set"},
        "groups": lambda: groups,
        "a generator of groups": lambda: iter(groups),
    }
    wrong = list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about older calls
        full = kind.full_optim_state_dict(model, optimizer, rank0_only=False)
        expected = kind.shard_full_optim_state_dict(full, model, optim=optimizer)
        to = fsdp.api.OptimStateKeyType.PARAM_ID
        numbered = kind.rekey_optim_state_dict(full, to, model, optim=optimizer)
        calls: dict[str, Callable[[Any], Any]] = {
            "rekey_optim_state_dict": lambda one: kind.rekey_optim_state_dict(full, to, model, optim_input=one),
            "full_optim_state_dict": lambda one: kind.full_optim_state_dict(
                model, optimizer, optim_input=one, rank0_only=False
            ),
            "shard_full_optim_state_dict": lambda one: kind.shard_full_optim_state_dict(full, model, optim_input=one),
            "scatter_full_optim_state_dict": lambda one: kind.scatter_full_optim_state_dict(
                None if rank.index else full, model, optim_input=one
            ),
        }
        wanted = {"full_optim_state_dict": full, "rekey_optim_state_dict": numbered}
        for call, run in calls.items():
            for name, make in given.items():
                found, other = run(make()), wanted.get(call, expected)
                if _shown(found["state"]) != _shown(other["state"]):
                    wrong.append(f"{call} with {name} returns {_shown(found['state'])}, not {_shown(other['state'])}")
    assert not wrong, "\n".join(wrong)


def _shown(states: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: {name: one.flatten().tolist() if isinstance(one, torch.Tensor) else one for name, one in state.items()}
        for key, state in states.items()
    }


@contract("CALLS-13")
@pytest.mark.parametrize("wrong", ["nothing", "two-kinds", "numbers", "a-number", "no-states"])
def test_values_that_are_no_optimizer(rank: Rank, wrong: str) -> None:
    """Older calls refuse parameters that are none, of two kinds or no iterable, and a state dict without states."""
    fsdp, model, optimizer = trained(rank)
    kind, parameters = fsdp.kind, [*model.parameters()]
    given: dict[str, Any] = {
        "nothing": [],
        "two-kinds": [parameters[0], {"params": parameters[1:]}],
        "numbers": [1, 2],
        "a-number": 3,
        "no-states": None,
    }
    words = {"a-number": "iterable", "no-states": "state"}.get(wrong, "Optimizer input should")
    what = given[wrong]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about older calls
        full = kind.full_optim_state_dict(model, optimizer, rank0_only=False)
        if wrong == "no-states":
            del full["state"]
        fsdp.check_refused(words, lambda: kind.shard_full_optim_state_dict(full, model, optim_input=what))
        if wrong == "no-states":
            for empty in (
                lambda: kind.shard_full_optim_state_dict({}, model, optim=optimizer),
                lambda: kind.rekey_optim_state_dict({}, fsdp.api.OptimStateKeyType.PARAM_ID, model),
                lambda: kind.flatten_sharded_optim_state_dict({}, model, optimizer),
            ):
                fsdp.check_refused(words, empty)
            return
        by_number = fsdp.api.OptimStateKeyType.PARAM_ID
        fsdp.check_refused(words, lambda: kind.rekey_optim_state_dict(full, by_number, model, optim_input=what))


# Forms of state dicts


@contract("CALLS-4")
def test_configurations_of_forms(rank: Rank) -> None:
    """Every configuration of a form is returned as it was set, and values are saved as it says."""
    fsdp, wrong = fsdp1(rank), list[str]()
    api, kind = fsdp.api, fsdp.kind
    forms = {"FULL_STATE_DICT": "Full", "SHARDED_STATE_DICT": "Sharded"}
    for form, name in forms.items():
        for offload, of_optimizer in ((False, True), (True, False)):
            if form == "FULL_STATE_DICT" and (offload or of_optimizer):
                continue  # findings/F041.py: what is on the CPU already would be freed
            model: Any = fsdp.nested()
            plain = {key: whole_on_cpu(rank, value) for key, value in model.state_dict().items()}
            configs = (
                getattr(api, f"{name}StateDictConfig")(offload_to_cpu=offload),
                getattr(api, f"{name}OptimStateDictConfig")(offload_to_cpu=of_optimizer),
            )
            what = f"{form} with offload_to_cpu={offload} and {of_optimizer} for the optimizer"
            with kind.state_dict_type(model, api.StateDictType[form], *configs):
                inside = kind.get_state_dict_type(model)
            kind.set_state_dict_type(model, api.StateDictType[form], *configs)
            for when, one in (("in its context", inside), ("once set", kind.get_state_dict_type(model))):
                found = one.state_dict_type.name, one.state_dict_config.offload_to_cpu
                if found != (form, offload) or one.optim_state_dict_config.offload_to_cpu != of_optimizer:
                    wrong.append(f"{what} is {one} {when}")
            saved = model.state_dict()
            others = [key for key, value in saved.items() if not torch.equal(whole_on_cpu(rank, value), plain[key])]
            if others or sorted(saved) != NAMES:
                wrong.append(f"{what} saves {sorted(saved)}, with other values of {others}")
            if offload and any(value.device.type != "cpu" for value in saved.values()):
                wrong.append(f"{what} saves values on { ({str(value.device) for value in saved.values()}) }")
    wrong += _wrong_local_settings(fsdp)
    assert not wrong, "\n".join(wrong)
    # A configuration of the base class belongs to no form.
    model, others = fsdp.nested(), list[Any]()
    for offload in (False, True):
        others += [(api.StateDictConfig(offload), None), (None, api.OptimStateDictConfig(offload_to_cpu=offload))]
    for form, (config, of_optimizer) in itertools.product(api.StateDictType, others):
        before = kind.get_state_dict_type(model)
        for call in (kind.set_state_dict_type, _in_context(kind)):
            attempt = functools.partial(call, model, form, config, of_optimizer)
            fsdp.check_refused("state_dict_config of type", attempt)
        if kind.get_state_dict_type(model) != before:
            wrong.append(f"a configuration that {form.name} refuses changes {before}")
    assert not wrong, "\n".join(wrong)


def _in_context(kind: Any) -> Callable[..., None]:
    def call(*given: Any) -> None:
        with kind.state_dict_type(*given):
            pass

    return call


def _wrong_local_settings(fsdp: Fsdp1) -> list[str]:
    """What is wrong with the settings of a local form, in its context and once they are set."""
    api, kind, wrong = fsdp.api, fsdp.kind, list[str]()
    model, form = fsdp.nested_on_groups(), api.StateDictType.LOCAL_STATE_DICT
    for offload, of_optimizer in ((False, True), (True, False)):
        given = api.LocalStateDictConfig(offload), api.LocalOptimStateDictConfig(offload_to_cpu=of_optimizer)
        with kind.state_dict_type(model, form, *given):
            inside = kind.get_state_dict_type(model)
        after = kind.get_state_dict_type(model)
        kind.set_state_dict_type(model, form, *given)
        for when, one in (("in its context", inside), ("once set", kind.get_state_dict_type(model))):
            if (one.state_dict_type, one.state_dict_config, one.optim_state_dict_config) != (form, *given):
                wrong.append(f"{given} are {one} {when}")
        kind.set_state_dict_type(model, after.state_dict_type)
    return wrong


@contract("CALLS-4")
def test_local_forms_of_small_units(rank: Rank) -> None:
    """A local state dict is loaded back, also of units of which some ranks have nothing, with a move to the CPU too."""
    fsdp, wrong = fsdp1(rank), list[str]()
    api = fsdp.api
    for rows, columns in ((1, 1), (3, 1), (4, 4)):
        for offload in (False, True):
            group: Any = {"device_mesh": None, "process_group": fsdp.mesh.get_group()}
            layers = [nn.Linear(columns, rows, bias=False).to(fsdp.device) for _ in range(2)]
            before = layers[0].weight.detach().clone()
            model, other = (fsdp.wrap(layer, use_orig_params=False, **group) for layer in layers)
            what = f"a unit of {rows * columns} elements, with offload_to_cpu={offload}"
            config = api.LocalStateDictConfig(offload_to_cpu=offload)
            with fsdp.kind.state_dict_type(model, api.StateDictType.LOCAL_STATE_DICT, config):
                saved = model.state_dict()
            with fsdp.kind.state_dict_type(other, api.StateDictType.LOCAL_STATE_DICT, config):
                found = other.load_state_dict(saved)
            if found.missing_keys or found.unexpected_keys:
                wrong.append(f"{what}: a load finds {found}")
            with fsdp.kind.summon_full_params(other, writeback=False):
                after = other.module.weight.detach().clone()
            if not torch.equal(after, before):
                wrong.append(f"{what}: {before.tolist()} is loaded as {after.tolist()}")
    assert not wrong, "\n".join(wrong)


@contract("CALLS-8")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_calls_of_a_wrapper_without_parameters(rank: Rank, use_orig_params: bool) -> None:
    """Each call works on a wrapper that has no parameter at all, with another next to it or not."""
    fsdp, wrong = fsdp1(rank), list[str]()
    kind = fsdp.kind
    for beside in (False, True):
        layers: list[nn.Module] = [nn.Tanh(), nn.BatchNorm1d(4, affine=False)]
        if beside:
            layers.append(fsdp.wrap(nn.Linear(4, 4).to(fsdp.device), use_orig_params=use_orig_params))
        model = fsdp.wrap(nn.Sequential(*layers).to(fsdp.device), use_orig_params=use_orig_params)
        names = sorted(["1.running_mean", "1.running_var", "1.num_batches_tracked", *(["2.weight", "2.bias"] * beside)])
        for form in (fsdp.full_states, fsdp.sharded_states):
            with form(model):
                saved = model.state_dict()
                keys = model.load_state_dict(saved)
            if sorted(saved) != names or keys.missing_keys or keys.unexpected_keys:
                wrong.append(f"saved are {sorted(saved)}, not {names}, and a load finds {keys}")
        for options in (
            *({"writeback": False}, {"recurse": False}),
            *([{"with_grads": True}] if use_orig_params else []),
        ):
            with kind.summon_full_params(model, **options):
                shapes = [tuple(one.shape) for one in model.parameters()]
            full = [(4, 4), (4,)] if beside and options != {"recurse": False} else []
            if options != {"recurse": False} and shapes != full:
                wrong.append(f"with {options} the full parameters have the shapes {shapes}, not {full}")
        with model.no_sync():
            output = fsdp.forward(model).requires_grad_(True) if not beside else fsdp.forward(model)
        output.sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is no gradient
            norm = float(model.clip_grad_norm_(1.0))
        if not beside and norm != 0:
            wrong.append(f"without a parameter the norm is {norm}")
        if model.apply(lambda module: None) is not model or len(kind.fsdp_modules(model)) != 1 + beside:
            wrong.append(f"of {1 + beside} wrappers {len(kind.fsdp_modules(model))} are listed")
    assert not wrong, "\n".join(wrong)


# Batch normalisation


@contract("CALLS-10")
def test_batch_normalisation_of_full_precision(rank: Rank) -> None:
    """Batch normalisation that gets float32 next to lower precision returns float32, as one that is not wrapped."""
    fsdp = fsdp1(rank)

    rule = functools.partial(fsdp.api.wrap.size_based_auto_wrap_policy, min_num_params=20)
    precision = fsdp.low_precision(cast_root_forward_inputs=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it stays in full precision
        norms = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4)).to(fsdp.device)
        model = fsdp.wrap(norms, auto_wrap_policy=rule, mixed_precision=precision)
    output = fsdp.forward(model)
    assert output.dtype is torch.float32, f"batch normalisation of float32 returns {output.dtype}"
    plain = nn.BatchNorm1d(4).to(fsdp.device)
    expected = plain(plain(torch.ones(2, 4, device=fsdp.device)))
    assert torch.equal(output, expected), f"batch normalisation returns {output.tolist()}, not {expected.tolist()}"


# Numbers that clip


class _Ones(nn.Module):
    """Two parameters of 7 and 9 elements, whose gradients are the input."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.low.sum() + self.high.sum())


@contract("CALLS-10")
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("shards", [True, False], ids=["sharded", "replicated"])
def test_low_gradients_that_are_added_up(rank: Rank, shards: bool, use_orig_params: bool) -> None:
    """Gradients that stay in lower precision are added up over backward passes, as those of float32 are."""
    fsdp = fsdp1(rank)
    wrap: Any = fsdp.wrap if shards else fsdp.without_shards
    precision = fsdp.low_precision(keep_low_precision_grads=True)
    model = wrap(_Ones().to(fsdp.device), use_orig_params=use_orig_params, mixed_precision=precision)
    for number in range(1, 4):
        model(torch.full((), 3.0, device=fsdp.device)).float().backward()
        found = {value for one in model.parameters() if one.grad is not None for value in one.grad[:3].tolist()}
        assert found <= {3.0 * number}, f"after {number} backward passes gradients are {found}, not {3.0 * number}"
    dtypes = {one.grad.dtype for one in model.parameters() if one.grad is not None}
    assert dtypes <= {torch.bfloat16}, f"gradients that are to stay in bfloat16 are of {dtypes}"


@contract("CALLS-17")
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("shards", [True, False], ids=["sharded", "replicated"])
def test_numbers_that_clip(rank: Rank, shards: bool, use_orig_params: bool) -> None:
    """Limits and norms of any kind of number, integers and words too, clip 16 gradients of 3 as their formula says."""
    fsdp, wrong = fsdp1(rank), list[str]()
    wrap: Any = fsdp.wrap if shards else fsdp.without_shards
    norms: Iterable[Any] = (2, 2.0, 1, 1.0, 0.5, 3, 64.0, math.inf, "inf")
    for norm_type in norms:
        for limit in (0, 0.0, 1, 6, 0.25, 1e30, math.inf):
            model = wrap(_Ones().to(fsdp.device), use_orig_params=use_orig_params)
            model(torch.full((), 3.0, device=fsdp.device)).backward()
            found = float(model.clip_grad_norm_(limit, norm_type))
            norm = 3.0 if float(norm_type) == math.inf else 3.0 * 16 ** (1 / norm_type)
            expected = 3.0 * min(1.0, limit / (norm + 1e-6))
            gradients = {
                one.grad.flatten()[:1].item() for one in model.parameters() if one.grad is not None and one.numel()
            }
            ulps = max(abs(found / norm - 1), *(abs(one - expected) / 3 for one in gradients), 0)
            # As CLIPPING-7 has it: each number is rounded a few times.
            if ulps > 4 * torch.finfo(torch.float32).eps:
                wrong.append(
                    f"by norm {norm_type!r} and limit {limit!r} the norm is {found}, not {norm}, and gradients are "
                    f"{gradients}, not {expected}"
                )
    for norm_type in (0, 0.0):
        wrong += _wrong_by_zero(fsdp, wrap(_Ones().to(fsdp.device), use_orig_params=use_orig_params), norm_type)
    assert not wrong, "\n".join(wrong)


def _wrong_by_zero(fsdp: Fsdp1, model: Any, norm_type: Any) -> list[str]:
    """What is wrong with clipping to 1 by the 0-norm, which is the number of elements, or of tensors, or refused."""
    model(torch.full((), 3.0, device=fsdp.device)).backward()
    clip = Refusal(fsdp.rank, lambda: float(model.clip_grad_norm_(1, norm_type)), may_send=True)
    found = {value for one in model.parameters() if one.grad is not None for value in one.grad.flatten()[:3].tolist()}
    if clip.text is not None:
        clip.check_names("zero")
        return [] if found <= {3.0} else [f"gradients of 3 are {found} once a {norm_type!r}-norm is refused"]
    number = clip.result
    clipped = {3.0 * torch.clamp(1 / (torch.tensor(number) + 1e-6), max=1.0).item()}
    if number in (16.0, len([*model.parameters()])) and all(
        abs(one - value) < 1e-6 for one in found for value in clipped
    ):
        return []
    return [f"the {norm_type!r}-norm of 16 elements in 2 tensors is {number}, and gradients are {found}, not {clipped}"]
