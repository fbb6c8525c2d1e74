"""Combinations of parameters that ``--effort standard`` always keeps, from ``standard.toml`` beside the cases.

An entry is a product of values of some parameters of one case; other parameters may have any value::

    [[always]]
    case = "test_tied.py::test_tied_embedding"
    world = [4]
    recomputes = [false, true]

``world`` is the number of ranks, a tuple is written as a list, a class as its name, and None as "None". ``seed``,
a text, names the test of torch that an entry stands for, and the table ``seeds`` says how many combinations each of
these ran: nothing here reads them.

A combination without an item is no error here: ``--world`` and ``-k`` may have left the item out. For ``suites/``,
``tests/test_seeds.py`` refuses it.
"""

import itertools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from shardproof import door
from shardproof.harness.plugin.pairs import Part

TABLE = "standard.toml"
"""The name of the file."""


def text(value: Any) -> str:
    """Return the text of a parameter's value by which values are compared; lists and tuples are the same."""
    return repr(_as_in_toml(value))


def _as_in_toml(value: Any) -> Any:
    if isinstance(value, type):
        return value.__name__
    return [_as_in_toml(one) for one in value] if isinstance(value, (list, tuple)) else value


def read(folder: pathlib.Path) -> Mapping[str, list[Part]]:
    """Return the combinations of each case of a folder, ``<file>::<function>``; a folder without a table has none.

    Raises:
        ValueError: the table is not valid. The message is one line that names the file.
    """
    path = folder / TABLE
    if not path.is_file():
        return {}
    document = door.toml(path)
    entries, _ = document.pop("always", []), document.pop("seeds", {})
    if document or not isinstance(entries, list):
        raise ValueError(f"{path}: entries are [[always]], and there is nothing else but seeds")
    found: dict[str, list[Part]] = {}
    for number, entry in enumerate(entries, start=1):
        case = entry.pop("case", None) if isinstance(entry, dict) else None
        if case and isinstance(entry.get("seed"), str):
            del entry["seed"]
        if not isinstance(case, str) or not all(isinstance(values, list) for values in entry.values()):
            raise ValueError(f"{path} entry {number}: expected a case and lists of values of its parameters")
        found.setdefault(case, []).extend(product(entry))
    return found


def product(axes: Mapping[str, list[Any]]) -> Iterator[Part]:
    """Return the combinations of lists of values, as the table has them, by the names of their parameters."""
    for values in itertools.product(*axes.values()):
        yield frozenset((name, text(_with_none(value))) for name, value in zip(axes, values, strict=True))


def _with_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_none(one) for one in value]
    return None if value == "None" else value
