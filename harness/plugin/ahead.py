"""Runs cases of a torchrun job on ranks that the current case leaves, ahead of pytest, which asks for one at a time."""

import concurrent.futures
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor

import pytest

from shardproof.harness.plugin import cases, drawing
from shardproof.harness.plugin.records import MadeRecord
from shardproof.harness.worlds.torchrun.fleet import Fleet
from shardproof.harness.worlds.torchrun.fleet_pool import FleetPool

#: Seconds after which ranks that have started meanwhile are ended too.
_ABORT_SECONDS = 0.2

#: Marks by which pytest itself may decide that a case does not run.
_DECIDED_BY_PYTEST = ("skip", "skipif", "xfail", "usefixtures")


class Ahead:
    """Runs the cases of a session, several at once where their worlds share no rank.

    The items come in the order in which pytest asks for them; ``run`` is called in threads.
    """

    def __init__(
        self,
        items: Sequence[pytest.Item],
        fleet: Fleet,
        pool: FleetPool,
        *,
        run: Callable[[pytest.Function], MadeRecord],
        may_run: Callable[[pytest.Function], bool],
    ) -> None:
        self._fleet = fleet
        self._pool = pool
        self._run = run
        self._may_run = may_run
        self._items = items
        self._positions = {item.nodeid: position for position, item in enumerate(items)}
        self._next = 0
        self._threads = ThreadPoolExecutor(fleet.size, thread_name_prefix="shardproof case")
        self._started: dict[str, tuple[int, Future[MadeRecord]]] = {}

    def run(self, item: pytest.Function) -> MadeRecord:
        """Return the record of the case that pytest runs next, and start others that can run at the same time."""
        if item.nodeid not in self._started:  # also if a plugin runs the case once more
            self._start(item)
        # pytest may have passed others without asking, as those that were skipped in their setup.
        self._next = max(self._next, self._positions[item.nodeid] + 1)
        _, mine = self._started[item.nodeid]
        is_alone = item.get_closest_marker("alone") is not None
        try:
            while not mine.done():
                if not is_alone:
                    self._start_others()
                concurrent.futures.wait(self._running, return_when=FIRST_COMPLETED)
        except BaseException:
            # Something in this process ended the wait, such as a timeout. What runs beside is not to blame for the end
            # of its ranks: it runs again when pytest asks for it.
            self._abort()
            raise
        del self._started[item.nodeid]
        return mine.result()

    def close(self) -> None:
        """End the cases for which pytest does not ask any more."""
        self._abort()
        self._threads.shutdown(cancel_futures=True)

    @property
    def _running(self) -> list[Future[MadeRecord]]:
        return [future for _, future in self._started.values() if not future.done()]

    def _abort(self) -> None:
        running = self._running
        if running:
            for future in running:
                future.cancel()
            # Again and again: a case may still be about to start its ranks, and would then run to its end.
            self._pool.abort()
            while concurrent.futures.wait(running, timeout=_ABORT_SECONDS).not_done:
                self._pool.abort()
        self._started = {nodeid: one for nodeid, one in self._started.items() if one[1] not in running}

    def _start(self, item: pytest.Function) -> None:
        self._started[item.nodeid] = (cases.launch_of(item).size, self._threads.submit(self._run, item))

    def _start_others(self) -> None:
        """Start the next cases, in their order, as long as there are ranks for them."""
        while self._next < len(self._items):
            item = self._items[self._next]
            if not cases.is_case(item) or not self._can_start(item):
                return
            if item.nodeid not in self._started:
                self._start(item)
            self._next += 1

    def _can_start(self, item: pytest.Function) -> bool:
        # What has been run and not been asked for is lost if the run ends.
        if len(self._started) >= self._fleet.size or not self._may_run(item):
            return False
        names = {mark.name for mark in item.iter_markers()}
        if not names.isdisjoint((*_DECIDED_BY_PYTEST, "alone")) or drawing.drawn_parameter(item) is not None:
            return False
        used = sum(size for size, future in self._started.values() if not future.done())
        return used + cases.launch_of(item).size <= self._fleet.left
