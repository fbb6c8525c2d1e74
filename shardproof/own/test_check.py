"""The user's own training on the ranks of a world, and in one process with the microbatches of all of them."""

import collections
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from shardproof.harness.judging.finding import Finding
from shardproof.harness.parity.explainer import ModuleFinding
from shardproof.harness.parity.rank import Rank
from shardproof.harness.training import checking, resumption
from shardproof.harness.training.request import COMMAND, Request, asked
from shardproof.testing import world

REQUEST = asked()


@world(REQUEST.size if REQUEST is not None else 1)
@pytest.mark.reproduced_by(os.environ.get(COMMAND, ""))
@pytest.mark.parametrize("request_", [REQUEST.dumps() if REQUEST is not None else ""], ids=[pytest.HIDDEN_PARAM])
def test_own(rank: Rank, request_: str) -> None:
    """Each step of the training gives what one process gives that trains on all microbatches."""
    request = Request.loads(request_)
    names, sizes = zip(*request.mesh, strict=True)

    def note(checked: checking.Checked) -> None:
        rank.record.own = checked.own
        rank.record.distances.clear()
        rank.record.add_distances(checked.measured)
        if rank.explainer is not None:
            rank.explainer.add(_Step(checked.answers))

    if request.save_and_resume:
        resumption.resumption(
            request, rank=rank.index, mesh=rank.mesh(sizes, names), device=rank.device, exchange=rank.exchange,
            note=lambda own: setattr(rank.record, "own", own),
        )  # fmt: skip
        return
    checking.check(
        request, rank=rank.index, mesh=rank.mesh(sizes, names), device=rank.device, backend=dist.get_backend(),
        folder=request.keep or str(rank.tmp_path), exchange=rank.exchange, explains=rank.explainer is not None,
        note=note,
    )  # fmt: skip


@dataclasses.dataclass
class _Step:
    """What the modules showed in the last step, for ``--explain``."""

    answers: list[dict[str, Any]]
    title: str = "the baseline and the float64 oracle, each in one process"
    compared: int = 0
    unseen: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def in_order(self) -> Iterator[ModuleFinding]:
        self.compared = self.answers[-1]["compared"]
        shown: dict[str, Any] | None = self.answers[-1]["shown"]
        if shown is not None:
            location = checking.location_of(shown, len(self.answers) - 1)
            yield ModuleFinding(
                Finding(location, shown["text"]), (0,), shown["module"] or "(root)", location.name or ""
            )

    def lacking(self, parameter: str) -> list[str]:
        return []
