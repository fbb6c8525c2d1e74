"""The names that cases, items, capabilities and options had, and the names that they have now.

``renamed.tsv`` is the table. A row has an old name and the new one, with a tab between them:

- ``suites/test_x.py::test_old``: a case;
- ``suites/test_x.py::test_new[old-value]``: the id of a parameter's value, of one case by its new name;
- ``suites/test_x.py::test_old[w2-values]``: an item that got a further parameter;
- ``capability:old-name``: a capability. Several new names are those into which it was divided; one with a question mark
  is not needed by items that needed the old name;
- ``Config.old_name``: a field of a class that adapters and cases use, or ``old_name()``: a method of an adapter.

Run files, lists of closed versions of the contract, expectations and accepted regressions are read by new names; old
names are written nowhere. Imports neither torch nor the harness.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

TABLE = Path(__file__).parent / "renamed.tsv"
"""The table, in a wheel as in a clone."""

_CAPABILITY = "capability:"
#: What an item needs where it needs an option: see the mark ``takes``.
_OPTION = "a name for "
#: The class of an option's last field, by the fields of ``Config`` before it.
_CLASSES = {"": "Config", "clip": "Clip", "accumulation": "Accumulation", "precision": "Precision"}
_CASE = re.compile(r"(?P<case>[^\[*?]*::\w+)(?P<values>.*)", flags=re.DOTALL)


@functools.cache
def rows() -> Mapping[str, str]:
    """Read the table: the new name by the old one.

    Raises:
        ValueError: a line has other than two columns, an old name is there twice, or a new name is an old one too, so
            that a name would have to be looked up twice.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(TABLE.read_text(encoding="utf-8").splitlines(), start=1):
        old, tab, new = line.partition("\t")
        if not (old and tab and new) or "\t" in new or old in found:
            raise ValueError(
                f"{TABLE.name}, line {number}: {line!r} is not an old name that is new here, a tab, a new name"
            )
        found[old] = new
    if twice := found.keys() & set(found.values()):
        raise ValueError(f"{TABLE.name}: {min(twice)!r} is both an old name and a new one")
    return found


def item(id_: str) -> str:
    """Return the new id of an item or of a case by its id of any version; of a pattern for ids, the new pattern."""
    match = _CASE.fullmatch(id_)
    if match is None or id_ in rows():
        return rows().get(id_, id_)
    case, values = rows().get(match["case"], match["case"]), match["values"]
    for old, new in _values().get(case, ()):
        values = re.sub(rf"(?<=[\[*-]){re.escape(old)}(?=[\]*-])", new, values)
    return case + values


@functools.cache
def _values() -> Mapping[str, tuple[tuple[str, str], ...]]:
    """The old and new ids of values by the new name of their case."""
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for old, new in rows().items():
        case, bracket, value = old.partition("[")
        if bracket and case == new.partition("[")[0]:
            found[case] = (*found.get(case, ()), (value.removesuffix("]"), new.partition("[")[2].removesuffix("]")))
    return found


def capability(name: str) -> tuple[str, ...]:
    """Return the new names of a capability; a name that is not old is its own."""
    return tuple(one.removesuffix("?") for one in _divided(name))


def needed(name: str) -> tuple[str, ...]:
    """Return the capabilities, by new names, that an item needed where it needed this one."""
    return tuple(one for one in _divided(name) if not one.endswith("?"))


def _divided(name: str) -> list[str]:
    if name.startswith(_OPTION):
        return [_OPTION + option(name.removeprefix(_OPTION))]
    found = rows().get(_CAPABILITY + name)
    return [name] if found is None else found.replace(_CAPABILITY, "").split()


def member(of: str, name: str) -> str:
    """Return the new name of a field of a class, or of a method with ``name()``; empty if the name is not old."""
    return rows().get(f"{of}.{name}", "").rpartition(".")[2]


def option(name: str) -> str:
    """Return the new name of an option as an adapter's ``option_names`` has it; a name that is not old is its own."""
    outer, dot, inner = name.rpartition(".")
    return outer + dot + (member(_CLASSES.get(outer, ""), inner) or inner)
