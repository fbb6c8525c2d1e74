"""Compiles a model's layers and counts the graphs, so that a case can assert that something was compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardproof.harness.models.plain import Stacked
from shardproof.harness.tensors import private


class CountingBackend:
    """A backend of ``torch.compile`` that counts the graphs it compiles.

    Args:
        name: the registered name of the backend that compiles them.

    Attributes:
        graphs: the number of graphs so far.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return private.need("torch._dynamo.backends.registry.lookup_backend")(self.name)(graph, inputs)

    def compile_layers(self, model: nn.Module, *, dynamic: bool | None = None) -> nn.Module:
        """Compile each layer of a :class:`Stacked` model in place; call it before the model is sharded.

        Args:
            model: the model.
            dynamic: whether graphs are for inputs of any size: from the start, never, or once sizes differ (None).
        """
        assert isinstance(model, Stacked), f"{type(model).__name__} has no layers to compile"
        for layer in model.layers:
            layer.compile(backend=self, dynamic=dynamic)
        return model


@contextlib.contextmanager
def compiler(name: str) -> Iterator[CountingBackend]:
    """Provide a counting backend, and reset the compiler before and after, so that no compiled code is shared.

    Args:
        name: the registered name of a backend.
    """
    torch.compiler.reset()
    try:
        yield CountingBackend(name)
    finally:
        torch.compiler.reset()
