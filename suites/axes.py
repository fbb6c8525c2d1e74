"""Parameter axes that several chapters share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from harness import Capability, needs

_CHOOSES = needs(Capability.RESHARD_AFTER_FORWARD)

#: What happens to gathered parameters after forward: freed, kept, or resharded to groups of two.
RESHARD = [
    pytest.param(True, marks=_CHOOSES),
    pytest.param(False, marks=_CHOOSES),
    pytest.param(2, marks=needs(Capability.RESHARD_TO_SIZE)),
]

#: The same on more than four ranks, where groups of four are parts as well.
RESHARD_TO_PARTS = [*RESHARD, pytest.param(4, marks=needs(Capability.RESHARD_TO_SIZE))]

#: The same where it is seen whether the root's own unit is freed.
RESHARD_ROOT = [
    pytest.param(True, marks=needs(Capability.RESHARD_AFTER_FORWARD, Capability.ROOT_RESHARD)),
    RESHARD[1],
    pytest.param(2, marks=needs(Capability.RESHARD_TO_SIZE, Capability.ROOT_RESHARD)),
]

#: The same where sizes do not divide and what is shown after forward is looked at.
RESHARD_UNEVEN = [
    *RESHARD[:2],
    pytest.param(2, marks=needs(Capability.RESHARD_TO_SIZE, Capability.RESHARD_TO_SIZE_UNEVEN)),
]


def with_first(value: Any, axis: Sequence[Any]) -> list[Any]:
    """The axis with another parameter's ``value`` before each of its own, marks kept."""
    return [pytest.param(value, *item.values, marks=item.marks) for item in axis]
