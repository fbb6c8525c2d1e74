"""What the scripts of this folder share: they collect the suites, and write files or compare them."""

import argparse
import contextlib
import io
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a clone need not be installed


def collect(collector: object) -> None:
    """Collect the suites for one implementation, nightly and simulated cases included; ValueError where that fails."""
    import pytest  # not at the top: docs/make_matrix.py runs without it

    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "nightly or not nightly", str(ROOT / "suites")]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(arguments, plugins=[collector, _Simulated()])
    if code != pytest.ExitCode.OK:
        raise ValueError(f"the suites cannot be collected:\n{output.getvalue()}")


class _Simulated:
    """A plugin of pytest that puts the cases of simulated worlds back, which run with --simulate alone."""

    def __init__(self) -> None:
        self._items: list[Any] = []

    def pytest_deselected(self, items: Sequence[Any]) -> None:
        """Called by pytest."""
        self._items += [item for item in items if item.get_closest_marker("simulated") is not None]

    def pytest_collection_finish(self, session: Any) -> None:
        """Called by pytest; the plugin that was registered last is called first."""
        session.items += self._items


def between(text: str, begin: str, end: str, made: str) -> str:
    """Return README.md with another text between two lines, given with their newlines; ValueError without them."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"README.md has no {begin.strip()} with {end.strip()} behind it")
    return f"{before}{begin}{made}{end}{after}"


def run(
    arguments: Iterable[str] | None, make: Callable[[], Mapping[pathlib.Path, str]], *, about: str, script: str
) -> int:
    """Write files, or compare them with what would be written, as the command line says; return the exit code.

    It is 1 if a file is out of date, or if ``make``, which makes the contents of each, raises a ValueError that says
    why.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is out of date")
    options = parser.parse_args(None if arguments is None else list(arguments))
    try:
        texts = make()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not options.check:
        for path, text in texts.items():
            path.write_text(text)
        return 0
    outdated = [path for path, text in texts.items() if not (path.is_file() and path.read_text() == text)]
    for path in outdated:
        print(f"{path.relative_to(ROOT)} is out of date: run python {script}", file=sys.stderr)
    return 1 if outdated else 0
