"""The command that repeats one case: to be pasted into any shell, in any directory."""

import argparse
import dataclasses
import os
import pathlib
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

import shardproof
from shardproof.harness.plugin import cases, command_line
from shardproof.harness.plugin.options import OPTIONS
from shardproof.harness.plugin.packaged import SuiteModule
from shardproof.harness.plugin.records import MadeRecord
from shardproof.harness.plugin.selection import Selection

#: The configuration file by which ``shardproof run`` is recognised.
_PACKAGED = pathlib.Path(shardproof.__file__).parent / "suites.ini"

#: Options of pytest with a value that decide which tests there are and how they are imported.
_VALUED = (("-c", "--config-file"), ("--rootdir",), ("--confcutdir",), ("--import-mode",))
_REPEATED = (("-p",), ("-o", "--override-ini"))
_FLAGS = (("--noconftest",), ("--runxfail",))

#: What `shardproof run` passes by itself.
_FIXED = ("--config-file", "--rootdir", "--confcutdir", "--import-mode")

#: What stands instead of a command for a drawn example that no seed repeats.
PASTE = "paste the case: --fuzz draws random examples"


@dataclasses.dataclass(frozen=True)
class Invocation:
    """What a command that repeats one case of a run shares with the command of the run.

    It consists of plain JSON values, because the controller of an xdist run sends it to the workers.

    Attributes:
        directory: the directory in which the run was started.
        start: the words before the first argument: variables of the environment, the interpreter and the module.
        given: pytest's own options.
        own: the values of shardproof's options that a command repeats, by name.
        names: from an option of shardproof to the name that is not another plugin's in this run.
        packaged: whether this is ``shardproof run``, to which node ids of the packaged suites are the same everywhere.
    """

    directory: str
    start: tuple[str, ...]
    given: tuple[str, ...]
    own: Mapping[str, Any]
    names: Mapping[str, str]
    packaged: bool

    def command(self, item: pytest.Function, made: MadeRecord, selection: Selection) -> str:
        """Return the command that repeats a case of this run."""
        if (mark := item.get_closest_marker("reproduced_by")) is not None and mark.args[0]:
            return f"(cd {shlex.quote(self.directory)} && {mark.args[0]})"
        if made.examples is not None and selection.fuzz is not None:
            return PASTE
        of_case = {
            "impl": made.implementation,
            "device": made.device,
            "simulate": cases.launch_of(item).simulates or None,
            # A left-over shows in new processes, whatever ran before it.
            "isolate": selection.isolate or made.is_left_over,
        }
        words = [*self.start, *self.given, self._target(item), *self.options(of_case)]
        # pytest in a clone and `shardproof run` deselect these.
        words += ["-m", "nightly"] if item.get_closest_marker("nightly") is not None else []
        return f"(cd {shlex.quote(self.directory)} && {' '.join(map(_quoted, words))})"

    def options(self, of_case: Mapping[str, Any]) -> list[str]:
        """Return the words of shardproof's options: those of a case, by name, and the others of the run."""
        values = {**self.own, **of_case}
        return [word for name in OPTIONS for word in _words_of(self.names[name], values.get(name))]

    def _target(self, item: pytest.Function) -> str:
        if self.packaged and isinstance(item.parent, SuiteModule):
            return item.nodeid
        # The path in a node id is relative to the root directory of the run, that of an argument to the current one.
        path = os.path.relpath(item.path, self.directory)
        return f"{path}::{item.nodeid.partition('::')[2]}"


def invocation_of(config: pytest.Config) -> Invocation:
    """Return how a run was started; not for xdist workers, whose controller knows it."""
    packaged = config.inipath is not None and config.inipath.resolve() == _PACKAGED.resolve()
    variables = [f"PYTHONPATH={value}"] if (value := os.environ.get("PYTHONPATH")) else []
    module = ("-m", "shardproof", "run") if packaged else ("-m", "pytest")
    values = command_line.values(config)
    return Invocation(
        directory=str(config.invocation_params.dir),
        start=(*variables, sys.executable, *_safe_path(), *module),
        given=_kept(map(str, config.invocation_params.args), packaged=packaged),
        own={name: values[name] for name, one in OPTIONS.items() if one.repeats and values[name] != one.absent},
        names=command_line.names(config),
        packaged=packaged,
    )


def _safe_path() -> Sequence[str]:
    """The option of Python that leaves out the current directory, if it was not before the installed packages.

    ``python -m`` puts it there, the commands ``shardproof`` and ``pytest`` do not.
    """
    is_first = sys.modules["__main__"].__spec__ is not None or sys.argv[0] == "-c"
    return () if is_first and not sys.flags.safe_path else ("-P",)


def _words_of(name: str, value: Any) -> Sequence[str]:
    """The words of an option of shardproof with this value."""
    if value is None or value is False:
        return ()
    if value is True:
        return (name,)
    values = value if isinstance(value, list) else [value]
    return [word for one in values for word in (name, f"{one:g}" if isinstance(one, float) else str(one))]


def _kept(arguments: Iterable[str], *, packaged: bool) -> tuple[str, ...]:
    """Return those of pytest's arguments that another command needs to find the same case."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in _VALUED:
        parser.add_argument(*names)
    for names in _REPEATED:
        parser.add_argument(*names, action="append", default=[])
    for names in _FLAGS:
        parser.add_argument(*names, action="store_true")
    given: Mapping[str, Any] = vars(parser.parse_known_args(list(arguments))[0])
    kept: list[str] = []
    for names in (*_VALUED, *_REPEATED, *_FLAGS):
        value = given[names[-1].lstrip("-").replace("-", "_")]
        kept += _words(names[-1], value, packaged=packaged)
    return tuple(kept)


def _words(name: str, value: Any, *, packaged: bool) -> Sequence[str]:
    if not value or (packaged and name in _FIXED):
        return ()
    if value is True:
        return (name,)
    values = [value] if isinstance(value, str) else value
    own = [one for one in values if not (packaged and one.startswith("cache_dir="))]
    return [word for one in own for word in (name, one)]


def _quoted(word: str) -> str:
    """Quote a word for the shell; the value of a variable without its name."""
    name, equals, value = word.partition("=")
    return f"{name}={shlex.quote(value)}" if equals and name.isidentifier() else shlex.quote(word)
