"""Adapters for Lightning Fabric's strategies: torch's ``fully_shard``, and ``FullyShardedDataParallel``."""

import contextlib
import dataclasses
import functools
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.adapters.base import Accumulation, Config, OptimizerFactory, Packaged
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.torch_fsdp import EngineFsdpAdapter
from shardproof.harness.adapters.torch_fully_shard import TorchFullyShardAdapter


class FabricAdapter(Packaged):
    """The model, its optimizer, backward, clipping and accumulation go through ``Fabric``, over a base that shards."""

    package, extra = "lightning-fabric", "lightning"
    _fabric: Any
    _wrapped: Any

    @classmethod
    def prepare(cls, device_type: str) -> None:
        # By this Fabric sees that the processes exist already, as with a launcher. It is an index into its devices.
        os.environ["LOCAL_RANK"] = str(dist.get_rank())
        cls._launch(device_type)

    @classmethod
    @abstractmethod
    def _launch(cls, device_type: str) -> Any:
        """Launch the process's first Fabric, if it has none, which changes the process."""

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        self._stepping = self._fabric.setup_optimizers(self.optimizer) if self.optimizer else None

    def submodule(self, name: str) -> nn.Module:
        return cast(nn.Module, self.module.get_submodule(name) if name else self._wrapped)

    def backward(self, loss: torch.Tensor) -> None:
        self._fabric.backward(loss)

    def clip(self) -> torch.Tensor:
        clip = self.config.clip
        if self._stepping is None or clip is None:
            return super().clip()
        norm: torch.Tensor = self._fabric.clip_gradients(
            self._wrapped,
            self._stepping,
            max_norm=clip.max_norm,
            norm_type=clip.norm_type,
            error_if_nonfinite=clip.error_if_nonfinite,
        )
        return norm

    def step(self) -> None:
        if self._stepping is not None:
            self._stepping.step()


class LightningFabricAdapter(FabricAdapter, TorchFullyShardAdapter):
    """``ModelParallelStrategy``, of which a process has one: its ``parallelize_fn`` calls ``fully_shard``.

    What Fabric has no call for, such as prefetching, user code calls on the modules that ``fully_shard`` has sharded.
    """

    name = "lightning.fabric"
    traits = dataclasses.replace(TorchFullyShardAdapter.traits, isolation="adapter")

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        # META_LOAD: what is on the meta device after sharding, Fabric makes real at once.
        # DP_MESH_DIMS, REPLICATED_MODULES and STATE_HELPERS have not been tried.
        missing = Capability.of("meta-load dp_mesh_dims replicated spmd-types state-helpers")
        return super().capabilities() - missing

    @classmethod
    def _launch(cls, device_type: str) -> Any:
        return _fabric(device_type)

    def set_up(self, model: nn.Module) -> nn.Module:
        """Give the model to Fabric, which calls the strategy's ``parallelize_fn`` and wraps what it returns."""
        self._fabric, functions = _fabric(self.config.mesh.device_type)
        functions.append(self._parallelize_fn)
        try:
            self._wrapped = self._fabric.setup_module(model)
        finally:
            functions.pop()
        return cast(nn.Module, self._wrapped.module)

    def _parallelize_fn(self, model: nn.Module) -> nn.Module:
        model = self.parallelize(model)
        if self.config.param_init_fn is not None or self.config.offload:
            # Fabric would call reset_parameters, on its device.
            self._materialize(model)
        return model

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Surround a microbatch with ``no_backward_sync``; what that does not offer, torch's setters do."""
        if self.config.accumulation == Accumulation():
            with self._fabric.no_backward_sync(self._wrapped, enabled=not is_last):
                yield
        else:
            with super().microbatch(is_last=is_last):
                yield

    def register_forward_method(self, submodule: str, method: str) -> None:
        super().register_forward_method(submodule, method)
        if not submodule:
            self._wrapped.mark_forward_method(method)


class LightningFabricFsdp1Adapter(FabricAdapter, EngineFsdpAdapter):
    """``FSDPStrategy``, which has the policy and the options of one model: each has a Fabric of its own."""

    name = "lightning.fabric_fsdp1"
    traits = dataclasses.replace(EngineFsdpAdapter.traits, isolation="adapter", simulates=False)
    option_names: ClassVar[dict[str, str]] = EngineFsdpAdapter.option_names | {
        "clip.error_if_nonfinite": "error_if_nonfinite"
    }

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        if device_type == "cpu":
            return "FSDPStrategy of Lightning Fabric is refused on a CPU: run it on GPUs"
        return super().availability(device_type)

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        # Fabric converts the model, inputs and outputs to the dtype of its own precision.
        missing = {"precision.param_dtype", "precision.reduce_dtype", "precision.buffer_dtype"}
        missing |= {Capability.MODEL_PRECISION, "precision.keep_low_precision_grads", Capability.CAST_AFTER_INIT}
        missing |= {Capability.AUTOGRAD_CALLS}  # only Fabric's own backward may be called
        return super().capabilities() - missing | {"clip.error_if_nonfinite"}

    @classmethod
    @functools.cache
    def _launch(cls, device_type: str) -> Any:
        from lightning_fabric.strategies import FSDPStrategy

        return _launched(device_type, FSDPStrategy())

    def _give(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        from lightning_fabric.strategies import FSDPStrategy

        self._fabric = _launched(self.config.mesh.device_type, FSDPStrategy(**options))
        self._wrapped = self._fabric.setup_module(model)
        return next(self._wrapped.children())  # type: ignore[no-any-return]  # its ``module`` is the original one

    # Fabric's calls take the whole model alone; a script calls torch's own methods of a unit.

    def clip(self) -> torch.Tensor:
        return super().clip() if self._is_the_model() else EngineFsdpAdapter.clip(self)

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        whole = self._fabric.no_backward_sync(self._wrapped, enabled=not is_last)
        with whole if self._is_the_model() else EngineFsdpAdapter.microbatch(self, is_last=is_last):
            yield

    def _is_the_model(self) -> bool:
        return self.module is next(self._wrapped.children())


@functools.cache
def _fabric(device_type: str) -> tuple[Any, list[Callable[[nn.Module], nn.Module]]]:
    """Return this process's Fabric, and the functions of which its strategy calls the last one with each model."""
    from lightning_fabric.strategies import ModelParallelStrategy

    functions: list[Callable[[nn.Module], nn.Module]] = []
    # The strategy's own mesh is not used: units have the meshes of the case.
    strategy = ModelParallelStrategy(
        lambda model, mesh: functions[-1](model), data_parallel_size=dist.get_world_size(), tensor_parallel_size=1
    )
    return _launched(device_type, strategy), functions


def _launched(device_type: str, strategy: Any) -> Any:
    """Return a Fabric of all ranks with this strategy (collective)."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment

    devices = _devices(device_type, dist.group.WORLD)
    fabric = Fabric(accelerator=device_type, devices=devices, strategy=strategy, plugins=[LightningEnvironment()])
    fabric.launch()
    return fabric


@functools.cache
def _devices(device_type: str, world: dist.ProcessGroup) -> Any:
    """Return the devices of a world's ranks (collective in the first call); they need not be the host's first."""
    if device_type == "cpu":
        return world.size()
    devices: list[Any] = [None] * world.size()
    dist.all_gather_object(devices, torch.accelerator.current_device_index())
    return devices
