"""The collectives, as replaceable functions.

Every collective that moves parameters or gradients of a step goes through this module's attributes
(``collectives.gather(...)``), so that replacing an attribute replaces the behaviour: another communication back end, or
a planted fault. Norms, the comparison of orders, and what sets up or summons a model issue theirs where they are.
``unit`` names the unit that is served, by the module names of its members joined with ``", "``; the root's own unit is
``"(root)"``.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist

# torch 2.13 renamed both entry points and warns on the old names. The name is chosen once; the attribute is looked up
# at each call, so that tools which wrap ``torch.distributed`` after import see the call.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def gather(
    output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, *, unit: str, async_op: bool = False
) -> dist.Work | None:
    """All-gather ``shard`` (1-D, ``n`` elements) into ``output`` (1-D, ``world * n``, rank-major, same dtype).

    Runs on the current stream. With ``async_op`` the result may be used after ``wait()`` on the returned work.
    """
    work: dist.Work | None = getattr(dist, _ALL_GATHER)(
        output_tensor=output, input_tensor=shard, group=group, async_op=async_op
    )
    return work


def reduce(output: torch.Tensor, contributions: torch.Tensor, group: dist.ProcessGroup, op: Any, *, unit: str) -> None:
    """Reduce-scatter ``contributions`` (1-D, ``world * n``, rank-major) into ``output`` (1-D, ``n``, same dtype).

    Runs on the current stream. ``op`` is a ``torch.distributed.ReduceOp``; see :mod:`fsdp_impl.common.divide`.
    """
    getattr(dist, _REDUCE_SCATTER)(output=output, input=contributions, group=group, op=op)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, *, unit: str) -> None:
    """All-reduce ``tensor`` in place on the current stream."""
    dist.all_reduce(tensor, group=group, op=op)


# The seam at which unsharded parameters are freed.


class Freeable(Protocol):
    """Memory of unsharded parameters."""

    def free(self) -> None:
        """Give the bytes back as soon as nothing reads them."""
        ...


def reshard(buffer: Freeable, *, unit: str) -> None:
    """Free the unsharded parameters of ``unit``; the caller has registered the sharded ones already."""
    buffer.free()


# What an all-gather reads: the shard as it is, or a copy of it in the gather's own output.


def ready_to_gather(shard: torch.Tensor, output: torch.Tensor, rank: int) -> torch.Tensor:
    """``shard`` if an all-gather into ``output`` can read it as it is, else a copy that :func:`own_part` makes."""
    is_ready = shard.dtype == output.dtype and shard.device == output.device
    return shard if is_ready else own_part(output, shard, rank)


def own_part(output: torch.Tensor, shard: torch.Tensor, rank: int) -> torch.Tensor:
    """Write ``shard`` (1-D, ``n``, any dtype and device) to its place in a gather's ``output``; returns that place.

    An all-gather may be given its own part of the output as its input. So a shard that has to be moved or cast takes no
    memory beside the output, for as long as the gather is in flight. The copy is queued on the current stream, as the
    gather is; it casts where ``output`` lives, because the host is slower and would be waited for.
    """
    own = output.narrow(0, rank * shard.numel(), shard.numel())
    moved = shard if shard.dtype == own.dtype else shard.to(own.device, non_blocking=True)
    return own.copy_(moved, non_blocking=True)
