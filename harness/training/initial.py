"""Compares the parameters before the first step with those that the baseline was made with, bit for bit."""

from collections.abc import Sequence

import torch

from shardproof.harness.judging import codes
from shardproof.harness.judging.finding import Stage
from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.tensors.layouts import part_of
from shardproof.harness.training.findings import listed
from shardproof.harness.training.outcome import Deviation, StepOutcome, location_of
from shardproof.harness.training.sides import state_of
from shardproof.harness.watching.observation import ByKey, Key, Observed


def compare_initial(starts: Sequence[ByKey], expected: ByKey) -> StepOutcome:
    """Compare the parameters of all ranks of the run with those of the reference."""
    outcome = StepOutcome(0)
    full = {key: one for key, one in state_of([expected]).items() if key[0] == Stage.PARAMETER}
    moved = _Moved(starts)
    for rank, seen in enumerate(starts):
        for key, whole in full.items():
            if key not in seen or seen[key].layout is None:
                outcome.note("initial parameters of unknown layout")
                continue
            outcome.compared += 1
            if not moved.is_right(key, rank, whole):
                outcome.found.append(_divergent(rank, seen[key], whole))
    ends = state_of(starts)
    turned = [key[2] for key, one in full.items() if key in ends and _is_transposed(ends[key], one.cpu())]
    if turned:
        outcome.lines.append(f"{listed(turned)}: the transpose of the reference's")
    elif moved.ranks:
        outcome.signature = codes.MISPLACED
        names = len({one.location.name for one in outcome.found})
        outcome.lines = moved.lines(f"{names} of {len(full)} parameters")
    return outcome


class _Moved:
    """Finds parts that another rank holds than the one that should.

    Attributes:
        ranks: pairs of a rank and the one whose part it holds.
    """

    def __init__(self, starts: Sequence[ByKey]) -> None:
        self.ranks: set[tuple[int, int]] = set()
        self._starts = starts
        #: By name and part, the places of the ranks that hold it, whosever it should be.
        self._held: dict[tuple[Key, Box], set[Box]] = {}

    def is_right(self, key: Key, rank: int, whole: torch.Tensor) -> bool:
        """Whether a rank holds its own part of a full tensor; if not, note whose it holds."""
        mine = self._starts[rank][key]
        assert mine.layout is not None
        if torch.equal(mine.value, _part(whole, mine, mine.layout.box)):
            self._held.setdefault((key, mine.layout.box), set()).add(mine.layout.box)
            return True
        for other, there in enumerate(self._starts):
            its = there[key].layout if key in there else None
            if its is None or its.box == mine.layout.box or its.box.numel != mine.value.numel():
                continue
            if torch.equal(_part(whole, mine, its.box), mine.value):
                self.ranks.add((rank, other))
                self._held.setdefault((key, its.box), set()).add(mine.layout.box)
                break
        return False

    def lines(self, which: str) -> list[str]:
        """Say who holds what."""
        told = [f"rank {rank} has the shard of rank {other}" for rank, other in sorted(self.ranks)[:4]]
        is_another_order = all(len(boxes) == 1 for boxes in self._held.values())
        return [f"{', '.join(told)} ({which}) [{codes.MISPLACED}]",
                "shards are in another order of ranks than that of the mesh" if is_another_order
                else "some shards are on several ranks, and others on none"]  # fmt: skip


def _part(whole: torch.Tensor, mine: Observed, box: Box) -> torch.Tensor:
    """The part of a full tensor that a box has, as a rank's own tensor has it."""
    return part_of(whole, box).reshape(mine.value.shape).cpu()


def _is_transposed(mine: torch.Tensor, expected: torch.Tensor) -> bool:
    return mine.ndim == 2 and not torch.equal(mine, expected) and torch.equal(mine.t(), expected)


def _divergent(rank: int, mine: Observed, whole: torch.Tensor) -> Deviation:
    assert mine.layout is not None
    expected = _part(whole, mine, mine.layout.box)
    index = int((mine.value != expected).flatten().nonzero()[0])
    text = f"run {float(mine.value.flatten()[index]):.9g}, reference {float(expected.flatten()[index]):.9g}"
    location = location_of(Stage.INITIAL, mine, 0, rank, index)
    return Deviation(location, mine.module, f"{text}: initial values must be equal")
