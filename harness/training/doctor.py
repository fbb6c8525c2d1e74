"""Watches the first steps of a training on every rank, looks at later ones, and reports what no right training does."""

import contextlib
import dataclasses
import functools
import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof import folders
from shardproof.door import PARTIAL
from shardproof.harness.judging import codes
from shardproof.harness.training import invariants, report, rows
from shardproof.harness.training.acts import check_loads
from shardproof.harness.training.evidence import Evidence, flat_places
from shardproof.harness.training.examination import Examination
from shardproof.harness.training.exchange import Absent
from shardproof.harness.training.findings import DoctorFinding, next_lines
from shardproof.harness.training.followers import check_followers
from shardproof.harness.training.leaving import StateWriter
from shardproof.harness.training.looking import LookedAt, Looking
from shardproof.harness.training.ranks import Ranks
from shardproof.harness.training.roots import Mine, Roots, is_told, without_consequences, without_seeds
from shardproof.harness.training.starts import Starts
from shardproof.harness.watching import calls
from shardproof.harness.watching.groups import DATA, places_of_flat, samplers
from shardproof.harness.watching.model import LayoutOf
from shardproof.harness.watching.names import as_list, parameters_of
from shardproof.harness.watching.records import NotWatchable, StepRecord
from shardproof.harness.watching.roots import Family, called_as
from shardproof.harness.watching.ties import Ties
from shardproof.harness.watching.watch import Watch
from shardproof.harness.watching.watching import Watcher, text_of

CHECKS = tuple(codes.CHECKS)

_GONE = "the loop destroyed its process groups before the end of {}: this step and later ones are not watched"

OnFinding = Literal["raise", "warn", "collect"]


class Unhealthy(RuntimeError):
    """A step has findings; every rank raises it at the end of the same step. The text has all of them."""


class _Output(NamedTuple):
    """Where the doctor's findings go, and the states of the roots."""

    on_finding: OnFinding
    report: str | os.PathLike[str] | None
    states: StateWriter


class Doctor(Watcher):
    """Watch the first steps of a training loop and report what no right training does.

    Every rank makes it after the model is sharded and the optimizer made, and enters it around the loop. It finds the
    steps by itself; once the last of ``steps`` has ended it removes their hooks, counts steps, and looks at states
    again at a few of them. Ranks exchange what they have seen through a gloo group of their own, at the end of a
    watched step or of one that is looked at.

    Args:
        model: as the loop calls it; several for the stages of a pipeline. None: each root module that trains, such as
            the generator and the discriminator of a GAN.
        optimizer: those whose steps count. None: each optimizer that steps.
        mesh: names the groups of ranks; by default the meshes of the model's DTensors do.
        groups: further process groups by name.
        data: the names of mesh dimensions over which ranks have different data; over others they have the same.
        steps: which to watch, counted from 0 where watching begins.
        checks: which checks to make, "D1" to "D32"; docs/doctor.md lists them.
        ties: names of parameters that are one parameter.
        layout: tells which elements of a parameter a tensor holds, from its name and the tensor, where the tensor does
            not say so itself.
        on_finding: "warn" prints on rank 0; "raise" raises :class:`Unhealthy` on every rank at the end of the step;
            "collect" prints nothing.
        report: a run file for the page and the gate, which rank 0 writes.
        patience: seconds to wait for the slowest rank at the end of a step.
        registered: registrations of parameters that were noted while the model was built.
        state: a folder to which each rank writes the state of each root after the last watched step, with the
            optimizers that step it, for ``shardproof state``; that of an earlier run is replaced.

    Attributes:
        findings: what was found, in the order of steps; equal on all ranks.

    Raises:
        ValueError: an argument is not valid, ranks have built different models, or torch.distributed is not
            initialized; in one line.
    """

    name, activity, passes = "doctor", "watching", (NotWatchable, Unhealthy)
    _finds_more = True

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
        state: str | os.PathLike[str] | None = None,
    ) -> None:
        if unknown := sorted(set(checks) - set(CHECKS)):
            raise NotWatchable(f"doctor: checks={unknown[0]!r}: no such check; known: {CHECKS[0]} to {CHECKS[-1]}")
        super().__init__(steps)
        if on_finding not in ("raise", "warn", "collect"):
            raise NotWatchable(f"doctor: on_finding={on_finding!r}: expected 'raise', 'warn' or 'collect'")
        self._models = as_list(model)
        optimizers = as_list(optimizer)
        self._starts = Starts(
            mesh=mesh, groups=groups, data=data, ties=ties, registered=registered, copies=codes.FOLLOWERS in checks
        )  # fmt: skip
        self._output = _Output(
            on_finding, report, StateWriter(None if state is None else Path(state), layout, self._say_states)
        )
        family = Family()
        watch_by = functools.partial(
            Watch, steps=steps, optimizers=optimizers, layout=layout, on_error=self._on_error, passes=self.passes,
            family=family,
        )  # fmt: skip
        self._watch: Watch = watch_by(self._judge, on_drop=self._skip, on_destroy=self._meet_last)
        self._ranks = Ranks(patience, lambda: self._guarded(self._judge_rows))
        self._examination = Examination(checks, waits=on_finding != "raise")
        self._others = Mine(family, self._steps, watch_by, self._starts, self._write_states)
        self._roots = Roots(checks, waits=on_finding != "raise")
        self._found: list[DoctorFinding] = []
        #: What ranks see under ``join()``, where one may have no more batches; None outside of it.
        self._joining: list[StepRecord | int] | None = None
        self._patches = contextlib.ExitStack()
        self._looking: Looking | None = None

    @property
    def findings(self) -> list[DoctorFinding]:
        """What was found, in the order of steps; equal on all ranks."""
        return self._found

    # The context ----------------------------------------------------------------------------

    def __enter__(self) -> "Doctor":
        self._patches.enter_context(calls.joins(self))
        self._patches.enter_context(self._ranks.acts)
        self._ranks.ledger.__enter__()
        try:
            self._attach(self._models)
        except BaseException:  # of a model that is refused no patch may stay
            self._patches.close()
            self._ranks.ledger.close()
            raise
        return self

    def close(self) -> None:
        """End the last step, report, and remove all hooks. Every rank must call it, or leave the context."""
        if not self._is_over:
            self._guarded(self._meet_last)
            self._guarded(self._watch.end_step)
        if not self._is_over:
            if self._examination.seen:
                self._say_if_not_watched()
            self._finish()
        self._guarded(self._output.states.end)
        self._guarded(self._look_last)
        self._guarded(self._judge_rows)
        self._ranks.close()

    def step_end(self) -> None:
        """End a step, where an engine hides the optimizer's step from torch."""
        self._guarded(self._others.end_steps)
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
        self._ranks.rank = dist.get_rank() if dist.is_initialized() else 0
        self._watch.model.flat_places = places_of_flat(models)
        for model in models if not self._models else ():
            self._others.family.note_values(model)
        self._ranks.mine = self._starts.of(
            self._watch.model, models, call="" if self._models else called_as(),
            has_more=not self._models and self._others.family.others_to_come(),
        )  # fmt: skip
        if self._models:
            self._join()

    def _has_looked_at(self, module: nn.Module) -> bool:
        return self._others.family.has_looked_at(module)

    def _look_beside(self, module: nn.Module, args: Any) -> None:
        family = self._others.family
        if self._others.is_full or self._watch.model.engine is not None or not self._are_groups_there:
            self._stop_finding()
            return
        is_root, made_for = False, None
        if own := family.own(module):
            is_root, made_for = family.look_at(module, own)
        if is_root or not own:
            self._inside |= weakref.WeakSet(module.modules())
        if is_root:
            self._begin_forward(self._others.attach(module, made_for), module, args)

    def _forget_roots(self, root: nn.Module) -> None:
        super()._forget_roots(root)
        self._others.drop_inside(root)
        self._inside |= weakref.WeakSet(self._others.modules())

    def _join(self) -> None:
        try:
            found = self._ranks.begin()
        except NotWatchable:
            self._detach()
            raise
        # Now the sizes of all ranks are known; before, what a unit of FSDP1 keeps, which other implementations do not.
        assert self._ranks.rank is not None
        self._watch.model.flat_places = flat_places([one.flat for one in self._ranks.starts], self._ranks.rank)
        self._add(found)

    # Steps ----------------------------------------------------------------------------------

    def _on_error(self, error: Exception) -> None:
        self._add_waiting()
        if not isinstance(error, Absent):
            super()._on_error(error)
            return
        self._say_here(f"{error} (last event here: {self._watch.last or 'none'}); detached on this rank")
        self._detach()

    def _judge(self, record: StepRecord) -> None:
        if not self._models:
            record.family = self._others.tell(record.step)
        if record.step == self._steps[-1]:
            self._write_states()
        if self._joining is not None:
            self._joining.append(record)
        elif records := self._meet(record):
            self._judge_all(records)

    def on_join(self) -> None:
        """Keep what ranks see from now on: within ``join()`` no rank may wait for another one."""
        self._end_looks()
        if not self._is_over:
            self._joining = []

    def on_joined(self) -> None:
        """Judge the steps for which all ranks had a batch."""
        self._guarded(self._watch.end_step)
        seen, self._joining = self._joining, None
        if not seen or self._is_over:
            return
        self._guarded(lambda: self._judge_joined(seen))

    def _judge_joined(self, seen: list[StepRecord | int]) -> None:
        if self._ranks.is_there is None:
            self._join()
        steps, is_alike = self._ranks.joined(seen)
        for records in steps:
            if not self._is_over:
                self._judge_all(records)
        if not self._is_over and not is_alike:
            self._say("under join() ranks have different numbers of steps: later ones are not watched")
            self._finish()

    def _judge_all(self, records: list[StepRecord]) -> None:
        if not self._models:
            self._roots.hear([one.family for one in records])
        step, last = records[0].step, self._steps[-1]
        evidence = Evidence(records, self._ranks.starts, self._ranks.holders, self._roots.are_reduced())
        errors = []
        if step <= last:
            found = self._with_samplers(self._examination.judge(evidence, self._starts.ties(self._watch.model.roots)))
            errors += self._add(found, may_raise=False)
            errors += self._add(self._examination.settle(), may_raise=False)
        errors += self._judge_beside()
        self._raise(errors)
        if step >= last and self._roots.waits:
            self._watch.extend()  # for further roots, of which ranks tell each other when it has stepped
        elif step >= last:
            self._finish(looks=True)

    def _judge_beside(self) -> list[DoctorFinding]:
        """Judge the steps of further roots that ranks have sent, and return the errors."""
        errors = []
        for number, root in enumerate(self._roots, 1):
            is_reduced = self._roots.are_reduced(but=root) or any(one.reducers.names for one in self._ranks.starts)
            found = list(root.judge(self._steps[-1], are_others_reduced=is_reduced))
            errors += self._tell(self._with_samplers(found), number)
        return errors

    def _with_samplers(self, found: list[DoctorFinding]) -> list[DoctorFinding]:
        if not any(one.title == invariants.SAME for one in found):
            return found
        # All ranks have the same findings, so all come here.
        seen = self._ranks.all(samplers())
        return [invariants.with_samplers(one, seen) if one.title == invariants.SAME else one for one in found]

    def _meet_last(self) -> None:
        """Exchange the rest of the steps of further roots before the process groups or the loop end."""
        self._others.end_steps()
        self._watch.end_step()
        if not len(self._others) or self._is_over or self._joining is not None or not self._are_groups_there:
            return
        if self._ranks.is_there is None:
            self._join()
        self._roots.hear(self._ranks.all(self._others.tell(self._watch.step)))
        self._raise(self._judge_beside())

    def _judge_rows(self) -> None:
        """Judge which rows ranks have read, when the loop or its process groups end, after the watched steps or not."""
        seen = self._examination.seen
        if not seen or self._joining is not None or not (told := self._ranks.read()):
            return
        self._add(list(rows.check_rows(told, seen)))
        if self._is_over:
            self._write_report()

    def _meet(self, seen: StepRecord | int) -> list[StepRecord]:
        """Exchange the records of a step and return them: none of one that all skip, or that ends the watching."""
        if not self._are_groups_there:
            # What was noted of the model when training began is of groups of ranks that are gone.
            self._say(_GONE.format(f"step {seen.step}" if isinstance(seen, StepRecord) else "a step"))
            self._finish()
            return []
        if self._ranks.is_there is None:
            self._join()
        records, found = self._ranks.records_of(seen)
        if found:
            self._add(found)
            self._finish()
        return records

    @property
    def _are_groups_there(self) -> bool:
        """Whether the process groups still are that there were when watching began."""
        if self._ranks.is_there is not None:
            return self._ranks.is_there
        return self._world is None or (dist.is_initialized() and dist.group.WORLD is self._world)

    def _skip(self, backwards: int) -> None:
        if self._joining is not None:
            self._joining.append(backwards)
        else:
            self._meet(backwards)

    def _add(self, found: Sequence[DoctorFinding], *, may_raise: bool = True) -> list[DoctorFinding]:
        """Add findings of the first root, tell those that are new, and return the errors among them."""
        return self._tell(self._examination.add(found), 0, may_raise=may_raise)

    def _tell(self, found: Sequence[DoctorFinding], number: int, *, may_raise: bool = False) -> list[DoctorFinding]:
        """Tell new findings of the root of this number, but for those that another root has told; return the errors."""
        names, more = self._names, next_lines(len(self._ranks.starts))
        errors = []
        for one in found:
            if number and is_told(one, self._found):
                continue
            new = without_seeds(one, self._found) if number else one
            new = dataclasses.replace(new, lines=(*new.lines, *more)) if new.is_open else new
            new = dataclasses.replace(new, root=new.root or names[number])
            self._found.append(new)
            errors += [] if new.is_note else [new]
            if self._output.on_finding != "collect":
                self._say(new.render())
        if may_raise:
            self._raise(errors)
        return errors

    @property
    def _names(self) -> list[str]:
        """How messages name the roots; empty texts where there is one alone."""
        names = self._roots.labels(self._ranks.starts)
        has_more = len(names) > 1 or any(one.has_more for one in self._ranks.starts)
        return names if has_more else [""]

    def _raise(self, errors: Sequence[DoctorFinding]) -> None:
        if errors and self._output.on_finding == "raise":
            self._detach()
            raise Unhealthy("\n".join(one.render() for one in errors))

    def _finish(self, *, looks: bool = False) -> None:
        if self._is_over:
            return
        self._is_over = True
        if not self._examination.seen and not self._roots.seen:
            why = self._nothing_seen()
            if not self.findings:
                self._say(why)
            # Of copies nothing has to be known but themselves.
            self._add(list(check_followers({0: self._starts.followers()}, self._watch.step)))
            self._write_report(why)
        else:
            errors = self._end_all()
            self._raise(errors)
            self._sum_up()
            self._write_states(of_all=True)
        if looks and self._ranks.are_even:
            self._begin_looks()
        if self._looking is None:
            # No more records tell of them.
            self._add(list(check_loads({0: self._ranks.acts.take()}, self._watch.step)), may_raise=False)
            self._detach_but_read()

    # Looks ----------------------------------------------------------------------------------

    def _begin_looks(self) -> None:
        """Remove the hooks of the watched steps, and look again after later ones, if states can be read there."""
        assert self._ranks.rank is not None
        roots = [LookedAt(0, self._watch.model, self._ranks.starts, self._ranks.holders, self._examination)]
        for number, (key, root) in enumerate(zip(self._roots.keys(), self._roots, strict=True), 1):
            if root.is_of_all and (model := self._others.model(key)) is not None:
                roots.append(LookedAt(number, model, root.starts, root.holders, root.examination))
        if not roots[0].can_be_looked_at or not self._are_groups_there:
            return
        self._detach_watches()
        self._looking = Looking(
            [one for one in roots if one.can_be_looked_at], self._watch.only, self._watch.step,
            finds_more=not self._models and not len(self._others), on_look=self._look, on_destroy=self._look_last,
            on_error=self._on_look_error, passes=self.passes,
        )  # fmt: skip
        self._looking.__enter__()

    def _look(self, seen: list[StepRecord], *, is_end: bool = False) -> None:
        """Exchange what ranks see of all roots, and judge it; ranks that are not at one step look no more."""
        looking = self._looking
        every = self._ranks.looks_of(seen) if self._are_groups_there and looking is not None else None
        if looking is None or every is None:
            self._end_looks()
            return
        errors = []
        judged = looking.judge(every, lambda model: self._starts.ties(model.roots), is_end=is_end)
        for number, found in judged:
            errors += self._tell(found, number)
        if errors:
            self._write_report()
        self._raise(errors)

    def _look_last(self) -> None:
        """Look once more when the loop or its process groups end, if there were steps since the last look."""
        if self._looking is not None and self._looking.has_more:
            with contextlib.suppress(Absent):
                if seen := self._looking.look():
                    self._look(seen, is_end=True)
        self._end_looks()

    def _on_look_error(self, error: Exception) -> None:
        if isinstance(error, Absent):
            self._say(f"{error} to look again at a later step; no more looks")
        else:
            self._say_here(f"internal error, which ends the looks at later steps; please report it:\n{text_of(error)}")
        self._end_looks()

    def _end_looks(self) -> None:
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.__exit__(None, None, None)
            if (said := looking.said()) and self._output.on_finding != "collect":
                self._say(said)
            self._detach_but_read()

    def _end_all(self) -> list[DoctorFinding]:
        """Tell what all steps together show, and return the errors."""
        new: list[tuple[int, DoctorFinding]] = []
        for number, examination in enumerate(self._examinations()):
            for found in examination.at_the_end() if examination.seen else ():
                new += [(number, one) for one in examination.add(found)]
        errors = [error for number, one in without_consequences(new) for error in self._tell([one], number)]
        told = [one.root or self._ranks.starts[0].name.kind for one in self._found if codes.OPTIMIZED in one.checks]
        # A name begins with the class.
        idle = [one for one in self._roots.idle(self._steps[-1]) if one.root not in [of.split()[0] for of in told]]
        return errors + self._tell(idle, 0)

    def _say_if_not_watched(self) -> None:
        """Say why steps that should be watched were not, where the loop has gone on with another model."""
        last = self._examination.seen[-1].step
        others = {kind: is_after for kind, (step, is_after) in self._watch.strangers.items() if step > last}
        if any(others.values()):
            self._say(_GONE.format(f"step {last + 1}"))
        elif others:
            model = self._ranks.starts[0].model
            kinds = " and ".join(others)
            self._say(f"steps after {last} are not watched: {kinds} stepped, and has none of the parameters of the "
                      f"{model} that was watched")  # fmt: skip

    def _add_waiting(self) -> None:
        self._add(self._examination.take_waiting(), may_raise=False)
        for number, root in enumerate(self._roots, 1):
            self._tell(root.examination.add(root.examination.take_waiting()), number)

    def _abandon(self, error: BaseException) -> None:
        seen = self._examination.seen
        if seen and seen[-1].step >= self._steps[-1]:  # it only waited for further roots, which are to come no more
            self._is_over = True
            self._end_all()
            self._sum_up()
            return
        self._add_waiting()
        self._write_report(f"the training ended with {type(error).__name__}")

    def _sum_up(self) -> None:
        """Print the summary, and write the report."""
        if self._output.on_finding != "collect":
            self._say(self.summary())
        self._write_report()

    def _write_report(self, incomplete: str = "") -> None:
        """Write the run file on rank 0, if one is asked for; a loop that made no process group has the launcher's."""
        rank = int(os.environ.get("RANK", "0")) if self._ranks.rank is None else self._ranks.rank
        if self._output.report is None or rank != 0:
            return
        # As a run does: an incomplete one leaves the file of an earlier one, which readers refuse then.
        path = os.fspath(self._output.report) + (PARTIAL if incomplete else "")
        try:
            seen = next((one.seen for one in self._examinations() if one.seen), [])
            report.write(path, self.findings, seen, self._examination.checks, incomplete=incomplete)
        except folders.NotWritten as error:
            self._say_here(f"the report is not written: {error}")
        else:
            if incomplete:
                self._say_here(f"the report is incomplete ({incomplete}): {path}")

    def _write_states(self, *, of_all: bool = False) -> None:
        """Have the state written of each root that has ended its last watched step, or of all.

        Without a word between ranks, as one may have a full disk.
        """
        roots = [(self._watch.model.roots, self._watch.step), *self._others.roots]
        names = self._others.labels([self._ranks.mine]) if self._ranks.mine and len(roots) > 1 else [""] * len(roots)
        place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for number, ((models, step), name) in enumerate(zip(roots, names, strict=True)):
            if models and (of_all or step == self._steps[-1] + 1):
                self._output.states.add(number, models, name, place, step)
        if of_all:
            self._output.states.has_all()

    def _say_states(self, text: str) -> None:
        if not self._ranks.rank or "is not written" in text:
            self._say_here(text)

    def _examinations(self) -> list[Examination]:
        return [self._examination, *(root.examination for root in self._roots)]

    def summary(self) -> str:
        """Return what was seen: groups, factors, norms, memory; and what was not."""
        names = self._names
        every = [(self._ranks.starts, self._examination), *((one.starts, one.examination) for one in self._roots)]
        judged = [
            report.Judged(name, starts, one.seen, one.reduced)
            for name, (starts, one) in zip(names, every, strict=True)
            if one.seen
        ]
        return report.summary(judged, self.findings, [*self._roots.unseen]) if judged else report.UNSEEN

    def _say(self, text: str) -> None:
        if not self._ranks.rank:
            self._say_here(text)

    def _detach_watches(self) -> None:
        super()._detach()
        self._others.detach()
        self._starts.close()

    def _detach_but_read(self) -> None:
        """Remove all hooks; which rows are read is noted until the loop or its process groups end."""
        with self._ranks.reading_on():
            self._detach()

    def _detach(self) -> None:
        self._detach_watches()
        if self._looking is not None:
            self._looking.__exit__(None, None, None)
            self._looking = None
        self._patches.close()
        with contextlib.suppress(Exception):  # the user may have ended the process groups
            self._ranks.close()


doctor = Doctor
"""What user code calls."""


def _unique(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    once: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in parameters_of(model):
        once.setdefault(id(parameter), (name, parameter))
    return list(once.values())
