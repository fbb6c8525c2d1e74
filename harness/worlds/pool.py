"""The worlds of one pytest process: started on first use, reused by later cases, replaced when a case breaks one."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable

from shardproof.harness.findings.verdict import Verdict
from shardproof.harness.worlds import forkserver
from shardproof.harness.worlds.jobs import Job, Result, WorldKey
from shardproof.harness.worlds.lease import Leases, device_of
from shardproof.harness.worlds.world import Outcome, World

#: Idle worlds that the pool keeps besides the one in use. Each holds the memory of its ranks and a context on each of
#: their devices.
KEPT_WORLDS = 3


class Pool:
    """The worlds of one pytest process; it stops the least recently used ones first.

    Args:
        device_count: the number of CUDA devices of the host.
        worker: the index of this process among xdist's workers; the worlds of different workers start on different
            devices.
    """

    def __init__(self, *, device_count: int = 0, worker: int = 0) -> None:
        self._worlds: collections.OrderedDict[WorldKey, World] = collections.OrderedDict()
        self._leases = Leases()
        self._device_count = device_count
        self._worker = worker

    def run(self, key: WorldKey, job: Job, *, alone: bool = False) -> Outcome:
        """Run a case on the world of ``key``, on devices or cores that are leased for the duration of the case.

        Starts the world if there is none. While the world runs the case it is not in the pool, and it returns there
        only if it can run another case. After an exception that interrupts this call, such as a KeyboardInterrupt, its
        ranks may still send results of this case, which must not become those of the next.

        Args:
            key: the world's key.
            job: the case.
            alone: whether to share the devices or cores with no other case.

        Raises:
            WorldDied: the world could not be started.
            WaitedTooLong: the lease or a new rank did not come in time.
        """
        with self._leased(key, alone=alone):
            world = self._take(key)
            try:
                outcome = world.run(job)
            except BaseException:
                world.kill()
                raise
        if _is_in_step(outcome.results) and not any(result.is_worn_out for result in outcome.results):
            self._worlds[key] = world
        else:
            world.kill()
        return outcome

    def _leased(self, key: WorldKey, *, alone: bool) -> contextlib.AbstractContextManager[None]:
        if key.device == "cpu":
            return self._leases.cores(key.size, alone=alone)
        return self._leases.devices(self._devices(key), alone=alone)

    def _devices(self, key: WorldKey) -> list[int]:
        if key.device == "cpu":
            return [0] * key.size
        return device_of(self._worker, size=key.size, count=self._device_count)

    def discard(self, key: WorldKey) -> None:
        """Kill the world of ``key``, if there is one; the next case with that key starts a new world."""
        world = self._worlds.pop(key, None)
        if world is not None:
            world.kill()

    def close(self) -> None:
        """Stop every world."""
        while self._worlds:
            _, world = self._worlds.popitem()
            world.stop()
        # It would never notice the end of this process.
        forkserver.kill_if_stopped()

    def _take(self, key: WorldKey) -> World:
        """Take the world of ``key`` out of the pool, or start one."""
        world = self._worlds.pop(key, None)
        if world is not None and world.is_alive:
            return world
        if world is not None:
            world.kill()
        while len(self._worlds) > KEPT_WORLDS:
            _, oldest = self._worlds.popitem(last=False)
            oldest.stop()
        return World(key, self._devices(key))


def _is_in_step(results: Iterable[Result]) -> bool:
    """Whether the world can run another case.

    Its ranks are in step if all passed or all failed by agreement, and none left state behind.
    """
    results = list(results)
    passed = all(result.verdict == Verdict.PASS for result in results)
    return (passed or all(result.agreed for result in results)) and not any(result.left_behind for result in results)
