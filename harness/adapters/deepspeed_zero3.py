"""Adapter for DeepSpeed's ZeRO stage 3, an engine that owns backward, clipping and the optimizer step."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.adapters.base import Adapter, Config, OptimizerFactory, Piece, Traits, original_name, whole
from shardproof.harness.adapters.capability import Capability

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


def share_of_elements(shape: torch.Size, size: int) -> int:
    """Return a rank's share, in elements, of a parameter that is flattened, padded and divided into equal parts."""
    return math.ceil(math.prod(shape) / size)


class DeepSpeedZero3Adapter(Adapter):
    """Drives ``deepspeed.initialize`` with ZeRO stage 3, in float32, with the case's optimizer.

    deepspeed is imported in the ranks only, because it patches other modules when it is imported and the pytest process
    needs only this class. ``config.units`` is ignored: DeepSpeed chooses which parameters it gathers together.
    """

    name = "deepspeed.zero3"
    traits = Traits(
        reads="gathering",
        # "gathered": while the engine is made, each parameter is gathered to find the place of its gradient in the
        # autograd graph.
        held_from_start=frozenset({"master", "gradients", "gathered"}),
        local_numel=share_of_elements,
        clips="step",
        divides_by_microbatches=True,
        unused_gradient="zero",
        process_groups="kept",
        # The engine and its model stay alive even after destroy().
        frees_models=False,
        isolation="adapter",
    )

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        if importlib.util.find_spec("deepspeed") is None:
            return "deepspeed is not installed; pip install 'shardproof[deepspeed]' brings it"
        return None

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return _CAPABILITIES

    @classmethod
    def version(cls) -> str:
        return metadata.version("deepspeed")

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
        assert config.mesh.size() == dist.get_world_size(), "an engine shards over all ranks"
        # An engine without an optimizer has no backward.
        factory = optimizer or functools.partial(torch.optim.SGD, lr=0.0)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=factory(model.parameters()), config=_configuration(config, model)
        )
        self._model = model
        self.module = self._engine
        # The engine replaces the case's optimizer with its own, which works on flat shards.
        self.optimizer = None

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

    def parameters(self) -> dict[str, Piece]:
        """Gather the full parameters (collective) and copy them."""
        import deepspeed

        named = self.named_parameters()
        with deepspeed.zero.GatheredParameters(list(named.values())):
            return {name: whole(parameter.detach().clone()) for name, parameter in named.items()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {original_name(name): value for name, value in self._model.named_parameters()}

    def teardown(self) -> None:
        from deepspeed.runtime.zero import parameter_offload

        self._engine.destroy()
        # DeepSpeed's hooks keep a global stack of running modules, at whose bottom every engine's model stays forever.
        stack = parameter_offload.FWD_MODULE_STACK
        stack[:] = [module for module in stack if module is not self._model]


def _configuration(config: Config, model: nn.Module) -> dict[str, Any]:
    assert config.cast is None, "the engine fixes the dtype of its shards"
    assert config.offload is None, "shards stay on the device"
    assert config.accumulation is None, "every backward reduces"
    assert config.clip is None or config.clip.norm_type == 2.0, "the engine clips by the 2-norm"
    size = config.reshard_after_forward
    assert size is None or isinstance(size, bool), f"the adapter does not reshard to groups of {size}"
    zero: dict[str, Any] = {
        "stage": 3,
        # The default keeps parameters of fewer than 100,000 elements gathered.
        "stage3_param_persistence_threshold": 0,
        # With the defaults, a case's model would be gathered and reduced all at once. Here each module fetches one
        # parameter ahead, and a bucket holds the largest gradient.
        "stage3_prefetch_bucket_size": 1,
        "reduce_bucket_size": max(parameter.numel() for parameter in model.parameters()),
        # Otherwise the buffer of a bucket would be half as large as some models.
        "contiguous_gradients": False,
    }
    if config.reshard_after_forward is True:
        # A parameter stays gathered if it is used again within this many elements; the default is a billion.
        zero["stage3_max_reuse_distance"] = 0
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": config.microbatches,
        # The default clips at 1.
        "gradient_clipping": config.clip.max_norm if config.clip else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
