"""The environment of a run, for the run file: versions, host, implementations and the constants of the comparison."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import pathlib
import platform
import re
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from packaging.version import InvalidVersion, Version

import shardproof
from shardproof.harness.plugin.selection import Selection
from shardproof.harness.worlds.torchrun.fleet import Fleet

# Which code a run is of: the version and the commit of shardproof, and a hash of the cases.
#
# The build of a wheel or an sdist runs this file by its path to write the commit into it, so it imports the standard
# library alone.


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


NEWEST_TORCH = (2, 15)
"""The newest release of torch with which shardproof has been tested."""


def describe(
    selection: Selection, *, command: Sequence[str], started: datetime.datetime, fleet: Fleet | None = None
) -> dict[str, Any]:
    """Return the environment of a run as JSON values.

    Args:
        selection: the checked options of the run.
        command: the command line of the run.
        started: the time at which the run started, in UTC.
        fleet: the torchrun job of the run; None if there is none.
    """
    import torch

    from shardproof.harness.parity import numerics
    from shardproof.harness.tensors import private

    cuda = selection.device == "cuda"
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
    job = {} if fleet is None else {"torchrun": _job(fleet)}
    package = pathlib.Path(shardproof.__file__).parent
    mends = private.mends()
    return (
        job
        | ({"mends": mends} if mends else {})
        | {
            "shardproof": version(package),
            "shardproof_commit": commit(package),
            "python": platform.python_version(),
            "torch": torch.__version__,
            # A torch that was built without git calls it "Unknown".
            "torch_git_version": str(getattr(torch.version, "git_version", None) or UNKNOWN).lower(),
            "platform": platform.platform(),
            "cpu_count": os.cpu_count(),
            "device": selection.device,
            "accelerators": [{"name": d.name, "memory_bytes": d.total_memory} for d in devices],
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if selection.backend == "nccl" else None,
            "started": started.isoformat(timespec="seconds"),
            "command": list(command),
            "implementations": {
                name: {
                    "version": adapter.version(),
                    "capabilities": sorted(map(str, adapter.capabilities())),
                    "reads": adapter.traits.reads,
                }
                for name, adapter in selection.implementations.items()
            },
            "numerics": {
                "baseline_factor": numerics.BASELINE_FACTOR,
                "slack_ulps": numerics.SLACK_ULPS,
                "adam_noise_ulps": numerics.ADAM_NOISE_ULPS,
            },
        }
    )


def header() -> list[str]:
    """Return what a reader of a run must know about the installed torch beforehand, in one line each."""
    import torch

    from shardproof.harness.tensors import private

    lines = [f"shardproof: {part}: {what}" for part, what in private.mends().items()]
    with contextlib.suppress(InvalidVersion):
        release = Version(torch.__version__).release[:2]
        if release > NEWEST_TORCH:
            found, tested = (".".join(map(str, one)) for one in (release, NEWEST_TORCH))
            lines.append(f"shardproof: torch {found} is newer than the newest tested one, {tested}")
    return lines


def _job(fleet: Fleet) -> dict[str, Any]:
    place = fleet.place
    return {
        "run_id": place.run_id,
        "attempt": place.attempt,
        "agent": place.agent,
        "ranks": place.size,
        "hosts": place.nodes,
    }
