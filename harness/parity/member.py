"""One rank of a world: its place among the ranks, and how all ranks reach one verdict."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from shardproof.harness.adapters.base import Adapter
from shardproof.harness.collectives.announce import Announcer
from shardproof.harness.parity.explainer import Explainer
from shardproof.harness.parity.rank_state import RankState
from shardproof.harness.parity.replay_cache import ReplayCache
from shardproof.harness.parity.stopwatch import Stopwatch
from shardproof.harness.tensors.trees import map_tensors
from shardproof.harness.verdicts.finding import Finding, raise_first
from shardproof.harness.verdicts.observations import Observations


class Member:
    """One rank of a world during one case.

    Every rank of the world must call the methods that are marked as collective.

    Args:
        state: the state of the rank process.
        implementation: the adapter class under test.

    Attributes:
        record: what this rank observes during the case, for the run file.
        explainer: looks for the first divergence with capture on; None in an ordinary run.
    """

    def __init__(self, state: RankState, *, implementation: type[Adapter], explainer: Explainer | None = None) -> None:
        self._state = state
        self.explainer = explainer
        self.implementation = implementation
        self.record = Observations()

    @property
    def index(self) -> int:
        """This rank's number, from 0."""
        return self._state.index

    @property
    def world_size(self) -> int:
        """The number of ranks of the world."""
        return self._state.size

    @property
    def nodes(self) -> tuple[int, ...]:
        """The host of each rank, numbered from 0; all are 0 unless torchrun started ranks on several hosts."""
        return self._state.nodes

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors; no two ranks of a world share a CUDA device."""
        return self._state.device

    @property
    def announcer(self) -> Announcer:
        """Announces this rank's collectives on the world's board."""
        return self._state.announcer

    @property
    def replays(self) -> ReplayCache:
        """The results of baselines and oracles that this rank process keeps."""
        return self._state.replays

    @property
    def stopwatch(self) -> Stopwatch:
        """Measures where this rank's time goes."""
        return self._state.stopwatch

    def exchange(self, value: Any) -> list[Any]:
        """Gather one value from every rank (collective), outside the trace and outside every group under test.

        Args:
            value: this rank's value; it must be picklable.

        Returns:
            One value per rank, in rank order.
        """
        mine = pickle.dumps(value)
        with self.stopwatch.during("waiting"):
            everyone = self._state.exchange.gather(mine)
        return [pickle.loads(one) for one in everyone]

    def exchange_tensors(self, value: Any) -> list[Any]:
        """Gather one container of tensors from every rank (collective); see :meth:`exchange`.

        Args:
            value: this rank's container, as :func:`map_tensors` handles it.

        Returns:
            One container per rank, in rank order, with all tensors on this rank's device.
        """
        gathered = self.exchange(map_tensors(torch.Tensor.cpu, value))
        moved: list[Any] = map_tensors(lambda tensor: tensor.to(self.device), gathered)
        return moved

    def agree(self, finding: Finding | None, *, title: str) -> None:
        """Raise on every rank if any rank has a finding (collective).

        Args:
            finding: this rank's finding, or None.
            title: the first line of the failure, a statement of what went wrong.

        Raises:
            Divergence: with the same text and location on all ranks, those of the first finding by step, stage and
                rank.
        """
        raise_first(self.exchange(finding), title=title)
