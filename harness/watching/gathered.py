"""Parameters of FSDP2's units that stay gathered after the optimizer's step, and forwards that compute with them.

Such a forward computes with the values of before the step, unless its unit gathers anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.harness.tensors.fingerprints import bits_of_all, host_rows
from shardproof.harness.tensors.layouts import layout_of
from shardproof.harness.tensors.trees import local_of


class Gathered:
    """What modules have in place of parameters for a time, from step to step.

    Attributes:
        names: the parameters that were still gathered when the optimizer had stepped.
    """

    def __init__(self) -> None:
        self._found: dict[str, weakref.ref[torch.Tensor]] = {}
        self._kept: dict[str, tuple[weakref.ref[torch.Tensor], weakref.ref[nn.Parameter]]] = {}
        self._read: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.names: list[str] = []

    def clear(self) -> None:
        """Forget all."""
        for seen in (self._found, self._kept, self._read, self.names):
            seen.clear()

    def find(self, name: str, value: torch.Tensor) -> None:
        """Note what a module finds under the name of a parameter when its forward begins, after its unit gathers."""
        self._found[name] = weakref.ref(value)
        kept, live = (ref() for ref in self._kept.pop(name, (lambda: None, lambda: None)))
        if kept is not value or live is None or (part := _part(value, live)) is None:
            return
        own = local_of(live.detach())
        bits = bits_of_all([part, own.to(part.dtype)])
        if own.numel():
            self._read.append((name, bits[0], bits[1]))

    def end(self, live: Mapping[str, nn.Parameter]) -> None:
        """Note which are still gathered when the optimizer has stepped; ``live`` are what it steps."""
        found = {name: (value, live.get(name)) for name, ref in self._found.items() if (value := ref()) is not None}
        left = {name: one for name, one in found.items() if _is_gathered(*one)}
        self.names = list(left)
        self._kept = {
            name: (weakref.ref(value), weakref.ref(own)) for name, (value, own) in left.items() if own is not None
        }

    def take_outdated(self) -> list[str]:
        """Return the parameters of which forwards found other values than the shards have, since the last call."""
        read, self._read = self._read, []
        rows = host_rows([bits for _, *both in read for bits in both])
        return [name for (name, *_), one, other in zip(read, rows[::2], rows[1::2], strict=True) if one != other]


def _is_gathered(value: torch.Tensor, live: torch.Tensor | None) -> bool:
    """Whether a tensor that a module found is still allocated, and is not the parameter that the model has now."""
    if live is None or live is value or isinstance(value, DTensor):
        return False
    held, own = value.untyped_storage(), local_of(live).untyped_storage()
    return held.size() > 0 and held.data_ptr() != own.data_ptr()


def _part(value: torch.Tensor, live: torch.Tensor) -> torch.Tensor | None:
    """Return what a gathered parameter has of the elements of this rank's shard; None where they cannot be compared.

    As where the shard's class says what is gathered in its place, such as one that quantizes.
    """
    layout = layout_of(live) if isinstance(live, DTensor) else None
    if layout is None or layout.box.dims is None or tuple(value.shape) != layout.box.shape:
        return None
    if type(local_of(live.detach())) is not torch.Tensor or not value.is_floating_point():
        return None
    if any(len(spans) != 1 for spans in layout.box.dims):
        return None
    return value.detach()[tuple(slice(*spans[0]) for spans in layout.box.dims)]
