"""Writes what one rank sees of some steps, rank by rank and without collectives; reads what all ranks have written.

    DIR/recording.json                  what was recorded; rank 0 writes it
    DIR/rank00003/events.jsonl          one line for the rank, for each layout, and for each tensor in execution order
    DIR/rank00003/step000.safetensors   values, by the number of the event; microbatches as "batch.<microbatch>.<index>"
    DIR/rank00003/done                  written last

A line of a tensor has its digest (``tensors.fingerprints``): digests add over shards, ranks and microbatches, so that
recordings of other meshes can be compared. Outputs of modules have the sum of the digests of their rows, each with
signs that depend on the row of the input alone: then they add over microbatches too, however rows are spread.
"""

import dataclasses
import fnmatch
import importlib.util
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof import door, extras, folders
from shardproof.door import BadFile
from shardproof.harness.judging import numerics
from shardproof.harness.judging.finding import Stage
from shardproof.harness.tensors.fingerprints import (
    Box,
    Digest,
    Fingerprint,
    K,
    bits_of,
    digests,
    forget,
    is_small,
    on_host,
    row_hashes,
)  # fmt: skip
from shardproof.harness.tensors.layouts import Layout
from shardproof.harness.tensors.lines import Count, Name, Shape, Spanned, box_of, size_checked
from shardproof.harness.tensors.trees import on_host as values_on_host
from shardproof.harness.watching.groups import DATA, groups_of, wrappers_of
from shardproof.harness.watching.model import LayoutOf
from shardproof.harness.watching.names import as_list, name_of, parameters_of, unwrapped
from shardproof.harness.watching.observation import Observation, Observed
from shardproof.harness.watching.records import Groups, NotWatchable, Parameter, StepRecord
from shardproof.harness.watching.watch import Watch
from shardproof.harness.watching.watching import Watcher
from shardproof.jsonfiles import (
    Number,
    RecordError,
    check_version,
    decode,
    described,
    encode,
    kind_of,
    says,
)  # fmt: skip

VERSION = 1

DETAILS = ("digest", "tensors")
STAGES = ("parameters", "modules")

_OF_MODULES = (Stage.MODULE_OUTPUT, Stage.OUTPUT_GRADIENT)

#: The stages that a recording has.
RECORDED = (
    Stage.INPUT, Stage.INITIAL, *_OF_MODULES, Stage.LOSS, Stage.OWN_GRADIENT, Stage.GRADIENT, Stage.TOTAL_NORM,
    Stage.CLIPPED_GRADIENT, Stage.PARAMETER, Stage.OPTIMIZER_STATE,
)  # fmt: skip

#: The most elements of small tensors that are kept until they are read together.
_MOST_WAITING = 1 << 22

#: The part of ``max_bytes`` from which tensors of modules get no values any more.
_NEARLY = 0.9

Version = Annotated[int, ("const", VERSION)]


@described()
class Head:
    """A recording of a training (recording.json)."""

    version: Version = says("the version of the format")
    world: Annotated[int, ("minimum", 1)] = says("the number of ranks")
    torch: str = says("the version of torch")
    command: Sequence[str] = says("the command line of rank 0")
    model: str = says("the class of the model")
    steps: Sequence[Count] = says("the steps that were to be recorded")
    parameters: Mapping[str, Sequence[Count]] = says("the shapes of rank 0's parameters in full, by name")
    ties: Sequence[Sequence[str]] = says("the names of parameters that are one", default=())


@described()
class RankLine:
    """The first line of events.jsonl."""

    rank: Count = says("the rank")
    groups: Mapping[str, Sequence[Count]] = says("the groups of ranks that it is in, by name")
    source: str = says("where they come from")
    data: Sequence[str] = says("the groups over which ranks read different data")


@described()
class LayoutLine:
    """A layout, before the first event that has it."""

    layout: Count = says("its number")
    shape: Shape = says("the shape of the full tensor")
    dims: Sequence[Spanned] | None = says("the ranges of each dimension; null for all", default=None)
    flat: Sequence[int] | None = says("a range in the flattened tensor", default=None)
    pending: Sequence[Count] = says("the ranks over which values are a sum that is still to be made", default=())
    mesh: Sequence[Count] = says("the ranks among which the tensor is distributed", default=())


@described()
class Named:
    """Which tensor of a step it is: what of an observation is no value and no layout."""

    stage: Stage = says("the stage of the step")
    parameter: Name = says("the name of its parameter", default="")
    module: Name = says("the name of its module, of outputs and their gradients", default="")
    key: Name = says("the key of optimizer state", default="")
    microbatch: Count = says("the number of the forward or the backward in the step", default=0)
    call: Count = says("the number of the module's call in the microbatch, or of the norm in the step", default=0)
    index: Count = says("the number of the tensor", default=0)


@described()
class Digested:
    """What stands for the elements of a tensor."""

    squares: Number = says("the sum of the squares of its elements", default=0.0)
    sketch: Sequence[Number] = says("its sketch; empty if some elements are not finite", default=())
    bits: Sequence[int] = says("the sums of its bits; the last of three, if the others are 0")
    by_rows: bool = says("whether the sketch is the signed sum of the sketches of its rows", default=False)
    noise: Count = says("of a gradient of one dimension, the elements that are not 0 and rounding noise", default=0)

    def fingerprint(self, numel: int) -> Fingerprint:
        """Return the sketch and the bits of a tensor of ``numel`` elements; a wrong length is a RecordError."""
        if len(self.sketch) not in (0, K) or len(self.bits) not in (1, 3):
            raise RecordError(f"a sketch has {K} numbers or none, and bits are 1 or 3")
        bits = tuple(self.bits) if len(self.bits) == 3 else (0, 0, *self.bits)
        return Fingerprint(tuple(self.sketch) or (math.nan,) * K, self.squares, bits, numel)


@described()
class EventLine(Digested, Named):
    """A tensor."""

    n: Count = says("the number of the event on this rank, in execution order")
    step: Count = says("the step")
    dtype: Name = says("its dtype")
    layout: Count | None = says("the number of its layout; missing of a plain tensor", default=None)
    shape: Shape = says("of a plain tensor", default=())
    rows: Sequence[int] = says("of the first input, a hash of each row", default=())
    value: bool = says("whether step<step>.safetensors has it", default=False)


@described()
class SteppedLine:
    """The settings by which an optimizer has stepped some parameters, and their age (in a line of an end)."""

    parameters: Sequence[Name] = says("their names")
    settings: Mapping[str, Sequence[Number]] = says("lr and other numbers of their group, each as a list", default={})
    age: Number | None = says("how often they were stepped, of a counter that is no tensor", default=None)


@described()
class EndLine:
    """The end of a step."""

    end: Count = says("the step")
    autocast: str = says("the dtype of autocast in its forwards", default="")
    stepped: Sequence[SteppedLine] = says(
        "the parameters that optimizers have stepped, with their settings", default=()
    )


# Writing ------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Taken:
    """An event whose digest is on its device, or is still to be made of a tensor."""

    event: Observation[None]
    number: int
    dtype: str
    shape: tuple[int, ...]
    tensor: torch.Tensor | None = None
    digest: Digest | None = None
    noise: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    value: torch.Tensor | None = None
    by_rows: bool = False

    @property
    def box(self) -> Box:
        """Which elements of the full tensor it has; a plain tensor is taken for a full one."""
        return self.event.layout.box if self.event.layout is not None else Box(self.shape)


class _Digests:
    """Makes the digests of the tensors of a step, those of small ones together."""

    def __init__(self) -> None:
        self._small: list[_Taken] = []
        self._waiting = 0
        #: Those whose bits a later tensor may have again, by the stage and the parameter of that one.
        self._known: dict[tuple[Stage, str], _Taken] = {}
        #: The hashes of the rows of each microbatch, and how many tokens a row has.
        self._rows: dict[int, torch.Tensor] = {}
        self._length = 1

    def take(self, own: _Taken, tensor: torch.Tensor) -> None:
        """Make the digest of an event, or note that it is to be made."""
        if own.event.stage is Stage.INPUT:
            self._take_input(own, tensor)
        elif own.event.stage in _OF_MODULES:
            self._take_output(own, tensor)
        elif is_small(tensor):
            # Small ones are read together; until then they are kept, whatever becomes of them.
            own.tensor = tensor.clone()
            self._small.append(own)
            self._waiting += tensor.numel()
            if self._waiting > _MOST_WAITING:
                self.read_small()
        else:
            own.digest = self._known_digest(own, tensor) or digests([tensor], [own.box])[0]
            self._keep(own)

    def _take_input(self, own: _Taken, tensor: torch.Tensor) -> None:
        own.digest = Digest(torch.zeros(K + 1, dtype=torch.float64, device=tensor.device), bits_of(tensor), 0)
        # Of a forward in which it attaches itself, it sees what the first module gets: the first tensor alone.
        if tensor.ndim and not own.event.index:
            own.rows = self._rows[own.event.microbatch] = row_hashes(tensor)
            self._length = tensor.shape[1] if tensor.ndim > 1 else 1

    def _take_output(self, own: _Taken, tensor: torch.Tensor) -> None:
        rows = self._rows.get(own.event.microbatch)
        # A row for each of the input, or for each token of it; others may be of some tokens only, as an expert's are.
        count = tensor.shape[0] if tensor.ndim and tensor.numel() and own.event.layout is None else -1
        if rows is None or count not in (len(rows), len(rows) * self._length):
            own.digest = digests([tensor], [own.box])[0]
            return
        parts = tensor.reshape(len(rows), count // len(rows), *tensor.shape[1:])
        each = torch.stack(
            [one.numbers for one in digests(list(parts.unbind()), [Box(tuple(parts.shape[1:]))] * len(rows))]
        )
        mixed = (rows ^ (rows >> 29)) * 0x5851F42D4C957F2D
        bits = (mixed[:, None] >> torch.arange(31, 31 + K, device=rows.device)) & 1
        numbers = torch.cat([(each[:, :K] * (2 * bits - 1)).sum(0), each[:, K:].sum(0)])
        own.digest, own.by_rows = Digest(numbers, bits_of(tensor), tensor.numel()), True

    def _known_digest(self, own: _Taken, tensor: torch.Tensor) -> Digest | None:
        """Return the digest of the same bits, as of gradients that are not clipped and of parameters between steps.

        On an accelerator the host would wait for the answer.
        """
        known = self._known.get((own.event.stage, own.event.parameter))
        if known is None or known.event.layout != own.event.layout or tensor.device.type != "cpu":
            return None
        return known.digest if known.digest is not None and torch.equal(known.digest.bits, bits_of(tensor)) else None

    def _keep(self, own: _Taken) -> None:
        again = {Stage.GRADIENT: Stage.CLIPPED_GRADIENT, Stage.PARAMETER: Stage.INITIAL}.get(own.event.stage)
        if again is not None:
            self._known[again, own.event.parameter] = own

    def read_small(self) -> None:
        """Make the digests that are still to be made."""
        made = digests([one.tensor for one in self._small if one.tensor is not None], [one.box for one in self._small])
        for own, digest in zip(self._small, made, strict=True):
            own.digest, own.tensor = digest, None
        self._small, self._waiting = [], 0

    def end_step(self) -> None:
        """Forget what the next step does not have again: all but its parameters at the start."""
        self._known = {key: own for key, own in self._known.items() if key[0] is Stage.INITIAL}
        self._rows = {}

    def clear(self) -> None:
        """Forget all tensors."""
        self._small, self._waiting, self._known, self._rows = [], 0, {}, {}


def _noise_of(event: Observation[None], tensor: torch.Tensor) -> torch.Tensor | None:
    """Count the elements of a gradient of one dimension at the step that are not 0 and rounding noise."""
    if event.stage is not Stage.CLIPPED_GRADIENT or tensor.ndim != 1 or not tensor.numel():
        return None
    # Of a bias that several projections share, those of the keys cancel, and Adam makes updates of their rest.
    sizes = tensor.abs()
    noise = numerics.NOISE_OF_LARGEST_EPS * torch.finfo(tensor.dtype).eps
    return ((sizes > 0) & (sizes <= noise * sizes.max())).sum()


class _Room:
    """What fits into the files of a rank.

    Args:
        patterns: of the names of parameters and modules whose values are written; without any, no values are.
        most: the bytes of the files.

    Attributes:
        nbytes: what is written, or is kept to be.
        left_out: how many values and how many events did not fit.
    """

    def __init__(self, patterns: Collection[str], most: int) -> None:
        self._patterns, self._most = patterns, most
        self.nbytes = 0
        self.left_out = {"values": 0, "events": 0}

    def value_of(self, event: Observation[None], tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of a tensor whose values are written; None of another one."""
        if not self._patterns or not self._is_wanted(event, tensor):
            return None
        value = tensor.clone()
        self.nbytes += value.numel() * value.element_size()
        return value

    def _is_wanted(self, event: Observation[None], tensor: torch.Tensor) -> bool:
        names = {event.parameter, event.module}
        if event.stage is not Stage.INPUT and not any(
            fnmatch.fnmatchcase(name, one) for name in names for one in self._patterns
        ):
            return False
        room = self._most * (_NEARLY if event.stage in _OF_MODULES else 1)
        fits = self.nbytes + tensor.numel() * tensor.element_size() <= room
        self.left_out["values"] += not fits
        return fits

    def give_back(self, value: torch.Tensor | None) -> None:
        """Count a value no longer, which is not written after all."""
        self.nbytes -= value.numel() * value.element_size() if value is not None else 0

    def has_event(self, event: Observation[None]) -> bool:
        """Whether an event is written: one of a module is not, if the files are full."""
        fits = event.stage not in _OF_MODULES or self.nbytes <= self._most
        self.left_out["events"] += not fits
        return fits


class _Files:
    """The folder of one rank, which it makes.

    Raises:
        NotWatchable: it exists, or cannot be made.
    """

    def __init__(self, folder: Path, room: _Room) -> None:
        self.folder, self._room = folder, room
        self._layouts: dict[Layout, int] = {}
        if folder.exists():
            raise NotWatchable(f"record: {folder} exists: name another folder, or remove it")
        try:
            folders.make_new(folder)
        except OSError as error:
            raise NotWatchable(f"record: {folder}: {error.strerror}") from error

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines to events.jsonl."""
        text = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in lines)
        self._room.nbytes += len(text)
        folders.append(self.folder / "events.jsonl", text)

    def write_values(self, step: int, values: Mapping[str, torch.Tensor]) -> None:
        """Write the values of a step, if there are any."""
        if values:
            from safetensors.torch import save_file

            on_cpu = {key: one.contiguous() for key, one in values_on_host(values).items()}
            # Copies of one storage are refused.
            save_file({key: one.clone() for key, one in on_cpu.items()}, self.folder / f"step{step:03}.safetensors")

    def write_done(self, events: int) -> None:
        """Mark the recording of the rank as complete."""
        left_out = {name: count for name, count in self._room.left_out.items() if count}
        folders.write(self.folder, {"done": json.dumps({"events": events, "left_out": left_out}) + "\n"})

    def lines_of(self, own: _Taken, mark: Fingerprint, step: int) -> list[dict[str, Any]]:
        """Return the line of an event, after that of its layout if that is new."""
        event = own.event
        lines = []
        line: dict[str, Any] = {"n": own.number, "step": step, "stage": event.stage.value, "dtype": own.dtype}
        named = {"parameter": event.parameter, "key": event.state, "microbatch": event.microbatch, "call": event.call,
                 "index": event.index, "by_rows": own.by_rows, "value": own.value is not None}  # fmt: skip
        if own.noise is not None:
            named["noise"] = int(own.noise)
        line |= {name: value for name, value in named.items() if value}
        if not event.parameter and event.module:
            line["module"] = event.module
        if event.layout is None:
            line["shape"] = own.shape
        else:
            if event.layout not in self._layouts:
                self._layouts[event.layout] = len(self._layouts)
                lines.append(_line_of_layout(event.layout, self._layouts[event.layout]))
            line["layout"] = self._layouts[event.layout]
        if own.rows is not None:
            line["rows"] = own.rows.tolist()
        return [*lines, line | _digest_in_line(own, mark)]


def _digest_in_line(own: _Taken, mark: Fingerprint) -> dict[str, Any]:
    line: dict[str, Any] = {}
    if own.event.stage is not Stage.INPUT:
        digits = 17 if own.dtype in ("float64", "complex128") else 9
        finite = mark.is_finite and all(map(math.isfinite, mark.sketch))
        line["squares"] = float(f"{mark.squares:.9g}") if math.isfinite(mark.squares) else repr(mark.squares)
        line["sketch"] = [float(f"{one:.{digits}g}") for one in mark.sketch] if finite else []
    line["bits"] = mark.bits if any(mark.bits[:2]) else mark.bits[2:]
    return line


def _stepped(parameters: Mapping[str, Parameter]) -> list[SteppedLine]:
    """Return the settings and ages of the parameters that optimizers have stepped; those that are equal are one."""
    found: dict[tuple[Any, float | None], list[str]] = {}
    for name, one in parameters.items():
        if one.optimizer is not None:
            every = {**one.settings, "lr": one.lr}
            lists = {
                key: tuple(map(float, value if isinstance(value, tuple) else (value,)))
                for key, value in every.items()
                if value is not None
            }
            found.setdefault((tuple(sorted(lists.items())), one.age), []).append(name)
    return [SteppedLine(parameters=names, settings=dict(settings), age=age) for (settings, age), names in found.items()]


def _line_of_layout(layout: Layout, number: int) -> dict[str, Any]:
    line = LayoutLine(
        layout=number, shape=layout.box.shape, dims=layout.box.dims, flat=layout.box.flat, pending=layout.pending,
        mesh=layout.mesh,
    )  # fmt: skip
    return dict(encode(line))


class Recording(Watcher):
    """Write what this rank sees of some steps to a folder, for ``shardproof compare``.

    It communicates with no other rank and waits for none. It records from this call until the last of ``steps`` has
    ended, or until the context that it is has been left; then it removes every hook.

    Args:
        model: as the loop calls it; several for the stages of a pipeline. None: the first root module of which
            something trains.
        optimizer: those whose steps count. None: each optimizer that steps.
        out: the folder, the same on all ranks.
        steps: which to record, counted from 0 at this call.
        detail: "digest": some 200 bytes for each tensor. "tensors": also the values, in safetensors.
        stages: "parameters": inputs, losses, gradients, norms, parameters and optimizer states, which are always
            recorded. "modules": also the outputs of modules and their gradients.
        tensors: patterns of the names of parameters and modules whose values are written; all by default.
        layout: tells which elements of a parameter a tensor holds, from its name and the tensor, where the tensor does
            not say so itself.
        names: makes the name in the full model from the name of a module or parameter, as for a stage of a pipeline.
        mesh: names the groups of ranks; by default the meshes of the model's DTensors do.
        max_bytes: of this rank's files. Values that do not fit are left out, those of modules first, and then the
            digests of modules; ``done`` says how many.

    Raises:
        ValueError: an argument is not valid, the folder has a recording of this rank, or two parameters have one name;
            in one line.
    """

    name, activity = "record", "recording"

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        out: str | os.PathLike[str],
        steps: Collection[int] = (0, 1),
        detail: str = "digest",
        stages: Collection[str] = ("parameters",),
        tensors: Collection[str] = (),
        layout: LayoutOf | None = None,
        names: Callable[[str], str] | None = None,
        mesh: DeviceMesh | None = None,
        max_bytes: int = 1 << 30,
    ) -> None:
        super().__init__(steps)
        if detail not in DETAILS:
            raise NotWatchable(f"record: detail={detail!r}: expected {' or '.join(map(repr, DETAILS))}")
        if unknown := sorted(set(stages) - set(STAGES)):
            raise NotWatchable(f"record: stages={unknown[0]!r}: expected {' or '.join(map(repr, STAGES))}")
        if detail == "tensors" and importlib.util.find_spec("safetensors") is None:
            raise NotWatchable(f"record: values need safetensors: {extras.command('own')}")
        self._out, self._mesh, self._names = Path(out), mesh, names
        patterns = tuple(tensors) or ("*",)
        self._room = _Room(patterns if detail == "tensors" else (), max_bytes)
        self._watch = Watch(
            self._end, steps=steps, optimizers=as_list(optimizer), layout=layout, on_error=self._on_error,
            sink=self._take, modules="modules" in stages, digests=False,
        )  # fmt: skip
        self._files: _Files | None = None
        self._digests = _Digests()
        self._number = 0
        self._taken: dict[Any, _Taken] = {}
        self._attach(as_list(model))

    def close(self) -> None:
        """End the last step, mark the recording as complete, and remove all hooks."""
        if self._is_over:
            return
        self._watch.end_step()
        if self._is_over:
            return
        if self._watch.step <= self._steps[0]:
            self._say_here(self._nothing_seen())
            self._detach()
            return
        self._finish()

    # Attaching

    def _attach_to(self, models: Sequence[nn.Module]) -> None:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        shapes: dict[str, tuple[int, ...]] = {}
        owners: dict[str, int] = {}
        for number, model in enumerate(models):
            for name, parameter in parameters_of(model):
                name = self._name(name)
                if owners.setdefault(name, number) != number:
                    raise NotWatchable(
                        f"record: {name!r} names two parameters (stages {owners[name]} and {number}): pass names= with "
                        "the offset of the stage"
                    )
                shapes[name] = tuple(parameter.shape)
        try:
            groups = groups_of(models, wrappers_of(models), mesh=self._mesh, groups={}, data=DATA)
        except NotWatchable as error:
            raise NotWatchable(f"record: mesh: no data-parallel dimension, such as {', '.join(DATA[:4])}") from error
        if self._files is not None:  # of a module that was called before the model
            shutil.rmtree(self._files.folder)
            self._digests.clear()
            self._taken.clear()
            self._number = self._room.nbytes = 0
        self._files = _Files(self._out / f"rank{rank:05}", self._room)
        for model in models:
            self._watch.attach(model)
        if rank == 0:
            ties = [tuple(map(self._name, names)) for names in self._watch.model.tied()]
            head = Head(
                version=VERSION, world=world, torch=torch.__version__, command=sys.argv, steps=self._steps,
                model=type(unwrapped(models[0])).__name__, parameters=shapes, ties=ties,
            )  # fmt: skip
            folders.write(self._out, {"recording.json": json.dumps(encode(head), indent=1) + "\n"})
        self._files.write([encode(RankLine(rank=rank, groups=groups.named, source=groups.source, data=groups.data))])

    def _name(self, name: str) -> str:
        return name if self._names is None or not name else self._names(name)

    # Taking events

    def _take(self, seen: Observed) -> None:
        tensor = seen.value
        event = seen.bare()
        if self._names is not None:
            event = dataclasses.replace(event, module=self._name(event.module), parameter=self._name(event.parameter))
        if event.stage is not Stage.INPUT and not (tensor.is_floating_point() or tensor.is_complex()):
            return
        own = _Taken(event, self._number, name_of(tensor.dtype), tuple(tensor.shape))
        self._number += 1
        # Of the gradients after each backward the last counts.
        last = event.stage is Stage.GRADIENT
        if (replaced := self._taken.pop((event.stage, event.parameter), None)) is not None:
            self._room.give_back(replaced.value)
        self._taken[(event.stage, event.parameter) if last else own.number] = own
        self._digests.take(own, tensor)
        own.noise = _noise_of(event, tensor)
        own.value = self._room.value_of(event, tensor)

    # Writing

    def _end(self, record: StepRecord) -> None:
        assert self._files is not None
        self._digests.read_small()
        taken = sorted(self._taken.values(), key=lambda one: one.number)
        marks = on_host([one.digest for one in taken if one.digest is not None])
        values: dict[str, torch.Tensor] = {}
        lines: list[dict[str, Any]] = []
        for own, mark in zip(taken, marks, strict=True):
            if not self._room.has_event(own.event):
                continue
            if own.value is not None:
                key = f"batch.{own.event.microbatch}.{own.event.index}"
                values[key if own.event.stage is Stage.INPUT else str(own.number)] = own.value
            lines += self._files.lines_of(own, mark, record.step)
        self._files.write_values(record.step, values)
        stepped = _stepped({self._name(name): one for name, one in record.parameters.items()})
        end = EndLine(end=record.step, autocast=record.forwards.autocast, stepped=stepped)
        self._files.write([*lines, encode(end)])
        self._digests.end_step()
        self._taken = {}
        if record.step >= self._steps[-1]:
            self._finish()

    def _finish(self) -> None:
        assert self._files is not None
        self._files.write_done(self._number)
        self._detach()

    def _on_error(self, error: Exception) -> None:
        if not isinstance(error, (OSError, folders.NotWritten)):
            super()._on_error(error)
            return
        why = (
            error
            if isinstance(error, folders.NotWritten)
            else f"{self._files and self._files.folder}: {error.strerror or error}"
        )
        self._say_here(f"{why}; this rank's recording ends, and the training goes on")
        self._detach()

    def _detach(self) -> None:
        super()._detach()
        self._taken = {}
        self._digests.clear()
        forget()


record = Recording
"""What user code calls."""

# Reading ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedEvent(Observation[Fingerprint]):
    """An observation of a recording: a line of events.jsonl, which leaves out what is 0, empty or false.

    Attributes:
        n: the number of the event on this rank, in execution order.
        shape: of a plain tensor.
        by_rows: whether the sketch is the signed sum of those of its rows.
        rows: of the first input, a hash of each row.
        has_value: in the line "value": whether step<step>.safetensors has it.
        noise: of a gradient of one dimension at the step, the elements that are not 0 and rounding noise.
    """

    n: int
    step: int
    shape: tuple[int, ...]
    dtype: str
    by_rows: bool
    rows: tuple[int, ...]
    has_value: bool
    noise: int

    @property
    def box(self) -> Box:
        """Which elements of the full tensor it has; a plain tensor is taken for a full one."""
        return self.layout.box if self.layout is not None else Box(self.shape)


@dataclasses.dataclass
class OfRank:
    """What one rank has recorded.

    Attributes:
        events: of each step that has ended, in execution order.
        is_complete: whether it recorded all that it should.
        autocast: the dtypes of autocast in its forwards.
        stepped: by step and parameter, settings and age; empty of a recording that was made before there were any.
    """

    rank: int
    folder: Path
    groups: Groups
    events: dict[int, list[RecordedEvent]]
    is_complete: bool
    autocast: set[str]
    stepped: dict[int, dict[str, SteppedLine]]

    def value(self, seen: RecordedEvent) -> torch.Tensor | None:
        """Return the values of an event; None if they were not recorded, or safetensors is not installed."""
        if not seen.has_value or importlib.util.find_spec("safetensors") is None:
            return None
        path = self.folder / f"step{seen.step:03}.safetensors"
        found = cast(torch.Tensor, door.tensor(path, str(seen.n)))
        if found.numel() != seen.box.numel or found.is_complex():
            raise BadFile(f"{path}: tensor {seen.n} has shape {list(found.shape)}, which is not that of its event")
        return found


@dataclasses.dataclass
class Recorded:
    """A recording of all ranks.

    Attributes:
        shift: the number that was subtracted from those of its steps, to align it with another recording.
    """

    path: Path
    head: Head
    ranks: list[OfRank]
    shift: int = 0

    @property
    def steps(self) -> list[int]:
        """The steps that all ranks have ended."""
        return sorted(set.intersection(*(set(one.events) for one in self.ranks)))

    def shifted(self, shift: int) -> "Recorded":
        """Return the recording with its steps renumbered, so that step ``shift`` is step 0."""
        ranks = [
            dataclasses.replace(
                one,
                events={step - shift: seen for step, seen in one.events.items()},
                stepped={step - shift: lines for step, lines in one.stepped.items()},
            )
            for one in self.ranks
        ]
        head = dataclasses.replace(self.head, steps=[step - shift for step in self.head.steps])
        return Recorded(self.path, head, ranks, self.shift + shift)


def read(path: str | os.PathLike[str]) -> Recorded:
    """Read a recording.

    Raises:
        BadFile: it is missing, has another version, or is not what a recording is.
    """
    path = Path(path)
    head = door.load(path / "recording.json", _head)
    return Recorded(path, head, [_read_rank(path, rank, head) for rank in range(head.world)])


def _head(data: object) -> Head:
    check_version(data, "version", VERSION)
    return decode(Head, data)


def _read_rank(path: Path, rank: int, head: Head) -> OfRank:
    folder = path / f"rank{rank:05}"
    if not folder.is_dir():
        raise BadFile(f"{folder} is missing; the recording is of {head.world} ranks")
    file, is_complete = folder / "events.jsonl", (folder / "done").exists()
    reading = _Reading(rank, head)
    for _ in door.lines(file, reading.take, may_be_cut=not is_complete):
        pass
    if is_complete and not reading.ended:
        raise BadFile(f"{file}: it has no step, and {folder / 'done'} says that it is complete")
    events = {step: own for step, own in reading.events.items() if step in reading.ended}
    return OfRank(rank, folder, reading.groups, events, is_complete, reading.autocast, reading.stepped)


class _Reading:
    """The lines of one rank, which are taken in their order."""

    def __init__(self, rank: int, head: Head) -> None:
        self._rank, self._head = rank, head
        self._first_names = {name: names[0] for names in head.ties for name in names}
        self._layouts: dict[int, Layout] = {}
        self._taken = 0
        self.groups = Groups({}, "", ())
        self.events: dict[int, list[RecordedEvent]] = {}
        self.ended: set[int] = set()
        self.autocast: set[str] = set()
        self.stepped: dict[int, dict[str, SteppedLine]] = {}

    def take(self, data: object) -> None:
        """Take a line.

        Raises:
            RecordError: it is not what such a line is, or does not fit those before it.
        """
        line = kind_of(data, dict, "the line")
        if "stage" in line:
            seen = self._seen(decode(EventLine, line, "the event"))
            self.events.setdefault(seen.step, []).append(seen)
        elif "end" in line:
            end = decode(EndLine, line, "the end")
            if end.end in self.ended:
                raise RecordError(f"end: step {end.end} has ended before")
            self.ended.add(end.end)
            self.autocast.add(end.autocast or "float64")
            names = {self._first_names.get(name, name): one for one in end.stepped for name in one.parameters}
            self.stepped[end.end] = names
        elif "layout" in line:
            layout = decode(LayoutLine, line, "the layout")
            self._layouts[layout.layout] = self._layout_of(layout)
        else:
            own = decode(RankLine, line, "the rank")
            groups = {name: self._ranks(ranks, f"groups.{name}") for name, ranks in own.groups.items()}
            if own.rank != self._rank:
                raise RecordError(f"rank: it is {own.rank}, in the folder of rank {self._rank}")
            if lacking := [name for name in own.data if name not in groups]:
                raise RecordError(f"data: there is no group {lacking[0]!r}")
            self.groups = Groups(groups, own.source, tuple(own.data))

    def _ranks(self, ranks: Sequence[int], where: str) -> tuple[int, ...]:
        if wrong := [rank for rank in ranks if rank >= self._head.world]:
            raise RecordError(f"{where}: {wrong[0]} is no rank of {self._head.world}")
        return tuple(ranks)

    def _layout_of(self, line: LayoutLine) -> Layout:
        box = box_of(line.shape, line.dims, line.flat)
        return Layout(box, self._ranks(line.pending, "pending"), self._ranks(line.mesh, "mesh"))

    def _seen(self, line: EventLine) -> RecordedEvent:
        self._taken += 1
        if line.stage not in RECORDED:
            raise RecordError(f"stage: {line.stage.value!r} is in no recording")
        if line.layout is not None and line.layout not in self._layouts:
            raise RecordError(f"layout: no line before this one has layout {line.layout}")
        layout = self._layouts[line.layout] if line.layout is not None else None
        shape = size_checked(line.shape)
        box = layout.box if layout is not None else Box(shape)
        if line.microbatch >= self._taken:
            # A list has a place for each: a number alone must not make it long.
            raise RecordError(f"microbatch: {line.microbatch}, after {self._taken - 1} tensors")
        mark = line.fingerprint(box.numel)
        if line.by_rows and not shape:
            raise RecordError("by_rows: a tensor without dimensions has no rows")
        name = self._first_names.get(line.parameter, line.parameter)
        return RecordedEvent(
            line.stage, line.module or name.rpartition(".")[0], name, line.microbatch, line.call, line.index, layout,
            line.key, mark, line.n, line.step, shape, line.dtype, line.by_rows, tuple(line.rows), line.value,
            line.noise,
        )  # fmt: skip
