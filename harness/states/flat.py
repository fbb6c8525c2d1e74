"""Flat parameters of FSDP1: the parameters that each is made of, in a training and in files of each rank's part.

A file has the flat parameter alone ("LOCAL_STATE_DICT"), and the optimizer's own state the rank's part of it, by the
number of the flat parameter. Only a state of the training says which parameters these are.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from shardproof.door import BadFile
from shardproof.harness.states import blocks, maps
from shardproof.harness.states.sides import Entry, EntryKey, Holding, State
from shardproof.harness.states.snapshot import MODEL, OPTIMIZER
from shardproof.harness.tensors.fingerprints import Box

#: What :mod:`ranks` puts behind names of entries that are not alike in all files.
_OF_FILE = re.compile(r" \([^()]*\)$")


class _Place(NamedTuple):
    """Where a parameter is in a flat one."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def unflattened(state: State, to: State) -> State:
    """Return a state in which flat parameters are the parameters of another state that they are made of."""
    units = _units(to)
    names = _names(state)
    before = maps.beginning(names, units.__contains__)
    flat = {one.removeprefix(before) for one in names} & units.keys()
    inside = {place.name for unit in flat for place in units[unit]}
    has_originals = any(_original(one, before) in inside for one in names)
    numbers = {} if has_originals else _numbers(state, units, to, is_flat=bool(flat))
    if state.is_live or not (flat or numbers):
        return state
    changed = dataclasses.replace(state, entries={})
    for key, entry in state.entries.items():
        own = key.name.removeprefix(before) if key.section == MODEL else key.name
        unit = {MODEL: own, OPTIMIZER: numbers.get(own, "")}.get(key.section, "")
        if unit in units:
            changed.entries |= dict(_cut(key, entry, _laid_out(key, entry, units[unit])))
        elif key.section != MODEL or _original(own) not in inside:
            # A rank's part of a parameter is a view of the flat one, and is there twice.
            changed.entries[key._replace(name=own)] = entry
    return changed


def _original(name: str, before: str = "") -> str:
    return _OF_FILE.sub("", name.removeprefix(before))


def _numbers(state: State, units: Mapping[str, Sequence[_Place]], to: State, *, is_flat: bool) -> Mapping[str, str]:
    """Return the flat parameters whose numbers an optimizer has, in the order of the model; none of original ones.

    Of one rank, or without shards, a file has the parameters of the model, and its optimizer may have flat ones.
    """
    numbers = {str(number): unit for number, unit in enumerate(_ordered(units, to))}
    return numbers if is_flat or _are_flat(state, numbers, units) else {}


def _are_flat(state: State, numbers: Mapping[str, str], units: Mapping[str, Sequence[_Place]]) -> bool:
    """Whether an optimizer's states, which have numbers, are of flat parameters: each has the size of its own."""
    found = {
        key: entry
        for key, entry in state.entries.items()
        if key.section == OPTIMIZER and key.name.isdigit() and entry.is_tensor and entry.shape
    }
    try:
        for key, entry in found.items():
            if len(entry.shape) != 1 or key.name not in numbers:
                return False
            _laid_out(key, entry, units[numbers[key.name]])
    except BadFile:
        return False
    return bool(found)


#: Bytes to which FSDP1 aligns each parameter in a flat one, if the original ones are the optimizer's.
_ALIGNED = 16


def _laid_out(key: EntryKey, entry: Entry, places: Sequence[_Place]) -> Sequence[_Place]:
    """Return the places in a flat tensor of a file, which may have other padding than the training's.

    Raises:
        BadFile: it has another size than these parameters take in any way.
    """
    if not entry.is_tensor or entry.shape == ():
        return places
    shard = entry.held[0].box.numel if entry.held else entry.numel
    size = entry.numel if entry.held and entry.held[0].box.dims else entry.numel * len(entry.held)
    ranks = -(-size // max(1, shard))
    itemsize = getattr(torch, entry.dtype).itemsize
    for found in (places, _packed(places, 1), _packed(places, max(1, _ALIGNED // itemsize))):
        if 0 <= size - max(place.stop for place in found) < ranks:
            return found
    raise BadFile(
        f"{key}: flat, with {size} elements of {ranks} rank{'s' * (ranks > 1)}, and {places[0].name} and the others in "
        f"it have {max(place.stop for place in places)}: the file of a rank may be missing"
    )


def _packed(places: Sequence[_Place], aligned: int) -> list[_Place]:
    found, at = list[_Place](), 0
    for place in sorted(places, key=lambda one: one.start):
        found.append(place._replace(start=-(-at // aligned) * aligned))
        at = found[-1].stop
    return found


def _cut(key: EntryKey, entry: Entry, places: Sequence[_Place]) -> Iterator[tuple[EntryKey, Entry]]:
    """Yield the parameters, or their states, that a flat one has."""
    for place in places:
        new = key._replace(name=place.name)
        if not entry.is_tensor or entry.shape == ():
            yield new, dataclasses.replace(entry, key=new)
            continue
        held = [part for number, one in enumerate(entry.held) for part in _held(one, number, place)]
        load = functools.partial(_load, entry, place)
        yield new, dataclasses.replace(entry, key=new, shape=place.shape, held=held, load=load, tied="")


def _names(state: State) -> list[str]:
    return [key.name for key in state.entries if key.section == MODEL]


def _units(to: State) -> dict[str, list[_Place]]:
    """Return the parameters of each unit of a training."""
    units: dict[str, list[_Place]] = {}
    for key, entry in to.entries.items():
        if key.section == MODEL and entry.unit and not entry.tied:
            units.setdefault(entry.unit, []).append(_Place(key.name, entry.offset, entry.shape))
    return units


def _ordered(units: Collection[str], to: State) -> list[str]:
    """Return the units in the order in which an optimizer has them."""
    first: dict[str, int] = {}
    for entry in to.entries.values():
        if entry.unit in units and entry.position is not None:
            first[entry.unit] = min(entry.position, first.get(entry.unit, entry.position))
    return sorted(first, key=first.__getitem__)


def _range(one: Holding, number: int) -> tuple[int, int]:
    """Return which elements of a flat tensor a part has: of an optimizer's own state, the part of its rank."""
    spans = one.box.dims[0] if one.box.dims else ((0, one.box.numel),)
    start = spans[0][0] if spans else 0
    return (start, start + one.box.numel) if one.box.dims else (number * one.box.numel, (number + 1) * one.box.numel)


def _held(one: Holding, number: int, place: _Place) -> Iterator[Holding]:
    begin, end = _range(one, number)
    first, last = max(begin, place.start), min(end, place.stop)
    if first >= last or one.load is None:
        return
    part = one.load().reshape(-1)[first - begin : last - begin]
    is_full = (first, last) == (place.start, place.stop)
    box = Box(place.shape) if is_full else Box(place.shape, flat=(first - place.start, last - place.start))
    (its,) = blocks.sums([part.reshape(place.shape) if is_full else part], [box])
    yield Holding(one.source, box, its)


def _load(entry: Entry, place: _Place) -> torch.Tensor:
    found = torch.zeros(math.prod(place.shape), dtype=getattr(torch, entry.dtype))
    for number, one in enumerate(entry.held):
        begin, end = _range(one, number)
        first, last = max(begin, place.start), min(end, place.stop)
        if first < last and one.load is not None:
            found[first - place.start : last - place.start] = one.load().reshape(-1)[first - begin : last - begin]
    return found.view(place.shape)
