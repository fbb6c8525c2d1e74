"""The command line options of a conformance run.

Each option has a long name with the prefix ``--shardproof-`` and a short form without it. All plugins and conftest
files of a run share one namespace of options. A short form that another plugin or conftest file has already added is
left to it.
"""

import argparse
import contextlib
import dataclasses
import functools
from typing import Any

import pytest

from shardproof.harness.plugin.selection import DEFAULT_IMPLEMENTATIONS

_PREFIX = "--shardproof-"
_CLASHES = "shardproof-option-clashes"
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
    "impl": "comma-separated implementations: names that `shardproof implementations` lists, or module:Class (default: "
    f"{','.join(DEFAULT_IMPLEMENTATIONS)})",
    "device": "cpu, or the accelerator's type, as in torch; auto: the accelerator if it has two devices, else cpu",
    "world": "run only cases with these numbers of ranks, such as 2,4",
    "report": "write the run file to this path, as JSON",
    "check-collectives": "compare the collectives of the ranks before they start, and fail instead of blocking",
    "isolate": "run each case in new rank processes, which run nothing else",
    "effort": "how much of the selected cases runs: full (default), standard (every pair of values of parameters, and "
    "every number of ranks) or quick (one item of each test function)",
    "contract": "run the items of this version of the contract, such as 2026.12, and no others; instead of --effort",
    "profile": "run the items of this profile of the contract, such as core, and no others; instead of --effort",
    "fuzz": "seconds for which the cases that draw models and schedules, in total, search for a failing example "
    "(default: 10 examples each, always the same)",
    "expectations": "another file of known failures, in addition to those next to the cases; may be repeated",
    "explain": "run each failing case again with capture on, and name the first tensor that diverges",
    "ranks-per-gpu": "how many ranks may share a GPU; more than one use gloo, because NCCL refuses them (default: 1)",
    "simulate": "run only the cases with the mark simulated, in one process, as single ranks of simulated worlds of "
    "these sizes, such as 1024,16384",
    "deadline": "seconds that a case may take (default: 60 on the CPU, 30 on accelerators)",
}

_OPTIONS = (
    _Option("impl", {"metavar": "NAMES"}),
    _Option("device", {"metavar": "TYPE", "default": "auto"}),
    _Option("world", {"metavar": "SIZES"}),
    _Option("report", {"metavar": "FILE"}),
    _Option("check-collectives", {"action": "store_true"}),
    _Option("isolate", {"action": "store_true"}),
    _Option("effort", {"metavar": "NAME", "default": "full"}),
    _Option("contract", {"metavar": "VERSION"}),
    _Option("profile", {"metavar": "NAME"}),
    _Option("fuzz", {"type": float, "metavar": "SECONDS"}),
    _Option("expectations", {"action": "append", "metavar": "FILE"}),
    _Option("explain", {"action": "store_true"}),
    _Option("ranks-per-gpu", {"type": int, "metavar": "N"}),
    _Option("simulate", {"metavar": "SIZES"}),
    _Option("deadline", {"type": float, "metavar": "SECONDS"}),
)


def add_prefixed(parser: pytest.Parser) -> None:
    """Add the options under their long names, which never clash."""
    for option in _OPTIONS:
        option.add(parser, option.prefixed, _HELP[option.name])


def add_short_forms_last(parser: pytest.Parser, manager: pytest.PytestPluginManager) -> None:
    """Add the short forms when all plugins and initial conftest files have added their options.

    argparse raises in the plugin that adds a name second, and a conftest file may be loaded after this plugin. No hook
    of pytest is called between the last of them and the parsing of the command line, so the parser itself is extended.
    """
    parse = parser.parse

    @functools.wraps(parse)
    def add_and_parse(*arguments: Any, **keywords: Any) -> argparse.Namespace:
        parser.parse = parse  # type: ignore[method-assign]
        _add_short_forms(parser, manager)
        return parse(*arguments, **keywords)

    parser.parse = add_and_parse  # type: ignore[method-assign]


def names(config: pytest.Config) -> dict[str, str]:
    """Return for each option the name that is shardproof's in this run: the short form unless another plugin has it."""
    clashes = config.pluginmanager.get_plugin(_CLASHES)
    taken = clashes.options if isinstance(clashes, _Clashes) else set()
    return {option.name: option.prefixed if option.name in taken else option.short for option in _OPTIONS}


def _add_short_forms(parser: pytest.Parser, manager: pytest.PytestPluginManager) -> None:
    """Add the short forms that are still free; the header of the run names the owners of the others."""
    taken = _names_of(parser)
    clashes: dict[str, str] = {}
    for option in _OPTIONS:
        if option.short in taken:
            clashes[option.name] = (
                f"shardproof: {option.short} is an option of {_owner(option.short, manager)}; shardproof's own is "
                f"{option.prefixed}"
            )
        else:
            option.add(parser, option.short, f"short for {option.prefixed}")
    if clashes:
        manager.register(_Clashes(clashes), _CLASHES)


def values(config: pytest.Config) -> dict[str, Any]:
    """Return the value of each option, by its name with underscores."""
    names = [option.name.replace("-", "_") for option in _OPTIONS]
    return {name: getattr(config.option, f"shardproof_{name}") for name in names}


def asks_for_a_run(config: pytest.Config) -> bool:
    """Return whether any option of a conformance run was given: whether one differs from its default.

    A default of another kind must be added here, or each run of pytest in a project would be one of shardproof.
    """
    return any(value not in (None, "auto", "full", False) for value in values(config).values())


class _Clashes:
    """Prints one line for each short form that has another owner."""

    def __init__(self, lines: dict[str, str]) -> None:
        self._lines = lines
        self.options = set(lines)

    def pytest_report_header(self) -> list[str]:
        return [*self._lines.values()]


def _names_of(parser: pytest.Parser) -> set[str]:
    # pytest has no public function for this, and what it does with a name that is added twice depends on its version.
    groups = (parser._anonymous, *parser._groups)
    return {name for group in groups for option in group.options for name in option.names()}


def _owner(name: str, manager: pytest.PytestPluginManager) -> str:
    """Return the file of the plugin that adds an option, found by calling every plugin's hook with a probe parser."""
    for implementation in manager.hook.pytest_addoption.get_hookimpls():
        probe = _Probe()
        given = {"parser": probe, "pluginmanager": manager}
        # A foreign hook may fail on the probe, and a line of the header must not end the run.
        with contextlib.suppress(Exception):
            implementation.function(*(given[argument] for argument in implementation.argnames))
        if name in probe.names:
            return str(getattr(implementation.plugin, "__file__", None) or implementation.plugin_name)
    return "another plugin"


class _Probe:
    """Replaces a parser and its groups, and keeps the names of the options that are added."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def addoption(self, *names: str, **attributes: Any) -> None:
        self.names.update(names)

    _addoption = addoption

    def getgroup(self, *arguments: Any, **keywords: Any) -> "_Probe":
        return self

    def addini(self, *arguments: Any, **keywords: Any) -> None:
        """Ignore configuration values, which are not command line options."""
