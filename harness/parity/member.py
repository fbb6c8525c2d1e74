"""One rank among the others: who it is, and how all ranks reach one verdict."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardproof.harness.adapters.base import Adapter
from shardproof.harness.collectives.announce import Announcer
from shardproof.harness.findings.finding import Divergence, Finding
from shardproof.harness.findings.observations import Observations
from shardproof.harness.parity.rank_state import RankState
from shardproof.harness.tensors.trees import map_tensors


class Member:
    """One rank of a world during one case.

    Methods that are marked as collective must be called by every rank of the world.

    Args:
        state: the rank process.
        implementation: the adapter class under test.
    """

    def __init__(self, state: RankState, *, implementation: type[Adapter]) -> None:
        self._state = state
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
    def device(self) -> torch.device:
        """Where this rank's tensors live; no other rank of the world has the same CUDA device."""
        return self._state.device

    @property
    def announcer(self) -> Announcer:
        """This rank's side of the board on which collectives are announced."""
        return self._state.announcer

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value (collective), outside the trace and outside every group under test.

        Args:
            value: anything that can be pickled.

        Returns:
            One value a rank, in rank order.
        """
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._state.control)
        return values

    def exchange_tensors(self, value: Any) -> list[Any]:
        """As :meth:`exchange`, for containers of tensors, which arrive on this rank's device (collective)."""
        gathered = self.exchange(map_tensors(torch.Tensor.cpu, value))
        moved: list[Any] = map_tensors(lambda tensor: tensor.to(self.device), gathered)
        return moved

    def agree(self, finding: Finding | None, *, title: str) -> None:
        """Raise on every rank if any rank has a finding (collective).

        Args:
            finding: this rank's, if it has one.
            title: what was compared, as a statement of what went wrong.

        Raises:
            Divergence: with the same text and location on all ranks: the first finding by step, stage and rank.
        """
        findings = [found for found in self.exchange(finding) if found is not None]
        if findings:
            first = min(findings, key=lambda found: (found.location.step or 0, found.location.stage))
            others = [one.location for one in findings if one is not first]
            also = [one.rank for one in others if one.stage == first.location.stage and one.rank is not None]
            raise Divergence(first.render(title=title, also=also), first.location)
