"""A census of the memory in which units are gathered, taken while a step runs, and poison for memory that is freed.

Hooks of the harness note the storages of the parameters with which a module computes, by weak references, so that the
census keeps nothing alive. What a storage holds later is read from it: an implementation that frees a unit either drops
the storage or resizes it to nothing. This works on every device, also for memory that only C++ references.
"""

import dataclasses
import functools
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardproof.harness.collectives.recorder import Recorder
from shardproof.harness.collectives.trace import Collective, Trace, first_difference
from shardproof.harness.collectives.units import ROOT
from shardproof.harness.parity.coverage import state_numel
from shardproof.harness.parity.run import Run
from shardproof.harness.simulation.memory import Kind
from shardproof.harness.tensors import memory, private
from shardproof.harness.tensors.devices import occupy
from shardproof.harness.tensors.trees import tensors_of

__all__ = [
    "ROOT",
    "Census",
    "Collective",
    "Kind",
    "Moment",
    "Recorder",
    "Trace",
    "bytes_of",
    "first_difference",
    "memory",
    "occupy",
    "private",
    "state_numel",
]


@dataclasses.dataclass(frozen=True)
class Moment:
    """What was gathered when a unit began to compute.

    Attributes:
        phase: "forward" or "backward".
        unit: its label.
        held: the bytes in which each unit is gathered, by label; units without are absent.
    """

    phase: str
    unit: str
    held: dict[str, int]


class Census:
    """Notes the gathered parameters of a run's units, and counts their bytes at every unit's beginning.

    The run's model is sharded and has not computed yet. ``moments`` gets an entry whenever a unit begins its forward or
    its backward.
    """

    def __init__(self, run: Run) -> None:
        self.moments: list[Moment] = []
        self._storages: dict[str, dict[int, StorageWeakRef]] = {unit.label: {} for unit in run.units}
        self._computing = ""
        for unit in run.units:
            owners: dict[str, list[str]] = {}
            for name in unit.names:
                module, _, parameter = name.rpartition(".")
                owners.setdefault(module, []).append(parameter)
            for module, names in owners.items():
                note = functools.partial(self._begin, unit.label, names)
                run.original_module(module).register_forward_pre_hook(note)
                run.original_module(module).register_forward_hook(functools.partial(self._watch_backward, unit.label))

    def held(self) -> dict[str, int]:
        """Return the bytes in which each unit is gathered now, by label; units without are absent."""
        counted = {label: sum(map(bytes_of, refs.values())) for label, refs in self._storages.items()}
        return {label: nbytes for label, nbytes in counted.items() if nbytes}

    def addresses(self) -> dict[str, list[int]]:
        """Return where the bytes of each unit are that is gathered now, by label."""
        held = self.held()
        storages = {label: map(_storage_of, refs.values()) for label, refs in self._storages.items() if label in held}
        return {label: [one.data_ptr() for one in found if one] for label, found in storages.items()}

    def _begin(self, label: str, names: list[str], module: nn.Module, args: Any) -> None:
        if self._computing != label:
            self.moments.append(Moment("forward", label, self.held()))
        self._computing = label
        for name in names:
            # An implementation may register a plain tensor instead of a parameter, in either of two places. It may
            # also make the name a property that gathers, which is not read: that would be a gather of ours.
            found = vars(module).get(name, dict(module.named_parameters(recurse=False)).get(name))
            if isinstance(found, torch.Tensor) and not isinstance(found, DTensor):
                reference = StorageWeakRef(found.untyped_storage())
                self._storages[label][reference.cdata] = reference

    def _watch_backward(self, label: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._begin_backward, label))

    def _begin_backward(self, label: str, gradient: torch.Tensor) -> None:
        self._computing = ""
        last = self.moments[-1] if self.moments else None
        if last is None or (last.phase, last.unit) != ("backward", label):
            self.moments.append(Moment("backward", label, self.held()))


def bytes_of(reference: StorageWeakRef) -> int:
    """The bytes that a storage holds now, 0 if it is gone."""
    storage = _storage_of(reference)
    return 0 if storage is None else storage.nbytes()


def _storage_of(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    return cast(torch.UntypedStorage | None, private.need("torch.UntypedStorage._new_with_weak_ptr")(reference.cdata))
