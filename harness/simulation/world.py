"""Makes this process one rank of a world whose other ranks do not exist, and leaves the process as it was."""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardproof.harness.judging.texts import rank_count
from shardproof.harness.tensors import private

# Hides what a process knows of process groups and meshes, so that another world can take its place for a while.


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


#: The most ranks of a world that have been simulated. Lists of all ranks make larger ones slow.
MOST_RANKS = 65_536


@dataclasses.dataclass(frozen=True)
class SimulatedWorld:
    """One rank of a world that is simulated, and the device of its tensors, which have no memory."""

    size: int
    rank: int
    device: torch.device

    def mesh(self, shape: tuple[int, ...] | None = None, names: tuple[str, ...] = ("dp",)) -> DeviceMesh:
        """Return a mesh of all ranks, of one to four dimensions; by default of one. Other ranks are a ValueError."""
        shape = shape or (self.size,)
        check_shape(self.size, shape, names)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)


def check_world(size: int, rank: int = 0) -> None:
    """Refuse a world that cannot be simulated by a ValueError of one line."""
    if not 1 <= size <= MOST_RANKS:
        raise ValueError(f"a simulated world of {rank_count(size)}: expected 1 to {MOST_RANKS}")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of a simulated world of {rank_count(size)}: expected 0 to {size - 1}")


def check_shape(size: int, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """Refuse a mesh that a world of ``size`` ranks does not divide into, by a ValueError of one line."""
    text = "x".join(map(str, shape))
    if len(names) != len(shape):
        raise ValueError(f"a mesh of {text} with the names {', '.join(names)}: expected one name for each dimension")
    if any(one < 1 for one in shape) or math.prod(shape) != size:
        raise ValueError(
            f"a mesh of {text} has {rank_count(math.prod(shape))}: a world of {size} does not divide into it"
        )


@contextlib.contextmanager
def simulated_world(size: int, *, rank: int = 0) -> Iterator[SimulatedWorld]:
    """Make this process one rank of a simulated world. Collectives return at once and move nothing.

    The process may be a rank of a real world, whose groups are hidden meanwhile. Worlds do not nest. No such rank
    is a ValueError of one line.
    """
    check_world(size, rank)
    private.need("torch.testing._internal.distributed.fake_pg")  # registers the backend
    with without_groups():
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
        yield SimulatedWorld(size, rank, torch.device("cpu"))
