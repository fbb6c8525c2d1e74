"""What a divergence of two recordings is: the signature of a known mistake, or what else its numbers show."""

import math
from collections.abc import Mapping, Sequence

import torch

from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.finding import Stage
from shardproof.harness.judging.signatures import diagnose, fit, name_of_factor, total
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training.alignment import FIELDS, name_of_seen
from shardproof.harness.training.evidence import vector_of
from shardproof.harness.training.findings import launched, listed
from shardproof.harness.training.pairs import Judged, Pair
from shardproof.harness.training.recording import Recorded, RecordedEvent
from shardproof.harness.training.resuming import different_ages
from shardproof.harness.watching.records import Gradient


class Explained:
    """Explains the first divergence of a rank.

    Args:
        pair: the step, with those before it.
        rank: of the run.
    """

    def __init__(self, pair: Pair, rank: int) -> None:
        self._pair, self._rank = pair, rank

    def cause(self, far: Sequence[Judged]) -> Judged:
        """Return the first that is too far; of gradients at the step, what is not only scaled, as by a wrong norm."""
        own, others = self._pair.run.gradients, self._pair.ref.gradients
        held, expected = own[self._rank].at_step, others[self._pair.peer(self._rank)].at_step
        for one in far if far[0].seen.stage is Stage.CLIPPED_GRADIENT else ():
            mine, other = held.get(one.seen.parameter), expected.get(one.seen.parameter)
            if one.seen.stage is not Stage.CLIPPED_GRADIENT or mine is None or other is None:
                continue
            if mine.box == other.box and fit(vector_of(mine), vector_of(other))[1] > 4 * self._pair.allowed:
                return one
        return far[0]

    def lines(self, seen: RecordedEvent) -> list[str]:
        """Return what a tensor that diverges is, in lines."""
        if seen.stage in (Stage.LOSS, Stage.OWN_GRADIENT, Stage.OUTPUT_GRADIENT):
            return self._weights() or self._forward()
        if seen.stage not in FIELDS:
            return []
        field, name = FIELDS[seen.stage], name_of_seen(seen)
        mine, other = self._sides(field, name)
        assert mine is not None and other is not None
        if not bool(mine.isfinite().all()):
            return ["it is not finite"]
        if not bool(mine.any()):
            return ["it is zero, which the reference's is not"]
        if field in ("after_backward", "at_step"):
            return self._gradient(field, name, mine, other)
        before = self._pair.run.vector(self._rank, "initial", name)
        if field == "after" and before is not None and torch.equal(before, mine):
            return [f"the optimizer has not moved it [{codes.UNMOVED}]"]
        if field == "after" and (found := self._update(name)):
            return found
        return self._factor(field, name, mine, other) or self._parts(field, name)

    def _sides(self, field: str, name: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The sketches of a full tensor as the rank has it, and as the reference has it."""
        return self._pair.run.vector(self._rank, field, name), self._pair.expected(self._rank, field, name)

    def _gradient(self, field: str, name: str, mine: torch.Tensor, other: torch.Tensor) -> list[str]:
        if found := self._factor(field, name, mine, other):
            return found
        pair, evidence = self._pair, self._pair.run.evidence
        own = evidence.own(name)
        earlier = [total(parts) for one in reversed(pair.earlier) if (parts := one.run.evidence.own(name))]
        known = diagnose(mine, own, rank=self._rank, groups=evidence.groups_of(self._rank), earlier=earlier,
                         tolerance=max(evidence.tolerance(name), pair.allowed)) if own else None  # fmt: skip
        if known is None:
            return self._parts(field, name) or ["it matches no known mistake"]
        if known.signature == codes.SCALED:
            return [f"it is {known.factor:.4g} x the sum of all ranks' own gradients: the own gradients differ"]
        return [f"it {known.text} (c = {known.factor:.4f}) [{known.signature}]"]

    def _factor(self, field: str, name: str, mine: torch.Tensor, other: torch.Tensor) -> list[str]:
        factor, residual = fit(mine, other)
        tolerance = 4 * self._pair.allowed
        if residual > tolerance or abs(factor - 1) <= tolerance or factor == 0:
            return []
        spread = max(numerics.NAMED_FACTOR, tolerance)
        fits = self._fits(field, name.partition(":")[2])
        same = [one for one, (k, rest) in fits.items() if rest <= tolerance and abs(k - factor) <= spread * abs(factor)]
        what = "gradient" if field in ("after_backward", "at_step") else "tensor"
        who = f"every {what} is" if len(same) == len(fits) else f"{listed(same)} are"
        named = name_of_factor(factor, self._sizes(), spread=spread)
        text = f"{who} exactly {factor:.4f} x the reference's ({len(same)} of {len(fits)})"
        lines = [f"{text}: {named} [{codes.SCALED}]" if named else f"{text} [{codes.SCALED}]"]
        if field == "at_step" and (scaled := self._pair.scaled_since) is not None:
            back, last = scaled
            lines.append(
                f"after backward it is {back:.4g} x: multiply it by {1 / last:.4g} before the optimizer's step"
            )
        return lines

    def _fits(self, field: str, state: str) -> dict[str, tuple[float, float]]:
        """By name, the factor and the residual of each tensor of a kind."""
        found = {}
        for of, name in self._pair.ref.first:
            if of != field or name.partition(":")[2] != state:
                continue
            mine, other = self._sides(field, name)
            if mine is not None and other is not None:
                found[name] = fit(mine, other)
        return found

    def _update(self, name: str) -> list[str]:
        """Say if updates by equal gradients have a factor, or differ by a part of the parameter."""
        names = [one for one in self._pair.names("after") if ":" not in one]
        known = {one: found for one in names if (found := self._kind_of_update(one)) is not None}
        if name not in known:
            return self._rates(names)
        kind, factor = known[name]
        spread = numerics.UPDATES_ALIKE * abs(factor)
        same = [one for one, (of, k) in known.items() if of == kind and abs(k - factor) <= spread]
        which = "every parameter" if len(same) == len(names) else listed(same)
        if kind == "decay":
            return [f"with equal gradients, {which} moved by {factor:+.2g} x itself more than the reference's: the "
                    "weight decay differs"]  # fmt: skip
        return [f"with equal gradients, {which} moved {factor:.4g} times as far as the reference's: {self._why()}"]

    def _why(self) -> str:
        """Say what makes updates by equal gradients differ by a factor."""
        return "the ages of optimizer states differ" if different_ages(self._pair) else "learning rates differ"

    def _kind_of_update(self, name: str) -> tuple[str, float] | None:
        """Return "rate" and an update's factor, or "decay" and the part of the parameter in it; None of others."""
        (start, begin), (end, goal) = self._sides("initial", name), self._sides("after", name)
        if start is None or end is None or begin is None or goal is None or self._pair.is_noise(name):
            return None
        mine, other, size = end - start, goal - begin, float(goal.norm())
        least = min(float(mine.norm()), float(other.norm()))
        near = max(math.sqrt(self._pair.allowed), 4 * self._pair.eps * size / least) if least else math.inf
        if near >= numerics.UPDATES_TELL:
            return None
        factor, residual = fit(mine, other)
        if residual <= near:
            return ("rate", factor) if abs(factor - 1) > 2 * near and factor > 0 else None
        part, rest = fit(mine - other, begin)
        is_decay = rest * float((mine - other).norm()) <= near * float(other.norm()) and rest <= numerics.UPDATES_TELL
        return ("decay", part) if is_decay else None

    def _rates(self, names: Sequence[str]) -> list[str]:
        """Say if updates have one factor for each rank, of the parts that it holds."""
        known = [one for one in map(self._updates_of_ranks, names) if one is not None]
        if not known:
            return []
        matrix, wanted = (torch.cat(side) for side in zip(*known, strict=True))
        if len(wanted) < 2 * matrix.shape[1]:
            return []
        weights = torch.linalg.lstsq(matrix, wanted[:, None]).solution.squeeze(1)
        near = 8 * math.sqrt(self._pair.allowed)
        if not float((matrix @ weights - wanted).norm()) <= near * float(wanted.norm()) or not bool(
            (weights > 0).all()
        ):
            return []
        factors = (1 / weights).tolist()
        if max(abs(one - 1) for one in factors) <= 4 * near:
            return []
        listed_ = ", ".join(f"{one:.3g}" for one in factors[:8])
        more = f" and {len(factors) - 8} more" if len(factors) > 8 else ""
        return [f"with equal gradients, the shards of ranks moved {listed_}{more} times as far as the reference's, by "
                f"rank: {self._why()}"]  # fmt: skip

    def _updates_of_ranks(self, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the sketches of updates of a parameter's parts, a column for each rank, and of the reference's update.

        None if ranks hold the same elements of it, if one rank holds all, or if its gradient is noise.
        """
        held = [(one.initial.get(name), one.after.get(name)) for one in self._pair.run.gradients]
        begin, goal = (self._pair.expected(0, field, name) for field in ("initial", "after"))
        boxes = [end.box for _, end in held if end is not None]
        if begin is None or goal is None or len({*boxes}) < len(boxes) or len(boxes) < 2 or self._pair.is_noise(name):
            return None
        empty = torch.zeros_like(goal)
        columns = [empty if start is None or end is None else vector_of(end) - vector_of(start) for start, end in held]
        return torch.stack(columns, 1), goal - begin

    def _sizes(self) -> dict[str, float]:
        """Return the sizes of the run by name; those that are equal are one."""
        evidence = self._pair.run.evidence
        sizes = {f"the size of {name}": len(members) for name, members in evidence.groups_of(self._rank).items()}
        sizes["the number of ranks"] = len(self._pair.run.seen)
        sizes["the number of microbatches"] = evidence.records[self._rank].backwards
        names: dict[int, list[str]] = {}
        for name, size in sizes.items():
            names.setdefault(size, []).append(name)
        return {" or ".join(own): float(size) for size, own in names.items()}

    def _weights(self) -> list[str]:
        """Say whether microbatches count with other weights than in the reference."""
        weights = [1 / one if one else None for one in self._pair.factors]
        if None in weights:
            weights = list(self._fitted())
        known = [one for one in weights if one is not None]
        if len(known) < 2 or len(known) < len(weights):
            return []
        mean = sum(known) / len(known)
        if not mean or not max(known) - min(known) > 16 * self._pair.allowed * abs(mean):
            return []
        listed_ = ", ".join(f"{one / mean:.4g}" for one in known[:8])
        more = f" and {len(known) - 8} more" if len(known) > 8 else ""
        return [
            f"microbatches count with other weights than in the reference: {listed_}{more} times the mean "
            f"[{codes.WEIGHTED}]",
            f"next: the doctor says whether each counts alike, whatever its tokens [{codes.TOKENS}]",
            f"  {_launched(self._pair.run.recorded, 'doctor')}",
        ]

    def _forward(self) -> list[str]:
        """Say if what microbatches compute is not the reference's by any factor; losses make up for one by then."""
        if not self._pair.own_names or any(one is not None for one in self._pair.factors):
            return []
        text = (
            "the losses are a multiple of the reference's, and these gradients are not: the forward or the loss "
            "differs, or a part of them has no gradient in one of the two"
        )
        if any(one.stage is Stage.MODULE_OUTPUT for side in (self._pair.ref, self._pair.run) for one in side.seen[0]):
            return [text]
        ref, run = self._pair.ref.recorded, self._pair.run.recorded
        align = f" --align {ref.shift}" if ref.shift else ""
        return [
            text,
            "next: record the outputs of modules as well, and compare names the first that differs",
            f"  {_launched(ref, f'record --stages modules{_steps(ref)} --out ref-modules')}",
            f"  {_launched(run, f'record --stages modules{_steps(run)} --out run-modules')}",
            f"  shardproof compare ref-modules run-modules{align}",
        ]

    def _fitted(self) -> list[float]:
        """Return the weights of the run's microbatches in what the reference computed from all of them."""
        found: list[float] = []
        for of_ref, of_run in self._pair.components:
            other = self._pair.stacked(self._pair.ref, of_ref)
            columns = [one for part in of_run if (one := self._pair.stacked(self._pair.run, [part])) is not None]
            if other is None or not columns or len(other) < 2 * len(columns):
                return []
            matrix = torch.stack(columns, dim=1)
            if not bool(matrix.isfinite().all() and other.isfinite().all()):
                return []  # lstsq refuses them
            weights = torch.linalg.lstsq(matrix, other[:, None]).solution.squeeze(1)
            rest = float((matrix @ weights - other).norm() / other.norm())
            if not rest <= 16 * self._pair.allowed or not bool((weights.abs() > numerics.NO_WEIGHT).all()):
                return []
            found += [1 / float(one) for one in weights]
        return found

    def _parts(self, field: str, name: str) -> list[str]:
        """Say what is told from the parts that ranks hold."""
        held = [getattr(one, field) for one in self._pair.run.gradients]
        parts = {rank: own[name] for rank, own in enumerate(held) if name in own}
        if len(self._pair.ref.seen) == len(self._pair.run.seen):
            expected = {rank: getattr(one, field).get(name) for rank, one in enumerate(self._pair.ref.gradients)}
            if found := self._misplaced(parts[self._rank], expected) or self._scaled_by_rank(parts, expected):
                return found
        mine = parts[self._rank]
        alike = {one: other for one, other in parts.items() if other.box == mine.box and not other.pending}
        if len({other.fingerprint.identity for other in alike.values()}) > 1:
            return [f"{ranks_of(sorted(alike))} hold the same elements of it and differ [{codes.APART}]"]
        return []

    def _misplaced(self, mine: Gradient, expected: Mapping[int, Gradient | None]) -> list[str]:
        for other, part in expected.items():
            if part is not None and other != self._rank and part.fingerprint.bits == mine.fingerprint.bits:
                return [f"rank {self._rank} has the shard of rank {other} [{codes.MISPLACED}]"]
        return []

    def _scaled_by_rank(self, parts: Mapping[int, Gradient], expected: Mapping[int, Gradient | None]) -> list[str]:
        fits = []
        for other, part in parts.items():
            right = expected[other]
            is_alike = right is not None and right.box == part.box
            fits.append(fit(vector_of(part), vector_of(right)) if right is not None and is_alike else (0.0, 1.0))
        known = [factor for factor, rest in fits if factor]
        spread = max(known) - min(known) if known else 0.0
        near = 4 * self._pair.allowed
        if spread <= near or not all(rest <= near for _, rest in fits):
            return []
        listed_ = ", ".join(f"{factor:.4g}" for factor in known[:8])
        text = f"each rank scales its shards by a factor of its own: {listed_} x the reference's"
        return [f"{text} [{codes.LOCAL_NORM}]"]


def _steps(recorded: Recorded) -> str:
    """Return the option with the steps of a recording; empty if they are those by default."""
    steps = [step + recorded.shift for step in recorded.head.steps]
    return f" --steps {','.join(map(str, steps))}" if steps != [0, 1] else ""


def _launched(recorded: Recorded, command: str) -> str:
    return launched(command, recorded.head.world, recorded.head.command)
