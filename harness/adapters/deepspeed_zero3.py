"""Adapter of DeepSpeed's ZeRO stage 3: an engine that owns backward, clipping and the step."""

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
        Capability.ADAM,
    }
)
# And why not the others, as far as they were tried:
# - RESHARD_TO_SIZE, RESHARD_TO_SIZE_UNEVEN: zero_hpz_partition_size adds a second set of shards, held from the start,
#   and its groups outlive the engine: every later one of the process reshards to them, whatever its configuration says.
# - ROOT_RESHARD: what backward needs first is fetched ahead, and so kept, at the end of forward.
# - GROUPED_UNIT, COUNTED_UNITS, GATHER_ORDER: parameters are gathered module by module and reduced by the bucket, in
#   the order that the first step recorded.
# - UNUSED_OUTPUT, NON_ROOT_FORWARD: wrong in 0.19.8, as docs/findings.md shows: a step that does not use a parameter
#   updates it all the same, with the gradient that an earlier step left.
# - POST_ACCUMULATE_GRAD_HOOK: such hooks run before the reduction, on this rank's own gradient.
# - CAST_AFTER_INIT: the dtype is fixed when the engine is made; a cast reaches placeholders only.
# - REGISTERED_STATE, MANUAL_RESHARD: between uses a parameter is an empty placeholder, and nothing frees a module by a
#   call.
# - CLIP_BY_CALL, CLIP_ANY_NORM, CLIP_EMPTY_SHARDS: the step clips, by the 2-norm only.
# - SINGLE_RANK: gradients and the norm are reduced among one rank as well.
# - DEFERRED_REDUCTION: every backward reduces.


def share_of_elements(shape: torch.Size, size: int) -> int:
    """A rank's share, in elements, of a parameter that is flattened, padded and cut into equal parts."""
    return math.ceil(math.prod(shape) / size)


class DeepSpeedZero3Adapter(Adapter):
    """Drives ``deepspeed.initialize`` with ZeRO stage 3 in float32 and a client's optimizer.

    deepspeed is imported in ranks only: it patches what it imports, and the controller needs no
    more than this class. ``config.units`` is not passed on, because DeepSpeed itself chooses what
    to gather together.
    """

    name = "deepspeed.zero3"
    traits = Traits(
        shards=frozenset({"parameters", "gradients", "optimizer"}),
        # Each parameter is gathered while the engine is made, for the place of its gradient in the autograd graph.
        held_from_start=frozenset({"master", "gradients", "gathered"}),
        local_numel=share_of_elements,
        clips="step",
        divides_by_microbatches=True,
        unused_gradient="zero",
        process_groups="kept",
        # The engine and the model in it stay, also after destroy().
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
        # Normally from a launcher; on a device it is also the index that the engine makes current.
        local_rank = dist.get_rank() if device_type == "cpu" else torch.accelerator.current_device_index()
        os.environ["LOCAL_RANK"] = str(local_rank)
        import deepspeed

        if device_type == "cpu":
            # A collective through shared memory, which would be compiled at first use. gloo gives the same results.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        import deepspeed

        super().__init__(model, optimizer=optimizer, config=config)
        assert config.mesh.size() == dist.get_world_size(), "an engine shards over all ranks"
        # Without an optimizer an engine has no backward.
        factory = optimizer or functools.partial(torch.optim.SGD, lr=0.0)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=factory(model.parameters()), config=_configuration(config, model)
        )
        self._model = model
        self.module = self._engine
        # The engine's own replaces it, on flat shards.
        self.optimizer = None

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        yield
        if not is_last:
            # Counts the microbatch; only the last one's call updates anything.
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
        """Nothing is left to do: the step forgets the gradients."""

    def gradients(self) -> dict[str, Piece | None]:
        from deepspeed.utils import safe_get_full_grad

        full = {name: safe_get_full_grad(parameter) for name, parameter in self.named_parameters().items()}
        return {name: None if gradient is None else whole(gradient) for name, gradient in full.items()}

    def parameters(self) -> dict[str, Piece]:
        import deepspeed

        named = self.named_parameters()
        with deepspeed.zero.GatheredParameters(list(named.values())):
            return {name: whole(parameter.detach().clone()) for name, parameter in named.items()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {original_name(name): value for name, value in self._model.named_parameters()}

    def teardown(self) -> None:
        from deepspeed.runtime.zero import parameter_offload

        self._engine.destroy()
        # Its hooks keep a stack of running modules, where every engine's model stays at the bottom for good.
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
        # By default parameters of fewer than 100,000 elements are kept whole.
        "stage3_param_persistence_threshold": 0,
        # By default a case's model would be gathered and reduced all at once: here one parameter is fetched
        # ahead at each module, and a bucket holds the largest gradient.
        "stage3_prefetch_bucket_size": 1,
        "reduce_bucket_size": max(parameter.numel() for parameter in model.parameters()),
        # A bucket's buffer would be half as large as some models are.
        "contiguous_gradients": False,
    }
    if config.reshard_after_forward is True:
        # Elements within which a parameter that is used again stays gathered; by default a billion.
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
