"""Hides what a process knows of process groups and meshes, so that another world can take its place for a while."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor

#: The registries of process groups in ``distributed_c10d``, which ``_World`` shows as properties.
_REGISTRIES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")


@contextlib.contextmanager
def without_groups() -> Iterator[None]:
    """Hide this process's groups in the context, and forget afterwards what was made in it.

    Names of groups are counted from the beginning, as in a new process. The hidden groups are untouched: they are not
    destroyed and no other rank takes part. DTensor's caches are emptied on both sides, because they return the mesh of
    another world where meshes are equal, with the place of another rank in it.
    """
    world: Any = c10d._world
    registries: list[dict[Any, Any]] = [getattr(c10d, name) for name in _REGISTRIES]
    registries.append(world._pg_coalesce_state)
    kept, hook = [dict(one) for one in registries], sys.excepthook
    default, count, names = world.default_pg, world.group_count, dict(world.pg_names)
    forget_meshes()
    for name in names.values():
        _unregister_process_group(name)
    for one in registries:
        one.clear()
    world.group_count = 0
    c10d._update_default_pg(None)
    try:
        yield
    finally:
        for group, name in list(world.pg_names.items()):
            group.shutdown()
            _unregister_process_group(name)
        for one, before in zip(registries, kept, strict=True):
            one.clear()
            one.update(before)
        for group, name in names.items():
            _register_process_group(name, group)
        world.group_count = count
        c10d._update_default_pg(default)
        # Joining a world puts the rank before every traceback of the process.
        sys.excepthook = hook
        forget_meshes()


def forget_meshes() -> None:
    """Empty the caches in which DTensor keeps what it has found out about placements on a mesh."""
    from torch.distributed.tensor import _redistribute

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    for owner, name in (
        (getattr(type(propagator), "_propagate_tensor_meta_cached", None), "cache_clear"),
        (getattr(propagator, "_propagate_tensor_meta", None), "cache_clear"),
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
        (_redistribute, "clear_redistribute_planner_cache"),
        (getattr(_redistribute, "_gen_transform_infos", None), "cache_clear"),
    ):
        clear = getattr(owner, name, None)  # which of them exist depends on torch's version
        if clear is not None:
            clear()


def is_clean() -> bool:
    """Whether this process belongs to no world."""
    return not dist.is_initialized() and not c10d._world.pg_map
