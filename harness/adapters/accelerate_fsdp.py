"""Adapters for accelerate's FSDP2 and FSDP1, which call torch's ``fully_shard`` and its wrapper by a plugin."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.adapters.base import Accumulation, Config, OptimizerFactory, Packaged, Precision
from shardproof.harness.adapters.capability import COMMON_AND_CLIPPING, Capability
from shardproof.harness.adapters.torch_fsdp import EngineFsdpAdapter
from shardproof.harness.adapters.torch_fully_shard import TorchFullyShardAdapter

_CAPABILITIES = COMMON_AND_CLIPPING | Capability.of(
    "sharded reshard-after-forward unused-output post-accumulate-grad-hook clip-empty-shards default_mesh "
    "dtensor-parameters own-optimizer deferred-reduction recomputation distributed-checkpoint full-state-dict "
    "autograd-calls recovery"
)


class AccelerateAdapter(Packaged):
    """The model, its optimizer, backward, clipping and ``no_sync`` go through an ``Accelerator``, over a base."""

    package, extra = "accelerate", "accelerate"
    _stepping: Any = None

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        reason = super().availability(device_type)
        if reason is None and device_type == "cpu":
            return "on a CPU accelerate does not shard, it makes plain DistributedDataParallel of FSDP; run it on GPUs"
        return reason

    @classmethod
    def prepare(cls, device_type: str) -> None:
        # Set by a launcher. LOCAL_RANK is also the index of the device that accelerate makes current.
        local_rank = dist.get_rank() if device_type == "cpu" else torch.accelerator.current_device_index()
        size = str(dist.get_world_size())
        os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(local_rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        # As every plugin of FSDP sets them for the rest of the process.
        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="False")
        _shard_a_first_model(dist.group.WORLD)

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        if not config.default_mesh and (config.mesh.ndim != 1 or config.mesh.size() != dist.get_world_size()):
            raise ValueError("accelerate makes its own mesh of all ranks")
        super().__init__(model, optimizer=optimizer, config=config)

    def _accelerate(self, **options: Any) -> None:
        """Make the Accelerator of this model, with a plugin of these options."""
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False, **options)
        self._accelerator: Any = Accelerator(fsdp_plugin=plugin)
        # The state belongs to the process, and has the plugin of the first model until it is replaced.
        self._accelerator.state.fsdp_plugin = plugin

    def backward(self, loss: torch.Tensor) -> None:
        self._accelerator.backward(loss)

    def clip(self) -> torch.Tensor:
        clip = self.config.clip
        assert clip is not None and not clip.error_if_nonfinite
        norm: torch.Tensor = self._accelerator.clip_grad_norm_(
            self.module.parameters(), clip.max_norm, norm_type=clip.norm_type
        )
        return norm

    def step(self) -> None:
        if self._stepping is not None:
            self._stepping.step()


class AccelerateFsdpAdapter(AccelerateAdapter, TorchFullyShardAdapter):
    """FSDP2. ``config.units`` chooses classes: every module of a class that some unit has becomes a unit."""

    name = "accelerate.fsdp"
    # An Accelerator's state belongs to the process. It needs devices, of which a simulated world has none.
    traits = dataclasses.replace(
        TorchFullyShardAdapter.traits, isolation="adapter", frees_models=False, simulates=False
    )
    option_names: ClassVar[dict[str, str]] = {
        "reshard_after_forward": "reshard_after_forward",
        "accumulation": "no_sync",
        "clip.max_norm": "max_norm",
        "clip.norm_type": "norm_type",
    }

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return _CAPABILITIES & super().capabilities()

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        assert config.precision == Precision() and not config.unit_precision, "not tried"
        assert config.offload is None and not config.ignored_params, "not tried"
        # prepare() wants a model and its optimizer together, and gives the optimizer the sharded parameters.
        self._factory = optimizer or functools.partial(torch.optim.SGD, lr=0.0)
        super().__init__(model, optimizer=None, config=config)
        self.optimizer = self._stepping.optimizer if optimizer else None

    def set_up(self, model: nn.Module) -> nn.Module:
        """Give the model and its optimizer to an Accelerator, which shards the one and changes the other."""
        reshards = self.config.reshard_after_forward
        assert reshards is None or isinstance(reshards, bool), "the plugin takes True or False"
        classes = {type(model.get_submodule(name)).__name__ for unit in self.config.units for name in unit}
        self._accelerate(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap" if classes else "no_wrap",
            transformer_cls_names_to_wrap=sorted(classes) or None,
            **({} if reshards is None else {"reshard_after_forward": reshards}),
        )
        assert self._accelerator.is_fsdp2, f"accelerate chose {self._accelerator.distributed_type}"
        model, self._stepping = self._accelerator.prepare(model, self._factory(model.parameters()))
        return model

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        assert self.config.accumulation in (None, Accumulation()), "no_sync has no options"
        defers = self.config.accumulation is not None and not is_last
        with self._accelerator.no_sync(self.module) if defers else contextlib.nullcontext():
            yield


class AccelerateFsdp1Adapter(AccelerateAdapter, EngineFsdpAdapter):
    """FSDP1, by a policy that chooses the units. As documented, the optimizer is made after the model is prepared."""

    name = "accelerate.fsdp1"
    traits = dataclasses.replace(EngineFsdpAdapter.traits, isolation="adapter", simulates=False)
    option_names: ClassVar[dict[str, str]] = {
        option: name for option, name in EngineFsdpAdapter.option_names.items() if option != "ignored_params"
    }

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        missing = {Capability.HYBRID, "as_groups", Capability.TENSOR_PARALLEL}
        missing |= {"ignored_params", "ignored_modules", Capability.ORDER_VALIDATION}
        return super().capabilities() - missing

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        self._stepping = self._accelerator.prepare(self.optimizer) if self.optimizer else None

    def _give(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        for one in ("device_mesh", "process_group"):
            options.pop(one, None)  # accelerate has neither, and all ranks are the default
        if options:
            options["mixed_precision_policy"] = options.pop("mixed_precision")
            # Torch's default. The plugin's own is to gather nothing ahead in backward.
            options.setdefault("backward_prefetch", self.api.BackwardPrefetch.BACKWARD_PRE)
        self._accelerate(fsdp_version=1, **options)
        return self._accelerator.prepare(model)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if is_last else self._accelerator.no_sync(self.module):
            yield

    def teardown(self) -> None:
        # The state belongs to the process and keeps the plugin, whose policy has the modules of this model.
        self._accelerator.state.fsdp_plugin.auto_wrap_policy = None
        super().teardown()


@functools.cache
def _shard_a_first_model(world: dist.ProcessGroup) -> None:
    """Shard a model by FSDP2 once in a process: what that imports changes environment variables for good."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False)
    model = nn.Linear(1, 1)
    Accelerator(fsdp_plugin=plugin).prepare(model, torch.optim.SGD(model.parameters()))
