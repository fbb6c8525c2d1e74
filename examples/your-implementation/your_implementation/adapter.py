"""What shardproof needs to know of the implementation. Only shardproof imports this module."""

import contextlib

import torch
from torch import nn

import your_implementation
from shardproof.harness.adapters.base import ByParameter, Config, OptimizerFactory, Piece, Traits
from shardproof.harness.adapters.capability import COMMON, Capability
from shardproof.harness.adapters.traits import padded_to_elements
from your_implementation.zero3 import ZeroThree


class YourAdapter(ByParameter):
    """Drives ``ZeroThree``."""

    name = "your.implementation"
    # A rank's share of a parameter, padding included.
    traits = Traits(local_numel=padded_to_elements)

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        return None  # it runs wherever torch runs

    @classmethod
    def version(cls) -> str:
        return your_implementation.__version__

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        # Begin with few, run, and read in the report which missing one keeps you from most cases.
        # Without clip.norm_type: ZeroThree.clip knows the 2-norm alone.
        return COMMON | Capability.of(
            "sharded unused-output non-root-forward deferred-reduction clipping clip-by-call own-optimizer"
        )

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        units = [model.get_submodule(name) for unit in config.units for name in unit]
        self.trained = ZeroThree(model, units, config.mesh.get_group())
        self.module = model
        self.optimizer = optimizer(model.parameters()) if optimizer else None

    def microbatch(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        return self.trained.microbatch(is_last=is_last)

    def clip(self) -> torch.Tensor:
        assert self.config.clip is not None
        return self.trained.clip(self.config.clip.max_norm, self.config.clip.norm_type)

    def piece(self, name: str, tensor: torch.Tensor) -> Piece:
        """Return a shard, or its gradient, without the padding, and how to cut the full tensor to the same elements."""
        first = self.config.shard_index * len(tensor)
        rest = max(0, self.shapes[name].numel() - first)
        return Piece(tensor[:rest], lambda full: full.flatten()[first : first + len(tensor)])

    def optimizer_state(self) -> dict[str, dict[str, Piece]] | None:
        # Its tensors are as long as the shards: without their padding, too. A step count has no dimension.
        return {
            name: {key: self.piece(name, one.tensor) if one.tensor.ndim else one for key, one in state.items()}
            for name, state in (super().optimizer_state() or {}).items()
        }
