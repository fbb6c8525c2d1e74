"""What a script asks an implementation, for cases that compare the answers."""

from __future__ import annotations

from typing import Any, ClassVar


class Calls:
    """What an adapter implements that declares what the names of CALLS need."""

    name: ClassVar[str]

    def call(self, what: str) -> Any:
        """Make another model, of a few layers, and ask its wrapper something, or do something with it (collective).

        Args:
            what: one of the names in ``suites/test_calls.py``, which needs :attr:`Capability.FLAT_PARAMETERS` and
                :attr:`Capability.WHOLE_PARAMETERS`.

        Returns:
            The answer, as numbers, texts, bools and lists of them.
        """
        raise AssertionError(f"{self.name} knows no call {what!r}")
