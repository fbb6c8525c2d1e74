"""The base class of DeepSpeed's stages: an engine that owns backward, clipping and the optimizer step."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.adapters.base import Accumulation, Config, OptimizerFactory, Packaged, Precision
from shardproof.harness.tensors.pieces import Piece, original_name, whole

#: By which the engine calls a checkpoint in its directory.
TAG = "saved"


class DeepSpeedEngineAdapter(Packaged):
    """Drives ``deepspeed.initialize`` with one ZeRO stage and the case's optimizer, in one dtype.

    deepspeed is imported in the ranks only, because it patches other modules when it is imported and the pytest process
    needs only this class. ``config.units`` is ignored: DeepSpeed chooses which parameters it communicates together.
    """

    package, extra = "deepspeed", "deepspeed"
    # Not ``no_sync`` of stages 0 and 1, which reduce after the last microbatch without it too.
    option_names: ClassVar[dict[str, str]] = {
        "precision.param_dtype": "bf16",
        "precision.reduce_dtype": "communication_data_type",
        "clip.max_norm": "gradient_clipping",
    }
    stage: ClassVar[int]
    #: Whether reductions overlap with backward; None is DeepSpeed's default, which stage 3 alone does.
    overlaps: ClassVar[bool | None] = None

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
            "zero_optimization": {"stage": self.stage, "overlap_comm": self.overlaps} | self.zero_options(model),
        } | _dtypes(config.precision)

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Surround a microbatch with ``no_sync``, mark the last one, or step the engine after each, which counts."""
        how = self.config.accumulation
        assert how in (None, Accumulation(), Accumulation(set_is_last_backward=True)), "an engine defers all or nothing"
        if how is not None:
            self._engine.set_gradient_accumulation_boundary(is_last)
        defers = how == Accumulation() and not is_last
        with self._engine.no_sync() if defers else contextlib.nullcontext():
            yield
        if how is None and not is_last:
            # Only the call after the last microbatch updates parameters.
            self._engine.step()

    def submodule(self, name: str) -> nn.Module:
        return self._model.get_submodule(name) if name else self.module

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> None:
        self._engine.step()

    def norm_after_step(self) -> torch.Tensor | None:
        norm = self._engine.get_global_grad_norm()
        # Without ZeRO and in float32 the engine does not keep it.
        return None if norm is None else torch.as_tensor(norm, dtype=torch.float32, device=self._engine.device)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Do nothing: the step has already cleared the gradients."""

    def gradients(self) -> dict[str, Piece | None]:
        """Gather the full gradients (collective)."""
        from deepspeed.utils import safe_get_full_grad

        full = {name: safe_get_full_grad(parameter) for name, parameter in self.named_parameters().items()}
        # The optimizer gets them in float32.
        return {name: None if gradient is None else whole(gradient.float()) for name, gradient in full.items()}

    def parameters(self) -> dict[str, Piece]:
        """Gather what the optimizer updates (collective): in low precision, float32 copies of trained parameters."""
        if self.config.precision.param_dtype is None:
            return self.computed_with()
        from deepspeed.utils import safe_get_full_fp32_param

        copies = self.float32_copies()
        found = {
            name: copies[value] if value in copies else safe_get_full_fp32_param(value)
            for name, value in self.named_parameters().items()
        }
        return {name: whole(value.detach().clone()) for name, value in found.items()}

    def float32_copies(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the float32 copies of parameters that DeepSpeed has no function for."""
        return {}

    @abstractmethod
    def computed_with(self) -> dict[str, Piece]:
        """Gather the full parameters, as the modules compute with them (collective), and copy them."""

    def optimizer_state(self) -> None:
        """Return nothing: the state is that of flat shards."""
        return None

    def save_own(self, directory: pathlib.Path) -> None:
        self._engine.save_checkpoint(str(directory), tag=TAG)

    def load_own(self, directory: pathlib.Path) -> None:
        path, _ = self._engine.load_checkpoint(str(directory), tag=TAG)
        assert path is not None, f"the engine has found no checkpoint in {directory}"

    def consolidated(self, directory: pathlib.Path) -> dict[str, torch.Tensor]:
        """Read the weights as the script ``zero_to_fp32.py`` does that the engine has written beside them."""
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        found: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(directory), tag=TAG)
        return {original_name(name): value for name, value in found.items()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {original_name(name): value for name, value in self._model.named_parameters()}

    def teardown(self) -> None:
        self._engine.destroy()


def _dtypes(precision: Precision) -> dict[str, Any]:
    """Return the options of an engine's configuration for one dtype of the whole model."""
    if precision == Precision():
        return {}
    # DeepSpeed has ``auto_cast`` for float16 alone.
    expected = Precision(
        param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False
    )
    assert precision == expected, "user code casts inputs, and nothing else has a dtype of its own"
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    options: dict[str, Any] = (
        {"data_types": {"grad_accum_dtype": "fp32"}} if precision.reduce_dtype == torch.float32 else {}
    )
    if precision.param_dtype is not None:
        scale = {"loss_scale": 1024} if precision.param_dtype == torch.float16 else {}
        options[names[precision.param_dtype]] = {"enabled": True} | scale
    return options | ({"communication_data_type": names[precision.reduce_dtype]} if precision.reduce_dtype else {})
