"""States of learning rate schedulers: their entries in files, and what differs between two.

A file has the ``state_dict()`` under a word such as ``lr_scheduler``, with a name for each position of a list; a
snapshot has short lists as one value. Both are compared as lists.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardproof import door

#: What the names of a scheduler's entries begin with: the first word for it, and its number of several.
_BEGINNING = re.compile(r"(?:[^.]+\.)*?\w*sched\w*\.(?:\d+\.)?", re.IGNORECASE)

#: Notes of torch's to itself, which versions of torch add and drop, and which change no learning rate.
_NOTES = frozenset({"_step_count", "_is_initial", "_get_lr_called_within_step", "verbose"})
#: What each scheduler of torch has.
_MAIN = frozenset({"last_epoch", "base_lrs", "_last_lr"})

_SHOWN = 4  # values of a list

Values = dict[int | None, Any]
"""A value, by None; those of a list, by their positions."""


def beginning_of(name: str) -> str:
    """Return what precedes the key of a scheduler's state in the name of an entry; empty if it is of none."""
    found = _BEGINNING.match(name)
    return found[0] if found and found.end() < len(name) else ""


def values_of(texts: Mapping[str, str]) -> dict[str, tuple[str, Values]]:
    """Return the values of a state and the name of an entry of each, by keys; lists are together.

    Args:
        texts: of each entry its value as JSON; empty where it is not known.
    """
    found: dict[str, tuple[str, Values]] = {}
    for name, text in texts.items():
        before, _, last = name.rpartition(".")
        key, place = (before, int(last)) if before and last.isdigit() else (name, None)
        values: Values = {} if not text else {place: _parsed(text)}
        if isinstance(values.get(place), list):
            values = dict(enumerate(values[place]))
        found.setdefault(key, (name, {}))[1].update(values)
    return found


def _parsed(text: str) -> Any:
    try:
        return door.parse_json(text.encode())
    except (ValueError, RecursionError):  # the class of an object
        return text


def compare(
    mine: Mapping[str, str], its: Mapping[str, str], path: str, first: str, *, are_live: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield what differs between two states: the name of an entry, the kind, and the predicate of a sentence.

    Args:
        mine: the values of the state as it should be; see :func:`values_of`.
        its: those of the other state.
        path: the name of the other state.
        first: the name of the state as it should be.
        are_live: whether both are written by trainings, of which all entries are compared.
    """
    right, other = values_of(mine), values_of(its)
    for key, (name, was) in right.items():
        if key.rpartition(".")[2] in _NOTES and not are_live:
            continue
        if key not in other:
            if are_live or key in _MAIN:
                yield name, "missing", f"a value that {path} does not have"
        elif was and other[key][1] and (text := _differing(key, was, other[key][1])):
            yield name, "value", text
    for key, (name, _) in other.items():
        if key not in right and (are_live or key in _MAIN):
            yield name, "unexpected", f"a value that {first} does not have"


def _differing(key: str, was: Values, now: Values) -> str:
    """Say how two values differ; empty if they are equal."""
    if was.keys() != now.keys():
        return f"is {_shown(now)} for {_shown(was)}"
    wrong = [place for place in was if not _is_equal(was[place], now[place])]
    if not wrong:
        return ""
    only = {place: was[place] for place in wrong}
    its = {place: now[place] for place in wrong}
    some = "" if len(wrong) == len(was) else f" of group {', '.join(map(str, wrong[:_SHOWN]))}"
    is_short = _shown(its) != _shown(only)
    pair = f"is {_shown(its, is_short=is_short)} for {_shown(only, is_short=is_short)}"
    return f"{pair}{some}{_amount(key, only, its)}"


def _is_equal(one: Any, other: Any) -> bool:
    if _is_number(one) and _is_number(other):
        return one == other or (math.isnan(one) and math.isnan(other))
    return type(one) is type(other) and bool(one == other)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _amount(key: str, was: Values, now: Values) -> str:
    pairs = [(was[place], now[place]) for place in was]
    if not all(_is_number(one) and math.isfinite(one) for pair in pairs for one in pair):
        return ""
    if key.rpartition(".")[2] == "last_epoch":
        steps = pairs[0][1] - pairs[0][0]
        return f", {abs(steps)} step{'s' * (abs(steps) != 1)} {'behind' if steps < 0 else 'ahead'}"
    if not all(one and isinstance(one, float) for one, _ in pairs):
        return ""
    factors = [other / one for one, other in pairs]
    same = all(math.isclose(one, factors[0], rel_tol=1e-6) for one in factors)
    return f", {factors[0]:.6g} times what it was" if same else ""


def _shown(values: Values, *, is_short: bool = True) -> str:
    some = [_text_of(one, is_short) for one in list(values.values())[:_SHOWN]]
    if len(values) == 1:
        return some[0]
    return f"[{', '.join([*some, *['...'] * (len(values) > _SHOWN)])}]"


def _text_of(value: Any, is_short: bool) -> str:
    return f"{value:.6g}" if is_short and isinstance(value, float) else json.dumps(value)
