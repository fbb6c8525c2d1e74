"""The table of where upstream's tests are (``sources.toml``), and the files of a checkout that the user names."""

import dataclasses
import pathlib
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Mapping, Sequence

import torch

TABLE = pathlib.Path(__file__).with_name("sources.toml")
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclasses.dataclass(frozen=True)
class Source:
    """A row of the table: files of one revision of a repository, and what makes them run on our devices."""

    name: str
    repository: str
    revision: str
    files: tuple[str, ...]
    patch: tuple[tuple[str, str], ...]

    def patch_for(self, device: str) -> tuple[tuple[str, str], ...]:
        """Return the patch for a type of device."""
        fields = {"{device}": device, "{backend}": _BACKENDS[device]}
        of_device = tomllib.loads(TABLE.read_text()).get(device, {"patch": []})["patch"]
        return tuple((old, _filled(new, fields)) for old, new in [*self.patch, *of_device])


def _filled(text: str, fields: Mapping[str, str]) -> str:
    for field, value in fields.items():
        text = text.replace(field, value)
    return text


def read() -> list[Source]:
    """Return the rows of the table."""
    version = torch.__version__.partition("+")[0]
    return [
        Source(
            row["name"],
            row["repository"],
            row["revision"].replace("{torch}", version),
            tuple(row["files"]),
            tuple((old, new) for old, new in row["patch"]),
        )
        for row in tomllib.loads(TABLE.read_text())["source"]
    ]


def patched(text: str, patch: Sequence[tuple[str, str]]) -> str:
    """Return a file's text with each regular expression of a patch replaced, in their order.

    Raises:
        ValueError: A replacement changed the number of lines, so that tracebacks would name wrong ones.
    """
    for old, new in patch:
        text, lines = re.sub(old, new, text, flags=re.MULTILINE), text.count("\n")
        if text.count("\n") != lines:
            raise ValueError(f"the patch {old!r} changes the number of lines; it must keep it")
    return text


def files_of(source: Source, folder: pathlib.Path, scratch: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of a source in a folder: a clone that has the revision, or the files themselves.

    Args:
        source: The row.
        folder: What the user named. Of a clone, the revision is written to ``scratch``, whatever is checked out.
        scratch: A folder of our own.

    Raises:
        ValueError: The folder is a clone without the revision, or has none of the files.
    """
    if (folder / ".git").exists() or (folder / "objects").is_dir():
        folder = _archived(source, folder, scratch)
    found = sorted({path for pattern in source.files for path in folder.glob(pattern)})
    if not found:
        raise ValueError(f"{source.name}: {folder} has no file of {source.repository} such as {source.files[0]}")
    return found


def _archived(source: Source, clone: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    git = ["git", f"--git-dir={clone / '.git' if (clone / '.git').exists() else clone}"]
    # Whole folders: git's patterns are not those of a shell.
    folders = sorted({pattern.partition("/test_")[0].partition("/*")[0] for pattern in source.files})
    made = subprocess.run([*git, "archive", source.revision, *folders], capture_output=True, check=False)
    if made.returncode != 0:
        said = made.stderr.decode(errors="replace").strip().split("\n")[-1]
        raise ValueError(f"{source.name}: {clone} lacks revision {source.revision} of {source.repository} ({said})")
    target.mkdir(parents=True, exist_ok=True)
    (target / ".tar").write_bytes(made.stdout)
    with tarfile.open(target / ".tar") as archive:
        archive.extractall(target, filter="data")
    return target
