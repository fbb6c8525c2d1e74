"""Collects the items of the suites, and lists those that belong to an open version of the contract.

``shardproof.contract`` runs it (``python -m shardproof.listing VERSION HASH``), because reports import neither torch
nor pytest. The list is kept until the sources have another hash.
"""

import contextlib
import io
import sys
from collections.abc import Mapping, Sequence

import pytest

from shardproof import contract, folders
from shardproof.commands.run import configured
from shardproof.contract import Item
from shardproof.harness.adapters.capability import Hardware
from shardproof.harness.plugin import cases, effort
from shardproof.harness.plugin.options import Effort
from shardproof.harness.plugin.packaged import SUITES
from shardproof.harness.plugin.state import STATE


class Collector:
    """A pytest plugin that notes the items of the suites by their ids, and those that a version of the contract has."""

    def __init__(self) -> None:
        self.items: dict[str, Item] = {}
        self.listed: dict[str, Item] = {}
        self._simulated: list[pytest.Item] = []  # cases that run with --simulate alone

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Called by pytest."""
        self._simulated += [item for item in items if item.get_closest_marker("simulated") is not None]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Called by pytest."""
        # As they are written; a run takes one of each function first.
        found = filter(cases.is_case, [*session.items, *self._simulated])
        items = sorted(found, key=lambda item: (item.path, item.location[1]))
        self.items = {cases.case_id(item): _item(item) for item in items}
        asked = [item for item in items if not any(map(item.get_closest_marker, ("nightly", "simulated")))]
        kept = effort.choose(asked, session.config.stash[STATE].selection, Effort.STANDARD)
        self.listed = {id_: self.items[id_] for id_ in map(cases.case_id, kept)}


def _item(item: pytest.Function) -> Item:
    needs = {str(name) for mark in item.iter_markers("needs") for name in mark.args}
    options = {f"a name for {mark.args[0]}" for mark in item.iter_markers("takes")}
    hardware = frozenset(needs & set(Hardware))
    return Item(cases.requirements(item), cases.launch_of(item).size, frozenset(needs | options) - hardware, hardware)


def collected() -> Collector:
    """Collect the suites for one implementation, nightly cases included.

    Raises:
        ValueError: they cannot be collected; the text has what pytest printed.
    """
    collector = Collector()
    asked = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "nightly or not nightly", str(SUITES)]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main([*configured(), *asked], plugins=[collector])
    if code != pytest.ExitCode.OK:
        raise ValueError(f"the suites cannot be collected:\n{output.getvalue()}")
    return collector


def written(items: Mapping[str, Item]) -> str:
    """Write a list of items, which ``contract.read_items`` reads."""
    groups: dict[str, list[str]] = {}
    for id_, item in items.items():
        case, _, end = id_.removesuffix("]").partition("[")
        needs = (", ".join(names) or "-" for names in (item.requirements, sorted(item.needs), sorted(item.hardware)))
        groups.setdefault("\t".join([case, *needs]), []).append(f"\t{end}\n")
    return "".join(f"{head}\n{''.join(sorted(groups[head]))}" for head in sorted(groups))


def main(number: str, sources: str) -> int:
    """Print the list of a version, and keep it with the hash of its sources if its folder can be written."""
    try:
        text = written(collected().listed)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    with contextlib.suppress(folders.NotWritten):
        folders.write(contract.MADE, {contract.list_of(number).name: f"{sources}\n{text}"})
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
