"""Wheels that are built and unpacked as pip would install them, for tests of what an installation does."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("fsdp_impl", "harness", "reports", "suites")
_BYTECODE = tempfile.TemporaryDirectory(prefix="bytecode-")


def run(*arguments, cwd, path, timeout=240, **variables):
    """Run this Python with `arguments`, with `path` before everything installed, and return what came of it."""
    # What the host's own path has may be needed, expecttest say. Bytecode elsewhere: an import would leave files in
    # folders that a test looks at.
    paths = filter(None, [str(path), os.environ.get("PYTHONPATH")])
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONPYCACHEPREFIX": _BYTECODE.name,
    }
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env | variables, capture_output=True, text=True, timeout=timeout)


def copy_of_the_sources(copy):
    """Copy what a wheel is built from."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in (*FOLDERS, "shardproof", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored, symlinks=True)
    return copy


def build(sources, out, kind="wheel"):
    """Build the wheel or sdist of these sources as pip would build it, but in this environment, and return its path."""
    script = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    built = run("-c", script, cwd=sources, path="")
    assert built.returncode == 0, built.stderr
    return next(out.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


def install(wheel, site):
    """Unpack what a wheel installs into a folder."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
