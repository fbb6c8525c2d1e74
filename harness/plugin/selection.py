"""What the checked options of a run select."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardproof import contract as contracts
from shardproof.harness.adapters import registry
from shardproof.harness.adapters.capability import Hardware
from shardproof.harness.judging.texts import rank_count
from shardproof.harness.plugin.options import OPTIONS, Asked, Options, there_are
from shardproof.harness.worlds.torchrun.meeting import JobProcess

if TYPE_CHECKING:
    from shardproof.harness.adapters.base import Adapter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection(Options):
    """The checked options of a run, and what follows from them.

    Attributes:
        implementations: the adapters under test, by name.
        device_count: the number of the accelerator's devices, in a torchrun job those of all its ranks. It limits
            worlds on them only, because ranks on the CPU share cores.
        job_size: the number of ranks that torchrun started; None without torchrun.
        not_imported: why an implementation does not import, by name: it uses a name that the installed torch lacks. A
            class without capabilities takes its adapter's place, and its cases are unmet.
    """

    implementations: dict[str, type[Adapter]]
    device_count: int
    job_size: int | None
    not_imported: Mapping[str, str]

    @property
    def asked(self) -> str:
        """What says which of the selected cases run, as the header names it."""
        return f"profile: {','.join(self.profile)}" if self.profile else f"effort: {self.effort}"

    @functools.cached_property
    def capabilities(self) -> Mapping[str, frozenset[str]]:
        """The capabilities that each adapter declares, by name: every collected case compares them with its needs."""
        return {name: adapter.capabilities() for name, adapter in self.implementations.items()}

    @property
    def hardware_class(self) -> str:
        """The hardware class of the run's ranks (``shardproof.contract.CLASSES``); empty if it is of none."""
        return contracts.class_of(self.device, has_nccl=self.backend == "nccl")

    @property
    def shares_gpus(self) -> bool:
        """Whether several ranks may use one GPU; their process groups then have gloo, because NCCL refuses it."""
        return self.device != "cpu" and self.ranks_per_gpu > 1

    @property
    def backend(self) -> str:
        """The backend of the ranks' process groups."""
        from torch.distributed import get_default_backend_for_device  # late: it imports torch

        return get_default_backend_for_device("cpu" if self.shares_gpus else self.device)

    @property
    def hardware(self) -> frozenset[Hardware]:
        """What the host has for the run's ranks."""
        if self.device == "cpu":
            return frozenset()
        from shardproof.harness.tensors import devices  # late: it imports torch

        if not devices.occupies(self.device):
            return frozenset({Hardware.ACCELERATOR})
        # gloo makes the host wait for each collective, so what should wait for one on another stream need not.
        return frozenset(Hardware) - ({Hardware.STREAMS} if self.shares_gpus else set())

    def allows(self, size: int) -> bool:
        """Return whether ``--world`` selects cases on worlds of this size."""
        return self.world is None or size in self.world

    def lacking_for(self, size: int) -> str:
        """Return what a world of this size lacks, or "": ranks of the torchrun job, or devices."""
        if self.job_size is not None and size > self.job_size:
            return f"{rank_count(size)} (torchrun started {self.job_size})"
        if self.device != "cpu" and size > self.device_count * self.ranks_per_gpu:
            return f"{size} {self.device} devices ({there_are(self.device_count, self.ranks_per_gpu)})"
        return ""


def resolve(*, process: JobProcess | None = None, **given: Any) -> Selection:
    """Check the values of the command line, by the names of their options; one that is not given has its default.

    ``process`` is this process in a torchrun job, if it is the controller of one.

    Raises:
        ValueError: an implementation or the device is not available here, or a value is not valid. The message is one
            line.
    """
    assert given.keys() <= OPTIONS.keys(), "an option has a row"
    asked = Asked(given, process)
    checked = {name: asked[name] for name in OPTIONS}
    adapters, not_imported = _adapters(asked["impl"], asked["device"])
    return Selection(
        **checked,
        implementations=adapters,
        device_count=asked.device_count,
        job_size=None if process is None else process.size,
        not_imported=not_imported,
    )


def _adapters(names: Sequence[str], device: str) -> tuple[dict[str, type[Adapter]], dict[str, str]]:
    # Imported late, as registry imports the adapters: they import torch.
    from shardproof.harness.adapters import base, declarations

    adapters: dict[str, type[Adapter]] = {}
    not_imported = {}
    for name in names:
        try:
            adapters[name] = registry.load(name)
        except registry.NotImported as error:
            adapters[name], not_imported[name] = base.NoAdapter, str(error)  # type: ignore[type-abstract]
        else:
            if name not in registry.OWN_TRAINING:
                declarations.check(name, adapters[name], device)
    return adapters, not_imported
