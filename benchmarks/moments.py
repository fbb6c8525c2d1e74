"""The times at which a pytest run prints its lines; imported by the scripts of this folder."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import time


def line_moments(
    command: list[str], *, pattern: str, folder: pathlib.Path, environment: dict[str, str], fine: tuple[int, ...] = (0,)
) -> list[float]:
    """Seconds from the command's start at which each line with the pattern was printed.

    Args:
        environment: what is set besides this process's own.
        fine: the exit codes with which it may end; any other ends this process too.
    """
    started = time.monotonic()
    moments = []
    whole = {**os.environ, **environment}
    with subprocess.Popen(command, cwd=folder, env=whole, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if re.search(pattern, line):
                moments.append(time.monotonic() - started)
    if process.returncode not in fine or not moments:
        raise SystemExit(f"pytest ended with {process.returncode}: {' '.join(command)}")
    return moments
