"""Checkpoints of an implementation's own, by its own calls and in its own files."""

from __future__ import annotations

import pathlib
from typing import ClassVar

import torch

from shardproof.harness.adapters.capability import Capability


class OwnCheckpoints:
    """What an adapter with :attr:`Capability.OWN_CHECKPOINT` implements."""

    name: ClassVar[str]

    def save_own(self, directory: pathlib.Path) -> None:
        """Write model and optimizer into a directory (collective). Needs :attr:`Capability.OWN_CHECKPOINT`."""
        raise AssertionError(f"{self.name} does not declare {Capability.OWN_CHECKPOINT!r}")

    def load_own(self, directory: pathlib.Path) -> None:
        """Load what :meth:`save_own` wrote (collective). Needs :attr:`Capability.OWN_CHECKPOINT`."""
        raise AssertionError(f"{self.name} does not declare {Capability.OWN_CHECKPOINT!r}")

    def consolidated(self, directory: pathlib.Path) -> dict[str, torch.Tensor]:
        """Return the whole weights in what :meth:`save_own` wrote, as a script outside of the job reads them.

        Called on every rank, which reads the files alone: not collective. Needs :attr:`Capability.OWN_CHECKPOINT`.

        Returns:
            The weights on the CPU, by names of the original model.
        """
        raise AssertionError(f"{self.name} does not declare {Capability.OWN_CHECKPOINT!r}")
