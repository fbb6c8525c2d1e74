"""The context that a case receives: one rank of a world."""

import contextlib
import dataclasses
import pathlib
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof import renamed
from shardproof.harness.adapters import registry
from shardproof.harness.adapters.base import Adapter, Config
from shardproof.harness.collectives.trace import Collective
from shardproof.harness.judging.explanation import Explanation
from shardproof.harness.judging.observations import ExpectedText
from shardproof.harness.models import optim
from shardproof.harness.parity.explainer import Explainer
from shardproof.harness.parity.pair import Pair
from shardproof.harness.parity.rank_state import Member, RankState
from shardproof.harness.parity.replay import Baseline
from shardproof.harness.parity.run import Run, RunOptions, sharded_run
from shardproof.harness.simulation import training
from shardproof.harness.simulation.memory import Ledger
from shardproof.harness.simulation.training import Simulation
from shardproof.harness.simulation.world import SimulatedWorld, simulated_world
from shardproof.harness.tensors import notes


@dataclasses.dataclass(frozen=True)
class Seeds:
    """The seeds of a case, of the generators before it runs and of its batches; equal for every implementation."""

    init: int
    data: int


class NotShared(OSError):
    """A case needs a directory that this host does not see. Its text explains itself."""


class Rank(Member):
    """One rank of a world: the context object that a case receives.

    Every rank of the world runs the case's function with its own Rank, and must call the methods that are marked as
    collective.

    Args:
        state: the state of the rank process.
        implementation: the adapter class under test.
        seeds: the seeds of the case.
        tmp_path: a directory of the case alone, shared by its ranks.
        monkeypatch: pytest's monkeypatch, undone on this rank after the case.
        captures: whether to copy what modules compute, to explain a failure.
        simulates: the number of ranks of the world that the case simulates; 0 of cases that do not.

    Attributes:
        driven: the implementations that the case has driven, that under test among them.
    """

    def __init__(
        self,
        state: RankState,
        *,
        implementation: type[Adapter],
        seeds: Seeds,
        tmp_path: pathlib.Path,
        monkeypatch: pytest.MonkeyPatch,
        captures: bool = False,
        simulates: int = 0,
    ) -> None:
        super().__init__(state, implementation=implementation, explainer=Explainer() if captures else None)
        self.seeds = seeds
        self._tmp_path = tmp_path
        self.monkeypatch = monkeypatch
        self.simulates = simulates
        self.driven: set[type[Adapter]] = {implementation}
        self._watched: list[Pair | Run] = []
        self._ledgers: list[Ledger] = []
        self._world_ranks: tuple[int, ...] | None = None

    def of_another_world(self, ranks: tuple[int, ...]) -> "Rank":
        """Return this rank as one of another world, in whose process group the process is now.

        Its exchanges are among the ranks of that world alone, and all ranks of this one must make them. What it
        observes is observed in this case. By rank of the other world, ``ranks`` has the rank of this one that it is.
        """
        state = RankState(
            index=ranks.index(self.index), size=len(ranks), device=self.device, directory=self._state.directory,
            exchange=_Part(self, ranks), announcer=self.announcer, nodes=tuple(self.nodes[rank] for rank in ranks),
        )  # fmt: skip
        options: dict[str, Any] = {"tmp_path": self._tmp_path, "monkeypatch": self.monkeypatch}
        other = Rank(state, implementation=self.implementation, seeds=self.seeds, **options)
        other.record, other.explainer, other.driven = self.record, self.explainer, self.driven
        other.courses = self.courses
        other._world_ranks = ranks
        return other

    def nodes_or(self, declared: tuple[int, ...]) -> tuple[int, ...]:
        """The host of each rank, from 0: the real ones if several have equally many ranks each, else the declared."""
        sizes = {self.nodes.count(node) for node in self.nodes}
        return self.nodes if len(set(self.nodes)) > 1 and len(sizes) == 1 else declared

    @property
    def tmp_path(self) -> pathlib.Path:
        """A directory of the case alone, shared by its ranks.

        Raises:
            NotShared: the ranks are on several hosts, and this one does not see it.
        """
        if not self._tmp_path.is_dir():
            raise NotShared(
                f"{self._tmp_path} is not on host {socket.gethostname()}: this case needs a directory that all hosts "
                "see; set TMPDIR to one on the host of rank 0"
            )
        return self._tmp_path

    def mesh(
        self,
        shape: tuple[int, ...] | None = None,
        names: tuple[str, ...] = ("dp",),
        *,
        order: tuple[int, ...] | None = None,
        joined: tuple[str, ...] = (),
        keeps: Literal["sorted", "groups", "mesh"] = "sorted",
    ) -> DeviceMesh:
        """A mesh over all ranks (collective at the first call with these arguments).

        Args:
            shape: the size of each dimension; by default one dimension of all ranks.
            names: the name of each dimension.
            order: the ranks, as they fill the mesh, the last dimension first; by default in rank order.
            joined: dimensions that are one besides, as data and context parallelism are for sharding. The name of that
                one has theirs with underscores between, and ``mesh[name]`` is it.
            keeps: what keeps that order in the process groups: "groups" of which the mesh is made, which needs
                :attr:`Capability.ORDERED_GROUPS`, or the "mesh" that makes them (:attr:`Capability.ORDERED_MESHES`).
        """
        made = self._state.mesh(shape or (self.world_size,), names, order, joined, keeps)
        if order is None and not joined and keeps == "sorted":
            notes.tell("mesh", mesh=made, shape=shape or (self.world_size,), names=names)
        return made

    def pair(self, model: nn.Module, *, baseline: Baseline = "ddp", **options: Any) -> Pair:
        """The implementation beside its baseline and the oracle (collective).

        Args:
            model: float32, equal on all ranks. A model that the case initializes is, because the harness calls
                ``torch.manual_seed`` with the same seed on all ranks before the case.
            baseline: "ddp"; "replicated" where DDP cannot express the case; "single-process", in which one process has
                the whole batch and one loss of it, where DDP would scale the loss as wrongly as the case does.
            **options: fields of :class:`RunOptions` and of ``Config``. By default the optimizer is SGD with momentum
                and the mesh has all ranks.

        Raises:
            ValueError: an option is a field of neither class.
            Divergence: on every rank, if any rank holds more parameter bytes than its share.
        """
        config, run_options = self._split({"optimizer": optim.sgd()} | options)
        pair = Pair(self, model.to(self.device), config=config, options=run_options, baseline=baseline)
        self._watched.append(pair)
        return pair

    def run(self, model: nn.Module, *, implementation: str = "", **options: Any) -> Run:
        """The implementation alone, for a twin or for a case that no baseline can express (collective).

        Args:
            model: as for :meth:`pair`.
            implementation: the name of another implementation, which shares rank processes with others; by default that
                of the case.
            **options: as for :meth:`pair`, but by default there is no optimizer.
        """
        config, run_options = self._split(options)
        kind = registry.load(implementation) if implementation else self.implementation
        self.driven.add(kind)
        run = sharded_run(self, model.to(self.device), implementation=kind, config=config, options=run_options)
        self._watched.append(run)
        return run

    @contextlib.contextmanager
    def simulated(self, index: int, *, size: int | None = None) -> Iterator[SimulatedWorld]:
        """Make this process one rank of a simulated world; this rank's own world is hidden meanwhile.

        Args:
            index: the global rank in the simulated world.
            size: the number of its ranks; by default as many as ``--simulate`` says.
        """
        # What is issued there is no collective of this world, and its board has no place for other ranks.
        with self.announcer.left_to_a_recorder(), simulated_world(size or self.simulates, rank=index) as world:
            yield world

    def simulation(self, world: SimulatedWorld, build: Callable[[], nn.Module], **options: Any) -> Simulation:
        """The implementation on one rank of a simulated world.

        Args:
            world: the simulated world.
            build: makes the unsharded model.
            **options: fields of ``Config``, ``mesh`` among them, and ``optimizer``, ``prepare`` and ``as_on_a_device``
                of :class:`Simulation`.
        """
        driving = {name: options.pop(name) for name in ("optimizer", "prepare", "as_on_a_device") if name in options}
        made = Simulation(world, self.implementation, build, config=self.config(**options), **driving)
        self._ledgers.append(made.ledger)
        return made

    def why_not_simulated(self) -> str | None:
        """Return why the implementation cannot be simulated, in one line, or None if it can or is known to."""
        if self.implementation.traits.simulates:
            return None
        with self.announcer.left_to_a_recorder():
            return training.why_not(self.implementation)

    def config(self, *, units: Sequence[Sequence[str]] = (), mesh: DeviceMesh | None = None, **options: Any) -> Config:
        """The configuration for an adapter.

        Args:
            units: lists of module names, one list per unit; the root's own unit is implicit.
            mesh: the data-parallel mesh; by default that of all ranks.
            **options: further fields of ``Config``.

        Raises:
            ValueError: a unit has no module.
        """
        if not all(units):
            raise ValueError(f"units = {units!r}: a unit has at least one module")
        return Config(mesh=mesh or self.mesh(), units=tuple(map(tuple, units)), **options)

    def _split(self, options: dict[str, Any]) -> tuple[Config, RunOptions]:
        """Separate the fields of ``Config`` from those of :class:`RunOptions`."""
        driving, sharding = ({field.name for field in dataclasses.fields(kind)} for kind in (RunOptions, Config))
        if unknown := sorted(options.keys() - driving - sharding):
            new = renamed.member("Config", unknown[0])
            known = f"it was renamed: it is {new}" if new else f"known are {', '.join(sorted(driving | sharding))}"
            raise ValueError(f"unknown option {unknown[0]!r}; {known}")
        chosen = {name: value for name, value in options.items() if name in driving}
        return self.config(**{name: options[name] for name in options.keys() - driving}), RunOptions(**chosen)

    def batch(
        self, step: int, shape: tuple[int, ...], *, microbatch: int = 0, mesh: DeviceMesh | None = None
    ) -> torch.Tensor:
        """Draw standard normal values, a function of the data seed, step, microbatch and rank.

        Args:
            step: the training step.
            shape: the shape of the batch.
            microbatch: the number of the microbatch within the step.
            mesh: a data-parallel mesh. The position in it then replaces the rank as an input, so that all ranks of one
                tensor-parallel group get equal values.

        Returns:
            A float32 tensor on this rank's device, with equal values on every kind of device.
        """
        drawn = torch.randn(shape, generator=self._generator(step, microbatch, mesh)).to(self.device)
        of_rank = {"index": self.index, "mesh": mesh}
        notes.tell("batch", drawn=drawn, step=step, microbatch=microbatch, shape=shape, **of_rank)
        return drawn

    def tokens(
        self, step: int, shape: tuple[int, ...], *, vocabulary: int, microbatch: int = 0, mesh: DeviceMesh | None = None
    ) -> torch.Tensor:
        """Draw token indices, a function of the same as the values of :meth:`batch`.

        Args:
            vocabulary: the number of different tokens.

        Returns:
            An int64 tensor of values from 0 to ``vocabulary`` - 1, on this rank's device.
        """
        return torch.randint(vocabulary, shape, generator=self._generator(step, microbatch, mesh)).to(self.device)

    def _generator(self, step: int, microbatch: int, mesh: DeviceMesh | None) -> torch.Generator:
        member = self.index if mesh is None else mesh.mesh.flatten().tolist().index(self.index)
        # A CPU generator on every device, so that a case has the same data everywhere.
        seed = hash((self.seeds.data, step, microbatch, member)) & 0x7FFF_FFFF
        return torch.Generator().manual_seed(seed)

    def expect(self, text: str, expected: str) -> None:
        """Compare the ``text`` of every rank with an inline expected text.

        The controller compares once, after the case. With ``EXPECTTEST_ACCEPT=1`` and ``-n 0`` it rewrites the literal
        instead, so each distinct text needs a separate call.

        Args:
            text: what the case rendered on this rank.
            expected: a triple-quoted literal at the call.
        """
        frame = sys._getframe(1)
        self.record.add_expected_text(ExpectedText(text, expected, frame.f_code.co_filename, frame.f_lineno))

    def expect_different_collectives(self) -> None:
        """Let the members of a group issue different collectives on it, which is a failure of every other case."""
        self.record.compares_collectives = False

    def explain(self, *, in_step: bool) -> Explanation:
        """Return where the runs of the case first diverge. The harness calls it after the case, with capture on.

        If all ranks have ended the case in step, they replay what has not been checked (collective then).
        """
        assert self.explainer is not None, "only a case with capture on is explained"
        if in_step:
            for pair in self._watched:
                if isinstance(pair, Pair):
                    pair.replay_rest()
        return self.explainer.explain(self.implementation)

    def assert_compared(self) -> None:
        """Check that the case has compared every step of its pairs. The harness calls it unless the case raised."""
        for pair in self._watched:
            if isinstance(pair, Pair):
                pair.assert_compared()

    def finish(self) -> None:
        """Collect the traces of the case's runs and tear down their adapters. The harness calls it after the case.

        The first exception of a teardown is raised after the other adapters are torn down too.
        """
        errors: list[BaseException] = []
        if self._world_ranks is None:  # another world ends before the case does, whose they are
            if self.explainer is not None:
                self.explainer.close()
            self.courses.clear()  # they reach the runs, and with them the models
        for run in (run for owner in self._watched for run in owner.runs):
            if run.adapter.name == self.implementation.name:
                trace: list[Collective] = run.trace
                if (ranks := self._world_ranks) is not None:  # with the ranks of the world of the case
                    trace = [dataclasses.replace(one, group=tuple(ranks[rank] for rank in one.group)) for one in trace]
                self.record.add_trace(list(map(str, trace)))
            try:
                run.adapter.teardown()
            except BaseException as error:  # SystemExit too: the rank must end by no adapter's hand
                errors.append(error)
        self._watched.clear()
        for ledger in self._ledgers:
            self.record.add_peak(ledger.most_in_a_step())
        if errors:
            raise errors[0]


class _Part:
    """The exchanges of a part of the ranks, in which all of them take part."""

    def __init__(self, rank: Rank, ranks: tuple[int, ...]) -> None:
        self._rank, self._ranks = rank, ranks

    def gather(self, value: bytes) -> list[bytes]:
        """Gather one value from every rank of the part (collective), in the order of its ranks."""
        everyone = self._rank.exchange(value)
        return [everyone[rank] for rank in self._ranks]
