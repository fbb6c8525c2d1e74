"""How each implementation shards a model, and how user code says that a microbatch does not reduce."""

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training.models import Chain, Layer, Spec

#: Parameters are computed with in bfloat16, gradients reduced in float32; shards and optimizer states are float32.
COMPUTE, REDUCE = torch.bfloat16, torch.float32


class Trained(NamedTuple):
    """A model that is ready to train; ``run`` is called in place of the module.

    ``accumulating`` is a context in which backward does not reduce, for all microbatches but the last.
    """

    run: Callable[[torch.Tensor], torch.Tensor]
    module: nn.Module
    accumulating: Callable[[], contextlib.AbstractContextManager[Any]]


def mesh_of(spec: Spec, device: torch.device) -> DeviceMesh:
    """The mesh of a row with replicas: (replicate, shard)."""
    assert spec.shape is not None
    return init_device_mesh(device.type, spec.shape, mesh_dim_names=("replicate", "shard"))


def fully_shard_of(package: Any) -> Callable[[nn.Module, Spec, torch.device], Trained]:
    """``fully_shard`` of ``package``: torch's or the reference's."""

    def shard(model: nn.Module, spec: Spec, device: torch.device) -> Trained:
        options: dict[str, Any] = {"mp_policy": package.MixedPrecisionPolicy(param_dtype=COMPUTE, reduce_dtype=REDUCE)}
        if spec.shape is not None:
            options["mesh"] = mesh_of(spec, device)
        if spec.tensor_parallel > 1:
            shape = (dist.get_world_size() // spec.tensor_parallel, spec.tensor_parallel)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
            options["mesh"] = mesh["data"]
            for unit in units_of(model):
                parallelize_module(unit, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for unit in units_of(model):
            package.fully_shard(unit, **options)
        package.fully_shard(model, **options)
        root: Any = model

        @contextlib.contextmanager
        def accumulating() -> Any:
            root.set_requires_gradient_sync(False)
            yield
            root.set_requires_gradient_sync(True)

        return Trained(model, model, accumulating)

    return shard


def flat_of(package: Any, *, originals: bool = True) -> Callable[[nn.Module, Spec, torch.device], Trained]:
    """``FullyShardedDataParallel`` of ``package``, with the model's own parameters or with the flat ones."""

    def shard(model: nn.Module, spec: Spec, device: torch.device) -> Trained:
        if spec.tensor_parallel > 1 or (spec.shape is not None and spec.shape[1] == 1):
            raise Unsupported("it is measured with shards alone, in one dimension or in replicas")
        options: dict[str, Any] = {}
        if spec.shape is not None:
            options["device_mesh"] = mesh_of(spec, device)
            options["sharding_strategy"] = package.ShardingStrategy.HYBRID_SHARD
        units = set(units_of(model))
        wrapped = package.FullyShardedDataParallel(
            model,
            auto_wrap_policy=lambda module, recurse, **_: recurse or module in units,
            mixed_precision=package.MixedPrecision(param_dtype=COMPUTE, reduce_dtype=REDUCE),
            use_orig_params=originals,
            device_id=device,  # torch wants one on the CPU too
            **options,
        )
        return Trained(wrapped, wrapped, wrapped.no_sync)

    return shard


def ddp(model: nn.Module, spec: Spec, device: torch.device) -> Trained:
    """Replicas: parameters and gradients whole and float32 on every rank, computed with under autocast."""
    if spec.tensor_parallel > 1:
        raise Unsupported("it is measured with replicas alone")
    ids = [device.index] if device.type == "cuda" else None
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)

    def run(given: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, COMPUTE):
            output: torch.Tensor = wrapped(given)
        return output

    return Trained(run, wrapped, wrapped.no_sync)


class Unsupported(Exception):
    """An implementation cannot train this row."""


def named(name: str) -> Callable[[nn.Module, Spec, torch.device], Trained]:
    """The implementation called ``name``. What it needs is imported here, so that a process has that alone."""
    if name == "ddp":
        return ddp
    package, make = _PACKAGES[name]
    return make(importlib.import_module(package))


_PACKAGES = {
    "reference": ("fsdp_impl", fully_shard_of),
    "torch.fully_shard": ("torch.distributed.fsdp", fully_shard_of),
    "reference.flat": ("fsdp_impl", flat_of),
    "torch.fsdp": ("torch.distributed.fsdp", flat_of),
    "reference.flat:shown": ("fsdp_impl", functools.partial(flat_of, originals=False)),
    "torch.fsdp:shown": ("torch.distributed.fsdp", functools.partial(flat_of, originals=False)),
}

#: What ``--implementations`` takes.
NAMES = (*_PACKAGES, "ddp")


def units_of(model: nn.Module) -> list[nn.Module]:
    """The modules that are units, without the root."""
    return [module for module in model.modules() if isinstance(module, (Layer, Chain))]
