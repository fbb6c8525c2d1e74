"""The doctor's judge: which checks a step gets, which findings wait for a later step, and which explain others."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from shardproof.harness.judging import codes
from shardproof.harness.training import (
    acts,
    boundary,
    buffers,
    crossings,
    followers,
    freezing,
    invariants,
    labels,
    modes,
    norms,
    recomputing,
    reduction,
    rows,
    sharded,
    sums,
    tokens,
    updates,
)
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding
from shardproof.harness.training.reduction import Reduced, check_reduction

#: Findings of these explain that replicas drift apart from the step on.
_OF_REPLICAS = {codes.EQUAL_PARAMETERS, codes.EQUAL_GRADIENTS, codes.REDUCED_ONCE}


class Examination:
    """The examination of a training: the steps so far, and what was found in them; equal on all ranks.

    Args:
        checks: those whose findings count.
        waits: whether a finding that a later step may clear is told after that step only.

    Attributes:
        checks: those whose findings count.
        findings: those that were added, in order.
        seen: the steps that were judged.
        reduced: how gradients were reduced in each of them, the latest first.
    """

    def __init__(self, checks: Collection[str], *, waits: bool) -> None:
        self.findings: list[DoctorFinding] = []
        self.seen: list[Evidence] = []
        self.reduced: list[Reduced] = []
        self.checks, self._waits = frozenset(checks), waits
        #: The steps in which ranks that hold the same elements were to be alike, as gradients were reduced.
        self._of_replicas: list[Evidence] = []
        #: Findings of microbatches that were dropped, until another step tells whether each step drops as many.
        self._doubts: list[tuple[Evidence, list[DoctorFinding]]] = []
        #: Notes of ranks that read the same data, until all steps tell whether these are the same in each.
        self._same: list[DoctorFinding] = []
        self._is_at_the_end = False
        #: Findings of ranks that train apart, until their parameters are equal when a later step begins.
        self._apart: list[DoctorFinding] = []
        self._are_averaged = False

    def add(self, found: Iterable[DoctorFinding]) -> list[DoctorFinding]:
        """Add findings and return the new ones among them."""
        new: list[DoctorFinding] = []
        for one in found:
            is_known = any(one.key == other.key and not self._is_sure(one, other) for other in (*self.findings, *new))
            if not set(one.checks) & self.checks or is_known:
                continue
            if self._waits and not self._is_at_the_end and invariants.may_be_fixed(one):
                self._same = self._same or [one]
            else:
                new.append(one)
        self.findings += new
        return new

    def _is_sure(self, finding: DoctorFinding, before: DoctorFinding) -> bool:
        """Whether another root that is reduced shows by now that ranks, of which it was noted, train no copies."""
        is_mended = before.title == reduction.NOT_REDUCED and before.is_note and not finding.is_note
        return is_mended and self.seen[-1].are_others_reduced

    def judge(self, evidence: Evidence, ties: Sequence[tuple[str, ...]]) -> list[DoctorFinding]:
        """Return what is wrong in a step; ``ties`` are the names of parameters that should be one."""
        self.seen.append(evidence)
        found = [
            *invariants.check_finite(evidence),
            *invariants.check_data(evidence),
            *tokens.check_tokens(evidence),
            *invariants.check_collectives(evidence),
            *invariants.check_contributions(evidence),
            *updates.check_optimizers(evidence),
            *invariants.check_ties(evidence, ties),
            *acts.check_acts(evidence),
            *crossings.check_crossings(evidence),
            *boundary.check_boundary(self.seen),
            *(sharded.check_copied(evidence) if len(self.seen) == 1 else ()),
        ]
        # What an optimizer of dead parameters does not zero, and what is not finite, is no sum of this step's parts.
        causes = (invariants.NOT_FINITE, updates.DEAD, invariants.APART, acts.DIVIDED)
        if not any(one.title in causes and not one.is_note for one in found):
            found += self._of_gradients(evidence)
        else:
            self.reduced.insert(0, Reduced(is_skipped=True))
        memory = {one.step: [record.usage.memory for record in one.records] for one in self.seen}
        return [
            *found,
            *updates.check_updates(evidence),
            *updates.check_settings(evidence),
            *invariants.check_gathered(evidence),
            *recomputing.check_recomputed(evidence),
            *invariants.check_memory(memory),
        ]

    def settle(self) -> list[DoctorFinding]:
        """Judge what was dropped, and what ranks that train apart have: a later step tells whether each is meant."""
        found: list[DoctorFinding] = []
        # A loop that clears gradients for each microbatch drops as many in each step.
        if len({one.drops for one in self.seen}) > 1:
            found += [invariants.of_dropped(evidence) for evidence, _ in self._doubts]
            self._doubts.clear()
        if len(self.seen) > 1 and invariants.are_averaged(*self.seen[-2:]):
            self._are_averaged = True
            is_told = any(one.title == reduction.NOT_REDUCED for one in self.findings)
            if not is_told and any(codes.REDUCED_ONCE in one.checks for one in self._apart):
                found.append(invariants.of_averaged(self.seen[0]))
            self._apart.clear()
        return found

    def take_waiting(self) -> list[DoctorFinding]:
        """Return the findings that a later step might have cleared, and keep them no longer."""
        found = [*self._same, *(one for _, found in self._doubts for one in found), *self._apart]
        self._same.clear()
        self._doubts.clear()
        self._apart.clear()
        self._is_at_the_end = True
        return found

    def at_the_end(self) -> Iterator[list[DoctorFinding]]:
        """What all steps together show; each is added before the next is asked for."""
        yield self.settle()
        same, self._same = self._same, []
        yield self.take_waiting()
        yield list(updates.check_optimizers_ever(self.seen))
        yield list(invariants.check_gradients_ever(self.seen))
        yield list(updates.check_rates_ever(self.seen))
        yield list(updates.check_moments_ever(self.seen))
        yield list(freezing.check_frozen_ever(self.seen))
        yield list(buffers.check_buffers_ever(self.seen))
        yield list(buffers.check_constants_ever(self.seen))
        yield list(followers.check_followers_ever(self.seen))
        yield list(modes.check_modes_ever(self.seen))
        yield list(invariants.check_batches_ever(self.seen, same))
        if not any(one.title in (invariants.SAME, invariants.SAME_OF_PARTS) for one in self.findings):
            yield list(labels.check_arguments_ever(self.seen))
            yield list(labels.check_columns_ever(self.seen))
            yield list(rows.check_rows_ever(self.seen))
        yield list(labels.check_labels_ever(self.seen))
        yield list(invariants.check_gathered_ever(self.seen))
        # Of all steps in which replicas were to be alike; those that differ explain theirs.
        if not self._are_averaged and not any(map(_is_of_replicas, self.findings)):
            yield list(invariants.check_states_ever(self._of_replicas))

    # Gradients, from their cause to its consequences: replicas and norms are wrong where a reduction is -----------

    def _of_gradients(self, evidence: Evidence) -> list[DoctorFinding]:
        found = [*self._of_reduction(evidence), *invariants.check_leaks(evidence)]
        found += sums.check_sums(evidence, self.reduced[0]) if not found else []
        # What differs when training begins has other gradients too.
        began_apart = any(one.title == invariants.APART_AT_THE_START for one in self.findings)
        if not began_apart and not any(_is_not_reduced(one) for one in found):
            found += invariants.check_replicas(evidence)
            self._of_replicas.append(evidence)
        if all(one.is_note for one in found):
            is_local = any(one.title == reduction.NOT_REDUCED for one in found)
            found += norms.check_norm(evidence, is_local=is_local)
            if not any(codes.NORM in one.checks for one in (*self.findings, *found)):
                found += norms.check_limit(self.seen)
        return self._put_apart(self._without_consequences(found))

    def _of_reduction(self, evidence: Evidence) -> list[DoctorFinding]:
        found, reduced = check_reduction(evidence, self.reduced)
        if evidence.drops and found:
            # Gradients that are gone count where the rest is not all that the optimizer has.
            after = check_reduction(evidence.after_drops, self.reduced)
            if evidence.are_drops_meant or not any(codes.REDUCED_ONCE in one.checks for one in after[0]):
                if not evidence.are_drops_meant:
                    self._doubts.append((evidence, found))
                found, reduced = after
        self.reduced.insert(0, reduced)
        return found

    def _without_consequences(self, found: list[DoctorFinding]) -> list[DoctorFinding]:
        """Leave out what an earlier step explains."""
        known = [*self.findings, *self._apart, *(one for _, doubts in self._doubts for one in doubts)]
        # Replicas whose gradients were not reduced go on drifting apart.
        if any(map(_is_of_replicas, known)):
            found = [one for one in found if codes.EQUAL_PARAMETERS not in one.checks]
        # What a step does not reduce or zero gets into the gradients of the next one.
        if any(codes.REDUCED_ONCE in one.checks and one.title != reduction.PARTS for one in known):
            found = [one for one in found if one.title != reduction.UNKNOWN and one.signature != codes.WEIGHTED]
        return found

    def _put_apart(self, found: list[DoctorFinding]) -> list[DoctorFinding]:
        """Keep what parameters that are averaged later would explain; whoever wants an exception has it now."""
        if not self._waits:
            return found
        apart = [one for one in found if _is_of_apart(one)]
        self._apart += [] if self._are_averaged else apart
        return [one for one in found if one not in apart]


def _is_of_replicas(finding: DoctorFinding) -> bool:
    return bool(_OF_REPLICAS & set(finding.checks)) and not finding.is_note


def _is_not_reduced(finding: DoctorFinding) -> bool:
    """Whether gradients are wrong, so that replicas are."""
    is_wrong = not finding.is_note or finding.title == reduction.NOT_REDUCED
    return codes.REDUCED_ONCE in finding.checks and is_wrong


def _is_of_apart(finding: DoctorFinding) -> bool:
    """Whether parameters that are averaged later explain a finding."""
    is_local = finding.title in (reduction.NOT_REDUCED, reduction.SOME_MISSING, invariants.DIFFER)
    return not finding.is_note and (is_local or codes.EQUAL_PARAMETERS in finding.checks)
