"""Do parameters that require no gradient stay as they are, and does what is frozen stay frozen? (D19)"""

from collections.abc import Collection, Iterator, Sequence

from shardproof.harness.judging import codes
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding, listed
from shardproof.harness.watching.records import Parameter

#: The title of the finding that optimizers move frozen parameters, and of the note where that may be meant.
MOVE = "frozen parameters move"


def check_frozen_ever(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D19, after the last step: what requires no gradient when its optimizer steps does not move.

    A parameter that has trained in an earlier step and moves in a later one by what is left of its gradient was frozen
    to stay. All else may be meant.
    """
    moved = _moved(records)
    trained = {name for name in moved if _steps_of(records[: moved[name]], name, is_frozen=False)}
    if apart := [name for name in moved if name in trained]:
        yield _of_moved(records[moved[apart[0]]], apart, is_note=False)
    if apart := [name for name in moved if name not in trained]:
        yield _of_moved(records[moved[apart[0]]], apart, is_note=True)
    yield from _check_stopped(records, moved)
    yield from _check_held(records, moved)
    yield from _check_thawed(records)


def _moved(records: Sequence[Evidence]) -> dict[str, int]:
    """Return the frozen parameters that an optimizer moves without a gradient of the step, and in which step first."""
    found: dict[str, int] = {}
    for number, evidence in enumerate(records):
        for name in evidence.names:
            held = [one for one in _held(evidence, name) if one.is_frozen]
            is_computed = any(name in mine.own or name in mine.returned for mine in evidence.gradients)
            if not is_computed and any(None is not one.before != one.after for one in held):
                found.setdefault(name, number)
    return found


def _held(evidence: Evidence, name: str) -> list[Parameter]:
    """Return what ranks hold of a parameter that an optimizer of theirs steps."""
    held = [record.parameters.get(name) for record in evidence.records]
    return [one for one in held if one is not None and one.optimizer is not None]


def _steps_of(records: Sequence[Evidence], name: str, *, is_frozen: bool) -> list[int]:
    """Return the steps in which an optimizer has stepped a parameter while it was frozen, or while it was not."""
    return [one.step for one in records if any(held.is_frozen == is_frozen for held in _held(one, name))]


def _of_moved(evidence: Evidence, names: list[str], *, is_note: bool) -> DoctorFinding:
    lines = [f"{listed(names)}: requires_grad is False, backward computes no gradient, and the optimizer changes bits"]
    has_gradient = any(name in mine.at_step for mine in evidence.gradients for name in names)
    if has_gradient:
        lines.append("seen: .grad is not None at the optimizer's step")
    mend = "set .grad to None where parameters are frozen: of zeros, too, weight decay and momentum make an update"
    lines.append(f"meant, as where user code computes .grad itself? else {mend}" if is_note else mend)
    return DoctorFinding((codes.FROZEN,), "", evidence.step, MOVE, tuple(lines), is_note)


def _check_stopped(records: Sequence[Evidence], moved: Collection[str]) -> Iterator[DoctorFinding]:
    """Note what requires a gradient at the optimizer's step, and in a later step does not."""
    stopped = {}
    for name in records[-1].names:
        steps, frozen = (_steps_of(records, name, is_frozen=one) for one in (False, True))
        if name not in moved and steps and frozen and frozen[-1] > steps[0]:
            stopped[name] = steps[0], frozen[-1]
    if stopped:
        first, last = next(iter(stopped.values()))
        lines = (
            f"{listed(list(stopped))}: requires_grad is True at the optimizer's step {first}, and False at step {last}",
            "meant, as where a part is frozen by a schedule? else look for what sets requires_grad between steps",
        )
        title = "parameters stop training"
        yield DoctorFinding((codes.FROZEN,), "", records[-1].step, title, lines, is_note=True)


def _check_held(records: Sequence[Evidence], moved: Collection[str]) -> Iterator[DoctorFinding]:
    """Note what is frozen at each step of an optimizer that has it."""
    evidence = records[-1]
    held = [name for name in evidence.names if any(_held(one, name) for one in records)]
    frozen = [name for name in held if name not in moved and not _steps_of(records, name, is_frozen=False)]
    if frozen:
        lines = (
            f"{listed(frozen)}: requires_grad is False for {len(frozen)} of {len(held)} parameters of optimizers, "
            "which do not train",
            "meant, as where a part of the model is frozen? else set requires_grad before the model is wrapped",
        )
        title = "the optimizer holds frozen parameters"
        yield DoctorFinding((codes.FROZEN,), "", evidence.step, title, lines, is_note=True)


def _check_thawed(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """Note what has replaced a frozen parameter, and moves."""
    evidence = records[-1]
    names = dict.fromkeys(name for start in evidence.starts for name in start.built.thawed)
    moving = [
        name
        for name in names
        if any(None is not held.before != held.after for one in records for held in _held(one, name))
    ]
    if moving:
        lines = (
            f"{listed(moving)}: the parameter has replaced one whose requires_grad was False, and the optimizer moves "
            "it",
            "meant, as where a layer is made anew to train? else pass requires_grad on: "
            "nn.Parameter(new, requires_grad=old.requires_grad)",
        )
        yield DoctorFinding((codes.FROZEN,), "", evidence.step, "frozen parameters train", lines, is_note=True)
