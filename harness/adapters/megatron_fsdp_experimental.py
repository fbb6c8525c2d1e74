"""Adapter for the ``fully_shard`` of ``megatron_fsdp.experimental``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.adapters.base import (
    Config,
    OptimizerFactory,
    Traits,
    inner_first,
    original_name,
)
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.dtensor import full_norm
from shardproof.harness.adapters.megatron_fsdp import MegatronAdapter, share_of_rows

_CAPABILITIES = frozenset(
    {
        Capability.SHARDED,
        Capability.HYBRID,
        Capability.UNUSED_OUTPUT,
        Capability.UNUSED_MODULE,
        Capability.CONTAINER_OUTPUT,
        Capability.DATACLASS_OUTPUT,
        Capability.MULTIPLE_FORWARD,
        Capability.RECOMPUTATION,
        Capability.TIED_PARAMETERS,
        Capability.CLIPPING,
        Capability.CLIP_BY_CALL,
        Capability.CLIP_ANY_NORM,
        Capability.CLIP_RAISES,
        Capability.CLIP_EMPTY_SHARDS,
        Capability.ADAM,
        Capability.OWN_OPTIMIZER,
    }
)
# Why the other capabilities are missing; those that are not listed have not been tried:
# - RESHARD_AFTER_FORWARD, ROOT_RESHARD, RESHARD_TO_SIZE: units are always freed after forward; there is no option.
# - COUNTED_UNITS, GATHER_ORDER: a forward gathers the next unit ahead, in the order of the modules.
# - GROUPED_UNIT: a call takes one module.
# - DEFERRED_REDUCTION: gradients are reduced in every backward; only the sum over replicas waits for the last.
# - DEFAULT_MESH, PROCESS_GROUPS: a mesh is required.
# - DTENSOR_PARAMETERS: as for megatron_fsdp.
# - MIXED_PRECISION, DISTRIBUTED_CHECKPOINT: as for megatron_fsdp.
# - NON_ROOT_FORWARD: it raises "Run forward through the root FSDP module first".
# - POST_ACCUMULATE_GRAD_HOOK: the hooks of the sharded parameters do not run.
# - MANUAL_RESHARD, EXPLICIT_PREFETCH, UNIT_SETTINGS, DIVIDE_FACTOR: there are no such calls.
# - OFFLOAD, IGNORED_PARAMETERS, SYNC_STATES, FLAT_PARAMETERS, REPLICAS_ALONE: there are no such options.
# - TENSOR_PARALLEL, UNIT_MESHES, META_DEVICE, LOSS_SCALING: not tried.


class MegatronFsdpExperimentalAdapter(MegatronAdapter):
    """``megatron_fsdp.experimental.fully_shard`` for each unit, inner ones first, and its ``fully_shard_optimizer``."""

    name = "megatron_fsdp.experimental"
    traits = Traits(
        # Gradients have a buffer from the start.
        held_from_start=frozenset({"gradients"}),
        local_numel=share_of_rows,
        collective_padding=4096,
        frees_models=False,
        isolation="adapter",
    )

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return _CAPABILITIES

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        from megatron_fsdp.experimental import Flat, Partial, Placements, Replicate, fully_shard, fully_shard_optimizer

        super().__init__(model, optimizer=optimizer, config=config)
        assert config.reshard_after_forward is None, "when parameters are freed is fixed"
        assert config.mesh.ndim in (1, 2), f"the adapter has placements for no mesh of {config.mesh.ndim} dimensions"
        hybrid = config.mesh.ndim == 2
        placements = Placements(
            dp_axes=[*range(config.mesh.ndim)],
            parameter=[Replicate(), Flat()] if hybrid else [Flat()],
            gradient=[Partial(dist.ReduceOp.AVG), Flat()] if hybrid else [Flat()],
            optimizer=[Replicate(), Flat()] if hybrid else [Flat()],
        )
        for unit in [*inner_first(config.units), ("",)]:
            assert len(unit) == 1, f"a call takes one module, and the unit {unit} has {len(unit)}"
            fully_shard(model.get_submodule(unit[0]), config.mesh, placements)
        self.module = model
        self.optimizer = optimizer(model.parameters()) if optimizer else None
        if self.optimizer is not None:
            fully_shard_optimizer(self.optimizer)
        self._hold()

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        from megatron_fsdp.experimental import microbatch

        with microbatch(self.module, is_last=is_last):
            yield

    def norm_value(self, norm: torch.Tensor) -> torch.Tensor:
        return full_norm(norm)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        names: Any = self.module.named_parameters()
        return {original_name(name): value for name, value in names}
