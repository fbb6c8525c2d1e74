"""A state that is compared: the snapshot of a training, or checkpoint files; its entries put together over ranks."""

import base64
import dataclasses
import functools
import json
import math
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardproof import door
from shardproof.door import BadFile
from shardproof.harness.states import blocks, files, maps, schedulers
from shardproof.harness.states.blocks import Sums
from shardproof.harness.states.snapshot import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    SCHEDULER,
    UNCOMPARED,
    EntryLine,
    RankLine,
    SumsLine,
)
from shardproof.harness.tensors.fingerprints import Box, K
from shardproof.harness.tensors.layouts import put_into
from shardproof.harness.tensors.lines import box_of
from shardproof.harness.watching.names import name_of
from shardproof.jsonfiles import RecordError, decode, shown


class EntryKey(NamedTuple):
    """The place of an entry in a state."""

    section: str
    name: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.key} of {self.name}" if self.key else self.name


@dataclasses.dataclass
class Holding:
    """The part of an entry that one rank, or one file, holds; ``load`` reads it where it is in a file."""

    source: str
    box: Box
    sums: Sums
    load: Callable[[], torch.Tensor] | None = None


@dataclasses.dataclass
class Entry:
    """An entry of a state.

    Attributes:
        held: what each rank or file holds of a tensor; empty for a value.
        values: of an entry that is no tensor, the value of each rank, as JSON.
        load: reads the full tensor, where the state is a file; None where only digests are known.
        order: how a table says that its elements are ordered otherwise than in the other state: ``maps.ROTARY``,
            ``maps.TRANSPOSED``, or empty.
        unit: the name of the flat parameter of FSDP1 that has it.
        offset: where it begins there.
    """

    key: EntryKey
    kind: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    held: list[Holding] = dataclasses.field(default_factory=list)
    values: dict[str, str] = dataclasses.field(default_factory=dict)
    trains: bool | None = None
    stepped_by: str = ""
    position: int | None = None
    optimizer: int = 0
    tied: str = ""
    load: Callable[[], torch.Tensor] | None = None
    order: str = ""
    unit: str = ""
    offset: int = 0

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor."""
        return bool(self.dtype)

    @property
    def parts(self) -> list[Holding]:
        """A holder of each part of the tensor, without replicas."""
        return [*{one.box: one for one in reversed(self.held)}.values()]

    @functools.cached_property
    def total(self) -> Sums:
        """The sums of all parts, once all are held."""
        return blocks.total(one.sums for one in self.parts)

    @functools.cached_property
    def short(self) -> frozenset[int]:
        """The blocks of which no rank and no file has all elements."""
        held = {number: block.numel for number, block in self.total.blocks.items()}
        every = range(blocks.count_of(self.shape) if self.held else 0)
        return frozenset(number for number in every if held.get(number, 0) < blocks.numel_of(number, self.shape))

    @property
    def numel(self) -> int:
        """The number of elements of the full tensor."""
        return math.prod(self.shape)


@dataclasses.dataclass
class State:
    """A state and where it is from.

    Attributes:
        path: as the user named it.
        what: what it is, for a headline: "2 ranks of a training", "a checkpoint".
        sources: the ranks or files, in their order.
        is_live: whether it is the snapshot of a training, of which all entries have sections.
        is_whole: whether it is one with files of a trainer, which has more than the model.
    """

    path: str
    what: str
    sources: tuple[str, ...]
    is_live: bool
    step: int | None = None
    entries: dict[EntryKey, Entry] = dataclasses.field(default_factory=dict)
    is_whole: bool = False

    @property
    def is_weights(self) -> bool:
        """Whether it has the model alone: a receiver, or files in which nothing is of a trainer."""
        if self.is_live or self.has_optimizer or self.is_whole:
            return self.is_live and not self.has_optimizer
        return not any(key.section == SCHEDULER or _is_of_trainer(key, one) for key, one in self.entries.items())

    @property
    def is_adapter(self) -> bool:
        """Whether it has the files of an adapter, which leave out what does not train."""
        return any(one.startswith("adapter_model") for one in self.sources)

    @property
    def has_optimizer(self) -> bool:
        """Whether it has settings or states of an optimizer."""
        return any(key.section == OPTIMIZER for key in self.entries)

    @functools.cached_property
    def trains(self) -> bool:
        """Whether a parameter of it trains: none of a receiver does."""
        return any(one.trains for one in self.entries.values())


def read(path: str) -> State:
    """Read a snapshot or checkpoint files.

    Raises:
        BadFile: it is neither, or a file is damaged; in one line.
    """
    ranks = rank_files(path)
    return _snapshot(path, ranks) if ranks else _checkpoint(path)


def rank_files(path: str) -> list[Path]:
    """Return the files of ranks that a snapshot has; none of a checkpoint."""
    return sorted(Path(path).glob("rank[0-9]*.jsonl")) if Path(path).is_dir() else []


class _Line(NamedTuple):
    """A line of an entry, with the place of a tensor that it has."""

    fields: EntryLine
    box: Box


def line_of(value: object) -> RankLine | _Line | SumsLine:
    """Decode a line of a rank's file."""
    if not isinstance(value, Mapping):
        raise RecordError("a line is no object")
    if "world" in value:
        return decode(RankLine, value)
    if "hashes" in value:
        return decode(SumsLine, value)
    fields = decode(EntryLine, value)
    return _Line(fields, box_of(fields.shape, fields.dims, fields.flat))


def _sums(line: SumsLine, boxes: Sequence[Box]) -> Iterator[Sums]:
    """Yield the digests of the tensors of a file.

    Raises:
        RecordError: the numbers are not those of so many tensors.
    """
    counts = [len(blocks.numels_of(box)) for box in boxes]
    hashes = _decoded("hashes", line.hashes, "q", sum(counts))
    squares = _decoded("squares", line.squares, "d", sum(counts))
    sketches = _decoded("sketches", line.sketches, "d", K * len(boxes))
    if len(line.digits) != len(boxes):
        raise RecordError(f"digits: {len(line.digits)} numbers, and not {len(boxes)}, one for each tensor")
    at = 0
    for number, (box, count) in enumerate(zip(boxes, counts, strict=True)):
        mine = slice(at, at := at + count)
        sketch = sketches[number * K : (number + 1) * K]
        yield blocks.sums_of(box, hashes[mine], squares[mine], sketch, line.digits[number])


def _decoded(field: str, text: str, kind: str, count: int) -> Sequence[Any]:
    """Return the numbers of a field of base64."""
    try:
        found = base64.b64decode(text, validate=True)
    except ValueError:
        raise RecordError(f"{field}: {shown(text)} is no base64") from None
    if len(found) != 8 * count:
        raise RecordError(f"{field}: {len(found)} bytes, and not {8 * count}, 8 for each number of its tensors")
    return struct.unpack(f"<{count}{kind}", found)


def _snapshot(path: str, ranks: Sequence[Path]) -> State:
    found = State(path, "", (), is_live=True)
    heads = [_read_rank(found, file) for file in ranks]
    world = heads[0].world
    if other := [one for one in heads if one.world != world]:
        raise BadFile(f"{path}: rank {heads[0].rank} is of {world} ranks, and rank {other[0].rank} of {other[0].world}")
    if missing := sorted({*range(world)} - {one.rank for one in heads}):
        raise BadFile(f"{path}: of {world} ranks it has {len(heads)}: rank {missing[0]} is missing")
    found.sources = tuple(f"rank {one.rank}" for one in heads)
    found.step = heads[0].step
    at = "" if found.step is None else f" after step {found.step}"
    found.what = f"{heads[0].model} on {world} rank{'s' if world > 1 else ''}{at}"
    return found


def _read_rank(state: State, file: Path) -> RankLine:
    """Add what the file of a rank has to a state, and return which rank it is."""
    every = [*door.lines(file, line_of, may_be_cut=False)]
    head, entries, last = (every[0], every[1:-1], every[-1]) if every else (None, [], None)
    if not isinstance(head, RankLine):
        raise BadFile(f"{file}: the first line says no rank: expected the file of a state")
    if not isinstance(last, SumsLine):
        raise BadFile(f"{file}: the last line has no digests: expected the file of a state, to its end")
    for line in entries:
        if not isinstance(line, _Line):
            what = "says the rank" if isinstance(line, RankLine) else "has digests"
            raise BadFile(f"{file}: a second line that {what}")
    lines = [line for line in entries if isinstance(line, _Line)]
    try:
        sums = iter([*_sums(last, [line.box for line in lines if line.fields.dtype])])
    except RecordError as error:
        raise BadFile(f"{file}: the last line: {error}") from None
    for line in lines:
        _add(state, line, next(sums) if line.fields.dtype else None, f"rank {head.rank}", file)
    return head


def _add(state: State, line: _Line, sums: Sums | None, source: str, file: Path) -> None:
    fields, shape = line.fields, line.box.shape
    key = EntryKey(fields.section, fields.name, fields.key)
    made = Entry(key, fields.kind, fields.dtype, shape, trains=fields.trains, tied=fields.tied)
    if fields.stepper is not None:
        told = fields.stepper
        made.stepped_by, made.position, made.optimizer = told.group, told.position, told.optimizer
    if fields.unit is not None:
        made.unit, made.offset = fields.unit.name, fields.unit.offset
    entry = state.entries.setdefault(key, made)
    if fields.value is not None:
        entry.values[source] = fields.value
    if sums is not None:
        if (entry.dtype, entry.shape) != (fields.dtype, shape):
            raise BadFile(f"{file}: {key}: another dtype or shape than on an earlier rank")
        entry.held.append(Holding(source, line.box, sums))


#: Values next to a model with which a training goes on, and states of generators, as words of names.
_COUNTERS = re.compile(
    r"(^|\.)(train_state|dataloader|(\w+_)?(steps?|epochs?|iters?|iterations?|iter_num|scaler)|\w*(optim|rng|random)\w*)(\.|$)"
)


#: Of these also tensors are a trainer's, as in checkpoints of torchtitan, which have no word before the model's names.
_NEVER_OF_A_MODEL = re.compile(r"(train_state|dataloader|\w*rng_states?)(\.|$)")


def _is_of_trainer(key: EntryKey, entry: Entry) -> bool:
    """Whether an entry is none of a model, and one with which a training goes on."""
    is_free = key.section == EXTRA or not entry.is_tensor or _NEVER_OF_A_MODEL.match(key.name) is not None
    return is_free and _COUNTERS.search(key.name) is not None


# Checkpoints -------------------------------------------------------------------------------------


def _checkpoint(path: str) -> State:
    found = files.read(path)
    sources = tuple(dict.fromkeys(part.source for entry in found for part in entry.parts))
    state = State(
        path, f"{len(found)} entries in {len(sources)} file{'s' if len(sources) != 1 else ''}", sources, False,
        is_whole=files.has_trainer(path),
    )  # fmt: skip
    lists: dict[EntryKey, list[Any]] = {}
    begins = _schedulers(found), _optimizers(found)
    for one in found:
        key = _key_of(one.name, *begins)
        if key.section == OPTIMIZER and key.key in UNCOMPARED:
            continue
        entry = Entry(key, "state" if key.section == OPTIMIZER else "", tied=one.tied)
        if one.shape is None or one.dtype is None:
            if not one.unread:  # of a class of others, whose value is not known
                value = one.value
                if key.name.startswith("group ") and one.name.rpartition(".")[2].isdigit():
                    value = lists.setdefault(key, [])  # such as Adam's betas, which a live optimizer has as one value
                    value.append(one.value)
                entry.values[sources[0] if sources else path] = json.dumps(value)
            entry.kind = "value"
        else:
            entry.dtype, entry.shape = name_of(one.dtype), tuple(one.shape)
            for part in one.parts:
                # One at a time, and let go of: a checkpoint is larger than memory.
                tensor = part.load()
                (its,) = blocks.sums([tensor], [part.box])
                entry.held.append(Holding(part.source, part.box, its, part.load))
                del tensor
            entry.load = _loader(one)
        state.entries[key] = entry
    return state


def _loader(entry: files.Entry) -> Callable[[], torch.Tensor]:
    def load() -> torch.Tensor:
        if len(entry.parts) == 1 and entry.parts[0].box.is_full:
            return entry.parts[0].load()
        full = torch.zeros(entry.shape or (), dtype=entry.dtype)
        for part in entry.parts:
            put_into(full, part.box, part.load())
        return full

    return load


#: What begins the entries of an optimizer in a file, and how its states are named: by numbers, or by parameters.
_OF_OPTIMIZER = re.compile(r"((?:.*\.)?(?:\w*optim\w*|opt(?:_\w+)?)\.(?:\d+\.)?)?(state|param_groups)\.(.*)$")


def _optimizers(found: Sequence[files.Entry]) -> Mapping[str, str]:
    """Return the number of each optimizer of a file, by what precedes its entries; empty if there is one."""
    begins = dict.fromkeys(match[1] or "" for one in found if (match := _OF_OPTIMIZER.match(one.name)))
    return {one: f"{number}:" if len(begins) > 1 else "" for number, one in enumerate(begins)}


def _schedulers(found: Sequence[files.Entry]) -> Mapping[str, str]:
    """Return what precedes the keys of each scheduler's state in the names of a file, and in those of the state.

    A module of a model may be named so too, and has tensors alone.
    """
    begins = dict.fromkeys(schedulers.beginning_of(one.name) for one in found if one.shape is None)
    every = [one for one in begins if one]
    return {one: one if len(every) > 1 else "" for one in every}


#: The file of states of generators next to a model, whose name precedes its entries.
_OF_GENERATORS = re.compile(r"rng_state(_\d+)?\.")


def _key_of(name: str, of_schedulers: Mapping[str, str], of_optimizers: Mapping[str, str]) -> EntryKey:
    """Return the place of an entry of a file, by its name there."""
    if (begin := schedulers.beginning_of(name)) in of_schedulers:
        return EntryKey(SCHEDULER, of_schedulers[begin] + name.removeprefix(begin))
    if _OF_GENERATORS.match(name):
        return EntryKey(EXTRA, name)
    match = _OF_OPTIMIZER.match(name)
    if match is None:
        return EntryKey(MODEL, name)
    number, what, rest = of_optimizers[match[1] or ""], match[2], match[3]
    if what == "state":
        parameter, _, last = rest.rpartition(".")
        own = f"{number}{parameter}" if parameter.isdigit() else parameter
        return EntryKey(OPTIMIZER, own, last) if parameter else EntryKey(EXTRA, name)
    # A list has its places behind its key: "0.params.3", "0.betas.1".
    group, _, last = rest.partition(".")
    return EntryKey(OPTIMIZER, f"group {number}{group}", last.partition(".")[0])


def renamed(state: State, rules: Sequence[str]) -> State:
    """Return a state with other names of parameters, by rules "REGEX=NEW" as of ``re.sub``, each after the others.

    Raises:
        BadFile: a rule is none, or gives two entries one name; in one line.
    """
    changed = dataclasses.replace(state, entries=dict(state.entries))
    for rule in rules:
        pattern, equals, new = rule.rpartition("=")
        try:
            names = {key: re.sub(pattern, new, key.name) for key in changed.entries}
        except (re.error, IndexError) as error:
            raise BadFile(f"--rename {rule}: {error}") from error
        if not equals or not pattern:
            raise BadFile(f"--rename {rule}: expected REGEX=NEW, such as 'lora_(.)=lora_\\1.default'")
        entries: dict[EntryKey, Entry] = {}
        for key, entry in changed.entries.items():
            own = key._replace(name=names[key])
            if own in entries:
                raise BadFile(f"--rename {rule}: two entries get the name {own}, one of them {key}")
            entries[own] = dataclasses.replace(entry, key=own)
        changed.entries = entries
    return changed


def mapped(state: State, named: str, to: State) -> State:
    """Return a state with the names of another, by a table of rules or a function; fused tensors become their slices.

    Args:
        named: a table, its file, or a function; see ``maps.read``.
        to: of which the names and shapes are wanted.

    Raises:
        BadFile: the table cannot be read, gives two entries one name, or a fused tensor cannot be cut; in one line.
    """
    every, function = maps.read(named)
    names = [key.name for key in state.entries if key.section == MODEL]
    wanted = {key.name for key in to.entries if key.section == MODEL}
    rules, before = maps.chosen(every, names, wanted) if every else ((), "")
    changed = dataclasses.replace(state, entries={})
    for key, entry in state.entries.items():
        own = key.name.removeprefix(before)
        if function is not None and key.section in (MODEL, OPTIMIZER):
            found = {key._replace(name=str(function(own) or own)): entry}
        elif (rule := maps.rule_of(own, rules) if key.section in (MODEL, OPTIMIZER) else None) is None:
            found = {key._replace(name=own if key.section == MODEL else key.name): entry}
        else:
            found = _by_rule(rule, own, entry, to)
        for new, one in found.items():
            if new in changed.entries:
                raise BadFile(f"--map {named}: two entries get the name {new}, one of them {key}")
            changed.entries[new] = dataclasses.replace(one, key=new)
    return changed


def _by_rule(rule: maps.Rule, name: str, entry: Entry, to: State) -> dict[EntryKey, Entry]:
    """Return the entries that one is by a rule, by their names there."""
    if len(rule.new) == 1 and not rule.has_index and not (rule.note == maps.TRANSPOSED and entry.load):
        tied = entry.tied and (rule.names(entry.tied) or (entry.tied,))[0]
        new = entry.key._replace(name=(rule.names(name) or (name,))[0])
        return {new: dataclasses.replace(entry, order=rule.note, tied=tied)}
    if not entry.is_tensor or not entry.numel:
        return {entry.key: entry}
    if entry.load is None:
        raise BadFile(
            f"{name} is made of others ({rule.line[:200]}), and a snapshot has no values to cut: write it with "
            "views=shardproof.views(..., like=...)"
        )
    shapes = {key.name: one.shape for key, one in to.entries.items() if (key.section, key.key) == entry.key[::2]}
    try:
        cut = maps.slices(rule, name, entry.load(), shapes)
    except maps.NoFit as error:
        raise BadFile(f"{name}: {error}") from None
    found = {}
    for one in cut:
        (its,) = blocks.sums([one.tensor.contiguous()], [one.box])
        held = [Holding(entry.held[0].source, one.box, its)]
        load = functools.partial(_slice, rule, name, entry.load, shapes, one.name)
        found[entry.key._replace(name=one.name)] = dataclasses.replace(
            entry, shape=one.box.shape, held=held, load=load, tied=""
        )
    return found


def _slice(
    rule: maps.Rule, name: str, load: Callable[[], torch.Tensor], shapes: Mapping[str, tuple[int, ...]], wanted: str
) -> torch.Tensor:
    return next(one.tensor for one in maps.slices(rule, name, load(), shapes) if one.name == wanted)


#: The name of an adapter within the names of its parameters, which PEFT's files leave out.
_ADAPTER = re.compile(r"(\blora_\w+)\.[^.]+(\.weight|\.bias)?$")


def _with_adapter(state: State, wanted: Collection[str]) -> State:
    """Return a state whose names have the name of the adapter that those of the other state have."""
    added = {_ADAPTER.sub(r"\1\2", name).rpartition("lora_")[2]: _ADAPTER.search(name) for name in wanted}
    found = {}
    for key, entry in state.entries.items():
        match = added.get(key.name.rpartition("lora_")[2]) if "lora_" in key.name else None
        if match is not None and not key.name.endswith(match[0]):
            key = key._replace(name=f"{key.name.rpartition('lora_')[0]}{match[0]}")
        found[key] = dataclasses.replace(entry, key=key)
    return dataclasses.replace(state, entries=found)


#: Words before the names of an average of a model, which may be in a file next to it.
_OF_AVERAGE = re.compile(r"(^|\.)(\w*ema|ema_\w+|\w*average\w*|shadow\w*|teacher\w*|swa\w*)\.", re.IGNORECASE)

#: The number of an optimizer before that of a parameter or a group, where a file has several.
_OF_SEVERAL = re.compile(r"(group )?(\d+):(\d+)")


def _numbers(state: State, to: State) -> dict[str, str]:
    """Return the names of parameters by the numbers that a file gives them: "1:4" is the fifth of a second optimizer.

    An optimizer of a file is that one of the training of whose parameters its states have the shapes, and the first of
    several such ones. The numbers of its groups are there too.
    """
    places: dict[int, dict[str, Entry]] = {}
    for one in to.entries.values():
        if one.position is not None and not one.tied:
            places.setdefault(one.optimizer, {})[str(one.position)] = one
    shapes = _shapes_by_number(state)
    if not shapes:
        return {place: one.key.name for place, one in places.get(0, {}).items()}
    found: dict[str, str] = {}
    for number, mine in shapes.items():
        fits = [one for one, some in places.items() if all(place in some and its <= {some[place].shape}
                                                           for place, its in mine.items())]  # fmt: skip
        chosen = min(fits, key=lambda one: len(places[one]), default=int(number))
        some = places.pop(chosen, {})
        found |= {f"{number}:{place}": one.key.name for place, one in some.items()}
        found[f"group {number}:"] = f"group {chosen}:"
    return found


def _shapes_by_number(state: State) -> dict[str, dict[str, set[tuple[int, ...]]]]:
    """Return the shapes of the states of several optimizers, by the numbers of these and of parameters."""
    shapes: dict[str, dict[str, set[tuple[int, ...]]]] = {}
    for key, entry in state.entries.items():
        if key.section == OPTIMIZER and (match := _OF_SEVERAL.fullmatch(key.name)) and not match[1]:
            its = shapes.setdefault(match[2], {}).setdefault(match[3], set())
            its |= {entry.shape} if entry.numel > 1 else set()
    return shapes


def aligned(state: State, to: State) -> tuple[State, str]:
    """Return a state whose names are those of another, and what its own names began with before.

    Wrappers and containers put words before the names of parameters. The beginning is that with which most names are
    the other's. States of an optimizer that have numbers get the names of the other's parameters.
    """
    wanted = _names_in(to, MODEL)
    state = _with_adapter(state, {*wanted})
    names = _names_in(state, MODEL)
    best = maps.beginning([one for one in names if not _OF_AVERAGE.search(one)], {*wanted}.__contains__)
    best = best or maps.beginning(names, {*wanted}.__contains__)
    begin = maps.beginning(_names_in(state, SCHEDULER), {*_names_in(to, SCHEDULER)}.__contains__)
    numbers = _numbers(state, to)
    changed = dataclasses.replace(state, entries={})
    for old, entry in state.entries.items():
        key = _aligned_key(old, entry, {MODEL: best, SCHEDULER: begin}.get(old.section, ""))
        if key.section == OPTIMIZER:
            key = key._replace(name=_by_parameter(key.name, numbers, best))
        changed.entries[key] = dataclasses.replace(entry, key=key, tied=entry.tied.removeprefix(best))
    return changed, best


def _names_in(state: State, section: str) -> list[str]:
    return [key.name for key in state.entries if key.section == section]


def _aligned_key(key: EntryKey, entry: Entry, begin: str) -> EntryKey:
    """Return the place of an entry without what its section's names begin with; others are of no section."""
    if key.section not in (MODEL, SCHEDULER):
        return key
    is_other = not begin and key.section == MODEL and _is_of_trainer(key, entry)
    inside = key.name.startswith(begin) and not is_other
    return EntryKey(key.section, key.name[len(begin) :], key.key) if inside else EntryKey(EXTRA, key.name)


def _by_parameter(name: str, numbers: Mapping[str, str], best: str) -> str:
    """Return the name of a parameter whose states an optimizer has, or of a group."""
    if name.startswith("group "):
        before, colon, group = name.partition(":")
        return numbers.get(before + colon, before + colon) + group if colon else name
    return numbers.get(name) or name.removeprefix(best)
