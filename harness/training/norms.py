"""Are gradients clipped by the norm of all of them, and by one scale on all ranks? (D10)"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardproof.harness.collectives.trace import Collective
from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.signatures import fit
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training.evidence import Evidence, vector_of
from shardproof.harness.training.findings import DoctorFinding
from shardproof.harness.watching.records import Gradient, NormCall

#: The title of the finding that gradients are scaled by another norm than theirs.
OTHER_NORM = "the norm is not the norm of all gradients"

#: The bytes of one number at most.
_NUMBER = 8


class Scaling(NamedTuple):
    """By what a rank's gradients are multiplied between backward and the step.

    Attributes:
        rounding: by which part of it the rounding of gradients to their dtype moves it at most.
    """

    value: float
    rounding: float


def check_norm(evidence: Evidence, *, is_local: bool = False) -> Iterator[DoctorFinding]:
    """D10: the total norm is that of all gradients, and the scale that is applied is the same on all ranks.

    Args:
        is_local: whether each rank may train by itself, as its gradients are not reduced: then it has a scale of its
            own.
    """
    count = len(evidence.records)
    if any(record.norms.clipped_scaled for record in evidence.records):
        line = "gradients are clipped before the loss scaler unscales them: call scaler.unscale_(optimizer) first"
        yield DoctorFinding(
            (codes.NORM,), codes.LOCAL_NORM, evidence.step, "gradients are clipped while they are scaled", (line,)
        )
    local = _local_norms(evidence)
    true = [math.sqrt(evidence.squares(rank, "after_backward", local=False)) for rank in range(count)]
    scales = [scale_of(evidence, rank) for rank in range(count)]
    known = [one for one in scales if one is not None]
    is_of_all = len(known) == count > 1 and not is_local
    if is_of_all and _spread([one.value for one in known]) > numerics.SCALES_APART + _rounding(known):
        yield _of_scales(evidence, known, local, true[0])
        return
    for rank, record in enumerate(evidence.records):
        for call in record.norms.calls:
            if what := _other_norm(evidence, call, rank, local[rank], true[rank]):
                told = (
                    f"gradients are clipped by the norm {call.value:.4g} on rank {rank}; that of all gradients is "
                    f"{true[rank]:.4g}",
                    what,
                )
                yield DoctorFinding((codes.NORM,), codes.LOCAL_NORM, evidence.step, OTHER_NORM, told)
                return


def _of_scales(evidence: Evidence, scales: Sequence[Scaling], local: Sequence[float], true: float) -> DoctorFinding:
    """Make the finding of ranks that scale gradients differently; by the norms of what each holds, or by others."""
    count = len(scales)
    listed_scales = ", ".join(f"{one.value:.4g}" for one in scales[:8])
    lines = [f"the scale differs between ranks: {listed_scales} on {ranks_of(range(min(count, 8)))}"]
    if _are_one(scales, local):
        lines.insert(
            0,
            f"each rank scales its gradients by the norm of its own shards, {local[0]:.4g} on rank 0; the norm of all "
            f"gradients is {true:.4g}",
        )
        lines.append("clip by the norm of all ranks: FSDP1 has clip_grad_norm_(), norms of DTensors full_tensor()")
    else:
        lines.append(_why_scaled(evidence, scales))
    return DoctorFinding(
        (codes.NORM,), codes.LOCAL_NORM, evidence.step, "ranks scale gradients differently", tuple(lines)
    )


def _other_norm(evidence: Evidence, call: NormCall, rank: int, local: float, true: float) -> str:
    """Say of which gradients a norm is by which a rank clips; empty if it is that of all, or not known."""
    if call.value is None or call.norm_type != 2.0 or not math.isfinite(call.value) or not true:
        return ""
    ratio = call.value / true
    # A norm has the dtype of gradients: those of parameters are rounded to it, and that of these norms.
    allowed = 2 * max((numerics.rounding(one.dtype) for one in evidence.gradients[rank].after_backward.values()),
                      default=0.0)  # fmt: skip
    if abs(ratio - 1) < numerics.NORMS_APART + allowed or call.function != "clip_grads_with_norm_":
        return ""
    if abs(call.value / max(local, 1e-300) - 1) < numerics.SAME_NORM + allowed:
        return f"it is the norm of the shards of rank {rank} alone"
    if any(abs(ratio - math.sqrt(size)) < (numerics.SAME_NORM + allowed) * ratio for size in _sizes(evidence)):
        return f"it is {ratio:.4g} times that: elements that several ranks hold are counted on each"
    return ""


def _why_scaled(evidence: Evidence, scales: Sequence[Scaling]) -> str:
    """Say by what ranks scale gradients differently, if it is what they count in the loss."""
    counts = [sum(count for count, _ in record.losses.tokens) for record in evidence.records]
    if min(counts) > 0 and len(set(counts)) > 1 and _are_one(scales, counts):
        told = ", ".join(map(str, counts[:8]))
        return f"seen: each is a number / the rank's own {told} tokens: all_reduce the tokens before dividing by them"
    return "each rank multiplies its gradients by a number of its own: reduce the number over the ranks first"


def check_limit(seen: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D10, where nobody knows the norm that was computed: to what norm two steps were clipped.

    Users clip to round numbers. A limit that is none, and becomes one times the square root of the size of a group,
    comes from a norm that counts what the ranks of the group hold on each of them. One that changes from step to step,
    and becomes a round number that does not with another norm, comes from that norm.
    """
    limits, scales = [], []
    for evidence in seen[-2:]:
        if any(numerics.rounding(one.dtype) > numerics.LIMITS_APART for one in evidence.gradients[0].at_step.values()):
            return  # the norm of what is rounded so is not known to as many digits
        before, after = (math.sqrt(evidence.squares(0, stage, local=False)) for stage in ("after_backward", "at_step"))
        if math.isfinite(before) and 0 < after < before * (1 - numerics.CLIPPED):
            limits.append(after)
            scales.append(after / before)
    if len(limits) < 2:
        return
    if abs(limits[0] - limits[1]) > numerics.LIMITS_APART * limits[0]:
        yield from _of_combined(seen, limits, scales)
    elif not _is_round(limits[1]):
        yield from _of_counted_twice(seen[-1], limits[1])


def _of_combined(seen: Sequence[Evidence], limits: Sequence[float], scales: Sequence[float]) -> Iterator[DoctorFinding]:
    """Find that two steps were clipped to one round number by a combination of the norms of what each rank holds."""
    last = seen[-1]
    for what, combined in (("sum", sum), ("largest", max)):
        then, now = (scale * combined(_local_norms(one)) for scale, one in zip(scales, seen[-2:], strict=True))
        if abs(then - now) < numerics.LIMITS_APART * now and _is_round(now):
            by_hand = any(_is_of_number(one) for one in last.records[0].collectives)
            lines = (
                f"gradients are clipped to {now:.2g} by the {what} of the norms of each rank's shards: "
                f"all gradients have the norms {limits[0]:.4g} and {limits[1]:.4g} after it in two steps",
                f"{'seen: an all_reduce of one number before the step: ' if by_hand else ''}"
                "reduce the sum of the squares, and take its root last",
            )
            yield DoctorFinding((codes.NORM,), codes.LOCAL_NORM, last.step, OTHER_NORM, lines)
            return


def _of_counted_twice(last: Evidence, limit: float) -> Iterator[DoctorFinding]:
    """Find that a limit is a round number times the root of the number of ranks that hold the same elements."""
    for name, members in last.groups_of(0).items():
        times = limit * math.sqrt(len(members))
        if len(members) > 1 and _is_round(times) and _hold_alike(last, members):
            lines = (
                f"gradients are clipped to a norm of {limit:.4g}, which is {times:.2g} / sqrt({len(members)})",
                f"seen: the {len(members)} ranks of {name} hold the same elements: the norm must count these once",
            )
            yield DoctorFinding((codes.NORM,), codes.LOCAL_NORM, last.step, OTHER_NORM, lines)
            return


def _hold_alike(evidence: Evidence, members: Sequence[int]) -> bool:
    """Whether some ranks hold the same elements of each parameter that trains."""
    sets = [[set(one) for one in evidence.holders.get(name, ())] for name in evidence.trained]
    return all(any(own >= set(members) for own in found) for found in sets)


def _is_of_number(collective: Collective) -> bool:
    """Whether a collective between backward and the step reduces one number."""
    return (collective.phase, collective.kind) == ("between", "all_reduce") and collective.nbytes <= _NUMBER


def _local_norms(evidence: Evidence) -> list[float]:
    return [math.sqrt(evidence.squares(rank, "after_backward", local=True)) for rank in range(len(evidence.records))]


def _is_round(value: float) -> bool:
    return abs(float(f"{value:.2g}") / value - 1) < numerics.ROUND


def scale_of(evidence: Evidence, rank: int) -> Scaling | None:
    """Return by what a rank's gradients were multiplied between backward and the step; None if not by one number."""
    own, factors = evidence.gradients[rank], []
    #: By the spacing of their dtype, gradients before and after, which say the more of the scale the less it is.
    found: dict[float, list[tuple[Gradient, Gradient]]] = {}
    for name, gradient in own.at_step.items():
        before = own.after_backward.get(name)
        if before is None or not before.fingerprint.squares:
            continue
        if not math.isfinite(before.fingerprint.squares) or not math.isfinite(gradient.fingerprint.squares):
            return None
        if before.fingerprint.numel < 2:
            continue  # one number is a multiple of any other
        factor, residual = fit(vector_of(gradient), vector_of(before))
        if residual > numerics.ONE_SCALE:
            return None  # it was reduced as well, or more than scaled
        factors.append(abs(factor))
        spacing = max(map(numerics.rounding, (before.dtype, gradient.dtype)))
        found.setdefault(spacing, []).append((before, gradient))
    if not factors or _spread(factors) > numerics.ONE_SCALE:
        return None
    return _scale_of_all(found[min(found)])


def _scale_of_all(pairs: Sequence[tuple[Gradient, Gradient]]) -> Scaling | None:
    """Return the scale of gradients of one dtype before and after, by their norms, of which rounding moves the least.

    The factor of sketches is off by the part of the rounding of all elements that eight numbers have of it.
    """
    before, after = (math.sqrt(sum(one.fingerprint.squares for one in each)) for each in zip(*pairs, strict=True))
    numel = sum(one.fingerprint.numel for _, one in pairs)
    dtype = max((one.dtype for pair in pairs for one in pair), key=numerics.rounding)
    once = numerics.rounding(dtype, numel, after)
    return Scaling(after / before, numerics.ROUNDINGS_OF_A_SCALE * once) if after else None


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / max(values) if max(values) else 0.0


def _rounding(scales: Sequence[Scaling]) -> float:
    """By which part of them the two scales whose rounding is largest may be apart."""
    return sum(sorted(one.rounding for one in scales)[-2:])


def _are_one(scales: Sequence[Scaling], each: Sequence[float]) -> bool:
    """Whether the products of scales with a number of each rank are equal, so that these are what ranks scale by."""
    products = [scale.value * one for scale, one in zip(scales, each, strict=True)]
    return _spread(products) <= numerics.SAME_NORM + _rounding(scales)


def _sizes(evidence: Evidence) -> set[int]:
    """How many ranks hold the same elements, of each parameter that trains."""
    return {len(one) for name in evidence.trained for one in evidence.holders.get(name, ())} - {1}
