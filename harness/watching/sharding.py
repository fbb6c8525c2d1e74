"""Reads full parameters on each rank before FSDP2 or FSDP1 shards them, which sends no rank's values to others.

And what shards are when training begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from shardproof.harness.tensors import private
from shardproof.harness.tensors.fingerprints import bits_of_all, bits_on_host, host_rows
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching import calls
from shardproof.harness.watching.names import modules_of, parameters_of
from shardproof.harness.watching.records import Bits
from shardproof.harness.watching.samples import some_of

_PATH = "torch.distributed.fsdp.fully_shard"
_PATH_OF_FLAT = "torch.distributed.fsdp.FullyShardedDataParallel.__init__"

#: How findings name what has sharded a parameter.
FULLY_SHARD, FLAT = "fully_shard()", "FullyShardedDataParallel"

#: The number of writes of a parameter on the meta device, which has no values.
NO_VALUES = -1

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
        ranks: the global ranks that divide the flat parameter that it is in; empty for a DTensor, which has a mesh.
        by: what has sharded it.
    """

    bits: Bits
    count: int
    is_constant: bool
    writes: int
    is_kept: bool | None
    ranks: tuple[int, ...] = ()
    by: str = FULLY_SHARD


class _Full(NamedTuple):
    """A full parameter before the call, on its device.

    Attributes:
        owner, last: the module that has it, and under which name.
        bits, ends, size: of a sample of its elements: their bits, the least and the largest of them, and how many
            they are; zeros where it has no values.
    """

    owner: nn.Module
    last: str
    bits: torch.Tensor
    ends: torch.Tensor
    size: int
    writes: int


class _Seen(NamedTuple):
    """A parameter that was sharded.

    Attributes:
        held: what the module has of it since then, which may be a flat parameter.
        shard: the bits of a sample of what the rank holds; None where it holds no element.
        ranks: see :class:`Sharding`.
    """

    held: weakref.ref[torch.Tensor]
    full: _Full
    shard: torch.Tensor | None
    ranks: tuple[int, ...] = ()

    def sharding(self, bits: Bits, is_kept: bool | None) -> Sharding:
        """Return what is told of it."""
        full = self.full
        is_constant = full.size > 0 and bool(full.ends[0] == full.ends[1])
        by = FLAT if self.ranks else FULLY_SHARD
        return Sharding(bits, full.size, is_constant, full.writes, is_kept, self.ranks, by)


class Shardings:
    """Notes the parameters that FSDP2 and FSDP1 shard; :meth:`close` ends it.

    Attributes:
        draws_alike: whether torch may have drawn random numbers of DTensors on a mesh on which each rank draws them by
            its own generator, as on CPUs.
    """

    def __init__(self) -> None:
        #: By the id of the module that has it, and the name.
        self._seen: dict[tuple[int, str], _Seen] = {}
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(calls.replaced(_PATH, self._around(fsdp.fully_shard)))
        of_flat = self._around_flat(fsdp.FullyShardedDataParallel.__init__)
        self._patches.enter_context(calls.replaced(_PATH_OF_FLAT, of_flat))
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
        held = {id(one) for root in roots for _, one in parameters_of(root)}
        names = {id(module): name for root in roots for name, module in modules_of(root)}
        mine = {key: one for key, one in self._seen.items() if key[0] in names}
        known = {f"{names[owner]}.{last}".removeprefix("."): one for (owner, last), one in mine.items()}
        known = {name: one for name, one in known.items() if id(one.held()) in held}
        before = bits_on_host({name: one.full.bits for name, one in known.items()})
        are_kept = _are_kept(known)
        return {name: one.sharding(before[name], are_kept.get(name)) for name, one in known.items()}

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

    def _around_flat(self, function: Callable[..., None]) -> Callable[..., None]:
        arguments = inspect.signature(function)

        @functools.wraps(function)
        def __init__(self_: Any, *args: Any, **kwargs: Any) -> None:
            found: list[_Full] = []
            with contextlib.suppress(Exception):  # an error of ours is no error of user code
                given = arguments.bind(self_, *args, **kwargs).arguments
                if not given.get("sync_module_states", False):
                    found += _full_in([given["module"]], with_meta=True)
            function(self_, *args, **kwargs)
            with contextlib.suppress(Exception):
                self._note_flat(found, self_)

        return __init__

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
                self._seen[id(full.owner), full.last] = _Seen(weakref.ref(now), full, _bits_of(now))

    def _note_flat(self, found: Sequence[_Full], root: nn.Module) -> None:
        """Note those of full parameters that are in flat ones now, which units of FSDP1 divide among ranks."""
        by_place = {(id(one.owner), one.last): one for one in found}
        for unit in root.modules():
            handle: Any = getattr(unit, "_handle", None) if isinstance(unit, fsdp.FullyShardedDataParallel) else None
            if handle is None or not handle.uses_sharded_strategy:
                continue
            ranks = tuple(dist.get_process_group_ranks(unit.process_group))  # type: ignore[arg-type]
            for last, owner, _ in handle.flat_param._param_infos if len(ranks) > 1 else ():
                if (full := by_place.get((id(owner), last))) is not None:
                    held = owner._parameters.get(last)
                    held = handle.flat_param if held is None else held
                    self._seen[id(owner), last] = _Seen(weakref.ref(held), full, _bits_of(held), ranks)


def _are_kept(known: Mapping[str, _Seen]) -> dict[str, bool]:
    """Return whether shards with elements have the bits that they had."""
    was = bits_on_host({name: one.shard for name, one in known.items() if one.shard is not None})
    now = bits_on_host({name: bits for name in was if (bits := _bits_of(known[name].held())) is not None})
    return {name: now.get(name) == bits for name, bits in was.items()}


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
def _full_in(modules: Sequence[nn.Module], *, with_meta: bool = False) -> Iterator[_Full]:
    """Yield the full parameters of modules that have values, or all, outside of units of FSDP1."""
    once: set[int] = set()
    for module in _outside_of_flat(modules):
        for last, one in module._parameters.items():
            if one is None or id(one) in once:
                continue
            some = some_of(one) if _is_full(one) else None
            if some is not None:
                ends = torch.stack(torch.aminmax(some))
                full = _Full(module, last, bits_of_all([some])[0], ends, some.numel(), one._version)
            elif with_meta and one.device.type == "meta":
                nothing = torch.zeros(1, dtype=torch.int64)
                full = _Full(module, last, nothing, nothing, 0, NO_VALUES)
            else:
                continue
            once.add(id(one))
            yield full


def _outside_of_flat(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        if not isinstance(module, fsdp.FullyShardedDataParallel):
            yield module
            yield from _outside_of_flat([*module.children()])


def _is_full(parameter: nn.Parameter) -> bool:
    is_plain = type(parameter.data) is torch.Tensor and not parameter.is_inference()
    return is_plain and parameter.device.type != "meta" and parameter.dtype in _DTYPES


@torch.no_grad()
def _bits_of(parameter: torch.Tensor | None) -> torch.Tensor | None:
    some = some_of(local_of(parameter)) if parameter is not None else None
    return None if some is None else bits_of_all([some])[0]
