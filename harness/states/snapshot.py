"""Writes what a rank has of a training's state to a file: a digest of each tensor, and each plain value.

A snapshot is a folder with a file for each rank, of JSON lines: what the rank is, a line for each entry, and one with
the digests. No full tensor is made, none is copied, and no collective is called, so a rank writes its file whatever the
others do.
"""

import base64
import functools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shardproof import folders
from shardproof.harness.states.blocks import MOST, Digester, numels_of
from shardproof.harness.states.units import Unit, places, units_of
from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.tensors.layouts import layout_of
from shardproof.harness.tensors.lines import Count, Name, Shape, Spanned
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching.groups import places_of_flat, shapes_of_flat
from shardproof.harness.watching.model import LayoutOf, Model
from shardproof.harness.watching.names import as_list, modules_of, name_of, parameters_of
from shardproof.harness.watching.optimizers import HOW
from shardproof.jsonfiles import described, encode, says

VERSION = 2

MODEL, OPTIMIZER, SCHEDULER, EXTRA = SECTIONS = ("model", "optimizer", "scheduler", "extra")
"""The parts of a state."""

UNCOMPARED = frozenset({"params", *HOW})
"""The entries of a group of an optimizer that a state leaves out."""


@described()
class RankLine:
    """The first line of a rank's file."""

    version: Annotated[int, ("const", VERSION)] = says("the version of the format")
    rank: Count = says("the rank")
    world: Annotated[int, ("minimum", 1)] = says("the number of ranks")
    torch: str = says("the version of torch")
    model: str = says("the class of the model")
    step: Count | None = says("the number of steps that were made before, if it is known", default=None)


@described()
class SumsLine:
    """The last line of a rank's file: the digests of the tensors of its entries, one after the other.

    Numbers are of 64 bits, little endian, in base64: as text they would take longer than the digests.
    """

    hashes: str = says("of each block of rows of which the rank has elements, the hash of these, which adds over ranks")
    squares: str = says("the sum of their squares, float64")
    sketches: str = says("the sketch of each tensor, float64")
    digits: Sequence[Count] = says(
        "of each tensor: of float32, 1 if an element has more digits than bfloat16 has, and 2 more than float16"
    )


@described()
class UnitLine:
    """The place of a parameter in a flat one of FSDP1."""

    name: Name = says("the name of the flat parameter")
    offset: Count = says("where the parameter begins there", default=0)


@described()
class StepperLine:
    """The place of a parameter in an optimizer."""

    group: Name = says("the class of the optimizer, and the number of its group")
    position: Count = says("its number in the optimizer")
    optimizer: Count = says("the number of the optimizer, of several", default=0)


@described()
class EntryLine:
    """A tensor or a value."""

    section: Name = says("model, optimizer, scheduler or extra")
    name: Name = says("the name of the parameter or buffer, of the group, or of the value")
    key: Name = says("the key of optimizer state, or of a group", default="")
    kind: Name = says("parameter, buffer, unsaved buffer, state or value")
    dtype: Name = says("the dtype of a tensor; empty of a value", default="")
    shape: Shape = says("the shape of the full tensor", default=())
    dims: Sequence[Spanned] | None = says(
        "the ranges of each dimension that the rank holds; null for all", default=None
    )
    flat: Sequence[int] | None = says("a range in the flattened tensor that it holds", default=None)
    trains: bool | None = says("whether a parameter requires gradients", default=None)
    stepper: StepperLine | None = says("of a parameter, its place in the optimizer that has it", default=None)
    tied: Name = says("the first name of the same parameter", default="")
    unit: UnitLine | None = says("of a parameter, its place in a flat one of FSDP1", default=None)
    value: str | None = says("a value, as JSON", default=None)


ViewsOf = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor | tuple[torch.Tensor, Box]] | None]
"""Returns the parameters of another state that a tensor is made of, as views of it, of a rank's part with its place in
the full one; None where it is one of them."""


class Found(NamedTuple):
    """An entry of a live training: the fields of its line, and what this rank holds of its tensor."""

    fields: Mapping[str, Any]
    tensor: torch.Tensor | None = None
    box: Box | None = None


def state(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    out: str | os.PathLike[str],
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    step: int | None = None,
    layout: LayoutOf | None = None,
    views: ViewsOf | None = None,
) -> None:
    """Write this rank's part of a training's state to a folder, for ``shardproof state``.

    Nothing is gathered and no other rank is waited for: what is written are digests of this rank's shards, some 22
    bytes for each of at most 64 blocks of rows of a tensor. Call it between two steps.

    Args:
        model: as the loop calls it; several for a pipeline's stages.
        optimizer: one or several, whose states and settings are written too.
        out: the folder, the same on all ranks.
        scheduler: whatever has a ``state_dict()``.
        extra: further values and tensors by name, nested as you like: a step counter, an EMA's state dict.
        step: the number of steps that were made.
        layout: tells which elements of a parameter a tensor holds, from its name and the tensor, where the tensor does
            not say so itself.
        views: returns, from the name of a parameter and the tensor, the parameters that it is made of in the other
            state, by their names there, as views: of a fused ``qkv_proj.weight`` the slices ``q_proj.weight``,
            ``k_proj.weight`` and ``v_proj.weight``. None for a parameter that is one in both. The tensor is full, or a
            rank's plain one, of which each view has its place; ``shardproof.views()`` makes such a function.

    Raises:
        ValueError: the folder has a state of this rank, or cannot be written; or a sharded tensor has views.
    """
    models = as_list(model)
    place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    write(
        models, as_list(optimizer), out=Path(out), place=place, step=step, scheduler=scheduler, extra=extra or {},
        layout=layout, views=views,
    )  # fmt: skip


def write(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    out: Path,
    place: tuple[int, int],
    step: int | None,
    scheduler: Any = None,
    extra: Mapping[str, Any] = MappingProxyType({}),
    layout: LayoutOf | None = None,
    views: ViewsOf | None = None,
    replaces: bool = False,
    only: Collection[int] | None = None,
) -> None:
    """Write the file of a rank, as :func:`state` does, of which the other arguments are.

    Args:
        place: the rank, and the number of ranks.
        replaces: whether the file of an earlier state is replaced.
        only: the ids of the parameters of which states of optimizers are written; None for all.

    Raises:
        ValueError: see :func:`state`.
    """
    rank, world = place
    path = out / f"rank{rank:05}.jsonl"
    if path.exists() and not replaces:
        raise ValueError(f"state: {path} exists: name a folder that has no state of this rank")
    head = RankLine(
        version=VERSION, rank=rank, world=world, torch=torch.__version__, model=type(models[0]).__name__, step=step
    )
    found = entries(models, optimizers, scheduler=scheduler, extra=extra, layout=layout, views=views, only=only)
    with torch.no_grad():
        text = "".join(json.dumps(encode(line)) + "\n" for line in _lines(head, found))
    folders.write_file(path, text)


def _lines(head: RankLine, found: Iterable[Found]) -> Iterator[RankLine | EntryLine | SumsLine]:
    """Yield the lines of a file; while lines of entries are made, devices make the digests, which are copied once."""
    yield head
    digester, boxes, mine = Digester(), list[Box](), list[Found]()
    for one in found:
        mine.append(one)
        if one.tensor is not None and one.box is not None:
            digester.add(one.tensor, one.box)
            boxes.append(one.box)
    digester.end()
    for one in mine:
        fields = dict(one.fields)
        if one.tensor is not None and one.box is not None:
            place = one.box
            fields |= {
                "dtype": name_of(one.tensor.dtype), "shape": place.shape, "dims": place.dims, "flat": place.flat,
            }  # fmt: skip
        yield EntryLine(**fields)
    held = torch.stack([_blocks_of(box) for box in boxes]) if boxes else torch.zeros(0, MOST, dtype=torch.bool)
    hashes, squares, sketches, digits = digester.tables()
    yield SumsLine(hashes=_text(hashes[held]), squares=_text(squares[held]), sketches=_text(sketches), digits=digits)


@functools.lru_cache(maxsize=4096)
def _blocks_of(box: Box) -> torch.Tensor:
    """Return of which blocks a part has elements, bool [MOST]."""
    found = torch.zeros(MOST, dtype=torch.bool)
    found[[*numels_of(box)]] = True
    return found


def _text(numbers: torch.Tensor) -> str:
    array = numbers.numpy()
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def entries(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], *, scheduler: Any,
    extra: Mapping[str, Any], layout: LayoutOf | None, views: ViewsOf | None = None,
    only: Collection[int] | None = None,
) -> Iterator[Found]:  # fmt: skip
    """Yield what this rank has of a training: parameters, buffers, optimizer states, settings, and other values."""
    watched = Model(layout)
    watched.roots.extend(models)
    watched.know(shapes_of_flat(models), places_of_flat(models))
    names: dict[int, str] = {}
    boxes: dict[int, Box] = {}
    steppers = _steppers(optimizers)
    flat = [*units_of(models)]
    units, inside = {id(one.flat): one for one in flat}, places(flat)
    for root in models:
        for name, parameter in parameters_of(root):
            if (unit := units.get(id(parameter))) is not None:
                yield from _of_flat(unit, parameter, steppers.get(id(parameter)))
                continue
            first = names.setdefault(id(parameter), name)
            place = watched.place(name, parameter)
            boxes[id(parameter)] = box = Box(tuple(parameter.shape)) if place is None else place.box
            fields = {
                "section": MODEL, "name": name, "kind": "parameter", "trains": parameter.requires_grad,
                "tied": first if first != name else "", "stepper": steppers.get(id(parameter)),
            }  # fmt: skip
            if (original := inside.get(name)) is not None:
                fields["unit"] = UnitLine(name=original.unit, offset=original.start)
            yield from [Found(fields)] if first != name else _viewed(fields, local_of(parameter), box, views)
        yield from _buffers(root)
    for number, one in enumerate(optimizers):
        before = f"group {number}:" if len(optimizers) > 1 else "group "
        yield from _of_optimizer(one, before, names, boxes, units, only)
    if scheduler is not None:
        yield from _tree(SCHEDULER, "", scheduler.state_dict())
    yield from _tree(EXTRA, "", extra)


def _steppers(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, StepperLine]:
    """Return which optimizer has a parameter, by its id."""
    found: dict[int, StepperLine] = {}
    for number, one in enumerate(optimizers):
        held = [(group, parameter) for group, its in enumerate(one.param_groups) for parameter in its["params"]]
        for position, (group, parameter) in enumerate(held):
            name = f"{type(one).__name__}, group {group}"
            found[id(parameter)] = StepperLine(group=name, position=position, optimizer=number)
    return found


def _viewed(fields: Mapping[str, Any], tensor: torch.Tensor, box: Box, views: ViewsOf | None) -> Iterator[Found]:
    """Yield a parameter, or the views of it that are parameters of another state."""
    its = views(fields["name"], tensor) if views is not None else None
    if not its:
        yield Found(fields, tensor, box)
        return
    if not box.is_full:
        raise ValueError(f"state: views of {fields['name']!r}, which is sharded: gather it, or leave views out")
    for name, view in its.items():
        part, place = view if isinstance(view, tuple) else (view, Box(tuple(view.shape)))
        yield Found({**fields, "name": name}, part, place)


def _of_flat(unit: Unit, parameter: nn.Parameter, stepper: StepperLine | None) -> Iterator[Found]:
    """Yield the parameters of which a flat one is made."""
    for one in unit.originals:
        fields = {
            "section": MODEL, "name": one.name, "kind": "parameter", "trains": parameter.requires_grad,
            "tied": one.tied, "unit": UnitLine(name=one.unit, offset=one.start), "stepper": stepper,
        }  # fmt: skip
        yield Found(fields) if one.tied else Found(fields, *one.part(local_of(parameter), unit.begin))


def _of_flat_state(unit: Unit, fields: Mapping[str, Any], value: torch.Tensor) -> Iterator[Found]:
    """Yield the states of an optimizer of the parameters of which a flat one is made."""
    for one in unit.originals if value.ndim else ():
        if not one.tied:
            yield Found({**fields, "name": one.name, "kind": "state"}, *one.part(local_of(value), unit.begin))
    for one in unit.originals if not value.ndim else ():
        if not one.tied:
            yield _tensor({**fields, "name": one.name}, value)


def _buffers(root: nn.Module) -> Iterator[Found]:
    for name, module in modules_of(root):
        for last, buffer in module._buffers.items():
            if buffer is not None:
                full = f"{name}.{last}" if name else last
                kind = "unsaved buffer" if last in module._non_persistent_buffers_set else "buffer"
                yield _tensor({"section": MODEL, "name": full, "kind": kind}, buffer)


def _of_optimizer(
    optimizer: torch.optim.Optimizer,
    before: str,
    names: Mapping[int, str],
    boxes: Mapping[int, Box],
    units: Mapping[int, Unit],
    only: Collection[int] | None = None,
) -> Iterator[Found]:
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in UNCOMPARED:
                yield from _tree(OPTIMIZER, f"{before}{number}", value, key)
        for position, parameter in enumerate(group["params"]):
            if only is not None and id(parameter) not in only:
                continue
            name = names.get(id(parameter), f"{position} of group {number}")
            state = optimizer.state.get(parameter)
            for key, value in state.items() if isinstance(state, Mapping) else ():
                fields = {"section": OPTIMIZER, "name": name, "key": str(key)}
                if not isinstance(value, torch.Tensor):
                    yield from _tree(OPTIMIZER, name, value, str(key))
                    continue
                if (unit := units.get(id(parameter))) is not None:
                    yield from _of_flat_state(unit, fields, value)
                    continue
                box = boxes.get(id(parameter))
                # A moment lies like its parameter; one of another size is a state of its own.
                alike = box is not None and value.ndim and local_of(value).numel() == local_of(parameter).numel()
                yield Found(fields | {"kind": "state"}, local_of(value), box) if alike else _tensor(fields, value)


def _tensor(fields: Mapping[str, Any], tensor: torch.Tensor) -> Found:
    return Found({"kind": "state", **fields}, local_of(tensor), layout_of(tensor).box)


def _tree(section: str, name: str, value: Any, key: str = "") -> Iterator[Found]:
    """Yield the tensors and plain values of nested containers, with keys joined by dots."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and value.device.type == "cpu" and not hasattr(value, "placements"):
            value = value.item()
        else:
            yield _tensor({"section": section, "name": name, "key": key}, value)
            return
    if isinstance(value, (Mapping, list, tuple)) and not _is_plain(value):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for last, part in items:
            yield from _tree(section, f"{name}.{last}" if name else str(last), part, key)
        return
    text = json.dumps(value) if _is_plain(value) else type(value).__name__
    yield Found({"section": section, "name": name, "key": key, "kind": "value", "value": text})


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or None, or a short list of numbers such as Adam's betas."""
    if isinstance(value, (list, tuple)):
        return 0 < len(value) <= 8 and all(isinstance(one, (int, float)) for one in value)
    return value is None or isinstance(value, (bool, int, float, str))
