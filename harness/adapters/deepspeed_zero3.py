"""Adapter for DeepSpeed's ZeRO stage 3, which divides parameters, gradients and the optimizer's state."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardproof.harness.adapters.base import Piece, Traits, whole
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.deepspeed_engine import DeepSpeedEngineAdapter
from shardproof.harness.adapters.freeing import free
from shardproof.harness.adapters.traits import padded_to_elements

_CAPABILITIES = frozenset(
    {
        Capability.SHARDED,
        Capability.RESHARD_AFTER_FORWARD,
        Capability.UNUSED_MODULE,
        Capability.CONTAINER_OUTPUT,
        Capability.DATACLASS_OUTPUT,
        Capability.MULTIPLE_FORWARD,
        Capability.RECOMPUTATION,
        Capability.TIED_PARAMETERS,
        Capability.CLIPPING,
        Capability.ADAM,
        Capability.OWN_CHECKPOINT,
    }
)
# Why the other capabilities are missing; those that are not listed have not been tried:
# - RESHARD_TO_SIZE, RESHARD_TO_SIZE_UNEVEN: the closest option, zero_hpz_partition_size, adds a second set of shards,
#   held from the start. Its groups outlive the engine: every later engine of the process reshards to them, whatever its
#   own configuration is.
# - ROOT_RESHARD: the end of forward fetches ahead the parameters that backward needs first, so they stay gathered.
# - GROUPED_UNIT, COUNTED_UNITS, GATHER_ORDER: parameters are gathered module by module and reduced bucket by bucket, in
#   the order that the first step recorded.
# - UNUSED_OUTPUT, NON_ROOT_FORWARD: wrong in 0.19.8 (F-4 of docs/findings.md). A step that does not use a parameter
#   still updates it, with the gradient left by an earlier step.
# - POST_ACCUMULATE_GRAD_HOOK: the hooks run before the reduction, on this rank's own gradient.
# - CAST_AFTER_INIT: the constructor of the engine fixes the dtype; a later cast reaches only placeholders.
# - REGISTERED_STATE, MANUAL_RESHARD: between uses a parameter is an empty placeholder, and no call frees the parameters
#   of a module.
# - CLIP_BY_CALL, CLIP_ANY_NORM, CLIP_EMPTY_SHARDS: the step clips, by the 2-norm only.
# - SINGLE_RANK: gradients and the norm are reduced even over a group of one rank.
# - DEFERRED_REDUCTION: every backward reduces.


class DeepSpeedZero3Adapter(DeepSpeedEngineAdapter):
    """ZeRO stage 3."""

    name = "deepspeed.zero3"
    stage = 3
    traits = Traits(
        reads="gathering",
        # "gathered": while the engine is made, each parameter is gathered to find the place of its gradient in the
        # autograd graph.
        held_from_start=frozenset({"master", "gradients", "gathered"}),
        local_numel=padded_to_elements,
        clips="step",
        divides_by_microbatches=True,
        unused_gradient="zero",
        process_groups="kept",
        # The engine and its model stay alive even after destroy().
        frees_models=False,
        isolation="adapter",
    )

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return _CAPABILITIES

    def zero_options(self, model: nn.Module) -> dict[str, Any]:
        size = self.config.reshard_after_forward
        assert size is None or isinstance(size, bool), f"the adapter does not reshard to groups of {size}"
        assert self.config.accumulation is None, "every backward reduces"
        options: dict[str, Any] = {
            # The default keeps parameters of fewer than 100,000 elements gathered.
            "stage3_param_persistence_threshold": 0,
            # With the defaults, a case's model would be gathered and reduced all at once. Here each module fetches one
            # parameter ahead, and a bucket holds the largest gradient.
            "stage3_prefetch_bucket_size": 1,
            "reduce_bucket_size": max(parameter.numel() for parameter in model.parameters()),
            # Otherwise the buffer of a bucket would be half as large as some models.
            "contiguous_gradients": False,
        }
        if size is True:
            # A parameter stays gathered if it is used again within this many elements; the default is a billion.
            options["stage3_max_reuse_distance"] = 0
        return options

    def parameters(self) -> dict[str, Piece]:
        """Gather the full parameters (collective) and copy them."""
        import deepspeed

        named = self.named_parameters()
        with deepspeed.zero.GatheredParameters(list(named.values())):
            return {name: whole(parameter.detach().clone()) for name, parameter in named.items()}

    def teardown(self) -> None:
        from deepspeed.runtime.zero import parameter_offload

        super().teardown()
        # DeepSpeed's hooks keep a global stack of running modules, at whose bottom every engine's model stays forever.
        stack = parameter_offload.FWD_MODULE_STACK
        stack[:] = [module for module in stack if module is not self._model]
        # The engine stays alive even so, and all shards with it: they would fill the device, a model a case.
        zero = self._engine.optimizer
        free([vars(zero), zero.optimizer.state])
