"""Writes down, as code of plain torch, what a case makes torch do to its model: ``shardproof reproduce`` reads it.

1. :func:`recorded` sets a profile function around a case, on each rank; it is called before each call in Python.
2. ``_called`` keeps the calls of torch that the case, its helpers or the adapter make with a model, an optimizer or a
   state dict among the arguments. What the harness does in order to compare is left out: it says so (``comparing``).
3. ``_take`` writes such a call down, with each argument as an expression (``expressions.py``).
4. The harness's notes (``tensors/notes.py``) say what was drawn, counted, stepped and checked.
5. :meth:`Tape.judged` says by which check the case failed, if it did.
6. The tape of a rank is a JSON file in the folder of the run's instruments (``worlds/instruments.py``).
"""

import contextlib
import functools
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

from shardproof.harness.reproducing.expressions import Expressions
from shardproof.harness.reproducing.sources import Unwritable
from shardproof.harness.tensors import notes

_TORCH = str(pathlib.Path(torch.__file__).parent)
#: Where user code's calls come from, besides the case's own module: as these do what user code does.
_ACTS = ("shardproof.harness.adapters", "shardproof.harness.models", "shardproof.testing", "shardproof.suites")
#: The modules between a function that tells and the tape.
_BETWEEN = (notes.__name__, __name__)
#: Of torch, what reads, or belongs to a call that is written down.
_SMALL = re.compile(
    r"_(?!wrapped_call_impl|_init__)|(named_|get_)?(parameters?|modules?|buffers?|children|submodule)$|register_|is_|"
    r"(add_module|size|full_tensor|to_local|add_param_group|wait|apply)$"
)
#: Whose making is a call of its own, and whose methods are.
_MAKES = (FullyShardedDataParallel, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_OWNERS = (nn.Module, *_MAKES)


class Tape:
    """What one rank did, in order; :attr:`calls` has plain values alone.

    Args:
        module: the name of the case's module.
    """

    def __init__(self, module: str) -> None:
        self.calls: list[dict[str, Any]] = []
        self.expressions = Expressions(lambda entry: self.calls.append(entry | {"step": self._step}))
        self.checked: dict[str, Any] = {}  # the check that began last
        self._checks: types.CodeType | None = None  # the function that makes it
        self._acts = (module, *_ACTS)
        self._awaited: dict[types.FrameType, Callable[[Any], object]] = {}  # what to do when a call returns
        # The contexts of torch that are open, as code, by the frames of their generators; "" of one without code. Where
        # entering one raises, it stays here until the case ends, which it does with the error.
        self._contexts: dict[types.FrameType, str] = {}
        self._inside: types.FrameType | None = None  # the call that is written down; those within it are not
        self._last: types.CodeType | None = None  # the function of torch that was called last
        self._step, self._loss, self._evaluates = 0, None, False
        self._comparing = 0  # how many blocks are open that compare

    def event(self, frame: types.FrameType, event: str, arg: Any) -> None:
        """What ``sys.setprofile`` calls."""
        if event == "return":
            if frame is self._inside:
                self._inside = None
            else:  # of a generator into which an error was thrown, where Python has no event for that
                self._contexts.pop(frame, None)
            if (act := self._awaited.pop(frame, None)) is not None:
                with self._aside():
                    act(arg)
        elif event == "call" and self._inside is None:
            code = frame.f_code
            if code.co_name == "__init__" or code.co_filename.startswith(_TORCH):
                with self._aside():
                    self._called(frame)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Read without being called for it: it is no call of the case."""
        before = sys.getprofile()
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _called(self, frame: Any) -> None:
        code, back = frame.f_code, frame.f_back
        made = _first(frame) if code.co_name == "__init__" else None
        if isinstance(made, nn.Module) and not self.expressions.was_made(made):  # not the __init__ of a base class
            _, args, kwargs = _arguments(frame)
            self.expressions.made[id(made)] = (weakref.ref(made), args[1:], kwargs)
        if self._contexts.pop(frame, None) is not None:  # a generator goes on after its yield: the context ends
            self._inside = frame
        elif code.co_filename.startswith(_TORCH) and not self._comparing and self._is_act(back):
            self._act(frame)

    def _act(self, frame: Any) -> None:
        """Write a call of torch down, if it is of a model, an optimizer or a state dict."""
        code = frame.f_code
        function, args, kwargs = _arguments(frame)
        name = getattr(function, "__name__", code.co_name)
        foreign = not str(getattr(function, "__module__", "")).startswith("torch")
        if (name == "__init__" and not isinstance(args[0], _MAKES)) or foreign or _SMALL.match(name):
            return
        if name != "backward" and not any(map(self.expressions.is_owned, _flat([*args, *kwargs.values()]))):
            return
        self._inside, self._last = frame, code
        try:
            self._take(frame, function, name, args, kwargs)
        except Unwritable as error:
            self.calls.append({"kind": "refused", "name": name, "why": str(error), "step": self._step})

    def _is_act(self, caller: Any) -> bool:
        """Whether a frame is of the case or of what does user code's work, and not of the making of a module."""
        if caller.f_code.co_filename == contextlib.__file__:  # what a context is entered by
            caller = caller.f_back
        module = str(caller.f_globals.get("__name__"))
        if not any(module == one or module.startswith(f"{one}.") for one in self._acts):
            return False
        return not (caller.f_code.co_name == "__init__" and isinstance(_first(caller), nn.Module))

    def _take(self, frame: Any, function: Any, name: str, args: Any, kwargs: Any) -> None:
        """Write a call down."""
        graph, under = torch.is_grad_enabled(), [*filter(None, self._contexts.values())]
        if not graph:
            under.append("torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()")
        entry: dict[str, Any] = {"kind": "call", "name": name, "step": self._step, "under": under, "graph": graph}
        opens = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
        if opens:
            self._contexts[frame] = ""
        rest = self._target(entry, frame, function, name, args, kwargs)
        write = self.expressions.write
        if name.startswith(("get_", "state_dict", "optim_state_dict")) and name.endswith("state_dict"):
            entry["assign"] = called = self._numbered("state")
            self._awaited[frame] = lambda value: self._returned(called, value)
        entry["args"] = [write(one) for one in rest]
        entry["kwargs"] = {key: write(value) for key, value in kwargs.items()}
        if opens:
            words = [*entry["args"], *(f"{key}={value}" for key, value in entry["kwargs"].items())]
            self._contexts[frame] = f"{entry['target']}({', '.join(words)})"
        else:
            self.calls.append(entry)

    def _target(self, entry: dict[str, Any], frame: Any, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Add to a call what is called and what it returns to; return the arguments that are left to write."""
        first, rest = args[0], args[1:]
        write, name_of = self.expressions.write, self.expressions.sources.name
        if name == "_wrapped_call_impl":
            entry |= {"kind": "forward", "target": write(first), "compared": self._evaluates}
            entry |= {"id": len(self.calls), "assign": f"out{len(self.calls)}"}
        elif name == "backward":
            before = [None, *(one["id"] for one in self.calls if one["kind"] == "forward" and one["graph"])]
            entry |= {"kind": "backward", "of": before[-1], "target": ""}
            with contextlib.suppress(Unwritable):
                entry |= {"loss": name_of(self._loss)} if self._loss else {}
        elif name == "__init__":
            entry |= {"target": name_of(type(first)), "assign": self._made_by(frame, first, [*rest, *kwargs.values()])}
        elif isinstance(first, _OWNERS) and inspect.isfunction(inspect.getattr_static(type(first), name, None)):
            entry["target"] = f"{write(first)}.{name}"
        else:
            scope, _, method = function.__qualname__.partition(".")
            owner = name_of(getattr(sys.modules[function.__module__], scope) if method else function)
            entry["target"], rest = f"{owner}.{name}" if method else owner, args
        return rest

    def _made_by(self, frame: Any, made: Any, values: list[Any]) -> str:
        """How a wrapper, an optimizer or a scheduler is called, which takes the place of the module that it wraps."""
        if not isinstance(made, nn.Module):
            called = self._numbered("optim" if isinstance(made, torch.optim.Optimizer) else "scheduler")
            self.expressions.names[id(made)] = (weakref.ref(made), called)
            return called
        where = self.expressions.write(next(one for one in values if isinstance(one, nn.Module)))
        if where in self.expressions.roots:
            self._awaited[frame] = lambda _: self.expressions.roots.update({where: weakref.ref(made)})
        return where

    def _numbered(self, kind: str) -> str:
        return f"{kind}{sum(str(one.get('assign')).rstrip('0123456789') == kind for one in self.calls) or ''}"

    def _returned(self, called: str, value: Any) -> None:
        self.expressions.names[id(value)] = (value, called)
        for number, part in enumerate(value if isinstance(value, tuple) else ()):
            self.expressions.names[id(part)] = (part, f"{called}[{number}]")

    # The harness's notes: a method for each word.

    def note(self, what: str, values: dict[str, Any]) -> None:
        """Hear a note. Of what is done in order to compare, only its end counts."""
        if not self._comparing or what in ("comparing", "end"):
            with self._aside():
                getattr(self, f"_note_{what}")(**values)

    def _note_batch(
        self, drawn: torch.Tensor, step: int, microbatch: int, shape: Any, index: int, mesh: DeviceMesh | None
    ) -> None:
        member = index if mesh is None else mesh.mesh.flatten().tolist().index(index)
        words = [step + 100 * microbatch, f"§{member}§", *shape]
        self.expressions.draw(drawn, f"batch({', '.join(map(str, words))})")

    def _note_mesh(self, mesh: DeviceMesh, shape: Any, names: Any) -> None:
        if id(mesh) not in self.expressions.names:
            self.expressions.names[id(mesh)] = (mesh, called := self._numbered("mesh"))
            code = f"init_device_mesh('cpu', {shape}, mesh_dim_names={names})"
            self.calls.append({"kind": "mesh", "name": "mesh", "step": self._step, "assign": called, "code": code})

    def _note_held(self, count: int, limit: int | None) -> None:
        self.calls.append({"kind": "held", "name": "held", "step": self._step, "limit": limit, "value": count})

    def _note_sharding(self, model: nn.Module) -> None:
        with contextlib.suppress(Unwritable):
            self.expressions.write(model)

    def _note_loss(self, loss: Any) -> None:
        self._loss = loss

    def _note_stepped(self) -> None:
        self._step += 1

    def _note_evaluation(self) -> None:
        self._evaluates = True

    def _note_comparing(self) -> None:
        self._comparing += 1

    def _note_end(self, what: str) -> None:
        self._evaluates = self._evaluates and what != "evaluation"
        self._comparing -= what == "comparing"

    def _note_check(self, kind: str, **values: Any) -> None:
        stack = (one for one, _ in traceback.walk_stack(sys._getframe()))
        self._checks = next(one.f_code for one in stack if one.f_globals.get("__name__") not in _BETWEEN)
        self.checked = {"kind": kind, "count": len(self.calls)}
        if kind == "counts":
            self.checked |= {"step": self._step}
        elif kind == "same":
            known = {key: self.expressions.names.get(id(value)) for key, value in values.items()}
            values = {key: one[1] for key, one in known.items() if one is not None and one[0] is values[key]}
        self.checked |= values

    def _note_read(self, state: Any) -> None:
        self.expressions.names[id(state)] = (state, self._parts(self.checked["count"]))

    def _parts(self, count: int) -> str:
        """The model's and the optimizer's state dict of the calls since."""
        made = {one["name"]: one["assign"] for one in self.calls[count:] if str(one.get("assign")).startswith("state")}
        model = made.get("get_model_state_dict") or made.get("state_dict") or f"{made.get('get_state_dict')}[0]"
        return f"{model}|{made.get('optim_state_dict') or str(made.get('get_state_dict')) + '[1]'}"

    def judged(self, error: BaseException) -> dict[str, Any]:
        """What the failure was judged by."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        codes = {frame.f_code for frame in frames}
        location = getattr(error, "location", None)
        found = {"error": type(error).__name__, "text": str(error).strip(), "kind": "assert"}
        found["where"] = f"{frames[-1].f_code.co_filename}:{frames[-1].f_code.co_name}"
        if location is not None:
            found |= {key: getattr(location, key) for key in ("step", "name", "phase")}
            found["stage"] = location.stage.value
        over = [one for one in self.calls if one["kind"] == "held" and one["value"] > (one["limit"] or one["value"])]
        if self._last in codes and not isinstance(error, AssertionError):
            return found | {"kind": "raise"}
        if over and found.get("stage", "sharding") == "sharding":
            return found | {"kind": "memory", "held": over[-1]}
        return found | (self._failed_check(location is not None) if self._checks in codes else {})

    def _failed_check(self, located: bool) -> dict[str, Any]:
        """What the last check says of itself, in which the case failed; nothing if it has no form in plain torch."""
        its = self.checked
        if its["kind"] == "form":
            return its | {"found": self._parts(its["count"])}
        unknown = its["kind"] == "same" and not {"found", "expected"} <= its.keys()
        return {} if unknown or (its["kind"] == "numbers" and not located) else its


@contextlib.contextmanager
def recorded(folder: pathlib.Path, rank: int, job: Any) -> Iterator[None]:
    """Write down what happens in the context into a folder: an instrument of the rank's job."""
    tape, judged = Tape(job.module), None
    notes.LISTENERS.append(tape.note)
    sys.setprofile(tape.event)
    try:
        yield
    except BaseException as error:
        sys.setprofile(None)
        judged = tape.judged(error)
        raise
    finally:
        sys.setprofile(None)
        notes.LISTENERS.remove(tape.note)
        sources = {"imports": sorted(tape.expressions.sources.imports), "texts": tape.expressions.sources.texts}
        kept = {"rank": rank, "calls": tape.calls, "judged": judged, "sources": sources}
        (folder / f"rank{rank}.json").write_text(json.dumps(kept))


def _first(frame: Any) -> Any:
    """The first argument of a call: of a method, its object."""
    return frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None


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
    if "<locals>" in parts:  # a wrapper has the function that it wraps among its free variables
        free = [values.get(name) for name in frame.f_code.co_freevars]
        function = next((one for one in free if inspect.isfunction(one) and "<locals>" not in one.__qualname__), None)
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
