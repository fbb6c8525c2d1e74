"""Says what a state has otherwise than another, entry by entry; see ``differences`` for tensors."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardproof.harness.states import folders, schedulers
from shardproof.harness.states.differences import (
    Difference,
    Known,
    hashes_of,
    listed,
    of_tensors,
    rows_of,
    size_of,
    whose_of,
)
from shardproof.harness.states.sides import Entry, EntryKey, State
from shardproof.harness.states.snapshot import EXTRA, MODEL, OPTIMIZER, SCHEDULER
from shardproof.harness.states.units import FLAT
from shardproof.harness.tensors.fingerprints import Box

_NAMES = 3  # of entries that a line lists


class Scope(NamedTuple):
    """The sections in which two states are compared.

    Attributes:
        sections: those that both have.
        lacking: what is said of those that one side should have and has not.
        left_out: lines that say which entries are not compared, and why; empty if there are none.
    """

    sections: tuple[str, ...]
    lacking: tuple[Difference, ...]
    left_out: str


def scope(a: State, b: State, *, earlier: Sequence[State] = ()) -> Scope:
    """Return the sections in which two states are compared; a state of the model alone lacks no other section.

    Args:
        a: the state as it should be.
        b: with the names of ``a``.
        earlier: states of the same training.
    """
    sections, lacking, left = [], list[Difference](), list[str]()
    alone = _alone(a, b, earlier)
    for section in _sections(a, b):
        mine, its = (sum(key.section == section for key in one.entries) for one in (a, b))
        count, has, without = mine or its, *((a, b) if mine else (b, a))
        if its and (mine or section == MODEL):
            sections.append(section)
        elif count and _is_left_out(section, without, has, is_alone=without.path in alone, is_first=not mine):
            left.append(f"the {section} of {has.path} ({count} entries)")
        elif count:
            lacking.append(_lack(section, count, "there" if mine else f"in {a.path}"))
    told = [_told(left, alone), _told_of_your_own(a, b, sections, alone)]
    return Scope(tuple(sections), tuple(lacking), "\n".join(filter(None, told)))


def _sections(a: State, b: State) -> tuple[str, ...]:
    return (MODEL, OPTIMIZER, SCHEDULER, *[EXTRA] * (a.is_live and b.is_live))


def _lack(section: str, count: int, where: str) -> Difference:
    return Difference(EntryKey(section, f"the {section}"), "missing", f"none of its {count} entries is {where}")


def _told_of_your_own(a: State, b: State, sections: Sequence[str], alone: Sequence[str]) -> str:
    """Say which of your own values a file does not have: it may have other names for them."""
    if EXTRA in sections or b.path in alone:
        return ""
    mine, its = (
        schedulers.values_of({key.name: "" for key in state.entries if key.section == EXTRA}).keys() for state in (a, b)
    )
    names = [one for one in mine if one not in its] if a.is_live and not b.is_live else []
    return f"not compared: {listed(names)} of extra: {b.path} has no entry of such a name" if names else ""


def _alone(a: State, b: State, earlier: Sequence[State]) -> list[str]:
    """Return which states have the model alone, and are to have no more."""
    return [one.path for one in (a, b) if one.is_weights and not (one is b and _follows(b, earlier))]


def _is_left_out(section: str, without: State, has: State, *, is_alone: bool, is_first: bool) -> bool:
    """Whether a state need not have a section: a training may be written without your own values or its scheduler."""
    is_file = is_first and without.is_live and not has.is_live
    return section == EXTRA or (section != MODEL and is_alone) or (section == SCHEDULER and is_file)


def _told(left: Sequence[str], alone: Sequence[str]) -> str:
    why = f"{alone[0]} has the model alone" if alone else "the other state was written without"
    return f"not compared: {' and '.join(left)}: {why}" if left else ""


def compare(a: State, b: State, *, earlier: Sequence[State] = ()) -> list[Difference]:
    """Return what ``b`` has otherwise than ``a``, in the order of ``a``; entries that only ``b`` has are last.

    Args:
        a: the state as it should be.
        b: with the names of ``a``; see ``sides.aligned``.
        earlier: states of the same training, which ``b`` may have entries of.
    """
    known = Known(_by_hashes(a), earlier)
    sections, lacking, _ = scope(a, b, earlier=earlier)
    found = [*lacking, *_of_files(a, b)]
    left_out = without_frozen(a, b)
    astray = _Astray(a, b)
    for key, entry in a.entries.items():
        if key.section in sections and entry.kind != "unsaved buffer" and key not in left_out and not _is_told(entry):
            other = b.entries.get(key)
            moved = astray.take(entry) if other is None and not _is_under_another_name(entry, a, b) else ""
            found += [Difference(key, "another name", moved)] if moved else _entry(entry, other, a, b, known)
    found += _of_values(SCHEDULER, a, b) if SCHEDULER in sections else ()
    found = _by_number([*found, *([] if EXTRA in sections else _of_your_own(a, b))])
    return [*found, *_extra(a, b, sections, astray.taken)]


def _is_told(entry: Entry) -> bool:
    """Whether an entry is a value of a scheduler, of which all are compared together."""
    return entry.key.section == SCHEDULER and not entry.is_tensor


def _of_files(a: State, b: State) -> Iterator[Difference]:
    """Tell files of ranks that have the shards of another rank of a training, or of none, as of other numbers of ranks.

    Nothing is told if no file has those of its rank or another: the training may be another one.
    """
    ranks = {file: rank for file in b.sources if (rank := folders.rank_of(file)) is not None}
    if not a.is_live or b.is_live or not {*ranks.values()} <= {*range(len(a.sources))}:
        return
    mine, its = _boxes(a), _boxes(b)
    owners = {file: [rank for rank, source in enumerate(a.sources) if mine.get(source) == its[file]]
              for file in ranks if file in its}  # fmt: skip
    for file, found in owners.items():
        key = EntryKey(MODEL, file)
        if found and ranks[file] not in found:
            yield Difference(key, "another rank's file", f"has the shards of {a.sources[found[0]]} of {a.path}")
        elif not found and any(owners.values()):
            yield Difference(key, "another rank's file", f"has shards that no rank of {a.path} has, as of another "
                             "number of ranks")  # fmt: skip


def _boxes(state: State) -> dict[str, set[tuple[str, Box]]]:
    """Return what each rank or file has of the parameters of which it has a part."""
    found: dict[str, set[tuple[str, Box]]] = {}
    for key, entry in state.entries.items():
        if key.section == MODEL and not entry.tied:
            for one in entry.held:
                if one.box.numel:
                    found.setdefault(one.source, set()).update({(key.name, one.box)} - {(key.name, Box(entry.shape))})
    return found


def _of_values(section: str, a: State, b: State) -> Iterator[Difference]:
    """Compare the values of a section, lists as lists."""
    mine, its = (
        {key.name: _value(one) for key, one in state.entries.items() if key.section == section and not one.is_tensor}
        for state in (a, b)
    )
    if section == EXTRA:  # of which a file has others, and need not have any
        same = schedulers.values_of(mine).keys() & schedulers.values_of(its).keys()
        mine, its = ({name: text for name, text in one.items() if schedulers.values_of({name: text}).keys() & same}
                     for one in (mine, its))  # fmt: skip
    for name, kind, text in schedulers.compare(mine, its, b.path, a.path, are_live=a.is_live and b.is_live):
        key = EntryKey(section, name)
        if not any(key in one.entries and one.entries[key].is_tensor for one in (a, b)):
            yield Difference(key, kind, text)


def _of_your_own(a: State, b: State) -> Iterator[Difference]:
    """Compare the values of a training's ``extra`` that the other state has under the same names."""
    yield from _of_values(EXTRA, a, b)
    for key, entry in a.entries.items():
        other = b.entries.get(key) if key.section == EXTRA else None
        if other is not None and (entry.is_tensor or other.is_tensor):
            yield from _same_name(entry, other, Known({}, ()))


_ANOTHERS = re.compile(r"has the values of (?:its like in )?(?:\S+ of )?([^\s,]+)")


def _by_number(found: Sequence[Difference]) -> list[Difference]:
    """Say in one line that an optimizer's states are those of other parameters, if the parameters are their own."""
    astray = [one for one in found if one.kind == "another's" and "of the same parameter" not in one.text]
    mine = [one for one in astray if one.key.section == OPTIMIZER]
    names = [*dict.fromkeys(one.key.name for one in mine)]
    if len(names) < 2 or len(mine) < len(astray):
        return [*found]
    source = _ANOTHERS.match(mine[0].text)
    such = f", as {names[0]} that of {source[1]}" if source else ""
    text = f"is that of another parameter{such}: states by number need the same order of parameters"
    return [one._replace(text=text) if one in mine else one for one in found]


def _extra(a: State, b: State, sections: Collection[str], taken: Collection[EntryKey]) -> Iterator[Difference]:
    """Yield the entries that only the second state has."""
    for key, entry in b.entries.items():
        is_compared = key.section in sections and entry.kind != "unsaved buffer" and not _is_told(entry)
        is_second = not a.is_live and EntryKey(MODEL, entry.tied) in a.entries  # a file may have one of two tied ones
        if is_compared and not is_second and key not in a.entries and key not in taken:
            yield Difference(key, "unexpected", _unexpected(entry, a))


def _unexpected(entry: Entry, a: State) -> str:
    if entry.key.name.endswith(FLAT):
        return f"a flat parameter of FSDP1, and {a.path} does not say what it is made of: write it in that training"
    return f"{_kind(entry)} that {a.path} does not have"


_NUMBER = re.compile(r"\d+")


def _follows(state: State, earlier: Sequence[State]) -> bool:
    """Whether a state is the next checkpoint of a training after one with an optimizer: their names differ in a number.

    Not of ``torch.distributed.checkpoint``, whose last one of a training may have the model alone under such a name.
    """
    if state.is_live or any(one.endswith(".distcp") for one in state.sources):
        return False
    name = Path(state.path).name
    before = [one for one in earlier if one.has_optimizer and not one.is_live and Path(one.path).name != name]
    return any(_stem(Path(one.path).name) == _stem(name) and _stems(state) <= _stems(one) for one in before)


def _stem(name: str) -> str:
    return _NUMBER.sub("#", name)


def _stems(state: State) -> set[str]:
    return {*map(_stem, state.sources)}


def without_frozen(a: State, b: State) -> set[EntryKey]:
    """Return the frozen parameters and the buffers of which a file has none: it has adapters alone.

    A checkpoint of a trainer has them, unless it is one of an adapter.
    """
    if b.is_live or (b.is_whole and not b.is_adapter):
        return set()
    fixed = {
        key
        for key, entry in a.entries.items()
        if key.section == MODEL and (entry.trains is False or entry.kind == "buffer")
    }
    has_adapters = any(entry.trains and key in b.entries for key, entry in a.entries.items())
    is_without = has_adapters and any(a.entries[key].trains is False for key in fixed) and not fixed & b.entries.keys()
    return fixed if is_without else set()


def _by_hashes(state: State) -> dict[tuple[int, ...], list[EntryKey]]:
    found: dict[tuple[int, ...], list[EntryKey]] = {}
    for key, entry in state.entries.items():
        if entry.is_tensor and entry.numel > 1 and entry.held:
            found.setdefault(hashes_of(entry.total), []).append(key)
    return found


class _Astray:
    """The entries of a state under names that the other one does not have, by their hashes.

    Attributes:
        taken: those that are an entry of the other state under its name.
    """

    def __init__(self, a: State, b: State) -> None:
        names = [key for key in b.entries if key not in a.entries and key.section in (MODEL, EXTRA)]
        self._b, self.taken = b, set[EntryKey]()
        some = dataclasses.replace(b, entries={key: b.entries[key] for key in names})
        self._known = _by_hashes(some)

    def take(self, entry: Entry) -> str:
        """Return under which name an entry is there; empty if it is under none."""
        if entry.key.section != MODEL or not entry.is_tensor or not entry.held or not entry.total.squares:
            return ""
        for key in self._known.get(hashes_of(entry.total), ()):
            if key not in self.taken and self._b.entries[key].shape == entry.shape:
                self.taken.add(key)
                return _under(entry.key.name, key.name)
        return ""


def _under(name: str, its: str) -> str:
    """Say under which name an entry is there; words that another name has more, so that entries share a line."""
    if (before := its.removesuffix(name)) != its:
        return f"is there with {before!r} before its name"
    mine, words = name.split("."), its.split(".")
    more = len(words) - len(mine)
    for place in range(1, len(mine)) if more > 0 else ():
        if words[:place] + words[place + more :] == mine:
            return (
                f"is there with {'.'.join(words[place : place + more])!r} behind {'.'.join(mine[:place])!r} in its name"
            )
    return f"is there as {its}"


def check(state: State, to: State | None = None) -> Iterator[Difference]:
    """Yield what is wrong within one state: replicas that differ, rows that nobody holds.

    Args:
        state: which is judged.
        to: another state, whose shards are named.
    """
    for key, entry in state.entries.items():
        by_box: dict[Box, dict[tuple[int, ...], list[str]]] = {}
        for one in entry.held:
            by_box.setdefault(one.box, {}).setdefault(hashes_of(one.sums), []).append(one.source)
        right = to.entries.get(key) if to is not None else None
        for box, holders in by_box.items():
            if len(holders) > 1:
                sets = " and ".join(listed(some) for some in holders.values())
                those = _right_ones(box, holders, right, to)
                yield Difference(key, "replicas", f"{sets} hold different values of the same elements{those}")
        if entry.short:
            whose = whose_of(right, sorted(entry.short)) if right is not None else ""
            text = f"{rows_of(sorted(entry.short), entry.shape)}{whose} are in no {_unit(state)}"
            yield Difference(key, "held by none", text)
        if len(set(entry.values.values())) > 1 and entry.key.section != MODEL:
            told = ", ".join(f"{value} on {source}" for source, value in list(entry.values.items())[:4])
            yield Difference(key, "differs between ranks", told)


def _right_ones(
    box: Box, holders: Mapping[tuple[int, ...], Sequence[str]], right: Entry | None, to: State | None
) -> str:
    """Say which of those that hold different values have the right ones, if it is known."""
    same = holders.get(hashes_of(right.total)) if right is not None and box.is_full else None
    return f", and {listed(same)} has the values of {to.path}" if same and to is not None else ""


def _unit(state: State) -> str:
    return "rank" if state.is_live else "file"


def _entry(entry: Entry, other: Entry | None, a: State, b: State, known: Known) -> Iterator[Difference]:
    """Yield what differs in one entry; it is compared once if it is a parameter under a second name in both."""
    pair = _untied(entry, other, a, b)
    if isinstance(pair, Difference):
        yield pair
    elif pair is not None:
        yield from _same_name(*pair, known)
        yield from _roles(*pair, a, b)


def _untied(entry: Entry, other: Entry | None, a: State, b: State) -> tuple[Entry, Entry] | Difference | None:
    """Return the entries to compare under a name: of a tied parameter those of its first name; None for nothing."""
    key = entry.key
    if b.is_live and other is not None and bool(entry.tied) != bool(other.tied):
        text = (
            f"is one parameter with {other.tied} now" if other.tied else f"is no longer one parameter with {entry.tied}"
        )
        return Difference(key, "tie", text)
    if other is None:
        return None if _is_under_another_name(entry, a, b) else _missing(entry, b)
    if entry.tied and other.tied:
        return None
    first = a.entries[EntryKey(MODEL, entry.tied)] if entry.tied else entry
    its = b.entries.get(EntryKey(MODEL, other.tied), other) if other.tied and not other.held else other
    return dataclasses.replace(first, key=key), dataclasses.replace(its, key=key)


def _is_under_another_name(entry: Entry, a: State, b: State) -> bool:
    """Whether a state that lacks a parameter has it under the other name of a tie: a file may have one of them."""
    names = [one.key for one in a.entries.values() if one.tied == entry.key.name and one.key.section == MODEL]
    return bool(entry.tied) or (entry.key.section == MODEL and any(name in b.entries for name in names))


def _missing(entry: Entry, b: State) -> Difference:
    return Difference(entry.key, "missing", f"{_kind(entry)} that {b.path} does not have")


def _same_name(entry: Entry, other: Entry, known: Known) -> Iterator[Difference]:
    """Compare two tensors, two values, or a number with a tensor of one element, as of a step counter."""
    if entry.is_tensor and other.is_tensor:
        if (found := of_tensors(entry, other, known)) is not None:
            yield found
    elif entry.is_tensor or other.is_tensor:
        numbers = [_number(one) for one in (entry, other)]
        if None in numbers:
            yield Difference(entry.key, "kind", f"is {_kind(other)} for {_kind(entry)}")
        elif not math.isclose(numbers[0] or 0.0, numbers[1] or 0.0, rel_tol=1e-6):
            yield Difference(entry.key, "value", f"is {numbers[1]:g} for {numbers[0]:g}")
    elif entry.values and other.values and (was := _value(entry)) != (now := _value(other)):
        yield Difference(entry.key, "value", f"is {now} for {was}")


def _roles(entry: Entry, other: Entry, a: State, b: State) -> Iterator[Difference]:
    """Compare whether a parameter trains, and which optimizer has it: a receiver of weights trains nothing."""
    are_trainings = a.has_optimizer == b.has_optimizer and a.trains and b.trains
    if are_trainings and entry.trains is not None and other.trains is not None and entry.trains != other.trains:
        now = "trains" if other.trains else "is frozen"
        yield Difference(entry.key, "requires_grad", f"{now} in {b.path}, and not in {a.path}")
    if a.is_live and b.is_live and a.has_optimizer and b.has_optimizer and entry.stepped_by != other.stepped_by:
        was, now = entry.stepped_by or "no optimizer", other.stepped_by or "no optimizer"
        yield Difference(entry.key, "optimizer", f"is in {now} for {was}")


def _number(entry: Entry) -> float | None:
    """Return the size of the number that an entry is: digests have no sign."""
    if entry.is_tensor:
        return size_of(entry.total) if entry.numel == 1 else None
    try:
        return abs(float(_value(entry)))
    except ValueError:
        return None


def _value(entry: Entry) -> str:
    return next(iter(entry.values.values()), "")


def _kind(entry: Entry) -> str:
    if not entry.is_tensor:
        return "a value"
    return {"": "an entry", "state": "a state"}.get(entry.kind, f"a {entry.kind}")


# Printing ------------------------------------------------------------------------------------------


def lines(differences: Sequence[Difference], entries: Mapping[EntryKey, Entry] | None = None) -> Iterator[str]:
    """Yield a line for each thing that is said, with the entries of which it is said.

    Args:
        differences: what was found.
        entries: those that were compared.
    """
    together: dict[tuple[str, str, str], list[Difference]] = {}
    for one in differences:
        together.setdefault((one.key.section, one.kind, one.text if one.kind != "values" else ""), []).append(one)
    for (section, _, text), some in together.items():
        some.sort(key=lambda one: -one.distance)
        if text:
            names = ", ".join(str(one.key) for one in some[:_NAMES])
        else:
            names = "; ".join(f"{one.key} {one.text}, by {one.distance:.1e} of its norm" for one in some[:_NAMES])
        more = f" and {len(some) - _NAMES} more" if len(some) > _NAMES else ""
        least = some[-1].distance
        if text:
            cost = f", which cost at most {some[0].distance:.1e} of a norm" if some[0].distance else ""
            yield f"{section}: {names}{more}: {text}{cost}"
        else:
            count = sum(key.section == section and not one.tied for key, one in (entries or {}).items())
            yield f"{section}: {names}{more and f';{more}, by {least:.1e} or more: {len(some)} of {count}'}"
