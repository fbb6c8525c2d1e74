"""Further scripts that ask a ``FullyShardedDataParallel`` something: what it leaves to defaults, and where it stands.

The others are in :mod:`shardproof.harness.adapters.flat_calls`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.harness.adapters.flat_misuses import Scene
from shardproof.harness.tensors import private

checkpoint_wrapper = private.take("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper")


def _states_by_default(scene: Scene) -> list[str]:
    """The names of the optimizer's states on this rank where a script has chosen whole ones and nothing else."""
    kind, model = scene.api.FullyShardedDataParallel, scene.nested()
    optimizer = scene.train(model)
    with kind.state_dict_type(model, scene.api.StateDictType.FULL_STATE_DICT):
        return sorted(kind.optim_state_dict(model, optimizer)["state"])


def _bytes_past_alignment(scene: Scene) -> list[int]:
    """How far from multiples of 16 bytes original parameters of odd sizes begin, computed with in lower precision."""
    found: set[int] = set()
    layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 1)).to(scene.device)
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda module, args: found.update(one.data_ptr() % 16 for one in (module.weight, module.bias))
        )
    precision = scene.api.MixedPrecision(param_dtype=torch.bfloat16)
    scene.run(scene.wrap(layers, mixed_precision=precision))
    return sorted(found)


def _in_a_plain_module(scene: Scene) -> list[Any]:
    """Of two wrappers: the names of values and of states, whether all are sharded, shapes of whole ones, and roots."""
    kind, forms = scene.api.FullyShardedDataParallel, scene.api.StateDictType
    model = nn.ModuleDict({name: scene.wrap(scene.layers()) for name in ("one", "two")})
    optimizer = scene.train(model, *model.values())
    with kind.state_dict_type(model, forms.SHARDED_STATE_DICT):
        values, states = model.state_dict(), kind.optim_state_dict(model, optimizer)["state"]
    moments = [state["exp_avg"] for state in states.values()]
    are_sharded = all(isinstance(one, DTensor) for one in (*values.values(), *moments))
    with kind.summon_full_params(model):
        shapes = sorted({tuple(parameter.shape) for parameter in model.parameters()})
    roots = kind.fsdp_modules(model, root_only=True)
    return [sorted(values), sorted(states), are_sharded, shapes, [name for name in model if model[name] in roots]]


def _saved_for_the_first_rank(scene: Scene, model: nn.Module) -> list[str]:
    """The names that this rank saves where the first one alone has whole values."""
    api = scene.api
    config = api.FullStateDictConfig(rank0_only=True)
    with api.FullyShardedDataParallel.state_dict_type(model, api.StateDictType.FULL_STATE_DICT, config):
        return sorted(model.state_dict())


def _first_of_each_replica(scene: Scene) -> list[Any]:
    """What this rank has where the first rank of its replica has whole values: names that are saved, and sizes."""
    kind, api = scene.api.FullyShardedDataParallel, scene.api
    model = scene.wrap(scene.layers(), sharding_strategy=api.ShardingStrategy.HYBRID_SHARD)
    scene.run(model)
    saved = _saved_for_the_first_rank(scene, model)
    with kind.summon_full_params(model, rank0_only=True, writeback=False):
        is_whole = model.module[0].weight.shape == (4, 4)
    return [saved, is_whole]


def _states_of_a_part(scene: Scene) -> list[bool]:
    """Of a model that a part of the ranks has: whether each rank has saved what it should, and has what it loads."""
    kind, api = scene.api.FullyShardedDataParallel, scene.api
    ranks = scene.mesh[(scene.mesh.mesh_dim_names or ())[-1]]
    model = scene.wrap(scene.layers(), device_mesh=ranks)
    optimizer = scene.train(model)
    # What is on the CPU already need not go there, and torch's would free it: F-41 of docs/findings.md.
    config = api.FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False)
    with kind.state_dict_type(model, api.StateDictType.FULL_STATE_DICT, api.FullStateDictConfig(), config):
        saved = kind.optim_state_dict(model, optimizer)
        is_first = ranks.get_local_rank() == 0
        loaded = kind.optim_state_dict_to_load(model, optimizer, saved)
    return [len(saved.get("state", {})) == (4 if is_first else 0), bool(loaded["state"])]


def _bare_root(scene: Scene, **options: Any) -> Any:
    """A wrapper whose module has buffers and no parameter but those of a wrapper inside."""
    norm = nn.BatchNorm1d(4, affine=False)
    layers = nn.Sequential(scene.wrap(nn.Linear(4, 4).to(scene.device), **options), norm).to(scene.device)
    return scene.wrap(layers, **options)


def _first_rank_of_a_bare_root(scene: Scene) -> bool:
    """Whether all that is saved of it for the first rank is there, and nothing is saved on others."""
    saved = _saved_for_the_first_rank(scene, _bare_root(scene))
    return len(saved) == (5 if scene.mesh.get_local_rank() == 0 else 0)


def _casts_of_a_bare_root(scene: Scene) -> str:
    """The dtype of what the first module inside gets, where the root alone casts its inputs."""
    seen: list[str] = []
    model = _bare_root(scene, mixed_precision=scene.api.MixedPrecision(param_dtype=torch.bfloat16))
    model.module[0].register_forward_pre_hook(lambda module, args: seen.append(str(args[0].dtype)))
    scene.run(model)
    return seen[0]


def _places_after_a_cast(scene: Scene) -> list[str]:
    """The names of parameters, in their order, when a model that has an ignored one behind another has been cast."""
    layer = nn.Linear(4, 4).to(scene.device)
    model = scene.wrap(layer, ignored_states=[layer.bias])
    scene.run(model)
    model.double()
    return [name for name, _ in layer.named_parameters()]


def _tied_after_whole_ones(scene: Scene) -> list[bool]:
    """Whether a model with a tied weight has the same names after whole parameters as before, flat or not."""
    found = []
    for flat in (False, True):
        layers = scene.layers()
        layers[1].weight = layers[0].weight
        model = scene.wrap(layers, use_orig_params=not flat)
        scene.run(model)
        before = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        with scene.api.FullyShardedDataParallel.summon_full_params(model):
            pass
        found.append([name for name, _ in model.named_parameters(remove_duplicate=False)] == before)
    return found


def _buffers_of_what_is_recomputed(scene: Scene) -> list[str]:
    """The dtypes of a recomputed module's buffer while the model trains, with a dtype for buffers, and saved."""
    first, second = scene.layers()
    second.register_buffer("mean", torch.zeros(4, device=scene.device))
    precision = scene.api.MixedPrecision(buffer_dtype=torch.float64)
    model = scene.wrap(nn.Sequential(first, checkpoint_wrapper(second)), mixed_precision=precision)
    scene.run(model)
    return [str(second.mean.dtype), str(model.state_dict()["1.mean"].dtype)]


def _names_of_what_is_recomputed(scene: Scene) -> list[str]:
    """The names in a state dict where wrappers are around recomputed layers, and recomputed layers in a wrapper."""
    first, second = map(checkpoint_wrapper, scene.layers())
    return sorted(scene.wrap(nn.Sequential(scene.wrap(first), second)).state_dict())


def _loaded_into_what_is_recomputed(scene: Scene) -> list[list[str]]:
    """What a state dict of a wrapped module that is recomputed lacks, and has too much, where it is loaded."""
    model = scene.wrap(checkpoint_wrapper(scene.layers()), use_orig_params=False)
    found = model.load_state_dict(model.state_dict())
    return [found.missing_keys, found.unexpected_keys]


def _keys_that_do_not_fit(scene: Scene) -> list[list[str]]:
    """What a load, of a state dict with other names for the parameters of an inner wrapper, says of its names."""
    model = scene.nested()
    state = model.state_dict()
    renamed = {name.replace("0.", "2."): value for name, value in state.items()}
    found = model.load_state_dict(renamed, strict=False)
    return [sorted(found.missing_keys), sorted(found.unexpected_keys)]


def _states_for_a_named_optimizer(scene: Scene) -> bool:
    """Whether the states made for an optimizer whose own state dict has names are named as the model names them."""
    kind, model = scene.api.FullyShardedDataParallel, scene.nested()
    optimizer = scene.train(model)
    with kind.state_dict_type(model, scene.api.StateDictType.SHARDED_STATE_DICT):
        saved = kind.optim_state_dict(model, optimizer)
        states = kind.optim_state_dict_to_load(model, optimizer, saved, is_named_optimizer=True)["state"]
    return bool(states) and states.keys() <= dict(model.named_parameters()).keys()


def _buffers_on_the_meta_device(scene: Scene) -> int:
    """How many modules are made anew where only an ignored one has a buffer on the meta device."""
    made: list[nn.Module] = []
    layers = nn.Sequential(scene.layers(), nn.Identity())
    layers[1].register_buffer("unused", torch.ones(4, device="meta"))
    scene.wrap(layers, ignored_modules=[layers[1]], param_init_fn=made.append)
    return len(made)


def _beside_a_plain_module(scene: Scene) -> list[str]:
    """What this rank saves of a plain module before a wrapper, where the first rank alone has whole values."""
    model = nn.Sequential(nn.Linear(4, 4).to(scene.device), scene.wrap(scene.layers()))
    return [name for name in _saved_for_the_first_rank(scene, model) if name.startswith("0.")]


def _names_of_a_bare_root(scene: Scene) -> list[str]:
    """The names of parameters where those of a wrapper that has none of its own are whole."""
    model = _bare_root(scene)
    with scene.api.FullyShardedDataParallel.summon_full_params(model):
        return [name for name, _ in model.named_parameters()]


def _states_of_a_small_unit(scene: Scene) -> list[str]:
    """The names of states where a rank has no element of a unit that has one."""
    layers = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1, bias=False)).to(scene.device)
    layers[1] = scene.wrap(layers[1])
    model = scene.wrap(layers)
    optimizer = scene.train(model)
    kind, forms = scene.api.FullyShardedDataParallel, scene.api.StateDictType
    with kind.state_dict_type(model, forms.SHARDED_STATE_DICT):
        return sorted(kind.optim_state_dict(model, optimizer)["state"])


def _dtype_for_a_function(scene: Scene) -> list[str]:
    """The dtypes of gradients that a function in the place of the reductions gets, with a dtype for these."""
    found: set[str] = set()
    precision = scene.api.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = scene.wrap(scene.layers(), mixed_precision=precision)
    model.register_comm_hook(found, lambda seen, gradient, shard: seen.add(str(gradient.dtype)))
    scene.run(model).float().sum().backward()
    return sorted(found)


def _refused_again(scene: Scene) -> list[bool]:
    """Whether units that differ in what all must share are refused in the first forward, and in the second."""
    model, found = scene.nested({"use_orig_params": False}), []
    for _ in range(2):
        try:
            scene.run(model)
        except ValueError:
            found.append(True)
        else:
            found.append(False)
    return found


def _wrapped_by_size(scene: Scene, *, nested: bool) -> list[str]:
    """The modules of which 18 elements are left, by their shortest names: one within others, or in two places."""
    if nested:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 4))
        model = nn.Sequential(nn.Sequential(inner, nn.Linear(4, 2)))
    else:
        shared = nn.Linear(4, 4)
        model = nn.Sequential(nn.Sequential(shared, nn.Linear(4, 2)), nn.Sequential(nn.Linear(2, 4), shared))
    names = {child: name for name, child in model.named_modules()}
    rule = functools.partial(scene.api.wrap.size_based_auto_wrap_policy, min_num_params=18)
    wrapper = scene.wrap(model.to(scene.device), auto_wrap_policy=rule)
    found = [one.module for one in scene.api.FullyShardedDataParallel.fsdp_modules(wrapper)]
    return sorted(names[child] for child in found)


def _options_of_a_script(scene: Scene) -> list[float]:
    """The learning rates that are saved of an optimizer's state dict in which a script has changed them."""
    model, kind = scene.nested(), scene.api.FullyShardedDataParallel
    optimizer = scene.train(model)
    given = optimizer.state_dict()
    given["param_groups"] = [{**group, "lr": 7.0} for group in given["param_groups"]]
    with kind.state_dict_type(model, scene.api.StateDictType.SHARDED_STATE_DICT):
        return [group["lr"] for group in kind.optim_state_dict(model, optimizer, given)["param_groups"]]


def _with_groups(scene: Scene, model: nn.Module, *layers: int) -> torch.optim.Optimizer:
    """Adam after one step, with a group for each of the layers, whose learning rate tells which."""
    named = dict(model.named_parameters())
    groups = [
        {"params": [one for name, one in named.items() if f"{layer}." in name], "lr": layer + 1.0} for layer in layers
    ]
    return scene.train(model, optimizer=torch.optim.Adam(groups))


def _states_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """The states of a group's parameters; there are none where a rank has no element of a parameter."""
    return [optimizer.state[one] for one in group["params"] if optimizer.state.get(one)]


def _mark(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Write the learning rate of each group into the averages of its parameters, and then raise it tenfold."""
    for group in optimizer.param_groups:
        for state in _states_of(optimizer, group):
            state["exp_avg"].fill_(group["lr"])
        group["lr"] *= 10
    return optimizer


def _rates_and_averages(optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """Of each group the learning rate, and the averages of its parameters, which are one if they are marked."""
    return [
        [group["lr"], *sorted({float(state["exp_avg"].mean()) for state in _states_of(optimizer, group)})]
        for group in optimizer.param_groups
    ]


def _groups_in_another_order(scene: Scene) -> list[list[float]]:
    """What an optimizer has after it has loaded the state of one whose groups are in another order."""
    kind, saved, loaded = scene.api.FullyShardedDataParallel, scene.nested(), scene.nested()
    given, taking = _mark(_with_groups(scene, saved, 0, 1)), _with_groups(scene, loaded, 1, 0)
    forms = scene.api.StateDictType
    with kind.state_dict_type(saved, forms.SHARDED_STATE_DICT):
        state = kind.optim_state_dict(saved, given)
    with kind.state_dict_type(loaded, forms.SHARDED_STATE_DICT):
        taking.load_state_dict(kind.optim_state_dict_to_load(loaded, taking, state))
    return _rates_and_averages(taking)


def _numbers_in_another_order(scene: Scene) -> list[list[float]]:
    """The same for an unsharded model's optimizer, whose state has numbers in the place of names."""
    kind, model, plain = scene.api.FullyShardedDataParallel, scene.nested(), scene.layers()
    by_number = scene.api.OptimStateKeyType.PARAM_ID
    state = kind.full_optim_state_dict(model, _mark(_with_groups(scene, model, 1, 0)), rank0_only=False)
    taking = _with_groups(scene, plain, 0, 1)
    taking.load_state_dict(kind.rekey_optim_state_dict(state, by_number, plain, optim=taking))
    return _rates_and_averages(taking)


def _names_of_local_states(scene: Scene) -> list[str]:
    """The names in a local state dict of a model that holds its original parameters."""
    groups: Any = {"device_mesh": None, "process_group": scene.mesh.get_group()}  # which local state dicts need
    model = scene.nested(groups, **groups)
    with scene.api.FullyShardedDataParallel.state_dict_type(model, scene.api.StateDictType.LOCAL_STATE_DICT):
        return sorted(model.state_dict())


def _norm_with_options(scene: Scene) -> list[str]:
    """The strategies of a batch normalisation and of its model, where a rule gives the former one of its own."""
    kinds = scene.api.ShardingStrategy
    rule = scene.api.wrap.CustomPolicy(
        lambda module: {"sharding_strategy": kinds.SHARD_GRAD_OP} if isinstance(module, nn.BatchNorm1d) else False
    )
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(scene.device)
    precision = scene.api.MixedPrecision(param_dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it stays in full precision
        model = scene.wrap(layers, auto_wrap_policy=rule, mixed_precision=precision)
    return [one.sharding_strategy.name for one in (model.module[1], model)]


def _wrapped_everywhere(scene: Scene) -> list[Any]:
    """The modules that the rule for all of them wraps, and whether a call by hand outside of its context wraps one."""
    layer = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(layer, nn.Tanh()), nn.Linear(4, 2))
    names = {child: name for name, child in model.named_modules()}
    outside = scene.api.wrap.wrap(layer, device_mesh=scene.mesh)
    wrapper = scene.wrap(model.to(scene.device), auto_wrap_policy=scene.api.wrap.always_wrap_policy)
    found = [one.module for one in scene.api.FullyShardedDataParallel.fsdp_modules(wrapper)]
    return [sorted(names[child] for child in found), outside is layer]


#: By name.
QUESTIONS: dict[str, Callable[[Scene], Any]] = {
    "states-by-default": _states_by_default,
    "bytes-past-alignment": _bytes_past_alignment,
    "in-a-plain-module": _in_a_plain_module,
    "states-of-a-part": _states_of_a_part,
    "first-rank-of-a-bare-root": _first_rank_of_a_bare_root,
    "casts-of-a-bare-root": _casts_of_a_bare_root,
    "places-after-a-cast": _places_after_a_cast,
    "buffers-of-what-is-recomputed": _buffers_of_what_is_recomputed,
    "names-of-what-is-recomputed": _names_of_what_is_recomputed,
    "loaded-into-what-is-recomputed": _loaded_into_what_is_recomputed,
    "keys-that-do-not-fit": _keys_that_do_not_fit,
    "states-for-a-named-optimizer": _states_for_a_named_optimizer,
    "buffers-on-the-meta-device": _buffers_on_the_meta_device,
    "beside-a-plain-module": _beside_a_plain_module,
    "names-of-a-bare-root": _names_of_a_bare_root,
    "states-of-a-small-unit": _states_of_a_small_unit,
    "dtype-for-a-function": _dtype_for_a_function,
    "refused-again": _refused_again,
    "nested-by-size": functools.partial(_wrapped_by_size, nested=True),
    "in-two-places-by-size": functools.partial(_wrapped_by_size, nested=False),
    "wrapped-everywhere": _wrapped_everywhere,
    "text-of-a-rule": lambda scene: "Linear" in repr(scene.api.wrap.ModuleWrapPolicy({nn.Linear})),
    "options-of-a-script": _options_of_a_script,
    "groups-in-another-order": _groups_in_another_order,
    "numbers-in-another-order": _numbers_in_another_order,
    "names-of-local-states": _names_of_local_states,
    "tied-after-whole-ones": _tied_after_whole_ones,
    "norm-with-options": _norm_with_options,
    "first-of-each-replica": _first_of_each_replica,
}
