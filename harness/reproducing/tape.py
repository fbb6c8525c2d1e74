"""Writes down, as code of plain torch, what a case makes torch do to its model: ``shardproof reproduce`` reads it.

1. :func:`recorded` sets a profile function around a case, on each rank; it is called before each call in Python.
2. ``_called`` keeps the calls of torch that the case, its helpers or the adapter make with a model, an optimizer or a
   state dict among the arguments. What the harness reads in order to compare is left out by its place.
3. ``_take`` writes such a call down, with each argument as an expression (``write``); ``sources.py`` adds its source.
4. ``_harness`` reads from calls of the harness's own functions what was drawn, stepped and checked.
5. :meth:`Tape.judged` says by which check the case failed, if it did.
6. The tape of a rank is a JSON file in the folder of the run's instruments (``worlds/instruments.py``).
"""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import pathlib
import re
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from shardproof.harness.tensors import memory
from shardproof.harness.watching.sources import Sources, Unwritable

_TORCH = str(pathlib.Path(torch.__file__).parent)
#: The files whose functions are known here.
_OURS = re.compile("/(harness|shardproof/testing)/")
#: Where user code's calls come from, and what compares, with the methods of adapters that read.
_ACTS = re.compile(r"/(adapters|testing|suites|models)/[^/]*\.py:|/parity/run\.py:")
_COMPARES = re.compile(
    r"/harness/(judging|collectives|tensors)/|/(replay|oracle|comparison|coverage|replicas)\.py:|/adapters/\w+\.py:"
    r"(gradients|parameters|optimizer_state|held_parameters|named_parameters|registered|norm_value)$"
)
#: Of torch, what reads, or belongs to a call that is written down.
_SMALL = re.compile(
    r"_(?!wrapped_call_impl|_init__)|(named_|get_)?(parameters?|modules?|buffers?|children|submodule)$|register_|is_|"
    r"(add_module|size|full_tensor|to_local|add_param_group|wait|apply)$"
)
_COUNTS = ("memory.held_bytes", "memory.settled_bytes")
_CHECKS = {"check_counts": "counts", "read": "form", "check_same": "same"}
#: Whose making is a call of its own, and whose methods are.
_MAKES = (FullyShardedDataParallel, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_OWNERS = (nn.Module, *_MAKES)
_WRAPPED = re.compile(r"_fsdp_wrapped_module\.?")


class Tape:
    """What one rank did, in order; :attr:`calls` has plain values alone."""

    def __init__(self, path: str) -> None:
        self.calls: list[dict[str, Any]] = []
        self.sources = Sources()
        self.checked: dict[str, Any] = {}
        self._path = path
        self._made: dict[int, Any] = {}  # by the id of a module: a reference to it, and with what it was made
        self._roots: dict[str, Any] = {}  # references to models, by their names in the program
        self._names: dict[int, tuple[Any, str]] = {}  # what earlier calls returned, and how it is called
        self._drawn: dict[str, str] = {}  # expressions of inputs, by the digest of their values
        self._awaited: dict[types.FrameType, Callable[[Any], object]] = {}  # what to do when a call returns
        self._contexts: list[str] = []  # of torch, that are open
        self._inside: types.FrameType | None = None  # the call that is written down; those within it are not
        self._step, self._loss, self._evaluates, self._last = 0, None, False, None

    def event(self, frame: types.FrameType, event: str, arg: Any) -> None:
        """What ``sys.setprofile`` calls."""
        if event == "return" and frame is self._inside:
            self._inside = None
        act = self._awaited.pop(frame, None) if event == "return" else None
        if act is not None or (event == "call" and self._inside is None):
            sys.setprofile(None)  # reading arguments is no call of the case
            try:
                self._called(frame) if act is None else act(arg)
            finally:
                sys.setprofile(self.event)

    def _called(self, frame: Any) -> None:
        code, back = frame.f_code, frame.f_back
        made = frame.f_locals.get("self") if code.co_name == "__init__" else None
        if isinstance(made, nn.Module) and self._maker(made) is None:  # not the __init__ of a base class
            _, args, kwargs = _arguments(frame)
            self._made[id(made)] = (weakref.ref(made), args[1:], kwargs)
        if not code.co_filename.startswith(_TORCH):
            return self._harness(frame) if _OURS.search(code.co_filename) else None
        caller = back.f_back if back.f_code.co_filename.endswith("contextlib.py") else back
        acts = caller.f_code.co_filename == self._path or _ACTS.search(_place(caller))
        within = caller.f_code.co_name == "__init__" and isinstance(caller.f_locals.get("self"), nn.Module)
        if not acts or within or _compares(caller):
            return None
        function, args, kwargs = _arguments(frame)
        name = getattr(function, "__name__", code.co_name)
        foreign = not str(getattr(function, "__module__", "")).startswith("torch")
        if (name == "__init__" and not isinstance(args[0], _MAKES)) or foreign or _SMALL.match(name):
            return None
        if name != "backward" and not any(map(self._is_owned, _flat([*args, *kwargs.values()]))):
            return None
        self._inside, self._last = frame, code
        try:
            self._take(frame, function, name, args, kwargs)
        except Unwritable as error:
            self.calls.append({"kind": "refused", "name": name, "why": str(error), "step": self._step})
        return None

    def _take(self, frame: Any, function: Any, name: str, args: Any, kwargs: Any) -> None:
        """Write a call down."""
        opens = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
        if opens and frame.f_lasti > 8:  # the context ends
            del self._contexts[-1:]  # of none if it had no expression
            return
        graph, under = torch.is_grad_enabled(), self._contexts.copy()
        if not graph:
            under.append("torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()")
        entry: dict[str, Any] = {"kind": "call", "name": name, "step": self._step, "under": under, "graph": graph}
        first, rest = args[0], args[1:]
        if name == "_wrapped_call_impl":
            entry |= {"kind": "forward", "target": self.write(first), "compared": self._evaluates}
            entry |= {"id": len(self.calls), "assign": f"out{len(self.calls)}"}
        elif name == "backward":
            before = [None, *(one["id"] for one in self.calls if one["kind"] == "forward" and one["graph"])]
            entry |= {"kind": "backward", "of": before[-1], "target": ""}
            with contextlib.suppress(Unwritable):
                entry |= {"loss": self.sources.name(self._loss)} if self._loss else {}
        elif name == "__init__" and isinstance(first, nn.Module):
            inner = next(one for one in [*rest, *kwargs.values()] if isinstance(one, nn.Module))
            where = self.write(inner)
            entry |= {"target": self.sources.name(type(first)), "assign": where}
            if where in self._roots:
                self._awaited[frame] = lambda _: self._roots.update({where: weakref.ref(first)})
        elif name == "__init__":
            called = self._numbered("optim" if isinstance(first, torch.optim.Optimizer) else "scheduler")
            self._names[id(first)] = (weakref.proxy(first), called)
            entry |= {"target": self.sources.name(type(first)), "assign": called}
        elif isinstance(first, _OWNERS) and inspect.isfunction(inspect.getattr_static(type(first), name, None)):
            entry["target"] = f"{self.write(first)}.{name}"
        else:
            scope, _, method = function.__qualname__.partition(".")
            owner = self.sources.name(getattr(sys.modules[function.__module__], scope) if method else function)
            entry["target"], rest = f"{owner}.{name}" if method else owner, args
        if name.startswith(("get_", "state_dict", "optim_state_dict")) and name.endswith("state_dict"):
            entry["assign"] = called = self._numbered("state")
            self._awaited[frame] = lambda value: self._returned(called, value)
        entry["args"] = [self.write(one) for one in rest]
        entry["kwargs"] = {key: self.write(value) for key, value in kwargs.items()}
        if opens:
            words = [*entry["args"], *(f"{key}={value}" for key, value in entry["kwargs"].items())]
            self._contexts.append(f"{entry['target']}({', '.join(words)})")
        else:
            self.calls.append(entry)

    def _numbered(self, kind: str) -> str:
        return f"{kind}{sum(str(one.get('assign')).rstrip('0123456789') == kind for one in self.calls) or ''}"

    def _returned(self, called: str, value: Any) -> None:
        self._names[id(value)] = (value, called)
        for number, part in enumerate(value if isinstance(value, tuple) else ()):
            self._names[id(part)] = (part, f"{called}[{number}]")

    # The harness's own functions, whose arguments say what was drawn, trained and judged.

    def _harness(self, frame: Any) -> None:
        values, place = frame.f_locals, f"{pathlib.Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
        if place == "rank.batch":
            mesh, index = values["mesh"], values["self"].index
            member = index if mesh is None else mesh.mesh.flatten().tolist().index(index)
            words = [values["step"] + 100 * values["microbatch"], f"§{member}§", *values["shape"]]
            code = f"batch({', '.join(map(str, words))})"
            self._awaited[frame] = lambda drawn: drawn is None or self._drawn.update({_digest(drawn): code})
        elif place == "rank.mesh" and not (values["order"] or values["joined"] or values["keeps"] != "sorted"):
            shape = values["shape"] or (values["self"].world_size,)
            code = f"init_device_mesh('cpu', {shape}, mesh_dim_names={values['names']})"
            self._awaited[frame] = lambda mesh: self._meshed(mesh, code)
        elif place in _COUNTS and frame.f_back.f_code.co_name != "settled_bytes":
            entry = {"kind": "held", "name": "held", "step": self._step, "limit": values.get("limit")}
            self._awaited[frame] = lambda held: self.calls.append(entry | {"value": held})
        elif place == "states.read":
            self.checked = {"kind": "form", "form": values["form"], "count": (count := len(self.calls))}
            self._awaited[frame] = lambda state: self._names.update({id(state): (state, self._parts(count))})
        elif place.partition(".")[2] in _CHECKS:
            self.checked = {"kind": _CHECKS[frame.f_code.co_name], "step": self._step}
            for key, value in values.items():
                if (known := self._names.get(id(value))) is not None or isinstance(value, str):
                    self.checked[key] = value if known is None else known[1]
                elif key == "expected":
                    self.checked[key] = value
        elif _compares(frame):
            return
        elif place == "run._forward":
            self._loss = values["loss"]
        elif place == "run.step":
            self._awaited[frame] = lambda _: setattr(self, "_step", self._step + 1)
        elif place == "run.evaluate":
            self._evaluates = True
            self._awaited[frame] = lambda _: setattr(self, "_evaluates", False)
        elif place.endswith(".__init__") and "/adapters/" in frame.f_code.co_filename and "config" in values:
            with contextlib.suppress(Unwritable):
                self._module(values["model"])

    def _meshed(self, mesh: DeviceMesh, code: str) -> None:
        if id(mesh) not in self._names:
            self._names[id(mesh)] = (mesh, called := self._numbered("mesh"))
            self.calls.append({"kind": "mesh", "name": "mesh", "step": self._step, "assign": called, "code": code})

    def _parts(self, count: int) -> str:
        """The model's and the optimizer's state dict of the calls since."""
        made = {one["name"]: one["assign"] for one in self.calls[count:] if str(one.get("assign")).startswith("state")}
        model = made.get("get_model_state_dict") or made.get("state_dict") or f"{made.get('get_state_dict')}[0]"
        return f"{model}|{made.get('optim_state_dict') or str(made.get('get_state_dict')) + '[1]'}"

    # Values, as expressions.

    def _is_owned(self, value: Any) -> bool:
        if isinstance(value, types.GeneratorType):
            return value.__name__ == "parameters"
        known = self._names.get(id(value), (None, ""))
        return isinstance(value, nn.Module | torch.optim.Optimizer | nn.Parameter) or (
            known[0] is value and not isinstance(value, DeviceMesh | None)
        )

    def write(self, value: Any) -> str:
        """The expression of a value in the program; Unwritable if there is none."""
        known = self._names.get(id(value), (None, ""))
        if value is not None and (known[0] is value or isinstance(known[0], weakref.ProxyType)):
            return known[1].partition("|")[0]
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, nn.Parameter):
            named = ((root, held().named_parameters(remove_duplicate=False)) for root, held in self._roots.items())
            found = ((root, name) for root, parameters in named for name, one in parameters if one is value)
            return next((f"{root}.get_parameter({_WRAPPED.sub('', name)!r})" for root, name in found), "a parameter")
        if type(value) is torch.Tensor and (drawn := self._drawn.get(_digest(value))):
            return drawn + (".requires_grad_()" if value.requires_grad else "")
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, torch.dtype | torch.Size | float) or type(value) in (type(None), bool, int, str):
            return f"float({str(value)!r})" if str(value) in ("inf", "nan") else repr(value)
        if isinstance(value, enum.Enum):
            return f"{self.sources.name(type(value))}.{value.name}"
        if isinstance(value, types.GeneratorType):
            return f"{self.write(inspect.getgeneratorlocals(value)['self'])}.parameters()"
        if isinstance(value, list | tuple | set):
            parts = ", ".join(map(self.write, value))
            return f"[{parts}]" if isinstance(value, list) else f"{type(value).__name__}([{parts}])"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self.write(key)}: {self.write(one)}" for key, one in value.items()) + "}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [one.name for one in dataclasses.fields(value) if getattr(value, one.name) != one.default]
            chosen = ", ".join(f"{name}={self.write(getattr(value, name))}" for name in fields)
            return f"{self.sources.name(type(value))}({chosen})"
        if isinstance(value, type) or inspect.isfunction(value):
            return self.sources.name(value)
        raise Unwritable(f"a {type(value).__name__} among the arguments has no expression")

    def _module(self, module: nn.Module) -> str:
        for root, held in self._roots.items():
            for name, one in () if held() is None else held().named_modules(remove_duplicate=False):
                if one is module:
                    parts = [part for part in _WRAPPED.sub("", name).split(".") if part]
                    inner = ".module" if name.endswith("_fsdp_wrapped_module") else ""
                    return root + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts) + inner
        around = [one for ref, *_ in self._made.values() if (one := ref()) is not None and module in set(one.modules())]
        model = max([module, *around], key=lambda one: len([*one.modules()]))
        root = f"model{len(self._roots) or ''}"
        entry = {"kind": "make", "name": "make", "step": self._step, "root": root, "code": self.made(model)}
        self.calls.append(entry)
        self._roots[root] = weakref.ref(model)
        return self._module(module)

    def made(self, value: Any) -> str:
        """How a module was made, or a value that it was made with."""
        if not isinstance(value, nn.Module):
            return f"[{', '.join(map(self.made, value))}]" if isinstance(value, list | tuple) else self.write(value)
        maker = self._maker(value)
        if maker is None:  # of a copy: the model of its class that was made last, which may be sharded by now
            maker = next((how for ref, *how in reversed(self._made.values()) if isinstance(ref(), type(value))), None)
        if maker is None:
            raise Unwritable(f"how a {type(value).__name__} was made was not seen")
        words = [*map(self.made, maker[0]), *(f"{key}={self.made(one)}" for key, one in maker[1].items())]
        return f"{self.sources.name(type(value))}({', '.join(words)})"

    def _maker(self, module: nn.Module) -> Any:
        made = self._made.get(id(module))
        return made[1:] if made is not None and made[0]() is module else None

    def judged(self, error: BaseException) -> dict[str, Any]:
        """What the failure was judged by."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        places = {_place(frame).rpartition("/")[2] for frame in frames}
        location = getattr(error, "location", None)
        found = {"error": type(error).__name__, "text": str(error).strip(), "kind": "assert"}
        found["where"] = _place(frames[-1])
        if location is not None:
            found |= {key: getattr(location, key) for key in ("step", "name", "phase")}
            found["stage"] = location.stage.value
        over = [one for one in self.calls if one["kind"] == "held" and one["value"] > (one["limit"] or one["value"])]
        if self._last in [frame.f_code for frame in frames] and not isinstance(error, AssertionError):
            return found | {"kind": "raise"}
        if over and found.get("stage", "sharding") == "sharding":
            return found | {"kind": "memory", "held": over[-1]}
        if any(self.checked.get("kind") == _CHECKS.get(place.partition(":")[2]) for place in places if self.checked):
            parts = {"found": self._parts(self.checked["count"])} if "count" in self.checked else {}
            return found | self.checked | parts
        return found | {"kind": "numbers" if "pair.py:check" in places and location is not None else "assert"}


@contextlib.contextmanager
def recorded(folder: pathlib.Path, rank: int, job: Any) -> Iterator[None]:
    """Write down what happens in the context into a folder: an instrument of the rank's job."""
    tape, judged = Tape(job.path), None
    sys.setprofile(tape.event)
    try:
        yield
    except BaseException as error:
        sys.setprofile(None)
        judged = tape.judged(error)
        raise
    finally:
        sys.setprofile(None)
        sources = {"imports": sorted(tape.sources.imports), "texts": tape.sources.texts}
        kept = {"rank": rank, "calls": tape.calls, "judged": judged, "sources": sources}
        (folder / f"rank{rank}.json").write_text(json.dumps(kept))


def _place(frame: Any) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_code.co_name}"


def _compares(frame: Any) -> bool:
    return any(_COMPARES.search(_place(one)) for one, _ in traceback.walk_stack(frame))


def _digest(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(memory.raw_bytes(tensor)).hexdigest()}"


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        yield value
        if isinstance(value, list | tuple | dict):
            yield from _flat(value.values() if isinstance(value, dict) else value)


def _arguments(frame: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """The function of a frame, or that which a wrapper of torch calls, and its arguments without its defaults."""
    names, rest, extra, values = inspect.getargvalues(frame)
    function: Any
    scope, *parts = frame.f_code.co_qualname.split(".")
    if "<locals>" in parts:
        function = values.get("func", values.get("fn"))
    else:
        function = functools.reduce(lambda owner, part: getattr(owner, part, None), parts, frame.f_globals.get(scope))
    known = inspect.signature(function).parameters if hasattr(function, "__code__") else {}
    args, kwargs = [], {}
    for name in names:
        value, default = values[name], known[name].default if name in known else inspect.Parameter.empty
        if default is inspect.Parameter.empty:
            args.append(value)
        elif value is not default and (type(value) is not type(default) or value != default):
            kwargs[name] = value
    return function, [*args, *(values[rest] if rest else ())], kwargs | (values[extra] if extra else {})
