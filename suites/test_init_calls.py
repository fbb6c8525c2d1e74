"""Chapter INIT: options and calls that the API of ``FullyShardedDataParallel`` refuses, and its default ranks."""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.suites.apis import fsdp1, trained
from shardproof.testing import Capability, Rank, contract, needs, world
from shardproof.testing.axes import subjects

pytestmark = [needs(Capability.FSDP1_API), world(2)]


# Options and calls that are refused


@contract("INIT-5")
def test_refuses_a_group_with_a_mesh(rank: Rank) -> None:
    """A process group together with a mesh is refused."""
    fsdp = fsdp1(rank)
    fsdp.check_refused("process_group", lambda: fsdp.wrap(fsdp.layers(), process_group=fsdp.mesh.get_group()))


@contract("INIT-5")
@subjects("option", ["use_orig_params", "limit_all_gathers"])
def test_refuses_units_that_differ(rank: Rank, option: str) -> None:
    """A unit that differs from the root in an option that all units share is refused by the first forward."""
    fsdp = fsdp1(rank)
    model = fsdp.nested({option: False})
    fsdp.check_refused(option, lambda: fsdp.forward(model))


@contract("INIT-5")
def test_second_forward_refuses_too(rank: Rank) -> None:
    """Units that differ in an option that all share are refused by the second forward as by the first."""
    fsdp = fsdp1(rank)
    model = fsdp.nested({"use_orig_params": False})
    for _ in range(2):
        fsdp.check_refused("use_orig_params", lambda: fsdp.forward(model))


@contract("INIT-5")
def test_refuses_a_rule_for_wrapped_modules(rank: Rank) -> None:
    """An auto-wrap policy for a module in which a module is wrapped already is refused."""
    fsdp = fsdp1(rank)
    rule = functools.partial(fsdp.api.wrap.size_based_auto_wrap_policy, min_num_params=1)
    fsdp.check_refused("auto wrapping", lambda: fsdp.nested(auto_wrap_policy=rule))


@contract("INIT-5")
def test_refuses_to_ignore_a_wrapper(rank: Rank) -> None:
    """A wrapper among the ignored modules is refused."""
    fsdp = fsdp1(rank)
    layers = fsdp.layers()
    layers[0] = fsdp.wrap(layers[0])
    fsdp.check_refused("ignored_modules", lambda: fsdp.wrap(layers, ignored_modules=[layers[0]]))


@contract("INIT-5")
@subjects("how", ["by-two-options", "of-two-kinds", "parameters-as-modules", "a-number"])
def test_refuses_to_ignore(rank: Rank, how: str) -> None:
    """Ignored modules together with ignored states, states of two kinds, and a non-list of modules are refused."""
    fsdp = fsdp1(rank)
    layers = fsdp.layers()
    options: dict[str, dict[str, Any]] = {
        "by-two-options": {"ignored_modules": [layers[0]], "ignored_states": [layers[0].weight]},
        "of-two-kinds": {"ignored_states": [layers[0], layers[1].weight]},
        "parameters-as-modules": {"ignored_modules": [layers[0].weight]},
        "a-number": {"ignored_modules": 3},
    }
    words = {"of-two-kinds": "ignored_states", "a-number": "iterable"}
    fsdp.check_refused(words.get(how, "ignored_modules"), lambda: fsdp.wrap(layers, **options[how]))


@contract("INIT-5")
def test_refuses_hybrid_shards_by_hand_without_groups(rank: Rank) -> None:
    """Hybrid shards without a mesh and without process groups are refused for a module that is wrapped by hand."""
    fsdp = fsdp1(rank)
    strategy = fsdp.api.ShardingStrategy.HYBRID_SHARD
    fsdp.check_refused("HYBRID_SHARD", lambda: fsdp.wrap(fsdp.layers(), device_mesh=None, sharding_strategy=strategy))


@contract("INIT-5")
@subjects("half", ["one-group", "half-a-pair", "one-dimension"])
def test_refuses_hybrid_shards_with_one_group(rank: Rank, half: str) -> None:
    """Hybrid shards with one process group, alone or with None for the other, or with one dimension, are refused."""
    fsdp = fsdp1(rank)
    group = fsdp.mesh.get_group()
    options: dict[str, dict[str, Any]] = {
        "one-group": {"device_mesh": None, "process_group": group},
        "half-a-pair": {"device_mesh": None, "process_group": (group, None)},
        "one-dimension": {"device_mesh": fsdp.mesh},
    }
    strategy = fsdp.api.ShardingStrategy.HYBRID_SHARD
    word = "device_mesh" if half == "one-dimension" else "process_group"
    fsdp.check_refused(word, lambda: fsdp.wrap(fsdp.layers(), sharding_strategy=strategy, **options[half]))


@contract("INIT-5")
def test_refuses_forms_that_differ(rank: Rank) -> None:
    """Asking for the form of state dicts of a model whose units have two forms is refused."""
    fsdp = fsdp1(rank)
    model = fsdp.nested()

    def ask() -> None:
        fsdp.kind.set_state_dict_type(model.module[0], fsdp.api.StateDictType.SHARDED_STATE_DICT)
        fsdp.kind.get_state_dict_type(model)

    fsdp.check_refused("same state", ask)


@contract("INIT-5")
@subjects("wrong", ["ShardedStateDictConfig", "ShardedOptimStateDictConfig"])
def test_refuses_a_configuration_of_another_form(rank: Rank, wrong: str) -> None:
    """A configuration of sharded state dicts, of the model or the optimizer, is refused for full ones."""
    fsdp = fsdp1(rank)
    api, model = fsdp.api, fsdp.nested()
    configs = {one: getattr(api, one)() for one in ("FullStateDictConfig", "FullOptimStateDictConfig")}
    configs[wrong.replace("Sharded", "Full")] = getattr(api, wrong)()
    form = api.StateDictType.FULL_STATE_DICT
    fsdp.check_refused(wrong, lambda: fsdp.kind.set_state_dict_type(model, form, *configs.values()))


@contract("INIT-5")
@subjects("call", ["hook", "no-sync", "clip"])
def test_refuses_calls_of_the_root_on_a_unit(rank: Rank, call: str) -> None:
    """A communication hook, deferred reductions and clipping are refused for a unit inside the root."""
    fsdp = fsdp1(rank)
    model = fsdp.nested()
    fsdp.forward(model).sum().backward()
    unit = model.module[0]
    calls: dict[str, Callable[[], Any]] = {
        "hook": lambda: unit.register_comm_hook(None, lambda *_: None),
        "no-sync": lambda: _enter(unit.no_sync()),
        "clip": lambda: unit.clip_grad_norm_(1.0),
    }
    fsdp.check_refused("root", calls[call])


@contract("INIT-5")
def test_refuses_a_communication_hook_that_is_no_function(rank: Rank) -> None:
    """A communication hook that is not callable is refused."""
    fsdp = fsdp1(rank)
    fsdp.check_refused("must be callable", lambda: fsdp.nested().register_comm_hook(None, 3))


@contract("INIT-5")
def test_refuses_full_gradients_of_flat_parameters(rank: Rank) -> None:
    """Full gradients are refused with flat parameters, whose gradient is that of one tensor."""
    fsdp = fsdp1(rank)
    model = fsdp.wrap(fsdp.layers(), use_orig_params=False)
    fsdp.check_refused("with_grads", lambda: _enter(fsdp.kind.summon_full_params(model, with_grads=True)))


@contract("INIT-5")
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
def test_refuses_an_initialisation_that_is_no_function(rank: Rank) -> None:
    """A ``param_init_fn`` that cannot be called is refused."""
    fsdp = fsdp1(rank)
    fsdp.check_refused("to be callable", lambda: fsdp.wrap(fsdp.layers().to("meta"), param_init_fn=3))


@contract("INIT-5")
def test_refuses_a_meta_module_that_cannot_be_made(rank: Rank) -> None:
    """A module on the meta device without ``reset_parameters`` is refused if no function initializes it."""
    fsdp = fsdp1(rank)

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, device="meta"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they come before the error
        fsdp.check_refused("reset_parameters", lambda: fsdp.wrap(Scale()))


@contract("INIT-5")
def test_refuses_a_root_of_another_root(rank: Rank) -> None:
    """The forward of a model is refused if one of its units has run before as a root."""
    fsdp = fsdp1(rank)
    model = fsdp.nested()
    fsdp.forward(model.module[0])
    fsdp.check_refused("Non-root", lambda: fsdp.forward(model))


@contract("INIT-5")
@needs(Capability.OFFLOAD, Capability.PAGEABLE_OFFLOAD)
def test_refuses_offloaded_parameters_that_were_moved(rank: Rank) -> None:
    """Offloaded parameters on another device than the CPU are refused by a forward, the first or a later one.

    Other parameters that were moved from the device of computation are refused by the first forward.
    """
    fsdp = fsdp1(rank)
    # Only flat parameters can be on the meta device, which stands for an accelerator.
    options = {"cpu_offload": fsdp.api.CPUOffload(offload_params=True), "use_orig_params": False}
    model = fsdp.nested(options, **options)
    for _ in range(2):
        model.to("meta")
        fsdp.check_refused("CPU offloading", lambda: fsdp.forward(model))
        model.to_empty(device="cpu")
        fsdp.forward(model)
    moved = fsdp.nested({"use_orig_params": False}, use_orig_params=False).to("meta")
    fsdp.check_refused("unexpectedly has parameters on", lambda: fsdp.forward(moved))


@contract("INIT-5")
def test_refuses_an_initialisation_that_leaves_meta_parameters(rank: Rank) -> None:
    """A ``param_init_fn`` after which parameters are still on the meta device is refused."""
    fsdp = fsdp1(rank)
    init: Callable[[nn.Module], None] = lambda module: None  # noqa: E731
    fsdp.check_refused("device_id", lambda: fsdp.wrap(fsdp.layers().to("meta"), param_init_fn=init))


@contract("INIT-5")
@subjects("call", ["state_dict", "optim_state_dict"])
def test_refuses_local_state_dicts_on_a_mesh(rank: Rank, call: str) -> None:
    """Local state dicts, of the model and of the optimizer, are refused for a model that was given a mesh."""
    fsdp, model, optimizer = trained(rank)
    fsdp.kind.set_state_dict_type(model, fsdp.api.StateDictType.LOCAL_STATE_DICT)
    calls: dict[str, Callable[[], Any]] = {
        "state_dict": model.state_dict,
        "optim_state_dict": lambda: fsdp.kind.optim_state_dict(model, optimizer),
    }
    fsdp.check_refused("local_state_dict", calls[call])


@contract("INIT-5")
def test_refuses_a_backward_on_full_parameters(rank: Rank) -> None:
    """A backward is refused while parameters are full (summoned)."""
    fsdp = fsdp1(rank)
    model = fsdp.wrap(fsdp.layers())
    loss = fsdp.forward(model).sum()
    with fsdp.kind.summon_full_params(model):
        fsdp.check_refused("SUMMON_FULL_PARAMS", loss.backward)


@contract("INIT-5")
def test_refuses_new_keys_by_a_wrapped_model(rank: Rank) -> None:
    """Numbers for names in a full state dict are refused by a model of flat parameters: it has to be unsharded."""
    fsdp = fsdp1(rank)
    model = fsdp.wrap(fsdp.layers(), use_orig_params=False)
    optimizer = fsdp.train(model)
    state, kinds = fsdp.kind.full_optim_state_dict(model, optimizer, rank0_only=False), fsdp.api.OptimStateKeyType
    attempt = functools.partial(fsdp.kind.rekey_optim_state_dict, state, kinds.PARAM_ID, model, optim=optimizer)
    fsdp.check_refused("parameter", attempt)


# Ranks by default


@contract("INIT-10")
def test_hybrid_shards_by_a_rule_without_groups(rank: Rank) -> None:
    """Hybrid shards of units that a rule finds, on one host, lie over all ranks, in one group that all units share."""
    fsdp, made = fsdp1(rank), list[Any]()

    def noting(name: str) -> None:
        make = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found = make(*args, **kwargs)
            made.append(found[0] if isinstance(found, tuple) else found)
            return found

        rank.monkeypatch.setattr(dist, name, call)

    noting("new_group")
    noting("new_subgroups")
    # A host has as many devices as ranks.
    rank.monkeypatch.setattr(torch.get_device_module(rank.device), "device_count", lambda: rank.world_size)
    strategy, rule = fsdp.api.ShardingStrategy.HYBRID_SHARD, fsdp.api.wrap.ModuleWrapPolicy({nn.Linear})
    model = fsdp.wrap(fsdp.layers(), device_mesh=None, sharding_strategy=strategy, auto_wrap_policy=rule)
    fsdp.forward(model).sum().backward()
    groups = [unit.process_group for unit in fsdp.kind.fsdp_modules(model)]
    for group in made:
        dist.destroy_process_group(group)
    assert len(groups) == 3 and len(set(groups)) == 1, f"three units are sharded over {len(set(groups))} groups"
    ranks = [group.size() for group in groups]
    assert ranks == [rank.world_size] * 3, f"units are sharded over {ranks} ranks"


@contract("INIT-10")
@needs(Capability.SINGLE_RANK)
def test_unit_of_one_rank(rank: Rank) -> None:
    """A unit whose group is one rank, in a model of all ranks, has the rank's own gradients."""
    fsdp = fsdp1(rank)
    layers, batch = fsdp.layers(), torch.full((2, 4), rank.index + 1.0, device=rank.device)
    plain = copy.deepcopy(layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that nothing is sharded
        layers[0] = fsdp.wrap(layers[0], device_mesh=rank.mesh((2, 1), ("models", "dp"))["dp"])
    model = fsdp.wrap(layers)
    for one in (model, plain):
        one(batch).sum().backward()
    own = [parameter.grad for parameter in model.module[0].parameters()]
    # The same kernels on the same numbers.
    expected = [parameter.grad for parameter in plain[0].parameters()]
    assert all(map(torch.equal, own, expected)), f"the gradients of the unit are {own}"
