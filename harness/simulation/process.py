"""Hides what a process knows of process groups and meshes, so that another world can take its place for a while."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from shardproof.harness.tensors import private

_C10D = "torch.distributed.distributed_c10d"
#: The registries of process groups in ``distributed_c10d``, which ``_World`` shows as properties.
_REGISTRIES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")


@contextlib.contextmanager
def without_groups() -> Iterator[None]:
    """Hide this process's groups in the context, and forget afterwards what was made in it.

    Names of groups are counted from the beginning, as in a new process. The hidden groups are untouched: they are not
    destroyed and no other rank takes part. DTensor's caches are emptied on both sides, because they return the mesh of
    another world where meshes are equal, with the place of another rank in it.
    """
    # All at once, before anything is changed.
    world = private.need(f"{_C10D}._world")
    update_default = private.need(f"{_C10D}._update_default_pg")
    register = private.need("torch._C._distributed_c10d._register_process_group")
    unregister = private.need("torch._C._distributed_c10d._unregister_process_group")
    registries: list[dict[Any, Any]] = [private.need(f"{_C10D}.{name}") for name in _REGISTRIES]
    registries.append(world._pg_coalesce_state)
    if hooks := getattr(world, "pg_flight_recorder_hooks", None):  # since torch 2.15; destroying a world clears them
        registries.append(hooks)
    kept, hook = [dict(one) for one in registries], sys.excepthook
    default, count, names = world.default_pg, world.group_count, dict(world.pg_names)
    private.empty_dtensor_caches()
    for name in names.values():
        unregister(name)
    for one in registries:
        one.clear()
    world.group_count = 0
    update_default(None)
    try:
        yield
    finally:
        for group, name in list(world.pg_names.items()):
            group.shutdown()
            unregister(name)
        for one, before in zip(registries, kept, strict=True):
            one.clear()
            one.update(before)
        for group, name in names.items():
            register(name, group)
        world.group_count = count
        update_default(default)
        # Joining a world puts the rank before every traceback of the process.
        sys.excepthook = hook
        private.empty_dtensor_caches()


def is_clean() -> bool:
    """Whether this process belongs to no world."""
    return not dist.is_initialized() and not private.need(f"{_C10D}._world").pg_map
