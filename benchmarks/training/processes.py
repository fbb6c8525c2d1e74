"""How a benchmark starts the processes that train, and reads what they answer; imports no torch."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

FOLDER = pathlib.Path(__file__).parents[1]
#: Begins the lines on standard output that are answers: libraries print too.
ANSWER = "@@"


def answer(value: dict[str, Any]) -> None:
    """Send one line to the benchmark that started this process."""
    print(ANSWER + json.dumps(value), flush=True)


def answer_in(lines: Iterable[str]) -> Any:
    """The first answer in what a process printed, or None."""
    line = next((line for line in lines if line.startswith(ANSWER)), None)
    return None if line is None else json.loads(line.removeprefix(ANSWER))


def start(module: str, *arguments: object, environment: dict[str, str] | None = None, **streams: Any) -> Any:
    """Start a module of the benchmarks with further variables, one thread unless set, and a pipe as standard output."""
    path = os.pathsep.join([str(FOLDER.parent), str(FOLDER), os.environ.get("PYTHONPATH", "")])
    variables = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, **(environment or {})}
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables, **streams)


def names_in(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Make the type of an argument that is a comma-separated list of these names."""

    def split(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        for name in found:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        return found

    return split
