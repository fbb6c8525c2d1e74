"""Adapter for the flat half of the reference implementation."""

from __future__ import annotations

from typing import Any, ClassVar

import fsdp_impl
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.flat import FlatAdapter


class ReferenceFlatAdapter(FlatAdapter):
    """``fsdp_impl.FullyShardedDataParallel``."""

    name = "reference.flat"
    api: ClassVar[Any] = fsdp_impl

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return super().capabilities() | {
            Capability.NON_ROOT_FORWARD,
            Capability.SINGLE_RANK,
            Capability.RECOMPUTES_GATHERED,
            Capability.COMPILED_MODULES,
            Capability.TENSOR_PARALLEL_COUNTS,
            Capability.TENSOR_PARALLEL_CHECKPOINT,
            Capability.PAGEABLE_OFFLOAD,
        }


# And why not the others, as far as they were tried: what the interface has no word for, as in torch_fsdp.py, and
# - POST_ACCUMULATE_GRAD_HOOK: a parameter of which a rank holds nothing gets no gradient there, and its hook no call.
