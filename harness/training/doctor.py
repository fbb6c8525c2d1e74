"""Watches the first steps of a training on every rank, and reports what no right training does."""

import contextlib
import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.harness.tensors.fingerprints import bits_of_all, host_rows
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.training import invariants, reduction, report
from shardproof.harness.training.evidence import Evidence, Start, flat_places, holders_of
from shardproof.harness.training.exchange import Absent, Exchange
from shardproof.harness.training.findings import Finding, next_lines
from shardproof.harness.training.reduction import Reduced, check_reduction
from shardproof.harness.verdicts.texts import ranks_of
from shardproof.harness.watching.groups import DATA, groups_of, replicated_ranks, samplers, sizes_of_flat, wrappers_of
from shardproof.harness.watching.names import as_list, parameters_of, unwrapped
from shardproof.harness.watching.records import NotWatchable, StepRecord
from shardproof.harness.watching.ties import Ties
from shardproof.harness.watching.watch import LayoutOf, Watch, Watching

CHECKS = tuple(f"D{number}" for number in range(1, 18))

OnFinding = Literal["raise", "warn", "collect"]


class Unhealthy(RuntimeError):
    """A step has findings; every rank raises it at the end of the same step. The text has all of them."""


class Doctor(Watching):
    """Watch the first steps of a training loop and report what no right training does.

    Every rank makes it after the model is sharded and the optimizer made, and enters it around the loop. It finds the
    steps by itself; once the last of ``steps`` has ended it removes every hook and costs nothing. Ranks exchange what
    they have seen through a gloo group of their own, at the end of a watched step only.

    Args:
        model: as the loop calls it; several for the stages of a pipeline. None: the first root module of which
            something trains.
        optimizer: those whose steps count. None: each optimizer that steps.
        mesh: names the groups of ranks; by default the meshes of the model's DTensors do.
        groups: further process groups by name.
        data: the names of mesh dimensions over which ranks have different data; over others they have the same.
        steps: which to watch, counted from 0 where watching begins.
        checks: which checks to make, "D1" to "D17"; docs/doctor.md lists them.
        ties: names of parameters that are one parameter.
        layout: tells which elements of a parameter a tensor holds, from its name and the tensor, where the tensor does
            not say so itself.
        on_finding: "warn" prints on rank 0; "raise" raises :class:`Unhealthy` on every rank at the end of the step;
            "collect" prints nothing.
        report: a run file for the page and the gate, which rank 0 writes.
        patience: seconds to wait for the slowest rank at the end of a step.
        registered: ties that were noted while the model was built.

    Attributes:
        findings: what was found, in the order of steps; equal on all ranks.

    Raises:
        ValueError: an argument is not valid, ranks have built different models, or torch.distributed is not
            initialized; in one line.
    """

    name, activity, passes = "doctor", "watching", (NotWatchable, Unhealthy)

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        mesh: DeviceMesh | None = None,
        groups: Mapping[str, dist.ProcessGroup] | None = None,
        data: Sequence[str] = DATA,
        steps: Collection[int] = (0, 1, 2),
        checks: Collection[str] = CHECKS,
        ties: Sequence[Sequence[str]] = (),
        layout: LayoutOf | None = None,
        on_finding: OnFinding = "warn",
        report: str | os.PathLike[str] | None = None,
        patience: float = 120.0,
        registered: Ties | None = None,
    ) -> None:
        if unknown := sorted(set(checks) - set(CHECKS)):
            raise NotWatchable(f"doctor: checks={unknown[0]!r}: no such check; known: D1 to D{len(CHECKS)}")
        super().__init__(steps)
        if on_finding not in ("raise", "warn", "collect"):
            raise NotWatchable(f"doctor: on_finding={on_finding!r}: expected 'raise', 'warn' or 'collect'")
        self._models = as_list(model)
        optimizers = as_list(optimizer)
        self._mesh, self._groups, self._data = mesh, dict(groups or {}), tuple(data)
        self._checks, self._ties = frozenset(checks), [tuple(names) for names in ties]
        self._on_finding, self._report = on_finding, report
        self._patience, self._registered = patience, registered
        self._watch = Watch(
            self._judge, steps=steps, optimizers=optimizers, layout=layout, on_error=self._on_error, passes=(Unhealthy,)
        )
        self._exchange: Exchange | None = None
        self._starts: list[Start] = []
        self._holders: dict[str, list[tuple[int, ...]]] = {}
        self._seen: list[Evidence] = []
        self._reduced: list[Reduced] = []
        self._memory: dict[int, list[int | None]] = {}
        self.findings: list[Finding] = []

    # The context ----------------------------------------------------------------------------

    def __enter__(self) -> "Doctor":
        self._attach(self._models)
        return self

    def close(self) -> None:
        """End the last step, report, and remove all hooks. Every rank must call it, or leave the context."""
        if self._is_over:
            return
        self._guarded(self._watch.end_step)
        self._finish()

    def step_end(self) -> None:
        """End a step, where an engine hides the optimizer's step from torch."""
        self._guarded(self._watch.end_step)

    def norm(self, value: torch.Tensor | float, *, max_norm: float | None = None) -> None:
        """Say by which total norm the loop clips, where it computes it by a function of its own."""
        self._watch.note_norm(value, max_norm)

    # Attaching ------------------------------------------------------------------------------

    def _attach_to(self, models: Sequence[nn.Module]) -> None:
        for model in models:
            self._watch.attach(model)
        names = [name for model in models for name, _ in _unique(model)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise NotWatchable(f"doctor: {twice[0]!r} names two parameters: give the models one by one")
        self._exchange = Exchange(patience=self._patience)
        self._starts = self._exchange.all(self._start(models))
        for problem in _wrong_starts(self._starts):
            raise NotWatchable(f"doctor: {problem}")
        self._watch.flat_places = flat_places([start.flat for start in self._starts], self._exchange.rank)
        self._holders, differ = holders_of(self._starts)
        self._add(list(invariants.check_start(self._starts, differ)))

    def _start(self, models: Sequence[nn.Module]) -> Start:
        groups = groups_of(models, mesh=self._mesh, groups=self._groups, data=self._data)
        parameters = list(self._watch.parameters())
        bits = host_rows(bits_of_all([local_of(parameter) for _, parameter in parameters]))
        found = {}
        for (name, parameter), own in zip(parameters, bits, strict=True):
            place = self._watch.place(name, parameter)
            box, mesh = (None, ()) if place is None else (place.box, place.mesh)
            found[name] = (box, mesh, tuple(own))
        return Start(
            groups=groups, bits=found, replicated=replicated_ranks(models),
            model=type(unwrapped(models[0])).__name__,
            shapes={name: tuple(parameter.shape) for name, parameter in parameters},
            flat=sizes_of_flat(models), wrappers=wrappers_of(models),
        )  # fmt: skip

    # Steps ----------------------------------------------------------------------------------

    def _on_error(self, error: Exception) -> None:
        if not isinstance(error, Absent):
            super()._on_error(error)
            return
        self._say_here(f"{error} (last event here: {self._watch.last or 'none'}); detached on this rank")
        self._detach()

    def _judge(self, record: StepRecord) -> None:
        assert self._exchange is not None
        record.rank = self._exchange.rank
        records = self._exchange.all(record)
        self._memory[record.step] = [one.memory for one in records]
        evidence = Evidence(records, self._starts, self._holders)
        self._seen.append(evidence)
        found = [
            *invariants.check_finite(evidence),
            *invariants.check_data(evidence),
            *invariants.check_tokens(evidence),
            *invariants.check_collectives(evidence),
            *invariants.check_contributions(evidence),
            *invariants.check_optimizers(evidence),
            *invariants.check_ties(evidence, self._expected_ties()),
        ]
        if any(one.title == invariants.SAME for one in found):
            # All ranks have the same findings, so all come here.
            seen = self._exchange.all(samplers())
            found = [invariants.with_samplers(one, seen) if one.title == invariants.SAME else one for one in found]
        # What an optimizer of dead parameters does not zero, and what is not finite, is no sum of this step's parts.
        if not any("D16" in one.checks or one.title in (invariants.DEAD, invariants.APART) for one in found):
            found += self._check_gradients(evidence)
        else:
            self._reduced.insert(0, Reduced(is_skipped=True))
        found += [
            *invariants.check_updates(evidence),
            *invariants.check_gathered(evidence),
            *invariants.check_memory(self._memory),
        ]
        self._add(found)
        if record.step >= self._steps[-1]:
            self._finish()

    def _check_gradients(self, evidence: Evidence) -> list[Finding]:
        """Check gradients from their cause to its consequences: replicas and norms are wrong where a reduction is."""
        found, reduced = check_reduction(evidence, self._reduced)
        self._reduced.insert(0, reduced)
        # What differs when training begins has other gradients too.
        began_apart = any(one.title == invariants.APART_AT_THE_START for one in self.findings)
        if not began_apart and not any("D11" in one.checks and not one.is_note for one in found):
            found += invariants.check_replicas(evidence)
        if not any(not one.is_note for one in found):
            found += invariants.check_norm(evidence)
            if not any("D10" in one.checks for one in (*self.findings, *found)):
                found += invariants.check_limit(self._seen)
        # Replicas whose gradients were not reduced go on drifting apart.
        if any({"D1", "D2", "D11"} & set(one.checks) and not one.is_note for one in self.findings):
            found = [one for one in found if "D1" not in one.checks and "D3" not in one.checks]
        # What a step does not reduce or zero gets into the gradients of the next one.
        if any("D11" in one.checks for one in self.findings):
            found = [one for one in found if one.title != reduction.UNKNOWN and one.signature != "S5"]
        return found

    def _expected_ties(self) -> list[tuple[str, ...]]:
        return [*self._ties, *(self._registered.names(self._watch.roots) if self._registered is not None else [])]

    def _add(self, found: Sequence[Finding]) -> None:
        known = {one.key for one in self.findings}
        new = [one for one in found if one.key not in known and set(one.checks) & self._checks]
        more = next_lines(len(self._starts))
        new = [dataclasses.replace(one, lines=(*one.lines, *more)) if one.is_open else one for one in new]
        self.findings += new
        for one in new:
            if self._on_finding != "collect":
                self._say(one.render())
        errors = [one for one in new if not one.is_note]
        if errors and self._on_finding == "raise":
            self._detach()
            raise Unhealthy("\n".join(one.render() for one in errors))

    def _finish(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        if not self._seen:
            self._say(self._nothing_seen())
        else:
            self._add([*invariants.check_optimizers_ever(self._seen), *invariants.check_gradients_ever(self._seen)])
            if self._on_finding != "collect":
                self._say(self.summary())
            if self._report is not None and self._exchange is not None and self._exchange.rank == 0:
                report.write(self._report, self.findings, self._seen, self._checks)
        self._detach()

    def summary(self) -> str:
        """Return what was seen: groups, factors, norms, memory; and what was not."""
        if not self._seen:
            return "no step was seen"
        return report.summary(self._starts, self._seen, self._reduced, self.findings)

    def _say(self, text: str) -> None:
        if self._exchange is None or self._exchange.rank == 0:
            self._say_here(text)

    def _detach(self) -> None:
        super()._detach()
        if self._registered is not None:
            self._registered.close()
        if self._exchange is not None:
            with contextlib.suppress(Exception):  # the user may have ended the process groups
                self._exchange.close()


doctor = Doctor
"""What user code calls."""


def _unique(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    once: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in parameters_of(model):
        once.setdefault(id(parameter), (name, parameter))
    return list(once.values())


def _wrong_starts(starts: Sequence[Start]) -> list[str]:
    """Return what makes ranks impossible to compare, in one line each."""
    found = []
    for rank, start in enumerate(starts):
        for name in start.shapes:
            without = [other for other, one in enumerate(starts) if name not in one.shapes]
            # Stages of a pipeline have other parameters, and share none.
            if without and set(start.shapes) & set(starts[without[0]].shapes):
                shape = tuple(start.shapes[name])
                found.append(
                    f"rank {rank} has {name!r} {shape}, {ranks_of(without)} do{'es' * (len(without) == 1)} not: "
                    "the ranks built different models"
                )
                return found
    return found
