"""Chapter ORDER: ranks that run units in different orders report it before they exchange wrong parameters."""

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn

from shardproof.testing import Capability, Pair, Rank, Run, contract, models, needs, world
from shardproof.testing.axes import RESHARD, subjects
from shardproof.testing.make import tower
from shardproof.testing.train import batches, checked_steps

Layer = Literal["", "optional", "exit"]


class OptionalUnits(nn.Module):
    """Linear(dim, 8), then two layers without bias: ``optional`` and ``exit``, of which ``skipped`` may name one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.entry = nn.Linear(dim, 8)
        self.optional = nn.Linear(8, 8, bias=False)
        self.exit = nn.Linear(8, 4, bias=False)
        self.skipped: Layer = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.entry(x))
        for name in ("optional", "exit"):
            if self.skipped != name:
                hidden = torch.tanh(self.get_submodule(name)(hidden))
        return hidden


class TwoPaths(nn.Module):
    """Linear(dim, 8), then either ``first`` or ``second``.

    Both paths have 64 elements, so that a collective of one has the size of a collective of the other. The model starts
    on ``first`` with ``second`` frozen; :meth:`flip` switches the path. Input: (batch, dim). Output: (batch, 8).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.entry = nn.Linear(dim, 8)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Tanh(), nn.Linear(4, 8, bias=False))
        self.takes_second = False
        self.second.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        path = self.second if self.takes_second else self.first
        return torch.tanh(path(torch.tanh(self.entry(x))))

    def flip(self) -> None:
        """Switch to the other path: unfreeze it, and freeze the path that was in use."""
        self.first.requires_grad_(self.takes_second)
        self.takes_second = not self.takes_second
        self.second.requires_grad_(self.takes_second)


pytestmark = [needs(Capability.ORDER_VALIDATION), world(2, debug_level="DETAIL")]

DIM = 5
UNITS = [["first"], ["second"]]
OPTIONAL = [["optional"], ["exit"]]
STRATEGIES = pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
PARAMETERS = pytest.mark.parametrize(
    "flat_parameters",
    [pytest.param(False, id="original"), pytest.param(True, id="flat", marks=needs("flat_parameters"))],
)

DEPARTURE = "Forward order differs"
ACROSS_RANKS = f"^{DEPARTURE} across ranks"
UNCHECKED = r"\. Collectives are unchecked and may give incorrect results or hang\.?\n"
MOST_EXTRA = 3
"""Collectives that comparing may cost a unit, in the first iteration."""
SMALL = 512
"""Bytes, for each rank, of a collective that compares: names or numbers of units, never parameters."""


@contract("ORDER-1")
@world(2, 4, debug_level="DETAIL")
@STRATEGIES
@PARAMETERS
def test_ranks_differ_in_the_first_iteration(
    rank: Rank, flat_parameters: bool, reshard_after_forward: bool | None
) -> None:
    """The forward of every rank raises, with the names of both units, before either is gathered.

    All ranks raise or none: the comparison is a collective of all ranks, and a rank that went on alone would wait for
    the others in a gather. An implementation without the comparison gathers one path for the other, of equal size, and
    fails here without hanging.
    """
    model = TwoPaths(dim=DIM)
    run = rank.run(model, units=UNITS, reshard_after_forward=reshard_after_forward, flat_parameters=flat_parameters)
    differ(rank, model)
    with pytest.raises(RuntimeError, match=ACROSS_RANKS) as caught, run.recorder.during("forward"):
        run.adapter.forward(rank.batch(0, (8, DIM)))
    text = str(caught.value)
    assert re.search(r"\brank 0\b.*\bfirst\.weight\b.*\brank \d\b.*\bsecond\.0\.weight\b.*\bsecond\.2\.weight\b", text)
    gathered = [str(item) for item in run.trace if item.kind == "all_gather" and "first" in item.unit]
    assert not gathered, f"gathered although the ranks differ: {gathered}"


@contract("ORDER-1")
@PARAMETERS
@needs(Capability.NO_SHARD)
def test_ranks_that_shard_nothing_differ(rank: Rank, flat_parameters: bool) -> None:
    """Ranks with full parameters, which would reduce the gradients of different units, all raise in forward."""
    model = TwoPaths(dim=DIM)
    run = rank.run(model, units=UNITS, shards=False, flat_parameters=flat_parameters)
    differ(rank, model)
    raised_by(run, rank.batch(0, (8, DIM)))


@contract("ORDER-1")
@world(4, debug_level="DETAIL")
@PARAMETERS
def test_ranks_of_a_part_of_the_world_differ(rank: Rank, flat_parameters: bool) -> None:
    """If half of the ranks train one model and half another, the error names ranks by their numbers in the world."""
    model, mesh = TwoPaths(dim=DIM), rank.mesh((2, 2), ("models", "dp"))["dp"]
    run = rank.run(model, units=UNITS, mesh=mesh, flat_parameters=flat_parameters)
    rank.expect_different_collectives()
    if rank.index % 2:
        model.flip()
    text = raised_by(run, rank.batch(0, (8, DIM)))
    first, second = mesh.mesh.tolist()
    names = rf"\brank {first}\b.*\bfirst\.weight\b.*\brank {second}\b.*\bsecond\.0\.weight\b"
    assert re.search(names, text), f"ranks {first} and {second} differ: {text}"


@contract("ORDER-1")
@world(4, debug_level="DETAIL")
@PARAMETERS
def test_models_of_parts_of_the_world_differ(rank: Rank, flat_parameters: bool) -> None:
    """If half of the ranks train one model and half another, each half may have an order of its own, and trains."""
    model, mesh = TwoPaths(dim=DIM), rank.mesh((2, 2), ("models", "dp"))["dp"]
    run = rank.run(model, units=UNITS, mesh=mesh, flat_parameters=flat_parameters)
    rank.expect_different_collectives()
    if rank.index // 2:
        model.flip()
    for step in range(2):
        run.forward_backward((rank.batch(step, (8, DIM)),), loss=models.mean_square)
    assert any(piece is not None for piece in run.adapter.gradients().values()), "no parameter has a gradient"


@contract("ORDER-1")
@PARAMETERS
def test_ranks_of_the_second_root_differ(rank: Rank, flat_parameters: bool) -> None:
    """Ranks that differ within the second of two sharded models of a plain module all raise in forward."""
    second = TwoPaths(dim=DIM)
    model, units = nn.Sequential(nn.Linear(DIM, DIM), second), [["0"], ["1.first"], ["1.second"], ["1"]]
    run = rank.run(model, units=units, plain_root=True, flat_parameters=flat_parameters)
    differ(rank, second)
    raised_by(run, rank.batch(0, (8, DIM)))


@contract("ORDER-5")
@world(2, 4, debug_level="DETAIL")
@PARAMETERS
@pytest.mark.parametrize("unit", ["optional", "exit"], ids=["in-between", "at-the-end"])
def test_a_rank_runs_fewer_units(rank: Rank, unit: Layer, flat_parameters: bool) -> None:
    """The forward of every rank raises, with the name of the unit that one rank leaves out, before it is gathered."""
    model = OptionalUnits(dim=DIM)
    run = rank.run(model, units=OPTIONAL, flat_parameters=flat_parameters)
    model.skipped = unit if rank.index == rank.world_size - 1 else ""
    text = raised_by(run, rank.batch(0, (8, DIM)))
    assert re.search(rf"\brank 0\b.*\b{unit}\.weight\b.*\brank \d\b", text), text
    assert "None" not in text, f"names parameters of a rank that gathers none: {text}"
    gathered = [str(item) for item in run.trace if unit in item.unit and item.dtype == "float32"]
    assert not gathered, f"gathered although the ranks differ: {gathered}"


@contract("ORDER-5")
@world(4, debug_level="DETAIL")
@needs("unit_meshes")
def test_ranks_of_one_unit_differ(rank: Rank) -> None:
    """Every forward raises where only the omitted unit is sharded over all ranks, and the others over halves."""
    model, mesh = OptionalUnits(dim=DIM), rank.mesh((2, 2), ("models", "dp"))["dp"]
    run = rank.run(model, units=OPTIONAL, mesh=mesh, unit_meshes={"exit": rank.mesh()})
    model.skipped = "exit" if rank.index >= 2 else ""
    text = raised_by(run, rank.batch(0, (8, DIM)))
    assert re.search(r"\brank 0\b.*\bexit\.weight\b.*\brank 2\b", text), text


@contract("ORDER-2")
@world(2, 4, debug_level="DETAIL")
@STRATEGIES
@PARAMETERS
@pytest.mark.parametrize("before", [1, 3])
def test_a_later_iteration_differs(
    rank: Rank, before: int, flat_parameters: bool, reshard_after_forward: bool | None
) -> None:
    """Ranks that leave the order of their first iteration warn once; the others and later iterations do not.

    Ranks no longer compare, and both paths have collectives of the same sizes, so that no rank is left
    waiting for another.
    """
    pair, model = make(rank, reshard_after_forward=reshard_after_forward, flat_parameters=flat_parameters)
    run = pair.sharded
    rank.expect_different_collectives()

    def depart(step: int) -> None:
        output = run.adapter.forward(rank.batch(step, (8, DIM)))
        # A warning counts only if it comes before the backward.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.adapter.backward(models.mean_square(output))

    for step in range(before):
        check_silent(rank, departures(functools.partial(step_and_check, rank, pair, frozen="second"), step))
    if rank.index:
        model.flip()
    # All ranks check the warnings of all, so that they fail together.
    on_rank_0, *on_others = rank.exchange(departures(depart, before))
    assert not on_rank_0, f"rank 0 keeps to its order: {on_rank_0}"
    for number, found in enumerate(on_others, start=1):
        assert len(found) == 1, f"the forward on rank {number} should have given one warning: {found}"
        text = checked(found[0], number)
        assert text.endswith(
            "Expected to all-gather for [['first.weight']] but trying to all-gather parameters for "
            "[['second.0.weight', 'second.2.weight']]"
        ), text
    check_frozen(run, "first" if rank.index else "second")
    check_silent(rank, departures(depart, before + 1))


@contract("ORDER-6")
@PARAMETERS
@subjects(
    ("first", "later", "warning"),
    [
        pytest.param("optional", "", "but trying to all-gather parameters for [['optional.weight']]", id="more"),
        pytest.param(
            "exit", "", "Expected to not all-gather any more parameters in the forward but trying", id="goes-on"
        ),
        pytest.param("", "optional", "Expected to all-gather for [['optional.weight']] but", id="fewer"),
        pytest.param(
            "", "exit", "Expected to all-gather for [['exit.weight']] but ending the forward", id="ends-early"
        ),
    ],
)
def test_later_iterations_run_other_units(
    rank: Rank, first: Layer, later: Layer, warning: str, flat_parameters: bool
) -> None:
    """If all ranks run a unit more, or less, than in the first iteration, that forward warns, and training goes on."""
    model = OptionalUnits(dim=DIM)
    model.skipped = first
    pair = rank.pair(model, units=OPTIONAL, baseline="replicated", flat_parameters=flat_parameters)
    everyone: list[Any] = [model, pair.baseline.adapter.module, pair.oracle.model]
    train = functools.partial(step_and_check, rank, pair)
    check_silent(rank, departures(train, 0))
    for one in everyone:
        one.skipped = later
    for number, found in enumerate(rank.exchange(departures(train, 1))):
        assert found, f"rank {number} should have been warned"
        text = checked(found[0], number)
        assert warning in text, text
    check_silent(rank, departures(train, 2))


@contract("ORDER-2")
@needs(Capability.RECOVERY)
@PARAMETERS
@pytest.mark.parametrize("cause", ["input", "order"])
def test_first_forward_that_raises(rank: Rank, cause: str, flat_parameters: bool) -> None:
    """Later iterations are compared with the first complete one, not with a forward that ended in an exception.

    The exception comes from an input of another size, or from the comparison: one rank ends before the others.
    """
    model = OptionalUnits(dim=DIM)
    pair = rank.pair(model, units=OPTIONAL, baseline="replicated", flat_parameters=flat_parameters)
    model.skipped = "exit" if cause == "order" and rank.index else ""
    with pytest.raises(RuntimeError), pair.sharded.recorder.during("failed"):
        pair.adapter.forward(rank.batch(0, (8, DIM + (cause == "input"))))
    model.skipped = ""
    pair.adapter.recover()
    for step in range(3):
        check_silent(rank, departures(functools.partial(step_and_check, rank, pair), step))


@contract("ORDER-3")
@world(2, 4, debug_level="DETAIL")
@STRATEGIES
@PARAMETERS
def test_evaluation_is_not_compared(rank: Rank, flat_parameters: bool, reshard_after_forward: bool | None) -> None:
    """Forwards in eval mode, on either path, neither warn nor count as an iteration, nor change the training."""
    pair, model = make(rank, reshard_after_forward=reshard_after_forward, flat_parameters=flat_parameters)
    adapter = pair.adapter

    def epoch(number: int) -> None:
        adapter.module.eval()
        for step in range(2):
            model.takes_second = step == 1
            adapter.forward(rank.batch(step, (8, DIM)))
        model.takes_second = False
        adapter.module.train()
        for step in range(2):
            step_and_check(rank, pair, 2 * number + step, frozen="second")

    for number in range(2):
        check_silent(rank, departures(epoch, number))


@contract("ORDER-3")
@PARAMETERS
def test_forwards_without_gradients_are_not_compared(rank: Rank, flat_parameters: bool) -> None:
    """Forwards in training mode without gradients, as of a validation loss, neither warn nor count as an iteration."""
    pair, model = make(rank, reshard_after_forward=None, flat_parameters=flat_parameters)

    def epoch(number: int) -> None:
        for step in range(2):
            model.takes_second = step == 1
            pair.sharded.evaluate((rank.batch(step, (8, DIM)),))
        model.takes_second = False
        step_and_check(rank, pair, number)

    for number in range(3):
        check_silent(rank, departures(epoch, number))


@contract("ORDER-3")
@needs(Capability.NON_ROOT_FORWARD)
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_a_unit_by_itself_is_not_compared(rank: Rank, first: bool) -> None:
    """Forwards of one unit between those of the root neither warn nor count as an iteration."""
    pair = tower(rank, baseline="replicated")

    def alone(number: int) -> None:
        pair.sharded.forward_backward((rank.batch(number, (4, 9)),), loss=models.mean_square, submodule="layers.1")
        pair.adapter.zero_grad(set_to_none=True)

    def epoch(number: int) -> None:
        if number or first:
            alone(number)
        pair.checked_step(rank.batch(number, (4, 9)))
        alone(number)

    pair.sharded.evaluate((rank.batch(0, (4, 9)),))  # this makes it known as the root
    for number in range(3):
        check_silent(rank, departures(epoch, number))


@contract("ORDER-4")
@world(2, 4, debug_level="DETAIL")
@needs(Capability.COUNTED_UNITS)
@STRATEGIES
@PARAMETERS
def test_comparing_costs_only_the_first_iteration(
    rank: Rank, flat_parameters: bool, reshard_after_forward: bool
) -> None:
    """A few small collectives a unit in the first forward, none afterwards, and none in evaluation."""
    pair = tower(
        rank, baseline="replicated", flat_parameters=flat_parameters, reshard_after_forward=reshard_after_forward
    )
    for step in checked_steps(pair, batches(rank, 3, (4, 9))):
        extra = [item for item in pair.last_trace() if item.kind in ("all_gather", "all_reduce") and not item.unit]
        assert len(extra) <= (0 if step else MOST_EXTRA * len(pair.units)), list(map(str, extra))
        assert all(item.phase == "forward" and item.nbytes <= SMALL * rank.world_size for item in extra)
        counts = pair.last_trace().counts("forward")
        assert sum(counts.values()) == len(pair.units) + len(extra), counts


def differ(rank: Rank, model: TwoPaths) -> None:
    """Let all ranks but the first take the other path."""
    rank.expect_different_collectives()
    if rank.index:
        model.flip()


def make(rank: Rank, **options: bool | None) -> tuple[Pair, TwoPaths]:
    """A model whose ranks may take different paths, next to its baseline."""
    model = TwoPaths(dim=DIM)
    # DDP ends with a segmentation fault at this debug level, over gloo: findings/F015.py.
    pair = rank.pair(model, units=UNITS, baseline="replicated", **options)
    return pair, model


def step_and_check(rank: Rank, pair: Pair, number: int, *, frozen: str = "") -> None:
    """Make a step, after which the parameters of one path alone may have to be frozen, and compare it (collective)."""
    pair.step(rank.batch(number, (8, DIM)))
    if frozen:
        check_frozen(pair.sharded, frozen)
    pair.check()


def checked(warning: tuple[str, str], number: int) -> str:
    """Return the text of rank ``number``'s warning, after checking its category and its sentence."""
    category, text = warning
    assert category == "UserWarning", f"{category}: {text}"
    sentence = f"{DEPARTURE} from that of the first iteration on rank {number}{UNCHECKED}"
    assert re.match(sentence, text), f"does not begin with {sentence!r}: {text!r}"
    return text


def raised_by(run: Run, batch: Any) -> str:
    """Check and return the error of the forward; without one, run backward too, so that no other rank waits there."""
    text = ""
    try:
        with run.recorder.during("forward"):
            output = run.adapter.forward(batch)
    except RuntimeError as error:
        text = str(error)
    else:
        run.adapter.backward(models.mean_square(output))
    assert re.search(ACROSS_RANKS, text), f"raised: {text!r}"
    return text


def check_frozen(run: Run, path: str) -> None:
    """The parameters of one path, and no others, are frozen, whether gathered or sharded."""
    shown = {name: parameter.requires_grad for name, parameter in run.adapter.named_parameters().items()}
    wrong = {name: trains for name, trains in shown.items() if trains == name.startswith(path)}
    assert not wrong, f"requires_grad after backward, where only {path} is frozen: {wrong}"


def departures(function: Callable[[int], None], number: int) -> list[tuple[str, str]]:
    """The category and the text of each warning about the order that ``function(number)`` gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(number)
    found = [(one.category.__name__, str(one.message)) for one in caught]
    return [(category, text) for category, text in found if text.startswith(DEPARTURE)]


def check_silent(rank: Rank, found: list[tuple[str, str]]) -> None:
    """No rank was warned (collective)."""
    by_rank = dict(enumerate(rank.exchange(found)))
    assert not any(by_rank.values()), f"warned although the order is that of the first iteration: {by_rank}"
