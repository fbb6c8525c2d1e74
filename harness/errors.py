"""How a case on a rank says that something parts, with the place where."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where two runs part: any of it may be unknown.

    ``element`` indexes the full, unsharded tensor.
    """

    stage: str | None = None
    step: int | None = None
    rank: int | None = None
    name: str | None = None
    element: tuple[int, ...] | None = None


class Divergence(AssertionError):
    """The sharded run parts from what it is compared with; all ranks raise it together.

    Because all ranks agree, their world is still in step and can run the next case.
    """

    def __init__(self, text: str, place: Place) -> None:
        super().__init__(text)
        self.place = place
