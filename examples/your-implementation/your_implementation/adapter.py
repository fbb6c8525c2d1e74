"""What shardproof needs to know of the implementation. Only shardproof imports this module."""

import contextlib
from collections.abc import Iterator
from importlib import metadata

import torch
from torch import nn

from shardproof.harness.adapters.base import Adapter, Config, OptimizerFactory, Piece, Traits, whole
from shardproof.harness.adapters.capability import Capability
from your_implementation.zero1 import ZeroOne


class YourAdapter(Adapter):
    """Drives ``ZeroOne``."""

    name = "your.implementation"
    # Parameters and gradients are whole on every rank.
    traits = Traits(shards=frozenset({"optimizer"}))

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        return None  # it runs wherever torch runs

    @classmethod
    def version(cls) -> str:
        return metadata.version("your-implementation")

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        # Begin with few, run, and read in the report which missing one keeps you from most cases.
        return frozenset(
            {
                Capability.UNUSED_MODULE,
                Capability.CONTAINER_OUTPUT,
                Capability.DATACLASS_OUTPUT,
                Capability.MULTIPLE_FORWARD,
                Capability.CLIPPING,
                Capability.CLIP_BY_CALL,
                # Without CLIP_ANY_NORM: ZeroOne.clip knows the 2-norm alone.
                Capability.ADAM,
            }
        )

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        self.trained = ZeroOne(model, optimizer, group=config.mesh.get_group(), find_unused=config.find_unused)
        self.module, self.optimizer = self.trained.module, self.trained.optimizer

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if is_last else self.trained.accumulating():
            yield

    def clip(self) -> torch.Tensor:
        assert self.config.clip is not None
        return self.trained.clip(self.config.clip.max_norm, self.config.clip.norm_type)

    def step(self) -> None:
        self.trained.step()

    def zero_grad(self, *, set_to_none: bool) -> None:
        self.module.zero_grad(set_to_none=set_to_none)

    def gradients(self) -> dict[str, Piece | None]:
        return {
            name: None if parameter.grad is None else whole(parameter.grad)
            for name, parameter in self.named_parameters().items()
        }

    def parameters(self) -> dict[str, Piece]:
        return {name: whole(parameter.detach()) for name, parameter in self.named_parameters().items()}

    def optimizer_state(self) -> dict[str, dict[str, Piece]] | None:
        # That of the parameters which other ranks own is on those ranks.
        state = super().optimizer_state() or {}
        return {name: pieces for name, pieces in state.items() if pieces}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        # By the names of the original model, without the prefix of DistributedDataParallel.
        return dict(self.module.module.named_parameters())
