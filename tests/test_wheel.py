"""What an installed shardproof can do without a clone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("fsdp_impl", "harness", "reports", "suites")


def run(*arguments, cwd, **environment):
    """Run this Python with `arguments` and return what came of it."""
    env = os.environ | environment
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True)


def sources(package):
    """The package's files as git would see them, as paths from the root."""
    files = (path for path in (ROOT / package).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if path.suffix in (".py", ".toml", ".typed")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources as pip would build it, but in this environment."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for package in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    # A chapter's expectations, whether or not there are any yet.
    (copy / "suites/expectations").mkdir(exist_ok=True)
    (copy / "suites/expectations/sample.toml").touch()
    out = tmp_path_factory.mktemp("wheel")
    built = run("-c", f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})", cwd=copy)
    assert built.returncode == 0, built.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder that holds what the wheel installs."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_the_wheel_holds_every_source_and_no_test(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {"suites/expectations/sample.toml"}.union(*map(sources, PACKAGES))


def test_the_suites_run_without_a_clone(installed, tmp_path):
    """`pytest --pyargs suites` in an empty folder finds the cases, and the plugin with its options."""
    arguments = ["-m", "pytest", "--pyargs", "suites", "--impl", "reference", "--device", "cpu", "--collect-only", "-q"]
    found = run(*arguments, "-p", "no:cacheprovider", cwd=tmp_path, PYTHONPATH=str(installed))
    assert found.returncode == 0, found.stdout + found.stderr
    assert "test_autograd.py::" in found.stdout
    assert "warning" not in found.stdout.lower()
    assert list(tmp_path.iterdir()) == []


def test_the_plugin_is_registered_once_in_an_installed_clone(installed):
    """The entry point and conftest.py both bring it."""
    arguments = ["-m", "pytest", "--trace-config", "--collect-only", "suites/test_autograd.py", "--impl", "reference"]
    found = run(*arguments, "-p", "no:cacheprovider", cwd=ROOT, PYTHONPATH=str(installed))
    assert found.returncode == 0, found.stdout + found.stderr
    plugin = str(ROOT / "harness/plugin.py")
    assert [line.split()[0] for line in found.stdout.splitlines() if line.endswith(f": {plugin}")] == ["harness.plugin"]


def test_the_summary_runs_without_a_clone(installed, tmp_path):
    done = run("-m", "reports", "summary", "none.json", cwd=tmp_path, PYTHONPATH=str(installed))
    assert (done.returncode, done.stderr) == (2, "reports: none.json: No such file or directory\n")
