"""The implementations with the doctor attached: those that it must not accuse, and one for each edit.

A finding raises ``Unhealthy`` on every rank at the end of the step, or when the case ends, and so fails the case.
"""

import dataclasses
import datetime
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from planted import adapters
from shardproof.harness.adapters.base import Adapter
from shardproof.harness.adapters.reference import ReferenceAdapter, ReferenceFlatAdapter
from shardproof.harness.adapters.torch_fsdp import TorchFsdpAdapter
from shardproof.harness.adapters.torch_fully_shard import TorchFullyShardAdapter
from shardproof.harness.judging import codes
from shardproof.harness.training import doctor, ranks
from shardproof.harness.training.exchange import Exchange

#: Seconds that a rank waits for the others at the end of a step.
_PATIENCE = 20.0

#: All but that of copies: the samples of them that are held are more than a rank's share of models as small as these.
_CHECKS = tuple(one for one in doctor.CHECKS if one != codes.FOLLOWERS)


@functools.cache
def _group() -> Any:
    """The group on which the ranks of this process's world exchange what they have seen; made once."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=_PATIENCE))


class _Unseen(Exchange):
    """Exchanges on one group for all cases, and below what a Recorder and an Announcer of the harness see."""

    def __init__(self, *, patience: float) -> None:
        self.rank, self.size, self._patience = dist.get_rank(), dist.get_world_size(), patience
        self._group = _group()

    def _meet(self, patience: float) -> None:
        """Leave it to the first gather to wait."""

    def _gather(self, parts: list[torch.Tensor], mine: torch.Tensor) -> None:
        self._group._get_backend(torch.device("cpu")).allgather([parts], [mine]).wait()

    def close(self) -> None:
        """Keep the group for the next case."""


class _Strict(doctor.Doctor):
    """Raises errors of its own, which would else end the watching only."""

    def _on_error(self, error: Exception) -> None:
        self._detach()
        raise error


class Watched(Adapter):
    """Attaches a doctor to what an adapter has sharded, until the case ends; mixed into an adapter."""

    _doctor: doctor.Doctor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Without steps there is nothing that a doctor judges. Stages of a pipeline give one name to several parameters,
        # and a doctor goes by names.
        if self.optimizer is None or self.config.mesh.size() < dist.get_world_size():
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranks, "Exchange", _Unseen)
            self._doctor = _Strict(
                self.module, self.optimizer, mesh=None, groups=None, data=doctor.DATA, steps=range(1000),
                checks=_CHECKS, ties=(), layout=None, on_finding="raise", report=None, patience=_PATIENCE,
            ).__enter__()  # fmt: skip

    def teardown(self) -> None:
        try:
            if self._doctor is not None:
                self._doctor.close()
        finally:
            super().teardown()


def _watched(base: type[Adapter], name: str) -> type[Adapter]:
    groups = "kept" if base.traits.process_groups == "none" else base.traits.process_groups
    traits = dataclasses.replace(base.traits, process_groups=groups)
    return type(name, (Watched, base), {"name": f"watched.{base.name}", "traits": traits, "__module__": __name__})


Reference = _watched(ReferenceAdapter, "Reference")
ReferenceFlat = _watched(ReferenceFlatAdapter, "ReferenceFlat")
TorchFullyShard = _watched(TorchFullyShardAdapter, "TorchFullyShard")
TorchFsdp = _watched(TorchFsdpAdapter, "TorchFsdp")

#: Those that have no bug.
SOUND = (Reference, ReferenceFlat, TorchFullyShard, TorchFsdp)


def __getattr__(name: str) -> type[Adapter]:
    """The watched adapter of an edit, or of an adapter with a bug, of its name in ``planted.adapters``."""
    made = _watched(getattr(adapters, name), name)
    globals()[name] = made
    return made
