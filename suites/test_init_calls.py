"""Chapter INIT: options and calls that the API of ``FullyShardedDataParallel`` refuses."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.suites.apis import fsdp1
from shardproof.testing import Capability, Rank, contract, each_value, needs, world

pytestmark = needs(Capability.FSDP1_API)


# Options and calls that are refused


@contract("INIT-5")
@world(2)
def test_refuses_a_group_with_a_mesh(rank: Rank) -> None:
    """A process group together with a mesh is refused."""
    fsdp = fsdp1(rank)
    fsdp.check_refused("process_group", lambda: fsdp.wrap(fsdp.layers(), process_group=fsdp.mesh.get_group()))


@contract("INIT-5")
@world(2)
@each_value("option")
@pytest.mark.parametrize("option", ["use_orig_params", "limit_all_gathers"])
def test_refuses_units_that_differ(rank: Rank, option: str) -> None:
    """A unit that differs from the root in an option that all units share is refused by the first forward."""
    fsdp = fsdp1(rank)
    model = fsdp.nested({option: False})
    fsdp.check_refused(option, lambda: fsdp.forward(model))


@contract("INIT-5")
@world(2)
def test_second_forward_refuses_too(rank: Rank) -> None:
    """Units that differ in what all share are refused by the second forward as by the first."""
    fsdp = fsdp1(rank)
    model = fsdp.nested({"use_orig_params": False})
    for _ in range(2):
        fsdp.check_refused("use_orig_params", lambda: fsdp.forward(model))


@contract("INIT-5")
@world(2)
def test_refuses_a_rule_for_wrapped_modules(rank: Rank) -> None:
    """A rule that wraps, for a module in which one is wrapped already, is refused."""
    fsdp = fsdp1(rank)
    rule = functools.partial(fsdp.api.wrap.size_based_auto_wrap_policy, min_num_params=1)
    fsdp.check_refused("auto wrapping", lambda: fsdp.nested(auto_wrap_policy=rule))


@contract("INIT-5")
@world(2)
def test_refuses_to_ignore_a_wrapper(rank: Rank) -> None:
    """A wrapper among the ignored modules is refused."""
    fsdp = fsdp1(rank)
    layers = fsdp.layers()
    layers[0] = fsdp.wrap(layers[0])
    fsdp.check_refused("ignored_modules", lambda: fsdp.wrap(layers, ignored_modules=[layers[0]]))


@contract("INIT-5")
@world(2)
@each_value("how")
@pytest.mark.parametrize("how", ["by-two-options", "of-two-kinds", "parameters-as-modules"])
def test_refuses_to_ignore(rank: Rank, how: str) -> None:
    """Ignored modules beside ignored states, states of two kinds, and parameters as modules are refused."""
    fsdp = fsdp1(rank)
    layers = fsdp.layers()
    options: dict[str, dict[str, Any]] = {
        "by-two-options": {"ignored_modules": [layers[0]], "ignored_states": [layers[0].weight]},
        "of-two-kinds": {"ignored_states": [layers[0], layers[1].weight]},
        "parameters-as-modules": {"ignored_modules": [layers[0].weight]},
    }
    word = "ignored_states" if how == "of-two-kinds" else "ignored_modules"
    fsdp.check_refused(word, lambda: fsdp.wrap(layers, **options[how]))


@contract("INIT-5")
@world(2)
def test_refuses_hybrid_shards_by_hand_without_groups(rank: Rank) -> None:
    """Hybrid shards without a mesh and without process groups are refused for a module that is wrapped by hand."""
    fsdp = fsdp1(rank)
    strategy = fsdp.api.ShardingStrategy.HYBRID_SHARD
    fsdp.check_refused("HYBRID_SHARD", lambda: fsdp.wrap(fsdp.layers(), device_mesh=None, sharding_strategy=strategy))


@contract("INIT-5")
@world(2)
@each_value("half")
@pytest.mark.parametrize("half", ["one-group", "half-a-pair"])
def test_refuses_hybrid_shards_with_one_group(rank: Rank, half: str) -> None:
    """Hybrid shards with one process group, alone or with None for the other, are refused."""
    fsdp = fsdp1(rank)
    strategy, group = fsdp.api.ShardingStrategy.HYBRID_SHARD, fsdp.mesh.get_group()
    groups = group if half == "one-group" else (group, None)
    fsdp.check_refused(
        "process_group",
        lambda: fsdp.wrap(fsdp.layers(), device_mesh=None, process_group=groups, sharding_strategy=strategy),
    )


@contract("INIT-5")
@world(2)
def test_refuses_forms_that_differ(rank: Rank) -> None:
    """Asking for the form of state dicts of a model whose units have two is refused."""
    fsdp = fsdp1(rank)
    model = fsdp.nested()

    def ask() -> None:
        fsdp.kind.set_state_dict_type(model.module[0], fsdp.api.StateDictType.SHARDED_STATE_DICT)
        fsdp.kind.get_state_dict_type(model)

    fsdp.check_refused("same state", ask)


@contract("INIT-5")
@world(2)
@each_value("wrong")
@pytest.mark.parametrize("wrong", ["ShardedStateDictConfig", "ShardedOptimStateDictConfig"])
def test_refuses_a_configuration_of_another_form(rank: Rank, wrong: str) -> None:
    """A configuration of sharded state dicts, of the model or the optimizer, is refused for full ones."""
    fsdp = fsdp1(rank)
    api, model = fsdp.api, fsdp.nested()
    configs = {one: getattr(api, one)() for one in ("FullStateDictConfig", "FullOptimStateDictConfig")}
    configs[wrong.replace("Sharded", "Full")] = getattr(api, wrong)()
    form = api.StateDictType.FULL_STATE_DICT
    fsdp.check_refused(wrong, lambda: fsdp.kind.set_state_dict_type(model, form, *configs.values()))


@contract("INIT-5")
@world(2)
def test_refuses_a_communication_hook_of_a_unit(rank: Rank) -> None:
    """A communication hook for a unit inside the root is refused."""
    fsdp = fsdp1(rank)
    model = fsdp.nested()
    fsdp.forward(model)
    fsdp.check_refused("root", lambda: model.module[0].register_comm_hook(None, lambda *_: None))


@contract("INIT-5")
@world(2)
def test_refuses_a_communication_hook_that_is_no_function(rank: Rank) -> None:
    """A communication hook that cannot be called is refused."""
    fsdp = fsdp1(rank)
    fsdp.check_refused("must be callable", lambda: fsdp.nested().register_comm_hook(None, 3))


@contract("INIT-5")
@world(2)
def test_refuses_full_gradients_of_flat_parameters(rank: Rank) -> None:
    """Full gradients are refused where parameters are flat: they are the gradient of one tensor."""
    fsdp = fsdp1(rank)
    model = fsdp.wrap(fsdp.layers(), use_orig_params=False)
    fsdp.check_refused("with_grads", lambda: _enter(fsdp.kind.summon_full_params(model, with_grads=True)))


@contract("INIT-5")
@world(2)
def test_refuses_full_parameters_of_replicas_on_the_cpu(rank: Rank) -> None:
    """Full parameters on the CPU of the first rank are refused where nothing is sharded: every rank has them."""
    fsdp = fsdp1(rank)
    model = fsdp.without_shards()
    options = {"writeback": False, "rank0_only": True, "offload_to_cpu": True}
    fsdp.check_refused("NO_SHARD", lambda: _enter(fsdp.kind.summon_full_params(model, **options)))


def _enter(context: contextlib.AbstractContextManager[Any]) -> None:
    with context:
        pass


@contract("INIT-5")
@world(2)
def test_refuses_an_initialisation_that_is_no_function(rank: Rank) -> None:
    """A ``param_init_fn`` that cannot be called is refused."""
    fsdp = fsdp1(rank)
    fsdp.check_refused("to be callable", lambda: fsdp.wrap(fsdp.layers().to("meta"), param_init_fn=3))


@contract("INIT-5")
@world(2)
def test_refuses_a_meta_module_that_cannot_be_made(rank: Rank) -> None:
    """A module on the meta device without ``reset_parameters`` is refused if no function makes its values."""
    fsdp = fsdp1(rank)

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, device="meta"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that come before the error
        fsdp.check_refused("reset_parameters", lambda: fsdp.wrap(Scale()))


@contract("INIT-5")
@world(2)
def test_refuses_a_root_of_another_root(rank: Rank) -> None:
    """The forward of a model is refused if one of its units has run before as a root."""
    fsdp = fsdp1(rank)
    model = fsdp.nested()
    fsdp.forward(model.module[0])
    fsdp.check_refused("Non-root", lambda: fsdp.forward(model))
