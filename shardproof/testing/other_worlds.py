"""Other worlds of the ranks of a case, one after the other, in the same processes.

A job that goes on with fewer ranks, or with more, destroys its process groups and makes others. The groups of the world
that the case runs on are hidden meanwhile, because later cases need them.
"""

import contextlib
import datetime
from collections.abc import Iterator

import torch.distributed as dist

from shardproof.harness.parity.rank import Rank
from shardproof.harness.simulation.world import without_groups
from shardproof.harness.tensors import private

#: Destroyed groups of the last case that had such worlds, which its models may outlive. A reducer of DDP that is the
#: last to hold a group of gloo joins the group's threads with the GIL, for which one of them may wait to let go of a
#: tensor: the rank hangs (F-240). Released from here, the groups end without the GIL.
_destroyed: list[dist.ProcessGroup] = []

#: As that of the world of the case: a collective that waits longer is stuck, and the controller's deadline is shorter.
_TIMEOUT = datetime.timedelta(minutes=30)


class OtherWorlds:
    """Makes worlds of the ranks of a case; see :func:`other_worlds`."""

    def __init__(self, rank: Rank, store: dist.Store, backend: str) -> None:
        self._rank, self._store, self._backend = rank, store, backend
        self._made = 0

    @contextlib.contextmanager
    def of(self, size: int) -> Iterator[Rank]:
        """Divide the ranks, in their order, among worlds of ``size`` ranks, which do the same at once (collective).

        Yields this process as a rank of its new world, whose process groups are destroyed when the context ends. On an
        accelerator they have a backend for the CPU too.

        Raises:
            ValueError: the ranks do not divide into worlds of this size.
        """
        rank, number = self._rank, self._made
        self._made += 1
        if size < 1 or rank.world_size % size:
            raise ValueError(f"{rank.world_size} ranks do not divide into worlds of {size}")
        first = rank.index - rank.index % size
        ranks = tuple(range(first, first + size))
        name = f"world {rank.announcer.job}.{number}.{first}"
        is_on_cpu = rank.device.type == "cpu"
        with rank.announcer.in_another_world(name, ranks):
            dist.init_process_group(
                "gloo" if is_on_cpu else f"cpu:gloo,{rank.device.type}:{self._backend}",
                store=dist.PrefixStore(name, self._store),
                rank=ranks.index(rank.index),
                world_size=size,
                timeout=_TIMEOUT,
                device_id=rank.device if self._backend == "nccl" else None,
            )
            other = rank.of_another_world(ranks)
            try:
                yield other
                other.assert_compared()
            finally:
                other.finish()
            # A rank that leaves closes its connections, which others may still read from.
            rank.exchange(None)
            _destroyed.extend(private.need("torch.distributed.distributed_c10d._world").pg_map)
            dist.destroy_process_group()


@contextlib.contextmanager
def other_worlds(rank: Rank) -> Iterator[OtherWorlds]:
    """Leave the world of the case for other ones, until the context ends."""
    _destroyed.clear()
    store, backend = private.need("torch.distributed.distributed_c10d._get_default_store")(), dist.get_backend()
    with without_groups():
        yield OtherWorlds(rank, store, backend)
