"""Whole parameters on request (``summon_full_params``), and flat ones for what acts on memory (``.to()``).

Both change what modules hold, and change it back (Note: held by modules, in shards.py).
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_impl.common import dtensor
from fsdp_impl.common.changes import is_stale
from fsdp_impl.flat import construct
from fsdp_impl.flat.group import FlatGroup
from fsdp_impl.flat.reduction import Gradients, set_grad
from fsdp_impl.flat.registry import units_in
from fsdp_impl.flat.shards import FLAT_PARAM, home_of, lies_at
from fsdp_impl.flat.unit import FlatUnit


def check(unit: FlatUnit, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool) -> None:
    """Refuse what ``FullyShardedDataParallel.summon_full_params`` cannot do, and make the root known."""
    use_orig = unit.options.use_orig
    if with_grads and (offload_to_cpu or not use_orig):
        raise NotImplementedError(
            f"with_grads={with_grads}, use_orig_params={use_orig}, offload_to_cpu={offload_to_cpu} is not supported yet"
        )
    if offload_to_cpu and unit.group is not None and not unit.group.shards.is_sharded:
        raise NotImplementedError("offload_to_cpu=True and NO_SHARD is not supported yet")
    if writeback and rank0_only:
        raise NotImplementedError("writeback=True and rank0_only=True is not supported yet")
    if offload_to_cpu and not rank0_only:
        warnings.warn(
            "offload_to_cpu=True and rank0_only=False may result in the unsharded parameters being redundantly copied "
            "to CPU memory for GPUs sharing the same CPU memory, which risks CPU OOM. We recommend using "
            "offload_to_cpu=True with rank0_only=True.",
            stacklevel=4,
        )
    construct.initialize(unit)
    unit.check_idle()


@contextmanager
def unit_full(
    unit: FlatUnit, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> Iterator[None]:
    """The part of one unit in ``FullyShardedDataParallel.summon_full_params``."""
    unit.is_summoned = True
    try:
        if unit.group is None:
            yield
            return
        group = unit.group
        was_stale = is_stale([group])
        group.shards.adopt()
        is_changed = was_stale or rank0_only
        if is_changed:
            # The gather below is not of what stays gathered, and what is written inside may be no change. Or the first
            # rank writes to a copy there, and the others to their shards.
            group.changes.note()
        whole = _gather(group)
        grads = WholeGradients(group) if with_grads else None
        if rank0_only and group.ranks.group.rank() != 0:
            del whole, grads
            yield
            return
        params = _register_whole(group, whole.cpu() if offload_to_cpu else whole)
        if grads is not None:
            grads.give_to(params)
        try:
            yield
        finally:
            try:
                if writeback:
                    group.changes.note()
                    _write_back(group)
            finally:
                if grads is not None:
                    grads.take_back(params, writeback=writeback)
                _register_shards(group)
                if group.shards.is_sharded and not (writeback or is_changed):
                    # What was written is gone, and another rank may not have had anything to write to.
                    group.keep_up_to_date()
    finally:
        unit.is_summoned = False


@contextmanager
def reduced_shown(gradients: Gradients) -> Iterator[None]:
    """Inside, parameters show sharded gradients alone: those that are not reduced yet are each rank's own."""
    gradients.hide_unsharded()
    try:
        yield
    finally:
        gradients.show_unsharded()


def _gather(group: FlatGroup) -> torch.Tensor:
    """The whole flat parameter in its own dtype; where nothing is sharded or offloaded, the parameter itself."""
    flat = group.shards.flat.detach()
    return flat if not group.shards.is_sharded and flat.device == group.device else group.gather_full(flat)


def _register_whole(group: FlatGroup, whole: torch.Tensor) -> list[nn.Parameter]:
    """Let the modules hold parameters that are views of ``whole``: with ``use_orig`` the original objects."""
    shards = group.shards
    params: list[nn.Parameter] = []
    for index, view in enumerate(group.views(whole)):
        if shards.use_orig and not isinstance(view, DTensor):
            param = shards.originals[index]
            param.data = view
        else:
            wanted = shards.originals[index].requires_grad if shards.use_orig else shards.flat.requires_grad
            param = nn.Parameter(view.detach(), requires_grad=wanted)
        params.append(param)
        for owner in shards.owners[index]:
            owner.module.__dict__.pop(owner.name, None)
            owner.hold(param)
    if not shards.use_orig:
        del shards.module._parameters[FLAT_PARAM]
    return params


@torch.no_grad()
def _write_back(group: FlatGroup) -> None:
    """Copy this rank's part of what the modules hold now to the shard."""
    shards = group.shards
    held: list[torch.Tensor] = []
    for name, piece, owners in zip(shards.names, shards.layout.pieces, shards.owners, strict=True):
        value = dtensor.local_part(getattr(owners[0].module, owners[0].name).detach())
        if value.size() != piece.size:
            raise RuntimeError(
                f"Cannot writeback when the parameter shape changes\nExpects {piece.size} but got {value.size()} for "
                f"{name}"
            )
        held.append(value)
    flat = shards.flat.detach()
    for index, value in enumerate(held):
        # Where nothing was copied to make it whole, it was changed in place. To write it onto itself would look to
        # autograd like a change of what an earlier forward saved.
        is_in_order = value.stride() == shards.layout.pieces[index].stride
        if shards.is_sharded or not is_in_order or not lies_at(value, home_of(flat), shards.spans[index]):
            shards.put(index, value, flat)


def _register_shards(group: FlatGroup) -> None:
    """What stays unsharded keeps the values of its forward; the next forward sees that the shards have changed."""
    shards = group.shards
    if shards.use_orig:
        shards.register()
        return
    for owners in shards.owners:
        for owner in owners:
            owner.module._parameters.pop(owner.name, None)
    shards.module._parameters[FLAT_PARAM] = shards.flat
    group.register_unsharded()


class WholeGradients:
    """The gradients of a group's original parameters, gathered; those that no rank has stay ``None``. Collective."""

    @torch.no_grad()
    def __init__(self, group: FlatGroup) -> None:
        self._group = group
        shards = group.shards
        self._sharded = [param.grad for param in shards.originals]
        shard = torch.zeros_like(shards.flat)
        present = torch.zeros(len(shards.originals), dtype=torch.int32, device=group.device)
        for index, (grad, span) in enumerate(zip(self._sharded, shards.spans, strict=True)):
            if grad is not None and span.numel:
                shards.part(index, shard).copy_(grad)
                present[index] = 1
        if group.ranks.shard_group is not None:
            dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group.ranks.shard_group)
        views = group.views(group.gather_full(shard))
        self._whole = [view if there else None for view, there in zip(views, present.tolist(), strict=True)]

    def give_to(self, params: list[nn.Parameter]) -> None:
        for param, whole in zip(params, self._whole, strict=True):
            param.grad = None
            if whole is not None:
                param.grad = whole.to(param.dtype) if whole.dtype != param.dtype else whole

    @torch.no_grad()
    def take_back(self, params: list[nn.Parameter], *, writeback: bool) -> None:
        shards = self._group.shards
        for index, (param, grad, span) in enumerate(zip(params, self._sharded, shards.spans, strict=True)):
            whole, param.grad = param.grad, None
            if writeback and grad is not None and whole is not None and span.numel:
                grad.copy_(shards.like_part(index, shards.cut_one(index, dtensor.local_part(whole))))
            original = shards.originals[index]
            original.grad = None
            if grad is not None:
                set_grad(original, grad)


@contextmanager
def flat_params_exposed(wrapper: nn.Module) -> Iterator[None]:
    """Inside, modules hold flat parameters instead of original ones, and may move them."""
    units = [unit for unit in units_in(wrapper) if unit.group is not None and not unit.is_exposed]
    for unit in units:
        _expose(unit)
    try:
        yield
    finally:
        for unit in units:
            _conceal(unit)


def _expose(unit: FlatUnit) -> None:
    assert unit.group is not None and unit.gradients is not None
    unit.is_exposed = True
    unit.gradients.hide_unsharded()
    shards = unit.group.shards
    shards.adopt()
    unit.group.reshard()
    if shards.use_orig:
        for owners in shards.owners:
            for owner in owners:
                owner.module._parameters[owner.name] = None
        shards.module._parameters[FLAT_PARAM] = shards.flat


def _conceal(unit: FlatUnit) -> None:
    assert unit.group is not None and unit.gradients is not None
    unit.is_exposed = False
    shards = unit.group.shards
    shards.adopt_flat()
    if shards.use_orig:
        del shards.module._parameters[FLAT_PARAM]
        before = [(param.grad, param.dtype) for param in shards.originals]
        for param in shards.originals:
            param.grad = None
        shards.register()
        for param, (grad, dtype) in zip(shards.originals, before, strict=True):
            if grad is not None:
                # One that was kept in a lower precision than its parameter stays there, unless the parameter is cast.
                set_grad(param, grad.to(param.device, grad.dtype if param.dtype == dtype else param.dtype))
    unit.gradients.show_unsharded()
