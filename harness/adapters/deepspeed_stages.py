"""Adapters for DeepSpeed's ZeRO stages, one class each."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, ClassVar

import torch
from torch import nn

from shardproof.harness.adapters.base import Traits
from shardproof.harness.adapters.capability import COMMON, Capability
from shardproof.harness.adapters.deepspeed import TAG, DeepSpeedEngineAdapter
from shardproof.harness.adapters.traits import padded_to_elements
from shardproof.harness.tensors.memory import free
from shardproof.harness.tensors.pieces import Piece, original_name, whole

_ENGINE = COMMON | {
    Capability.RECOMPUTATION,
    Capability.CLIPPING,
    Capability.OWN_CHECKPOINT,
    Capability.MODEL_PRECISION,
    "accumulation.set_is_last_backward",
}


_TRAITS = Traits(
    reads="gathering",
    clips="step",
    divides_by_microbatches=True,
    unused_gradient="zero",
    process_groups="kept",
    # The engine and its model stay alive even after destroy().
    frees_models=False,
    isolation="adapter",
)


class _FullParameters(DeepSpeedEngineAdapter):
    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return _ENGINE | {
            Capability.UNUSED_OUTPUT,
            Capability.NON_ROOT_FORWARD,
            Capability.COMPILED_MODULES,
            "default_mesh",
        }

    def zero_options(self, model: nn.Module) -> dict[str, Any]:
        assert self.config.reshard_after_forward is None, "whole parameters are not resharded"
        # The default is half a billion elements, into which a case's model would fit whole.
        return {"reduce_bucket_size": max(parameter.numel() for parameter in model.parameters())}

    def computed_with(self) -> dict[str, Piece]:
        return {name: whole(parameter.detach()) for name, parameter in self.named_parameters().items()}


class DeepSpeedZero1Adapter(_FullParameters):
    """ZeRO stage 1: the ranks divide the optimizer's state, and the copy of the parameters that it updates."""

    name = "deepspeed.zero1"
    stage = 1
    traits = dataclasses.replace(
        _TRAITS, shards=frozenset({"optimizer"}), held_from_start=frozenset({"master", "gradients", "optimizer"})
    )

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return super().capabilities() | {Capability.DEFERRED_REDUCTION, Capability.ACCUMULATION_DTYPES}


class DeepSpeedZero0Adapter(_FullParameters):
    """No ZeRO: data parallelism by the engine, which shards nothing."""

    name = "deepspeed.zero0"
    stage = 0
    traits = dataclasses.replace(
        DeepSpeedZero1Adapter.traits,
        shards=frozenset(),
        held_from_start=frozenset(),
        unused_gradient="zero-unless-frozen",
    )

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return super().capabilities() | {Capability.DEFERRED_REDUCTION}

    def float32_copies(self) -> dict[nn.Parameter, torch.Tensor]:
        low = zip(self._engine.optimizer.fp16_groups, self._engine.optimizer.fp32_groups, strict=True)
        return {one: copy for ones, copies in low for one, copy in zip(ones, copies, strict=True)}

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Drop the gradients, also those that no step has used."""
        self._engine.zero_grad()

    def consolidated(self, directory: pathlib.Path) -> dict[str, torch.Tensor]:
        """Read the weights that the engine has saved whole: ``zero_to_fp32.py`` is for stages 1 to 3."""
        states = torch.load(directory / TAG / "mp_rank_00_model_states.pt", weights_only=False)
        return {original_name(name): value for name, value in states["module"].items()}


class DeepSpeedZero2Adapter(_FullParameters):
    """ZeRO stage 2: as stage 1, and each rank keeps the reduced gradients of its part alone."""

    name = "deepspeed.zero2"
    stage = 2
    option_names: ClassVar[dict[str, str]] = DeepSpeedEngineAdapter.option_names | {"accumulation": "no_sync"}
    traits = dataclasses.replace(DeepSpeedZero1Adapter.traits, shards=frozenset({"gradients", "optimizer"}))

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return super().capabilities() | {Capability.ACCUMULATION_DTYPES}


class DeepSpeedZero1OverlapAdapter(DeepSpeedZero1Adapter):
    """Stage 1 with reductions that overlap with backward."""

    name = "deepspeed.zero1_overlap"
    overlaps = True


class DeepSpeedZero2OverlapAdapter(DeepSpeedZero2Adapter):
    """Stage 2 with reductions that overlap with backward."""

    name = "deepspeed.zero2_overlap"
    overlaps = True


class DeepSpeedZero3Adapter(DeepSpeedEngineAdapter):
    """ZeRO stage 3."""

    name = "deepspeed.zero3"
    stage = 3
    option_names: ClassVar[dict[str, str]] = DeepSpeedZero2Adapter.option_names | {
        "reshard_after_forward": "stage3_max_reuse_distance"
    }
    traits = dataclasses.replace(
        _TRAITS,
        # "gathered": while the engine is made, each parameter is gathered to find the place of its gradient in the
        # autograd graph.
        held_from_start=frozenset({"master", "gradients", "gathered"}),
        local_numel=padded_to_elements,
    )

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return _ENGINE | {Capability.SHARDED, Capability.RESHARD_AFTER_FORWARD, Capability.ACCUMULATION_DTYPES}

    def zero_options(self, model: nn.Module) -> dict[str, Any]:
        size = self.config.reshard_after_forward
        assert size is None or isinstance(size, bool), f"the adapter does not reshard to groups of {size}"
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

    def computed_with(self) -> dict[str, Piece]:
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
        # The engine stays alive even so, and all shards with it: they would fill the device, a model a case. On a CPU
        # gloo may be writing to them still, after an exception or an evaluation that has gathered ahead.
        zero = self._engine.optimizer
        if self._engine.device.type != "cpu":
            free([vars(zero), zero.optimizer.state])


class DeepSpeedZero3SerialAdapter(DeepSpeedZero3Adapter):
    """Stage 3 with reductions that do not overlap with backward."""

    name = "deepspeed.zero3_serial"
    overlaps = False
