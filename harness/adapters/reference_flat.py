"""Adapter for the flat half of the reference implementation."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import fsdp_impl.wrap
from shardproof.harness.adapters import reference_streams
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.flat import FlatAdapter


class ReferenceFlatAdapter(FlatAdapter):
    """``fsdp_impl.FullyShardedDataParallel``."""

    name = "reference.flat"
    traits = dataclasses.replace(FlatAdapter.traits, simulates=True)
    api: ClassVar[Any] = fsdp_impl

    as_on_a_device = staticmethod(reference_streams.as_on_a_device)

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
            Capability.HOST_RUNS_AHEAD,
            Capability.RECOVERY,
            Capability.ANY_COMBINATION,
        }


# Why the other capabilities are missing; those that are not listed have not been tried:
# - Those for which the interface of FullyShardedDataParallel has no option: as in torch_fsdp.py.
# - POST_ACCUMULATE_GRAD_HOOK: a rank that holds no element of a parameter gets no gradient for it, so the parameter's
#   hook does not run there.
# - META_LOAD: values of the first rank are sent when the model is sharded.
