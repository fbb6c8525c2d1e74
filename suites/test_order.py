"""Chapter ORDER: ranks that run their units in different orders are told, before anything is exchanged wrongly."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest

from shardproof.harness import Capability, contract, models, needs, world
from shardproof.harness.parity import Rank, Run
from shardproof.harness.plugin.axes import RESHARD

pytestmark = needs(Capability.ORDER_VALIDATION)

DIM = 5
UNITS = [["first"], ["second"]]
STRATEGIES = pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
PARAMETERS = pytest.mark.parametrize(
    "flat_parameters",
    [
        pytest.param(False, id="original"),
        pytest.param(True, id="flat", marks=needs(Capability.FLAT_PARAMETERS)),
    ],
)

DEPARTURE = "Forward order differs"
ACROSS_RANKS = f"^{DEPARTURE} across ranks"
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
    """Every rank raises, with the names of what two ranks run, before either is gathered.

    All of them or none: what compares is a collective of all ranks, and a rank that went on alone would wait for the
    others in a gather. An implementation that compares nothing gathers one path for the other, of equal size, and
    fails here without hanging.
    """
    run, model = make(rank, reshard_after_forward=reshard_after_forward, flat_parameters=flat_parameters)
    rank.expect_different_collectives()
    if rank.index:
        model.flip()
    with pytest.raises(RuntimeError, match=ACROSS_RANKS) as caught:
        run.forward_backward((rank.batch(0, (8, DIM)),), loss=models.mean_square)
    text = str(caught.value)
    assert re.search(r"\brank 0\b.*\bfirst\.weight\b.*\brank \d\b.*\bsecond\.0\.weight\b.*\bsecond\.2\.weight\b", text)
    gathered = [str(item) for item in run.trace if item.kind == "all_gather" and "first" in item.unit]
    assert not gathered, f"gathered although the ranks differ: {gathered}"


@contract("ORDER-2")
@world(2, 4, debug_level="DETAIL")
@STRATEGIES
@PARAMETERS
@pytest.mark.parametrize("before", [1, 3])
def test_a_later_iteration_differs(
    rank: Rank, before: int, flat_parameters: bool, reshard_after_forward: bool | None
) -> None:
    """Ranks that leave the order of their first iteration are warned once; the others and later iterations are not.

    Nothing is compared across ranks any more, and both paths have collectives of the same sizes, so that no rank is
    left waiting for another.
    """
    run, model = make(rank, reshard_after_forward=reshard_after_forward, flat_parameters=flat_parameters)
    rank.expect_different_collectives()

    def train(step: int) -> None:
        run.forward_backward((rank.batch(step, (8, DIM)),), loss=models.mean_square)

    for step in range(before):
        check_silent(rank, departures(train, step))
    if rank.index:
        model.flip()
    # All ranks judge the warnings of all, so that they fail together.
    on_rank_0, *on_others = rank.exchange(departures(train, before))
    assert not on_rank_0, f"rank 0 keeps to its order: {on_rank_0}"
    for number, found in enumerate(on_others, start=1):
        assert len(found) == 1, f"rank {number} should have been warned once: {found}"
        assert found[0].startswith(f"{DEPARTURE} from that of the first iteration on rank {number}. Collectives are ")
        assert re.search(r"\bfirst\.weight\b.*\bsecond\.0\.weight\b", found[0], flags=re.DOTALL), found[0]
    check_silent(rank, departures(train, before + 1))


@contract("ORDER-3")
@world(2, 4, debug_level="DETAIL")
@STRATEGIES
@PARAMETERS
def test_evaluation_is_not_compared(rank: Rank, flat_parameters: bool, reshard_after_forward: bool | None) -> None:
    """Forwards in eval mode, on either path, neither warn nor count as an iteration."""
    run, model = make(rank, reshard_after_forward=reshard_after_forward, flat_parameters=flat_parameters)

    def epoch(number: int) -> None:
        run.adapter.module.train()
        for step in range(3):
            run.forward_backward((rank.batch(3 * number + step, (8, DIM)),), loss=models.mean_square)
        run.adapter.module.eval()
        for step in range(3):
            model.takes_second = step == 1
            run.adapter.forward(rank.batch(step, (8, DIM)))
        model.takes_second = False

    for number in range(2):
        check_silent(rank, departures(epoch, number))


@contract("ORDER-4")
@world(2, 4, debug_level="DETAIL")
@needs(Capability.COUNTED_UNITS)
@STRATEGIES
@PARAMETERS
def test_comparing_costs_the_first_iteration_alone(
    rank: Rank, flat_parameters: bool, reshard_after_forward: bool
) -> None:
    """A few small collectives a unit in the first forward, none afterwards, and none in evaluation."""
    model = models.Tower(dim=9)
    # DDP ends with a segmentation fault at this debug level, over gloo: F-15 of docs/findings.md.
    pair = rank.pair(
        model, units=model.units(), baseline="replicated", flat_parameters=flat_parameters,
        reshard_after_forward=reshard_after_forward,
    )  # fmt: skip
    for step in range(3):
        pair.step(rank.batch(step, (4, 9)))
        pair.check()
        extra = [item for item in pair.last_trace() if item.kind in ("all_gather", "all_reduce") and not item.unit]
        assert len(extra) <= (0 if step else MOST_EXTRA * len(pair.units)), list(map(str, extra))
        assert all(item.phase == "forward" and item.nbytes <= SMALL * rank.world_size for item in extra)
        counts = pair.last_trace().counts("forward")
        assert sum(counts.values()) == len(pair.units) + len(extra), counts


def make(rank: Rank, **options: bool | None) -> tuple[Run, models.TwoPaths]:
    """A model whose ranks may take different paths."""
    model = models.TwoPaths(dim=DIM)
    run = rank.run(model, units=UNITS, **options)
    return run, model


def departures(function: Callable[[int], None], number: int) -> list[str]:
    """The warnings about the order that ``function(number)`` gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(number)
    return [str(one.message) for one in caught if str(one.message).startswith(DEPARTURE)]


def check_silent(rank: Rank, found: list[str]) -> None:
    """No rank was warned (collective)."""
    by_rank = dict(enumerate(rank.exchange(found)))
    assert not any(by_rank.values()), f"warned although the order is that of the first iteration: {by_rank}"
