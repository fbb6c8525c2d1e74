"""Further scripts that ask a ``FullyShardedDataParallel`` something: what it leaves to defaults, and where it stands.

The others are in :mod:`shardproof.harness.adapters.flat_calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.harness.adapters.flat_misuses import Scene


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
    """Of two wrappers: the names of values and of states, whether all are sharded, and the shapes of whole ones."""
    kind, forms = scene.api.FullyShardedDataParallel, scene.api.StateDictType
    model = nn.ModuleDict({name: scene.wrap(scene.layers()) for name in ("one", "two")})
    optimizer = scene.train(model, *model.values())
    with kind.state_dict_type(model, forms.SHARDED_STATE_DICT):
        values, states = model.state_dict(), kind.optim_state_dict(model, optimizer)["state"]
    moments = [state["exp_avg"] for state in states.values()]
    are_sharded = all(isinstance(one, DTensor) for one in (*values.values(), *moments))
    with kind.summon_full_params(model):
        shapes = sorted({tuple(parameter.shape) for parameter in model.parameters()})
    return [sorted(values), sorted(states), are_sharded, shapes]


def _first_of_each_replica(scene: Scene) -> list[Any]:
    """What this rank has where the first rank of its replica has whole values: names that are saved, and sizes."""
    kind, api = scene.api.FullyShardedDataParallel, scene.api
    model = scene.wrap(scene.layers(), sharding_strategy=api.ShardingStrategy.HYBRID_SHARD)
    scene.run(model)
    config = api.FullStateDictConfig(rank0_only=True)
    with kind.state_dict_type(model, api.StateDictType.FULL_STATE_DICT, config):
        saved = sorted(model.state_dict())
    with kind.summon_full_params(model, rank0_only=True, writeback=False):
        is_whole = model.module[0].weight.shape == (4, 4)
    return [saved, is_whole]


#: By name.
QUESTIONS: dict[str, Callable[[Scene], Any]] = {
    "states-by-default": _states_by_default,
    "bytes-past-alignment": _bytes_past_alignment,
    "in-a-plain-module": _in_a_plain_module,
    "first-of-each-replica": _first_of_each_replica,
}
