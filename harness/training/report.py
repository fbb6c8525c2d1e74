"""What the doctor prints when all is well, and the run files of the doctor and of comparisons."""

import datetime
import json
import math
import os
import platform
import sys
import uuid
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from shardproof import folders
from shardproof.door import printable
from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.texts import rank_count, ranks_of
from shardproof.harness.tensors import devices
from shardproof.harness.training.comparing import Comparison, text_of
from shardproof.harness.training.evidence import Evidence, Start
from shardproof.harness.training.findings import DoctorFinding, count_of, listed
from shardproof.harness.training.norms import scale_of
from shardproof.harness.training.reduction import Reduced
from shardproof.jsonfiles import encode
from shardproof.runfile import CaseRecord, End, Environment, Failure, Implementation, Run, Verdict, public_version

_COLUMN = 10

#: The modules of a line by name.
_MOST_MODULES = 5

_NEVER_SEEN = "whether the factor is right for this loss; mistakes that are the same on all ranks"

UNSEEN = "no step was seen"
"""The summary before a step is complete."""


class Judged(NamedTuple):
    """A root of which steps were judged.

    Attributes:
        root: how messages name it; empty of one alone.
        starts: what each rank is for it.
        seen: its steps.
        reduced: how gradients were reduced in each of them, the latest first.
    """

    root: str
    starts: Sequence[Start]
    seen: Sequence[Evidence]
    reduced: Sequence[Reduced]

    @property
    def steps(self) -> str:
        """Its steps in words."""
        seen = self.seen
        return f"steps {seen[0].step}-{seen[-1].step}" if len(seen) > 1 else f"step {seen[0].step}"

    @property
    def size(self) -> int:
        """The number of its parameters."""
        return len(self.seen[0].records[0].parameters)

    @property
    def elements(self) -> int:
        """The number of their elements."""
        boxes = (one.box for one in self.seen[0].records[0].parameters.values())
        return sum(math.prod(box.shape) for box in boxes if box is not None)

    @property
    def optimizers(self) -> list[str]:
        """The classes of the optimizers that step it."""
        return list(dict.fromkeys(one.kind for one in self.seen[0].records[0].optimizers))


def summary(judged: Sequence[Judged], findings: Sequence[DoctorFinding], unseen: Sequence[str]) -> str:
    """Return what was seen: a line of what was watched, and one each of groups, gradients, norms and memory.

    Each of several roots has its own lines, in one block; ``unseen`` is what is not watched.
    """
    lines = [_title(judged, findings)]
    facts = [fact for one in judged for fact in _facts(one, has_more=len(judged) > 1)]
    texts = dict.fromkeys(text for one in judged for text in _unseen(one, has_more=len(judged) > 1))
    facts += [("not seen", text) for text in (*texts, *unseen, _NEVER_SEEN)]
    lines += [f"  {name:<{_COLUMN}}{text}" for name, text in facts]
    return "\n".join(map(printable, lines))


def _title(judged: Sequence[Judged], findings: Sequence[DoctorFinding]) -> str:
    first = judged[0]
    what = f"{len(judged)} roots" if len(judged) > 1 else first.starts[0].model
    optimizers = ", ".join(dict.fromkeys(kind for one in judged for kind in one.optimizers)) or "no optimizer"
    errors, notes = sum(not one.is_note for one in findings), sum(one.is_note for one in findings)
    said = f"{errors} finding{'s' * (errors != 1)}" if errors else "no finding"
    said += f", {notes} note{'s' * (notes != 1)}" if notes else ""
    return (
        f"{first.steps} of {rank_count(len(first.starts))}, {what}, "
        f"{_parameters(sum(one.size for one in judged), sum(one.elements for one in judged))}, {optimizers}; {said}"
    )


def _parameters(count: int, elements: int) -> str:
    return f"{count_of(count, 'parameter', 'parameters')} ({elements:,} elements)"


def _facts(one: Judged, *, has_more: bool) -> Iterator[tuple[str, str]]:
    starts, seen, reduced = one.starts, one.seen, one.reduced
    if has_more:
        optimizers = ", ".join(one.optimizers) or "no optimizer"
        yield "root", f"{one.root}, {one.steps}: {_parameters(one.size, one.elements)}, {optimizers}"
    groups = starts[0].groups
    named = [f"{name} {_range(members)}" for name, members in groups.named.items()]
    text = f"{', '.join(named)} (from {groups.source})" if named else "none known"
    yield "groups", f"{text}; data: {_data(seen[-1])}"
    if factors := reduced[0].factors:
        are_all = len(factors[0].names) == len(seen[-1].trained)
        share = "every gradient is" if are_all else _share(factors[0].names, seen[-1])
        yield "reduced", f"{share} {factors[0].render()}"
    yield "norm", _norms(seen)
    memory = [record.usage.memory for step in (seen[1:] or seen) for record in step.records[:1]]
    if len(memory) > 1 and memory[0] is not None and memory[-1] is not None:
        yield "memory", f"{memory[-1] - memory[0]:+,} B from step {seen[1].step} to step {seen[-1].step}"


def _data(last: Evidence) -> str:
    """Return how many microbatches ranks read in a step."""
    batches = {batch for record in last.records for batch in record.forwards.batches}
    if not batches:
        # A root that is called within torch.func's transforms, or by other means than a forward, shows none.
        return "inputs of the model are not seen"
    forwards = max(record.forwards.count for record in last.records)
    inferred = "" if last.are_readers_known else ", inferred from the inputs of ranks"
    backwards = max(record.backwards for record in last.records)
    # Of each backward pass the gradients are one part, whatever forwards are in it.
    inside = f" in {count_of(backwards, 'backward pass', 'backward passes')}" if backwards not in (0, forwards) else ""
    return f"{len(batches)} different microbatches, {forwards} a step on a rank{inside}{inferred}"


def _share(names: Sequence[str], evidence: Evidence) -> str:
    """Return how many of the gradients of parameters that are not frozen these are."""
    frozen = len(evidence.names) - len(evidence.trained)
    text = f"{len(names)} of {len(evidence.trained)} gradients are"
    return f"{text} ({frozen} parameters are frozen)" if frozen else text


def _norms(seen: Sequence[Evidence]) -> str:
    """Return the norms of all gradients, and what becomes of them before the step."""
    norms = [math.sqrt(one.squares(0, "after_backward", local=False)) for one in seen]
    applied = [math.sqrt(one.squares(0, "at_step", local=False)) for one in seen]
    at_step = f"{' '.join(f'{one:.4g}' for one in applied)}, recomputed from all gradients at the optimizer's step"
    if not any(applied):
        has_some = any(one.gradients[0].at_step for one in seen)
        return f"{at_step}: all gradients are zero" if has_some else "no gradient was seen"
    pairs = [*zip(norms, applied, strict=True)]
    if any(b and not a for a, b in pairs):
        return f"{at_step}; not seen before it, so whether they were scaled is not known"
    if any(a and scale_of(one, 0) is None for one, a in zip(seen, norms, strict=True)):
        return f"{at_step}; from backward to the step they change by more than one factor"
    return f"{' '.join(f'{one:.4g}' for one in norms)}, recomputed from all gradients; {_scaling(pairs)}"


def _scaling(pairs: Sequence[tuple[float, float]]) -> str:
    """Return by what gradients are scaled before the step, from their norms after backward and at the step."""
    scales = [f"{b / a:.4g}" for a, b in pairs if a and abs(b / a - 1) > numerics.CLIPPED]
    if not scales:
        return "not scaled before the step"
    text = f"scaled by {' '.join(scales)} before the step"
    limits = [b for a, b in pairs if a and b < a * (1 - numerics.CLIPPED)]
    if len(limits) > 1 and max(limits) - min(limits) < numerics.SAME_NORM * max(limits):
        text += f", that is to a norm of {limits[0]:.4g}"
    return text


#: What is not seen of modules: how they are found, and which checks it is kept from.
_INSIDE = {
    "compiled": (
        f"compiled, so {codes.FINITE} does not see their outputs, nor {codes.RESHARDED} the values that they compute "
        "with"
    ),
    "unhooked": (
        f"called in a compiled function or not at all, so {codes.RESHARDED} and {codes.FINITE} do not see their forward"
    ),
}


def _unseen_modules(one: Judged, *, has_more: bool) -> Iterator[str]:
    modules = [record.modules for step in one.seen for record in step.records]
    for field, text in _INSIDE.items():
        if names := sorted({name for each in modules for name in getattr(each, field)}):
            yield f"inside of {listed(names, _MOST_MODULES)}{f' of {one.root}' if has_more else ''}: {text}"


def _unseen(one: Judged, *, has_more: bool) -> Iterator[str]:
    reduced = one.reduced
    yield from _unseen_modules(one, has_more=has_more)
    yield from dict.fromkeys(text for record in one.seen[-1].records for text in record.unseen)
    reasons: dict[str, list[str]] = {}
    for name, reason in reduced[0].unseen.items():
        reasons.setdefault(reason, []).append(name)
    of = f" of {one.root}" if has_more else ""
    for reason, names in reasons.items():
        yield f"the reduction of {listed(names)}{of}: {reason}"
    if not reduced[0].sums and not reasons and not reduced[0].is_skipped:
        yield f"gradients{of} and their reduction, as where the optimizer steps in backward"


def _range(ranks: Sequence[int]) -> str:
    return ranks_of(ranks).partition(" ")[2]


def write(
    path: str | os.PathLike[str], findings: Sequence[DoctorFinding], seen: Sequence[Evidence], checks: Collection[str],
    *, incomplete: str = "",
) -> None:  # fmt: skip
    """Write a run file with a record for each check that was made; a note is no failure.

    Args:
        incomplete: why the training ended before all steps were seen, in one line; empty if they were.

    Raises:
        NotWritten: it cannot be written.
    """
    world = len(seen[0].records) if seen else 0
    seconds = sum(one.records[0].usage.seconds for one in seen)
    cases = []
    for check in sorted(checks, key=lambda name: int(name[1:])) if seen else ():
        mine = [one for one in findings if check in one.checks and not one.is_note]
        failure = Failure(text="\n".join(one.render() for one in mine), rank=0) if mine else None
        name = f"doctor::{check.lower()}_{codes.CHECKS[check].name.replace('-', '_')}"
        cases.append(_case(name, f"DOCTOR-{check[1:]}", world, seconds / len(checks), failure))
    _write(path, cases, seconds, incomplete)


def write_comparison(path: str | os.PathLike[str], found: Comparison) -> None:
    """Write a run file with a record for each rank that was compared."""
    world = len(found.run.ranks)
    failures = {}
    for one in found.divergent:
        element = one.element[0] if one.element is not None else None
        failures[one.rank] = Failure(text=text_of(one), stage=one.stage.value, step=one.step, rank=one.rank,
                                     name=one.name or None, element=element)  # fmt: skip
    cases = [_case(f"compare::rank_{rank}", "COMPARE-1", world, 0.0, failures.get(rank)) for rank in range(world)]
    if found.resumption is not None:
        text = "\n".join(map(printable, found.resumption.lines))
        cases.append(_case("compare::resumption", "COMPARE-1", world, 0.0, Failure(text=text) if text else None))
    _write(path, cases, 0.0)


def _case(name: str, requirement: str, world: int, seconds: float, failure: Failure | None) -> CaseRecord:
    return CaseRecord(
        id=f"{name}[w{world}]",
        implementation="own-training",
        requirement=requirement,
        world=world,
        device=devices.accelerator() or "cpu",
        parameters={},
        verdict=Verdict.PASS if failure is None else Verdict.FAIL,
        seconds=seconds,
        failure=failure,
    )


def _write(path: str | os.PathLike[str], cases: Sequence[CaseRecord], seconds: float, incomplete: str = "") -> None:
    environment = Environment(
        python=platform.python_version(), torch=public_version(torch.__version__), platform=platform.platform(),
        cpu_count=os.cpu_count(), device=devices.accelerator() or "cpu", command=tuple(sys.argv),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        implementations={"own-training": Implementation()},
    )  # fmt: skip
    failed = any(case.failure is not None for case in cases)
    run = Run(
        run_id=uuid.uuid4().hex, environment=environment, selected={"own-training": tuple(one.id for one in cases)},
        cases=tuple(cases),
        end=End(complete=not incomplete, reason=incomplete, exit_code=int(failed), seconds=seconds),
    )  # fmt: skip
    folders.write_file(Path(path), json.dumps(encode(run)))
