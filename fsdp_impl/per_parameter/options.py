"""What a user may change about a group at any time, through the setters of ``FSDPModule``."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fsdp_impl.common.comms import AllGather, ReduceScatter
from fsdp_impl.common.streams import Stream


@dataclass
class GroupOptions:
    """Runtime options of one group.

    Attributes:
        reduce_grads: reduce in backward; otherwise gradients accumulate unsharded.
        all_reduce_grads: with replicas, all-reduce after the reduce-scatter; otherwise shards accumulate.
        reshard_after_backward: free the unsharded parameters after backward.
        unshard_in_backward: gather before backward, which an embedding can do without.
        unshard_async: issue gathers of forward and backward asynchronously on the current stream.
        reduce_unused: reduce zeros for parameters without gradient, so that ranks that used others agree.
        max_reduce_inputs: reduction inputs that may be in flight; the largest of all groups holds.
        divide_factor: divide gradients by this instead of the number of ranks.
        force_sum: reduce by sums only.
        all_reduce_hook: called with the reduced flat shard, after the all-reduce if there is one.
        all_reduce_hook_stream: where the hook runs; ``None`` for the stream of all-reduces.
        all_gather: replaces the all-gather; ``None`` for the seam.
        reduce_scatter: replaces the reduce-scatter; ``None`` for the seam.
    """

    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    unshard_async: bool = False
    reduce_unused: bool = False
    max_reduce_inputs: int = 1
    divide_factor: float | None = None
    force_sum: bool = False
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: Stream = None
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
