"""Adapter for torchtitan's simple_fsdp, which makes each parameter a property that gathers it."""

from __future__ import annotations

import functools
import importlib.util
from importlib import metadata

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardproof.harness.adapters.base import (
    Adapter,
    Config,
    Cut,
    OptimizerFactory,
    Piece,
    Precision,
    Traits,
    original_name,
)
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.dtensor import cut_of_share, full_norm, piece_of

_CAPABILITIES = frozenset(
    {
        Capability.SHARDED,
        Capability.UNUSED_OUTPUT,
        Capability.UNUSED_MODULE,
        Capability.CONTAINER_OUTPUT,
        Capability.DATACLASS_OUTPUT,
        Capability.POST_ACCUMULATE_GRAD_HOOK,
        Capability.NON_ROOT_FORWARD,
        Capability.MULTIPLE_FORWARD,
        Capability.CLIPPING,
        Capability.CLIP_BY_CALL,
        Capability.CLIP_ANY_NORM,
        Capability.CLIP_RAISES,
        Capability.CLIP_EMPTY_SHARDS,
        Capability.CAST_AFTER_INIT,
        Capability.META_DEVICE,
        Capability.DTENSOR_PARAMETERS,
        Capability.SINGLE_RANK,
        Capability.ADAM,
        Capability.OWN_OPTIMIZER,
        Capability.LOSS_SCALING,
        Capability.HYBRID,
        Capability.REPLICAS_ALONE,
        Capability.RECOMPUTATION,
        Capability.RECOMPUTES_GATHERED,
        Capability.COMPILED_MODULES,
        Capability.TIED_PARAMETERS,
        Capability.DISTRIBUTED_CHECKPOINT,
        Capability.FULL_STATE_DICT,
        Capability.FORWARD_METHOD,
        Capability.RECOVERY,
        Capability.PROCESS_GROUPS,
    }
)


class TorchtitanSimpleFsdpAdapter(Adapter):
    """Drives ``data_parallel`` of torchtitan's graph trainer, eagerly.

    torchtitan is imported in the ranks only. ``config.units`` is ignored: each parameter is gathered by itself,
    whenever a module reads it.
    """

    name = "torchtitan.simple_fsdp"
    traits = Traits(
        # Parameters are scattered from the first rank, whose communication threads may keep the last ones.
        held_from_start=frozenset({"gathered"}),
        sums_over_ranks=True,
        # The classes that it makes of the modules' classes are kept for as long as the process lives, and with them the
        # mesh and the policy of the first model: findings/F120.py.
        frees_models=False,
        isolation="case",
        simulates=True,
    )

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        if importlib.util.find_spec("torchtitan") is None:
            return "torchtitan is not installed; pip install --no-deps 'torchtitan==0.3.0' brings it"
        return None

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return _CAPABILITIES

    @classmethod
    def version(cls) -> str:
        return metadata.version("torchtitan")

    @classmethod
    def prepare(cls, device_type: str) -> None:
        import torchtitan.experiments.graph_trainer.simple_fsdp  # noqa: F401  (takes seconds)

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

        super().__init__(model, optimizer=optimizer, config=config)
        assert config.reshard_after_forward is None and config.accumulation is None, "there is no such option"
        assert config.offload is None and config.precision == Precision() and not config.unit_precision
        assert not config.ignored and not config.unit_meshes and not config.divide_factors
        # Of all names of a tied parameter: it should have one piece, whichever of them remain.
        self._cuts: dict[str, Cut] = {
            original_name(name): functools.partial(cut_of_share, cut=piece_of(value.detach()).cut, mesh=config.mesh)
            if config.shards else piece_of(value.detach()).cut
            for name, value in model.named_parameters(remove_duplicate=False)
        }  # fmt: skip
        mode = "hybrid_shard" if config.mesh.ndim == 2 else "fully_shard" if config.shards else "replicate"
        self.module = data_parallel(model, self._mesh(), mode)
        self._materialize()
        if config.cast is not None:
            self.module = self.module.to(config.cast)
        self.optimizer = optimizer(self.module.parameters()) if optimizer else None

    def _mesh(self) -> DeviceMesh:
        mesh = self.config.mesh
        if not self.config.as_groups:
            return mesh
        if mesh.ndim == 1:
            return DeviceMesh.from_group(mesh.get_group(), mesh.device_type)
        groups = mesh.get_all_groups()
        return DeviceMesh.from_group(groups, mesh.device_type, mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)

    def _materialize(self) -> None:
        """Make what is on the meta device real, while modules read their shards in place of gathered parameters."""
        from torchtitan.experiments.graph_trainer.simple_fsdp import disable_active_parametrization

        with disable_active_parametrization():
            for module in self.module.modules():
                own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
                if not any(tensor.is_meta for tensor in own):
                    continue
                if self.config.init is not None:
                    self.config.init(module)
                else:
                    module.to_empty(device=self.config.mesh.device_type, recurse=False)
                    module.reset_parameters()  # type: ignore[operator]

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward from this rank's part of the loss of all ranks, as torchtitan's trainer does."""
        (loss / self.config.mesh.size()).backward()

    def norm_value(self, norm: torch.Tensor) -> torch.Tensor:
        return full_norm(norm)

    def gradients(self) -> dict[str, Piece | None]:
        """Return the local shards of the gradients, where the optimizer finds them."""
        return {
            name: None if parameter.grad is None else self._share(name, parameter.grad)
            for name, parameter in self.named_parameters().items()
        }

    def parameters(self) -> dict[str, Piece]:
        """Return the local shards of the parameters, where the optimizer updates them."""
        return {name: self._share(name, parameter.detach()) for name, parameter in self.named_parameters().items()}

    def _share(self, name: str, tensor: torch.Tensor) -> Piece:
        return Piece(tensor.to_local() if isinstance(tensor, DTensor) else tensor, self._cuts[name])

    def register_forward_method(self, submodule: str, method: str) -> None:
        """Do nothing: every method reads the properties."""


# Why the other capabilities are missing; those that are not listed have not been tried:
# - RESHARD_AFTER_FORWARD, ROOT_RESHARD, RESHARD_TO_SIZE, RESHARD_TO_SIZE_UNEVEN: what is gathered is a value of
#   autograd, which backward has without another gather. Passes of torchtitan's compiler change that for its own models.
# - GROUPED_UNIT, COUNTED_UNITS, GATHER_ORDER: each parameter is gathered and reduced by itself.
# - REGISTERED_STATE, MANUAL_RESHARD, ASYNC_UNSHARD, EXPLICIT_PREFETCH, WHOLE_PARAMETERS: only shards are registered,
#   and no call gathers.
# - MIXED_PRECISION: a policy casts parameters and leaves inputs as they are, and is one for all modules of a class
#   (findings/F120.py).
# - SHARD_DIMENSION, DIVIDE_FACTOR, IGNORED_PARAMETERS, IGNORED_MODULES, OFFLOAD, UNIT_SETTINGS: there is no such
#   option, or it is one for the whole model.
# - DEFERRED_REDUCTION, MARKED_LAST_BACKWARD: every backward reduces.
# - TENSOR_PARALLEL: findings/F124.py.
# - META_LOAD: sharding sends the first rank's values, so that ranks with and without values wait for each other.
# - SYNC_STATES: buffers are not sent.
# - AUTOGRAD_CALLS: gradients of the user's own backward are sums.
# - DEFAULT_MESH: data_parallel wants a mesh.
