"""Scripts that ask a ``FullyShardedDataParallel`` something, or do with it what is allowed and unusual."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.adapters.flat_misuses import Scene
from shardproof.harness.tensors import private

checkpoint_wrapper = private.take("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper")


def _strategies(scene: Scene) -> list[str]:
    kinds = scene.api.ShardingStrategy
    chosen = (None, kinds.FULL_SHARD, kinds.SHARD_GRAD_OP, kinds.NO_SHARD)
    return [scene.wrap(scene.layers(), sharding_strategy=one).sharding_strategy.name for one in chosen]


def _items(scene: Scene) -> list[bool]:
    layers = scene.layers()
    first, second = layers
    model = scene.wrap(layers)
    return [model[0] is first, model[-1] is second, [*model[1:]] == [second]]


def _module_that_is_recomputed(scene: Scene) -> bool:
    layers = scene.layers()
    return bool(scene.wrap(checkpoint_wrapper(layers)).module is layers)


def _forms(scene: Scene) -> list[Any]:
    """What was set before each change, and what a context leaves."""
    groups: Any = {"device_mesh": None, "process_group": scene.mesh.get_group()}  # which local state dicts need
    api, model, kind = scene.api, scene.nested(groups, **groups), scene.api.FullyShardedDataParallel
    forms = api.StateDictType
    before = [
        kind.set_state_dict_type(model, forms.SHARDED_STATE_DICT),
        kind.set_state_dict_type(model, forms.FULL_STATE_DICT, api.FullStateDictConfig(rank0_only=True)),
    ]
    with kind.state_dict_type(model, forms.LOCAL_STATE_DICT):
        before.append(kind.get_state_dict_type(model))
    before.append(kind.get_state_dict_type(model))
    return [*(one.state_dict_type.name for one in before), before[-1].state_dict_config.rank0_only]


def _saved_by_position(scene: Scene) -> list[Any]:
    given: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about the positions
        found = scene.nested().state_dict(given, "model.")
    return [found is given, sorted(given)]


def _version_of_what_is_wrapped(scene: Scene) -> int:
    metadata: dict[str, Any] = scene.wrap(nn.BatchNorm1d(4).to(scene.device)).state_dict()._metadata
    return int(metadata[""]["version"])


def _ignored_as_variables(scene: Scene) -> list[bool]:
    layers = scene.layers()
    model = scene.wrap(layers, ignored_states=[layers[0].weight])
    return [model.state_dict(keep_vars=keeps)["0.weight"] is layers[0].weight for keeps in (True, False)]


def _whole_states(scene: Scene, model: nn.Module, *, first_rank: bool = False) -> Any:
    # What is on the CPU already need not go there, and torch's would free it: F-41 of docs/findings.md.
    config = scene.api.FullOptimStateDictConfig(rank0_only=first_rank, offload_to_cpu=False)
    kinds = scene.api.StateDictType
    return scene.api.FullyShardedDataParallel.state_dict_type(
        model, kinds.FULL_STATE_DICT, scene.api.FullStateDictConfig(), config
    )


def _states_of_a_script(scene: Scene, *, drops_groups: bool = False) -> list[Any]:
    """What is saved of an optimizer's state dict that a script has changed: its parts, and the averages in it."""
    model = scene.nested()
    optimizer = scene.train(model)
    given = optimizer.state_dict()
    given["state"] = {
        number: {**one, "exp_avg": torch.full_like(one["exp_avg"], 3.0)} for number, one in given["state"].items()
    }
    if drops_groups:
        del given["param_groups"]
    with _whole_states(scene, model):
        found = scene.api.FullyShardedDataParallel.optim_state_dict(model, optimizer, given)
    averages = {value for one in found["state"].values() for value in one["exp_avg"].flatten().tolist()}
    return [sorted(found), sorted(averages)]


def _states_in_another_dtype(scene: Scene, *, flat: bool) -> list[str]:
    """The dtypes of what an optimizer keeps in float64, saved and loaded."""
    kind = scene.api.FullyShardedDataParallel
    model = scene.wrap(scene.layers(), use_orig_params=not flat)
    optimizer = scene.train(model)
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].double()
    with _whole_states(scene, model):
        saved = kind.optim_state_dict(model, optimizer)
        kept = copy.deepcopy(saved)
        loaded = kind.optim_state_dict_to_load(model, optimizer, saved)
    averages = [one["exp_avg"] for one in (*kept["state"].values(), *loaded["state"].values())]
    return sorted({str(average.dtype) for average in averages})


def _loaded_directly(scene: Scene) -> list[Any]:
    kind, model = scene.api.FullyShardedDataParallel, scene.nested()
    optimizer = scene.train(model)
    with _whole_states(scene, model):
        saved = kind.optim_state_dict(model, optimizer)
        for state in saved["state"].values():
            state["exp_avg"] = torch.full_like(state["exp_avg"], 5.0)
        found = kind.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)
    held = {value for state in optimizer.state.values() for value in state["exp_avg"].flatten().tolist()}
    return [sorted(found), sorted(held)]


def _states_of_a_group(scene: Scene) -> list[list[str]]:
    """The names that this rank saves where the first of all ranks saves, and where the first of each replica does.

    Last, where the first of all saves by an older call.
    """
    kind = scene.api.FullyShardedDataParallel
    model = scene.wrap(scene.layers(), sharding_strategy=scene.api.ShardingStrategy.HYBRID_SHARD)
    optimizer = scene.train(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    groups = (dist.group.WORLD, scene.mesh.get_group(1))
    with _whole_states(scene, model, first_rank=True):
        found = [kind.optim_state_dict(model, optimizer, group=group) for group in groups]
    found.append(kind.full_optim_state_dict(model, optimizer, group=dist.group.WORLD))
    return [sorted(one.get("state", {})) for one in found]


def _states_by_parameters(scene: Scene) -> list[Any]:
    """Whether older calls make the same of parameters as of an optimizer, and how often they are deprecated."""
    kind, model = scene.api.FullyShardedDataParallel, scene.nested()
    optimizer = scene.train(model)
    full = kind.full_optim_state_dict(model, optimizer, rank0_only=False)
    expected = kind.shard_full_optim_state_dict(full, model, optim=optimizer)
    order = [*reversed([*model.parameters()])]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = kind.shard_full_optim_state_dict(full, model, optim_input=order)
    mine, others = found["state"], expected["state"]
    same = [_is_same(mine[number], others[len(order) - 1 - number]) for number in mine]
    return [all(same), len(same) == len(others), any("optim_input" in str(one.message) for one in told)]


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _wrapped_by_a_rule(scene: Scene, model: nn.Module) -> nn.Module:
    """Wrap each module that has parameters, in lower precision."""
    rule = functools.partial(scene.api.wrap.size_based_auto_wrap_policy, min_num_params=1)
    precision = scene.api.MixedPrecision(param_dtype=torch.bfloat16)
    wrapped: nn.Module = scene.wrap(model.to(scene.device), auto_wrap_policy=rule, mixed_precision=precision)
    return wrapped


def _norm_by_a_rule(scene: Scene) -> None:
    _wrapped_by_a_rule(scene, nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4)))


def _dtypes_of_a_norm(scene: Scene) -> list[str]:
    """The dtypes of what a batch normalisation gets and has, called by position and by keyword."""
    seen: list[str] = []

    class Norm(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.extend([str(input.dtype), str(self.weight.dtype)])
            return super().forward(input)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.norm = nn.Conv2d(2, 4, 1), Norm(4)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            entered = self.enter(images)
            output: torch.Tensor = self.norm(self.norm(entered).to(entered.dtype))
            again: torch.Tensor = self.norm(input=entered)
            return output + again

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # which another script asks for
        model = _wrapped_by_a_rule(scene, Both())
    return [str(model(torch.ones(2, 2, 3, 3, device=scene.device)).dtype), *sorted(set(seen))]


class _Probe(nn.Module):
    """Multiplies by a weight in the weight's dtype, and notes the dtypes of what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seen: list[str] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.append(str(batch.dtype))
        return batch.float() * self.weight


def _casts_by_default(scene: Scene) -> list[list[str]]:
    """What a unit and, within it, another get in lower precision where a script chooses nothing about inputs."""
    precision = scene.api.MixedPrecision(param_dtype=torch.bfloat16)
    outer, inner = (_Probe().to(scene.device) for _ in range(2))
    units = scene.wrap(inner, mixed_precision=precision)
    scene.run(scene.wrap(nn.Sequential(outer, units), mixed_precision=precision))
    return [outer.seen, inner.seen]


def _casts_of_the_root(scene: Scene) -> list[str]:
    """What a root gets by the setting for all units, its own, or both."""
    found: list[str] = []
    for of_all, of_the_root in ((True, False), (False, True), (True, True), (False, False)):
        probe = _Probe().to(scene.device)
        precision = scene.api.MixedPrecision(
            param_dtype=torch.bfloat16, cast_forward_inputs=of_all, cast_root_forward_inputs=of_the_root
        )
        scene.run(scene.wrap(probe, mixed_precision=precision))
        found += probe.seen
    return found


def _mesh_of_shards(scene: Scene) -> bool:
    """Whether sharded values lie on the mesh that was given."""
    kinds = scene.api.ShardingStrategy
    strategy = kinds.HYBRID_SHARD if scene.mesh.ndim > 1 else kinds.FULL_SHARD
    model = scene.wrap(scene.layers(), sharding_strategy=strategy)
    with scene.api.FullyShardedDataParallel.state_dict_type(model, scene.api.StateDictType.SHARDED_STATE_DICT):
        return all(value.device_mesh == scene.mesh for value in model.state_dict().values())


def _part_of_a_larger_tensor(scene: Scene, *, has_gaps: bool) -> bool:
    """Whether a parameter that is a part of a larger tensor, transposed or with gaps, has its values."""
    layers, numbers = scene.layers(), torch.arange(32.0, device=scene.device)
    layers[0].weight = nn.Parameter(numbers.view(4, 8)[:, ::2] if has_gaps else numbers[8:24].view(4, 4).t())
    expected = layers[0].weight.detach().clone()
    return bool(torch.equal(scene.wrap(layers).state_dict()["0.weight"], expected))


def _loaded_where_whole(scene: Scene) -> bool:
    """Whether what is loaded while parameters are whole is used, or refused."""
    model, other = scene.nested(), scene.layers()
    with scene.api.FullyShardedDataParallel.summon_full_params(model):
        try:
            model.load_state_dict(other.state_dict())
        except AssertionError:
            return True
    return bool(torch.equal(scene.run(model), scene.run(other)))


def _loaded_after_new_data(scene: Scene) -> bool:
    """Whether what is loaded is used, where a script had given parameters new data before."""
    model, other = scene.nested(), scene.layers()
    scene.run(model)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    model.load_state_dict(other.state_dict())
    return bool(torch.equal(scene.run(model), scene.run(other)))


def _frozen_by_a_rule(scene: Scene, *, apart: bool) -> None:
    """Wrap, by a rule for lists of layers and perhaps for layers, two of which one is frozen."""
    layers = scene.layers()
    layers[0].requires_grad_(False)
    model = nn.Sequential(layers)
    classes = {nn.Sequential, nn.Linear} if apart else {nn.Sequential}
    scene.wrap(model, auto_wrap_policy=scene.api.wrap.ModuleWrapPolicy(classes))


def _whole_on_every_cpu(scene: Scene, *, first_rank: bool) -> None:
    model = scene.nested()
    with scene.api.FullyShardedDataParallel.summon_full_params(
        model, writeback=False, rank0_only=first_rank, offload_to_cpu=True
    ):
        pass


def _older_parameters(scene: Scene) -> None:
    kind, model = scene.api.FullyShardedDataParallel, scene.nested()
    optimizer = scene.train(model)
    kind.full_optim_state_dict(model, optimizer, optim_input=[*model.parameters()])


def _ignored_whole(scene: Scene) -> None:
    layers = scene.layers()
    scene.wrap(layers, ignored_modules=[layers])


#: By name.
CALLS: dict[str, Callable[[Scene], Any]] = {
    "strategies": _strategies,
    "offloading": lambda scene: scene.wrap(scene.layers()).cpu_offload.offload_params,
    "items": _items,
    "attributes": lambda scene: scene.wrap(nn.Linear(4, 3).to(scene.device)).out_features,
    "a-module-that-is-recomputed": _module_that_is_recomputed,
    "forms": _forms,
    "saved-by-position": _saved_by_position,
    "version-of-what-is-wrapped": _version_of_what_is_wrapped,
    "ignored-as-variables": _ignored_as_variables,
    "states-of-a-script": _states_of_a_script,
    "states-without-groups": functools.partial(_states_of_a_script, drops_groups=True),
    "states-in-another-dtype": functools.partial(_states_in_another_dtype, flat=False),
    "flat-states-in-another-dtype": functools.partial(_states_in_another_dtype, flat=True),
    "loaded-directly": _loaded_directly,
    "states-of-a-group": _states_of_a_group,
    "states-by-parameters": _states_by_parameters,
    "dtypes-of-a-norm": _dtypes_of_a_norm,
    "casts-by-default": _casts_by_default,
    "casts-of-the-root": _casts_of_the_root,
    "mesh-of-shards": _mesh_of_shards,
    "a-transposed-part": functools.partial(_part_of_a_larger_tensor, has_gaps=False),
    "every-other-column": functools.partial(_part_of_a_larger_tensor, has_gaps=True),
    "loaded-where-whole": _loaded_where_whole,
    "loaded-after-new-data": _loaded_after_new_data,
    "a-list": lambda scene: scene.wrap(nn.ModuleList([*scene.layers()])),
    "a-dict": lambda scene: scene.wrap(nn.ModuleDict({"one": scene.layers()})),
    "nothing-sharded": lambda scene: scene.wrap(scene.layers(), sharding_strategy=scene.api.ShardingStrategy.NO_SHARD),
    "one-rank": lambda scene: scene.wrap(scene.layers()),
    "ignored-whole": _ignored_whole,
    "a-norm-by-a-rule": _norm_by_a_rule,
    "frozen-in-a-unit": functools.partial(_frozen_by_a_rule, apart=False),
    "frozen-apart": functools.partial(_frozen_by_a_rule, apart=True),
    "whole-on-every-cpu": functools.partial(_whole_on_every_cpu, first_rank=False),
    "whole-on-one-cpu": functools.partial(_whole_on_every_cpu, first_rank=True),
    "older-parameters": _older_parameters,
}
