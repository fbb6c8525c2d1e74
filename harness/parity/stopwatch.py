"""Where the time of a rank goes: each moment of a case counts for one activity, the innermost."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from typing import Literal

Activity = Literal["case", "sharding", "training", "replaying", "comparing", "waiting", "leftovers"]
"""What a rank does: shard a model, train the sharded run, replay on the baseline and the oracle, compare, wait for the
other ranks in an exchange, look for left-overs; everything else is the case's own."""


class Stopwatch:
    """Measures the activities of one rank, one inside of the other.

    Attributes:
        seconds: the wall time of each activity without the activities inside of it.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a case."""
        self.seconds: collections.Counter[Activity] = collections.Counter()
        self._activity: Activity = "case"
        self._since = time.monotonic()

    @contextlib.contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Count the time of the block for an activity."""
        before = self._switch(activity)
        try:
            yield
        finally:
            self._switch(before)

    def stop(self) -> dict[str, float]:
        """Return the seconds of each activity, rounded to a tenth of a millisecond."""
        self._switch(self._activity)
        return {name: round(value, 4) for name, value in sorted(self.seconds.items())}

    def _switch(self, activity: Activity) -> Activity:
        now, before = time.monotonic(), self._activity
        self.seconds[before] += now - self._since  # type: ignore[assignment]
        self._activity, self._since = activity, now
        return before
