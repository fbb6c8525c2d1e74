"""Writes down, as code of plain torch, what a case makes torch do to its model: ``shardproof reproduce`` reads it.

A profile function sees each call that the case, its helpers or the adapter make of a function of torch, with the model,
its optimizer or a state dict among the arguments. What the harness reads in order to compare is left out by its place.
What was judged is read from the arguments of the harness's own checks.
"""

import contextlib
import dataclasses
import enum
import hashlib
import inspect
import itertools
import json
import pathlib
import re
import sys
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

#: The environment variable with the folder in which each rank leaves its tape; unset, nothing is written down.
VARIABLE = "SHARDPROOF_TAPE"

_TORCH = str(pathlib.Path(torch.__file__).parent)
#: Where user code's calls come from, and what compares, with the methods of adapters that read.
_ACTS = re.compile(r"/(adapters|casework|suites|models)/[^/]*\.py:|/parity/run\.py:")
_COMPARES = re.compile(
    r"/harness/(judging|collectives|tensors)/|/(replay|oracle|comparison|coverage|replicas)\.py:|/adapters/\w+\.py:"
    r"(gradients|parameters|optimizer_state|held_parameters|named_parameters|registered|norm_value)$"
)
#: Of torch, what reads, or belongs to a call that is written down.
_SMALL = re.compile(
    r"_(?!wrapped_call_impl|_init__)|(named_|get_)?(parameters?|modules?|buffers?|children|submodule)$|register_|is_|"
    r"(add_module|size|full_tensor|to_local|add_param_group|wait|apply)$"
)
_CHECKS = {"check_counts": "counts", "read": "form", "check_held": "held", "check_same": "same"}
_MAKES = (FullyShardedDataParallel, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_WRAPPED = re.compile(r"_fsdp_wrapped_module\.?")


class Tape:
    """What one rank did, in order; :attr:`calls` has plain values alone."""

    def __init__(self, path: str) -> None:
        self.calls: list[dict[str, Any]] = []
        self.sources = Sources()
        self.checked: dict[str, Any] = {}
        self._path = path
        self._made: dict[int, Any] = {}  # modules, by how they were made
        self._roots: dict[str, Any] = {}
        self._current = ""  # the root that was sharded last
        self._names: dict[int, tuple[Any, str]] = {}  # what earlier calls returned, and how it is called
        self._drawn: dict[str, str] = {}  # inputs by their values
        self._awaited: dict[types.FrameType, Callable[[Any], object]] = {}
        self._inside: types.FrameType | None = None
        self._seeds: set[int] = set()
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
        if isinstance(made, nn.Module) and id(made) not in self._made:
            _, args, kwargs = _arguments(frame)
            self._made[id(made)] = (weakref.ref(made), type(made), args[1:], kwargs, len(self._seeds))
        if not code.co_filename.startswith(_TORCH):
            return self._harness(frame) if "/harness/" in code.co_filename else None
        caller = back.f_back if back.f_code.co_filename.endswith("contextlib.py") else back
        acts = caller.f_code.co_filename == self._path or _ACTS.search(_place(caller))
        within = caller.f_code.co_name == "__init__" and isinstance(caller.f_locals.get("self"), nn.Module)
        if not acts or within or _compares(caller):
            return None
        if code.co_name == "manual_seed":
            self._seeds.add(frame.f_locals["seed"])
        function, args, kwargs = _arguments(frame)
        name = getattr(function, "__name__", code.co_name)
        name = "step" if code.co_filename.endswith("lr_scheduler.py") and name == "wrapper" else name
        foreign = isinstance(function, property) or not str(getattr(function, "__module__", "torch")).startswith(
            "torch"
        )
        if (name == "__init__" and not isinstance(args[0], _MAKES)) or foreign or _SMALL.match(name):
            return None
        if not any(map(self._is_owned, _flat([*args, *kwargs.values()]))):
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
        entry: dict[str, Any] = {"kind": "open" if opens else "call", "name": name, "step": self._step, "under": ""}
        if opens and frame.f_lasti > 8:  # the context ends
            self.calls.append(entry | {"kind": "close"})
            return
        if not torch.is_grad_enabled():
            entry["under"] = "torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()"
        first, rest = args[0], args[1:]
        if name == "_wrapped_call_impl":
            entry |= {
                "kind": "forward",
                "target": self.write(first),
                "id": len(self.calls),
                "compared": self._evaluates,
            }
        elif name == "backward":
            known = self._names.get(id(first), (None, ""))
            before = [one["id"] for one in self.calls if one["kind"] == "forward" and not one["under"]]
            entry |= {"kind": "backward", "of": int(known[1]) if known[0] is first else before[-1], "target": ""}
        elif name == "__init__" and isinstance(first, nn.Module):
            inner = next(one for one in [*rest, *kwargs.values()] if isinstance(one, nn.Module))
            where = self.write(inner)
            entry |= {"target": self.sources.name(type(first)), "assign": where}
            if where in self._roots:
                self._awaited[frame] = lambda _: self._roots.update({where: weakref.ref(first)})
        elif name == "__init__":
            called = self._numbered("optim" if isinstance(first, torch.optim.Optimizer) else "scheduler")
            self._names[id(first)] = (weakref.proxy(first), called)
            entry |= {"target": self.sources.name(type(first)), "assign": called, "both": "optim" in called}
        elif isinstance(first, (nn.Module, *_MAKES)) and hasattr(type(first), name):
            static = isinstance(inspect.getattr_static(type(first), name, None), staticmethod)
            entry["target"] = f"{self.sources.name(type(first)) if static else self.write(first)}.{name}"
            rest = args if static else rest
        else:
            if function is None:
                raise Unwritable("what torch calls by this name is not to be found")
            scope, _, method = function.__qualname__.partition(".")
            entry["target"] = self.sources.name(
                function.__globals__[scope] if method else function
            ) + f".{name}" * bool(method)
            rest = args
        if name.startswith(("get_", "state_dict", "optim_state_dict")) and name.endswith("state_dict"):
            entry["assign"] = called = self._numbered("state")
            self._awaited[frame] = lambda value: self._returned(called, value)
        if name.startswith("clip_grad_norm"):
            entry["assign"] = "norm"
        if name == "fully_shard" or entry.get("target") == "FullyShardedDataParallel":
            self._current = re.split(r"[.\[]", self.write(next(_flat(rest))))[0]
        entry["args"] = [self.write(one) for one in rest]
        entry["kwargs"] = {key: self.write(value) for key, value in kwargs.items()}
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
        if place in ("rank.batch", "rank.tokens"):
            given = dict(values)
            self._awaited[frame] = lambda drawn: self._draws(given, drawn)
        elif place == "rank.mesh":
            odd = values["order"] or values["joined"] or values["keeps"] != "sorted"
            code = f"{values['shape'] or (values['self'].world_size,)}, mesh_dim_names={values['names']}"
            self._awaited[frame] = lambda mesh: self._names.setdefault(id(mesh), (mesh, "!" if odd else f"={code}"))
        elif place.startswith("memory.") and place.endswith("held_bytes") and "memory.py" not in _place(frame.f_back):
            self._awaited[frame] = lambda held: self._counts(held, None)
        elif place == "memory.settled_bytes":
            limit = values["limit"]
            self._awaited[frame] = lambda held: self._counts(held, limit)
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
                elif key == "run":
                    self.checked[key] = [self.write(value.adapter.module), self.write(value.adapter.optimizer)]
        elif _compares(frame):
            return
        elif place == "run._forward":
            self._loss = values["loss"]
            self._awaited[frame] = self._lost
        elif place == "run.step":
            self._awaited[frame] = lambda _: setattr(self, "_step", self._step + 1)
        elif place == "run.evaluate":
            self._evaluates = True
            self._awaited[frame] = lambda _: setattr(self, "_evaluates", False)
        elif place.endswith(".__init__") and "/adapters/" in frame.f_code.co_filename and "config" in values:
            with contextlib.suppress(Unwritable):
                self._module(values["model"])

    def _draws(self, values: dict[str, Any], drawn: Any) -> None:
        if drawn is not None:
            mesh, index = values["mesh"], values["self"].index
            member = index if mesh is None else mesh.mesh.flatten().tolist().index(index)
            words = [values["step"] + 100 * values["microbatch"], f"§{member}§", *values["shape"]]
            kind = f"tokens({values['vocabulary']}, " if "vocabulary" in values else "batch("
            self._drawn[_digest(drawn)] = f"{kind}{', '.join(map(str, words))})"

    def _counts(self, held: int, limit: int | None) -> None:
        self.calls.append({"kind": "held", "name": "held", "step": self._step, "value": held, "limit": limit})

    def _lost(self, found: Any) -> None:
        entry = next(one for one in reversed(self.calls) if one["kind"] == "forward")
        self._names[id(found and found[1])] = (found and found[1], str(entry["id"]))
        with contextlib.suppress(Unwritable):
            entry["loss"] = self.sources.name(self._loss)

    def _parts(self, count: int) -> str:
        """The model's and the optimizer's state dict of the calls since."""
        made = {one["name"]: one["assign"] for one in self.calls[count:] if str(one.get("assign")).startswith("state")}
        model = made.get("get_model_state_dict") or made.get("state_dict") or f"{made.get('get_state_dict')}[0]"
        return f"{model}|{made.get('optim_state_dict') or str(made.get('get_state_dict')) + '[1]'}"

    # Values, as expressions.

    def _is_owned(self, value: Any) -> bool:
        if isinstance(value, nn.Module):
            return not isinstance(value, nn.parallel.DistributedDataParallel)
        if isinstance(value, types.GeneratorType):
            return value.__name__ == "parameters"
        known = self._names.get(id(value), (None, ""))
        return isinstance(value, torch.optim.Optimizer | nn.Parameter) or (
            known[0] is value and not isinstance(value, DeviceMesh | None)
        )

    def write(self, value: Any) -> str:
        """The expression of a value in the program; Unwritable if there is none."""
        known = self._names.get(id(value), (None, ""))
        if isinstance(value, DeviceMesh):
            return self._mesh(value)
        if value is not None and (known[0] is value or isinstance(known[0], weakref.ProxyType)):
            return known[1].partition("|")[0]
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, nn.Parameter):
            named = ((root, held().named_parameters(remove_duplicate=False)) for root, held in self._roots.items())
            found = ((root, name) for root, parameters in named for name, one in parameters if one is value)
            return next((f"{root}.get_parameter({_WRAPPED.sub('', name)!r})" for root, name in found), "a parameter")
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, torch.dtype | torch.Size | float) or type(value) in (type(None), bool, int, str):
            return f"float({str(value)!r})" if str(value) in ("inf", "nan") else repr(value)
        if isinstance(value, pathlib.Path):
            return f"f'{{rendezvous}}.{value.name}'"
        if isinstance(value, enum.Enum):
            return f"{self.sources.name(type(value))}.{value.name}"
        if isinstance(value, types.GeneratorType):
            return f"{self._current or next(reversed(self._roots))}.parameters()"
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
        root, frozen = (
            f"model{len(self._roots) or ''}",
            [n for n, one in model.named_parameters() if not one.requires_grad],
        )
        entry = {"kind": "make", "name": "make", "step": self._step, "root": root, "code": self.made(model)}
        self.calls.append(entry | {"seed": self._made.get(id(model), (0,))[-1], "frozen": frozen})
        self._roots[root] = weakref.ref(model)
        if id(model) in self._made:
            self._made[id(model)] += (_shapes(model),)  # before it is sharded
        return self._module(module)

    def made(self, value: Any) -> str:
        """How a module was made, or a value that it was made with."""
        if not isinstance(value, nn.Module):
            return f"[{', '.join(map(self.made, value))}]" if isinstance(value, list | tuple) else self.write(value)
        found = self._made.get(id(value), (None,))
        if found[0] is None or found[0]() is not value:  # a copy
            alike = (one for one in self._made.values() if one[0]() is not None and isinstance(value, one[1]))
            shapes = _shapes(value)
            found = next((one for one in alike if (one[5] if len(one) > 5 else _shapes(one[0]())) == shapes), (None,))
        if found[0] is None:
            raise Unwritable(f"how a {type(value).__name__} was made was not seen")
        words = [*map(self.made, found[2]), *(f"{key}={self.made(one)}" for key, one in found[3].items())]
        return f"{self.sources.name(found[1])}({', '.join(words)})"

    def _mesh(self, mesh: DeviceMesh) -> str:
        known = self._names.get(id(mesh), (None, "!"))
        if known[1].startswith("="):
            self._names[id(mesh)] = (mesh, called := self._numbered("mesh"))
            code = f"init_device_mesh({mesh.device_type!r}, {known[1][1:]})"
            self.calls.append({"kind": "mesh", "name": "mesh", "step": self._step, "assign": called, "code": code})
            return called
        if not known[1].startswith("!"):
            return known[1]
        raise Unwritable("a mesh is a part of another, has an order of its own, or is made in the case")

    def _tensor(self, value: torch.Tensor) -> str:
        end = ".requires_grad_()" if value.requires_grad and isinstance(value, torch.Tensor) else ""
        plain, dtype = type(value) is torch.Tensor, f", dtype={value.dtype}"
        if plain and (drawn := self._drawn.get(_digest(value)) or self._drawn.get(_digest(value.float()))):
            return drawn + ("" if value.dtype in (torch.float32, torch.int64) else f".to({value.dtype})") + end
        if plain and value.numel() <= 8:
            return f"torch.tensor({value.tolist()}{dtype}){end}"
        if plain and value.is_floating_point():
            return f"torch.randn({tuple(value.shape)}{dtype}){end}"
        raise Unwritable(f"a {type(value).__name__} of {value.dtype} among the arguments has no expression")

    def judged(self, error: BaseException) -> dict[str, Any]:
        """What the failure was judged by."""
        frames = list(_frames(error))
        places = {_place(frame).rpartition("/")[2] for frame in frames}
        location = getattr(error, "location", None)
        found = {
            "error": type(error).__name__,
            "text": str(error).strip(),
            "kind": "assert",
            "where": _place(frames[-1]),
        }
        if location is not None:
            found |= {
                "step": location.step,
                "name": location.name,
                "phase": location.phase,
                "stage": location.stage.value,
            }
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
def recorded(folder: str | None, rank: int, path: str) -> Iterator[None]:
    """Write down what happens in the context into a folder, if there is one."""
    if not folder:
        yield
        return
    tape, judged = Tape(path), None
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
        pathlib.Path(folder, f"rank{rank}.json").write_text(json.dumps(kept))


def _place(frame: Any) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_code.co_name}"


def _frames(error: BaseException) -> Iterator[Any]:
    tb = error.__traceback__
    while tb is not None:
        yield tb.tb_frame
        tb = tb.tb_next


def _compares(frame: Any) -> bool:
    while frame is not None and "/worlds/" not in frame.f_code.co_filename:
        if _COMPARES.search(_place(frame)):
            return True
        frame = frame.f_back
    return False


def _shapes(module: nn.Module) -> list[Any]:
    return [(name, one.shape) for name, one in module.named_parameters()]


def _digest(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(memory.raw_bytes(tensor)).hexdigest()}"


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        yield value
        if isinstance(value, list | tuple | dict):
            yield from _flat(value.values() if isinstance(value, dict) else value)


def _arguments(frame: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """The function of a frame, or that which a wrapper of torch calls, and its arguments without its defaults."""
    code, values = frame.f_code, frame.f_locals
    count, keyword = code.co_argcount, code.co_kwonlyargcount
    given = {name: values[name] for name in code.co_varnames[: count + keyword]}
    rest = list(code.co_varnames[count + keyword :])
    args = [*values[rest.pop(0)]] if code.co_flags & inspect.CO_VARARGS else []
    extra = values[rest.pop(0)] if code.co_flags & inspect.CO_VARKEYWORDS else {}
    function: Any = next(
        (values[name] for name in ("func", "fn") if name in values and "<locals>" in code.co_qualname), None
    )
    if function is None:
        function = frame.f_globals.get(code.co_qualname.split(".")[0])
        for part in code.co_qualname.split(".")[1:]:
            function = getattr(function, part, None)
    known = inspect.signature(function).parameters if hasattr(function, "__code__") else {}
    first = itertools.takewhile(
        lambda one: one not in known or (known[one].default is inspect.Parameter.empty), code.co_varnames[:count]
    )
    args = [given.pop(name) for name in list(first)] + args
    return (
        function,
        args,
        {k: v for k, v in (given | extra).items() if k not in known or not _is_same(v, known[k].default)},
    )


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, bool | int | float | str) and one == other)
