"""Adapter for torch's ``FullyShardedDataParallel``, a module wrapper with one flat parameter per unit."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch.distributed.fsdp

from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.flat import FlatAdapter


class TorchFsdpAdapter(FlatAdapter):
    """``torch.distributed.fsdp.FullyShardedDataParallel``."""

    name = "torch.fsdp"
    api: ClassVar[Any] = torch.distributed.fsdp
    # Models outlive their last reference: findings/F019.py.
    traits = dataclasses.replace(FlatAdapter.traits, frees_models=False, simulates=True)

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        # What it puts on the CPU where it is already, it frees: findings/F041.py.
        return super().capabilities() - {Capability.WHOLE_ON_CPU, Capability.FULL_PRECISION_EVALUATION}

    def _key_kinds(self) -> Any:
        from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType

        return OptimStateKeyType


# Why the other capabilities are missing; those that are not listed have not been tried:
# - RESHARD_TO_SIZE, RESHARD_TO_SIZE_UNEVEN: a strategy either keeps parameters gathered after forward or frees them.
# - ROOT_RESHARD: the root's unit is never freed after forward, because backward is expected to need it first.
# - GROUPED_UNIT: a wrapper takes one module.
# - POST_ACCUMULATE_GRAD_HOOK: gradients accumulate in the flat parameter. The original parameters are views of it, and
#   their hooks never run.
# - NON_ROOT_FORWARD: only the root's backward ends with the callback that puts gradients in place and resets the units
#   to idle. After any other backward, the next collective call raises "Cannot manually unshard parameters during
#   forward/backward".
# - REGISTERED_STATE: after forward the root's parameters show shards although its unit is still gathered.
# - MANUAL_RESHARD: there is a context manager that gathers, but no call that frees.
# - GATHER_ORDER: the root's gradients are reduced last, no matter when in backward they are ready.
# - SINGLE_RANK: the strategy becomes NO_SHARD, which all-reduces each unit's gradients over the group of one rank. See
#   also F-14 and F-16 of findings/.
# - DEFERRED_PER_UNIT: no_sync is called on the root and applies to all units.
# - ANY_COMBINATION: a search would stop at known failures: F-22, F-25, F-29, F-34 and F-36.
# - PAGEABLE_OFFLOAD: findings/F010.py.
# - FULL_PRECISION_EVALUATION: the second evaluation of PRECISION-11 has other values; not yet reduced to a reproducer.
# - TENSOR_PARALLEL_CHECKPOINT: findings/F017.py.
# - UNIT_SETTINGS, OWN_REDUCE_GROUP: what a wrapper does is fixed by its constructor.
# - RECOVERY: findings/F071.py.
# - SHARD_DIMENSION, GATHER_EXTENSION, UNIT_MESHES: a unit is one flat parameter on one mesh, which is cut as it lies.
# - WHOLE_ON_CPU: findings/F041.py.
# - META_LOAD: values of the first rank are sent when the model is sharded.
