"""State dicts of optimizers by the calls that an implementation had before, and by numbers in place of names."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.config import KeyKind, StateForm


class OlderStates:
    """What an adapter with :attr:`Capability.OPTIMIZER_KEYS` implements."""

    name: ClassVar[str]

    def older_checkpoint(self, *, form: StateForm) -> dict[str, Any]:
        """Return the optimizer's state dict by older calls (collective). Needs :attr:`Capability.OPTIMIZER_KEYS`."""
        raise AssertionError(f"{self.name} does not declare {Capability.OPTIMIZER_KEYS!r}")

    def older_restore(self, state: dict[str, Any], *, form: StateForm) -> None:
        """Load what :meth:`older_checkpoint` returned (collective). Needs :attr:`Capability.OPTIMIZER_KEYS`."""
        raise AssertionError(f"{self.name} does not declare {Capability.OPTIMIZER_KEYS!r}")

    def rekeyed(self, state: dict[str, Any], *, by: KeyKind, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        """Return a full state dict of an optimizer with the other kind of keys.

        Needs :attr:`Capability.OPTIMIZER_KEYS`.

        Args:
            state: by names, or by numbers.
            by: the kind of keys to return.
            model: the unsharded model.
            optimizer: an optimizer of its parameters.
        """
        raise AssertionError(f"{self.name} does not declare {Capability.OPTIMIZER_KEYS!r}")
