"""The user's own training on the ranks of a world, and in one process with the microbatches of all of them."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from shardproof.harness.parity.rank import Rank
from shardproof.harness.training import checking
from shardproof.harness.training.request import COMMAND, Request, asked
from shardproof.testing import world

REQUEST = asked()


@world(REQUEST.size if REQUEST is not None else 1)
@pytest.mark.reproduced_by(os.environ.get(COMMAND, ""))
@pytest.mark.parametrize("request_", [REQUEST.dumps() if REQUEST is not None else ""], ids=[pytest.HIDDEN_PARAM])
def test_own(rank: Rank, request_: str) -> None:
    """Each step of the training gives what one process gives that trains on all microbatches."""
    request = Request.loads(request_)
    names = tuple(name for name, _ in request.mesh)
    mesh = rank.mesh(tuple(size for _, size in request.mesh), names)
    checking.check(
        request, rank=rank.index, mesh=mesh, device=rank.device, backend=dist.get_backend(),
        folder=request.keep or str(rank.tmp_path), exchange=rank.exchange, explains=rank.explainer is not None,
        note=lambda checked: _note(rank, checked),
    )  # fmt: skip


def _note(rank: Rank, checked: checking.Checked) -> None:
    rank.record.own = checked.own
    rank.record.distances.clear()
    rank.record.add_distances(checked.measured)
