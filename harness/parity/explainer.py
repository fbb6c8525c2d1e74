"""Finds the first tensor in which the runs of a case diverge, with capture on; see ``--explain``.

What compares runs adds what it has compared; nothing is exchanged between ranks and nothing is raised. When the case
has ended, the first divergence among all of it is this rank's explanation.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Protocol

from shardproof.harness.adapters.base import Adapter
from shardproof.harness.judging.explanation import DivergentTensor, Explanation
from shardproof.harness.judging.finding import Finding
from shardproof.harness.watching.capture import Capture


@dataclasses.dataclass(frozen=True)
class ModuleFinding:
    """A tensor that diverges, and the part of the model to which it belongs."""

    finding: Finding
    order: tuple[int, ...]  # the place of the tensor among all of the comparison, the same on all ranks
    module: str  # the name of the module; "(root)" is the root, and empty what belongs to none
    parameter: str = ""  # the full name of the parameter or buffer, where the tensor is one's
    where: str = ""  # the microbatch and the call of the module, where they are not the first


class Compared(Protocol):
    """One comparison of two or three runs, such as that of one step.

    ``compared`` counts what :meth:`in_order` has compared so far, and ``unseen`` what could not be, by the reason.
    """

    title: str
    compared: int
    unseen: collections.Counter[str]

    def in_order(self) -> Iterator[ModuleFinding]:
        """Compare tensor by tensor in the order in which a step makes them, and yield those that diverge."""

    def lacking(self, parameter: str) -> list[str]:
        """Return the collectives that the unit of a parameter lacks in this step, and the other units have."""


class Explainer:
    """Collects the comparisons of one case on one rank.

    ``expected`` has the collectives of the phase whose numbers a case found wrong, with marks.
    """

    def __init__(self) -> None:
        self.expected: list[str] = []
        self._compared: list[Compared] = []
        self._captures: list[tuple[Capture, type[Adapter]]] = []

    def add(self, compared: Compared) -> None:
        """Add a comparison; the order of these calls is that in which the case trained."""
        self._compared.append(compared)

    def watch(self, capture: Capture, implementation: type[Adapter]) -> None:
        """Note the capture of a run, which :meth:`close` closes."""
        self._captures.append((capture, implementation))

    def explain(self, implementation: type[Adapter]) -> Explanation:
        """Return what this rank saw; only of the implementation under test it is said where a step stopped."""
        found = Explanation(expected=self.expected)
        unseen: collections.Counter[str] = collections.Counter()
        for number, compared in enumerate(self._compared):
            try:
                self._look(number, compared, found)
            except RuntimeError as error:  # a case that is too ill-conditioned to judge
                found.error = str(error)
                found.compared += compared.compared
            unseen += compared.unseen
            if found.first is not None or found.error:
                break
        if not self._compared:
            unseen["no step was compared with that of another run: what the case checks itself has no order"] += 1
        found.unseen = [f"{reason} ({count})" if count > 1 else reason for reason, count in sorted(unseen.items())]
        stopped = [capture.last for capture, kind in self._captures if kind is implementation]
        if last := next((event for event in stopped if event is not None), None):
            where = f", {last.where}" if last.where else ""
            found.stopped = f"{last.stage.value} of {last.name!r}{where}"
        return found

    def close(self) -> None:
        """Remove all hooks and forget all tensors."""
        for capture, _ in self._captures:
            capture.close()
        self._captures.clear()
        self._compared.clear()

    def _look(self, number: int, compared: Compared, found: Explanation) -> None:
        """Look for the first divergence in one comparison, and add the number of tensors compared until then."""
        findings = compared.in_order()
        first = next(findings, None)
        found.compared += compared.compared
        if first is None:
            return
        stage = first.finding.location.stage
        also = [first]
        # What follows the first divergence may be too far from anything to be judged.
        with contextlib.suppress(RuntimeError):
            also.extend(one for one in findings if one.finding.location.stage == stage)
        names = dict.fromkeys(one.finding.location.name or "" for one in also)
        found.first = DivergentTensor(
            order=(number, *first.order), title=compared.title, location=first.finding.location, module=first.module,
            parameter=first.parameter, where=first.where, text=first.finding.text, guess=first.finding.guess,
            numbers=first.finding.numbers, also=tuple(filter(None, names)),
        )  # fmt: skip
        found.units = compared.lacking(first.parameter) if first.parameter else []
