"""The collectives, as replaceable functions.

Every collective that moves parameters or gradients of a step goes through this module's attributes
(``collectives.gather(...)``), so that replacing an attribute replaces the behaviour: another communication back end, or
a planted fault. Norms, the comparison of orders, and what sets up or summons a model issue theirs where they are.
``unit`` names the unit that is served, by the module names of its members joined with ``", "``; the root's own unit is
``"(root)"``.
"""

from typing import Any

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
