"""What a step of the run that diverges looks like: the signatures of known mistakes, and the factors that it shows."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.finding import Stage
from shardproof.harness.judging.signatures import Diagnosis, diagnose, fit, guess_norm
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.tensors.layouts import part_of
from shardproof.harness.training.findings import listed
from shardproof.harness.training.sides import OfRank, Sides
from shardproof.harness.watching.observation import Key, key_of

Made = dict[str, tuple[list[int], Diagnosis]]
"""By gradient, the ranks on which it is something, and what."""


@dataclasses.dataclass
class Cause:
    """What the divergent stage as a whole shows.

    Attributes:
        lines: for the report.
        signature: of the mistake that it looks like; empty if it looks like none.
        factor: the gradients of the run over the oracle's; None where they have no common one.
    """

    lines: list[str] = dataclasses.field(default_factory=list)
    signature: str = ""
    factor: float | None = None


# Losses -------------------------------------------------------------------------------------


def of_losses(sides: Sides, ratios: torch.Tensor, places: Sequence[tuple[OfRank, Key]]) -> Cause:
    """Return why losses have no factor in common.

    Args:
        ratios: float64 [losses]: those of the run over the oracle's.
        places: the rank and the key of each.
    """
    own = torch.tensor([float(sides.tokens[rank.data_rank][key[3]]) for rank, key in places])
    sums = torch.tensor([float(sum(sides.tokens[rank.data_rank])) for rank, _ in places])
    total, count = sum(map(sum, sides.tokens)), sides.offsets[-1]
    each = (("microbatch", own, count), ("rank", sums, sides.request.data_size))
    alike = [one for one in each if _are_inverse(ratios, one[1], near=sides.near)]
    for who, tokens, parts in sorted(alike, key=lambda one: abs(float((ratios * one[1])[0]) / total - 1))[:1]:
        values = ", ".join(f"{one:.4g}" for one in _once((total / (parts * tokens)).tolist())[:6])
        counted = ", ".join(f"{one:.0f}" for one in _once(tokens.tolist())[:6])
        plural = "microbatches" if who == "microbatch" else "ranks"
        lines = [
            f"losses have no common factor: {values}, and these are (tokens of all {plural}) / ({plural} x tokens "
            "of this one)",
            f"each {who} counts alike [{codes.WEIGHTED}]: the sum of its losses is divided by its own tokens "
            f"({counted}), not by those of the step ({total})",
        ]
        return Cause(lines, codes.WEIGHTED)
    shown = ", ".join(f"{one:.4g}" for one in _once(ratios.tolist())[:6])
    return Cause([f"losses have no common factor: they are {shown} times the reference's"])


def _are_inverse(ratios: torch.Tensor, tokens: torch.Tensor, *, near: float) -> bool:
    """Whether ratios are one number divided by these counts, of which some differ."""
    if not bool((tokens > 0).all()) or bool((tokens == tokens[0]).all()):
        return False
    products = ratios * tokens
    return float((products / products[0] - 1).abs().max()) <= near


# Gradients ----------------------------------------------------------------------------------


def diagnosed(sides: Sides, stage: Stage) -> Made:
    """Return what each gradient is, and on which ranks; of those where it is several things, the worst."""
    found: Made = {}
    for name, parts in sides.contributions().items():
        mine: Made = {}
        for rank in sides.ranks:
            vector = sides.assembled(key_of(stage, name), rank)
            if vector is None:
                continue
            made = diagnose(
                vector, parts, rank=rank.data_rank, groups=sides.groups(rank), tolerance=sides.like,
                earlier=[one[name] for one in sides.earlier if name in one],
            )  # fmt: skip
            if made is not None:
                mine.setdefault(made.signature, ([], made))[0].append(rank.rank)
        if mine:
            found[name] = mine[max(mine)]
    return found


@dataclasses.dataclass(frozen=True)
class Before:
    """What earlier stages have shown of a step whose gradients diverge.

    Attributes:
        loss_factor: the losses of the run over the oracle's; None where they have no common one.
        has_own: whether a gradient before its reduction could be compared.
        since: the factors of gradients after backward and at the optimizer's step, where user code scales in between.
    """

    loss_factor: float | None
    has_own: bool
    since: tuple[float, float] | None


def of_gradients(sides: Sides, made: Made, before: Before) -> Cause:
    """Return what the gradients of a stage are, if it is one thing."""
    others = {name: one for name, one in made.items() if one[1].signature != codes.SCALED}
    count = len({key[2] for key in sides.exact(Stage.GRADIENT)})
    if not made or 2 * len(made) < count:
        return Cause()
    if not others:
        return _of_factor(sides, {name: one.factor for name, (_, one) in made.items()}, count, before)
    first = next(iter(others.values()))[1]
    ranks = {rank for mine, _ in others.values() for rank in mine}
    who = "every rank" if len(ranks) == len(sides.ranks) else ranks_of(ranks)
    text = (f"each gradient of {who} {first.text} [{first.signature}] (c = {first.factor:.4f}, "
            f"residual {first.residual:.0e}; {len(others)} of {count} parameters: {listed(list(others))})")  # fmt: skip
    return Cause([text], first.signature)


def _of_factor(sides: Sides, factors: Mapping[str, float], count: int, before: Before) -> Cause:
    wrong = {name: one for name, one in factors.items() if abs(one - 1) > sides.near}
    if not wrong:
        return Cause()
    values = torch.tensor(list(wrong.values()), dtype=torch.float64)
    factor = float(values.median())
    spread = float((values / factor - 1).abs().max()) if factor else math.inf
    if spread > sides.near:
        return Cause()
    exact, name = sides.named(factor)
    told = f": {exact:.4g} is {name}" if name else ""
    if name.startswith("1 / "):
        told = f": 1/{1 / exact:.4g} is {name}"
    everything = len(wrong) == len(factors)
    which = "every gradient is" if everything else f"the gradients of {listed(list(wrong))} are"
    at = " at the optimizer's step, before clipping" if before.since is not None else ""
    lines = [f"{which} exactly {factor:.4f} x the reference's{at} ({len(wrong)} of {count} parameters, spread "
             f"{spread:.0e}){told} [{codes.SCALED}]"]  # fmt: skip
    if before.since is not None:
        lines += _scaled_since(sides, *before.since)
    else:
        lines += _scaled_in_backward(sides, exact if everything else None, factor, before)
    return Cause(lines + (_hidden(sides) if everything else []), codes.SCALED, exact)


def _scaled_since(sides: Sides, back: float, last: float) -> list[str]:
    return [
        f"after backward it is {back:.4g} x the reference's, and user code multiplies it by {last / back:.4g} x "
        f"the reference's multiplier: {1 / back:.4g} x is right",
        f"multiply gradients by {_remedy(sides, last)} more before the step",
    ]


def _scaled_in_backward(sides: Sides, exact: float | None, factor: float, before: Before) -> list[str]:
    """Say where the mistake lies, and of all gradients, whose factor is ``exact``, what corrects it."""
    lines = []
    if before.loss_factor is not None:
        told, since = ("losses and own gradients", "backward") if before.has_own else ("losses", "the loss")
        lines.append(
            f"{told} agree (factor {before.loss_factor:.4g}): the mistake lies between {since} and the gradients"
        )
    if exact is None:
        return lines
    size = sides.request.data_size
    if before.loss_factor != 1 or abs(factor * size - 1) >= sides.near:
        return [*lines, f"multiply the loss of each microbatch by {_remedy(sides, exact)}"]
    others = ", or set_gradient_divide_factor(1) of fully_shard"
    return [
        *lines,
        "the loss of a microbatch equals the reference's, and the ranks average its gradients: "
        f"multiply the loss by {_remedy(sides, 1 / size)}{others * sides.ranks[0].is_fully_sharded}",
    ]


def _remedy(sides: Sides, factor: float) -> str:
    """Return what to multiply by where a factor is wrong: the reference runs the same step, on one rank."""
    exact, name = sides.named(1 / factor)
    return f"{name or 'a number of the mesh'} ({exact:.4g} here, and 1 on one rank)"


def _hidden(sides: Sides) -> list[str]:
    """Say what does not show the factor, and what does."""
    exact = sides.exact(Stage.TOTAL_NORM)
    mine = sides.ranks[0]
    norms = [(float(sides.norm(key, mine)), float(exact[key])) for key in mine.events if key in exact]
    if sides.request.optimizer != "adamw" and not any(
        key[6] == "exp_avg_sq" for key in sides.exact(Stage.OPTIMIZER_STATE)
    ):
        return []
    told = f" ({norms[0][0]:.3g} for {norms[0][1]:.3g} on rank 0)" if norms else ""
    return [f"Adam hides the factor, as it divides by the size of the gradient; the norm{told} and clipping do not"]


def of_sums(sides: Sides, names: Iterable[str]) -> Cause:
    """Return whether ranks of one data rank each have a part of a gradient of which they hold the same elements."""
    lacking = [name for name in names if _is_apart(sides, key_of(Stage.GRADIENT, name))]
    if not lacking:
        return Cause()
    dims = [name for name, size in sides.request.mesh if name not in sides.request.data_dims and size > 1]
    text = (f"ranks of {', '.join(dims)} hold the same elements of {listed(lacking)} and have different gradients: the "
            f"sum over {dims[0]} is missing [{codes.APART}]")  # fmt: skip
    return Cause([text], codes.APART)


def _is_apart(sides: Sides, key: Key) -> bool:
    """Whether the first data rank's gradient is the reference's only as a sum over ranks with the same elements."""
    held = [rank.events[key] for rank in sides.ranks if rank.data_rank == 0 and key in rank.events]
    if len(held) < 2 or key not in sides.oracle.tensors or len({one.layout for one in held}) > 1:
        return False
    layout = held[0].layout
    if layout is None:
        return False
    full = torch.stack([one.value.double() for one in held]).sum(0)
    exact = part_of(sides.oracle.tensors[key], layout.box).reshape(full.shape).cpu()
    return float((full - exact).norm()) <= sides.near * float(exact.norm())


# Norms, and what is scaled by them ----------------------------------------------------------


def of_scale(sides: Sides) -> Cause:
    """Return whether gradients that agree after backward have one factor at the step, and of which norm that is."""
    factors = _factors_at_step(sides)
    if factors is None:
        return Cause()
    wrong = [one for one, factor in zip(sides.ranks, factors, strict=True) if abs(factor - 1) > sides.near]
    shown = ", ".join(_once(f"{factors[one.rank]:.4g}" for one in wrong)[:6])
    where = "every rank" if len(wrong) == len(sides.ranks) else ranks_of([one.rank for one in wrong])
    size = math.hypot(*(float(one.double().norm()) for one in sides.exact(Stage.GRADIENT).values()))
    norms = {over_dimensions(sides, size / factors[one.rank], size, one, 2.0) for one in wrong}
    norm = norms.pop() if len(norms) == 1 else ""
    named = {sides.named(factors[one.rank])[1] for one in wrong} - {""}
    why = "--off clipping shows whether clip_grad_norm_() scales them"
    if norm:
        why = "they are scaled by another norm"
    elif len(named) == 1 and len(wrong) == len(sides.ranks):
        why = f"user code multiplies them by {named.pop()} x the reference's multiplier"
    text = f"gradients agree after backward and are {shown} x the reference's at the optimizer's step on {where}: {why}"
    return Cause([text, norm], codes.LOCAL_NORM) if norm else Cause([text])


def _factors_at_step(sides: Sides) -> list[float] | None:
    """Return by what each rank's gradients at the step are the reference's; None if one has no factor."""
    exact, factors = sides.exact(Stage.CLIPPED_GRADIENT), []
    for rank in sides.ranks:
        pairs = []
        for key, seen in rank.events.items():
            if key in exact and seen.layout is not None:
                full = part_of(exact[key], seen.layout.box).reshape(seen.value.shape)
                pairs.append((seen.value.double().flatten(), full.double().flatten().cpu()))
        factor, residual = fit(*(torch.cat(side) for side in zip(*pairs, strict=True))) if pairs else (0.0, 1.0)
        if factor <= 0 or residual > sides.near:
            return None
        factors.append(factor)
    return factors


def of_norm(sides: Sides, norm: float, exact: float, rank: OfRank) -> Cause:
    """Return which norm a rank has in place of the reference's."""
    kind = rank.norm_types[0] if rank.norm_types else 2.0
    guess = guess_norm(norm, exact, float(_norm_held(rank, kind)), len(sides.ranks), kind)
    text = over_dimensions(sides, norm, exact, rank, kind)
    text = text or (f"{guess.seen} [{codes.LOCAL_NORM}]" if guess is not None else "")
    return Cause([text], codes.LOCAL_NORM) if text else Cause()


def over_dimensions(sides: Sides, norm: float, exact: float, rank: OfRank, kind: float) -> str:
    """Say over which dimensions of the mesh a norm sums what ranks hold; nothing if over none."""
    near = max(sides.near, numerics.NORM_ROUNDING) * norm
    if abs(norm - exact) <= near:
        return ""  # rounding, which no sum over ranks explains
    held = [_norm_held(one, kind) for one in sides.ranks]
    for some, others, group in _groups(sides, rank):
        if abs(float(torch.linalg.vector_norm(torch.stack([held[one] for one in group]), kind)) - norm) > near:
            continue
        if not some:
            text = "it is the norm of this rank's shards: the shards of other ranks are missing"
        elif norm > exact:
            text = f"it sums the shards of all ranks of {some}, and counts an element once for each rank that has it"
        else:
            text = f"it sums the shards of the ranks of {some}, and nothing over {others}"
        return f"{text} [{codes.LOCAL_NORM}]"
    return ""


def _groups(sides: Sides, rank: OfRank) -> Iterator[tuple[str, str, list[int]]]:
    """For each set of dimensions of the mesh its names, those of the others, and the ranks along it around a rank."""
    dims = [(name, size) for name, size in sides.request.mesh if size > 1]
    places = list(itertools.product(*(range(size) for _, size in dims)))
    for count in range(len(dims) + 1):
        for some in itertools.combinations(range(len(dims)), count):
            others = [number for number in range(len(dims)) if number not in some]
            own = places[rank.rank]
            group = [one for one, place in enumerate(places) if all(place[number] == own[number] for number in others)]
            names = (" and ".join(dims[number][0] for number in numbers) for numbers in (some, others))
            yield *names, group  # type: ignore[misc]


def _norm_held(rank: OfRank, kind: float) -> torch.Tensor:
    """The norm of the gradients that one rank holds, float64 []."""
    held = [one.value.double().flatten() for one in rank.events.values() if one.stage == Stage.GRADIENT]
    return torch.linalg.vector_norm(torch.cat(held), kind) if held else torch.zeros((), dtype=torch.float64)


def _once(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
