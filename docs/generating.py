"""What the scripts of this folder share: they collect the suites, and write files or compare them."""

from __future__ import annotations

import contextlib
import io
import pathlib
import sys
from collections.abc import Mapping

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def collect(collector: object) -> None:
    """Collect the suites for one implementation, nightly cases included.

    Args:
        collector: a plugin of pytest that notes the collected items.

    Raises:
        ValueError: the suites cannot be collected.
    """
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "nightly or not nightly", str(ROOT / "suites")]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(arguments, plugins=[collector])
    if code != pytest.ExitCode.OK:
        raise ValueError(f"the suites cannot be collected:\n{output.getvalue()}")


def write(texts: Mapping[pathlib.Path, str], *, compares: bool, script: str) -> int:
    """Write files, or compare them with what would be written.

    Args:
        texts: the contents of each file.
        compares: whether to write nothing.
        script: the command that writes them, for messages.

    Returns:
        The exit code: 0, or 1 if a file is out of date.
    """
    if not compares:
        for path, text in texts.items():
            path.write_text(text)
        return 0
    outdated = [path for path, text in texts.items() if not (path.is_file() and path.read_text() == text)]
    for path in outdated:
        print(f"{path.relative_to(ROOT)} is out of date: run python {script}", file=sys.stderr)
    return 1 if outdated else 0
