"""What the adapters of DeepSpeed's ZeRO stages share: an engine that owns backward, clipping and the optimizer step."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pathlib
from collections.abc import Iterator
from importlib import metadata
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.adapters.base import Adapter, Config, OptimizerFactory, Piece, original_name, whole

#: By which the engine calls a checkpoint in its directory.
_TAG = "saved"


class DeepSpeedEngineAdapter(Adapter):
    """Drives ``deepspeed.initialize`` with one ZeRO stage, in float32, with the case's optimizer.

    deepspeed is imported in the ranks only, because it patches other modules when it is imported and the pytest process
    needs only this class. ``config.units`` is ignored: DeepSpeed chooses which parameters it communicates together.

    Attributes:
        stage: the ZeRO stage.
    """

    stage: ClassVar[int]

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        if importlib.util.find_spec("deepspeed") is None:
            return "deepspeed is not installed; pip install 'shardproof[deepspeed]' brings it"
        return None

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
