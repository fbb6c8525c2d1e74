"""The context that a case receives: one rank of a world."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.harness.adapters.base import Adapter, Config
from shardproof.harness.findings.observations import ExpectedText
from shardproof.harness.models import optim
from shardproof.harness.parity.member import Member
from shardproof.harness.parity.pair import Baseline, Pair
from shardproof.harness.parity.rank_state import RankState
from shardproof.harness.parity.run import Run, RunOptions, sharded_run


@dataclasses.dataclass(frozen=True)
class Seeds:
    """The seeds of a case, equal for every implementation and recorded with the verdict."""

    init: int
    data: int


class Rank(Member):
    """One rank of a world, as a case sees it.

    Every rank of the world runs the case's function with a Rank of its own. Methods that are marked as collective must
    be called by all of them.

    Args:
        state: the rank process.
        implementation: the adapter class under test.
        seeds: of the case.
        tmp_path: a private directory of the case, shared by its ranks.
        monkeypatch: undone on this rank after the case.
    """

    def __init__(
        self,
        state: RankState,
        *,
        implementation: type[Adapter],
        seeds: Seeds,
        tmp_path: pathlib.Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        super().__init__(state, implementation=implementation)
        self.seeds = seeds
        self.tmp_path = tmp_path
        self.monkeypatch = monkeypatch
        self._watched: list[Pair | Run] = []

    def mesh(self, shape: tuple[int, ...] | None = None, names: tuple[str, ...] = ("dp",)) -> DeviceMesh:
        """A mesh over all ranks (collective the first time); by default one-dimensional, named "dp"."""
        return self._state.mesh(shape or (self.world_size,), names)

    def pair(self, model: nn.Module, *, baseline: Baseline = "ddp", **options: Any) -> Pair:
        """The implementation beside its baseline and the oracle (collective).

        Args:
            model: float32, equal on all ranks, as ``torch.manual_seed`` before the case makes it.
            baseline: "ddp", or "replicated" where DDP cannot express the case.
            **options: fields of :class:`RunOptions` and of ``Config``. The optimizer is SGD with momentum unless given,
                the mesh that of all ranks.

        Raises:
            ValueError: an option that is a field of neither.
            Divergence: on every rank, if any rank holds more parameter bytes than its share.
        """
        config, run_options = self._split({"optimizer": optim.sgd()} | options)
        pair = Pair(self, model.to(self.device), config=config, options=run_options, baseline=baseline)
        self._watched.append(pair)
        return pair

    def run(self, model: nn.Module, **options: Any) -> Run:
        """The implementation alone, for a twin or for what no baseline can express (collective).

        Args:
            model: as for :meth:`pair`.
            **options: as for :meth:`pair`, but there is no optimizer unless one is given.

        Raises:
            ValueError: as :meth:`pair`.
            Divergence: as :meth:`pair`.
        """
        config, run_options = self._split(options)
        run = sharded_run(self, model.to(self.device), config=config, options=run_options)
        self._watched.append(run)
        return run

    def config(self, *, units: Sequence[Sequence[str]] = (), mesh: DeviceMesh | None = None, **options: Any) -> Config:
        """The adapters' configuration, over the mesh of all ranks unless one is given."""
        return Config(mesh=mesh or self.mesh(), units=tuple(map(tuple, units)), **options)

    def _split(self, options: dict[str, Any]) -> tuple[Config, RunOptions]:
        """Tell the options of sharding from those of driving."""
        known = {field.name for kind in (Config, RunOptions) for field in dataclasses.fields(kind)}
        if unknown := sorted(options.keys() - known):
            raise ValueError(f"unknown option {unknown[0]!r}; known are {', '.join(sorted(known))}")
        driving = {field.name for field in dataclasses.fields(RunOptions)}
        chosen = {name: value for name, value in options.items() if name in driving}
        return self.config(**{name: options[name] for name in options.keys() - driving}), RunOptions(**chosen)

    def batch(
        self, step: int, shape: tuple[int, ...], *, microbatch: int = 0, mesh: DeviceMesh | None = None
    ) -> torch.Tensor:
        """Standard normal float32 values of this rank, step and microbatch.

        Every rank's differ; given a data-parallel ``mesh``, every coordinate's in it, so that ranks of one
        tensor-parallel group have the same.
        """
        return torch.randn(shape, generator=self._generator(step, microbatch, mesh)).to(self.device)

    def tokens(
        self,
        step: int,
        shape: tuple[int, ...],
        *,
        vocabulary: int,
        microbatch: int = 0,
        mesh: DeviceMesh | None = None,
    ) -> torch.Tensor:
        """Int64 values below ``vocabulary``; they differ as those of :meth:`batch`."""
        return torch.randint(vocabulary, shape, generator=self._generator(step, microbatch, mesh)).to(self.device)

    def _generator(self, step: int, microbatch: int, mesh: DeviceMesh | None) -> torch.Generator:
        member = self.index if mesh is None else mesh.mesh.flatten().tolist().index(self.index)
        # Made on the CPU whatever the device, so that a case has the same data everywhere.
        seed = hash((self.seeds.data, step, microbatch, member)) & 0x7FFF_FFFF
        return torch.Generator().manual_seed(seed)

    def expect(self, text: str, expected: str) -> None:
        """Compare ``text`` with the triple-quoted literal ``expected`` at this call, on every rank.

        The controller compares, once, and with ``EXPECTTEST_ACCEPT=1`` and ``-n 0`` rewrites the
        literal; each distinct output needs a call of its own.
        """
        frame = sys._getframe(1)
        self.record.add_expected_text(ExpectedText(text, expected, frame.f_code.co_filename, frame.f_lineno))

    def finish(self) -> None:
        """Collect the traces of the case's runs and tear down their adapters; called after the case."""
        for run in (run for owner in self._watched for run in owner.runs):
            if run.adapter.name == self.implementation.name:
                self.record.add_trace([str(item) for item in run.trace])
            run.adapter.teardown()
        self._watched.clear()
