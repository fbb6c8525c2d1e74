"""The environment of a run, for the run file: versions, host, implementations and the constants of the comparison."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from typing import Any

from shardproof.harness.plugin.selection import Selection
from shardproof.harness.worlds.fleet import Fleet


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

    cuda = selection.device == "cuda"
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
    job = {} if fleet is None else {"torchrun": _job(fleet)}
    return job | {
        "shardproof": _own_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
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


def _job(fleet: Fleet) -> dict[str, Any]:
    place = fleet.place
    return {
        "run_id": place.run_id,
        "attempt": place.attempt,
        "agent": place.agent,
        "ranks": place.size,
        "hosts": place.nodes,
    }


def _own_version() -> str:
    from importlib import metadata

    try:
        return metadata.version("shardproof")
    except metadata.PackageNotFoundError:
        return "not installed"
