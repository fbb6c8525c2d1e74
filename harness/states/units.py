"""Units of FSDP1 in a training: which parameters a flat one has, and which part of them is this rank's."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.watching.names import modules_of

FLAT = "_flat_param"
"""The last word of the name of a flat parameter."""

#: Words that wrappers put into names.
_OF_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class Original(NamedTuple):
    """A parameter in a flat one.

    Attributes:
        name: of the parameter.
        unit: the name of the flat one.
        start: where it begins there.
        shape: its own.
        tied: the earlier name, if it is one parameter under a second name.
    """

    name: str
    unit: str
    start: int
    shape: torch.Size
    tied: str = ""

    def part(self, tensor: torch.Tensor, begin: int) -> tuple[torch.Tensor, Box]:
        """Return what a rank has of it in its part of the flat tensor, which begins at a place, and the box."""
        stop = self.start + self.shape.numel()
        first, last = max(self.start, begin), min(stop, begin + tensor.numel())
        part = tensor.reshape(-1)[first - begin : max(first, last) - begin]
        if (first, last) == (self.start, stop):
            return part.view(self.shape), Box(tuple(self.shape))
        where = (first - self.start, last - self.start) if first < last else (0, 0)
        return part, Box(tuple(self.shape), flat=where)


class Unit(NamedTuple):
    """A unit of FSDP1.

    Attributes:
        flat: its flat parameter.
        originals: what it has, in order.
        begin: where the rank's part begins.
    """

    flat: Any
    originals: tuple[Original, ...]
    begin: int


def units_of(models: Sequence[nn.Module]) -> Iterator[Unit]:
    """Yield the units of models."""
    for model in models:
        for name, module in modules_of(model):
            flat = getattr(getattr(module, "_handle", None), "flat_param", None)
            if flat is not None and hasattr(flat, "_fqns"):
                yield _unit(f"{name}." if name else "", module._handle, flat)


def _unit(before: str, handle: Any, flat: Any) -> Unit:
    unit, place = f"{before}{FLAT}", 0
    starts = []
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        starts += [] if is_padding else [place]
        place += numel
    names = [before + _cleaned(one) for one in flat._fqns]
    found = [Original(*one) for one in zip(names, [unit] * len(names), starts, flat._shapes, strict=True)]
    for one in flat._shared_param_infos or ():
        own = _joined(before, one.module_name, one.param_name)
        first = _joined(before, one.prim_module_name, one.prim_param_name)
        found += [each._replace(name=own, tied=first) for each in found if each.name == first][:1]
    shards = getattr(handle, "uses_sharded_strategy", True)
    return Unit(flat, tuple(found), handle.rank * flat._sharded_size.numel() if shards else 0)


def _joined(before: str, module: str, parameter: str) -> str:
    return before + _cleaned(f"{module}.{parameter}" if module else parameter)


def _cleaned(name: str) -> str:
    for word in _OF_WRAPPERS:
        name = name.replace(word, "")
    return name


def places(units: Sequence[Unit]) -> Mapping[str, Original]:
    """Return the originals by their names."""
    return {original.name: original for unit in units for original in unit.originals}
