"""The environment of a run, for the run file: versions, host, implementations and the constants of the comparison."""

import datetime
import os
import pathlib
import platform
import sys
from collections.abc import Mapping, Sequence

import shardproof
from shardproof import contract, torch_versions
from shardproof.harness.adapters import registry
from shardproof.harness.plugin import origin
from shardproof.harness.plugin.selection import Selection
from shardproof.harness.worlds.torchrun.fleet import Fleet
from shardproof.runfile import Accelerator, Environment, Implementation, Torchrun


def describe(
    selection: Selection, *, command: Sequence[str], started: datetime.datetime, fleet: Fleet | None = None
) -> Environment:
    """Return the environment of a run.

    Args:
        selection: the checked options of the run.
        command: the command line of the run.
        started: the time at which the run started, in UTC.
        fleet: the torchrun job of the run; None if there is none.
    """
    import torch

    from shardproof.harness.judging import numerics
    from shardproof.harness.tensors import devices, private

    found = [] if selection.device == "cpu" else devices.properties()
    package = pathlib.Path(shardproof.__file__).parent
    return Environment(
        torchrun=None if fleet is None else _job(fleet),
        mends=private.mends(),
        shardproof=origin.version(package),
        shardproof_commit=origin.commit(package),
        contract=contract.version(),
        python=platform.python_version(),
        torch=torch.__version__,
        # A torch that was built without git calls it "Unknown".
        torch_git_version=str(getattr(torch.version, "git_version", None) or origin.UNKNOWN).lower(),
        platform=platform.platform(),
        cpu_count=os.cpu_count(),
        device=selection.device,
        accelerators=[Accelerator(name=name, memory_bytes=nbytes) for name, nbytes in found],
        nccl=devices.nccl_version() if selection.backend == "nccl" else None,
        backend=selection.backend,
        started=started.isoformat(timespec="seconds"),
        command=command,
        implementations={
            name: Implementation(
                version=adapter.version(),
                capabilities=sorted(map(str, selection.capabilities[name])),
                shards=sorted(adapter.traits.shards),
                reads=adapter.traits.reads,
            )
            for name, adapter in selection.implementations.items()
        },
        numerics={
            "baseline_factor": numerics.BASELINE_FACTOR,
            "slack_ulps": numerics.SLACK_ULPS,
            "adam_noise_ulps": numerics.ADAM_NOISE_ULPS,
        },
    )


def header(selection: Selection) -> list[str]:
    """Return what a reader of a run must know beforehand, in one line each: its files, and what is new about torch."""
    import torch

    from shardproof.harness.tensors import private

    lines = [f"shardproof: {name}: {files}" for name, files in _files(selection).items()]
    lines += [f"shardproof: {part}: {what}" for part, what in private.mends().items()]
    release = torch_versions.release_of(torch.__version__)
    if release > torch_versions.NEWEST:
        found, tested = map(torch_versions.text, (release, torch_versions.NEWEST))
        lines.append(f"shardproof: torch {found} is newer than the newest tested one, {tested}")
    return lines


def _files(selection: Selection) -> Mapping[str, str]:
    """The file of each adapter, and that of its implementation, if the adapter names it."""
    found = {}
    for name, adapter in selection.implementations.items():
        if name not in selection.not_imported and name not in registry.OWN_TRAINING:
            file = getattr(sys.modules[adapter.__module__], "__file__", None) or adapter.__module__
            source = adapter.source()
            found[name] = f"{file} drives {source}" if source else file
    return found


def _job(fleet: Fleet) -> Torchrun:
    process = fleet.process
    return Torchrun(
        run_id=process.run_id, attempt=process.attempt, agent=process.agent, ranks=process.size, hosts=process.nodes
    )
