"""Parameter axes that several chapters share."""

from __future__ import annotations

import pytest

from harness import Capability, needs

_CHOOSES = needs(Capability.RESHARD_AFTER_FORWARD)

#: What happens to gathered parameters after forward: freed, kept, or resharded to groups of two.
RESHARD = [
    pytest.param(True, marks=_CHOOSES),
    pytest.param(False, marks=_CHOOSES),
    pytest.param(2, marks=needs(Capability.RESHARD_TO_SIZE)),
]
