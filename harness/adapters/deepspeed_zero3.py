"""Adapter of DeepSpeed's ZeRO stage 3: an engine that owns backward, clipping and the step."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
from torch import nn

from harness.adapters.base import Adapter, Config, OptimizerFactory, Piece, Traits, whole
from harness.adapters.capability import Capability


class DeepSpeedZero3Adapter(Adapter):
    """Drives ``deepspeed.initialize`` with ZeRO stage 3 in float32 and a client's optimizer.

    deepspeed is imported in ranks only: it patches what it imports, and the controller needs no
    more than this class. ``config.units`` is not passed on; DeepSpeed gathers module by module
    and learns from the first step what to gather ahead.
    """

    name = "deepspeed.zero3"
    traits = Traits(
        shards=frozenset({"parameters", "gradients", "optimizer"}),
        held_from_start=frozenset({"master", "gradients"}),
        clips="step",
        divides_by_microbatches=True,
        unused_gradient="zero",
        process_groups="kept",
        isolation="adapter",
    )

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        if importlib.util.find_spec("deepspeed") is None:
            return "deepspeed is not installed: pip install 'shardproof[deepspeed]'"
        return None

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return frozenset(Capability)

    @classmethod
    def version(cls) -> str:
        return metadata.version("deepspeed")

    @classmethod
    def prepare(cls, device_type: str) -> None:
        if device_type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.setdefault("LOCAL_RANK", str(torch.distributed.get_rank()))
        import deepspeed

        if device_type == "cpu":
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        import deepspeed

        factory = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        self.module, *_ = deepspeed.initialize(
            model=model, optimizer=factory(model.parameters()), config=_configuration(config, model)
        )
        self.optimizer = None

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        yield
        if not is_last:
            # The engine counts microbatches by its steps, and updates only in the last.
            self.module.step()

    def submodule(self, name: str) -> nn.Module:
        return self.module.module.get_submodule(name) if name else self.module

    def backward(self, loss: torch.Tensor) -> None:
        self.module.backward(loss)

    def step(self) -> None:
        self.module.step()

    def norm_after_step(self) -> torch.Tensor | None:
        return torch.as_tensor(self.module.get_global_grad_norm(), dtype=torch.float32, device=self.module.device)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """The step has forgotten the gradients."""

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
        return dict(self.module.module.named_parameters())

    def teardown(self) -> None:
        self.module.destroy()


def _configuration(config: Config, model: nn.Module) -> dict[str, Any]:
    largest = max(parameter.numel() for parameter in model.parameters())
    zero: dict[str, Any] = {
        "stage": 3,
        # By default parameters of less than 100,000 elements are kept whole.
        "stage3_param_persistence_threshold": 0,
        # The default buckets would gather, and reduce, all of a case's model at once.
        "stage3_prefetch_bucket_size": largest,
        "reduce_bucket_size": largest,
    }
    if config.reshard_after_forward:
        # What is used again within that many elements stays gathered; the default is a billion.
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
