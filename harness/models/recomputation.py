"""Applies activation checkpointing or ``torch.compile`` to a model's layers, before the model is sharded.

Checkpointing is by each of torch's means, also of spans that are no layers: several layers together, or a part of
each.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

from shardproof.harness.models.plain import MLP, Stacked, Tower
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


Span = Literal[
    "two-layers", "two-layers-reentrant", "to-the-end", "part-of-a-layer", "part-of-a-layer-reentrant", "matrices-saved"
]
"""What one call of ``torch.utils.checkpoint`` recomputes, in a :class:`SpanTower`.

- "two-layers": the last two layers together; "two-layers-reentrant" with the re-entrant autograd function.
- "to-the-end": each layer, to its end though backward needs nothing of that (no early stop).
- "part-of-a-layer": the first half of each layer.
- "matrices-saved": each layer but its products of matrices, which are saved (selective recomputation).
"""


class SpanTower(Tower):
    """A :class:`Tower` that can recompute spans which are not its layers; None recomputes nothing."""

    span: Span | None = None

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        """Call each layer on the output of the previous layer, within what is recomputed."""
        layers = list(self.layers)
        if self.span is None:
            return super().run_layers(x)
        if self.span in ("two-layers", "two-layers-reentrant"):
            # The last two: a re-entrant one needs an input that requires a gradient.
            *layers, first, second = layers
        for layer in layers:
            x = self._call(layer, x)
        if len(layers) < len(self.layers):
            x = checkpoint(lambda x: second(first(x)), x, use_reentrant=self.span == "two-layers-reentrant")
        return x

    def _call(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        called: torch.Tensor
        if self.span == "to-the-end":
            with set_checkpoint_early_stop(False):
                called = checkpoint(layer, x, use_reentrant=False)
        elif self.span == "matrices-saved":
            matrices = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
            contexts: Callable[[], Any] = functools.partial(create_selective_checkpoint_contexts, matrices)
            called = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        else:
            called = layer(x)
        return called


def recompute_span(model: SpanTower, span: Span) -> SpanTower:
    """Change a model in place so that backward recomputes ``span``, and return it."""
    model.span = span
    if span in ("part-of-a-layer", "part-of-a-layer-reentrant"):
        is_reentrant = span == "part-of-a-layer-reentrant"
        # A re-entrant one needs an input that requires a gradient.
        for layer in list(model.layers)[is_reentrant:]:
            half: Any = layer.in_proj
            half.forward = functools.partial(checkpoint, half.forward, use_reentrant=is_reentrant)
    return model


class SpanBesideAHead(nn.Module):
    """A span that is recomputed and ends with a head whose output the loss may leave out.

    Submodules: ``entry``, ``inner``, ``side`` (an MLP) and ``out``, all (dim, dim). Input (rows, dim), output a pair of
    that shape, of ``out`` and of ``side``. Without the second one the recomputation ends in the midst of ``side``: it
    has then made everything that was saved, and torch stops it there.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.entry, self.inner, self.out = (nn.Linear(dim, dim) for _ in range(3))
        self.side = MLP(dim)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner, side = checkpoint(self._span, self.entry(x), use_reentrant=False)
        return self.out(inner), side

    def _span(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.inner(x)), self.side(x)


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
