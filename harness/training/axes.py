"""What of a training can be turned off from outside, for ``--off`` and ``--bisect``.

The harness's own axes need nothing of the user: functions of torch are replaced, under each name that a module has for
them, because user code has often imported them before. The user's axes are keyword-only arguments of ``parallelize``.
"""

from __future__ import annotations

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
from torch.nn.parallel import DistributedDataParallel
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

    It is entered before the model is built and left when the training has ended, in each process.

    Attributes:
        off: the names of axes that are off.
        used: the names of those that user code asked for, off or not.
    """

    def __init__(self, off: Iterable[str] = ()) -> None:
        self.off, self.used = frozenset(off), set[str]()
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Switches:
        if "compile" in self.off:
            self._exits.enter_context(torch.compiler.set_stance("force_eager"))
        replaced = {one: made for one, made in self._functions() if one is not None}
        _replace(replaced)
        self._exits.callback(_replace, {made: one for one, made in replaced.items()})
        for owner, name, made in self._methods():
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

        return dataclasses.replace(functions, subject=dataclasses.replace(functions.subject, build=build))

    def _functions(self) -> Iterator[tuple[Any, Callable[..., Any]]]:
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
            policy = kwargs.get("mp_policy")
            if self.is_off("mixed-precision", is_used=any(vars(policy or fsdp.MixedPrecisionPolicy()).get(name)
                           for name in ("param_dtype", "reduce_dtype", "output_dtype"))):  # fmt: skip
                kwargs["mp_policy"] = fsdp.MixedPrecisionPolicy()
            if self.is_off("offload", is_used=isinstance(kwargs.get("offload_policy"), fsdp.CPUOffloadPolicy)):
                del kwargs["offload_policy"]
            if self.is_off("reshard-after-forward", is_used=kwargs.get("reshard_after_forward") is not False):
                kwargs["reshard_after_forward"] = False
            return shard(*args, **kwargs)

        recompute, compile_, shard = checkpoint.checkpoint, torch.compile, fsdp.fully_shard
        # It takes the last one out of its ``kwargs``.
        settings = {*inspect.signature(recompute).parameters, "preserve_rng_state"} - {"function", "args", "kwargs"}
        clip = private.find(_CLIP)
        for function, made in ((recompute, keeping), (compile_, compiling), (clip, clipping), (shard, sharding)):
            yield function, functools.wraps(function)(made)

    def _methods(self) -> Iterator[tuple[type, str, Callable[..., Any]]]:
        def autocast(one: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
            kwargs |= dict(zip(("dtype", "enabled", "cache_enabled"), args, strict=False))
            if self.is_off("mixed-precision", is_used=kwargs.get("enabled", True)):
                kwargs["enabled"] = False
            start(one, device_type, **kwargs)

        def optimizer(one: Any, params: Any, defaults: dict[str, Any]) -> None:
            # None is torch's own choice, which takes lists of tensors on accelerators alone.
            if "foreach" in defaults and self.is_off("foreach", is_used=True):
                defaults |= {name: False for name in ("foreach", "fused") if name in defaults}
            make(one, params, defaults)

        def flat(one: Any, *args: Any, **kwargs: Any) -> None:
            for axis, name in (("mixed-precision", "mixed_precision"), ("offload", "cpu_offload")):
                if self.is_off(axis, is_used=kwargs.get(name) is not None):
                    del kwargs[name]
            wrap(one, *args, **kwargs)

        def replicas(one: Any, *args: Any, **kwargs: Any) -> None:
            if self.is_off("mixed-precision", is_used=kwargs.get("mixed_precision") is not None):
                del kwargs["mixed_precision"]
            replicate(one, *args, **kwargs)

        start, make = torch.autocast.__init__, torch.optim.Optimizer.__init__
        wrap, replicate = fsdp.FullyShardedDataParallel.__init__, DistributedDataParallel.__init__
        yield torch.autocast, "__init__", functools.wraps(start)(autocast)
        yield torch.optim.Optimizer, "__init__", functools.wraps(make)(optimizer)
        yield fsdp.FullyShardedDataParallel, "__init__", functools.wraps(wrap)(flat)
        yield DistributedDataParallel, "__init__", functools.wraps(replicate)(replicas)
        for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
            yield fsdp.FSDPModule, name, self._prefetching(getattr(fsdp.FSDPModule, name))

    def _prefetching(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def prefetch(one: Any, modules: Any) -> Any:
            return method(one, [] if self.is_off("prefetch", is_used=bool(modules)) else modules)

        return prefetch


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
    off = {}
    for name, one in known.items():
        text = one.annotation if isinstance(one.annotation, str) else inspect.formatannotation(one.annotation)
        kinds = [part.strip() for part in text.split("|")]
        value = next((value for kind, value in _OFF.items() if kind in kinds), one.empty)
        if one.default is True or (value is not one.empty and one.default not in (one.empty, value)):
            off[name] = False if one.default is True else value
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
