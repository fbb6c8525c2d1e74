"""Ways to make, use and save a ``FullyShardedDataParallel`` that its documentation excludes."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


@dataclasses.dataclass(frozen=True)
class Scene:
    """Two linear layers, and what wraps them.

    Attributes:
        api: the module with ``FullyShardedDataParallel`` and what its arguments are made of.
        mesh: all ranks.
        device: of the layers.
    """

    api: Any
    mesh: DeviceMesh
    device: torch.device

    def layers(self) -> Any:
        """Two linear layers, on the device."""
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(self.device)

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """Make a wrapper, by default over all ranks."""
        chosen: dict[str, Any] = {"device_mesh": self.mesh, "use_orig_params": True, "device_id": self.device}
        return self.api.FullyShardedDataParallel(module, **(chosen | options))

    def nested(self, inner: dict[str, Any] | None = None, **options: Any) -> Any:
        """Wrap the first layer, with options of its own, and then both."""
        layers = self.layers()
        layers[0] = self.wrap(layers[0], **(inner or {}))
        return self.wrap(layers, **options)

    def run(self, model: nn.Module) -> torch.Tensor:
        """Run a forward."""
        output: torch.Tensor = model(torch.ones(2, 4, device=self.device))
        return output

    def train(
        self, model: nn.Module, *parts: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.Optimizer:
        """Make one step (by default of Adam) by the loss of a model, or by one for each part; return the optimizer."""
        optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.1)
        for part in parts or (model,):
            self.run(part).square().sum().backward()
        optimizer.step()
        return optimizer


def _rule_beside_wrappers(scene: Scene) -> None:
    rule = functools.partial(scene.api.wrap.size_based_auto_wrap_policy, min_num_params=1)
    scene.nested(auto_wrap_policy=rule)


def _ignored_wrapper(scene: Scene) -> None:
    layers = scene.layers()
    layers[0] = scene.wrap(layers[0])
    scene.wrap(layers, ignored_modules=[layers[0]])


def _ignored_by_two_options(scene: Scene) -> None:
    layers = scene.layers()
    scene.wrap(layers, ignored_modules=[layers[0]], ignored_states=[layers[0].weight])


def _ignored_of_two_kinds(scene: Scene) -> None:
    layers = scene.layers()
    scene.wrap(layers, ignored_states=[layers[0], layers[1].weight])


def _ignored_parameters_as_modules(scene: Scene) -> None:
    layers = scene.layers()
    scene.wrap(layers, ignored_modules=[layers[0].weight])


def _forms_that_differ(scene: Scene) -> None:
    model, kind = scene.nested(), scene.api.FullyShardedDataParallel
    kind.set_state_dict_type(model.module[0], scene.api.StateDictType.SHARDED_STATE_DICT)
    kind.get_state_dict_type(model)


def _another_configuration(scene: Scene, *, of_the_optimizer: bool) -> None:
    api, model = scene.api, scene.nested()
    configs = api.FullStateDictConfig(), api.ShardedOptimStateDictConfig()
    if not of_the_optimizer:
        configs = api.ShardedStateDictConfig(), api.FullOptimStateDictConfig()
    api.FullyShardedDataParallel.set_state_dict_type(model, api.StateDictType.FULL_STATE_DICT, *configs)


def _function_of_a_layer(scene: Scene) -> None:
    model = scene.nested()
    scene.run(model)
    model.module[0].register_comm_hook(None, lambda *_: None)


def _function_that_is_none(scene: Scene) -> None:
    scene.nested().register_comm_hook(None, 3)


def _whole_gradients_of_flat_parameters(scene: Scene) -> None:
    model = scene.wrap(scene.layers(), use_orig_params=False)
    with scene.api.FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        pass


def _hybrid_with_one_group(scene: Scene) -> None:
    strategy, group = scene.api.ShardingStrategy.HYBRID_SHARD, scene.mesh.get_group()
    scene.wrap(scene.layers(), device_mesh=None, process_group=group, sharding_strategy=strategy)


def _values_by_no_function(scene: Scene) -> None:
    scene.wrap(scene.layers().to("meta"), param_init_fn=3)


def _made_by_no_reset(scene: Scene) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, device="meta"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that come before the error
        scene.wrap(Scale())


def _hybrid_with_half_a_pair(scene: Scene) -> None:
    strategy, pair = scene.api.ShardingStrategy.HYBRID_SHARD, (scene.mesh.get_group(), None)
    scene.wrap(scene.layers(), device_mesh=None, process_group=pair, sharding_strategy=strategy)


def _nothing_sharded(scene: Scene) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # NO_SHARD is deprecated
        return scene.wrap(scene.layers(), sharding_strategy=scene.api.ShardingStrategy.NO_SHARD)


def _replicas_whole_on_the_cpu(scene: Scene) -> None:
    model, kind = _nothing_sharded(scene), scene.api.FullyShardedDataParallel
    with kind.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        pass


def _layer_before_the_model(scene: Scene) -> None:
    model = scene.nested()
    scene.run(model.module[0])
    scene.run(model)


#: By name.
MISUSES: dict[str, Callable[[Scene], Any]] = {
    "a-group-beside-a-mesh": lambda scene: scene.wrap(scene.layers(), process_group=scene.mesh.get_group()),
    "other-parameters-inside": lambda scene: scene.run(scene.nested({"use_orig_params": False})),
    "other-bounds-inside": lambda scene: scene.run(scene.nested({"limit_all_gathers": False})),
    "a-rule-beside-wrappers": _rule_beside_wrappers,
    "an-ignored-wrapper": _ignored_wrapper,
    "ignored-by-two-options": _ignored_by_two_options,
    "ignored-of-two-kinds": _ignored_of_two_kinds,
    "ignored-parameters-as-modules": _ignored_parameters_as_modules,
    "hybrid-by-hand-without-groups": lambda scene: scene.wrap(
        scene.layers(), device_mesh=None, sharding_strategy=scene.api.ShardingStrategy.HYBRID_SHARD
    ),
    "hybrid-with-one-group": _hybrid_with_one_group,
    "forms-that-differ": _forms_that_differ,
    "a-configuration-of-sharded-ones": functools.partial(_another_configuration, of_the_optimizer=False),
    "an-optimizers-configuration-of-sharded-ones": functools.partial(_another_configuration, of_the_optimizer=True),
    "hybrid-with-half-a-pair": _hybrid_with_half_a_pair,
    "replicas-whole-on-the-cpu": _replicas_whole_on_the_cpu,
    "a-layer-before-the-model": _layer_before_the_model,
    "values-by-no-function": _values_by_no_function,
    "values-by-no-reset": _made_by_no_reset,
    "a-function-of-a-layer": _function_of_a_layer,
    "a-function-that-is-none": _function_that_is_none,
    "whole-gradients-of-flat-parameters": _whole_gradients_of_flat_parameters,
}
