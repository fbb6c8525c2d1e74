"""Adapters of the per-parameter reference of which one place is edited: what is set, and on which form of a parameter.

Settings that change while units are gathered, methods beside forward, sizes on replicas and on a part of the world,
parameters that are frozen or of another dtype, and tensors that choose what is gathered.
"""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from tests.harness.planted_reductions import Edit, edited

PER_PARAMETER = {
    # Frozen parameters.
    "frozen-where-resharded": Edit(
        "per_parameter.group:ParamGroup.sync_requires_grad", "self._smaller.sync_requires_grad()", "pass"
    ),
    "frozen-not-clipped": Edit(
        "common.clip:clip_grad_norm_",
        "if tensor.grad is not None]",
        "if tensor.grad is not None and tensor.requires_grad]",
    ),
    "gradients-as-the-first": Edit(
        "per_parameter.reduction:Reducer._finish", "total.params[0].dtype", "group.shards.params[0].dtype"
    ),
    # Sizes and dimensions.
    "shards-of-a-replica-kept": Edit(
        "per_parameter.mesh:after_forward", "if value == mesh.size:", "if value == mesh.mesh.size():"
    ),
    "sizes-of-all-replicas-taken": Edit(
        "per_parameter.mesh:after_forward", "mesh.size % value != 0", "mesh.mesh.size() % value != 0"
    ),
    "groups-of-the-others": Edit(
        "per_parameter.mesh:_mesh_of",
        "(ranks[:, column].tolist(), ranks[row].tolist())",
        "(ranks[row].tolist(), ranks[:, column].tolist())",
    ),
    "first-dimension-evenly": Edit("per_parameter.param:_checked_dim", "if dim > 0 and data", "if data"),
    # Settings and methods.
    "set-while-sharded-alone": Edit(
        "per_parameter.module:FSDPModule.set_reshard_after_forward",
        "if unit.group is not None:",
        "if unit.group is not None and unit.group.residence is Residence.SHARDED:",
    ),
    "keywords-of-methods-lost": Edit(
        "per_parameter.module:_run_as_forward", "method(*args, **kwargs)", "method(*args)"
    ),
    "no-limit-at-all": Edit("common.clip:clip_grad_norm_", "if not grads:", "if not grads or max_norm <= 0:"),
    # Forwards.
    "wide-floats-not-cast": Edit(
        "common.containers:cast",
        "if tensor.is_floating_point() else",
        "if tensor.is_floating_point() and tensor.dtype is not torch.float64 else",
    ),
    "failed-end-counts": Edit(
        "common.order:OrderCheck.end",
        "    for group in dict.fromkeys(groups):\n",
        "    self._compares_ranks = False\n    for group in dict.fromkeys(groups):\n",
    ),
    "units-at-the-end-unmentioned": Edit(
        "common.order:OrderCheck.before_gather", "if names != expected:", "if expected and names != expected:"
    ),
    "one-place-of-two-forgotten": Edit(
        "per_parameter.unit:forget_latest_forwards",
        "for group in iteration.forward_order[iteration.forward_begins :]:",
        "for group in set(iteration.forward_order[iteration.forward_begins :]):",
    ),
    # Tensors that choose what is gathered.
    "one-input-padded": Edit("per_parameter.param:Extension._check_padded", "and any(", "and all("),
    "gathered-for-hooks-kept": Edit(
        "per_parameter.layout:UnshardedBuffer.free",
        "for storage in self._storages:",
        "for storage in self._storages[:1]:",
    ),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER})
