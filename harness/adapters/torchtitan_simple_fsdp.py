"""Adapter for torchtitan's simple_fsdp, which makes each parameter a property that gathers it."""

import functools
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardproof.harness.adapters.base import ByParameter, Config, OptimizerFactory, Packaged, Precision, Traits
from shardproof.harness.adapters.capability import COMMON_AND_CLIPPING, Capability
from shardproof.harness.adapters.dtensor import cut_of_share, materialize, mesh_of
from shardproof.harness.tensors.pieces import Cut, Piece, original_name, piece_of
from shardproof.harness.tensors.trees import full_of, local_of


class TorchtitanSimpleFsdpAdapter(Packaged, ByParameter):
    """Drives ``data_parallel`` of torchtitan's graph trainer, eagerly.

    torchtitan is imported in the ranks only. ``config.units`` is ignored: each parameter is gathered by itself,
    whenever a module reads it.
    """

    name = "torchtitan.simple_fsdp"
    package, brings = "torchtitan", "--no-deps 'torchtitan==0.3.0'"
    option_names: ClassVar[dict[str, str]] = {
        "precision.param_dtype": "param_dtype",
        "precision.reduce_dtype": "reduce_dtype",
        "clip.max_norm": "max_norm",
        "clip.norm_type": "norm_type",
        "clip.error_if_nonfinite": "error_if_nonfinite",
    }
    traits = Traits(
        # Parameters are scattered from the first rank, whose communication threads may keep the last ones.
        held_from_start=frozenset({"gathered"}),
        sums_over_ranks=True,
        # The classes that it makes of the modules' classes stay, with the mesh and the policy of the first model.
        frees_models=False,
        isolation="adapter",
        simulates=True,
    )

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return COMMON_AND_CLIPPING | Capability.of(
            "sharded unused-output post-accumulate-grad-hook non-root-forward clip.error_if_nonfinite "
            "clip-empty-shards cast-after-init meta-device dtensor-parameters single-rank own-optimizer loss-scaling "
            "hybrid no-shard recomputation recomputes-gathered compiled-modules distributed-checkpoint "
            "full-state-dict forward-method recovery as_groups"
        )

    @classmethod
    def prepare(cls, device_type: str) -> None:
        from torchtitan.experiments.graph_trainer import simple_fsdp  # takes seconds

        # Each case has classes of its own: later models of a class are given the mesh and the policy of its first
        # (findings/F120.py).
        simple_fsdp._wrap_class_cache.clear()

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel, disable_active_parametrization

        super().__init__(model, optimizer=optimizer, config=config)
        assert config.reshard_after_forward is None and config.accumulation is None, "there is no such option"
        assert config.offload is None and not config.unit_precision
        assert not config.ignored_params and not config.unit_meshes and not config.gradient_divide_factors
        # Of all names of a tied parameter: it should have one piece, whichever of them remain.
        self._cuts: dict[str, Cut] = {
            original_name(name): functools.partial(cut_of_share, cut=piece_of(value.detach()).cut, mesh=config.mesh)
            if config.shards else piece_of(value.detach()).cut
            for name, value in model.named_parameters(remove_duplicate=False)
        }  # fmt: skip
        mode = "hybrid_shard" if config.mesh.ndim == 2 else "fully_shard" if config.shards else "replicate"
        precision = config.precision
        policy = MixedPrecisionPolicy(param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype)
        its = {} if precision == Precision() else {"mp_policy": policy}
        self.module = data_parallel(model, mesh_of(config), mode, **its)
        # Modules read their shards in place of gathered parameters.
        with disable_active_parametrization():
            materialize(self.module, config, device=config.mesh.device_type)
        if config.cast is not None:
            self.module = self.module.to(config.cast)
        self.optimizer = optimizer(self.module.parameters()) if optimizer else None

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward from this rank's part of the loss of all ranks, as torchtitan's trainer does."""
        (loss / self.config.mesh.size()).backward()

    def norm_value(self, norm: torch.Tensor) -> torch.Tensor:
        return full_of(norm)

    def piece(self, name: str, tensor: torch.Tensor) -> Piece:
        return Piece(local_of(tensor), self._cuts[name])

    def register_forward_method(self, submodule: str, method: str) -> None:
        """Do nothing: every method reads the properties."""
