"""Adapter for VeOmni's ``parallelize_model_fsdp2``, which calls torch's ``fully_shard`` for classes of modules."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.adapters.base import Accumulation, Config, OptimizerFactory, Packaged, Precision, unit_classes
from shardproof.harness.adapters.capability import COMMON_AND_CLIPPING, Capability
from shardproof.harness.adapters.torch_fully_shard import TorchFullyShardAdapter
from shardproof.harness.tensors.pieces import original_name
from shardproof.harness.tensors.trees import local_of

#: What VeOmni has options or calls for, and what its clipping and its checkpoints must cope with.
_CAPABILITIES = COMMON_AND_CLIPPING | Capability.of(
    "sharded reshard-after-forward hybrid single-rank default_mesh counted-units all-gather-order unused-output "
    "post-accumulate-grad-hook recomputation autograd-calls recovery offload pageable-offload offload-choice "
    "clip.error_if_nonfinite clip-empty-shards own-optimizer dtensor-parameters registered-state "
    "distributed-checkpoint full-state-dict own-checkpoint"
)


#: The process group for which VeOmni has made its parallel states.
_last_world: list[Any] = [None]


class VeomniAdapter(Packaged, TorchFullyShardAdapter):
    """The model goes through ``parallelize_model_fsdp2``, clipping and checkpoints through VeOmni's calls.

    Units are chosen by class, so each has a class of its own. VeOmni empties a model once it has sharded it, and calls
    its ``init_weights``: the adapter gives the model one that restores the case's values.
    """

    name = "veomni.fsdp2"
    package, brings = "veomni", "--no-deps 'veomni==0.1.12'"
    traits = dataclasses.replace(
        TorchFullyShardAdapter.traits, isolation="adapter", process_groups="kept", own_mesh=True, simulates=False
    )
    option_names: ClassVar[dict[str, str]] = {
        option: name for option, name in TorchFullyShardAdapter.option_names.items() if option != "accumulation"
    }

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return _CAPABILITIES & (super().capabilities() | {Capability.OWN_CHECKPOINT})

    @classmethod
    def prepare(cls, device_type: str) -> None:
        import veomni.checkpoint
        import veomni.distributed.torch_parallelize  # noqa: F401

        _parallel_state(device_type, (dist.get_world_size(),))

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        if config.mesh.size() != dist.get_world_size():
            raise ValueError("VeOmni makes its own mesh of all ranks")
        if config.mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
            raise ValueError("VeOmni's mesh has the ranks in their order")
        if config.mesh.ndim > 2:
            raise ValueError("VeOmni's mesh of data-parallel ranks has one dimension or two")
        super().__init__(model, optimizer=optimizer, config=config)

    def set_up(self, model: nn.Module) -> nn.Module:
        """Give the model to VeOmni, in the parallel state of the case's mesh."""
        from veomni.arguments import MixedPrecisionConfig
        from veomni.distributed.parallel_state import use_parallel_state
        from veomni.distributed.torch_parallelize import parallelize_model_fsdp2

        config = self.config
        assert config.reshard_after_forward is None or isinstance(config.reshard_after_forward, bool)
        assert config.precision == Precision() and not config.unit_precision, "one policy applies to all units"
        assert config.param_init_fn is None and config.shard_dim is None, "not tried"
        self._state = _parallel_state(config.mesh.device_type, config.mesh.shape)
        options: dict[str, Any] = {}
        if config.reshard_after_forward is not None:
            options["enable_reshard_after_forward"] = config.reshard_after_forward
        if config.offload:
            options |= {"enable_fsdp_offload": True, "fsdp_offload_pin_memory": config.offload == "pinned"}
        values = {name: value.detach().clone() for name, value in _named_tensors(model).items()}

        @torch.no_grad()
        def init_weights() -> None:
            for name, value in _named_tensors(model).items():
                share = self._cuts[name](values[name]) if name in self._cuts else values[name]
                local_of(value).copy_(share)

        model.init_weights = init_weights  # type: ignore[assignment]
        with use_parallel_state(self._state), unit_classes(model, config.units) as classes:
            sharded: nn.Module = parallelize_model_fsdp2(
                model,
                init_device="meta",
                basic_modules=[one.__name__ for one in classes],
                mixed_precision=MixedPrecisionConfig(enable=False),
                **options,
            )
        del model.init_weights
        return sharded

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        assert self.config.accumulation in (None, Accumulation()), "not tried"
        yield

    def clip(self) -> torch.Tensor:
        from veomni.distributed.clip_grad_norm import veomni_clip_grad_norm
        from veomni.distributed.parallel_state import use_parallel_state

        clip = self.config.clip
        assert clip is not None
        with use_parallel_state(self._state):
            norm = veomni_clip_grad_norm(self.module, clip.max_norm, clip.norm_type, clip.error_if_nonfinite)
        # A Python number, which has lost the dtype of the norm.
        dtypes = (parameter.grad.dtype for parameter in self.module.parameters() if parameter.grad is not None)
        return torch.tensor(norm, dtype=functools.reduce(torch.promote_types, dtypes, torch.float16))

    def save_own(self, directory: pathlib.Path) -> None:
        self._checkpointer().save(str(directory), self._checkpointed(), parallel_state=self._state)

    def load_own(self, directory: pathlib.Path) -> None:
        self._checkpointer().load(str(directory), self._checkpointed(), parallel_state=self._state)

    def consolidated(self, directory: pathlib.Path) -> dict[str, torch.Tensor]:
        from veomni.checkpoint import ckpt_to_state_dict

        return cast(dict[str, torch.Tensor], ckpt_to_state_dict(str(directory), ckpt_manager="dcp"))

    def _checkpointer(self) -> Any:
        from veomni.checkpoint import build_checkpointer

        return build_checkpointer(dist_backend="fsdp2", ckpt_manager="dcp")

    def _checkpointed(self) -> dict[str, Any]:
        state = {"model": self.module, "extra_state": {}}
        return state if self.optimizer is None else state | {"optimizer": self.optimizer}


def _parallel_state(device_type: str, shape: tuple[int, ...]) -> Any:
    """Return VeOmni's parallel state of this shape, which it makes once and keeps."""
    from veomni.distributed.parallel_state import clear_parallel_state, init_parallel_state

    if _last_world[0] is not dist.group.WORLD:
        # As user code calls it that has made its process groups anew.
        clear_parallel_state()
        _last_world[0] = dist.group.WORLD
    replicas, shards = (1, *shape)[-2:]
    return init_parallel_state(
        dp_size=replicas * shards, dp_replicate_size=replicas, dp_shard_size=shards, device_type=device_type, name=None
    )


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by their names in the original model."""
    return {original_name(name): value for name, value in [*model.named_parameters(), *model.named_buffers()]}
