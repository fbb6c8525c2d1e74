"""Every place that issues a collective, and why whether it does is equal on all ranks of the group.

A collective that one rank issues and another does not hangs, or exchanges wrong numbers. :data:`WHY` has for each place
the condition that decides, and the reason why the condition is equal on all ranks of the group. The tests of two ranks
below are of conditions that were not.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_impl import FullyShardedDataParallel, fully_shard
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.collective_places import Place, places

#: By file, function and call.
WHY: dict[tuple[str, str], dict[str, str]] = {
    # Norms
    ("common/clip.py", "clip_grad_norm_"): {
        "combine_over_ranks": "Whether a parameter has a gradient, and its mesh: the call is a collective for the same "
        "parameters, of which the same have gradients (torch's contract); a rank's empty shard has an empty gradient.",
    },
    ("common/clip.py", "combine_over_ranks"): {
        "_reduce_over": "The process groups of the shares, which every rank has in the order of its gradients.",
    },
    ("common/clip.py", "_reduce_over"): {
        "reduce_norm": "Always.",
    },
    ("common/clip.py", "reduce_norm"): {
        "dist.all_reduce": "Always; the number of shares is that of the process groups, not of the elements.",
    },
    ("flat/reduction.py", "clip_grad_norm"): {
        "combine_over_ranks": "The groups and placements of the units' parameters, also of those without elements or "
        "gradients on this rank (_parts); of other parameters, which have gradients (torch's contract).",
    },
    # The seams
    ("common/collectives.py", "gather"): {"getattr(dist, _ALL_GATHER)": "Always; its callers decide."},
    ("common/collectives.py", "reduce"): {"getattr(dist, _REDUCE_SCATTER)": "Always; its callers decide."},
    ("common/collectives.py", "all_reduce"): {"dist.all_reduce": "Always; its callers decide."},
    # Full tensors
    ("common/dtensor.py", "whole"): {
        "moved.full_tensor": "The tensor is a DTensor: all ranks of a mesh have DTensors where one has; whether they "
        "call is decided by the callers.",
    },
    # Functions of user code
    ("common/hooks.py", "run_post_accumulate"): {
        "hook": "A reduction has made the gradient. In the flat half ranks without elements of a parameter run no hook "
        "of it, as they have no gradient: a hook of user code there may not issue collectives.",
    },
    ("flat/reduction.py", "Reducer._call_hook"): {
        "hook": "register_comm_hook, a setter for the root: ranks set alike, and each reduction calls it.",
    },
    ("per_parameter/extension.py", "Extension.inputs"): {
        "hook": "The local tensor has hooks, by its class, and the group is gathered: decided where it is unsharded.",
    },
    ("per_parameter/extension.py", "Extension.finish"): {
        "hook": "As Extension.inputs, once for each gather that was waited for.",
    },
    ("per_parameter/group.py", "ParamGroup._gather"): {
        "collectives.gather": "No custom gather is set, and the shard size is above 1: a setter, and the mesh.",
        "comm": "set_custom_all_gather, a setter that ranks call alike, and the shard size as above.",
    },
    ("per_parameter/reduction.py", "Reducer._reduce_scatter"): {
        "collectives.reduce": "No custom reduce-scatter is set, and the shard size is above 1: a setter, and the mesh.",
        "comm": "set_custom_reduce_scatter, a setter, and the shard size as above.",
    },
    ("per_parameter/reduction.py", "Reducer._finish"): {
        "collectives.all_reduce": "There are replicas, by the mesh; with set_requires_all_reduce(False), which ranks "
        "set alike, reduce does not come here.",
        "group.options.all_reduce_hook": "set_all_reduce_hook, a setter that ranks call alike.",
    },
    # Meshes and process groups
    ("common/mesh.py", "check_replicas"): {
        "dist.all_reduce": "Some row of the mesh is not sorted: all ranks of the mesh see all of them, issuing both, "
        "over its column and then over its row.",
    },
    ("common/mesh.py", "concatenate"): {
        "concatenate_meshes": "All meshes have names, by the caller's arguments. It takes groups that exist.",
    },
    ("flat/ranks.py", "_groups_by_host"): {
        "dist.new_subgroups": "A hybrid strategy without groups or mesh, by the constructor's arguments; hosts have "
        "the same number of devices, as torch requires too.",
        "dist.new_group": "As the subgroups; every rank takes part in each, in the order of the first ranks.",
    },
    ("flat/ranks.py", "_resolve_hybrid"): {"check_replicas": "A hybrid strategy with a mesh: constructor's arguments."},
    ("flat/state_dict.py", "sharded_copy"): {
        "DeviceMesh.from_group": "The wrapper was given no mesh, by its arguments; the group exists already.",
        "concatenate": "The parameter was a DTensor, on all ranks of the unit.",
    },
    ("per_parameter/mesh.py", "default_mesh"): {
        "dist.init_process_group": "Nobody has made the default process group, which every rank does at one place.",
        "init_device_mesh": "fully_shard was given no mesh: its arguments are equal on all ranks.",
    },
    ("per_parameter/mesh.py", "check_mesh"): {"check_replicas": "The mesh is 2-D: an argument of fully_shard."},
    ("per_parameter/spmd.py", "data_parallel_mesh"): {
        "_one_dim": "dp_mesh_dims is given: an argument of fully_shard.",
        "concatenate": "dp_mesh_dims names dimensions of both kinds: an argument of fully_shard.",
        "check_replicas": "The named dimensions make a 2-D mesh: an argument of fully_shard.",
    },
    ("per_parameter/spmd.py", "_one_dim"): {
        "flatten_mesh": "Several dimensions of one kind are named. torch keeps the flat dimension with the root mesh, "
        "to which every rank of the mesh has added them at the same call.",
    },
    ("per_parameter/smaller.py", "after_forward"): {
        "_smaller_mesh": "reshard_after_forward is an int between 1 and the shard size: an argument of fully_shard.",
    },
    ("per_parameter/smaller.py", "_smaller_mesh"): {
        "_mesh_of": "The cache has no mesh of this size and these ranks for the shard group. All ranks of the mesh add "
        "it in one call, and the key names all of them: none has it alone.",
    },
    ("per_parameter/smaller.py", "_mesh_of"): {
        "DeviceMesh": "The mesh has as many ranks as the world: all of them come here.",
        "dist.new_group": "The mesh has fewer: the members of a group make it among themselves, rows in one order.",
        "DeviceMesh.from_group": "As new_group; the groups exist then.",
    },
    ("per_parameter/communication.py", "SymmetricMemory.__init__"): {
        "dist.barrier": "Always, of a setter that is a collective by contract.",
    },
    ("per_parameter/communication.py", "_reduce_over"): {
        "SymmetricMemory": "The group reduces in symmetric memory, and its reduce group changes: both by setters.",
    },
    ("per_parameter/communication.py", "separate_reduce_group"): {
        "dist.new_group": "The cache has no second group for the shard group: a setter that is a collective of its "
        "members by contract, who all add it in one call.",
        "_reduce_over": "Always, of a setter that is a collective by contract.",
    },
    ("per_parameter/communication.py", "use_symmetric_memory"): {
        "SymmetricMemory": "There is a sharded dimension, by the mesh; the setter is a collective by contract. Of "
        "reductions also set_force_sum_reduction_for_comms, a setter.",
    },
    ("per_parameter/param.py", "_cut_tensor_parallel"): {"concatenate": "The parameter is a DTensor on all ranks."},
    ("per_parameter/spmd.py", "_spec"): {"concatenate": "dp_mesh_dims leaves other dimensions: an argument."},
    # The order of forwards
    ("common/order.py", "OrderCheck._agree"): {"dist.all_reduce": "Always; its caller decides."},
    ("common/order.py", "OrderCheck._compare_ranks"): {
        "self._agree": "The group has several ranks.",
        "dist.all_gather_object": "The ranks do not agree, which an all-reduce has told all of them.",
    },
    ("common/order.py", "OrderCheck.before_gather"): {
        "self._compare_ranks": "This is the first training forward to end, and autograd is on: modes and the number of "
        "forwards are the program's. The units may differ: that is found, since each rank compares before each gather.",
    },
    ("common/order.py", "OrderCheck.end"): {
        "self._compare_ranks": "As before_gather; a rank that goes on compares a unit with this one's None.",
    },
    ("flat/unit.py", "FlatUnit.pre_forward"): {
        "self.iteration.order.before_gather": "The debug level was DETAIL when the unit was made, as the environment "
        "sets for all ranks, and no backward runs.",
    },
    ("flat/unit.py", "FlatUnit.post_forward"): {
        "self.iteration.order.end": "As before_gather, and the root's forward ends.",
    },
    ("per_parameter/unit.py", "Unit.pre_forward"): {
        "self.iteration.order.before_gather": "validate_order was called, which ranks do alike, and the unit's forward "
        "begins.",
    },
    ("per_parameter/unit.py", "Unit._root_post_forward"): {
        "self.iteration.order.end": "As before_gather, and the root's forward ends.",
    },
    # Gathers
    ("per_parameter/module.py", "FSDPModule.unshard"): {
        "unit.unshard": "Always: a call that is a collective unless the unit is unsharded.",
    },
    ("per_parameter/unit.py", "Unit.unshard"): {
        "self.group.unshard": "Always, after drop_stale, where a look is due or the group is gathered: versions, "
        "steps, notes and memory show on every rank (Note: stale values).",
    },
    ("per_parameter/unit.py", "Unit._unshard_now"): {
        "self.group.unshard": "A forward, a recomputation or the gradient of an output comes to the unit: every rank "
        "runs the same statements, and the loss uses the same outputs (torch's contract).",
    },
    ("per_parameter/unit.py", "prefetch"): {
        "target.unshard": "What user code named, or the forward before: forwards are recorded by whether outputs need "
        "gradients, which is the program's.",
    },
    ("per_parameter/group.py", "ParamGroup.unshard"): {
        "self._gather": "No gather is in flight and the group is not unsharded: forwards, backwards and drop_stale "
        "leave it equal on all ranks, and so do calls to reshard. A state dict reshards: all ranks must take it.",
    },
    ("flat/unit.py", "FlatUnit._unshard_now"): {
        "self.group.unshard": "A forward, a recomputation or the gradient of an output comes to the unit, as in the "
        "other half.",
    },
    ("flat/unit.py", "_prefetch"): {
        "target.unshard": "The order of forwards, and wanted_in_backward: whether outputs needed gradients.",
    },
    ("flat/group.py", "FlatGroup.unshard"): {
        "self._gather": "The group is not unsharded, which drop_stale keeps equal (Note: stale values), and there is a "
        "buffer of its own: it is sharded or cast, by options, or offloaded.",
    },
    ("flat/group.py", "FlatGroup.gather_full"): {"self._gather": "Always; its callers decide."},
    ("flat/group.py", "FlatGroup._gather"): {
        "collectives.gather": "There are several shards, by the strategy and the group.",
    },
    # Reductions
    ("per_parameter/unit.py", "Unit._post_backward"): {
        "self.reducer.reduce": "set_requires_gradient_sync, a setter. It is called also where a rank has no gradients.",
    },
    ("per_parameter/reduction.py", "Reducer.reduce"): {
        "self._reduce_scatter": "A parameter has a gradient. Which have one is equal on all ranks (torch's contract), "
        "unless set_reduce_scatter_unused_params: then all of them have.",
    },
    ("per_parameter/reduction.py", "_local_grad"): {
        "grad.redistribute": "The gradient's placements, which follow on ranks of the tensor-parallel mesh from the "
        "same operations; whether there is a gradient, from the same batch.",
    },
    ("flat/unit.py", "FlatUnit._reduce"): {
        "self.reducer.reduce": "The unsharded parameter has a gradient: some parameter of the unit got one, as on all "
        "ranks (torch's contract), or did in no_sync.",
    },
    ("flat/reduction.py", "Reducer.reduce"): {"self._reduce_scatter": "Always; its caller decides."},
    ("flat/reduction.py", "Reducer._reduce_scatter"): {
        "collectives.reduce": "There is no hook of user code, and there are several shards: a setter, and the options.",
    },
    ("flat/reduction.py", "Reducer._finish"): {
        "collectives.all_reduce": "There are several replicas and no hook of user code: the options, and a setter.",
    },
    # Wrapping
    ("flat/construct.py", "_prepare"): {"sync_states": "sync_module_states: an argument of the constructor."},
    ("flat/construct.py", "sync_states"): {
        "_broadcast": "The group has several ranks. Tensors are those of the same module, in the order of modules(), "
        "also where one was on the meta device; values on another device are refused, by torch too, where they are.",
    },
    ("flat/construct.py", "_broadcast"): {"dist.broadcast": "Always, also for a tensor without elements."},
    # Full parameters
    ("flat/summon.py", "unit_full"): {
        "_gather": "Always: summon_full_params is a collective, also with rank0_only.",
        "WholeGradients": "with_grads: an argument.",
    },
    ("flat/summon.py", "_gather"): {"group.gather_full": "The unit is sharded or offloaded: options."},
    ("flat/summon.py", "WholeGradients.__init__"): {
        "dist.all_reduce": "There are several shards; one number for each parameter, whoever has a gradient of it.",
        "group.gather_full": "Always: zeros stand for gradients that are not there.",
    },
    # State dicts
    ("flat/state_dict.py", "_put_named"): {
        "whole_values": "Always: the state dict is a collective by contract, and no local one is set.",
        "whole_copy": "The form is FULL_STATE_DICT, a setting; for each name, in the order of modules().",
        "sharded_copy": "The form is SHARDED_STATE_DICT, a setting.",
    },
    ("flat/state_dict.py", "whole_values"): {"group.gather_full": "The unit is sharded or offloaded: options."},
    ("flat/state_dict.py", "whole_copy"): {"value.full_tensor": "The parameter was a DTensor, on all ranks."},
    ("flat/state_dict.py", "_take_named"): {
        "dtensor.whole": "The name is there and the global size fits: loading DTensors is a collective, for which all "
        "ranks have the same names and sizes.",
    },
    # State dicts of optimizers
    ("flat/optim_state.py", "save"): {
        "check_same_params": "Always.",
        "_whole_states": "Always, for each unit of the model, whatever this rank's optimizer has of it.",
    },
    ("flat/optim_state.py", "check_same_params"): {"dist.all_gather_object": "Always."},
    ("flat/optim_state.py", "_whole_states"): {
        "_merge": "There are several shards; then for each group beside, by the meshes of the unit's parameters.",
        "whole_values": "The states that some rank has, which all have exchanged, in the order of the exchange.",
        "whole_copy": "As whole_values, and the form; also on ranks of a tensor-parallel mesh without elements, whose "
        "groups have exchanged their states too.",
        "sharded_copy": "As whole_values, and the form.",
    },
    ("flat/optim_state.py", "_merge"): {"dist.all_gather_object": "There is a group, by the options of the unit."},
    ("flat/optim_state.py", "load"): {"_from_first_rank": "rank0_only: an argument, or a setting."},
    ("flat/optim_state.py", "_from_first_rank"): {
        "_whole": "This is the first rank of the process group: a state may be a DTensor over the first ranks of such "
        "groups alone (tensor parallelism), which all come here; another is refused on all ranks.",
        "dist.broadcast_object_list": "Always, with a refusal in place of the states too.",
    },
    ("flat/optim_state.py", "_shard_state"): {
        "_whole": "The state dict has the name: an argument, equal on all ranks where it has DTensors.",
    },
    ("flat/optim_state.py", "_placed_as"): {
        "_whole": "The optimizer has a parameter that no unit has, and the state dict its state: a DTensor's is on all "
        "ranks of its mesh.",
    },
    ("flat/optim_state.py", "_whole"): {"dtensor.whole": "The state is a tensor; its callers decide."},
}


def test_every_place_says_why_all_ranks_decide_alike() -> None:
    known = {Place(*where, callee) for where, reasons in WHY.items() for callee in reasons}
    found = places()
    without = "\n".join(map(str, sorted(found - known)))
    assert not without, (
        f"may some ranks of a group issue this and others not? Say in WHY why that cannot be:\n{without}"
    )
    gone = "\n".join(map(str, sorted(known - found)))
    assert not gone, f"no such place any more:\n{gone}"


def test_every_reason_is_a_sentence() -> None:
    said = [reason for reasons in WHY.values() for reason in reasons.values()]
    assert [reason for reason in said if not (len(reason) > 5 and reason.endswith("."))] == []


# Conditions that were not equal. A rank that decides otherwise hangs: the case then ends by its deadline.


@world(2)
def test_new_data_of_a_shard_without_elements_count(rank: Rank) -> None:
    """A kept unit is gathered again on a rank whose shard is empty too, where old and new data have the address 0."""
    model = nn.Linear(4, 1, bias=False)
    fully_shard(model, mesh=rank.mesh())
    weight, x = model.weight, torch.ones(1, 4, device=rank.device)
    with torch.no_grad():
        model(x)
        local = weight._local_tensor  # type: ignore[attr-defined]  # user code may keep it
        local.data = torch.full_like(local, 3.0)
        assert model(x).item() == 12


@world(2)
def test_writes_under_rank0_only_are_changes_on_all_ranks(rank: Rank) -> None:
    """The first rank writes to a full copy, which is dropped, and the other to its shard, which stays."""
    model = FullyShardedDataParallel(nn.Linear(4, 2), use_orig_params=True, device_id=rank.device)
    x = torch.ones(1, 4, device=rank.device)
    with torch.no_grad():
        model(x)
        with FullyShardedDataParallel.summon_full_params(model, rank0_only=True, writeback=False):
            for param in model.parameters():
                param.mul_(2)
        model(x)
    dist.barrier()  # which meets the gather of a rank that still is in forward


@world(2)
def test_sharded_states_of_the_first_rank_alone_are_refused(rank: Rank) -> None:
    """The others take no part in making them whole, and wait for them."""
    model = FullyShardedDataParallel(nn.Linear(4, 2), use_orig_params=True, device_id=rank.device)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4, device=rank.device)).sum().backward()
    optimizer.step()
    saved = FullyShardedDataParallel.sharded_optim_state_dict(model, optimizer)
    with pytest.raises(ValueError, match="optimizer state of weight is a DTensor over ranks that it is sent to"):
        FullyShardedDataParallel.scatter_full_optim_state_dict(saved, model, optim=optimizer)


class _OfOneRow(nn.Module):
    def __init__(self, mesh: torch.distributed.device_mesh.DeviceMesh) -> None:
        super().__init__()
        self.one = nn.Parameter(distribute_tensor(torch.ones(1, 4), mesh, [Shard(0)]))
        self.all = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both: torch.Tensor = (self.one.sum() + self.all.sum()).full_tensor()  # type: ignore[attr-defined]
        return both * x.sum()


@world(4)
def test_states_of_a_parameter_without_elements_beside(rank: Rank) -> None:
    """A tensor-parallel rank that holds nothing of a parameter makes the whole states with the others."""
    mesh = rank.mesh((2, 2), ("data", "tensor"))
    model = FullyShardedDataParallel(_OfOneRow(mesh["tensor"]), use_orig_params=True, device_mesh=mesh["data"])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4, device=rank.device)).backward()
    optimizer.step()
    saved = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert {name: tuple(state["exp_avg"].shape) for name, state in saved["state"].items()} == {
        "one": (1, 4),
        "all": (4, 4),
    }


@world(2)
def test_states_of_a_dtensor_outside_the_units_are_dtensors(rank: Rank) -> None:
    """They are those of a parameter that is spread over the same ranks, whatever the form of the state dict."""
    mesh = rank.mesh()
    inner = _OfOneRow(mesh)
    inner.one = nn.Parameter(torch.ones(1, 4, device=rank.device))
    model = FullyShardedDataParallel(inner, use_orig_params=True, ignored_states=[inner.all], device_mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        both = inner.all.sum().full_tensor()  # type: ignore[attr-defined]
        (both * both).backward()
        optimizer.step()

    step()
    saved = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
    loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved)
    before = [state["exp_avg"].full_tensor() for state in optimizer.state.values() if "exp_avg" in state]
    optimizer.load_state_dict(loaded)
    after = [state["exp_avg"].full_tensor() for state in optimizer.state.values() if "exp_avg" in state]
    assert len(after) == 1 and torch.equal(after[0], before[0])
    step()
