"""Does each stage of a pipeline use the gradient of the microbatch that it has sent? (D32)"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.signatures import fit
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.tensors.fingerprints import Fingerprint
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding

#: The titles of the findings, and of the notes.
MIXED, STALE = "gradients of microbatches are mixed up between stages", "a stage uses gradients of an earlier step"
UNEVEN, UNUSED = "a stage scales gradients of microbatches unevenly", "a stage leaves out gradients of microbatches"

_Ranks = tuple[int, ...]


class _Sent(NamedTuple):
    """A microbatch that a stage has sent: the gradient that the stage uses for it, and that of the next one's input."""

    used: Fingerprint | None
    given: Fingerprint


def check_boundary(seen: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D32, in each step: outputs and inputs of stages that are equal have one gradient."""
    before = [one.given for evidence in seen[:-1] for sent in _links(evidence).values() for one in sent]
    for (senders, receivers), sent in _links(seen[-1]).items():
        of = f"of the {len(sent)} microbatches that {ranks_of(senders)} {_send(senders)} to {ranks_of(receivers)}"
        yield from _of_link(seen[-1].step, of, sent, before)


def _of_link(step: int, of: str, sent: Sequence[_Sent], before: Sequence[Fingerprint]) -> Iterator[DoctorFinding]:
    """Judge the microbatches that one stage sends to another.

    Args:
        step: of the training.
        of: the begin of a message.
        sent: the microbatches.
        before: the gradients that stages computed in earlier steps.
    """
    others = [
        number for number, one in enumerate(sent) if one.used and _fit(one.used, one.given)[1] >= numerics.ONE_GRADIENT
    ]
    found = {number: _index(sent[number], [one.given for one in sent]) for number in others}
    mixed = {number: other for number, other in found.items() if other is not None}
    if mixed:
        yield _of_mixed(step, of, mixed)
    elif any(_index(sent[number], before) is not None for number in others):
        line = f"{of}, backward has for {len(others)} no gradient of this step, and for some one of an earlier step"
        mend = "send the gradient that backward has just computed: clear .grad of received tensors, or receive anew"
        yield DoctorFinding((codes.CROSSINGS,), codes.MISPLACED, step, STALE, (line, mend))
    elif not others:
        yield from _of_factors(step, of, sent)


def _of_mixed(step: int, of: str, mixed: dict[int, int]) -> DoctorFinding:
    pairs = ", ".join(f"{number} has that of {other}" for number, other in list(mixed.items())[:4])
    lines = (
        f"{of}, backward has for {len(mixed)} the gradient of another one; by their numbers {pairs}",
        "keep the activations of microbatches in the order in which their gradients come back, or by their numbers",
    )
    return DoctorFinding((codes.CROSSINGS,), "", step, MIXED, lines)


def _of_factors(step: int, of: str, sent: Sequence[_Sent]) -> Iterator[DoctorFinding]:
    """Note gradients that some microbatches lack, or that have factors of their own."""
    factors = [_fit(one.used, one.given)[0] for one in sent if one.used]
    unused = sum(one.used is None for one in sent)
    if unused and factors:
        line = f"{of}, backward has no gradient for {unused}, for which the next stage computes one"
        mend = "meant, as where a microbatch is left out? else call backward on each output with its gradient"
        yield DoctorFinding((codes.CROSSINGS,), codes.MISSING, step, UNUSED, (line, mend), is_note=True)
    elif factors and max(factors) - min(factors) > numerics.ONE_GRADIENT * max(map(abs, factors)):
        line = (
            f"{of}, backward has gradients that are {min(factors):.4g} to {max(factors):.4g} x those which the next "
            "stage computes"
        )
        mend = "meant? else scale the loss of each microbatch on the last stage alone"
        yield DoctorFinding((codes.CROSSINGS,), codes.WEIGHTED, step, UNEVEN, (line, mend), is_note=True)


def _send(ranks: _Ranks) -> str:
    return "sends" if len(ranks) == 1 else "send"


def _links(evidence: Evidence) -> dict[tuple[_Ranks, _Ranks], list[_Sent]]:
    """Return what stages have sent to others, by the ranks of both, in the order of the outputs.

    An output that a rank has again is that of a recomputation, and one that other ranks have too is that of
    tensor parallel ranks: their gradients must be one.
    """
    outputs, inputs = _by_bits(evidence, is_output=True), _by_bits(evidence, is_output=False)
    found: dict[tuple[_Ranks, _Ranks], list[_Sent]] = {}
    for bits, own in outputs.items():
        others = inputs.get(bits, {})
        used, given = _one_of(own), _one_of(others)
        is_between = bool(others) and not set(own) & set(others)
        if is_between and len(given) == 1 and len(used) < 2 and given[0].squares and given[0].is_finite:
            sent = _Sent(used[0] if used else None, given[0])
            found.setdefault((tuple(sorted(own)), tuple(sorted(others))), []).append(sent)
    return found


def _by_bits(evidence: Evidence, *, is_output: bool) -> dict[int, dict[int, list[Fingerprint]]]:
    """Return the gradients of outputs or inputs, by what stands for these, and by rank."""
    found: dict[int, dict[int, list[Fingerprint]]] = {}
    for record in evidence.records:
        for one in record.modules.beside.crossed:
            if one.is_output == is_output:
                found.setdefault(one.bits, {}).setdefault(record.rank, []).extend(one.gradients)
    return found


def _one_of(ranks: dict[int, list[Fingerprint]]) -> list[Fingerprint]:
    """Return the gradient that each rank has once; two where they are others, or a rank has more than one."""
    if any(len(own) > 1 for own in ranks.values()):
        return [own[0] for own in ranks.values() if own] * 2
    different = {own[0].identity: own[0] for own in ranks.values() if own}
    return list(different.values())


def _index(sent: _Sent, given: Sequence[Fingerprint]) -> int | None:
    """Return the number of the gradient that a stage uses for a microbatch; None where it is none of these."""
    if sent.used is None:
        return None
    own, rests = _fit(sent.used, sent.given)[1], [_fit(sent.used, one)[1] for one in given]
    nearest = min(range(len(rests)), key=rests.__getitem__, default=None)
    return (
        nearest
        if nearest is not None and rests[nearest] < min(numerics.ONE_GRADIENT, own / numerics.TIMES_AS_FAR)
        else None
    )


def _fit(used: Fingerprint, given: Fingerprint) -> tuple[float, float]:
    """Return the factor between two gradients, and the relative distance that remains."""
    if used.numel != given.numel or not (used.is_finite and given.is_finite and used.squares and given.squares):
        return 0.0, math.inf
    return fit(used.vector, given.vector)
