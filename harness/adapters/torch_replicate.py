"""Adapter for ``torch.distributed._composable.replicate``, DDP that is applied to a module in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from shardproof.harness.adapters.base import Config, OptimizerFactory
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.replicas import OF_DDP, ReplicaAdapter
from shardproof.harness.tensors import private


class TorchReplicateAdapter(ReplicaAdapter):
    """``replicate`` on the root alone. A control: it shards nothing."""

    name = "torch.replicate"

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return OF_DDP | {Capability.CAST_AFTER_INIT}

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        replicate = private.need("torch.distributed._composable.replicate.replicate")
        super().__init__(model, optimizer=optimizer, config=config)
        self.module = replicate(model, find_unused_parameters=config.find_unused, **self._ranks())
        if config.cast is not None:
            self.module.to(config.cast)
        self.optimizer = optimizer(self.module.parameters()) if optimizer else None

    def _ranks(self) -> dict[str, Any]:
        if self.config.default_mesh:
            return {}
        mesh = self.config.mesh
        return {"process_group": mesh.get_group()} if self.config.as_groups else {"device_mesh": mesh}

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        root: Any = self.module
        root.set_requires_gradient_sync(is_last)
        yield

    def submodule(self, name: str) -> nn.Module:
        assert not name, "replicate() reduces gradients only after a forward of the root"
        return self.module
