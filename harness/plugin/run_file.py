"""The run file: the environment of a run and the records of its cases, as JSON."""

from __future__ import annotations

import datetime
import gzip
import json
import os
import pathlib
import platform
import time
from collections.abc import Sequence
from typing import Any

from shardproof.harness.plugin.selection import Selection

SCHEMA_VERSION = 1


class RunFile:
    """Collects the records of a run and writes them once, at its end, atomically.

    Args:
        selection: the checked options of the run.
        command: the command line of the run.

    Attributes:
        cases: the records of the cases as JSON values; the plugin appends to it.
    """

    def __init__(self, selection: Selection, *, command: Sequence[str]) -> None:
        self.selection = selection
        self.command = list(command)
        self.cases: list[dict[str, Any]] = []
        self._started = datetime.datetime.now(datetime.UTC)
        self._clock = time.monotonic()

    def write(self, path: pathlib.Path) -> None:
        """Write the run file.

        Args:
            path: where to write; missing directories are made, and a name that ends in ``.gz`` gives a compressed file.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        run = {"schema_version": SCHEMA_VERSION, "environment": self._environment(), "cases": self.cases}
        unfinished = path.with_name(path.name + ".unfinished")
        content = (json.dumps(run, indent=1, allow_nan=False) + "\n").encode()
        unfinished.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        os.replace(unfinished, path)

    def _environment(self) -> dict[str, Any]:
        import torch

        from shardproof.harness.parity import numerics

        cuda = self.selection.device == "cuda"
        devices = [torch.cuda.get_device_properties(i) for i in range(self.selection.device_count)] if cuda else []
        return {
            "shardproof": _own_version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "platform": platform.platform(),
            "cpu_count": os.cpu_count(),
            "device": self.selection.device,
            "accelerators": [{"name": d.name, "memory_bytes": d.total_memory} for d in devices],
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
            "started": self._started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self._clock, 3),
            "command": self.command,
            "implementations": {
                name: {"version": adapter.version(), "capabilities": sorted(map(str, adapter.capabilities()))}
                for name, adapter in self.selection.implementations.items()
            },
            "numerics": {
                "baseline_factor": numerics.BASELINE_FACTOR,
                "slack_ulps": numerics.SLACK_ULPS,
                "adam_noise_ulps": numerics.ADAM_NOISE_ULPS,
            },
        }


def _own_version() -> str:
    from importlib import metadata

    try:
        return metadata.version("shardproof")
    except metadata.PackageNotFoundError:
        return "not installed"
