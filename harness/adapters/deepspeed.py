"""Adapters for DeepSpeed's ZeRO stages, which share an engine that owns backward, clipping and the optimizer step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.adapters.base import Config, OptimizerFactory, Packaged, Traits
from shardproof.harness.adapters.capability import COMMON, Capability
from shardproof.harness.adapters.traits import padded_to_elements
from shardproof.harness.tensors.memory import free
from shardproof.harness.tensors.pieces import Piece, original_name, whole

#: By which the engine calls a checkpoint in its directory.
_TAG = "saved"


class DeepSpeedEngineAdapter(Packaged):
    """Drives ``deepspeed.initialize`` with one ZeRO stage, in float32, with the case's optimizer.

    deepspeed is imported in the ranks only, because it patches other modules when it is imported and the pytest process
    needs only this class. ``config.units`` is ignored: DeepSpeed chooses which parameters it communicates together.
    """

    package, brings = "deepspeed", "'shardproof[deepspeed]'"
    stage: ClassVar[int]

    @classmethod
    def prepare(cls, device_type: str) -> None:
        os.environ["DS_ACCELERATOR"] = device_type
        # Normally set by a launcher. On a device it is also the index that the engine makes current.
        local_rank = dist.get_rank() if device_type == "cpu" else torch.accelerator.current_device_index()
        os.environ["LOCAL_RANK"] = str(local_rank)
        import deepspeed

        if device_type == "cpu":
            # A shared-memory collective that would be compiled at first use; gloo gives the same results.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        import deepspeed

        super().__init__(model, optimizer=optimizer, config=config)
        if config.mesh.ndim != 1 or config.mesh.size() != dist.get_world_size():
            raise ValueError("an engine takes no mesh: it shards over all ranks")
        # An engine without an optimizer has no backward.
        factory = optimizer or functools.partial(torch.optim.SGD, lr=0.0)
        theirs = factory(model.parameters())
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=theirs, config=self._configuration(model))
        self._model = model
        self.module = self._engine
        # The engine has given it flat shards in place of the model's parameters, and steps it.
        self.optimizer = theirs if optimizer else None

    def zero_options(self, model: nn.Module) -> dict[str, Any]:
        """Return the options of the stage, beside ``stage``, of the engine's configuration."""
        return {}

    def _configuration(self, model: nn.Module) -> dict[str, Any]:
        config = self.config
        assert config.cast is None, "the engine fixes the dtype of its shards"
        assert config.offload is None, "shards stay on the device"
        assert config.clip is None or config.clip.norm_type == 2.0, "the engine clips by the 2-norm"
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": config.microbatches,
            # The default clips at 1.
            "gradient_clipping": config.clip.max_norm if config.clip else 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": self.stage} | self.zero_options(model),
        }

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        yield
        if not is_last:
            # The engine counts microbatches by these calls; only the call after the last one updates parameters.
            self._engine.step()

    def submodule(self, name: str) -> nn.Module:
        return self._model.get_submodule(name) if name else self.module

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> None:
        self._engine.step()

    def norm_after_step(self) -> torch.Tensor:
        return torch.as_tensor(self._engine.get_global_grad_norm(), dtype=torch.float32, device=self._engine.device)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Do nothing: the step has already cleared the gradients."""

    def gradients(self) -> dict[str, Piece | None]:
        """Gather the full gradients (collective)."""
        from deepspeed.utils import safe_get_full_grad

        full = {name: safe_get_full_grad(parameter) for name, parameter in self.named_parameters().items()}
        return {name: None if gradient is None else whole(gradient) for name, gradient in full.items()}

    def optimizer_state(self) -> None:
        """Return nothing: the state is that of flat shards."""
        return None

    def save_own(self, directory: pathlib.Path) -> None:
        self._engine.save_checkpoint(str(directory), tag=_TAG)

    def load_own(self, directory: pathlib.Path) -> None:
        path, _ = self._engine.load_checkpoint(str(directory), tag=_TAG)
        assert path is not None, f"the engine has found no checkpoint in {directory}"

    def consolidated(self, directory: pathlib.Path) -> dict[str, torch.Tensor]:
        """Read the weights as the script ``zero_to_fp32.py`` does that the engine has written beside them."""
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        found: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(directory), tag=_TAG)
        return {original_name(name): value for name, value in found.items()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {original_name(name): value for name, value in self._model.named_parameters()}

    def teardown(self) -> None:
        self._engine.destroy()


class _WholeParameters(DeepSpeedEngineAdapter):
    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return COMMON | {
            Capability.UNUSED_OUTPUT,
            Capability.NON_ROOT_FORWARD,
            Capability.RECOMPUTATION,
            Capability.COMPILED_MODULES,
            Capability.CLIPPING,
            Capability.OWN_CHECKPOINT,
            Capability.DEFAULT_MESH,
        }

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
        return COMMON | {
            Capability.SHARDED,
            Capability.RESHARD_AFTER_FORWARD,
            Capability.RECOMPUTATION,
            Capability.CLIPPING,
            Capability.OWN_CHECKPOINT,
        }

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
