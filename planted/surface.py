"""The public surface of what the contract is about, and which of it the items of the suites use.

    python -m planted.coverage run FOLDER [options of pytest]    the suites, watched
    python -m planted.surface FOLDER                             surface.md there, from what the runs left

The surface comes from the installed torch by ``inspect``: each public function, class and method of :data:`MODULES`,
each of its arguments, and for each argument the values that its annotation allows (:func:`allowed`): True and False,
each member of an enumeration, None, the boundaries of numbers, each type and container. A call that takes a model has,
besides, each state in which a model may be (:data:`STATES`). A cell is one value of one argument, or one state of one
call; two arguments of one call have common cells where one condition of its source reads both.

A cell counts when :func:`calls`, an instrument of each rank, saw an item make that call with that value in that state.
Cells that no item uses need a row of ``reasons/surface.toml`` with a reason of one of :data:`KINDS`, or are open.

The page has, besides, what the documentation of these names promises, from ``reasons/promises.toml``: with the
requirements that judge it, or open. A docstring without a table there is unread.
"""

import argparse
import ast
import collections
import contextlib
import dataclasses
import enum
import fnmatch
import functools
import importlib
import inspect
import itertools
import json
import math
import os
import pathlib
import sys
import textwrap
import tomllib
import types
import typing
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

from planted import coverage
from planted.coverage import several

#: The modules whose public names are the surface, and the names, where a module has others.
MODULES: dict[str, tuple[str, ...]] = {
    "torch.distributed.fsdp": (),
    "torch.distributed.fsdp.wrap": (
        "CustomPolicy", "ModuleWrapPolicy", "always_wrap_policy", "enable_wrap", "lambda_auto_wrap_policy",
        "size_based_auto_wrap_policy", "transformer_auto_wrap_policy", "wrap",
    ),
    "torch.distributed.fsdp.sharded_grad_scaler": ("ShardedGradScaler",),
    "torch.distributed.checkpoint.state_dict": (),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": (
        "CheckpointImpl", "apply_activation_checkpointing", "checkpoint_wrapper", "offload_wrapper",
    ),
    "torch.distributed._composable": ("checkpoint",),
    "torch.distributed._composable.replicate_with_fsdp": ("replicate", "ReplicateModule"),
    "torch.distributed.optim": ("ZeroRedundancyOptimizer",),
    "torch.nn.utils": ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"),
}  # fmt: skip

#: The states in which a call may meet a model.
STATES = (
    "before the first forward", "between forward and backward", "between backward and step", "after a step",
    "in evaluation", "under no_sync", "on the meta device", "on a subgroup", "under replicas",
    "under tensor parallelism", "compiled", "checkpointed", "tied", "frozen", "with empty shards",
)  # fmt: skip

#: The dtypes that a policy may name.
_DTYPES = ("bfloat16", "float16", "float32")
_INTEGERS, _FLOATS = ("0", "1", "int > 1"), ("0.0", "float < 1", "float >= 1", "inf")


@dataclasses.dataclass(frozen=True)
class PublicCallable:
    """A public function or method, or a class's construction.

    Attributes:
        name: "module.Class.method" as a user writes it.
        arguments: the allowed values of each argument, as labels (:func:`label`).
        code: the code object whose frames are its calls.
        owner: the class whose method it is; None for a function.
        subject: the argument that is the model; "" if it takes none.
        joined: pairs of arguments that one condition of its source reads.
    """

    name: str
    arguments: dict[str, tuple[str, ...]]
    code: types.CodeType
    owner: type | None
    subject: str
    joined: tuple[tuple[str, str], ...]


@functools.cache
def surface() -> dict[str, PublicCallable]:
    """All calls, by name."""
    found: dict[str, PublicCallable] = {}
    for full, thing in _names():
        if inspect.isclass(thing) and not issubclass(thing, enum.Enum):
            for method, function in _methods(thing):
                found |= _call(f"{full}.{method}" if method != "__init__" else full, function, thing)
        elif inspect.isfunction(thing):
            found |= _call(full, thing, None)
    return found


def _names() -> Iterator[tuple[str, Any]]:
    """The public names, with their modules, and what they are."""
    for module, chosen in MODULES.items():
        home = importlib.import_module(module)
        for name in chosen or sorted(home.__all__):
            yield f"{module}.{name}", getattr(home, name, None)


def _methods(owner: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The constructor and the public methods of a class that it does not have from outside of its package."""
    package = ".".join(owner.__module__.split(".")[:2])
    for base in reversed([one for one in owner.__mro__ if one.__module__.startswith(package)]):
        for name, value in vars(base).items():
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
                yield name, function


def _call(name: str, function: Callable[..., Any], owner: type | None) -> dict[str, PublicCallable]:
    plain = inspect.unwrap(function)
    if not inspect.isfunction(plain):
        return {}
    parameters = [
        one for one in inspect.signature(plain).parameters.values()
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) and one.name not in ("self", "cls")
    ]  # fmt: skip
    arguments = {}
    for one in parameters:
        labels = dict.fromkeys(allowed(_hint(one.annotation, plain)))
        if one.default is None or isinstance(one.default, bool | enum.Enum):
            labels |= dict.fromkeys([label(one.default)] + (["True", "False"] if isinstance(one.default, bool) else []))
        arguments[one.name] = tuple(labels)
    names = [*inspect.signature(plain).parameters]
    subject = ""
    if owner is not None and names[:1] == ["self"] and not name.endswith(owner.__name__):
        subject = "self" if issubclass(owner, nn.Module | FSDPModule) else ""
    elif names:
        subject = next((one for one in ("module", "model") if one in names), "")
    return {name: PublicCallable(name, arguments, plain.__code__, owner, subject, tuple(_joined(plain, arguments)))}


def _hint(annotation: Any, function: Any) -> Any:
    """An annotation as a type; text that names what its module imports for type checkers alone means what torch has."""
    if not isinstance(annotation, str):
        return annotation
    known = {
        **vars(typing), **vars(collections.abc), **vars(torch.distributed.fsdp), **function.__globals__,
        "torch": torch, "nn": nn, "DeviceMesh": DeviceMesh, "Module": nn.Module, "ProcessGroup": dist.ProcessGroup,
        "Optimizer": torch.optim.Optimizer, "ShardPlacementFnResult": object,
    }  # fmt: skip
    try:
        return eval(annotation, known)
    except NameError:
        return object


def allowed(annotation: Any) -> Iterator[str]:
    """The labels of the values that an annotation allows; nothing for one that says nothing."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for one in inner:
            yield from allowed(one)
    elif origin is typing.Literal:
        yield from map(repr, inner)
    elif annotation in (None, type(None)):
        yield "None"
    elif annotation is bool:
        yield from ("True", "False")
    elif annotation is int:
        yield from _INTEGERS
    elif annotation is float:
        yield from _FLOATS
    elif annotation is str:
        yield "str"
    elif annotation is torch.dtype:
        yield from _DTYPES
    elif inspect.isclass(origin or annotation):
        yield from _of_class(origin or annotation)


def _of_class(kind: type) -> Iterator[str]:
    if issubclass(kind, enum.Enum):
        yield from (one.name for one in kind)
    elif issubclass(kind, DeviceMesh):
        yield from ("mesh of 1 dimension", "mesh of 2 dimensions")
    elif issubclass(kind, nn.Module):
        yield "module"
    elif issubclass(kind, torch.Tensor):
        yield "tensor"
    elif issubclass(kind, torch.device | torch.optim.Optimizer):
        yield kind.__name__.lower()
    elif kind is collections.abc.Callable:
        yield "function"
    elif kind in (collections.abc.Iterable, collections.abc.Iterator):
        yield from ("list", "empty list", "generator", "set")
    elif issubclass(kind, list | tuple | set | frozenset | dict | collections.abc.Mapping | collections.abc.Sequence):
        word = {"Sequence": "list", "Mapping": "dict", "MutableMapping": "dict"}.get(kind.__name__, kind.__name__)
        yield from (word, f"empty {word}") if word != "tuple" else (word,)
    elif kind is type:
        yield "class"
    elif kind not in (object, typing.Any, inspect.Parameter.empty):
        yield from (one.__name__ for one in (kind, *kind.__subclasses__()))


def label(value: Any) -> str:
    """The label of a value that a call was given."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, int):
        return str(value) if value in (-1, 0, 1) else "int > 1" if value > 1 else "int < -1"
    if isinstance(value, float):
        if math.isnan(value) or value in (0.0, math.inf):
            return str(value)
        return "float < 0" if value < 0 else "float < 1" if value < 1 else "float >= 1"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, DeviceMesh):
        return f"mesh of {value.ndim} dimension{'s' * (value.ndim > 1)}"
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, collections.abc.Iterator):
        return "generator"
    if isinstance(value, list | tuple | set | frozenset | collections.abc.Mapping):
        word = "dict" if isinstance(value, collections.abc.Mapping) else type(value).__name__
        return word if len(value) or word == "tuple" else f"empty {word}"
    if inspect.isclass(value):
        return "class"
    if callable(value) and not dataclasses.is_dataclass(value):
        return "function"
    return type(value).__name__


def _joined(function: Callable[..., Any], arguments: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """Pairs of arguments, each True, False, None or a member, that one condition of the source reads."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return
    few = {name for name, labels in arguments.items() if "True" in labels or "None" in labels}
    pairs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            names = {one.id for one in ast.walk(node.test) if isinstance(one, ast.Name)} & few
            pairs |= set(itertools.combinations(sorted(names), 2))
    yield from sorted(pairs)


# In a rank.


class _Phases:
    """Where models are in their training: which calls they have seen last."""

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    def of(self, model: nn.Module) -> str:
        return self._last.get(model, STATES[0])

    def ran(self, model: nn.Module) -> None:
        self._last[model] = STATES[1]

    def move(self, start: str, end: str) -> None:
        for model, state in list(self._last.items()):
            if state == start:
                self._last[model] = end


def states(model: Any, phase: str) -> set[str]:
    """The states of a model, by what it holds; only reads."""
    if not isinstance(model, nn.Module):
        return set()
    found = {phase}
    modules = [*model.modules()]
    parameters = [value for one in modules for value in one._parameters.values() if value is not None]
    locals_ = [one._local_tensor if isinstance(one, DTensor) else one for one in parameters]
    meshes = [one.device_mesh for one in parameters if isinstance(one, DTensor)]
    older = [one for one in modules if isinstance(one, FullyShardedDataParallel)]
    # The group of a hybrid strategy is that of the shards, and its mesh has an extension as tensor parallelism has.
    replicas = [one for one in older if "HYBRID" in one.sharding_strategy.name]
    groups = [one.process_group for one in older if one not in replicas]
    placements = [one.placements for one in parameters if isinstance(one, DTensor)]
    # Replication alone shards nothing.
    replicated = any(isinstance(one, ReplicateModule) for one in modules)
    handles = [one._handle for one in modules if getattr(one, "_handle", None) is not None]
    flat = [one.flat_param for one in handles]
    pairs = zip(locals_, parameters, strict=True)
    tests = {
        "in evaluation": not model.training,
        "under no_sync": any(map(_waits, modules)),
        "on the meta device": any(one.is_meta for one in locals_),
        "on a subgroup": any(one.size() < dist.get_world_size() for one in [*meshes, *groups])
        and not any(one.ndim > 1 for one in meshes),
        "under replicas": any(len(one) > 1 and any(isinstance(p, Replicate) for p in one) for one in placements)
        or bool(replicas),
        "under tensor parallelism": any(len(one) > 1 and all(p.is_shard() for p in one) for one in placements)
        or (not replicas and any(one._fsdp_extension is not None for one in handles))
        or (replicated and any(any(p.is_shard() for p in one) for one in placements)),
        "compiled": any(one._compiled_call_impl is not None or hasattr(one, "_orig_mod") for one in modules),
        "checkpointed": any(_is_checkpointed(one) for one in modules),
        "tied": len({id(one) for one in parameters}) < len(parameters) or any(one._shared_params for one in flat),
        "frozen": any(not one.requires_grad for one in parameters),
        "with empty shards": any(not mine.numel() and one.numel() for mine, one in pairs)
        # Of a flat parameter of original ones, the padding that aligns them is no element of any.
        or any(
            not any(info.in_shard for info in one._shard_param_infos) for one in flat if hasattr(one, "_local_shard")
        ),
    }
    return found | {name for name, holds in tests.items() if holds}


def _waits(module: nn.Module) -> bool:
    """Whether the gradients of a sharded module are not to be reduced."""
    if isinstance(module, FullyShardedDataParallel):
        return not module._sync_gradients
    if isinstance(module, FSDPModule):
        state = module._get_fsdp_state()
        # One in older torch.
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        return any(group is not None and not group.reduce_grads for group in groups)
    return False


def _is_checkpointed(module: nn.Module) -> bool:
    # By name among all: a wrapper that is a unit has a class of its own.
    wrapped = any(one.__name__ == "CheckpointWrapper" for one in type(module).__mro__)
    return wrapped or "checkpoint" in (_get_registry(module) or ())


class _Recorder:
    """What one process saw, by cell; :meth:`event` is what ``sys.setprofile`` calls."""

    def __init__(self) -> None:
        self._calls: dict[int, list[PublicCallable]] = collections.defaultdict(list)
        for call in surface().values():
            self._calls[id(call.code)].append(call)
        self._phases = _Phases()
        self._moves = {
            id(torch.Tensor.backward.__code__): (STATES[1], STATES[2]),
            id(torch.autograd.backward.__code__): (STATES[1], STATES[2]),
        }
        self._forward = id(nn.Module._call_impl.__code__)
        self.seen: set[tuple[str, str, str]] = set()
        self._told: set[tuple[str, str, str]] = set()

    def event(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        code = id(frame.f_code)
        if code == self._forward:
            self._phases.ran(frame.f_locals["self"])
        elif code in self._moves:
            self._phases.move(*self._moves[code])
        elif frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            self._phases.move(STATES[2], STATES[3])
        if code in self._calls:
            # A generator's frame is called again each time that it goes on.
            if frame.f_code.co_flags & inspect.CO_GENERATOR and frame.f_lineno != frame.f_code.co_firstlineno:
                return
            values = frame.f_locals
            mine = [one for one in self._calls[code] if _is_of(one.owner, values)]
            # Of a method that a class inherits, that of the class which the object is.
            for call in mine:
                if not any(call.owner in other.owner.__mro__[1:] for other in mine if other.owner and call.owner):
                    self._take(call, values)

    def _take(self, call: PublicCallable, values: dict[str, Any]) -> None:
        labels = {name: self._label(call, name, values[name]) for name in call.arguments if name in values}
        self.seen |= {(call.name, name, text) for name, text in labels.items()}
        self.seen.add((call.name, "", ""))
        for one, other in call.joined:
            self.seen.add((call.name, f"{one}, {other}", f"{_few(labels[one])}, {_few(labels[other])}"))
        for name in call.arguments:
            self._fields(values.get(name))
        if call.subject:
            model = values.get(call.subject)
            phase = self._phases.of(model) if isinstance(model, nn.Module) else STATES[0]
            self.seen |= {(call.name, "state", state) for state in states(model, phase)}

    @staticmethod
    def _label(call: PublicCallable, name: str, value: Any) -> str:
        known, found = call.arguments[name], label(value)
        if isinstance(value, int) and found not in known and "inf" in known:
            found = label(float(value))
        if found.startswith("empty "):
            return found
        # Of an object that is callable too, or of user code's own class, the class of the annotation.
        return next((one.__name__ for one in type(value).__mro__ if one.__name__ in known), found)

    def _fields(self, value: Any) -> None:
        """Values of a policy that was made in another process."""
        if dataclasses.is_dataclass(value) and not inspect.isclass(value):
            for name, call in surface().items():
                if name.endswith(f".{type(value).__name__}"):
                    self.seen.add((name, "", ""))
                    self.seen |= {(name, one, label(getattr(value, one))) for one in call.arguments}

    def new(self) -> list[tuple[str, str, str]]:
        found = sorted(self.seen - self._told)
        self._told |= self.seen
        self.seen = set()
        return found


def _is_of(owner: type | None, values: dict[str, Any]) -> bool:
    return owner is None or "self" not in values or isinstance(values["self"], owner)


def _few(text: str) -> str:
    return text if text in ("True", "False", "None") else "a value"


_recorder = functools.cache(_Recorder)


@contextlib.contextmanager
def calls(folder: pathlib.Path, rank: int, job: Any) -> Iterator[None]:
    """Write down the cells that a case is the first of its process to use: an instrument."""
    recorder = _recorder()
    sys.setprofile(recorder.event)
    try:
        yield
    finally:
        sys.setprofile(None)
        with (folder / f"{os.getpid()}.calls").open("a") as file:
            file.write(json.dumps({"item": job.item, "cells": recorder.new()}) + "\n")


# After a run.

#: Reasons why no item uses a cell, by kind.
KINDS = {
    "gpu": "only a GPU has it",
    "made": "the call makes the model, which has no such state before it",
    "refused": "torch refuses it, and one item sees that for all such calls",
    "none": "the call does not look at it, or the value means what another does",
    "private": "the value is of a private type",
    "deprecated": "torch warns that it goes, and what replaces it has the cell",
}
REASONS = pathlib.Path(__file__).parent / "reasons/surface.toml"

Cell = tuple[str, str, str]


def cells() -> list[Cell]:
    """All cells: a call, an argument or "state" or "" for the call alone, and a label."""
    found: list[Cell] = []
    for call in surface().values():
        found.append((call.name, "", ""))
        found += [(call.name, name, text) for name, labels in call.arguments.items() for text in labels]
        found += [(call.name, "state", state) for state in STATES if call.subject]
        for one, other in call.joined:
            pairs = itertools.product(*({_few(text) for text in call.arguments[name]} for name in (one, other)))
            found += [(call.name, f"{one}, {other}", ", ".join(pair)) for pair in sorted(pairs)]
    return found


def used(folder: pathlib.Path) -> dict[Cell, str]:
    """An item that uses each cell, from what the ranks have left in a folder."""
    found: dict[Cell, str] = {}
    for line in coverage.lines_of(folder, "calls"):
        for name, argument, value in line["cells"]:
            found.setdefault((name, argument, value), line["item"])
    return found


@dataclasses.dataclass(frozen=True)
class Promise:
    """A row of ``reasons/promises.toml``, which says what the fields mean."""

    promise: str
    argument: str = ""
    requirement: str | Sequence[str] = ()
    open: str = ""

    @property
    def requirements(self) -> tuple[str, ...]:
        return (self.requirement,) if isinstance(self.requirement, str) else tuple(self.requirement)

    def line(self) -> str:
        """The promise as a line of the page."""
        judged = [*map("`{}`".format, self.requirements), *([f"**open**: {self.open}"] if self.open else [])]
        return f"- promised{f' of `{self.argument}`' if self.argument else ''}: {self.promise} {', '.join(judged)}"


@dataclasses.dataclass(frozen=True)
class Docstring:
    """A table of ``reasons/promises.toml``: the promises of a docstring, or why it has none."""

    promises: tuple[Promise, ...]
    nothing: str = ""

    def lines(self) -> list[str]:
        """The lines of the page."""
        return [f"- promised: nothing ({self.nothing})"] if self.nothing else [one.line() for one in self.promises]


PROMISES = pathlib.Path(__file__).parent / "reasons/promises.toml"


def promises() -> tuple[str, dict[str, Docstring]]:
    """The torch whose documentation was read, and what it promises, by name."""
    table = tomllib.loads(PROMISES.read_text())
    found: dict[str, Docstring] = {}
    for one in table["docstring"]:
        made = Docstring(tuple(Promise(**row) for row in one.get("promises", ())), one.get("nothing", ""))
        if one["in"] in found or bool(made.promises) == bool(made.nothing):
            raise ValueError(f"{PROMISES.name}: {one['in']} needs one table, with promises or with why it has none")
        found[one["in"]] = made
    return table["torch"], found


@functools.cache
def documented() -> dict[str, frozenset[str]]:
    """The names that have a docstring of their own, with their arguments or, of enumerations, their members.

    A method that a class inherits is documented where it comes from.
    """
    things, calls = dict(_names()), surface()
    found: dict[str, frozenset[str]] = {}
    codes: set[types.CodeType] = set()
    for name in {**things, **calls}:
        thing = things.get(name)
        if thing is None:
            owner, _, method = name.rpartition(".")
            thing = getattr(things[owner], method)
        if inspect.isclass(thing):
            text = vars(thing).get("__doc__") or ""
            # That of a dataclass is its signature.
            if text and not text.startswith(f"{thing.__name__}("):
                given = calls[name].arguments if name in calls else ()
                members = [one.name for one in thing] if issubclass(thing, enum.Enum) else given
                found[name] = frozenset(members)
        elif name in calls and calls[name].code not in codes and inspect.getdoc(thing):
            codes.add(calls[name].code)
            found[name] = frozenset(calls[name].arguments)
    return found


def page(saw: dict[Cell, str], rows: list[dict[str, Any]]) -> str:
    """The surface: by call and argument, the values and states that items use, and those that none does."""
    every = cells()
    reasons = {one: _reason(one, rows) for one in every if one not in saw}
    open_ = [one for one, reason in reasons.items() if reason is None]
    lines = ["# The public surface, as items use it", ""]
    lines += [
        f"{len(every) - len(reasons)} of {len(every)} cells are used; {len(reasons) - len(open_)} have a reason "
        f"({(len(reasons) - len(open_)) / len(every):.1%} of all), and {len(open_)} are open.",
    ]
    read, known = promises()[1], documented()
    unread = [name for name in known if name not in read]
    said = [one for name in known if name in read for one in read[name].promises]
    lines += [
        "",
        f"The documentation promises {len(said)} things: {sum(not one.open for one in said)} are judged, "
        f"{sum(bool(one.open and one.requirements) for one in said)} in part, and "
        f"{sum(not one.requirements for one in said)} are open. {len(unread)} docstrings are unread.",
    ]
    other = [name for name in known if name not in surface()]
    for call in other:
        lines += ["", f"## `{call}`", "", *(read[call].lines() if call in read else ["- promised: unread"])]
    for call, mine in itertools.groupby(every, key=lambda one: one[0]):
        lines += ["", f"## `{call}`", ""]
        for argument, values in itertools.groupby(mine, key=lambda one: one[1]):
            texts = [value if cell in saw else f"~~{value}~~ ({reasons[cell] or 'open'})"
                     for cell in values for value in (cell[2] or "the call",)]  # fmt: skip
            lines.append(
                f"- {f'`{argument}`' if argument not in ('', 'state') else argument or 'made'}: {', '.join(texts)}"
            )
        if call in known:
            lines += read[call].lines() if call in read else ["- promised: unread"]
    unused = [row for row in rows if not any(_covers(row, one) for one in reasons)]
    lines += [f"\nA row of {REASONS.name} covers nothing: {row}" for row in unused]
    gone = [name for name in read if name not in known]
    lines += [f"\nA table of {PROMISES.name} is of no docstring of torch {torch.__version__}: {name}" for name in gone]
    return "\n".join(lines) + "\n"


def _covers(row: dict[str, Any], cell: Cell) -> bool:
    call, argument, value = cell
    return (
        any(fnmatch.fnmatchcase(call, one) for one in several(row["call"]))
        and argument in several(row.get("argument", argument))
        and value in several(row.get("value", value))
    )


def _reason(cell: Cell, rows: list[dict[str, Any]]) -> str | None:
    return next((row["kind"] for row in rows if _covers(row, cell)), None)


def reasons() -> list[dict[str, Any]]:
    """The rows of ``reasons/surface.toml``; ValueError for a kind that there is not."""
    return coverage.rows_of(REASONS, "cell", KINDS, "call")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what runs of ``planted.coverage`` have seen of the surface."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    saw = used(options.folder)
    if not saw:
        parser.error(f"{options.folder} has no file of a watched run: python -m planted.coverage run {options.folder}")
    text = page(saw, reasons())
    (options.folder / "surface.md").write_text(text)
    print(text.splitlines()[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
