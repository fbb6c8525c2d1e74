"""Wheels that are built and unpacked as pip would install them, for tests of what an installation does."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from shardproof import pages

ROOT = Path(__file__).parents[1]
FOLDERS = ("fsdp_impl", "harness", "reports", "suites")
_BYTECODE = tempfile.TemporaryDirectory(prefix="bytecode-")


def run(*arguments, cwd, path, timeout=240, code=None, **variables):
    """Run this Python with `arguments`, with `path` before everything installed, and return what came of it.

    It must end with this code, if one is given.
    """
    # What the host's own path has may be needed, expecttest say. Bytecode elsewhere: an import would leave files in
    # folders that a test looks at.
    paths = filter(None, [str(path), os.environ.get("PYTHONPATH")])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONPYCACHEPREFIX": _BYTECODE.name}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=env | variables, capture_output=True, text=True, timeout=timeout)
    assert code in (None, done.returncode), f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def copy_of_the_sources(copy):
    """Copy what a wheel is built from."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    (copy / "docs").mkdir()
    for name in ("contract.md", *pages.names()):
        shutil.copy(ROOT / "docs" / name, copy / "docs")
    for folder in (*FOLDERS, "shardproof", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored, symlinks=True)
    return copy


def build(sources, out, kind="wheel"):
    """Build the wheel or sdist of these sources as pip would build it, but in this environment, and return its path."""
    script = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    run("-c", script, cwd=sources, path="", code=0)
    return next(out.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


def install(wheel, site):
    """Unpack what a wheel installs into a folder."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
