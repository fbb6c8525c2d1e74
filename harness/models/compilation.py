"""Compiles a model's layers and counts the graphs, so that a case proves that something was compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardproof.harness.models.plain import Stacked


class CountingBackend:
    """One of ``torch.compile``'s backends; ``graphs`` is how many it was given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        self.graphs += 1
        return lookup_backend(self.name)(graph, inputs)

    def compile_layers(self, model: nn.Module) -> nn.Module:
        """Compile each layer in place, before anything shards it."""
        assert isinstance(model, Stacked), f"{type(model).__name__} has no layers to compile"
        for layer in model.layers:
            layer.compile(backend=self)
        return model


@contextlib.contextmanager
def compiler(name: str) -> Iterator[CountingBackend]:
    """A backend, with nothing compiled before it and nothing left after."""
    torch._dynamo.reset()
    try:
        yield CountingBackend(name)
    finally:
        torch._dynamo.reset()
