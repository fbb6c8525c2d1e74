"""Mistakes of torch's functions for state dicts, in place of the functions until a case ends.

A row names one by its class in ``planted.adapters``, such as ``planted.adapters:FrozenKept`` for :func:`frozen_kept`.
Each is called as the function of torch that it replaces, with that function before its arguments.
"""

import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import staging, state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardproof.testing.compare import map_tensors

BUGS: dict[str, tuple[Any, str, Callable[..., Any]]] = {}
"""By the name of a class: the owner and the name of what is replaced, and the mistake."""


def of(name: str, *, owner: Any = state_dict) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a mistake of a function of torch."""

    def mark(mistake: Callable[..., Any]) -> Callable[..., Any]:
        kind = "".join(part.title() for part in mistake.__name__.split("_"))
        BUGS[kind] = (owner, name, mistake)
        return mistake

    return mark


def plant(kind: str, replace: Callable[[Any, str, Any], None]) -> None:
    """Replace a function of torch, wherever torch's module and the cases have it."""
    owner, name, mistake = BUGS[kind]
    found = getattr(owner, name)

    @functools.wraps(found)
    def made(*args: Any, **kwargs: Any) -> Any:
        return mistake(found, *args, **kwargs)

    replace(owner, name, made)
    for module in [module for key, module in sys.modules.items() if key.startswith("shardproof.suites.")]:
        for key, value in list(vars(module).items()):
            if value is found:
                replace(module, key, made)


def _without(options: StateDictOptions | None, **values: Any) -> StateDictOptions:
    return dataclasses.replace(options or StateDictOptions(), **values)


@of("get_model_state_dict")
def frozen_kept(get: Any, model: nn.Module, *, options: Any = None, **others: Any) -> Any:
    """Frozen parameters are kept."""
    return get(model, options=_without(options, ignore_frozen_params=False), **others)


@of("get_model_state_dict")
def meta_left(get: Any, model: nn.Module, *, options: Any = None, **others: Any) -> Any:
    """What is on the meta device stays there."""
    is_there = any(parameter.is_meta for parameter in model.parameters())
    return get(model, options=_without(options, cpu_offload=False) if is_there else options, **others)


@of("set_model_state_dict")
def strides_forgotten(set_: Any, model: nn.Module, state: Any, *, options: Any = None) -> Any:
    """Values are read in the order in which memory has them."""
    turned = map_tensors(lambda one: one.t().reshape(one.shape) if one.ndim == 2 and one.stride(0) == 1 else one, state)
    return set_(model, turned, options=options)


@of("set_model_state_dict")
def buffers_left(set_: Any, model: nn.Module, state: Any, *, options: Any = None) -> Any:
    """Running statistics are not loaded."""
    kept = {name: value for name, value in state.items() if "running" not in str(name)}
    keys = set_(model, kept, options=_without(options, strict=False))
    keys.missing_keys.clear()
    return keys


@of("get_optimizer_state_dict")
def steps_dropped(get: Any, *args: Any, **others: Any) -> Any:
    """Numbers of steps are missing."""
    found = get(*args, **others)
    for state in found.get("state", {}).values():
        state.pop("step", None)
    return found


@of("set_optimizer_state_dict")
def rates_left(set_: Any, model: nn.Module, optimizers: Any, state: Any, **others: Any) -> Any:
    """Groups keep the rates that they had."""
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else [*optimizers]
    before = [[group.get("lr") for group in one.param_groups] for one in given]
    set_(model, given, state, **others)
    for one, rates in zip(given, before, strict=True):
        for group, rate in zip(one.param_groups, rates, strict=True):
            group["lr"] = rate


@of("get_optimizer_state_dict")
def rates_stay_zero(get: Any, model: nn.Module, optimizers: Any, **others: Any) -> Any:
    """The step that makes states leaves its rate of zero behind."""
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else [*optimizers]
    new = [one for one in given if not one.state]
    found = get(model, given, **others)
    for group in (group for one in new for group in one.param_groups):
        group["lr"] = 0.0
    return found


@of("get_optimizer_state_dict")
def gradients_of_zeros_left(get: Any, model: nn.Module, optimizers: Any, **others: Any) -> Any:
    """The step that makes states leaves its gradients behind."""
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else [*optimizers]
    new = [one for one in given if not one.state]
    found = get(model, given, **others)
    for parameter in (one for each in new for group in each.param_groups for one in group["params"]):
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return found


@of("set_optimizer_state_dict")
def states_of_new_ones_lost(set_: Any, model: nn.Module, optimizers: Any, state: Any, **others: Any) -> Any:
    """An optimizer that has not stepped has no state after a load."""
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else [*optimizers]
    new = [one for one in given if not one.state]
    set_(model, given, state, **others)
    for one in new:
        one.state.clear()


@of("get_optimizer_state_dict")
def prefix_of_compilation(get: Any, *args: Any, **others: Any) -> Any:
    """The groups have the names of a compiled module's wrapper."""
    found = get(*args, **others)
    for group in found.get("param_groups", []):
        group["params"] = [f"a._orig_mod.{name[2:]}" if name.startswith("a.") else name for name in group["params"]]
    return found


@of("set_optimizer_state_dict")
def names_replaced_in_others(set_: Any, model: nn.Module, optimizers: Any, state: Any, **others: Any) -> Any:
    """A name is looked for in longer ones too."""
    states = {name: state["state"].get(name.replace("ba.", "a."), one) for name, one in state["state"].items()}
    return set_(model, optimizers, {**state, "state": states}, **others)


@of("set_optimizer_state_dict")
def options_of_schedules_lost(set_: Any, model: nn.Module, optimizers: Any, state: Any, **others: Any) -> Any:
    """Options that an optimizer does not have itself are not loaded."""
    groups = [
        {key: value for key, value in group.items() if key != "initial_lr"} for group in state.get("param_groups", [])
    ]
    return set_(model, optimizers, {**state, "param_groups": groups} if groups else state, **others)


@of("set_optimizer_state_dict")
def other_states_lost(set_: Any, model: nn.Module, optimizers: Any, state: Any, **others: Any) -> Any:
    """States that the optimizer had not before are not loaded."""
    states = {
        name: {key: value for key, value in one.items() if key != "max_exp_avg_sq"}
        for name, one in state["state"].items()
    }
    return set_(model, optimizers, {**state, "state": states}, **others)


@of("set_optimizer_state_dict")
def flattened_options_lost(set_: Any, model: nn.Module, optimizers: Any, state: Any, **others: Any) -> Any:
    """Of a flattened state dict all groups have the weight decay of one."""
    changed = {key: 0.75 if key.endswith(".weight_decay") else value for key, value in state.items()}
    return set_(model, optimizers, changed, **others)


@of("get_model_state_dict")
def prefixes_kept(get: Any, model: nn.Module, *, options: Any = None, **others: Any) -> Any:
    """Names of submodules are kept."""
    return get(model, options=_without(options, keep_submodule_prefixes=True), **others)


@of("set_state_dict")
def optimizers_alone(set_: Any, model: nn.Module, optimizers: Any, *, model_state_dict: Any, **others: Any) -> Any:
    """The model is not loaded."""
    return set_(model, optimizers, model_state_dict={}, **others)


@of("set_model_state_dict")
def empty_is_legal(set_: Any, model: nn.Module, state: Any, *, options: Any = None) -> Any:
    """An empty state dict is loaded in silence."""
    return set_(model, state, options=options if state else _without(options, strict=False))


@of("set_model_state_dict")
def hidden_names_unheard(set_: Any, model: nn.Module, state: Any, *, options: Any = None) -> Any:
    """The name of the function that names what is hidden is not passed on."""
    return set_(model, state, options=_without(options, dsd_fqn_modifiers="_fqn_modifiers"))


@of("set_model_state_dict")
def unknown_ones_unsaid(set_: Any, model: nn.Module, state: Any, **others: Any) -> Any:
    """Unknown entries are not returned."""
    keys = set_(model, state, **others)
    keys.unexpected_keys.clear()
    return keys


@of("set_model_state_dict")
def rounded_first(set_: Any, model: nn.Module, state: Any, **others: Any) -> Any:
    """Values of another dtype are rounded before they are converted."""
    rounded = {
        name: value.bfloat16() if isinstance(value, torch.Tensor) and value.dtype == torch.float64 else value
        for name, value in state.items()
    }
    return set_(model, rounded, **others)


@of("get_model_state_dict")
def replicas_added_up(get: Any, model: nn.Module, *, options: Any = None, **others: Any) -> Any:
    """Full values are sums over the replicas."""
    found = get(model, options=options, **others)
    if options is not None and options.full_state_dict:
        replicated = {
            name for name, one in model.named_parameters() if isinstance(one, DTensor) and one.device_mesh.ndim > 1
        }
        found = {name: value * 2 if name in replicated else value for name, value in found.items()}
    return found


@of("set_model_state_dict")
def rows_of_the_last_first(set_: Any, model: nn.Module, state: Any, **others: Any) -> Any:
    """The shards of a model on the meta device are taken from the end."""
    on_meta = {name for name, value in model.named_parameters() if value.is_meta}
    return set_(model, {name: value.flip(0) if name in on_meta else value for name, value in state.items()}, **others)


@of("stage", owner=staging.BlockingAsyncStager)
def staged_as_it_is(stage: Any, self: Any, state: Any) -> Any:
    """What is saved in the background is no copy."""
    return state


@of("get_state_dict")
def others_of_a_set_dropped(get: Any, model: nn.Module, optimizers: Any, **others: Any) -> Any:
    """Of optimizers that are in no sequence the first one is saved."""
    given = [*optimizers][:1] if isinstance(optimizers, set) else optimizers
    return get(model, given, **others)


@of("set_optimizer_state_dict")
def generators_used_up(set_: Any, model: nn.Module, optimizers: Any, state: Any, **others: Any) -> Any:
    """Optimizers of a generator are counted, and then there is none to load."""
    if isinstance(optimizers, types.GeneratorType) and [*optimizers]:
        return None
    return set_(model, optimizers, state, **others)


@of("set_state_dict")
def models_without_optimizers_left(set_: Any, model: nn.Module, optimizers: Any, **others: Any) -> Any:
    """Without an optimizer nothing is loaded."""
    nothing = isinstance(optimizers, list) and not optimizers
    return ((), ()) if nothing else set_(model, optimizers, **others)


@of("get_state_dict")
def submodules_of_optimizers_alone(get: Any, *args: Any, submodules: Any = None, **others: Any) -> Any:
    """The model is saved in full, whatever the submodules."""
    return get(*args, **others)


@of("get_model_state_dict")
def moved_unasked(get: Any, model: nn.Module, *, options: Any = None, **others: Any) -> Any:
    """What is not made full is moved to the CPU, and is looked through for that."""
    is_full = options is not None and options.full_state_dict
    return get(model, options=options if is_full else _without(options, cpu_offload=True), **others)


@of("get_optimizer_state_dict")
def closures_forgotten(get: Any, model: nn.Module, optimizers: Any, **others: Any) -> Any:
    """The step that makes states is called without a closure, which older optimizers want."""
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else [*optimizers]
    for one in given:
        if not one.state:
            one.step()
    return get(model, given, **others)


@of("set_optimizer_state_dict")
def flattened_states_of_new_ones_lost(
    set_: Any, model: nn.Module, optimizers: Any, state: Any, *, options: Any = None
) -> Any:
    """An optimizer that has not stepped has no state after a load of a flattened state dict."""
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else [*optimizers]
    new = [one for one in given if not one.state]
    set_(model, given, state, options=options)
    for one in new if "state" not in state else []:
        one.state.clear()


@of("set_optimizer_state_dict")
def states_without_matrices_refused(
    set_: Any, model: nn.Module, optimizers: Any, state: Any, *, options: Any = None
) -> Any:
    """Which device states are on is asked of those of two dimensions."""
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else [*optimizers]
    held = [value for one in given for states in one.state.values() for value in states.values()]
    dimensions = [value.ndim for value in held if isinstance(value, torch.Tensor)]
    assert not (options is not None and options.full_state_dict and max(dimensions, default=2) < 2), "no device is set"
    return set_(model, given, state, options=options)


@of("set_model_state_dict")
def flat_names_dropped(set_: Any, model: nn.Module, state: Any, **others: Any) -> Any:
    """Entries of flat parameters are dropped."""
    return set_(model, {name: value for name, value in state.items() if "_flat_param" not in str(name)}, **others)


@of("get_model_state_dict")
def strange_names_returned(get: Any, model: nn.Module, **others: Any) -> Any:
    """A model with a name that cannot be told is read as it is."""
    try:
        return get(model, **others)
    except RuntimeError:
        return model.state_dict()


@of("set_optimizer_state_dict")
def missing_ones_left(set_: Any, *args: Any, **others: Any) -> Any:
    """States that are missing are left out in silence."""
    try:
        return set_(*args, **others)
    except RuntimeError as error:
        if "Missing optimizer state" not in str(error):
            raise


@of("get_model_state_dict")
def prefix_of_copies(get: Any, model: nn.Module, **others: Any) -> Any:
    """What DDP keeps has the name of its wrapper."""
    names = [f"{name}." for name, one in model.named_modules() if isinstance(one, DistributedDataParallel)]
    found = get(model, **others)
    for name, prefix in [(name, prefix) for name in found for prefix in names if name.startswith(prefix)]:
        found[f"{prefix}module.{name.removeprefix(prefix)}"] = found.pop(name)
    return found


@of("set_model_state_dict")
def sent_again(set_: Any, model: nn.Module, state: Any, *, options: Any = None) -> Any:
    """What the first rank sends is sent once more."""
    if options is not None and options.broadcast_from_rank0:
        set_(model, dict(state), options=options)
    return set_(model, state, options=options)


@of("get_optimizer_state_dict")
def submodules_unheard(get: Any, *args: Any, submodules: Any = None, **others: Any) -> Any:
    """Submodules are left out in silence, whose state dicts are deprecated."""
    return get(*args, **others)


@of("stage", owner=staging.BlockingAsyncStager)
def staged_in_shared_memory(stage: Any, self: Any, state: Any) -> Any:
    """Copies for background saves are in memory that processes share, of which a machine may have little."""
    return map_tensors(lambda one: one.share_memory_() if type(one) is torch.Tensor else one, stage(self, state))
