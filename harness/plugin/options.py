"""The command line of a conformance run.

Each option has a long name that begins with ``--shardproof-`` and a short form without it. Options share one name space
among all plugins and conftest files of a run; where another owner has a short form already, it keeps it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from typing import Any

import pytest

from shardproof.harness.plugin.selection import DEFAULT_IMPLEMENTATIONS

_PREFIX = "--shardproof-"
_GROUP = ("shardproof", "conformance of sharded data parallel training")


@dataclasses.dataclass(frozen=True)
class _Option:
    name: str
    attributes: dict[str, Any]

    @property
    def short(self) -> str:
        return f"--{self.name}"

    @property
    def prefixed(self) -> str:
        return f"{_PREFIX}{self.name}"

    def add(self, parser: pytest.Parser, name: str, text: str) -> None:
        dest = f"shardproof_{self.name.replace('-', '_')}"
        parser.getgroup(*_GROUP).addoption(name, dest=dest, help=text, **self.attributes)


_HELP = {
    "impl": "comma-separated implementations: built-in names, or module:Class (default: "
    f"{','.join(DEFAULT_IMPLEMENTATIONS)})",
    "device": "where ranks run; auto takes CUDA with NCCL where there are two devices or more, else the CPU with gloo",
    "world": "run only cases with these numbers of ranks, such as 2,4",
    "report": "write the run file, as JSON, here",
    "check-collectives": "stop ranks that are about to issue different collectives on one group, before they block",
    "deadline": "per case (default: 60 on the CPU, 30 on CUDA)",
}

_OPTIONS = (
    _Option("impl", {"metavar": "NAMES"}),
    _Option("device", {"choices": ("auto", "cpu", "cuda"), "default": "auto"}),
    _Option("world", {"metavar": "SIZES"}),
    _Option("report", {"metavar": "FILE"}),
    _Option("check-collectives", {"action": "store_true"}),
    _Option("deadline", {"type": float, "metavar": "SECONDS"}),
)


def add_prefixed(parser: pytest.Parser) -> None:
    """Add the options under the names that never clash."""
    for option in _OPTIONS:
        option.add(parser, option.prefixed, _HELP[option.name])


def has_conftests(manager: pytest.PytestPluginManager) -> bool:
    """Whether a conftest file is loaded: then this plugin was named by one, after pytest asked for options."""
    files = (getattr(plugin, "__file__", None) or "" for plugin in manager.get_plugins())
    return any(pathlib.Path(file).name == "conftest.py" for file in files)


def add_short_forms(parser: pytest.Parser, manager: pytest.PytestPluginManager) -> None:
    """Add the short forms that nobody else has; the run's header names the owners of the others.

    To be called when the other plugins and the initial conftest files have added theirs: argparse raises in whoever
    comes second.
    """
    taken = _names_of(parser)
    clashes = []
    for option in _OPTIONS:
        if option.short in taken:
            clashes.append(
                f"shardproof: {option.short} is an option of {_owner(option.short, manager)}; shardproof's own is "
                f"{option.prefixed}"
            )
        else:
            option.add(parser, option.short, f"short for {option.prefixed}")
    if clashes:
        manager.register(_Clashes(clashes), "shardproof-option-clashes")


def asks_for_a_run(config: pytest.Config) -> bool:
    """Whether any option of a conformance run was given."""
    names = ("impl", "device", "world", "report", "deadline")
    return any(getattr(config.option, f"shardproof_{name}") not in (None, "auto") for name in names)


class _Clashes:
    """Prints one line for each short form that has another owner."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def pytest_report_header(self) -> list[str]:
        return self._lines


def _names_of(parser: pytest.Parser) -> set[str]:
    # pytest has no public way to ask, and what happens at a second name depends on its version.
    groups = {id(group): group for group in (parser._anonymous, *parser._groups)}
    return {name for group in groups.values() for option in group.options for name in option.names()}


def _owner(name: str, manager: pytest.PytestPluginManager) -> str:
    """The file of the plugin that adds the option, found by having each add its options to a stand-in."""
    for implementation in manager.hook.pytest_addoption.get_hookimpls():
        probe = _Probe()
        given = {"parser": probe, "pluginmanager": manager}
        # Whatever a foreign hook does with a stand-in, a line of the header must not end the run.
        with contextlib.suppress(Exception):
            implementation.function(*(given[argument] for argument in implementation.argnames))
        if name in probe.names:
            return str(getattr(implementation.plugin, "__file__", None) or implementation.plugin_name)
    return "another plugin"


class _Probe:
    """Stands in for a parser and for its groups, and keeps the names of the options added to it."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def addoption(self, *names: str, **attributes: Any) -> None:
        self.names.update(names)

    _addoption = addoption

    def getgroup(self, *arguments: Any, **keywords: Any) -> _Probe:
        return self

    def addini(self, *arguments: Any, **keywords: Any) -> None:
        """Configuration values are nobody's options."""
