"""What tests share."""

import collections
import functools
import gzip
import json
import os
import pathlib
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardproof import runfile

pytest_plugins = ["pytester"]


def pytest_configure(config: pytest.Config) -> None:
    """Give the workers of xdist temporary directories of their own."""
    if hasattr(config, "workerinput"):
        config.add_cleanup(_own_temporary_directory())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """By day, run every 40th test of a file marked ``sampled``: such tests start processes and wait for deadlines.

    The night runs them all, and a command line with a node id runs what it names.
    """
    if any("::" in argument for argument in config.args):
        return
    counts: collections.Counter[pathlib.Path] = collections.Counter()
    for item in items:
        if item.get_closest_marker("sampled") is not None and item.get_closest_marker("nightly") is None:
            if counts[item.path] % 40:
                item.add_marker(pytest.mark.nightly)
            counts[item.path] += 1


def _own_temporary_directory() -> Callable[[], None]:
    """Give a worker of xdist a temporary directory of its own, with leases of its own; returns what removes it.

    The leases of runs in one directory keep their cases from sharing cores. A case that hangs on purpose would keep the
    tests of the other workers waiting while it sleeps.
    """
    folder = tempfile.mkdtemp(prefix="sp-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    return lambda: shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the tests of a file that share a fixture or worlds to one worker, those of large files first."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            # A case of the reference runs on the worlds of its worker, which then know the shapes of its file.
            is_shared = file.startswith("tests/fsdp_impl/") or _has_shared_fixture(config.rootpath / file)
            return file if is_shared else nodeid

    return Scheduling(config, log)


@functools.cache
def _has_shared_fixture(path: pathlib.Path) -> bool:
    return 'scope="module"' in path.read_text()


@pytest.fixture(autouse=True)
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner runs of pytest print the same wherever the outer one runs: under CI it shortens no line of its summary."""
    for name in ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS", "FORCE_COLOR", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def short_tmp() -> Iterator[pathlib.Path]:
    """A folder that an inner run can have for TMPDIR: the path of a socket in it fits into the system's 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as folder:
        yield pathlib.Path(folder)


@pytest.fixture(autouse=True)
def valid_run_files(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every run file that a test has written agrees with the published schema."""
    names = {"tmp_path", "pytester"} & set(request.fixturenames)
    folders = {name: request.getfixturevalue(name) for name in names}
    yield
    for name, folder in folders.items():
        for path in (folder.path if name == "pytester" else folder).rglob("*.json*"):
            _validate(path)


def _validate(path: pathlib.Path) -> None:
    """Compare a file with the schema if it is a run file of version 2 with an end."""
    try:
        content = path.read_bytes() if path.is_file() else b""
        run = json.loads(gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content)
    except (ValueError, OSError, EOFError, RecursionError, zlib.error):  # not a run file, or one that a test has cut
        return
    if isinstance(run, dict) and run.get("schema_version") == 2 and "end" in run:
        _validator().validate(run)


@functools.cache
def _validator() -> Any:
    """A validator of run files: to compare the schema with its own takes ten times as long as a run file with it."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(runfile.schema_text())
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)
