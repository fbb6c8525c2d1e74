"""Are later steps as the watched ones were? Judges looks, which are records of states alone. (D1, D3, D19, D20, D28)

A state shows for good that any step before it went wrong. A look is compared with the watched steps: replicas that
were equal in these, frozen parameters, buffers, modes and generators. Learning rates of ranks, ties and calls of user
code go through the checks of watched steps.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training import acts, buffers, invariants, updates
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding, listed
from shardproof.harness.training.followers import check_followers_later
from shardproof.harness.watching.records import StandingRecord, StepRecord

_OF_REPLICAS = {codes.EQUAL_PARAMETERS, codes.EQUAL_GRADIENTS, codes.EQUAL_STATES, codes.REDUCED_ONCE}

_Sets = dict[str, list[tuple[int, ...]]]


class Later:
    """The looks at a root, held against its watched steps; equal on all ranks.

    Args:
        watched: its watched steps.
        found: what was found in them.
        is_first: whether it is the root whose optimizer's step a look belongs to.
    """

    def __init__(self, watched: Sequence[Evidence], found: Iterable[DoctorFinding], *, is_first: bool) -> None:
        self._watched, self._is_first = list(watched), is_first
        self._is_loaded = False
        apart = [one for one in found if _OF_REPLICAS & set(one.checks) and one.title != invariants.DROPPED]
        #: The sets of ranks that were equal when each watched step began, and of these those with equal gradients.
        self._equal: _Sets = {} if apart else self._sets(_are_equal)
        self._reduced: _Sets = self._sets(_have_equal_gradients)
        self._with_states: _Sets = {} if apart else self._sets(_have_equal_states)

    def judge(self, look: Evidence, ties: Sequence[tuple[str, ...]], *, is_end: bool) -> Iterator[DoctorFinding]:
        """Return what is wrong in a look.

        Args:
            ties: the names of parameters that should be one.
            is_end: whether no step follows: user code may have changed the model since the last one, to evaluate it.
        """
        models = {record.modules.standing.model for record in look.records}
        yield from acts.check_acts(look)
        if len(models) > 1:  # some ranks have made another one
            return
        is_replaced, is_wrapped = models != {0}, any(start.reducers.names for start in look.starts)
        if is_wrapped or not is_replaced:
            yield from self._check_replicas(look, is_end=is_end)
        yield from updates.check_settings(look)
        self._is_loaded |= any(record.modules.acts.loads for record in look.records)
        if not is_end:
            yield from invariants.check_ties(look, ties)
            yield from buffers.check_standing(look, self._watched)
            yield from self._check_frozen(look) if not is_replaced else ()
            yield from self._check_modes(look)
            yield from self._check_batches(look)
            yield from check_followers_later(self._watched[-1], look)
            yield from self._check_generators(look)

    @property
    def _steps(self) -> str:
        first, last = self._watched[0].step, self._watched[-1].step
        return f"the watched steps {first}-{last}" if last > first else f"the watched step {first}"

    # Replicas -------------------------------------------------------------------------------

    def _sets(self, are_alike: Callable[[Evidence, str, tuple[int, ...]], bool]) -> _Sets:
        """Return the sets of replicas of parameters of which something holds in each watched step."""
        found: _Sets = {}
        for name, sets in self._watched[0].holders.items():
            kept = [one for one in sets if len(one) > 1 and all(are_alike(step, name, one) for step in self._watched)]
            if kept:
                found[name] = kept
        return found

    def _check_replicas(self, look: Evidence, *, is_end: bool) -> Iterator[DoctorFinding]:
        """D1 and D3: ranks that held the same and were equal are equal.

        From gradients that differ as well, ranks may mean to train apart from some step on. At the end one rank alone
        may have loaded another state, to evaluate it; but none has the optimizer states of others.
        """
        unlike = self._apart(self._reduced, lambda name, one: _have_equal_gradients(look, name, one))
        if unlike and (look.hooks or any(one.reduces_in_step for one in self._watched)):
            return
        states = self._apart(self._with_states, lambda name, one: len(invariants.states_of(look, name, one) - {()}) < 2)
        if apart := self._values_apart(look, is_end=is_end):
            is_sure = bool(states) if is_end else not unlike and self._is_reduced(look)
            for sets, names in invariants.by_sets(apart):
                yield self._of_apart(look, sets, names, unlike, is_note=not is_sure)
        elif unlike:
            yield from self._of_unlike(look, unlike, is_end=is_end)
        elif states:
            yield self._of_states(look, states)

    def _values_apart(self, look: Evidence, *, is_end: bool) -> _Sets:
        """Return the replicas that differ; at the end not what one rank may have merged or loaded, to save it."""
        apart = self._apart(self._equal, lambda name, one: len(invariants.values(look, name, one)) < 2)
        if not is_end:
            return apart
        are_loaded = len({record.modules.acts.loads for record in look.records}) > 1
        return {} if are_loaded else {name: sets for name, sets in apart.items() if name in look.trained}

    def _apart(self, sets: _Sets, are_alike: Callable[[str, tuple[int, ...]], bool]) -> _Sets:
        found = {name: [one for one in mine if not are_alike(name, one)] for name, mine in sets.items()}
        return {name: mine for name, mine in found.items() if mine}

    def _is_reduced(self, look: Evidence) -> bool:
        """Whether ranks are seen to have equal gradients in the step, which they compute from other data."""
        own = ((name, one[0]) for name, sets in self._reduced.items() for one in sets)
        return any(invariants.has_gradient(look.gradients[rank].at_step.get(name)) for name, rank in own)

    def _of_apart(
        self, look: Evidence, sets: list[tuple[int, ...]], names: list[str], unlike: _Sets, *, is_note: bool
    ) -> DoctorFinding:
        lines = [
            f"parameter {listed(names)}: {invariants.named_sets(look, sets)} hold the same elements, equal in "
            f"{self._steps} and different when step {look.step} begins"
        ]
        if unlike:
            lines.append(f"their gradients of the step differ as well: {listed([*unlike])}")
        elif self._is_reduced(look):
            lines.append("seen: their gradients of the step are equal, so a step or a write before it was not alike")
        mend = (
            "look for a step whose gradients are not reduced, as the last one of an epoch, and for what writes "
            "parameters by random numbers, data or files of a rank, as masks, merges and loads"
        )
        meant = "meant, as in local SGD that begins later, or where one rank alone evaluates another state? else "
        lines.append(meant + mend if is_note else mend)
        title = "replicas differ in a later step"
        return DoctorFinding((codes.EQUAL_PARAMETERS,), codes.APART, look.step, title, tuple(lines), is_note)

    def _of_unlike(self, look: Evidence, unlike: _Sets, *, is_end: bool) -> Iterator[DoctorFinding]:
        """Note gradients that differ where an optimizer steps; of other roots they may not be complete by then."""
        if is_end or not self._is_first or not self._equal:
            return
        sets, names = invariants.by_sets(unlike)[0]
        lines = (
            f"gradient of {listed(names)}: {invariants.named_sets(look, sets)} hold the same elements, with equal "
            f"gradients in {self._steps} and different ones in step {look.step}",
            "meant, as in local SGD that begins later? else have the last backward of each step outside of no_sync()",
        )
        title = "gradients of replicas differ in a later step"
        yield DoctorFinding((codes.EQUAL_GRADIENTS,), codes.UNREDUCED, look.step, title, lines, is_note=True)

    def _of_states(self, look: Evidence, states: _Sets) -> DoctorFinding:
        sets, names = invariants.by_sets(states)[0]
        line = (
            f"state of {listed(names)}: {invariants.named_sets(look, sets)} hold the same elements, with equal states "
            f"in {self._steps} and different ones in step {look.step}"
        )
        title = "optimizer states of replicas differ in a later step"
        return DoctorFinding((codes.EQUAL_STATES,), codes.APART, look.step, title, (line,))

    # What stands from step to step ----------------------------------------------------------

    def _check_frozen(self, look: Evidence) -> Iterator[DoctorFinding]:
        """D19: note what requires no gradient, did not move in the watched steps, and has moved by more than rounding.

        As an adapter leaves it that is merged and taken out again. A state that is loaded moves it too.
        """
        moved = {name: far for name in look.names if (far := self._moved(look, name))}
        if moved and not self._is_loaded:
            most = max(moved.values())
            lines = (
                f"{listed([*moved])}: requires_grad is False, no bit changed in {self._steps}, and nothing was loaded; "
                f"when step {look.step} begins the values are {most:.2g} x their size away from there",
                "meant, as where a target or a teacher is copied now and then? else look for what writes them between "
                "steps, such as an evaluation that merges adapters and does not take them out again",
            )
            title = "frozen parameters move between steps"
            yield DoctorFinding((codes.FROZEN,), "", look.step, title, lines, is_note=True)

    def _moved(self, look: Evidence, name: str) -> float:
        """Return how far a frozen parameter has moved on some rank; 0 of one that moves in the watched steps too."""
        most = 0.0
        for rank, record in enumerate(look.records):
            before = [one.records[rank].modules.standing.frozen.get(name) for one in self._watched]
            now = record.modules.standing.frozen.get(name)
            if now is None or len(before) < 2 or len({None if one is None else one[0] for one in before}) != 1:
                continue
            is_by_rounding = now[1] <= numerics.STAYED_EPS * numerics.EPS.get(record.parameters[name].dtype, 1.0)
            if before[0] is not None and now[0] != before[0][0] and not is_by_rounding:
                most = max(most, now[1])
        return most

    def _check_batches(self, look: Evidence) -> Iterator[DoctorFinding]:
        """D9: note data ranks that read different data in each watched step, and the same in the step of the look.

        The gradients that they compute from it are not seen, which may differ.
        """
        if not self._is_first:
            return
        now = [record.forwards.batches for record in look.records]
        same: dict[tuple[int, ...], list[int]] = {}
        for rank in (readers[0] for readers in self._watched[0].readers):
            if any(one.varies for given in look.records[rank].forwards.inputs for one in given.tensors):
                same.setdefault(now[rank], []).append(rank)
        for ranks in same.values():
            before = [[step.records[rank].forwards.batches for rank in ranks] for step in self._watched]
            if len(ranks) > 1 and all(all(own) and len(set(own)) == len(own) for own in before):
                lines = (
                    f"{ranks_of(ranks)} read the same data in step {look.step}, and different data in {self._steps}",
                    "meant, as for a batch that all ranks share now and then? else give each rank its own part from "
                    "then on: a resumed loader or sampler needs the state of its own rank, and a new one its rank",
                )
                title = "ranks read the same data in a later step"
                yield DoctorFinding((codes.DATA,), codes.SHARED_DATA, look.step, title, lines, is_note=True)

    def _check_modes(self, look: Evidence) -> Iterator[DoctorFinding]:
        """D28: note modules that are in another mode than in each watched step."""
        for mode, mend in (
            (True, "as where a part is frozen by a schedule? else call model.train() after each evaluation"),
            (False, "else model.train() reaches what is to stay in evaluation mode, such as a teacher"),
        ):
            held = [record.modules.standing.modes for one in self._watched for record in one.records]
            names = [name for name in _names(held) if all(one.get(name, mode) is mode for one in held)]
            now = [record.modules.standing.modes for record in look.records]
            if names := [name for name in names if any(one.get(name) is (not mode) for one in now)]:
                words = ("training mode", "evaluation mode")[:: 1 if mode else -1]
                lines = (
                    f"{listed(names)}: in {words[0]} in {self._steps}, and in {words[1]} when the optimizer steps in "
                    f"step {look.step}",
                    f"meant{',' if mode else '?'} {mend}",
                )
                title = f"modules are in {words[1]} in a later step"
                yield DoctorFinding((codes.STANDS,), "", look.step, title, lines, is_note=True)

    def _check_generators(self, look: Evidence) -> Iterator[DoctorFinding]:
        """D28: note ranks whose generators were equal in each watched step and are not.

        Not where loaders alone have drawn, whose samplers are given seeds of their own; nor, of accelerators, where
        dropout draws by the shape of a rank's batch.
        """
        for device in look.records[0].modules.standing.generators if self._is_first else ():
            before = [_states(step, device) for step in self._watched]
            sets = [ranks for ranks in _alike(before) if len({_states(look, device)[rank] for rank in ranks}) > 1]
            if sets and not self._may_differ(look, device):
                yield self._of_generators(look, device, sets[0])
        if self._is_first:
            yield from self._check_own_generators(look)

    def _check_own_generators(self, look: Evidence) -> Iterator[DoctorFinding]:
        """D28: note ranks whose generators had states of their own in each watched step, and have one state."""
        for name in _generators(look.records[0]):
            before = [[_generators(record).get(name) for record in step.records] for step in self._watched]
            now = [_generators(record).get(name) for record in look.records]
            own = _of_their_own(before)
            sets = [[rank for rank in own if now[rank] == state] for state in dict.fromkeys(now)]
            if found := [ranks for ranks in sets if len(ranks) > 1]:
                yield self._of_one_state(look, name, found[0])

    def _of_one_state(self, look: Evidence, name: str, ranks: Sequence[int]) -> DoctorFinding:
        lines = (
            f"{name}: different states on {ranks_of(ranks)} in {self._steps}, and one state when the optimizer steps "
            f"in step {look.step}: these ranks draw the same numbers from then on",
            "meant, as where all ranks shuffle by one seed? else noise, masks and augmentations are the same on these "
            "ranks: restore the state of each rank from a checkpoint, and add the rank to a seed that is set again",
        )
        title = "random generators of ranks are in one state in a later step"
        return DoctorFinding((codes.STANDS,), codes.APART, look.step, title, lines, is_note=True)

    def _may_differ(self, look: Evidence, device: str) -> bool:
        if device == "cpu":
            return all(record.modules.standing.only_seeds for record in look.records)
        return any(record.modules.has_dropout for step in self._watched for record in step.records)

    def _of_generators(self, look: Evidence, device: str, ranks: Sequence[int]) -> DoctorFinding:
        lines = (
            f"torch's default generator of {device}: in one state on {ranks_of(ranks)} in {self._steps}, and in "
            f"several when the optimizer steps in step {look.step}: some ranks have drawn more than others",
            "meant, as where nothing has to be drawn alike? else shuffles, masks and new parameters that ranks draw by "
            "it differ from now on: draw in an evaluation of some ranks by a generator of its own, or within "
            "torch.random.fork_rng()",
        )
        title = "random generators of ranks differ in a later step"
        return DoctorFinding((codes.STANDS,), codes.APART, look.step, title, lines, is_note=True)


def _generators(record: StepRecord) -> dict[str, int]:
    """Return what stands for the states of the generators of a rank, by how messages name them."""
    standing = record.modules.standing
    own = {f"torch's default generator of {device}": state for device, state in standing.generators.items()}
    return own | {f"the generator of {name}": state for name, state in standing.others.items()}


def _names(modes: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for one in modes for name in one))


def _states(evidence: Evidence, device: str) -> list[int | None]:
    standings: list[StandingRecord] = [record.modules.standing for record in evidence.records]
    return [one.generators.get(device) for one in standings]


def _of_their_own(states: Sequence[Sequence[int | None]]) -> list[int]:
    """Return the ranks that have in each step a state that no other rank has, and draw in each step."""
    found = []
    for rank, own in enumerate(zip(*states, strict=True)):
        is_alone = all(step.count(step[rank]) == 1 for step in states)
        if is_alone and None not in own and len(set(own)) == len(own) > 1:
            found.append(rank)
    return found


def _alike(states: Sequence[Sequence[int | None]]) -> list[list[int]]:
    """Return the sets of ranks whose states are equal in each step."""
    sets: dict[tuple[int | None, ...], list[int]] = {}
    for rank, own in enumerate(zip(*states, strict=True)):
        if None not in own:
            sets.setdefault(own, []).append(rank)
    return [one for one in sets.values() if len(one) > 1]


def _are_equal(evidence: Evidence, name: str, members: tuple[int, ...]) -> bool:
    return len(invariants.values(evidence, name, members, "before")) < 2


def _have_equal_states(evidence: Evidence, name: str, members: tuple[int, ...]) -> bool:
    return len(invariants.states_of(evidence, name, members)) == 1


def _have_equal_gradients(evidence: Evidence, name: str, members: tuple[int, ...]) -> bool:
    """Whether all of these ranks have the same gradient at the optimizer's step, or none."""
    found = [evidence.gradients[rank].at_step.get(name) for rank in members]
    present = [one for one in found if one is not None and not one.pending]
    return len(present) in (0, len(found)) and len({one.fingerprint.identity for one in present}) < 2
