"""Applies activation checkpointing or ``torch.compile`` to a model's layers, before the model is sharded.

Checkpointing is by each of torch's means.
"""

import collections
import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardproof.harness.models.plain import Stacked
from shardproof.harness.tensors import private
from shardproof.harness.tensors.trees import local_of

# Private names of torch: these two functions have no public ones yet.
checkpoint_by_hooks = private.take("torch.distributed._composable.checkpoint_activation.checkpoint")
checkpoint_wrapper = private.take("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper")

Means = Literal["hooks", "wrapper", "call", "reentrant-call"]


def recompute(model: nn.Module, means: Means) -> nn.Module:
    """Change a :class:`Stacked` model in place, before it is sharded, so that backward recomputes its ``layers``.

    - "hooks": by hooks on the layer (the composable ``checkpoint``).
    - "wrapper": by a wrapper module in the layer's place, which is then the module that is sharded.
    - "call": by calling it through ``torch.utils.checkpoint``, so that the hooks of the implementation that shards the
      layer run again during the recomputation.
    - "reentrant-call": as "call", with the re-entrant autograd function.
    """
    assert isinstance(model, Stacked), f"{type(model).__name__} has no layers to recompute"
    if means in ("call", "reentrant-call"):
        model.calls = "recomputed" if means == "call" else "recomputed-reentrant"
        return model
    for index, layer in enumerate(model.layers):
        if means == "hooks":
            checkpoint_by_hooks(layer)
        else:
            model.layers[index] = checkpoint_wrapper(layer)
    return model


class Computations:
    """Counts how often each layer computes, and checks that no activation of a recomputed layer waits for backward.

    Pass :meth:`watch` a plain model in ``prepare``, :meth:`before_loss` to the step, and call :meth:`check` after it::

        computations = Computations(inside="w1")
        pair = rank.pair(model, prepare=lambda plain: recompute(computations.watch(plain), means), ...)
        pair.step(batch, before_loss=computations.before_loss)
        computations.check()

    ``inside`` names, within a layer, a module whose output backward needs.
    """

    def __init__(self, *, inside: str) -> None:
        self._inside = inside
        self._names: list[str] = []
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self._activations: dict[str, StorageWeakRef] = {}
        self._held: list[str] = []

    def watch(self, model: nn.Module) -> nn.Module:
        """Watch the layers of a :class:`Stacked` model from here on, and return the model."""
        assert isinstance(model, Stacked), f"{type(model).__name__} has no layers to watch"
        for index, layer in enumerate(model.layers):
            name = f"layers.{index}"
            self._names.append(name)
            layer.get_submodule(self._inside).register_forward_hook(
                lambda module, inputs, output, name=name: self._note(name, output)
            )
        return model

    def before_loss(self, output: Any) -> None:
        """Note which activations of the forward, whose output is there now, are still in memory."""
        self._held += [name for name, storage in self._activations.items() if not storage.expired()]
        self._activations.clear()

    def check(self, *, times: int = 1) -> None:
        """Check that each layer computed ``times`` in forward and again in backward since the last call.

        Raises:
            AssertionError: a layer computed more or less often, or what it computed in forward was held until backward.
        """
        counts = {name: tuple(self._counts[name, phase] for phase in ("forward", "backward")) for name in self._names}
        held, self._held = self._held, []
        self._counts.clear()
        wrong = {name: found for name, found in counts.items() if found != (times, times)}
        assert not wrong, (
            f"layers computed another number of times than {times} in forward and {times} in backward: "
            + ", ".join(f"{name} {forward} and {backward}" for name, (forward, backward) in wrong.items())
        )
        assert not held, f"activations of recomputed layers stay in memory until backward: {', '.join(held)}"

    def _note(self, name: str, output: torch.Tensor) -> None:
        # Private, as autograd has no public way to ask: a recomputation runs inside of a backward.
        is_backward = private.need("torch._C._current_graph_task_id")() != -1
        self._counts[name, "backward" if is_backward else "forward"] += 1
        if not is_backward:
            local = local_of(output)
            self._activations[name] = StorageWeakRef(local.untyped_storage())


class CountingBackend:
    """A backend of ``torch.compile`` that counts the graphs which the backend registered as ``name`` compiles."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return private.need("torch._dynamo.backends.registry.lookup_backend")(self.name)(graph, inputs)

    def compile_layers(self, model: nn.Module, *, dynamic: bool | None = None) -> nn.Module:
        """Compile each layer of a :class:`Stacked` model in place; call it before the model is sharded.

        Graphs are for inputs of any size from the start if ``dynamic``, never if not, and once sizes differ if it is
        None.
        """
        assert isinstance(model, Stacked), f"{type(model).__name__} has no layers to compile"
        for layer in model.layers:
            layer.compile(backend=self, dynamic=dynamic)
        return model


@contextlib.contextmanager
def compiler(name: str) -> Iterator[CountingBackend]:
    """Provide a counting backend, and reset the compiler before and after, so that no compiled code is shared."""
    torch.compiler.reset()
    try:
        yield CountingBackend(name)
    finally:
        torch.compiler.reset()
