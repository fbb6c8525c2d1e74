"""Adapters of a reference with one bug in what trains: forward and backward hooks, containers, prefetching, freezing.

Each changes one place, as the first model of a case is sharded, until the case ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from fsdp_impl.common import containers, hooks
from fsdp_impl.common.phase import Phase
from fsdp_impl.flat.shards import FlatShards
from fsdp_impl.flat.unit import FlatUnit
from fsdp_impl.per_parameter import layout, lazy_init, reduction
from fsdp_impl.per_parameter.group import ParamGroup
from fsdp_impl.per_parameter.mesh import KEEP
from fsdp_impl.per_parameter.module import FSDPModule
from fsdp_impl.per_parameter.param import ShardedParam
from fsdp_impl.per_parameter.unit import Unit, unit_of
from shardproof.harness.adapters.base import Config
from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted import Planting, replace

Changes = tuple[tuple[Any, str, Any], ...]


class _Changing(Planting):
    changes: ClassVar[Changes] = ()

    def plant(self) -> None:
        for owner, name, wrong in self.changes:
            replace(owner, name, wrong)


class _Planted(_Changing, ReferenceAdapter): ...


class _PlantedFlat(_Changing, ReferenceFlatAdapter): ...


# Appendix A of the audit


class SplitUnits(ReferenceAdapter):
    """The modules of one unit become units of their own."""

    name = "split-units"

    def __init__(self, model: nn.Module, *, optimizer: Any, config: Config) -> None:
        apart = tuple((name,) for unit in config.units for name in unit)
        super().__init__(model, optimizer=optimizer, config=dataclasses.replace(config, units=apart))


class PrefetchIgnored(_Planted):
    """Both setters of prefetching do nothing."""

    name = "prefetch-ignored"
    changes = (
        (FSDPModule, "set_modules_to_forward_prefetch", lambda self, modules: None),
        (FSDPModule, "set_modules_to_backward_prefetch", lambda self, modules: None),
    )


class MethodNeverFrees(ReferenceAdapter):
    """A registered method gathers, and leaves its unit gathered."""

    name = "method-never-frees"

    @staticmethod
    def register(target: nn.Module, name: str) -> None:
        method = getattr(target, name)

        def wrapped(self: nn.Module, *args: Any) -> Any:
            unit: Any = unit_of(self)
            args, _ = unit.pre_forward(self, args, {})
            output = method(*args)
            before, unit.group.after_forward = unit.group.after_forward, KEEP
            output = unit.post_forward(self, args, output)
            unit.group.after_forward = before
            return output

        setattr(target, name, types.MethodType(wrapped, target))


class MethodNotHooked(ReferenceAdapter):
    """A registered method receives its inputs without the hook for backward."""

    name = "method-not-hooked"

    @staticmethod
    def register(target: nn.Module, name: str) -> None:
        method = getattr(target, name)

        def wrapped(self: nn.Module, *args: Any) -> Any:
            unit: Any = unit_of(self)
            unit.pre_forward(self, args, {})
            return unit.post_forward(self, args, method(*args))

        setattr(target, name, types.MethodType(wrapped, target))


_post_forward = Unit.post_forward


def _complete_at_once(self: Unit, module: nn.Module, args: Any, output: Any) -> Any:
    self.to_run.intersection_update({weakref.ref(module)})
    return _post_forward(self, module, args, output)


class FirstMemberCompletes(_Planted):
    """A unit of several modules is complete when the first of them has run."""

    name = "first-member-completes"
    changes = ((Unit, "post_forward", _complete_at_once),)


def _of_first_output(callback: Callable[[], None], outputs: Any) -> None:
    if torch.is_grad_enabled():
        for tensor in containers.tensors_requiring_grad(outputs)[:1]:
            hooks._hook(tensor, callback)


class FirstOutputOnly(_Planted):
    """The gather in backward hangs on the first output alone."""

    name = "first-output-only"
    changes = ((hooks, "call_before_backward", _of_first_output),)


class FlatFirstOutputOnly(_PlantedFlat):
    """The same in the flat half."""

    name = "flat-first-output-only"
    changes = FirstOutputOnly.changes


_reshard = ParamGroup.reshard


def _reshard_with_grad(self: ParamGroup) -> None:
    if torch.is_grad_enabled() or self.phase is not Phase.FORWARD:
        _reshard(self)


class NoGradNotResharded(_Planted):
    """A forward without gradients leaves its units gathered."""

    name = "no-grad-not-resharded"
    changes = ((ParamGroup, "reshard", _reshard_with_grad),)


_frees = FlatUnit._frees_after_forward


class FlatNoGradNotResharded(_PlantedFlat):
    """The same in the flat half."""

    name = "flat-no-grad-not-resharded"
    changes = ((FlatUnit, "_frees_after_forward", lambda self: _frees(self) and torch.is_grad_enabled()),)


class FrozenThawed(ReferenceAdapter):
    """Sharding sets requires_grad of every parameter."""

    name = "frozen-thawed"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.module.requires_grad_(True)


class GraphBreaks(ReferenceAdapter):
    """Sharding breaks the graph of every compiled block in two places."""

    name = "graph-breaks"

    def __init__(self, model: nn.Module, *, optimizer: Any, config: Config) -> None:
        for (unit,) in config.units:
            for name in ("qkv", "out"):
                child = getattr(model.get_submodule(unit), name)
                child.register_forward_pre_hook(torch._dynamo.disable(lambda module, args: None))
        super().__init__(model, optimizer=optimizer, config=config)


# Hooks on outputs and inputs


def _hook_of_tensor_alone(tensor: torch.Tensor, callback: Callable[[], None]) -> None:
    tensor.register_hook(lambda _: callback())


class ViewsForgotten(_Planted):
    """An output that is a view, and is changed in place, loses the hook that gathers."""

    name = "views-forgotten"
    changes = ((hooks, "_hook", _hook_of_tensor_alone),)


_call_after = hooks.call_after_backward


def _after_positional(callback: Callable[[], None], inputs: Any) -> Any:
    args, kwargs = inputs
    return _call_after(callback, args), kwargs


class KeywordsNotHooked(_Planted):
    """Inputs by keyword get no hook that reduces when backward has passed the unit."""

    name = "keywords-not-hooked"
    changes = ((hooks, "call_after_backward", _after_positional),)


def _reversed(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    ctx.callback()
    return (None, *reversed(grads))


class GradientsReversed(_Planted):
    """The gradients of several inputs come back in the reverse order."""

    name = "gradients-reversed"
    changes = ((hooks._CallOnBackward, "backward", staticmethod(_reversed)),)


_root_pre_forward = Unit._root_pre_forward


def _detached(self: Unit, args: Any, kwargs: Any) -> Any:
    if self.iteration.forward_root is None:
        args, kwargs = containers.map_tensors(torch.Tensor.detach, (args, kwargs))
    return _root_pre_forward(self, args, kwargs)


class InputsDetached(_Planted):
    """What the root's forward gets is detached: an input gets no gradient."""

    name = "inputs-detached"
    changes = ((Unit, "_root_pre_forward", _detached),)


_map = containers.map_tensors


def _map_one_level(fn: Any, value: Any, _depth: int = 0) -> Any:
    return value if _depth > 1 and not isinstance(value, torch.Tensor) else _map(fn, value, _depth)


class NestedContainersSkipped(_Planted):
    """Tensors in containers within containers are not found."""

    name = "nested-containers-skipped"
    changes = ((containers, "map_tensors", _map_one_level),)


# Units


def _end_without_members(self: Unit, output: Any) -> None:
    for unit in self.iteration.units:
        unit.to_run.clear()
    _root_post_forward(self, output)


_root_post_forward = Unit._root_post_forward


class MemberNeverCompletes(_Planted):
    """A unit of which one module did not run is not freed when the root's forward ends."""

    name = "member-never-completes"
    changes = ((Unit, "_root_post_forward", _end_without_members),)


_join = lazy_init._join


def _join_two_levels(root: Unit, units: list[Unit]) -> None:
    shallow = [unit for unit in units if unit.group is None or unit.group.label.count(".") < 3]
    _join(root, shallow)


class InnerUnitsApart(_Planted):
    """Units that are three deep do not join the root, and become roots of their own."""

    name = "inner-units-apart"
    changes = ((lazy_init, "_join", _join_two_levels),)


_pre_backward = Unit._pre_backward


def _pre_backward_of_root(self: Unit) -> None:
    if not self.is_root and not self.iteration.callback_queued:
        self.iteration.callback_queued = True
        _pre_backward(self)
        self.iteration.callback_queued = False
        return
    _pre_backward(self)


class OnlyRootEndsBackward(_Planted):
    """A backward that begins below the root never ends, so that the first unit is not reduced."""

    name = "only-root-ends-backward"
    changes = ((Unit, "_pre_backward", _pre_backward_of_root),)


class MissedPrefetchKept(_Planted):
    """What was gathered ahead in backward and not used is used by the next forward."""

    name = "missed-prefetch-kept"
    changes = ((ParamGroup, "drop_pending", lambda self: None),)


_post_backward = Unit._post_backward


def _post_backward_of_reached(self: Unit) -> None:
    if self.group is not None and self.group.phase is not Phase.IDLE:
        _post_backward(self)


class UnreachedKept(_Planted):
    """The end of backward leaves units gathered that backward did not reach."""

    name = "unreached-kept"
    changes = ((Unit, "_post_backward", _post_backward_of_reached),)


class _InferenceTensors:
    """torch, whose ``inference_mode(False)`` does nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def inference_mode(mode: bool) -> Any:
        return contextlib.nullcontext()


class MadeInInferenceMode(_Planted):
    """Memory that a forward in inference mode makes is of inference tensors."""

    name = "made-in-inference-mode"
    changes = ((layout, "torch", _InferenceTensors()),)


# Prefetching


_set_forward = FSDPModule.set_modules_to_forward_prefetch
_set_backward = FSDPModule.set_modules_to_backward_prefetch


class BackwardPrefetchIgnored(_Planted):
    """Only the forward gathers ahead as set."""

    name = "backward-prefetch-ignored"
    changes = ((FSDPModule, "set_modules_to_backward_prefetch", lambda self, modules: None),)


class OneAheadOnly(_Planted):
    """Of the units to gather ahead in forward, only the first is."""

    name = "one-ahead-only"
    changes = ((FSDPModule, "set_modules_to_forward_prefetch", lambda self, modules: _set_forward(self, modules[:1])),)


class PrefetchReversed(_Planted):
    """Units are gathered ahead in the reverse order."""

    name = "prefetch-reversed"
    changes = (
        (FSDPModule, "set_modules_to_backward_prefetch", lambda self, modules: _set_backward(self, modules[::-1])),
    )


# Freezing


def _sync_once(self: ShardedParam, _: torch.nn.Parameter) -> None:
    assert self.unsharded is not None
    if not hasattr(self.unsharded, "_synced"):
        self.unsharded._synced = True  # type: ignore[attr-defined]
        self.unsharded.requires_grad_(self.sharded.requires_grad)


class FrozenOnce(_Planted):
    """requires_grad is read at the first forward alone."""

    name = "frozen-once"
    changes = ((ShardedParam, "sync_requires_grad", _sync_once),)


class FlatFrozenOnce(_PlantedFlat):
    """requires_grad is read at construction alone."""

    name = "flat-frozen-once"
    changes = ((FlatShards, "sync_requires_grad", lambda self: None),)


_take = reduction.take


def _take_zeros(group: ParamGroup) -> Any:
    params, grads = _take(group)
    if not params:
        params = list(group.shards.params)
        grads = [reduction.zero_grad(param, group.device) for param in params]
    return params, grads


class FrozenReduced(_Planted):
    """A unit without gradients reduces zeros."""

    name = "frozen-reduced"
    changes = ((reduction, "take", _take_zeros),)


def _post_backward_of_trained(self: Unit) -> None:
    if self.group is not None and any(param.sharded.requires_grad for param in self.group.shards.params):
        _post_backward(self)


class FrozenNeverFreed(_Planted):
    """A unit without trainable parameters is not freed in backward."""

    name = "frozen-never-freed"
    changes = ((Unit, "_post_backward", _post_backward_of_trained),)


class FlatFrozenKept(_PlantedFlat):
    """A frozen unit is freed at the end of backward only."""

    name = "flat-frozen-kept"
    changes = ((hooks, "call_after_backward", lambda callback, inputs: inputs),)


# Gradients


_run_hooks = hooks.run_post_accumulate


def _run_hooks_twice(param: torch.Tensor) -> None:
    _run_hooks(param)
    _run_hooks(param)


class HooksRunTwice(_Planted):
    """A post-accumulate hook runs twice in a backward."""

    name = "hooks-run-twice"
    changes = ((hooks, "run_post_accumulate", _run_hooks_twice),)
