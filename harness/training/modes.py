"""Are norms and dropouts of a model in the mode that its training needs, and constants of it exact? (D6, D19)"""

from collections.abc import Iterator, Sequence

from shardproof.harness.judging import codes
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding, listed
from shardproof.harness.watching.records import Mode


def check_modes_ever(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D19 and D6, after the last step: notes of frozen norms that move, of a model in eval mode, of rounded constants.

    The records of one rank show it: all ranks have the same modules.
    """
    seen = [{one.name: one for one in each.records[0].modules.beside.modes} for each in records]
    step = records[-1].step
    every = [(name, [each[name] for each in seen]) for name in seen[-1] if all(name in each for each in seen)]
    yield from _of_moving(every, step)
    yield from _of_eval(every, step, len(seen))
    if narrow := [name for name in records[-1].records[0].modules.beside.narrow if _stays(records, name)]:
        lines = (
            f"{listed(narrow)}: values that bfloat16 or float16 rounds, which no step writes",
            "meant? else keep them in float32, which .bfloat16() and .half() of the model do not: positions times a "
            "rounded frequency are other angles",
        )
        yield DoctorFinding((codes.MOVES,), codes.ROUNDED, step, "constants are rounded", lines, is_note=True)


_Modes = Sequence[tuple[str, Sequence[Mode]]]
"""The names of modules with their modes in all steps."""


def _of_moving(every: _Modes, step: int) -> Iterator[DoctorFinding]:
    if moving := [name for name, modes in every if _is_frozen_and_moves(modes)]:
        lines = (
            f"{listed(moving)}: no parameter trains, and a forward in training mode moves the running statistics "
            f"({len(moving)} of {sum(modes[0].is_norm for _, modes in every)} norms)",
            "meant, as where the statistics adapt to new data? else call .eval() of what is frozen after each .train()",
        )
        yield DoctorFinding((codes.FROZEN,), "", step, "statistics of frozen norms move", lines, is_note=True)


def _of_eval(every: _Modes, step: int, steps: int) -> Iterator[DoctorFinding]:
    used = [(name, modes) for name, modes in every if all(one.is_called and one.trains for one in modes)]
    if steps > 1 and used and not any(one.is_training for _, modes in used for one in modes):
        lines = (
            f"{listed([name for name, _ in used])}: in eval mode in each watched step, and parameters train: "
            "dropouts drop nothing, and norms use statistics that do not move",
            "meant, as where a loaded model is trained without them? else call .train() before the step",
        )
        yield DoctorFinding((codes.FROZEN,), "", step, "the model trains in eval mode", lines, is_note=True)


def _is_frozen_and_moves(modes: Sequence[Mode]) -> bool:
    """Whether no parameter of a norm trains or is written, and each step computes by it in training mode."""
    is_frozen = not any(one.trains for one in modes) and len({one.written for one in modes}) == 1
    is_moving = len(modes) > 1 and all(one.is_training and one.is_called for one in modes)
    return modes[0].is_norm and is_frozen and is_moving


def _stays(records: Sequence[Evidence], name: str) -> bool:
    """Whether a buffer has the same bits in all steps in which they were read."""
    bits = [bits for one in records if (bits := one.records[0].modules.buffers.get(name)) is not None]
    return len(set(bits)) <= 1
