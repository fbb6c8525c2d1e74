"""Is what trains in an optimizer, does its step move it, and do all ranks step alike? (D4, D6, D7, D18)"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.numerics import ulp
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding, listed
from shardproof.harness.training.invariants import has_gradient
from shardproof.harness.watching import samples
from shardproof.harness.watching.names import name_of
from shardproof.harness.watching.optimizers import AGE
from shardproof.harness.watching.records import Gradient, Optimizer, Parameter

#: The title of the finding that the model's parameters are in no optimizer that steps.
DEAD = "the optimizer holds dead parameters"

#: The values of a setting that a finding lists.
_MOST_VALUES = 4

#: The names of :data:`samples.NARROW`, as records have them.
NARROW = tuple(map(name_of, samples.NARROW))


def check_optimizers(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D4: optimizers have the model's parameters."""
    record = evidence.records[0]
    dead = [one for one in record.optimizers if one.live + one.outside < one.size]
    reached = any(one.live for one in record.optimizers)
    for one in dead:
        if one.live == 0 and (reached or one.outside or not one.shapes_agree):
            continue  # of another model, which is not watched
        what = f"none of the {one.size} parameters of {one.kind} is the model's"
        if one.live:
            what = f"{one.size - one.live - one.outside} of the {one.size} parameters of {one.kind} are not the model's"
        lines = (f"{what}{_why_dead(one)}", "its step does not move the model's own")
        title = DEAD if not one.live else "the optimizer holds some dead parameters"
        yield DoctorFinding((codes.OPTIMIZED,), codes.UNMOVED, evidence.step, title, lines)


def _why_dead(optimizer: Optimizer) -> str:
    """Say where the parameters of an optimizer come from that are not the model's."""
    if optimizer.gathered:
        return (
            " but gathered ones, which a unit of FSDP2 has for a time: make the optimizer right after fully_shard(), "
            "before any forward or unshard()"
        )
    return " (shapes agree): it was made before sharding, or from another model" if optimizer.shapes_agree else ""


def check_optimizers_ever(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D4, after the last step: each parameter that trains is in an optimizer.

    One that has stepped in none of the steps may have its turn in a later one. What is made to train later is not in
    any while it has no gradient.
    """
    trains = _trained_ever(records)
    left = [name for name in trains if all(name in one.left for one in records)]
    resting = _resting_ever(records)
    if rest := [name for name in left if name in resting]:
        yield _of_resting(records, {name: resting[name] for name in rest}, len(trains))
    if left := [name for name in left if name not in resting]:
        line = f"{listed(left)}: {len(left)} of {len(trains)} parameters that require a gradient are in no optimizer"
        yield DoctorFinding(
            (codes.OPTIMIZED,), codes.UNMOVED, records[-1].step, "parameters are in no optimizer", (line,)
        )


def _trained_ever(records: Sequence[Evidence]) -> list[str]:
    """Return what trains in the first step, and what has a gradient in the last."""
    last = records[-1]
    trains = [name for name, one in records[0].records[0].parameters.items() if one.trains]
    return trains + [name for name in last.trained if name not in trains and last.own(name)]


def _resting_ever(records: Sequence[Evidence]) -> dict[str, str]:
    """Return the parameters that are in an optimizer which has not stepped in some step, and its class."""
    held = (one for seen in records for record in seen.records for one in record.parameters.items())
    return {name: one.resting for name, one in held if one.resting}


def _of_resting(records: Sequence[Evidence], resting: Mapping[str, str], count: int) -> DoctorFinding:
    """Make the note of parameters in optimizers that do not step, by name the class of each; ``count`` train."""
    kinds = " and ".join(dict.fromkeys(resting.values()))
    of = f"{len(resting)} of {count} parameters that require a gradient are"
    lines = (
        f"{listed(list(resting))}: {of} in {kinds}, which does not step in the watched steps {_steps(records)}",
        "meant, as where optimizers take turns, or one begins later? then watch a step of it with --steps; else it "
        "is never called",
    )
    title = "an optimizer does not step in the watched steps"
    return DoctorFinding((codes.OPTIMIZED,), codes.UNMOVED, records[-1].step, title, lines, is_note=True)


def _steps(seen: Sequence[Evidence]) -> str:
    return f"{seen[0].step}-{seen[-1].step}" if len(seen) > 1 else str(seen[0].step)


_Held = list[tuple[Parameter, Gradient | None]]
"""What ranks hold of a parameter that an optimizer steps, each with its gradient when it does."""


def check_updates(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D6 and D7: what has a gradient moves in the step, and gets state where others do."""
    stepped = _stepped(evidence)
    # Of what moves it does not matter which state its optimizer keeps, and where.
    still = {name: held for name, held in stepped.items() if all(one.before == one.after for one, _ in held)}
    yield from _check_moves(evidence, still, stepped)
    yield from _check_states(evidence, still)


def _stepped(evidence: Evidence) -> dict[str, _Held]:
    """Return what ranks hold of the parameters that optimizers step, and that have a gradient on some rank."""
    found: dict[str, _Held] = {}
    for name in evidence.names:
        every = [(record.parameters.get(name), record.gradients.at_step.get(name)) for record in evidence.records]
        held = [(one, gradient) for one, gradient in every if one is not None and one.optimizer is not None]
        if any(has_gradient(gradient) for _, gradient in held):
            found[name] = held
    return found


def _check_moves(
    evidence: Evidence, still: Mapping[str, _Held], stepped: Mapping[str, _Held]
) -> Iterator[DoctorFinding]:
    """D6: an update moves a parameter, or is below the spacing of its values.

    Args:
        still: the parameters of which no bit changes.
        stepped: those that have a gradient.
    """
    must_move: list[str] = []
    lost: list[str] = []
    for name, held in still.items():
        if all(one.lr is None or one.lr > 0 for one, _ in held):
            (must_move if any(_must_move(*one) for one in held) else lost).append(name)
    if must_move:
        line = f"{listed(must_move)}: the gradient is not zero, and no bit changes in the step"
        lines = (line, *_too_small(evidence, must_move))
        yield DoctorFinding((codes.MOVES,), codes.UNMOVED, evidence.step, "parameters do not move", lines)
    yield from _check_lost(evidence, lost, still, stepped)


def _check_lost(
    evidence: Evidence, lost: Sequence[str], still: Mapping[str, _Held], stepped: Mapping[str, _Held]
) -> Iterator[DoctorFinding]:
    """D6: the update of most elements is not lost to rounding; all of ``lost`` is."""
    dtypes = {name: one.dtype for record in evidence.records for name, one in record.parameters.items()}
    # In float32 a single one has a gradient of rounding noise, as a bias has before a normalization.
    narrow = [name for name in lost if dtypes[name] in NARROW] if len(lost) < len(stepped) else list(lost)
    partly = {name: _unchanged(held) for name, held in stepped.items() if name not in still}
    partly = {name: share for name, share in partly.items() if share > numerics.MOST_LOST}
    if narrow or partly:
        yield _of_rounded(evidence, narrow, partly, dtypes[[*narrow, *partly][0]])


def _unchanged(held: _Held) -> float:
    """Return the part of the sampled elements with a gradient of a narrow parameter that the step does not change."""
    found = [one.narrow for one, _ in held if one.narrow is not None and (one.lr is None or one.lr > 0)]
    count = sum(one.sampled for one in found)
    return sum(one.unchanged for one in found) / count if count else 0.0


def _of_rounded(evidence: Evidence, names: list[str], partly: Mapping[str, float], dtype: str) -> DoctorFinding:
    """Make the note of updates that are below the spacing of the values of parameters, of all or of most of them."""
    mend = (
        "keep parameters in float32, or round stochastically" if dtype in NARROW else "the learning rate is too small"
    )
    lines = []
    if names:
        lines.append(
            f"{listed(names)}: the gradient is not zero, and the update is below half of the spacing of "
            f"{dtype} at the parameter's values, so no bit changes in the step"
        )
    if partly:
        low, high = min(partly.values()), max(partly.values())
        share = f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
        lines.append(
            f"{listed([*partly])}: the update of {share} of the elements is below half of the spacing of {dtype} at "
            "their values, so the step does not change them (of elements with a gradient, from a sample)"
        )
    known = ", or where the optimizer rounds stochastically or compensates" if partly else ""
    lines.append(f"meant, as at the start of a warm-up{known}? else {mend}")
    return DoctorFinding(
        (codes.MOVES,), codes.ROUNDED, evidence.step, "updates are lost to rounding", tuple(lines), is_note=True
    )


#: The position in ``betas`` of the factor by which a step decays a moment, by the moment's key.
_MOMENTS = {"exp_avg": 0, "exp_avg_sq": 1}


def _lost_moments(held: Parameter) -> Iterator[tuple[str, str, float]]:
    """Yield the moments of a parameter that cannot fall: key, dtype and beta."""
    betas = held.settings.get("betas", ())
    for key, dtype in held.narrow.states.items() if held.narrow is not None else ():
        if key in _MOMENTS and isinstance(betas, tuple) and len(betas) == len(_MOMENTS):
            beta = betas[_MOMENTS[key]]
            if 0.0 < 1.0 - beta < numerics.LESS_THAN_HALF * numerics.EPS[dtype]:
                yield key, dtype, beta


def check_moments_ever(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D6, after the last step: a moment can follow the gradients in its dtype.

    A step lowers a moment by at most 1 - beta of its value. A decrease below half of the spacing is rounded away, and
    then the moment never falls. The comparison is with the spacing: moments grow in first steps and do not show it.
    """
    lost: dict[tuple[str, str, float], list[str]] = {}
    for record in records[-1].records:
        for name, one in record.parameters.items():
            for moment in _lost_moments(one):
                lost.setdefault(moment, []).append(name)
    if lost:
        lines = [
            f"{key!r} of {listed(list(dict.fromkeys(names)))}: a step lowers it by at most 1 - {beta} = "
            f"{1.0 - beta:.1g} of its value, below half of the spacing of {dtype} "
            f"({numerics.LESS_THAN_HALF * numerics.EPS[dtype]:.1g} of it at least), so it never falls"
            for (key, dtype, beta), names in lost.items()
        ]
        lines.append("meant, as where the optimizer rounds stochastically? else keep states in float32, or lower beta")
        title = "moments are lost to rounding"
        yield DoctorFinding((codes.MOVES,), codes.ROUNDED, records[-1].step, title, tuple(lines), is_note=True)


def _check_states(evidence: Evidence, still: Mapping[str, _Held]) -> Iterator[DoctorFinding]:
    """D7: what does not move has optimizer state where other parameters of its optimizer do."""
    with_state = {one.optimizer for one in evidence.records[0].parameters.values() if one.state}
    stateless = [
        name
        for name, held in still.items()
        if not any(one.state for one, _ in held) and held[0][0].optimizer in with_state
    ]
    if stateless:
        line = f"{listed(stateless)}: other parameters of the same optimizer have state"
        yield DoctorFinding(
            (codes.HAS_STATE,), codes.UNMOVED, evidence.step, "parameters have no optimizer state", (line,)
        )


def check_settings(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D18: ranks that hold parts of one parameter step them by the same settings, from states of the same age.

    Of ranks that hold the same elements D1 and D3 tell it.
    """
    differ: dict[str, list[str]] = {}
    values: dict[str, dict[int, Any]] = {}
    for name in evidence.names:
        for ranks in evidence.sharers(name):
            for key, mine in _unlike({rank: evidence.records[rank].parameters[name] for rank in ranks}):
                differ.setdefault(key, []).append(name)
                values.setdefault(key, mine)
    if differ:
        lines = (
            *(_of_setting(key, values[key], names) for key, names in differ.items()),
            "each rank moves its part of these by its own: compute them from what all ranks have, as a scheduler that "
            "reads a loss needs its mean over ranks, and load states on all of them",
        )
        title = "ranks step by different settings of the optimizer"
        yield DoctorFinding((codes.STEPS_ALIKE,), "", evidence.step, title, lines)


def _settings_of(held: Parameter) -> dict[str, Any]:
    """What ranks must have alike of a parameter that they step, by its name in messages."""
    age = {f"state {AGE!r}": held.state[AGE]} if AGE in held.state else {}
    return {"lr": held.lr, **held.settings, **age}


def _unlike(held: Mapping[int, Parameter]) -> Iterator[tuple[str, dict[int, Any]]]:
    """Yield the settings that ranks have of parts of one parameter and that differ, each with its value by rank."""
    every = {rank: _settings_of(one) for rank, one in held.items() if one.optimizer is not None}
    for key in dict.fromkeys(key for mine in every.values() for key in mine):
        values = {rank: own.get(key) for rank, own in every.items()}
        if len(set(values.values())) > 1:
            yield key, values


def _of_setting(key: str, values: Mapping[int, Any], names: Sequence[str]) -> str:
    """Say which ranks have which value of a setting, of the first of these parameters."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    if key.startswith("state "):  # of which only the bits are known
        told = f"one on {', another on '.join(ranks_of(some) for some in ranks.values())}"
    else:
        told = ", ".join(f"{value} on {ranks_of(some)}" for value, some in [*ranks.items()][:_MOST_VALUES])
        told += f" and {len(ranks) - _MOST_VALUES} more values" * (len(ranks) > _MOST_VALUES)
    return f"{key} of {listed(list(dict.fromkeys(names)))}: {told}"


def check_rates_ever(records: Sequence[Evidence]) -> Iterator[DoctorFinding]:
    """D6, after the last step: no group has a learning rate of 0 in all steps, beside groups that move."""
    held = [one for seen in records for record in seen.records for one in record.parameters.items()]
    stepped = [(name, one) for name, one in held if one.optimizer is not None and one.lr is not None]
    moving = {name for name, one in stepped if one.lr}
    still = list(dict.fromkeys(name for name, one in stepped if name not in moving and one.before == one.after))
    if still and moving:
        some = f"{listed(still)}: {len(still)} of {len(still) + len(moving)} parameters that optimizers step"
        lines = (
            f"{some} have a learning rate of 0 in the watched steps {_steps(records)}, and others one above 0",
            "meant, as where a part is frozen or warms up later? else look at how the rates of groups are computed",
        )
        yield DoctorFinding(
            (codes.MOVES,), codes.UNMOVED, records[-1].step, "a learning rate is 0", lines, is_note=True
        )


def _must_move(held: Parameter, gradient: Gradient | None) -> bool:
    """Whether the step of any optimizer changes a bit of what a rank holds of a parameter that has not moved.

    An optimizer moves by the rate times the gradient, or more, as where it normalizes: times 1. An update of an ulp of
    the largest element changes each.
    """
    if held.largest is None or held.lr is None:
        return True
    if gradient is None or not has_gradient(gradient):
        return False
    root = math.sqrt(gradient.fingerprint.squares / gradient.fingerprint.numel)
    return held.lr * min(root, 1.0) >= ulp(held.largest, getattr(torch, held.dtype))


def _too_small(evidence: Evidence, names: Sequence[str]) -> list[str]:
    every = [record.parameters for record in evidence.records]
    held = [next(own[name] for own in every if name in own) for name in names]
    if all(one.dtype in NARROW for one in held):
        return [f"in {held[0].dtype} an update below half an ulp of a parameter is lost"]
    return []
