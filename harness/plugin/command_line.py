"""The options of a run on pytest's command line.

Each option has a long name with the prefix ``--shardproof-`` and a short form without it. All plugins and conftest
files of a run share one namespace of options. A short form that another plugin or conftest file has already added is
left to it.
"""

import argparse
import contextlib
import functools
from typing import Any

import pytest

from shardproof.harness.plugin.options import OPTIONS, flag

_PREFIX = "--shardproof-"
_DEST = "shardproof_"
_CLASHES = "shardproof-option-clashes"
_GROUP = ("shardproof", "conformance of sharded data parallel training")


def add_prefixed(parser: pytest.Parser) -> None:
    """Add the options under their long names, which never clash."""
    for name, option in OPTIONS.items():
        _add(parser, name, flag(name, _PREFIX), option.help)


def _add(parser: pytest.Parser, name: str, shown: str, text: str) -> None:
    option = OPTIONS[name]
    kind: dict[str, Any] = {"action": "store_true"}
    if option.metavar:
        kind = {"metavar": option.metavar, "type": option.type}
        kind |= {"action": "append"} if option.several else {"default": option.default}
    parser.getgroup(*_GROUP).addoption(shown, dest=f"{_DEST}{name}", help=text, **kind)


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
    return {name: flag(name, _PREFIX if name in taken else "--") for name in OPTIONS}


def _add_short_forms(parser: pytest.Parser, manager: pytest.PytestPluginManager) -> None:
    """Add the short forms that are still free; the header of the run names the owners of the others."""
    taken = _names_of(parser)
    clashes: dict[str, str] = {}
    for name in OPTIONS:
        short, prefixed = flag(name), flag(name, _PREFIX)
        if short in taken:
            owner = _owner(short, manager)
            clashes[name] = f"shardproof: {short} is an option of {owner}; shardproof's own is {prefixed}"
        else:
            _add(parser, name, short, f"short for {prefixed}")
    if clashes:
        manager.register(_Clashes(clashes), _CLASHES)


def values(config: pytest.Config) -> dict[str, Any]:
    """Return the value of each option, by its name."""
    return {name: getattr(config.option, f"{_DEST}{name}") for name in OPTIONS}


def asks_for_a_run(config: pytest.Config) -> bool:
    """Return whether any option of a conformance run was given: whether one differs from its default."""
    return any(value != OPTIONS[name].absent for name, value in values(config).items())


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
