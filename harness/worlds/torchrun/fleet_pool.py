"""The worlds of a torchrun job, several of which may run cases at the same time, on ranks that they do not share."""

import contextlib
import threading
from collections.abc import Iterator

from shardproof.harness.worlds.jobs import Job, WorldKey
from shardproof.harness.worlds.pool import Pool, Processes
from shardproof.harness.worlds.torchrun.fleet import Fleet
from shardproof.harness.worlds.world import Outcome, World


class FleetPool(Pool):
    """The worlds of a job; threads may run cases at the same time."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet
        self._running: set[World] = set()
        self._lease: contextlib.ExitStack | None = None
        self._holders = 0
        self._lease_lock = threading.Lock()

    def abort(self) -> None:
        """Kill the ranks of all worlds that run a case, so that whoever waits for them gets crashes."""
        with self._lock:
            running = [*self._running]
        for world in running:
            world.abort()

    def _run(self, world: World, job: Job) -> Outcome:
        with self._lock:
            self._running.add(world)
        try:
            return super()._run(world, job)
        finally:
            with self._lock:
                self._running.remove(world)

    @contextlib.contextmanager
    def _placed(self, key: WorldKey, implementation: str, *, alone: bool) -> Iterator[Processes]:
        with self._lock:
            known = [
                processes for (one, owner, processes) in self._worlds if one == key and owner in (implementation, "")
            ]
        processes = self._fleet.reserve(key.size, known=known, alone=alone)
        try:
            yield processes
        finally:
            self._fleet.release(processes)

    @contextlib.contextmanager
    def _leased(self, key: WorldKey, *, alone: bool) -> Iterator[None]:
        """Lease all that the job has on this host while any of its worlds runs; other hosts are the job's own.

        Within the job no two worlds share a rank, and so no device.
        """
        with self._lease_lock:
            if self._lease is None:
                self._lease = contextlib.ExitStack()
                self._lease.enter_context(self._lease_of_job(key.device, alone=alone))
            self._holders += 1
        try:
            yield
        finally:
            with self._lease_lock:
                self._holders -= 1
                if not self._holders:
                    self._lease.close()
                    self._lease = None

    def _lease_of_job(self, device: str, *, alone: bool) -> contextlib.AbstractContextManager[None]:
        count = self._fleet.process.local_size
        if device == "cpu":
            return self._leases.cores(count, alone=alone)
        return self._leases.devices(range(count), alone=alone)

    def _start(self, key: WorldKey, processes: Processes) -> World:
        seats = self._fleet.seats(processes)
        devices = [0 if key.device == "cpu" else seat.process.local_rank for seat in seats]
        return World(key, devices, fleet=self._fleet, seats=seats)
