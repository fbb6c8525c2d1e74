"""The command ``shardproof run``: pytest on the packaged suites, whatever the current directory holds.

The root directory, the configuration file and the import mode are fixed, so node ids are ``suites/...`` as in a clone,
and neither a configuration file nor a conftest nor a package of the current directory takes part. Files that a run
writes go to the current directory all the same, and adapters are found there.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Sequence

import pytest

_SUITES = "suites"
_PACKAGE = pathlib.Path(__file__).parent


def run(arguments: Sequence[str]) -> int:
    """Run pytest on the packaged suites.

    Args:
        arguments: pytest's. Paths and node ids that begin with ``suites`` are those of the packaged suites; without
            any, all suites run.

    Returns:
        pytest's exit code.
    """
    # The real folder: in a clone the links are another way to the same files.
    root = (_PACKAGE / _SUITES).resolve().parent
    here = os.getcwd()
    # For adapters of the user's own. Last, so that no package here takes the place of an installed one.
    if here not in sys.path:
        sys.path.append(here)
    # By the environment and not by -p: read after the plugins of other packages have added their options.
    named = os.environ.get("PYTEST_PLUGINS")
    os.environ["PYTEST_PLUGINS"] = ",".join(filter(None, [named, "shardproof.plugin"]))
    fixed = [
        f"--rootdir={root}",
        "-c", str(_PACKAGE / "suites.ini"),
        f"--confcutdir={root / _SUITES}",
        "--import-mode=importlib",
    ]  # fmt: skip
    # Without the plugin the option is unknown, which --strict-config refuses.
    if not any(one.endswith("no:cacheprovider") for one in arguments):
        fixed += ["-o", f"cache_dir={pathlib.Path(here, '.pytest_cache')}"]
    given = [_located(argument, root) for argument in arguments]
    targets = [] if list(given) != list(arguments) else [str(root / _SUITES)]
    return int(pytest.main([*fixed, *given, *targets]))


def _located(argument: str, root: pathlib.Path) -> str:
    """A path or a node id of the packaged suites, made absolute; any other argument as it is."""
    path, separator, names = argument.partition("::")
    if pathlib.PurePath(path).parts[:1] == (_SUITES,) and (root / path).exists():
        return f"{root / path}{separator}{names}"
    return argument
