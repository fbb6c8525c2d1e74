"""Which code a run is of: the version and the commit of shardproof, and a hash of the cases.

The build of a wheel or an sdist runs this file by its path to write the commit into it, so it imports the standard
library alone.
"""

import hashlib
import os
import pathlib
import re
import subprocess
import tomllib
from collections.abc import Mapping
from importlib import metadata

UNKNOWN = "unknown"

COMMIT_FILE = "commit.txt"
"""The file in the package by which a wheel or an sdist knows its commit; a clone has none."""

#: git describes a commit in milliseconds; on a file system that does not answer, the run is worth more than its commit.
_MOST_SECONDS = 5.0

#: Set in git's hooks, such as one that runs tests before a commit: they name the repository of the hook.
_OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")


def version(package: pathlib.Path) -> str:
    """Return the version of the code in a folder ``shardproof``.

    Args:
        package: the folder. Of a clone, its ``pyproject.toml`` has the version: another one may be installed.
    """
    try:
        project = tomllib.loads((package.resolve().parent / "pyproject.toml").read_text("utf-8"))["project"]
        if project["name"] == "shardproof":
            return str(project["version"])
    except (OSError, ValueError, KeyError):
        pass
    try:
        return metadata.version("shardproof")
    except metadata.PackageNotFoundError:
        return "not installed"


def commit(package: pathlib.Path) -> str:
    """Return the commit of the code in a folder ``shardproof``; ``unknown`` if nothing here says it.

    Args:
        package: the folder, of a clone or of an installation.

    Returns:
        The full hash; followed by ``-dirty`` if a tracked file of the clone differs from it.
    """
    try:
        return (package / COMMIT_FILE).read_text("utf-8").strip() or UNKNOWN
    except (OSError, ValueError):
        return _by_git(package.resolve().parent)


def hash_of(files: Mapping[str, pathlib.Path]) -> str:
    """Return a short hash of files: 12 hexadecimal digits of the SHA-256 of their names and bytes.

    Args:
        files: the files by the names under which they count, which do not depend on where they are.
    """
    found = hashlib.sha256()
    for name, file in sorted(files.items()):
        try:
            content = file.read_bytes()
        except OSError:  # deleted since its cases were collected
            content = b""
        found.update(f"{name}\0{len(content)}\0".encode(errors="surrogateescape"))
        found.update(content)
    return found.hexdigest()[:12]


def _by_git(root: pathlib.Path) -> str:
    if not (root / ".git").exists():
        return UNKNOWN
    environment = {name: value for name, value in os.environ.items() if name not in _OF_HOOKS}
    # A broken .git must not lead to the repository around it; and the index is another's to write.
    environment |= {"GIT_CEILING_DIRECTORIES": str(root.parent), "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MOST_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    told = done.stdout.strip()
    return told if done.returncode == 0 and re.fullmatch(r"[0-9a-f]{40}(-dirty)?", told) else UNKNOWN
