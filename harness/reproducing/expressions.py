"""Values as code of the program: models by how they were made, inputs by how they were drawn, others as literals."""

import dataclasses
import enum
import hashlib
import inspect
import re
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.harness.reproducing.sources import Sources, Unwritable
from shardproof.harness.tensors import memory

_WRAPPED = re.compile(r"_fsdp_wrapped_module\.?")


class Expressions:
    """How values are called in the program.

    Args:
        add: takes the call that makes a model, before an expression names the model.

    Attributes:
        sources: what expressions need besides torch.
        made: by the id of a module: a reference to it, and the arguments that it was made with.
        roots: references to models, by their names in the program.
        names: what earlier calls returned or made, and how it is called, by its id.
    """

    def __init__(self, add: Callable[[dict[str, Any]], None]) -> None:
        self._add = add
        self.sources = Sources()
        self.made: dict[int, Any] = {}
        self.roots: dict[str, Any] = {}
        self.names: dict[int, tuple[Any, str]] = {}
        self._drawn: dict[str, str] = {}  # expressions of inputs, by the digest of their values

    def draw(self, tensor: torch.Tensor, code: str) -> None:
        """Have an expression stand for all tensors with the values of this one."""
        self._drawn[_digest(tensor)] = code

    def is_owned(self, value: Any) -> bool:
        """Whether a value is of the training: a module, its parameters, an optimizer, or what a call returned."""
        if isinstance(value, types.GeneratorType):
            return value.__name__ == "parameters"
        return isinstance(value, nn.Module | torch.optim.Optimizer | nn.Parameter) or (
            self._name_of(value) is not None and not isinstance(value, DeviceMesh)
        )

    def _name_of(self, value: Any) -> str | None:
        """The name of a value, if it has one; what had its id before, and is gone, gives it none."""
        known, name = self.names.get(id(value), (None, ""))
        known = known() if isinstance(known, weakref.ref) else known
        return name if value is not None and known is value else None

    def write(self, value: Any) -> str:
        """The expression of a value in the program.

        Raises:
            Unwritable: there is none.
        """
        if (name := self._name_of(value)) is not None:
            return name.partition("|")[0]
        if isinstance(value, nn.Module | nn.Parameter):
            return self._module(value) if isinstance(value, nn.Module) else self._parameter(value)
        if type(value) is torch.Tensor and (drawn := self._drawn.get(_digest(value))):
            return drawn + (".requires_grad_()" if value.requires_grad else "")
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, torch.dtype | torch.Size | float) or type(value) in (type(None), bool, int, str):
            return f"float({str(value)!r})" if str(value) in ("inf", "nan") else repr(value)
        if isinstance(value, types.GeneratorType):
            return f"{self.write(inspect.getgeneratorlocals(value)['self'])}.parameters()"
        return self._composed(value)

    def _composed(self, value: Any) -> str:
        """The expression of what consists of others, or has a name of its own."""
        if isinstance(value, enum.Enum):
            return f"{self.sources.name(type(value))}.{value.name}"
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

    def _parameter(self, parameter: nn.Parameter) -> str:
        models = ((root, model) for root, held in self.roots.items() if (model := held()) is not None)
        named = ((root, model.named_parameters(remove_duplicate=False)) for root, model in models)
        found = ((root, name) for root, parameters in named for name, one in parameters if one is parameter)
        return next((f"{root}.get_parameter({_WRAPPED.sub('', name)!r})" for root, name in found), "a parameter")

    def _module(self, module: nn.Module) -> str:
        """The expression of a module, of a model that is made now unless it was."""
        if (place := next(self._places(module), None)) is not None:
            return place
        around = [one for ref, *_ in self.made.values() if (one := ref()) is not None and module in set(one.modules())]
        model = max([module, *around], key=lambda one: len([*one.modules()]))
        root = f"model{len(self.roots) or ''}"
        self._add({"kind": "make", "name": "make", "root": root, "code": self._making(model)})
        self.roots[root] = weakref.ref(model)
        return self._module(module)

    def _places(self, module: nn.Module) -> Iterator[str]:
        for root, held in self.roots.items():
            for name, one in () if held() is None else held().named_modules(remove_duplicate=False):
                if one is module:
                    parts = [part for part in _WRAPPED.sub("", name).split(".") if part]
                    inner = ".module" if name.endswith("_fsdp_wrapped_module") else ""
                    yield root + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts) + inner

    def _making(self, value: Any) -> str:
        """How a module was made, or a value that it was made with."""
        if not isinstance(value, nn.Module):
            return f"[{', '.join(map(self._making, value))}]" if isinstance(value, list | tuple) else self.write(value)
        maker = self.made[id(value)][1:] if self.was_made(value) else None
        if maker is None:  # of a copy: the model of its class that was made last, which may be sharded by now
            maker = next((how for ref, *how in reversed(self.made.values()) if isinstance(ref(), type(value))), None)
        if maker is None:
            raise Unwritable(f"how a {type(value).__name__} was made was not seen")
        words = [*map(self._making, maker[0]), *(f"{key}={self._making(one)}" for key, one in maker[1].items())]
        return f"{self.sources.name(type(value))}({', '.join(words)})"

    def was_made(self, module: nn.Module) -> bool:
        """Whether the making of a module was seen."""
        made = self.made.get(id(module))
        return made is not None and made[0]() is module


def _digest(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(memory.raw_bytes(tensor)).hexdigest()}"
