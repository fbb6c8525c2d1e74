"""What the documentation of an implementation excludes, for cases that see it refused."""

from __future__ import annotations

from typing import ClassVar


class Misuses:
    """What an adapter implements that declares what the names of INIT-5 need."""

    name: ClassVar[str]

    def misuse(self, what: str) -> None:
        """Make another model, of two layers, and shard, use or save it in a way that is to be refused (collective).

        Args:
            what: one of the names in ``suites/test_init.py``, which needs :attr:`Capability.FLAT_PARAMETERS` and
                :attr:`Capability.WHOLE_PARAMETERS`, or :attr:`Capability.DTENSOR_PARAMETERS` and
                :attr:`Capability.UNIT_SETTINGS`.
        """
        raise AssertionError(f"{self.name} knows no misuse {what!r}")
