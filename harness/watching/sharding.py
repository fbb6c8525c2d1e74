"""Reads full parameters on each rank before ``fully_shard()`` shards them, which sends no rank's values to others.

And what shards are when training begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from shardproof.harness.tensors import private
from shardproof.harness.tensors.fingerprints import bits_of_all, bits_on_host, host_rows
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching import calls
from shardproof.harness.watching.names import parameters_of
from shardproof.harness.watching.records import Bits
from shardproof.harness.watching.samples import some_of

_PATH = "torch.distributed.fsdp.fully_shard"

#: DTensor asks it before it draws random numbers.
_IS_SUPPORTED = "torch.distributed.tensor._dispatch.is_rng_supported_mesh"

#: Those of parameters whose elements can be compared.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A parameter as a rank had it in full before it was sharded, by a sample of its elements.

    Attributes:
        bits: those of the sample.
        count: how many elements are in the sample.
        is_constant: whether they have one value.
        writes: how often torch has seen the parameter written in place.
        is_kept: whether the rank's shard has the same bits when training begins; None for a shard without elements.
    """

    bits: Bits
    count: int
    is_constant: bool
    writes: int
    is_kept: bool | None


class _Full(NamedTuple):
    """A full parameter before the call, on its device.

    Attributes:
        owner, last: the module that has it, and under which name.
        sample: some of its elements: their bits, the least of them and the largest.
    """

    owner: nn.Module
    last: str
    bits: torch.Tensor
    ends: torch.Tensor
    size: int
    writes: int


class Shardings:
    """Notes the parameters that calls of ``fully_shard()`` shard; :meth:`close` ends it.

    Attributes:
        draws_alike: whether torch may have drawn random numbers of DTensors on a mesh on which each rank draws them by
            its own generator, as on CPUs.
    """

    def __init__(self) -> None:
        #: By the id of a sharded parameter, what it was, and the bits of the sample of the rank's shard.
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], _Full, torch.Tensor | None]] = {}
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(calls.replaced(_PATH, self._around(fsdp.fully_shard)))
        is_supported = private.find(_IS_SUPPORTED)
        self.draws_alike = is_supported is None
        if is_supported is not None:
            self._patches.enter_context(calls.replaced(_IS_SUPPORTED, self._before_draw(is_supported)))

    def close(self) -> None:
        """Note no more, and forget what was noted."""
        self._patches.close()
        self._seen.clear()

    def of(self, roots: Sequence[nn.Module]) -> Mapping[str, Sharding]:
        """Return what is known of the parameters of these roots, by canonical name."""
        held = {name: one for root in roots for name, one in parameters_of(root)}
        known = {name: self._seen[id(one)] for name, one in held.items() if id(one) in self._seen}
        known = {name: one for name, one in known.items() if one[0]() is held[name]}
        before = bits_on_host({name: full.bits for name, (_, full, _) in known.items()})
        ends = {name: bool(full.ends[0] == full.ends[1]) for name, (_, full, _) in known.items()}
        was = bits_on_host({name: shard for name, (*_, shard) in known.items() if shard is not None})
        now = bits_on_host({name: bits for name in was if (bits := _bits_of(held[name])) is not None})
        return {
            name: Sharding(
                before[name], full.size, ends[name], full.writes, now.get(name) == was[name] if name in was else None
            )
            for name, (_, full, _) in known.items()
        }

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
            found: list[_Full] = []
            with contextlib.suppress(Exception):  # an error of ours is no error of user code
                found += _full_in([module] if isinstance(module, nn.Module) else list(module))
            result = function(module, *args, **kwargs)
            with contextlib.suppress(Exception):
                self._note(found)
            return result

        return fully_shard

    def _before_draw(self, function: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(function)
        def is_rng_supported_mesh(*args: Any, **kwargs: Any) -> bool:
            is_supported = function(*args, **kwargs)
            self.draws_alike = self.draws_alike or not is_supported
            return is_supported

        return is_rng_supported_mesh

    def _note(self, found: Sequence[_Full]) -> None:
        for full in found:
            now = full.owner._parameters.get(full.last)
            if isinstance(now, DTensor):
                self._seen[id(now)] = weakref.ref(now), full, _bits_of(now)


@torch.no_grad()
def varied_in(parameters: Sequence[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """Return the DTensors of whose local shard not all rows are equal, or not all elements of one row.

    By name, each with the device type of its mesh.
    """
    found, flags = dict[str, str](), []
    for name, one in parameters:
        local = local_of(one.detach())
        if isinstance(one, DTensor) and type(local) is torch.Tensor and local.dtype in _DTYPES and local.numel():
            rows = local.reshape(-1, 1) if local.ndim < 2 or len(local) == 1 else local
            found[name] = one.device_mesh.device_type
            flags.append((rows != rows[:1]).any())
    return {name: kind for (name, kind), is_varied in zip(found.items(), host_rows(flags), strict=True) if is_varied}


@torch.no_grad()
def _full_in(modules: Sequence[nn.Module]) -> Iterator[_Full]:
    """Yield the full parameters of modules that have values."""
    once: set[int] = set()
    for root in modules:
        for module in root.modules():
            for last, one in module._parameters.items():
                if one is None or id(one) in once or not _is_full(one) or (some := some_of(one)) is None:
                    continue
                once.add(id(one))
                yield _Full(
                    module, last, bits_of_all([some])[0], torch.stack(torch.aminmax(some)), some.numel(), one._version
                )


def _is_full(parameter: nn.Parameter) -> bool:
    is_plain = type(parameter.data) is torch.Tensor and not parameter.is_inference()
    return is_plain and parameter.device.type != "meta" and parameter.dtype in _DTYPES


@torch.no_grad()
def _bits_of(parameter: torch.Tensor) -> torch.Tensor | None:
    some = some_of(local_of(parameter))
    return None if some is None else bits_of_all([some])[0]
