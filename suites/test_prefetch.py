"""Chapter PREFETCH: units that gather others ahead, as user code has set them."""

import itertools
from typing import Any, cast

import pytest
import torch

from shardproof.testing import Capability, Pair, Rank, Run, contract, models, needs, world
from shardproof.testing.axes import RESHARD, subjects
from shardproof.testing.compare import step_label
from shardproof.testing.make import pair_by_units, run_by_units
from shardproof.testing.measure import Census
from shardproof.testing.train import batches, checked_steps, ties, tokens, train_and_check

pytestmark = world(2)

AHEAD = 2


def two_ahead(depth: int) -> dict[str, dict[str, list[str]]]:
    """Each layer gathers the two that follow it, in the order in which each direction runs."""
    layers = [f"layers.{index}" for index in range(depth)]
    forward = {layers[i]: layers[i + 1 : i + 1 + AHEAD] for i in range(depth - AHEAD)}
    backward = {layers[i]: layers[i - AHEAD : i][::-1] for i in range(AHEAD, depth)}
    return {"forward": forward, "backward": backward}


@contract("PREFETCH-1")
@world(2, 4)
@needs(Capability.EXPLICIT_PREFETCH)
@pytest.mark.parametrize("is_tied", [False, pytest.param(True, marks=needs(Capability.TIED_PARAMETERS))])
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_training(rank: Rank, reshard_after_forward: bool | int | None, is_tied: bool) -> None:
    """A transformer of eight layers that gather two ahead trains as DDP does."""
    config = models.TransformerConfig(layers=8, is_tied=is_tied)
    pair = pair_by_units(rank, models.Transformer(config), reshard_after_forward=reshard_after_forward)
    pair.adapter.prefetch(**two_ahead(config.layers))
    train_and_check(pair, tokens(rank, 3, (2, config.length), vocabulary=config.vocabulary), set_to_none="even")


@contract("PREFETCH-1")
@world(2, 4)
@needs(Capability.EXPLICIT_PREFETCH)
def test_more_is_gathered_before_a_layer_computes(rank: Rank) -> None:
    """With prefetching, each layer computes after more collectives than without, in forward and in backward."""
    depth = 5
    model = models.Tower(dim=9, depth=depth)
    found: dict[bool, dict[str, list[int]]] = {}
    for prefetches in (False, True):
        run = rank.run(models.copy_of(model), units=model.units())
        if prefetches:
            run.adapter.prefetch(**two_ahead(depth))
        found[prefetches] = _collectives_before(run, depth)
        run.forward_backward((rank.batch(0, (4, 9)),), loss=models.mean_square)
    # The last layers of each direction have nothing more to gather.
    for phase, layers in (("forward", range(depth - 1)), ("backward", range(AHEAD, depth))):
        for layer in layers:
            without, ahead = found[False][phase][layer], found[True][phase][layer]
            assert ahead > without, (
                f"layers.{layer} computes in {phase} after {ahead} collectives with prefetching and {without} without"
            )


@contract("PREFETCH-2")
@needs(Capability.EXPLICIT_PREFETCH, Capability.COUNTED_UNITS)
def test_clearing_prefetch_restores_the_default(rank: Rank) -> None:
    """Units whose prefetch setting user code removes gather as if it had never been set."""
    depth = 5
    model = models.Tower(dim=9, depth=depth)
    traces: list[str] = []
    before: list[dict[str, list[int]]] = []
    for names in (False, True):
        run = rank.run(models.copy_of(model), units=model.units())
        if names:
            run.adapter.prefetch(**two_ahead(depth))
            nothing: dict[str, list[str]] = {f"layers.{index}": [] for index in range(depth)}
            run.adapter.prefetch(forward=nothing, backward=nothing)
        before.append(_collectives_before(run, depth))
        run.forward_backward((rank.batch(0, (4, 9)),), loss=models.mean_square)
        traces.append(run.trace.render())
    assert traces[1] == traces[0], f"with the lists taken back:\n{traces[1]}\nwithout any:\n{traces[0]}"
    assert before[1] == before[0], f"gathers before each layer, with lists taken back and without any: {before[::-1]}"


def _collectives_before(run: Run, depth: int) -> dict[str, list[int]]:
    """Return a dict, filled while the run trains: by phase and layer, the collectives before the layer computes."""
    found = {"forward": [0] * depth, "backward": [0] * depth}

    def note(phase: str, layer: int) -> None:
        found[phase][layer] = sum(item.phase == phase and item.kind == "all_gather" for item in run.trace)

    def watch(layer: int) -> None:
        first, last = (run.adapter.submodule(f"layers.{layer}.{name}") for name in ("in_proj", "out_proj"))
        first.register_forward_pre_hook(lambda module, args: note("forward", layer))
        last.register_forward_hook(
            lambda module, args, output: output.register_hook(lambda gradient: note("backward", layer)) and None
        )

    for layer in range(depth):
        watch(layer)
    return found


@contract("PREFETCH-2")
@needs(Capability.EXPLICIT_PREFETCH, Capability.COUNTED_UNITS, Capability.ALL_GATHER_ORDER, Capability.ROOT_RESHARD)
def test_order(rank: Rank) -> None:
    """A unit gathers itself, unless another has, and then, before it computes, the units that it is set to prefetch.

    In an evaluation as well. In forward the order of the gathers is the same without prefetching, but each comes before
    another unit computes.
    """
    depth = 5
    layers = [f"layers.{index}" for index in range(depth)]
    pair = pair_by_units(rank, models.Tower(dim=9, depth=depth), reshard_after_forward=True)
    pair.adapter.prefetch(**two_ahead(depth))
    units = ["(root)", *layers]
    gathered: list[list[str]] = []
    trace, begins = pair.sharded.trace, [0]

    def note(module: torch.nn.Module, args: Any) -> None:
        gathered.append([item.unit for item in trace[begins[-1] :] if item.kind == "all_gather"])

    for name in layers:
        pair.adapter.submodule(f"{name}.in_proj").register_forward_pre_hook(note)
    for step in range(2):
        for run, what in ((pair.evaluate, "the evaluation before "), (pair.step, "")):
            gathered.clear()
            begins.append(len(trace))
            run(rank.batch(step, (4, 9)))
            for index, found in enumerate(gathered):
                # The root, the layers up to this one, and two ahead.
                expected = units[: 1 + index + 1 + AHEAD]
                missing = [unit for unit in expected if unit not in found]
                where = f"layers.{index} computes in {what}{step_label(step)}"
                assert not missing, f"{where} before these are gathered: {', '.join(missing)}"
                assert found == expected, f"{where} after other units are gathered than should be"
            assert len(gathered) == depth
        pair.check()
    rank.expect(
        pair.last_trace().render(),
        """\
forward   all_gather      float32      400 B  ranks 0-1  (root)
forward   all_gather      float32     1480 B  ranks 0-1  layers.0
forward   all_gather      float32     2240 B  ranks 0-1  layers.1
forward   all_gather      float32     2920 B  ranks 0-1  layers.2
forward   all_gather      float32     3680 B  ranks 0-1  layers.3
forward   all_gather      float32     4360 B  ranks 0-1  layers.4
backward  all_gather      float32      400 B  ranks 0-1  (root)
backward  all_gather      float32     4360 B  ranks 0-1  layers.4
backward  all_gather      float32     3680 B  ranks 0-1  layers.3
backward  all_gather      float32     2920 B  ranks 0-1  layers.2
backward  reduce_scatter  float32     4360 B  ranks 0-1  layers.4
backward  all_gather      float32     2240 B  ranks 0-1  layers.1
backward  reduce_scatter  float32     3680 B  ranks 0-1  layers.3
backward  all_gather      float32     1480 B  ranks 0-1  layers.0
backward  reduce_scatter  float32     2920 B  ranks 0-1  layers.2
backward  reduce_scatter  float32     2240 B  ranks 0-1  layers.1
backward  reduce_scatter  float32      400 B  ranks 0-1  (root)
backward  reduce_scatter  float32     1480 B  ranks 0-1  layers.0
""",
    )


@contract("PREFETCH-1")
@needs(Capability.EXPLICIT_PREFETCH, Capability.UNUSED_OUTPUT, Capability.REGISTERED_STATE)
def test_unused_prefetched_unit_is_resharded(rank: Rank) -> None:
    """A unit that backward gathers ahead and does not reach is freed at its end, and gathered by the next forward."""
    seen: list[dict[str, int]] = []
    census: Census
    pair = rank.pair(
        models.TwoHeads(dim=25), units=[["head0"], ["head1"]], baseline="replicated", find_unused_parameters=True,
        after_backward=lambda adapter: seen.append(census.held()), microbatches=2,
    )  # fmt: skip
    census = Census(pair.sharded)
    pair.adapter.prefetch(forward={}, backward={"": ["head1"], "head0": ["head1"]})
    for _ in checked_steps(pair, batches(rank, 2, (2, 25), microbatches=2), loss=models.first_head):
        found = [pair.last_trace().counts(phase)["all_gather"] for phase in ("forward", "backward")]
        # Each backward uses one of the two units, and gathers the other ahead.
        assert found == [4, 4], f"the gathers of forwards and of backwards are {found}"
    assert rank.device.type != "cpu" or seen == [{}, {}], f"when backward has ended, units are gathered: {seen}"


@contract("PREFETCH-2")
@needs(Capability.EXPLICIT_PREFETCH, Capability.COUNTED_UNITS, Capability.RESHARD_AFTER_FORWARD)
def test_a_unit_without_parameters(rank: Rank) -> None:
    """A unit without parameters gathers others ahead like any other; prefetching such a unit gathers nothing."""
    model = torch.nn.Sequential(torch.nn.Linear(9, 12), torch.nn.Tanh(), torch.nn.Linear(12, 7))
    pair = rank.pair(model, units=[["0"], ["1"], ["2"]], reshard_after_forward=True)
    pair.adapter.prefetch(forward={"0": ["1"], "1": ["2"]}, backward={"2": ["1"], "1": ["0"]})
    found: list[list[str]] = []

    def note(*_: Any) -> None:
        found.append([item.unit for item in pair.last_trace() if item.kind == "all_gather"])

    def watch(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        note()
        output.register_hook(note)

    pair.adapter.submodule("1").register_forward_hook(watch)
    for step in range(2):
        found.clear()
        pair.checked_step(rank.batch(step, (4, 9)))
        expected = [["0", "2"], ["0", "2", "2", "0"]]
        assert found == expected, f"in forward and backward of a unit without parameters {found} are gathered"


@contract("PREFETCH-2")
@needs(Capability.EXPLICIT_PREFETCH, Capability.COUNTED_UNITS, Capability.GROUPED_UNIT)
@needs(Capability.RESHARD_AFTER_FORWARD, Capability.ROOT_RESHARD)
def test_a_unit_of_several_modules(rank: Rank) -> None:
    """A unit of several modules gathers others ahead before the first of its modules, and not units that have run."""
    model = models.Tower(dim=9, depth=3)
    pair = rank.pair(model, units=[["layers.0", "layers.2"], ["layers.1"]], reshard_after_forward=True)
    pair.adapter.prefetch(forward={"layers.0": ["layers.1"]}, backward={})
    for _ in checked_steps(pair, batches(rank, 2, (4, 9))):
        pair.check_counts("forward", all_gather=3)
        pair.check_counts("backward", all_gather=3, reduce_scatter=3)


CHOICES = ["BACKWARD_PRE", "BACKWARD_POST", "none"]


class RepeatingTower(models.Tower):
    """A :class:`Tower` that runs its third layer twice in a row. Input and output: (..., dim)."""

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        """Call the layers on each other's output."""
        first, second, third, fourth = self.layers
        return cast(torch.Tensor, fourth(third(third(second(first(x))))))


class EarlyExit(models.Tower):
    """A :class:`Tower` that runs two layers only where nothing is trained. Input and output: (..., dim)."""

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        """Call the layers on each other's output."""
        for layer in self.layers if torch.is_grad_enabled() else [*self.layers][:2]:
            x = layer(x)
        return x


@contract("PREFETCH-3")
@needs(Capability.BACKWARD_PREFETCH, Capability.COUNTED_UNITS, Capability.RESHARD_AFTER_FORWARD)
@subjects("when", CHOICES)
def test_when_backward_gathers_ahead(rank: Rank, when: Any) -> None:
    """Backward gathers the next unit before the current one computes, after it and before its reduction, or never.

    So it does for a unit that runs twice in a row: the next one is that before its first run.
    """
    pair = pair_by_units(rank, RepeatingTower(dim=9, depth=4), reshard_after_forward=True, backward_prefetch=when)
    layers = [f"layers.{index}" for index in reversed(range(4))]
    found: dict[str, list[str]] = {}
    for name in layers:
        _watch_backward(pair, name, found)
    for _ in checked_steps(pair, batches(rank, 2, (4, 9))):
        for number, name in enumerate(layers):
            expected = layers[: number + (2 if when == "BACKWARD_PRE" else 1)]
            assert found[name] == expected, f"{name} computes its gradients when {found[name]} are gathered"
        order = [(item.kind, item.unit) for item in pair.last_trace() if item.phase == "backward"]
        for name, following in itertools.pairwise(layers):
            ahead = order.index(("all_gather", following)) < order.index(("reduce_scatter", name))
            assert ahead == (when != "none"), f"{following} is gathered before {name} is reduced: {ahead}"


@contract("PREFETCH-3")
@needs(Capability.BACKWARD_PREFETCH, Capability.COUNTED_UNITS, Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize("ahead", [False, True])
def test_forward_gathers_ahead(rank: Rank, ahead: bool) -> None:
    """If set, each unit gathers its successor of the first forward before it computes, from the second forward on.

    After an evaluation that gathers a unit in vain, the unit trains as the others do.
    """
    options: dict[str, Any] = {"forward_prefetch": ahead, "limit_all_gathers": not ahead}
    pair = pair_by_units(rank, EarlyExit(dim=9, depth=4), reshard_after_forward=True, **options)
    layers = [f"layers.{index}" for index in range(4)]
    units = ["(root)", *layers]
    found: list[list[str]] = []
    for name in layers:
        pair.adapter.submodule(f"{name}.in_proj").register_forward_pre_hook(
            lambda module, args: found.append([item.unit for item in pair.last_trace() if item.kind == "all_gather"])
        )
    for step in range(3):
        found.clear()
        pair.checked_step(rank.batch(step, (4, 9)))
        for index, gathered in enumerate(found):
            expected = units[: index + 2 + (ahead and step > 0)]
            assert gathered == expected, f"layers.{index} computes in {step_label(step)} when {gathered} are gathered"
    pair.evaluate(rank.batch(3, (2, 9)), mode="inference_mode")
    pair.checked_step(rank.batch(3, (4, 9)))


@contract("PREFETCH-3")
@needs(Capability.BACKWARD_PREFETCH, Capability.COUNTED_UNITS, Capability.RESHARD_AFTER_FORWARD)
def test_evaluations_gather_ahead(rank: Rank) -> None:
    """Evaluations gather ahead as forwards do, also if one of them is the first forward of all."""
    model, layers = models.Tower(dim=9, depth=4), [f"layers.{index}" for index in range(4)]
    run = run_by_units(rank, model, reshard_after_forward=True, forward_prefetch=True)
    found: list[list[str]] = []
    begin = 0
    for name in layers:
        run.adapter.submodule(f"{name}.in_proj").register_forward_pre_hook(
            lambda module, args: found.append([item.unit for item in run.trace[begin:] if item.unit in layers])
        )
    for number in range(3):
        found.clear()
        begin = len(run.trace)
        run.evaluate((rank.batch(number, (2, 9)),))
        for index, gathered in enumerate(found):
            expected = layers[: index + 1 + (number > 0)]
            assert gathered == expected, f"{layers[index]} computes in evaluation {number} when {gathered} are gathered"


@contract("PREFETCH-3")
@world(4)
@needs(Capability.BACKWARD_PREFETCH, Capability.RESHARD_AFTER_FORWARD, Capability.HYBRID)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("replicas", [0, 2, pytest.param(4, marks=needs(Capability.SINGLE_RANK))])
@pytest.mark.parametrize("when", CHOICES)
def test_units_that_run_twice(rank: Rank, when: Any, replicas: int, reshard_after_forward: bool) -> None:
    """Units that run twice train as DDP does with any prefetch setting, on replicas and with bounded gathers."""
    mesh, ahead = None, replicas > 0
    if ahead:
        mesh = rank.mesh((replicas, 4 // replicas), ("replicate", "shard"))
    options: dict[str, Any] = {"forward_prefetch": ahead, "limit_all_gathers": ahead == reshard_after_forward}
    options |= {"mesh": mesh, "reshard_after_forward": reshard_after_forward, "backward_prefetch": when}
    pair = pair_by_units(rank, ties.RepeatedTower(9), **options)
    train_and_check(pair, batches(rank, 3, (4, 9)))


def _watch_backward(pair: Pair, name: str, found: dict[str, list[str]]) -> None:
    """Note the layers that backward has gathered when a layer computes its gradients."""

    def note(gradient: torch.Tensor) -> None:
        trace = [item for item in pair.last_trace() if (item.phase, item.kind) == ("backward", "all_gather")]
        found[name] = [item.unit for item in trace if item.unit.startswith("layers.")]

    pair.adapter.submodule(f"{name}.in_proj").register_forward_hook(
        lambda module, args, output: output.register_hook(note) and None
    )
