"""The context that a case receives: one rank of a world."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness import optim, parity
from harness.adapters.base import Adapter, Config, OptimizerFactory
from harness.announce import Announcer
from harness.compare import Finding
from harness.errors import Divergence, Place
from harness.observations import Observations
from harness.perturb import Delay
from harness.training import AfterBackward, Batch, Run
from harness.trees import map_tensors


@dataclasses.dataclass(frozen=True)
class Seeds:
    """The seeds of a case, equal for every implementation and recorded with the verdict."""

    init: int
    data: int


def process_groups() -> set[dist.ProcessGroup]:
    """All process groups of this process."""
    return set(dist.distributed_c10d._world.pg_map)


class World:
    """What outlives a case on this rank: the process groups and meshes, made once and reused."""

    def __init__(
        self,
        *,
        index: int,
        size: int,
        device: torch.device,
        directory: str,
        control: dist.ProcessGroup,
        announcer: Announcer,
    ) -> None:
        self.index = index
        self.size = size
        self.device = device
        self.directory = directory
        self.control = control
        self.announcer = announcer
        self.used: set[str] = set()
        """Names of the implementations that have run here."""
        self._groups = process_groups()
        self._meshes: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """The mesh of that shape over all ranks, in rank order; a collective the first time."""
        if (shape, names) not in self._meshes:
            before = process_groups()
            self._meshes[shape, names] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
            self._groups |= process_groups() - before
        return self._meshes[shape, names]

    def foreign_groups(self) -> set[dist.ProcessGroup]:
        """The process groups that neither the world nor its meshes made."""
        return process_groups() - self._groups


class Rank:
    """One rank of a world, as a case sees it.

    Every rank of the world runs the case's function with a Rank of its own. Methods that say
    "collective" must be called by all of them.
    """

    def __init__(
        self,
        world: World,
        *,
        implementation: type[Adapter],
        seeds: Seeds,
        tmp_path: pathlib.Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self._world = world
        self.implementation = implementation
        self.seeds = seeds
        self.tmp_path = tmp_path
        """A private directory of the case, shared by its ranks."""
        self.monkeypatch = monkeypatch
        """Undone on this rank after the case."""
        self.record = Observations()
        self._watched: list[Any] = []

    # the world ------------------------------------------------------------------------------

    @property
    def index(self) -> int:
        """This rank's number, from 0."""
        return self._world.index

    @property
    def world_size(self) -> int:
        """The number of ranks of the world."""
        return self._world.size

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live; no other rank of the world has the same CUDA device."""
        return self._world.device

    def mesh(self, shape: tuple[int, ...] | None = None, names: tuple[str, ...] = ("dp",)) -> DeviceMesh:
        """A mesh over all ranks (collective the first time); by default one-dimensional, named "dp"."""
        return self._world.mesh(shape or (self.world_size,), names)

    # training --------------------------------------------------------------------------------

    def pair(
        self,
        model: nn.Module,
        *,
        units: Sequence[Sequence[str]] = (),
        baseline: parity.Baseline = "ddp",
        optimizer: OptimizerFactory | None = None,
        delays: Sequence[Delay] = (),
        prepare: parity.Prepare | None = None,
        is_traced: bool = True,
        after_backward: AfterBackward | None = None,
        **options: Any,
    ) -> parity.Pair:
        """The implementation beside its baseline and the oracle (collective).

        Args:
            model: in float32, equal on all ranks, as ``torch.manual_seed`` before the case makes it.
            units: lists of module names, each gathered by one collective; the root's is implicit.
            baseline: "ddp", or "replicated" where DDP cannot express the case.
            optimizer: a factory of ``harness.optim``; SGD with momentum by default.
            delays: what to slow down in the sharded run.
            prepare: changes the sharded run's model before it is sharded: tensor parallelism, checkpointing.
            is_traced: False where ``torch.compile`` is to compile, which it does not beside a trace.
            after_backward: what the sharded run's script does to the gradients before it steps.
            options: the other fields of ``Config``; the mesh is that of all ranks by default.
        """
        return parity.Pair(
            self, model.to(self.device), config=self.config(units=units, **options), baseline=baseline,
            optimizer=optimizer or optim.sgd(), delays=delays, prepare=prepare, is_traced=is_traced,
            after_backward=after_backward,
        )  # fmt: skip

    def run(
        self,
        model: nn.Module,
        *,
        units: Sequence[Sequence[str]] = (),
        optimizer: OptimizerFactory | None = None,
        prepare: parity.Prepare | None = None,
        **options: Any,
    ) -> Run:
        """The implementation alone, for a twin or for what no baseline can say (collective).

        The arguments are those of :meth:`pair`.
        """
        config = self.config(units=units, **options)
        run = parity.sharded_run(self, model.to(self.device), config=config, optimizer=optimizer, prepare=prepare)
        self.watch(run)
        return run

    def config(self, *, units: Sequence[Sequence[str]] = (), mesh: DeviceMesh | None = None, **options: Any) -> Config:
        """The adapters' configuration, over the default mesh unless one is given."""
        return Config(mesh=mesh or self.mesh(), units=tuple(map(tuple, units)), **options)

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

    # agreement -------------------------------------------------------------------------------

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank (collective, outside the trace and any group under test)."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._world.control)
        return values

    def exchange_tensors(self, batches: list[Batch]) -> list[list[Batch]]:
        """Every rank's batches on this rank's device, by rank (collective)."""
        gathered = self.exchange(map_tensors(torch.Tensor.cpu, batches))
        moved: list[list[Batch]] = map_tensors(lambda tensor: tensor.to(self.device), gathered)
        return moved

    def agree(self, finding: Finding | None, *, title: str) -> None:
        """Raise on every rank if any has a finding: the first by step and stage, then by rank (collective).

        Raises:
            Divergence: with the same text and place on all ranks.
        """
        findings = [found for found in self.exchange(finding) if found is not None]
        if findings:
            first = min(findings, key=lambda found: (found.place.step or 0, _stage_order(found.place)))
            also = [f.place.rank for f in findings if f.place.stage == first.place.stage and f is not first]
            raise Divergence(parity.render(first, title=title, also=also), first.place)

    def expect(self, text: str, expected: str) -> None:
        """Compare ``text`` with the triple-quoted literal ``expected`` at this call, on every rank.

        The controller compares, once, and with ``EXPECTTEST_ACCEPT=1`` and ``-n 0`` rewrites the
        literal; each distinct output needs a call of its own.
        """
        frame = sys._getframe(1)
        self.record.add_expectation(text, expected, frame.f_code.co_filename, frame.f_lineno)

    def watch(self, owner: Any) -> None:
        """Have the traces of a run or a pair recorded, and its adapter torn down after the case."""
        self._watched.append(owner)

    def finish(self) -> None:
        """Collect what the runs recorded and tear down their adapters; called after the case."""
        for owner in self._watched:
            for run in (owner.sharded, owner.baseline) if isinstance(owner, parity.Pair) else (owner,):
                if run.adapter.name == self.implementation.name:
                    self.record.add_trace([str(item) for item in run.trace])
                run.adapter.teardown()
        self._watched.clear()


_STAGES = ("sharding", "output", "loss", "gradient", "total norm", "clipped gradient", "parameter after step")


def _stage_order(place: Place) -> int:
    return _STAGES.index(place.stage) if place.stage in _STAGES else len(_STAGES)
