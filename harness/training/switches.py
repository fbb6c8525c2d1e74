"""What of a training can be turned off from outside, for ``--off`` and ``--bisect``.

The harness's own axes need nothing of the user: functions of torch are replaced, under each name that a module has for
them, because user code has often imported them before. The user's axes are keyword-only arguments of ``parallelize``.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.utils import checkpoint

from shardproof.harness.planning.subject import Built
from shardproof.harness.tensors import private
from shardproof.harness.training.request import Functions

#: The harness's own axes that are turned off here, with what each is when it is off. Mesh dimensions and microbatches
#: are of a request.
OWN = {
    "compile": "eager",
    "recomputation": "activations kept",
    "mixed-precision": "float32",
    "clipping": "none",
    "foreach": "one parameter at a time",
    "prefetch": "none",
    "offload": "none",
    "reshard-after-forward": "no",
    "ties": "undone",
}

_CLIP = "torch.nn.utils.clip_grad._clip_grads_with_norm_"


class Switches:
    """Turns axes off while it is entered, and notes which axes the training uses.

    It is entered before the model is built and left when the training has ended, in each process. What is neither off
    nor to be noted is untouched.

    Attributes:
        off: the names of axes that are off.
        used: the names of those that user code asked for, off or not, as far as they are noted.
    """

    def __init__(self, off: Iterable[str] = (), *, notes: bool = False) -> None:
        self.off, self.used = frozenset(off), set[str]()
        self._touched = frozenset(OWN) if notes else self.off
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> "Switches":
        if "compile" in self.off:
            self._exits.enter_context(torch.compiler.set_stance("force_eager"))
        replaced = {one: made for axes, one, made in self._functions() if self._touched.intersection(axes)}
        _replace(replaced)
        self._exits.callback(_replace, {made: one for one, made in replaced.items()})
        for axis, owner, name, made in self._methods():
            if axis in self._touched:
                self._exits.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, made)
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def is_off(self, axis: str, *, is_used: bool = True) -> bool:
        """Note that an axis is used, and return whether it is off."""
        if is_used:
            self.used.add(axis)
        return is_used and axis in self.off

    def untie(self, model: nn.Module) -> None:
        """Give each name of a tied parameter, but the first, a parameter of its own, if ties are off."""
        names: dict[nn.Parameter, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter in names and self.is_off("ties"):
                owner, _, own = name.rpartition(".")
                setattr(model.get_submodule(owner), own, nn.Parameter(parameter.detach().clone()))
            names.setdefault(parameter, name)

    def over(self, functions: Functions) -> Functions:
        """Return the functions of a request, with a model whose ties are undone if they are off."""

        def build(length: int) -> Built:
            built = functions.subject.build(length)
            self.untie(built.model)
            return built

        if "ties" not in self._touched:
            return functions
        return dataclasses.replace(functions, subject=dataclasses.replace(functions.subject, build=build))

    def _functions(self) -> Iterator[tuple[tuple[str, ...], Any, Callable[..., Any]]]:
        """Yield functions with the axes that they are of, and what takes their place."""

        def keeping(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not self.is_off("recomputation"):
                return recompute(function, *args, **kwargs)
            return function(*args, **{name: value for name, value in kwargs.items() if name not in settings})

        def compiling(*args: Any, **kwargs: Any) -> Any:
            self.is_off("compile")
            return compile_(*args, **kwargs)

        def clipping(*args: Any, **kwargs: Any) -> Any:
            return None if self.is_off("clipping") else clip(*args, **kwargs)

        def sharding(*args: Any, **kwargs: Any) -> Any:
            policy = vars(kwargs.get("mp_policy") or fsdp.MixedPrecisionPolicy())
            if self.is_off("mixed-precision", is_used=any(isinstance(one, torch.dtype) for one in policy.values())):
                del kwargs["mp_policy"]
            if self.is_off("offload", is_used=isinstance(kwargs.get("offload_policy"), fsdp.CPUOffloadPolicy)):
                del kwargs["offload_policy"]
            if self.is_off("reshard-after-forward", is_used=kwargs.get("reshard_after_forward") is not False):
                kwargs["reshard_after_forward"] = False
            return shard(*args, **kwargs)

        recompute, compile_, shard = checkpoint.checkpoint, torch.compile, fsdp.fully_shard
        # It takes the last one out of its ``kwargs``.
        settings = {*inspect.signature(recompute).parameters, "preserve_rng_state"} - {"function", "args", "kwargs"}
        yield ("recomputation",), recompute, functools.wraps(recompute)(keeping)
        yield ("compile",), compile_, functools.wraps(compile_)(compiling)
        yield ("mixed-precision", "offload", "reshard-after-forward"), shard, functools.wraps(shard)(sharding)
        if (clip := private.find(_CLIP)) is not None:
            yield ("clipping",), clip, functools.wraps(clip)(clipping)

    def _methods(self) -> Iterator[tuple[str, type, str, Callable[..., Any]]]:
        """Yield methods with their axis, their class and their name, and what takes their place."""

        def autocast(one: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
            kwargs |= dict(zip(("dtype", "enabled", "cache_enabled"), args, strict=False))
            if self.is_off("mixed-precision", is_used=kwargs.get("enabled", True)):
                kwargs["enabled"] = False
            start(one, device_type, **kwargs)

        def optimizer(one: Any, params: Any, defaults: dict[str, Any]) -> None:
            # None is torch's own choice: lists of tensors, on accelerators alone.
            if self.is_off("foreach", is_used="foreach" in defaults):
                defaults |= {name: False for name in ("foreach", "fused") if name in defaults}
            make(one, params, defaults)

        def prefetching(method: Callable[..., Any]) -> Callable[..., Any]:
            def prefetch(one: Any, modules: Any) -> Any:
                return method(one, [] if self.is_off("prefetch", is_used=bool(modules)) else modules)

            return functools.wraps(method)(prefetch)

        start, make = torch.autocast.__init__, torch.optim.Optimizer.__init__
        yield "mixed-precision", torch.autocast, "__init__", functools.wraps(start)(autocast)
        yield "foreach", torch.optim.Optimizer, "__init__", functools.wraps(make)(optimizer)
        for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
            yield "prefetch", fsdp.FSDPModule, name, prefetching(getattr(fsdp.FSDPModule, name))


def _replace(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Replace functions by others in all modules that are imported."""
    by_id = {id(one): made for one, made in functions.items()}
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in by_id:
                    setattr(module, name, by_id[id(value)])


def of_keywords(function: Callable[..., Any] | None, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the axes of a ``parallelize``: keyword-only arguments that are on by default, with their values when off.

    Those are arguments with a default of True, which are off as False, and those with another default whose annotation
    has None, int or bool: off as None, 0 or False. ``given`` adds others, with their values as text.

    Raises:
        ValueError: ``given`` names no keyword-only argument; one line.
    """
    parameters = inspect.signature(function).parameters.values() if function is not None else ()
    known = {one.name: one for one in parameters if one.kind is one.KEYWORD_ONLY}
    off = {name: value for name, one in known.items() if (value := _value_when_off(one)) is not one.empty}
    for name, text in given.items():
        if name not in known:
            raise ValueError(f"--off-as {name}={text}: parallelize has no keyword-only argument of this name; "
                f"it has {', '.join(known) or 'none'}")  # fmt: skip
        try:
            off[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            off[name] = text
    return off


_OFF: dict[str, Any] = {"None": None, "bool": False, "int": 0}


def _value_when_off(argument: inspect.Parameter) -> Any:
    """Return the value with which an argument is off; ``argument.empty`` if it has none, or is off by default."""
    if argument.default is True:
        return False
    annotation = argument.annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    kinds = [part.strip() for part in text.split("|")]
    value = next((value for kind, value in _OFF.items() if kind in kinds), argument.empty)
    return argument.empty if value is argument.empty or argument.default in (argument.empty, value) else value
