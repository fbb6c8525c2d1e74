"""The command ``shardproof run``: pytest on the packaged suites, whatever the current directory holds.

The root directory, the configuration file and the import mode are fixed, so node ids are ``suites/...`` as in a clone,
and neither a configuration file nor a conftest nor a package of the current directory takes part. Files that a run
writes go to the current directory all the same, and adapters are found there.
"""

import difflib
import importlib.util
import itertools
import os
import pathlib
import re
import sys
from collections.abc import Sequence

from shardproof.harness.adapters import registry

_SUITES = "suites"
_PACKAGE = pathlib.Path(__file__).parents[1]


HELP = """\
usage: shardproof run [PATH ...] [options]

Run the packaged suites with pytest. PATH is a file or a node id such as suites/test_clipping.py or
"suites/test_clipping.py::test_empty_shards[reference-w4-inf]"; by default all suites run. The configuration and the
conftest files of the current directory take no part; adapters that --impl names as module:Class are found there.

Options of shardproof are in the group "shardproof" below; the ones to begin with:

  --impl NAMES      implementations, separated by commas (`shardproof implementations` lists them)
  --effort quick    one item of each test function, instead of all
  --profile core    the items of a profile of the contract, instead of all
  --world 2,4       only cases with these numbers of ranks
  --report FILE     write a run file, which the other commands read
  --explain         run each failing case a second time, and name the first tensor that diverges

examples:
  shardproof run --impl reference,torch.fully_shard --effort quick --report run.json
  shardproof run suites/test_training.py --impl my_adapters:MyAdapter -k frozen -x --explain
  shardproof run --impl torch.fsdp --expectations torch.fsdp.toml -n 4 --report run.json

exit codes: 0 all cases passed, were skipped or failed as expected; 1 a case failed; 4 an option is not valid;
6 no case ran on one of several implementations; 7 a selected case has no record; 2, 3 and 5 as in pytest.

The help of pytest follows.
"""


def run(arguments: Sequence[str]) -> int:
    """Run pytest on the packaged suites, and return its exit code.

    Paths and node ids that begin with ``suites`` are those of the packaged suites; without any, all suites run.
    """
    if {"-h", "--help"} & set(arguments):
        print(HELP)
        if importlib.util.find_spec("pytest") is None:
            print("pytest is not installed.")
            return 0
    import pytest  # late: without it, there is a help

    here = os.getcwd()
    # For adapters of the user's own. Last, so that no package here takes the place of an installed one.
    if here not in sys.path:
        sys.path.append(here)
    root = _root()
    unknown = next(filter(None, (_unknown(argument, root) for argument in arguments)), "") or _no_module(arguments)
    if unknown:
        print(f"ERROR: {unknown}", file=sys.stderr)
        return int(pytest.ExitCode.USAGE_ERROR)
    fixed = configured()
    # Without the plugin the option is unknown, which --strict-config refuses.
    if not any(one.endswith("no:cacheprovider") for one in arguments):
        fixed += ["-o", f"cache_dir={pathlib.Path(here, '.pytest_cache')}"]
    given = [_located(argument, root) for argument in arguments]
    targets = [] if list(given) != list(arguments) else [str(root / _SUITES)]
    return int(pytest.main([*fixed, *given, *targets]))


def configured() -> list[str]:
    """Return the arguments that fix what a pytest of this process reads, and name the plugin to it."""
    # By the environment and not by -p: read after the plugins of other packages have added their options.
    named = os.environ.get("PYTEST_PLUGINS")
    os.environ["PYTEST_PLUGINS"] = ",".join(filter(None, [named, "shardproof.plugin"]))
    root = _root()
    return [
        f"--rootdir={root}",
        "-c", str(_PACKAGE / "suites.ini"),
        f"--confcutdir={root / _SUITES}",
        "--import-mode=importlib",
    ]  # fmt: skip


def _root() -> pathlib.Path:
    """The folder with the real suites: in a clone the links are another way to the same files."""
    return (_PACKAGE / _SUITES).resolve().parent


def _unknown(argument: str, root: pathlib.Path) -> str:
    """Return why an argument names nothing in the packaged suites, with a similar name; empty if it may."""
    path, _, names = argument.partition("::")
    files = sorted(f"{_SUITES}/{one.name}" for one in (root / _SUITES).glob("test_*.py"))
    name = pathlib.PurePath(path).name
    if path == name and f"{_SUITES}/{name}" in files and not pathlib.Path(path).exists():
        return f"{path}: there is no such file here; the packaged one is {_SUITES}/{name}"
    if name.endswith(".py") and pathlib.PurePath(path).parts[:1] != (_SUITES,) and pathlib.Path(path).is_file():
        # All suites would run beside it, under a configuration that is not its own.
        return f"{path}: no file of the packaged suites; cases of your own run by `pytest -p shardproof.plugin {path}`"
    if pathlib.PurePath(path).parts[:1] != (_SUITES,) or pathlib.Path(path).exists():
        return ""
    if not (root / path).exists():
        return f"{path}: the packaged suites have no such file{_similar(path, files)}"
    function = names.partition("[")[0]
    if not function or not (root / path).is_file():
        return ""
    functions = re.findall(r"^def (test_\w+)", (root / path).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return "" if function in functions else f"{path} has no case {function}{_similar(function, functions)}"


def _no_module(arguments: Sequence[str]) -> str:
    """Return why an implementation of ``--impl`` has no module, before anything slow is imported; empty if all have."""
    given = [other for one, other in itertools.pairwise(arguments) if one == "--impl"]
    given += [one.partition("=")[2] for one in arguments if one.startswith("--impl=")]
    try:
        for name in filter(None, ",".join(given[-1:]).split(",")):
            if ":" in name:
                registry.found(name)
    except ValueError as error:
        return str(error)
    return ""


def _similar(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.7)
    return f"; did you mean {' or '.join(near)}?" if near else f"; there are {len(names)}"


def _located(argument: str, root: pathlib.Path) -> str:
    """A path or a node id of the packaged suites, made absolute; any other argument as it is."""
    path, separator, names = argument.partition("::")
    if pathlib.PurePath(path).parts[:1] == (_SUITES,) and (root / path).exists():
        return f"{root / path}{separator}{names}"
    return argument
