"""Adapter for olmo-core's mesh, microbatches, clipping and checkpoints, around torch's ``fully_shard``."""

import contextlib
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.harness.adapters.base import Accumulation, Config, OptimizerFactory, Packaged
from shardproof.harness.adapters.capability import COMMON_AND_CLIPPING, Capability
from shardproof.harness.adapters.torch_fully_shard import TorchFullyShardAdapter

#: What olmo-core sets or calls for its own models, and what its clipping and its checkpoints must cope with.
_CAPABILITIES = COMMON_AND_CLIPPING | Capability.of(
    "sharded reshard-after-forward root-reshard hybrid single-rank default_mesh counted-units all-gather-order "
    "unused-output post-accumulate-grad-hook recomputation autograd-calls recovery accumulation.skips "
    "precision.param_dtype precision.reduce_dtype clip-empty-shards own-optimizer dtensor-parameters registered-state "
    "meta-device distributed-checkpoint full-state-dict own-checkpoint"
)


class OlmoCoreAdapter(Packaged, TorchFullyShardAdapter):
    """``fully_shard`` on olmo-core's mesh of all ranks, as a ``TransformerTrainModule`` trains what it has sharded.

    The constructor of a ``TransformerTrainModule`` takes olmo-core's own transformers only. Its methods work on any
    module that torch has sharded, so the adapter calls these.
    """

    name = "olmo_core.fsdp"
    package, module_name, brings = "ai2-olmo-core", "olmo_core", "--no-deps 'ai2-olmo-core==3.0.0'"
    traits = dataclasses.replace(
        TorchFullyShardAdapter.traits, isolation="adapter", process_groups="kept", own_mesh=True, simulates=False
    )

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return _CAPABILITIES & (super().capabilities() | {Capability.OWN_CHECKPOINT})

    @classmethod
    def prepare(cls, device_type: str) -> None:
        import olmo_core.distributed.checkpoint
        import olmo_core.train.train_module  # noqa: F401

        _mesh(device_type, (dist.get_world_size(),), dist.group.WORLD)

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        from olmo_core.train.train_module import TransformerTrainModule

        if config.mesh.ndim > 2:
            raise ValueError("olmo-core's mesh of data-parallel ranks has one dimension or two")
        # olmo-core's mesh has all ranks in their order. Others are passed to ``apply_fsdp`` by user code.
        everyone = config.mesh.mesh.flatten().tolist() == list(range(dist.get_world_size()))
        self._mesh = config.mesh
        if everyone:
            self._mesh = _mesh(config.mesh.device_type, config.mesh.shape, dist.group.WORLD)
        super().__init__(model, optimizer=optimizer, config=config)
        self._train = TransformerTrainModule.__new__(TransformerTrainModule)
        self._train.model, self._train._dp_config = self.module, _dp_config(config.mesh.shape)

    def _its_mesh(self, unit: str) -> dict[str, Any]:
        return {"mesh": self._mesh}

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Mark the last backward, and defer the all-reduce of replicas to it, as olmo-core always does."""
        assert self.config.accumulation in (None, Accumulation(skips="all-reduce"))
        with self._train._train_microbatch_context(int(is_last), 2):
            yield

    def clip(self) -> torch.Tensor:
        clip = self.config.clip
        assert clip is not None and not clip.error_if_nonfinite
        return cast(torch.Tensor, self._train._clip_grad_norm(clip.max_norm, norm_type=clip.norm_type))

    def save_own(self, directory: pathlib.Path) -> None:
        from olmo_core.distributed.checkpoint import save_model_and_optim_state

        save_model_and_optim_state(directory, self.module, self.optimizer)

    def load_own(self, directory: pathlib.Path) -> None:
        from olmo_core.distributed.checkpoint import load_model_and_optim_state

        load_model_and_optim_state(directory, self.module, self.optimizer)

    def consolidated(self, directory: pathlib.Path) -> dict[str, torch.Tensor]:
        from olmo_core.distributed.checkpoint import unshard_checkpoint

        # It refuses processes with process groups, which it would not use.
        with (
            tempfile.TemporaryDirectory() as unsharded,
            mock.patch("olmo_core.distributed.checkpoint.is_distributed", return_value=False),
        ):
            file, _ = unshard_checkpoint(directory, unsharded, optim=False, quiet=True)
            found: dict[str, torch.Tensor] = torch.load(file)
        return found


@functools.cache
def _mesh(device_type: str, shape: tuple[int, ...], world: dist.ProcessGroup) -> DeviceMesh:
    """Return olmo-core's mesh of this shape, which the process keeps for as long as its process group is this one."""
    from olmo_core.distributed import parallel

    # A job of olmo-core has one mesh for its life; a rank of ours trains models on several.
    vars(parallel).update(_WORLD_MESH=None)
    world_mesh = parallel.build_world_mesh(dp=_dp_config(shape), device_type=device_type)
    return cast(DeviceMesh, parallel.get_dp_model_mesh(world_mesh))


def _dp_config(shape: tuple[int, ...]) -> Any:
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.train.train_module.transformer.config import TransformerDataParallelConfig

    if len(shape) == 1:
        return TransformerDataParallelConfig(name=DataParallelType.fsdp)
    replicas, shards = shape
    return TransformerDataParallelConfig(name=DataParallelType.hsdp, num_replicas=replicas, shard_degree=shards)
