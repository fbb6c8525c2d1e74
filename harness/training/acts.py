"""Do loss scalers, schedulers and state dicts do what they are called for? (D11, D24 to D28)"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardproof.harness.judging import codes
from shardproof.harness.judging.texts import ranks_of
from shardproof.harness.training.evidence import Evidence
from shardproof.harness.training.findings import DoctorFinding, count_of, listed
from shardproof.harness.watching.records import ActRecord, Idle, Missed, Windows

#: The title of the finding that explains gradients which are no sum of what ranks computed.
DIVIDED = "gradients are unscaled again"


def check_acts(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D24 to D28, in each step: calls that cannot have the effect for which they are made, or may not."""
    yield from _check_divided(evidence)
    yield from _check_idle(evidence)
    yield from _check_restored(evidence)
    yield from check_loads({one.rank: one.modules.acts for one in evidence.records}, evidence.step)
    yield from _check_paced(evidence)
    yield from _check_levelled(evidence)
    yield from _check_windows(evidence)


def _check_divided(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D24: a loss scaler divides each gradient once."""
    seen = {record.rank: record.modules.acts.divided for record in evidence.records if record.modules.acts.divided}
    if seen:
        divided = next(iter(seen.values()))
        lines = (
            f"unscale_() divides gradients of {divided[0]} that an earlier unscale_() has divided, and to which a "
            f"backward has added others: {count_of(len(divided), 'time', 'times')} since the step before{_on(seen)}",
            "gradients of early microbatches are divided by the scale again and again: call unscale_(), step() and "
            "update() of the scaler once in a step, after the last backward",
        )
        yield DoctorFinding((codes.UNSCALED,), codes.WEIGHTED, evidence.step, DIVIDED, lines)


def _check_idle(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D25: a scheduler sets the rates of an optimizer that steps; a note where that one may step later."""
    for is_note in (False, True):
        seen = {
            record.rank: found
            for record in evidence.records
            if (found := [one for one in record.modules.acts.idle if one.is_dropped != is_note])
        }
        if seen:
            yield _of_idle(evidence, next(iter(seen.values()))[0], _on(seen), is_note=is_note)


def _of_idle(evidence: Evidence, idle: Idle, where: str, *, is_note: bool) -> DoctorFinding:
    first, last = idle.rates
    mend = f"make the scheduler anew, of the {idle.stepping} that steps"
    lines = [
        f"{idle.scheduler} was stepped {idle.calls} times and moves the learning rate of {_a(idle.optimizer)} from "
        f"{first:.4g} to {last:.4g}; this optimizer does not step, and {_a(idle.stepping)} steps its parameters by "
        f"{idle.rate:.4g} each time{where}"
    ]
    if is_note:
        lines.append(f"meant, as where two optimizers take turns? else {mend}")
    else:
        lines += ["seen: nothing but schedulers refers to the optimizer of the scheduler", mend]
    title = "a scheduler steps an optimizer that does not step"
    return DoctorFinding((codes.SCHEDULED,), "", evidence.step, title, tuple(lines), is_note)


def _check_restored(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D26: a state that is loaded back is not what the model has."""
    seen = {record.rank: record.modules.acts.restored for record in evidence.records if record.modules.acts.restored}
    if seen:
        kind, steps = next(iter(seen.values()))[0]
        lines = (
            f"load_state_dict() of {kind} is given the tensors that the model has: its own state_dict() from "
            f"{count_of(steps, 'step', 'steps')} before, which optimizers have written since then{_on(seen)}",
            "the load changes nothing: keep copies, as by copy.deepcopy(model.state_dict())",
        )
        yield DoctorFinding((codes.RESTORED,), "", evidence.step, "a restored state is the current one", lines)


def check_loads(by_rank: Mapping[int, ActRecord], step: int) -> Iterator[DoctorFinding]:
    """D26: a load gives what trains the values of the state, which stay until a step goes on from them.

    Args:
        by_rank: calls of user code, by rank.
        step: of the look at them.
    """
    for is_note in (False, True):
        missed = {
            rank: found
            for rank, one in by_rank.items()
            if (found := [e for e in one.missed if _may_be_meant(e) == is_note])
        }
        if missed:
            yield _of_missed(next(iter(missed.values()))[0], step, _on_some(missed, by_rank), is_note=is_note)
    if undone := {rank: one.undone[0] for rank, one in by_rank.items() if one.undone}:
        first = next(iter(undone.values()))
        lines = [
            f"load_state_dict() of {first.kind} gave {listed([*first.names])} other values, and "
            f"{count_of(first.steps, 'step', 'steps')} later they are back at those before the load"
            + _on_some(undone, by_rank)
        ]
        if not first.is_owned:
            lines.append("seen: the optimizers that step have none of these parameters, but copies of their own")
        lines.append("copy the loaded values into the master weights, or load the checkpoint before these are made")
        yield DoctorFinding((codes.RESTORED,), "", step, "a step undoes a load", tuple(lines))


def _may_be_meant(missed: Missed) -> bool:
    """Whether a load has loaded something, or no prefix explains why nothing was."""
    return missed.matched > 0 or not missed.explained


def _of_missed(missed: Missed, step: int, where: str, *, is_note: bool) -> DoctorFinding:
    lines = [
        f"load_state_dict(strict=False) of {missed.kind}: {missed.matched} of {missed.keys} keys of the state are "
        f"names of the module{where}"
    ]
    if missed.explained:
        lines.append(
            f"seen: the state has {missed.key!r} and the module {missed.name!r}; but for such a prefix "
            f"{missed.explained} keys are names that the state lacks"
        )
        mend = "remove the prefix from the keys, or add it, before the load; strict=True shows it"
    else:
        lines.append(f"seen: the state has {missed.key!r} and the module {missed.name!r}")
        mend = "load the state of this module; strict=True shows the names"
    lines.append(f"meant, as where this part begins anew? else {mend}" if is_note else mend)
    title = "a load leaves keys of another form" if missed.matched else "a load loads nothing"
    return DoctorFinding((codes.RESTORED,), "", step, title, tuple(lines), is_note)


def _check_paced(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D27: note a scheduler that is stepped several times for each step of its optimizer."""
    seen = {record.rank: record.modules.acts.paces for record in evidence.records if record.modules.acts.paces}
    if seen:
        one = next(iter(seen.values()))[0]
        lines = (
            f"{one.scheduler} was stepped {one.calls} times for each of the last {one.steps} steps of "
            f"{one.optimizer}{_on(seen)}: its rates change {one.calls} x as fast",
            "meant, as where its length counts microbatches, or the steps of all ranks? else step it once, where the "
            "optimizer steps",
        )
        title = "a scheduler is stepped several times for each step"
        yield DoctorFinding((codes.PACED,), "", evidence.step, title, lines, is_note=True)


def _check_levelled(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D28: note groups that were given different learning rates, and step by one."""
    seen = {record.rank: record.modules.acts.levelled for record in evidence.records if record.modules.acts.levelled}
    if seen:
        one = next(iter(seen.values()))[0]
        low, high = min(one.given), max(one.given)
        lines = (
            f"the {len(one.given)} groups of {one.optimizer} were given learning rates from {low:.4g} to {high:.4g}, "
            f"and all step by {one.rate:.4g}{_on(seen)}",
            "meant? else the schedule writes one rate over those of all groups: multiply it by a factor of each group",
        )
        title = "groups of different learning rates step by one"
        yield DoctorFinding((codes.STANDS,), "", evidence.step, title, lines, is_note=True)


def _check_windows(evidence: Evidence) -> Iterator[DoctorFinding]:
    """D11: note steps with more microbatches than before, of which each has a loss by the same factor."""
    grown = [_grown(record.modules.acts.windows) for record in evidence.records]
    if grown and all(one is not None for one in grown) and len(set(grown)) == 1 and grown[0] is not None:
        first, last, factor = grown[0]
        times, loss = f"{last / first:.3g}", "a mean" if factor == 1 else f"a mean times {factor:.4g}"
        lines = (
            f"steps had {count_of(first, 'backward pass', 'backward passes')}, and have {last} now; the loss of each "
            f"is {loss}, as before, and nothing divides the gradients: they are a sum that is {times} times as large",
            f"meant, as for a loss of other data, or where the learning rate falls by {times}? else divide the loss by "
            "the number of microbatches of its step",
        )
        title = "the loss is not divided by a growing number of microbatches"
        yield DoctorFinding((codes.REDUCED_ONCE,), codes.SCALED, evidence.step, title, lines, is_note=True)


def _grown(windows: Sequence[Windows]) -> tuple[int, int, float] | None:
    """Return the first and the last number of passes where it only grows and their factor stays; else None.

    A number that another one follows at each step, as that of episodes, is no plan; a smaller one for one step is that
    of a last window of an epoch.
    """
    kept = _without_ends(windows)
    passes = [one.passes for one in kept]
    if len(set(passes)) < 2 or passes != sorted(passes) or not all(one.is_as_computed for one in kept):
        return None
    factor = kept[0].factor
    if factor is None or len({(one.factor, one.kind) for one in kept}) > 1:
        return None
    is_plan = kept[-1].steps > 1 and (kept[0].steps > 1 or len(set(passes)) > 2)
    return (passes[0], passes[-1], factor) if is_plan else None


def _without_ends(windows: Sequence[Windows]) -> list[Windows]:
    kept: list[Windows] = []
    for one in windows:
        if not (kept and one.steps == 1 and one.passes < kept[-1].passes):
            kept.append(one)
    return kept


def _a(kind: str) -> str:
    return f"an {kind}" if kind[:1] in "AEIOU" else f"a {kind}"


def _on(ranks: Iterable[int]) -> str:
    return f", on {ranks_of(ranks)}"


def _on_some(ranks: Iterable[int], by_rank: Mapping[int, ActRecord]) -> str:
    """Return the ranks of a message; nothing where there is one record."""
    return _on(ranks) if len(by_rank) > 1 else ""
