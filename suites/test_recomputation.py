"""Chapter RECOMPUTATION: activation checkpointing of units, without a second gather."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

from shardproof.testing import Capability, Pair, Rank, contract, models, needs, world
from shardproof.testing.axes import RESHARD, RESHARD_ROOT, subjects
from shardproof.testing.compare import step_label
from shardproof.testing.make import Accumulation, pair_by_units, run_by_units
from shardproof.testing.measure import Census
from shardproof.testing.train import Computations, Means, batches, checked_steps, recompute, ties, train_and_check

Span = Literal[
    "two-layers", "two-layers-reentrant", "to-the-end", "part-of-a-layer", "part-of-a-layer-reentrant", "matrices-saved"
]
"""What one call of ``torch.utils.checkpoint`` recomputes, in a :class:`SpanTower`.

- "two-layers": the last two layers together; "two-layers-reentrant" with the re-entrant autograd function.
- "to-the-end": each layer, to its end though backward needs nothing of that (no early stop).
- "part-of-a-layer": the first half of each layer.
- "matrices-saved": each layer but its products of matrices, which are saved (selective recomputation).
"""


class SpanTower(models.Tower):
    """A :class:`models.Tower` that can recompute spans which are not its layers; None recomputes nothing."""

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
        self.side = models.MLP(dim)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner, side = checkpoint(self._span, self.entry(x), use_reentrant=False)
        return self.out(inner), side

    def _span(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.inner(x)), self.side(x)


pytestmark = [needs(Capability.RECOMPUTATION), world(2)]

MEANS = pytest.mark.parametrize("means", ["hooks", "call", "wrapper", "reentrant-call"])
SPANS = pytest.mark.parametrize(
    "span", ["two-layers", "two-layers-reentrant", "to-the-end", "part-of-a-layer", "matrices-saved"]
)
COUNTS = needs(Capability.RECOMPUTES_GATHERED, Capability.COUNTED_UNITS)
CHOOSES = needs(Capability.BACKWARD_PREFETCH)
AHEAD = pytest.mark.parametrize("ahead", [None, pytest.param(True, marks=CHOOSES)])

CONFIG = models.TransformerConfig(layers=3, vocabulary=61, length=16, heads=4)


@contract("RECOMPUTATION-1", "RECOMPUTATION-3")
@MEANS
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_recomputed_units(rank: Rank, reshard_after_forward: bool | None, means: Means) -> None:
    """Recomputed units compute twice, hold no activations in between and train as DDP does without recomputation."""
    pair, computations = make(rank, means, reshard_after_forward=reshard_after_forward)
    for step in range(3):
        train(rank, pair, computations, step)


@contract("RECOMPUTATION-2")
@COUNTS
@MEANS
@pytest.mark.parametrize("reshard_after_forward", RESHARD_ROOT[:3])
@AHEAD
def test_one_gather_serves_both(
    rank: Rank, ahead: bool | None, reshard_after_forward: bool | None, means: Means
) -> None:
    """Backward gathers a recomputed unit as often as any other: one gather serves both computations.

    This holds also where forward gathers ahead, which would be useless in a recomputation.
    """
    pair, computations = make(rank, means, reshard_after_forward=reshard_after_forward, forward_prefetch=ahead)
    units = len(pair.units)
    again = {None: units - 1, False: 0}.get(reshard_after_forward, units)
    for step in range(2):
        train(rank, pair, computations, step)
        pair.check_counts("forward", all_gather=units)
        pair.check_counts("backward", all_gather=again, reduce_scatter=units)
        pair.check_bytes()


@contract("RECOMPUTATION-2")
@COUNTS
@needs(Capability.EXPLICIT_PREFETCH)
@pytest.mark.parametrize("means", ["hooks", "call", "wrapper"])
def test_recomputed_units_gather_nothing_ahead(rank: Rank, means: Means) -> None:
    """A unit's forward prefetches are not gathered again when backward recomputes the unit."""
    pair, computations = make(rank, means)
    pair.adapter.prefetch(forward={"layers.0": ["layers.1"], "layers.1": ["layers.2"]}, backward={})
    units = len(pair.units)
    for step in range(2):
        train(rank, pair, computations, step)
        pair.check_counts("forward", all_gather=units)
        pair.check_counts("backward", all_gather=units - 1, reduce_scatter=units)


@contract("RECOMPUTATION-2")
@COUNTS
@needs(Capability.ALL_GATHER_ORDER)
@MEANS
def test_the_same_order(rank: Rank, means: Means) -> None:
    """Backward gathers and reduces in the order that it has without recomputation, units ahead of their use."""
    model = models.Tower(dim=9)
    prepares = (None, lambda plain: recompute(plain, means))
    runs = [run_by_units(rank, models.copy_of(model), prepare=one) for one in prepares]
    batch = rank.batch(0, (4, 9)).requires_grad_()
    for _ in range(2):
        orders = []
        for run in runs:
            before = len(run.trace)
            run.forward_backward((batch,), loss=models.mean_square)
            orders.append([f"{item.kind} of {item.unit}" for item in run.trace[before:] if item.phase == "backward"])
        assert orders[0] == orders[1], f"backward without recomputation: {orders[0]}; with: {orders[1]}"


@contract("RECOMPUTATION-1", "RECOMPUTATION-2")
@world(4)
@COUNTS
@needs(Capability.RESHARD_TO_SIZE, Capability.ROOT_RESHARD)
@MEANS
def test_recomputed_from_smaller_shards(rank: Rank, means: Means) -> None:
    """Units that are resharded to two of four ranks are gathered once among the two for recomputation and backward."""
    pair, computations = make(rank, means, reshard_after_forward=2)
    units = len(pair.units)
    for step in range(2):
        train(rank, pair, computations, step)
        pair.check_counts("backward", all_gather=units, reduce_scatter=units)
        groups = [item.group for item in pair.last_trace() if (item.phase, item.kind) == ("backward", "all_gather")]
        assert set(map(len, groups)) == {2}, f"gathered in backward among the ranks {groups}"


@contract("RECOMPUTATION-4")
@pytest.mark.parametrize("span", [*SPANS.args[1], "part-of-a-layer-reentrant"])
def test_recomputed_spans(rank: Rank, span: Span) -> None:
    """Several units that are recomputed together, and parts of units, train as DDP does without recomputation."""
    pair = make_spans(rank, span)
    # User code may call backward itself where the implementation allows it, unless its own call scales the loss.
    calls = Capability.AUTOGRAD_CALLS in rank.implementation.capabilities()
    if span.endswith("reentrant") and calls and not pair.adapter.traits.sums_over_ranks:
        rank.monkeypatch.setattr(pair.adapter, "backward", torch.Tensor.backward)
    train_and_check(pair, batches(rank, 3, (4, 9)), set_to_none="even")


@contract("RECOMPUTATION-4")
@needs(Capability.DEFERRED_REDUCTION)
@subjects("span", ["two-layers", "to-the-end"])
def test_recomputed_spans_of_microbatches(rank: Rank, span: Span) -> None:
    """Units that are recomputed, together or to their ends, train as DDP does with sums over unreduced microbatches."""
    pair = make_spans(rank, span, microbatches=2, accumulation=Accumulation())
    train_and_check(pair, batches(rank, 2, (4, 9), microbatches=2))


@contract("RECOMPUTATION-2", "RECOMPUTATION-4")
@COUNTS
@SPANS
@pytest.mark.parametrize("reshard_after_forward", RESHARD_ROOT[:3])
@AHEAD
def test_one_gather_serves_a_span(
    rank: Rank, ahead: bool | None, reshard_after_forward: bool | None, span: Span
) -> None:
    """Recomputing units together, or parts of units, adds no gather either, also where forward gathers ahead."""
    pair = make_spans(rank, span, reshard_after_forward=reshard_after_forward, forward_prefetch=ahead)
    again = {None: 3, False: 0}.get(reshard_after_forward, 4)
    for _ in checked_steps(pair, batches(rank, 2, (4, 9))):
        pair.check_counts("backward", all_gather=again, reduce_scatter=4)


@contract("RECOMPUTATION-2", "RECOMPUTATION-4")
@COUNTS
@pytest.mark.parametrize("span", ["two-layers", "two-layers-reentrant"])
@pytest.mark.parametrize(
    "ahead", [pytest.param(None, marks=needs(Capability.ALL_GATHER_ORDER)), pytest.param("BACKWARD_PRE", marks=CHOOSES)]
)
def test_the_unit_before_a_span_is_gathered_ahead(rank: Rank, ahead: Any, span: Span) -> None:
    """The unit that backward reaches after a span is gathered before the span's first unit is reduced, each step."""
    pair = make_spans(rank, span, backward_prefetch=ahead)
    for step in checked_steps(pair, batches(rank, 3, (4, 9))):
        order = [(item.kind, item.unit) for item in pair.last_trace() if item.phase == "backward"]
        gathered, reduced = order.index(("all_gather", "layers.0")), order.index(("reduce_scatter", "layers.1"))
        assert gathered < reduced, f"layers.0 is gathered late in the backward of {step_label(step)}: {order}"


@contract("RECOMPUTATION-4")
@needs(Capability.UNUSED_OUTPUT)
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_span_that_ends_within_a_unit(rank: Rank, reshard_after_forward: bool | None) -> None:
    """A recomputation may end early within a unit without gradient: it is freed, and runs normally in later steps.

    Gradients are zeroed, so that momentum moves the unit in a step that does not use it.
    """
    seen: list[dict[str, int]] = []
    census: Census
    pair = rank.pair(
        SpanBesideAHead(9), units=[["side"]], baseline="replicated", find_unused_parameters=True,
        reshard_after_forward=reshard_after_forward, after_backward=lambda adapter: seen.append(census.held()),
    )  # fmt: skip
    census = Census(pair.sharded)
    for step, loss in enumerate([models.both_heads, models.first_head] * 2):
        pair.checked_step(rank.batch(step, (4, 9)), loss=loss, set_to_none=False)
    if rank.device.type == "cpu" and Capability.SHARDED in rank.implementation.capabilities():
        assert seen == [{}] * 4, f"when backward has ended, units are gathered (bytes): {seen}"


@contract("RECOMPUTATION-5")
@needs(Capability.MULTIPLE_FORWARD)
@subjects(
    "means",
    # DistributedDataParallel refuses parameters that two re-entrant backwards use, as it documents.
    ["call", "hooks", pytest.param("reentrant-call", marks=needs(Capability.SHARDED))],
)
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_recomputed_unit_runs_twice(rank: Rank, reshard_after_forward: bool | None, means: Means) -> None:
    """A unit that runs twice in a forward is gathered for both recomputations, and sums both contributions.

    The caller recomputes more than the unit, so that the second recomputation finds the unit freed.
    """
    computations = Computations(inside="in_proj")
    pair = make_watched(
        rank, ties.RepeatedTower(dim=9), computations, means, reshard_after_forward=reshard_after_forward
    )
    for step in range(3):
        batch = rank.batch(step, (4, 9)).requires_grad_()  # else the re-entrant function computes no gradients
        pair.step(batch, before_loss=computations.before_loss, set_to_none=step % 2 == 0)
        computations.check(times=2)
        pair.check()


def make(rank: Rank, means: Means, **options: Any) -> tuple[Pair, Computations]:
    """A transformer whose layers are units that are recomputed by ``means``, tied where the implementation can."""
    computations = Computations(inside="w1")
    config = dataclasses.replace(CONFIG, is_tied=Capability.TIED_PARAMETERS in rank.implementation.capabilities())
    return make_watched(rank, models.Transformer(config), computations, means, **options), computations


def make_watched(rank: Rank, model: Any, computations: Computations, means: Means, **options: Any) -> Pair:
    """A model whose units are recomputed by ``means``, and each computation counted."""
    return pair_by_units(rank, model, prepare=lambda plain: recompute(computations.watch(plain), means), **options)


def make_spans(rank: Rank, span: Span, **options: Any) -> Pair:
    """A tower of units in which ``span`` is recomputed."""
    return pair_by_units(rank, SpanTower(dim=9), prepare=lambda plain: recompute_span(plain, span), **options)


def train(rank: Rank, pair: Pair, computations: Computations, step: int) -> None:
    """One step, compared; each layer must have computed twice."""
    tokens = rank.tokens(step, (3, CONFIG.length), vocabulary=CONFIG.vocabulary)
    pair.step(tokens, before_loss=computations.before_loss, set_to_none=step % 2 == 0)
    computations.check()
    pair.check()
