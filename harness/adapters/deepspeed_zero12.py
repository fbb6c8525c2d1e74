"""Adapters for DeepSpeed's ZeRO stages 1 and 2, in which every rank holds whole parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from shardproof.harness.adapters.base import Piece, Traits, whole
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.deepspeed_engine import DeepSpeedEngineAdapter

_CAPABILITIES = frozenset(
    {
        Capability.UNUSED_OUTPUT,
        Capability.UNUSED_MODULE,
        Capability.CONTAINER_OUTPUT,
        Capability.DATACLASS_OUTPUT,
        Capability.NON_ROOT_FORWARD,
        Capability.MULTIPLE_FORWARD,
        Capability.RECOMPUTATION,
        Capability.COMPILED_MODULES,
        Capability.TIED_PARAMETERS,
        Capability.CLIPPING,
        Capability.ADAM,
        Capability.OWN_CHECKPOINT,
        Capability.DEFAULT_MESH,
    }
)


class _WholeParameters(DeepSpeedEngineAdapter):
    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return _CAPABILITIES

    def zero_options(self, model: nn.Module) -> dict[str, Any]:
        assert self.config.reshard_after_forward is None, "whole parameters are not resharded"
        assert self.config.accumulation is None
        # The default is half a billion elements, into which a case's model would fit whole.
        return {"reduce_bucket_size": max(parameter.numel() for parameter in model.parameters())}

    def parameters(self) -> dict[str, Piece]:
        return {name: whole(parameter.detach()) for name, parameter in self.named_parameters().items()}


class DeepSpeedZero1Adapter(_WholeParameters):
    """ZeRO stage 1: the ranks divide the optimizer's state, and the copy of the parameters that it updates."""

    name = "deepspeed.zero1"
    stage = 1
    traits = Traits(
        shards=frozenset({"optimizer"}),
        reads="gathering",
        held_from_start=frozenset({"master", "gradients", "optimizer"}),
        clips="step",
        divides_by_microbatches=True,
        unused_gradient="zero",
        process_groups="kept",
        frees_models=False,
        isolation="adapter",
    )


class DeepSpeedZero2Adapter(_WholeParameters):
    """ZeRO stage 2: as stage 1, and each rank keeps the reduced gradients of its part alone."""

    name = "deepspeed.zero2"
    stage = 2
    traits = dataclasses.replace(DeepSpeedZero1Adapter.traits, shards=frozenset({"gradients", "optimizer"}))


# Why the other capabilities are missing; those that are not listed have not been tried:
# - SHARDED, RESHARD_AFTER_FORWARD and what is about gathered parameters: every rank holds whole parameters.
# - POST_ACCUMULATE_GRAD_HOOK: the hooks run before the reduction, on this rank's own gradient.
# - CAST_AFTER_INIT: the constructor of the engine fixes the dtype of the shards that are updated.
# - CLIP_BY_CALL, CLIP_ANY_NORM, CLIP_RAISES, CLIP_EMPTY_SHARDS: the step clips, by the 2-norm only.
# - OWN_OPTIMIZER, LOSS_SCALING: the engine steps, overwrites parameters with what it has updated, and scales losses.
# - SINGLE_RANK: gradients are reduced even over a group of one rank.
# - DEFERRED_REDUCTION: stage 2 reduces in every backward, stage 1 after the last microbatch, and no option changes it.
# - RECOVERY: after an exception in backward, what was reduced before it stays.
