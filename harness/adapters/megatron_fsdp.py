"""Adapter for megatron-fsdp's ``fully_shard_model`` and ``fully_shard_optimizer``."""

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.harness.adapters.base import ByParameter, OptimizerFactory, Packaged, inner_first, unit_classes
from shardproof.harness.adapters.capability import COMMON, COMMON_AND_CLIPPING, Capability
from shardproof.harness.adapters.config import Config
from shardproof.harness.adapters.traits import Traits
from shardproof.harness.tensors.memory import free
from shardproof.harness.tensors.pieces import Cut, Piece, original_name
from shardproof.harness.tensors.trees import full_of, local_of

# Where the rows of parameters lie that an implementation packs into buffers and cuts along dimension 0.
#
# A rank holds consecutive rows of a parameter, in the order of the ranks, but how many follows from what else is in the
# buffer. The ranks tell each other once, after sharding. That the rows make up the parameter is checked by the harness.


def cuts_of_rows(parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> dict[str, Cut]:
    """Return the cut of each DTensor to the rows that this rank holds, of which a rank has any number (collective)."""
    # Names may differ between the ranks, and the order does not.
    mine = [local_of(parameter).shape[0] for parameter in parameters.values()]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    first = [sum(rows) for rows in zip(*everyone[: group.rank()], strict=True)] or [0] * len(mine)
    return {
        name: functools.partial(_rows, first=start, count=count)
        for name, start, count in zip(parameters, first, mine, strict=True)
    }


def _rows(full: torch.Tensor, *, first: int, count: int) -> torch.Tensor:
    rows = full if full.ndim else full.view(1)
    return rows.narrow(0, min(first, rows.shape[0]), count)


def share_of_rows(shape: torch.Size, size: int) -> int:
    """Return a rank's share, in elements, of a parameter that is cut between rows, or of its place in a buffer."""
    return math.ceil(math.prod(shape) / size) + math.prod(shape[1:])


class MegatronAdapter(Packaged, ByParameter):
    """What both halves of megatron-fsdp share: a rank holds any number of rows of a parameter, and keeps the model.

    megatron_fsdp is imported in the ranks only: it warns of libraries that it can do without.
    """

    package, extra = "megatron-fsdp", "megatron"

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        if device_type != "cuda":
            return "megatron_fsdp runs on CUDA devices only: pass --device cuda"
        return super().availability(device_type)

    @classmethod
    def prepare(cls, device_type: str) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
            import megatron_fsdp  # noqa: F401

    def _hold(self) -> None:
        """Note the parameters that the optimizer updates, and where their rows lie (collective)."""
        self._held = self.named_parameters()
        self._cuts: dict[str, Cut] = {}
        by_mesh: dict[DeviceMesh, dict[str, nn.Parameter]] = {}
        units = [(module, unit[0]) for unit in inner_first(self.config.units) for module in unit]
        for name, parameter in self._held.items():
            unit = next((first for module, first in units if name.startswith(f"{module}.")), "")
            by_mesh.setdefault(self.config.mesh_of(unit), {})[name] = parameter
        for mesh, parameters in by_mesh.items():
            self._cuts |= cuts_of_rows(parameters, mesh.get_group(mesh.ndim - 1))

    def piece(self, name: str, tensor: torch.Tensor) -> Piece:
        return Piece(local_of(tensor).detach(), self._cuts[name])

    def held_parameters(self) -> dict[str, nn.Parameter]:
        return self._held

    def teardown(self) -> None:
        """Free what the model holds: the model itself stays (findings/F146.py), beside later cases."""
        free([(parameter, parameter.grad) for parameter in self._held.values()])


class MegatronFsdpAdapter(MegatronAdapter):
    """``megatron_fsdp.fully_shard_model`` with the strategy that shards all, and ``fully_shard_optimizer``."""

    name = "megatron_fsdp"
    traits = Traits(
        # Gradients have a buffer from the start, and the optimizer's state is made by a first step.
        held_from_start=frozenset({"master", "gradients", "optimizer"}),
        local_numel=share_of_rows,
        collective_padding=4096,
        unused_gradient="zero",
        process_groups="abandoned",
        frees_models=False,
        isolation="adapter",
    )
    module: Any

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return COMMON | Capability.of(
            "sharded hybrid grouped-unit unused-output recomputation default_mesh own-optimizer"
        )

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        from megatron_fsdp import fully_shard_model, fully_shard_optimizer

        super().__init__(model, optimizer=optimizer, config=config)
        assert config.reshard_after_forward is None, "when parameters are freed is fixed"
        assert config.clip is None and not config.unit_meshes, "it has no clipping of its own, and one mesh"
        assert config.mesh.size() == dist.get_world_size(), "the adapter shards over all ranks"
        # Some unit is required: without any the root is one.
        with unit_classes(model, config.units or (("",),)) as classes:
            self.module = fully_shard_model(model, fsdp_unit_modules=classes, zero_dp_strategy=3, **_ranks(config))
        self.optimizer = None
        if optimizer is not None:
            self.optimizer = fully_shard_optimizer(optimizer(self.module.parameters()))
        # Before a forward, which registers others in their place.
        self._hold()

    def submodule(self, name: str) -> nn.Module:
        return cast(nn.Module, self.module.module.get_submodule(name) if name else self.module)

    def zero_grad(self, *, set_to_none: bool) -> None:
        super().zero_grad(set_to_none=set_to_none)
        if self.optimizer is None:
            self.module.zero_grad_buffer()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {original_name(name): value for name, value in self.module.module.named_parameters()}


def _ranks(config: Config) -> dict[str, Any]:
    """Return the options for the ranks: nothing stands for all of them."""
    if config.mesh.ndim == 1:
        return {}
    assert config.mesh.ndim == 2, f"the adapter has names for no mesh of {config.mesh.ndim} dimensions"
    names = ("outer", "inner", "tp")
    # Of the ranks as the mesh has them: another order of theirs cuts a parameter in another order.
    mesh = DeviceMesh(config.mesh.device_type, config.mesh.mesh.unsqueeze(-1), mesh_dim_names=names)
    both = mesh["outer", "inner"]._flatten("both")
    return {
        "device_mesh": mesh,
        "dp_outer_dim": "outer",
        "dp_shard_dim": "inner",
        "tp_dim": "tp",
        "hybrid_fsdp_group": both.get_group(),
    }


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
    def capabilities(cls) -> frozenset[str]:
        return COMMON_AND_CLIPPING | Capability.of(
            "sharded hybrid unit_meshes unused-output recomputation clip.error_if_nonfinite clip-empty-shards "
            "own-optimizer"
        )

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        from megatron_fsdp.experimental import Flat, Partial, Placements, Replicate, fully_shard, fully_shard_optimizer

        super().__init__(model, optimizer=optimizer, config=config)
        assert config.reshard_after_forward is None, "when parameters are freed is fixed"
        for unit in [*inner_first(config.units), ("",)]:
            assert len(unit) == 1, f"a call takes one module, and the unit {unit} has {len(unit)}"
            mesh = config.mesh_of(unit[0])
            assert mesh.ndim in (1, 2), f"the adapter has placements for no mesh of {mesh.ndim} dimensions"
            hybrid = mesh.ndim == 2
            placements = Placements(
                dp_axes=[*range(mesh.ndim)],
                parameter=[Replicate(), Flat()] if hybrid else [Flat()],
                gradient=[Partial(dist.ReduceOp.AVG), Flat()] if hybrid else [Flat()],
                optimizer=[Replicate(), Flat()] if hybrid else [Flat()],
            )
            fully_shard(model.get_submodule(unit[0]), mesh, placements)
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
        return full_of(norm)
