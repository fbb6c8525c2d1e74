"""The trials of ``shardproof check --bisect``: each is a check, by words of the command, with some of the axes off."""

import contextlib
import dataclasses
import io
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardproof.harness.judging.texts import gist
from shardproof.harness.training import bisect, switches
from shardproof.harness.training.bisect import Axis, Plan, TrialOutcome
from shardproof.harness.training.request import ARGUMENTS, NotCheckable, Request, function_of
from shardproof.harness.training.starting import record_of
from shardproof.runfile import CaseRecord

Change = Callable[[Request], Request]

Check = Callable[[Sequence[str]], object]
"""Takes the words of ``shardproof check``."""

#: A trial has this many times the seconds of the first one, and at least so many: one with fewer ranks may hang.
_TIMES, _LEAST_SECONDS = 5, 60


def search(
    request: Request, first: CaseRecord, *, device: str, given: Mapping[str, str], check: Check
) -> str:  # fmt: skip
    """Return what a search finds of a check that failed, and the command that repeats the smallest plan.

    Args:
        first: the record of the check.
        given: arguments of ``parallelize`` that are axes, with their values when off.
        check: runs a check in this process, whose forkserver the first one has started.

    Raises:
        NotCheckable: ``given`` names no argument; one line.
    """

    changes = changes_of(request, first.own.axes if first.own is not None else (), given)
    failure = first.failure
    if failure is not None and failure.step is not None:
        # Each step begins from the run's own state, so that those after it have no part in it.
        request = dataclasses.replace(request, steps=failure.step + 1)
    began, number = time.monotonic(), 0
    words = ["--device", device, "--deadline", str(max(_LEAST_SECONDS, round(_TIMES * first.seconds)))]

    def of(plan: Plan) -> Request:
        changed = request
        for axis, change in changes.items():
            changed = changed if axis in plan else change(changed)
        return changed

    def trial(plan: Plan) -> TrialOutcome:
        nonlocal number
        number += 1
        if len(plan) == len(changes):
            return outcome_of(first)
        outcome = run([*words_of(of(plan)), *words], check)
        off = ", ".join(one.name for one in changes if one not in plan)
        print(f"bisect: trial {number} without {off}: {outcome.verdict}", file=sys.stderr, flush=True)
        return outcome

    found = bisect.bisect(list(changes), trial)
    command = ["python", "-m", "shardproof", "check", *words_of(of(frozenset(found.smallest)))]
    command += [] if device == "auto" else ["--device", device]
    return found.render(shlex.join(command), time.monotonic() - began)


def changes_of(request: Request, own: Sequence[str], given: Mapping[str, str]) -> dict[Axis, Change]:
    """Return the axes of a request that are on, each with what turns it off.

    Args:
        own: what the training uses of :data:`shardproof.harness.training.switches.OWN`.
    """

    def changing(**fields: Any) -> Change:
        return lambda one: dataclasses.replace(one, **fields)

    def resizing(name: str) -> Change:
        return lambda one: dataclasses.replace(
            one, mesh=tuple((other, 1 if other == name else size) for other, size in one.mesh)
        )

    def without(name: str) -> Change:
        return lambda one: dataclasses.replace(one, off=(*one.off, name))

    def passing(name: str, value: Any) -> Change:
        return lambda one: dataclasses.replace(one, axes={**one.axes, name: value})

    found = {Axis(name, "1"): resizing(name) for name, size in request.mesh if size > 1}
    if request.dtype != "float32":
        found[Axis("dtype", "float32")] = changing(dtype="float32")
    for name in ("param_dtype", "reduce_dtype"):
        if getattr(request, name) not in ("", "float32"):
            found[Axis(name, "float32")] = changing(**{name: "float32"})
    if request.microbatches > 1 and not request.data:
        found[Axis("microbatches", "1")] = changing(microbatches=1)
    found |= {Axis(name, switches.OWN[name]): without(name) for name in own if name not in request.off}
    named = request.parallelize
    function = function_of("parallelize", named, ARGUMENTS["parallelize"]) if named else None
    try:
        keywords = switches.of_keywords(function, given)
    except ValueError as error:
        raise NotCheckable(f"check: {error}") from None
    for name, value in keywords.items():
        if request.axes.get(name, not value) != value:
            found[Axis(f"--axis {name}", repr(value))] = passing(name, value)
    return found


def words_of(request: Request) -> list[str]:
    """Return the words of a command that ask for a request, without those that say what is so by default."""
    words = []
    for field in dataclasses.fields(request):
        value = getattr(request, field.name)
        if field.name in ("keep", "bisect") or value == field.default:
            continue
        option = f"--{'impl' if field.name == 'implementation' else field.name.replace('_', '-')}"
        if field.name == "axes":
            words += [word for name, one in value.items() for word in ("--axis", f"{name}={json.dumps(one)}")]
        elif field.name == "mesh":
            words += [option, request.mesh_text]
        elif value != ():
            words += [option, ",".join(value) if isinstance(value, tuple) else str(value)]
    return words


def run(words: Sequence[str], check: Check) -> TrialOutcome:
    """Run a check, and return how it ended."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="shardproof-bisect-") as folder:
        report = os.path.join(folder, "run.json")
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            check([*words, "--report", report])
        record = record_of(report)
    if record is None:
        return TrialOutcome("refused", text=(said.getvalue().strip().splitlines() or ["there is no record"])[-1])
    return outcome_of(record)


def outcome_of(record: CaseRecord) -> TrialOutcome:
    """Return how a check ended, as a search compares it."""
    failure, own = record.failure, record.own
    if failure is None:
        return TrialOutcome(str(record.verdict))
    stage = str(failure.stage or "")
    return TrialOutcome(str(record.verdict), stage, own.signature if own is not None else "", gist(failure.text))
