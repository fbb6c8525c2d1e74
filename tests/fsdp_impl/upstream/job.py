"""What one process is to run: a file of upstream's tests, against one implementation."""

import dataclasses
import json
import os
from typing import Any

# The ranks of a test and the forkserver inherit it, however they are started.
VARIABLE = "SHARDPROOF_UPSTREAM_JOB"


@dataclasses.dataclass(frozen=True)
class Job:
    """The tests of one file for one implementation.

    Args:
        module: The name under which the file is imported.
        path: The file.
        patch: Pairs of a regular expression and its replacement, applied to the text when it is imported.
        implementation: ``reference`` or ``torch``.
        device: ``cpu`` or ``cuda``.
        ranks: The devices that there are; on a CPU, those that are claimed.
        events: The file to which a line of JSON is appended when a test begins and when it ends.
        leave_out: Names of tests that do not run, because an earlier process of this job has run them.
        part: Which of ``parts`` equal runs of neighbouring tests this is, from 0.
        parts: Into how many the file's tests are divided.
    """

    module: str
    path: str
    patch: tuple[tuple[str, str], ...]
    implementation: str
    device: str
    ranks: int
    events: str
    leave_out: tuple[str, ...] = ()
    part: int = 0
    parts: int = 1

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that runs this."""
        written = json.dumps(dataclasses.asdict(self))
        # Asking how many devices there are then initializes none, so that ranks can be forked from a process that did.
        return os.environ | {VARIABLE: written, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1"}


def current() -> Job:
    """Return the job of this process."""
    written: dict[str, Any] = json.loads(os.environ[VARIABLE])
    patch = tuple((str(old), str(new)) for old, new in written.pop("patch"))
    return Job(**written | {"patch": patch, "leave_out": tuple(written["leave_out"])})
