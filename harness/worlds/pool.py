"""The worlds of one pytest process: started on first use, reused by later cases, replaced when a case breaks one."""

import collections
import contextlib
import dataclasses
import threading

from shardproof.harness.worlds import forkserver, scratch
from shardproof.harness.worlds.jobs import Job, WorldKey
from shardproof.harness.worlds.lease import Leases, device_of
from shardproof.harness.worlds.world import Outcome, World, by_agreement
from shardproof.runfile import Verdict

Processes = tuple[int, ...]
"""Which processes of a torchrun job have the ranks of a world; empty where all are children of this process."""

#: Idle worlds that the pool keeps besides the one in use, and the ranks that they have at most. Each rank holds memory
#: (80 MiB of its own on the CPU) and a context on its device. Cases come in the order of implementations and sizes, so
#: that each world is used in turn: with four sizes and two implementations that leave process groups in the worlds of
#: some sizes, fewer worlds would mean that almost each case starts one.
KEPT_WORLDS = 7
KEPT_RANKS = 24


class Pool:
    """The worlds of one pytest process, by key, by the implementation for which they are reserved, and by process.

    The least recently used ones are stopped first. Those of different workers of xdist start on different devices.
    """

    def __init__(self, *, device_count: int = 0, worker: int = 0) -> None:
        self._worlds: collections.OrderedDict[tuple[WorldKey, str, Processes], World] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._leases = Leases()
        self._device_count = device_count
        self._worker = worker

    def run(self, key: WorldKey, job: Job, *, alone: bool = False) -> Outcome:
        """Run a case on the world of ``key``, on devices or cores that are leased for the duration of the case.

        Starts the world if there is none. Once an implementation has left anything in a world, even what it may leave,
        only its own cases run there. A case whose implementation has set up state at its first use runs twice.

        While the world runs the case it is not in the pool, and it returns there only if it can run another case. After
        an exception that interrupts this call, such as a KeyboardInterrupt, its ranks may still send results of this
        case, which must not become those of the next.

        Args:
            alone: whether to share the devices or cores with no other case.

        Raises:
            WorldDied: the world could not be started.
            WaitedTooLong: the lease or a new rank did not come in time.
            TooFewRanks: the torchrun job has lost too many.
        """
        with self._placed(key, job.implementation, alone=alone) as processes:
            with self._leased(key, alone=alone):
                world = self._take(key, job.implementation, processes)
                try:
                    outcome = self._run(world, job)
                    goes_on = world.is_in_step(outcome.results)
                except BaseException:
                    world.kill()
                    raise
            if goes_on and not any(result.is_worn_out for result in outcome.results):
                if any(result.kept or result.excused for result in outcome.results):
                    world.reserved_for = job.implementation
                with self._lock:
                    self._worlds[key, world.reserved_for, processes] = world
            else:
                world.kill()
        return outcome

    def _run(self, world: World, job: Job) -> Outcome:
        outcome = world.run(job)
        passed = by_agreement(outcome.results) and all(one.verdict == Verdict.PASS for one in outcome.results)
        # State that is excused only where its implementation is first used.
        again = passed and any(result.excused for result in outcome.results)
        return _run_again(world, job, outcome) if again else outcome

    def _placed(
        self, key: WorldKey, implementation: str, *, alone: bool
    ) -> contextlib.AbstractContextManager[Processes]:
        """Where the world's ranks live, until the case has ended: as children of this process."""
        return contextlib.nullcontext(())

    def _leased(self, key: WorldKey, *, alone: bool) -> contextlib.AbstractContextManager[None]:
        if key.device == "cpu":
            return self._leases.cores(key.size, alone=alone)
        return self._leases.devices(self._devices(key), alone=alone)

    def _devices(self, key: WorldKey) -> list[int]:
        if key.device == "cpu":
            return [0] * key.size
        return device_of(self._worker, size=key.size, count=self._device_count)

    def _start(self, key: WorldKey, processes: Processes) -> World:
        return World(key, self._devices(key))

    def discard(self, key: WorldKey) -> None:
        """Kill the worlds of ``key``; the next case with that key starts a new world."""
        with self._lock:
            worlds = [self._worlds.pop(found) for found in [*self._worlds] if found[0] == key]
        for world in worlds:
            world.kill()

    def close(self) -> None:
        """Stop every world."""
        while self._worlds:
            _, world = self._worlds.popitem()
            world.stop()
        # It would never notice the end of this process.
        forkserver.kill_if_stopped()

    def _take(self, key: WorldKey, implementation: str, processes: Processes) -> World:
        """Take a world of ``key`` that the implementation may use out of the pool, or start one."""
        for reserved_for in (implementation, ""):
            with self._lock:
                world = self._worlds.pop((key, reserved_for, processes), None)
            if world is not None and world.is_alive:
                return world
            if world is not None:
                world.kill()
        while (oldest := self._too_many()) is not None:
            oldest.stop()
        return self._start(key, processes)

    def _too_many(self) -> World | None:
        with self._lock:
            if len(self._worlds) > KEPT_WORLDS or sum(kept.size for kept, _, _ in self._worlds) > KEPT_RANKS:
                return self._worlds.popitem(last=False)[1]
        return None


def _run_again(world: World, job: Job, first: Outcome) -> Outcome:
    """Run a case once more on the same ranks, where nothing is excused now.

    Without this, a case that leaks would pass where its implementation is first used, and fail after another case. The
    outcome has the time of both runs and what was excused in the first.
    """
    with scratch.temporary("case-") as tmp_path:
        # No other job has a negative number.
        outcome = world.run(dataclasses.replace(job, number=-job.number, tmp_path=tmp_path))
    outcome.seconds += first.seconds
    for again, result in zip(outcome.results, first.results, strict=True):
        again.excused = result.excused
    return outcome
