"""Is what trains in an optimizer, and does its step move it? (D4, D6, D7)"""

import math
from collections.abc import Iterator, Sequence

import torch

from shardproof.harness.judging import codes
from shardproof.harness.judging.numerics import ulp
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import Finding, listed
from shardproof.harness.training.invariants import has_gradient
from shardproof.harness.watching.records import Gradient, Optimizer, Parameter

#: The title of the finding that the model's parameters are in no optimizer that steps.
DEAD = "the optimizer holds dead parameters"

#: The dtypes in which an update is easily less than half of the spacing of a parameter's values.
NARROW = ("bfloat16", "float16")


def check_optimizers(evidence: Evidence) -> Iterator[Finding]:
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
        yield Finding((codes.OPTIMIZED,), codes.UNMOVED, evidence.step, title, lines)


def _why_dead(optimizer: Optimizer) -> str:
    """Say where the parameters of an optimizer come from that are not the model's."""
    if optimizer.gathered:
        return (
            " but gathered ones, which a unit of FSDP2 has for a time: make the optimizer right after fully_shard(), "
            "before any forward or unshard()"
        )
    return " (shapes agree): it was made before sharding, or from another model" if optimizer.shapes_agree else ""


def check_optimizers_ever(records: Sequence[Evidence]) -> Iterator[Finding]:
    """D4, after the last step: each parameter that trains is in an optimizer.

    One that has stepped in none of the steps may have its turn in a later one. What is made to train later is not in
    any while it has no gradient.
    """
    last = records[-1]
    trains = [name for name, one in records[0].records[0].parameters.items() if one.trains]
    trains += [name for name in last.trained if name not in trains and last.own(name)]
    left = [name for name in trains if all(name in one.left for one in records)]
    resting = {name: kind for seen in records for one in seen.records for name, kind in one.resting.items()}
    if rest := [name for name in left if name in resting]:
        kinds = " and ".join(dict.fromkeys(resting[name] for name in rest))
        of = f"{len(rest)} of {len(trains)} parameters that require a gradient are"
        lines = (
            f"{listed(rest)}: {of} in {kinds}, which does not step in the watched steps {_steps(records)}",
            "meant, as where optimizers take turns, or one begins later? then watch a step of it with --steps; else it "
            "is never called",
        )
        title = "an optimizer does not step in the watched steps"
        yield Finding((codes.OPTIMIZED,), codes.UNMOVED, last.step, title, lines, is_note=True)
    if left := [name for name in left if name not in resting]:
        line = f"{listed(left)}: {len(left)} of {len(trains)} parameters that require a gradient are in no optimizer"
        yield Finding((codes.OPTIMIZED,), codes.UNMOVED, records[-1].step, "parameters are in no optimizer", (line,))


def _steps(seen: Sequence[Evidence]) -> str:
    return f"{seen[0].step}-{seen[-1].step}" if len(seen) > 1 else str(seen[0].step)


def check_updates(evidence: Evidence) -> Iterator[Finding]:
    """D6 and D7: what has a gradient moves in the step, and gets state where others do."""
    still: list[str] = []
    lost: list[str] = []
    stateless: list[str] = []
    count = 0
    with_state = {one.optimizer for one in evidence.records[0].parameters.values() if one.state}
    for name in evidence.names:
        held = [(record, record.parameters.get(name)) for record in evidence.records]
        mine = [(record, one) for record, one in held if one is not None and one.optimizer is not None]
        if not mine or not any(has_gradient(record.at_step.get(name)) for record, _ in mine):
            continue
        count += 1
        if any(one.before != one.after for _, one in mine):
            continue  # whatever state its optimizer keeps, and where
        if all(one.lr is None or one.lr > 0 for _, one in mine):
            must_move = any(_must_move(one, record.at_step.get(name)) for record, one in mine)
            (still if must_move else lost).append(name)
        if not any(one.state for _, one in mine) and mine[0][1].optimizer in with_state:
            stateless.append(name)
    if still:
        line = f"{listed(still)}: the gradient is not zero, and no bit changes in the step"
        lines = [line, *_too_small(evidence, still)]
        yield Finding((codes.MOVES,), codes.UNMOVED, evidence.step, "parameters do not move", tuple(lines))
    dtypes = {name: one.dtype for record in evidence.records for name, one in record.parameters.items()}
    # In float32 a single one has a gradient of rounding noise, as a bias has before a normalization.
    if narrow := [name for name in lost if dtypes[name] in NARROW] if len(lost) < count else lost:
        more = "keep parameters in float32, or round stochastically"
        lines = [
            f"{listed(narrow)}: the gradient is not zero, and the update is below half of the spacing of "
            f"{dtypes[narrow[0]]} at the parameter's values, so no bit changes in the step",
            "meant, as at the start of a warm-up? else "
            + (more if dtypes[narrow[0]] in NARROW else "the learning rate is too small"),
        ]
        yield Finding(
            (codes.MOVES,), codes.ROUNDED, evidence.step, "updates are lost to rounding", tuple(lines), is_note=True
        )
    if stateless:
        line = f"{listed(stateless)}: other parameters of the same optimizer have state"
        yield Finding((codes.HAS_STATE,), codes.UNMOVED, evidence.step, "parameters have no optimizer state", (line,))


def check_rates_ever(records: Sequence[Evidence]) -> Iterator[Finding]:
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
        yield Finding((codes.MOVES,), codes.UNMOVED, records[-1].step, "a learning rate is 0", lines, is_note=True)


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
