"""The command ``shardproof implementations``: what --impl can name, in which version, and where it runs."""

import argparse
import dataclasses
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence

from shardproof import commands
from shardproof.door import printable
from shardproof.harness.adapters import registry
from shardproof.harness.adapters.capability import EVERY, families
from shardproof.reports.texts import table

CANNOT_RUN = 1

_EPILOG = """\
examples:
  shardproof implementations
  shardproof implementations torch.fsdp my_adapters:MyAdapter
  shardproof implementations --capabilities my_adapters:MyAdapter

exit codes: 0; 1 one of those that are named runs nowhere here"""


@dataclasses.dataclass
class _Known:
    """One implementation: a row of the table, and why it cannot run somewhere."""

    name: str
    source: str
    version: str = "-"
    capabilities: frozenset[str] | None = None
    devices: list[str] = dataclasses.field(default_factory=list)
    reasons: list[str] = dataclasses.field(default_factory=list)

    @property
    def row(self) -> list[str]:
        """The cells of the table."""
        runs_on = ", ".join(self.devices) or "nothing here"
        number = "-" if self.capabilities is None else str(len(self.capabilities))
        return [printable(cell) for cell in (self.name, self.version, number, runs_on, self.source)]


def implementations(arguments: Sequence[str]) -> int:
    """Print the implementations that are known, or those that are named, or what they declare.

    The exit code is 0, or 1 if one that is named cannot run here on any device.
    """
    options = _parser().parse_args(arguments)
    named = options.names
    # As for `shardproof run`: for adapters of the user's own.
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    from shardproof.harness.tensors import devices  # late: it imports torch

    names = named or dict.fromkeys([*registry.BUILT_IN, *registry.registered()])
    here = devices.accelerator()
    known = [_examined(name, ["cpu", here] if here else ["cpu"]) for name in names]
    heading = ["name", "version", f"of {len(EVERY)} capabilities", "runs on", "from"]
    lines = _by_family(known) if options.capabilities else table([heading, *(one.row for one in known)])
    lines += [printable(line) for line in [*_clashes(), *(line for one in known for line in one.reasons)]]
    if not here:
        lines.append("torch finds no accelerator here")
    print("\n".join(lines))
    return CANNOT_RUN if named and not all(one.devices for one in known) else 0


def _examined(name: str, device_types: Iterable[str]) -> _Known:
    """Import and check an implementation; what is wrong with it becomes a line."""
    # Late: it imports torch.
    from shardproof.harness.adapters import declarations

    known = _Known(name, _source(name))
    try:
        adapter = registry.load(name)
    except ValueError as error:
        known.reasons.append(str(error))
        return known
    for device in device_types:
        try:
            declarations.check(name, adapter, device)
        except ValueError as error:
            known.reasons.append(str(error))
        else:
            known.devices.append(device)
            known.version, known.capabilities = adapter.version(), adapter.capabilities()
    return known


def _by_family(known: Sequence[_Known]) -> list[str]:
    """Each capability by its family, with what declares it: one implementation or not, or how many."""
    declared = [one.capabilities for one in known if one.capabilities is not None]
    width = max(map(len, EVERY)) + 2
    lines = [f"declared by: {', '.join(one.name for one in known if one.capabilities is not None) or 'nothing here'}"]
    for family, recipe, members in families():
        lines += ["", *textwrap.wrap(f"{family.upper()}. {recipe}", 110)]
        for capability, said in members.items():
            number = sum(capability in one for one in declared)
            found = f"{number} of {len(declared)}" if len(declared) != 1 else "yes" if number else "-"
            lines.append(f"  {capability:<{width}}{found:<10}{said}")
    return lines


def _source(name: str) -> str:
    if name in registry.BUILT_IN:
        return "shardproof"
    return " and ".join(one.package for one in registry.registered().get(name, [])) or "-"


def _clashes() -> list[str]:
    """Name the packages that register a built-in name, which nobody can reach."""
    return [
        f"{one.package} registers {name!r}, which is built-in: use another name, or pass {one.target}"
        for name, several in registry.registered().items()
        for one in several
        if name in registry.BUILT_IN
    ]


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser(
        "shardproof implementations",
        description="List the implementations that --impl can name: built-in ones and names of installed packages, "
        "each with its version, the number of declared capabilities, and the device types on which it runs here.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--capabilities", action="store_true", help="print the capabilities, by family, and who declares each"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these: names, or module:Class")
    return parser
