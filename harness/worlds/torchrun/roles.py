"""The place of this process in a job of torchrun, from the variables that torch elastic sets. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping

from shardproof.harness.worlds import waiting

#: Set by torch elastic in the processes that it starts, and by nothing else.
_MARKS = ("TORCHELASTIC_RUN_ID", "RANK")

#: Variables of the job that would make libraries in a rank process believe that torchrun started it: its place in the
#: world of its case is another one.
_FOREIGN = "TORCHELASTIC_"


@dataclasses.dataclass(frozen=True)
class Place:
    """One process of a job.

    Attributes:
        rank: the number of the process in the job; 0 is the controller.
        local_rank: the number of the process on its host, and of its device.
        node: the number of the process's host, from 0: of its torchrun.
        master: the address of the host of rank 0.
        port: the port of the job's store there.
        run_id: the id of the job, as ``--rdzv-id``.
        attempt: how often torchrun has restarted the processes.
        most_attempts: how often it may, as ``--max-restarts``.
        local_size: the number of processes of the job on this host.
        agent: identifies the process of torchrun on this host, which outlives those that it restarts.
    """

    rank: int
    size: int
    local_rank: int
    node: int
    nodes: int
    master: str
    port: int
    run_id: str
    attempt: int
    most_attempts: int
    host: str
    local_size: int
    agent: str

    @property
    def is_controller(self) -> bool:
        """Whether this process collects, decides and reports."""
        return self.rank == 0

    @property
    def may_restart(self) -> bool:
        """Whether torchrun starts the processes again if one of them fails."""
        return self.attempt < self.most_attempts


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place of this process, or None if torchrun did not start it."""
    if not all(name in environment for name in _MARKS):
        return None
    return Place(
        rank=int(environment["RANK"]),
        size=int(environment["WORLD_SIZE"]),
        local_rank=int(environment["LOCAL_RANK"]),
        node=int(environment["GROUP_RANK"]),
        nodes=int(environment["GROUP_WORLD_SIZE"]),
        master=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
        run_id=environment["TORCHELASTIC_RUN_ID"],
        attempt=int(environment["TORCHELASTIC_RESTART_COUNT"]),
        most_attempts=int(environment["TORCHELASTIC_MAX_RESTARTS"]),
        host=socket.gethostname(),
        local_size=int(environment["LOCAL_WORLD_SIZE"]),
        agent=_identity(os.getppid()),
    )


def _identity(pid: int) -> str:
    process = waiting.look_at(pid)
    return "" if process is None else f"{pid} {process.started}"


def foreign(environment: Mapping[str, str]) -> list[str]:
    """Return the variables of a job that a rank process must not have."""
    return [name for name in environment if name.startswith(_FOREIGN)]
