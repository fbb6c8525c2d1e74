"""Adapter of torch's ``FullyShardedDataParallel``: a wrapper whose units are flat parameters."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed.fsdp

from harness.adapters.flat import FlatAdapter


class TorchFsdpAdapter(FlatAdapter):
    """``torch.distributed.fsdp.FullyShardedDataParallel``."""

    name = "torch.fsdp"
    api: ClassVar[Any] = torch.distributed.fsdp


# Why it has not the other capabilities, as far as they were tried:
# - RESHARD_TO_SIZE, RESHARD_TO_SIZE_UNEVEN: no strategy does something between keeping and freeing.
# - ROOT_RESHARD: the root's unit is never freed after forward, because backward is expected to want it first.
# - GROUPED_UNIT: a wrapper takes one module.
# - POST_ACCUMULATE_GRAD_HOOK: gradients accumulate in the flat parameter; the original ones are views of it, and
#   their hooks never run.
# - NON_ROOT_FORWARD: only the root's backward ends with the callback that puts gradients in place and units back to
#   idle; after any other the next collective call raises "Cannot manually unshard parameters during forward/backward".
# - REGISTERED_STATE: after forward the root's parameters show shards although its unit is still gathered.
# - MANUAL_RESHARD: there is a context that gathers, and no call that frees.
# - GATHER_ORDER: the root's gradients are reduced last, whenever in backward they are ready.
# - SINGLE_RANK: it becomes NO_SHARD, which all-reduces each unit's gradients among the one rank.
# - DEFERRED_PER_UNIT: no_sync is for the root, and for all.
# - PAGEABLE_OFFLOAD, TENSOR_PARALLEL_CHECKPOINT: F-10 and F-17 of docs/findings.md. SINGLE_RANK has F-14 and F-16
#   besides.
