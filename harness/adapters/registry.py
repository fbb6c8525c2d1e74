"""Finds adapters by name: the built-in ones, those that installed packages register, and classes as ``module:Class``.

Importing this module is cheap. The adapters' modules, which import torch and their implementation, are imported by
:func:`load` only.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
import types
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, cast

from shardproof.harness.adapters.capability import Capability

if TYPE_CHECKING:
    from shardproof.harness.adapters.base import Adapter


# Makes one line of limited length of whatever a user's class holds or raises. Imports no torch.


_MOST_CHARACTERS = 200


def one_line(text: str) -> str:
    """Return ``text`` in one line, cut off where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."


def line_of(value: object) -> str:
    """Return a value's representation in one line, or its type where it has none."""
    try:
        return one_line(repr(value))
    except Exception:
        return f"an object of {type(value).__name__}"


def line_of_error(error: BaseException) -> str:
    """Return an error's type and text in one line."""
    try:
        text = one_line(str(error))
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


BUILT_IN = {
    "reference": "shardproof.harness.adapters.reference:ReferenceAdapter",
    "reference.flat": "shardproof.harness.adapters.reference:ReferenceFlatAdapter",
    "torch.fully_shard": "shardproof.harness.adapters.torch_fully_shard:TorchFullyShardAdapter",
    "torch.fsdp": "shardproof.harness.adapters.torch_fsdp:TorchFsdpAdapter",
    "torch.zero_optimizer": "shardproof.harness.adapters.torch_zero_optimizer:TorchZeroOptimizerAdapter",
    "torch.replicate": "shardproof.harness.adapters.replicas:TorchReplicateAdapter",
    "torch.replicate_with_fsdp": "shardproof.harness.adapters.torch_replicate_with_fsdp:TorchReplicateWithFsdpAdapter",
    "deepspeed.zero0": "shardproof.harness.adapters.deepspeed_stages:DeepSpeedZero0Adapter",
    "deepspeed.zero1": "shardproof.harness.adapters.deepspeed_stages:DeepSpeedZero1Adapter",
    "deepspeed.zero2": "shardproof.harness.adapters.deepspeed_stages:DeepSpeedZero2Adapter",
    "deepspeed.zero3": "shardproof.harness.adapters.deepspeed_stages:DeepSpeedZero3Adapter",
    "deepspeed.zero1_overlap": "shardproof.harness.adapters.deepspeed_stages:DeepSpeedZero1OverlapAdapter",
    "deepspeed.zero2_overlap": "shardproof.harness.adapters.deepspeed_stages:DeepSpeedZero2OverlapAdapter",
    "deepspeed.zero3_serial": "shardproof.harness.adapters.deepspeed_stages:DeepSpeedZero3SerialAdapter",
    "torchtitan.simple_fsdp": "shardproof.harness.adapters.torchtitan_simple_fsdp:TorchtitanSimpleFsdpAdapter",
    "lightning.fabric": "shardproof.harness.adapters.lightning_fabric:LightningFabricAdapter",
    "lightning.fabric_fsdp1": "shardproof.harness.adapters.lightning_fabric:LightningFabricFsdp1Adapter",
    "fairscale.sdp": "shardproof.harness.adapters.fairscale:FairscaleSdpAdapter",
    "fairscale.fsdp": "shardproof.harness.adapters.fairscale:FairscaleFsdpAdapter",
    "megatron_fsdp": "shardproof.harness.adapters.megatron_fsdp:MegatronFsdpAdapter",
    "megatron_fsdp.experimental": ("shardproof.harness.adapters.megatron_fsdp:MegatronFsdpExperimentalAdapter"),
    "olmo_core.fsdp": "shardproof.harness.adapters.olmo_core:OlmoCoreAdapter",
    "veomni.fsdp2": "shardproof.harness.adapters.veomni:VeomniAdapter",
    "accelerate.fsdp": "shardproof.harness.adapters.accelerate_fsdp:AccelerateFsdpAdapter",
    "accelerate.fsdp1": "shardproof.harness.adapters.accelerate_fsdp:AccelerateFsdp1Adapter",
    "ddp": "shardproof.harness.adapters.replicas:DdpAdapter",
}
"""The built-in adapters: from the name of the implementation to ``module:Class``."""

OWN_TRAINING = {"own": "shardproof.harness.adapters.base:OwnTraining"}
"""The name under which the user's own training is checked; it is no implementation that could run a case."""

CONTROLS = frozenset({"ddp", "torch.replicate", "torch.replicate_with_fsdp", "deepspeed.zero0"})
"""The built-in adapters that shard nothing on purpose, by name: what is asked of them holds without sharding too."""


GROUP = "shardproof.implementations"
"""The group of the entry points by which installed packages register implementations."""


@dataclasses.dataclass(frozen=True)
class Registered:
    """An entry point of :data:`GROUP`: its ``module:Class``, and the name and the version of its package."""

    target: str
    package: str


def registered() -> Mapping[str, list[Registered]]:
    """Return what installed packages register, by name; several packages may register one name."""
    # A scan of all packages takes milliseconds, and ranks ask in each case.
    return _registered(tuple(sys.path))


@functools.lru_cache(maxsize=1)
def _registered(path: tuple[str, ...]) -> Mapping[str, list[Registered]]:
    found: dict[str, list[Registered]] = {}
    for point in metadata.entry_points(group=GROUP):
        package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown package"
        # Without the extras, which an entry point may name after its target.
        found.setdefault(point.name, []).append(Registered(point.value.partition("[")[0].strip(), package))
    return found


class NotImported(ValueError):
    """An implementation does not import because of a name that torch lacks; one line."""


def load(name: str) -> type[Adapter]:
    """Import and return an adapter class, by a name as for :func:`target_of`.

    Raises:
        ValueError: no adapter has this name or several packages register it, its module cannot be imported, or the
            class is not a complete adapter. The message is one line, with similar names where there are some.
        NotImported: what it imports uses a name that torch lacks.
    """
    module_name, class_name = found(name)
    # A ValueError alone becomes one line: a module may raise anything, such as the SystemExit of user code.
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:
        if _is_about_torch(error):
            raise NotImported(f"{name} does not import: {line_of_error(error)}") from error
        raise ValueError(
            f"implementation {name!r}: module {module_name!r} does not import: {line_of_error(error)}"
        ) from error
    try:
        return _adapter_in(module, name, module_name, class_name)
    except _NoAdapter:
        raise
    except BaseException as error:
        raise ValueError(
            f"implementation {name!r}: {class_name!r} cannot be examined: {line_of_error(error)}"
        ) from error


def target_of(name: str) -> tuple[str, str]:
    """Return the module and the class of a name, without importing anything.

    Args:
        name: a built-in name, one that an installed package registers, or ``module:Class``.

    Raises:
        ValueError: the name is none of these, or several packages register it; one line.
    """
    several = [] if name in BUILT_IN else registered().get(name, [])
    if len(several) > 1:
        packages = " and ".join(one.package for one in several)
        raise ValueError(f"implementation {name!r} is registered by {packages}: uninstall one, or pass module:Class")
    target = several[0].target if several else (BUILT_IN | OWN_TRAINING).get(name, name)
    module_name, colon, class_name = target.partition(":")
    if not colon or not module_name or not class_name:
        is_family = any(one.startswith(f"{name}.") for one in [*BUILT_IN, *registered()])
        if not is_family and (hint := _class_missing(target)):
            raise ValueError(f"implementation {name!r}: {hint}")
        raise ValueError(f"unknown implementation {name!r}: {_suggest(name)}")
    return module_name, class_name


def found(name: str) -> tuple[str, str]:
    """Return the module and the class of a name as :func:`target_of`; its package is there. Imports nothing.

    Raises:
        ValueError: as for :func:`target_of`, or there is no such module; one line that names where it was looked for.
    """
    module_name, class_name = target_of(name)
    top = module_name.partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        searched = f"PYTHONPATH ({os.environ.get('PYTHONPATH') or 'not set'})"
        if not {"", os.getcwd()}.isdisjoint(sys.path):
            searched = f"the current folder ({os.getcwd()}), {searched}"
        raise ValueError(
            f"implementation {name!r}: there is no module {top!r} in {searched} or among the installed packages: run "
            f"in the folder that has it, or add that to PYTHONPATH"
        )
    return module_name, class_name


def is_control(adapter: type[Adapter]) -> bool:
    """Return whether an adapter is one of :data:`CONTROLS` itself; a class derived from one is none."""
    return f"{adapter.__module__}:{adapter.__qualname__}" in {BUILT_IN[name] for name in CONTROLS}


def built_in_with(capability: Capability) -> tuple[str, ...]:
    """Return the names of the built-in implementations that declare a capability and run in any rank process.

    The others, which need packages of their own, cannot be driven beside the implementation of a world.
    """
    adapters = {}
    for name in BUILT_IN:
        with contextlib.suppress(NotImported):
            adapters[name] = load(name)
    return tuple(
        name
        for name, adapter in adapters.items()
        if adapter.traits.isolation == "shared" and capability in adapter.capabilities()
    )


def _is_about_torch(error: BaseException | None) -> bool:
    """Return whether an import failed because torch lacks a module, a name in one, or an attribute."""
    if isinstance(error, ImportError) and (error.name or "").startswith("torch."):
        return True
    if isinstance(error, AttributeError):
        owner = error.obj if isinstance(error.obj, (type, types.ModuleType)) else type(error.obj)
        name = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
        return name.partition(".")[0] == "torch"
    return error is not None and _is_about_torch(error.__cause__)


class _NoAdapter(ValueError):
    """There is no adapter of the name; one line."""


def _adapter_in(module: object, name: str, module_name: str, class_name: str) -> type[Adapter]:
    from shardproof.harness.adapters.base import Adapter

    adapter = getattr(module, class_name, None)
    if adapter is None:
        near = difflib.get_close_matches(class_name, _adapters_of(module), n=3, cutoff=0.0)
        raise _NoAdapter(
            f"implementation {name!r}: module {module_name!r} has no {class_name!r}"
            + (f"; it has {', '.join(near)}" if near else " and no other adapter")
        )
    is_adapter = isinstance(adapter, type) and issubclass(adapter, Adapter)
    if not is_adapter:
        kind = f"the class {adapter.__name__}" if isinstance(adapter, type) else f"of type {type(adapter).__name__}"
        expected = "expected a class derived from shardproof.harness.adapters.base.Adapter"
        raise _NoAdapter(f"implementation {name!r}: {class_name!r} is {kind}; {expected}")
    if lacking := ", ".join(sorted(adapter.__abstractmethods__)):
        raise _NoAdapter(f"implementation {name!r}: the adapter {class_name!r} does not define {lacking}")
    return cast(type[Adapter], adapter)


def _class_missing(target: str) -> str:
    """Return what to pass in place of a module alone, or of ``module.Class``; empty if there is no such module."""
    written = target.partition(":")[0].removesuffix(".py").replace("/", ".").strip(".")
    for module, given in ((written, ""), written.rpartition(".")[::2]):
        if (path := _file_of(module)) is None or (given and given not in _classes_in(path)):
            continue
        found = [given] if given else _classes_in(path)
        named = [one for one in found if one.endswith("Adapter")] or found or ["Class"]
        classes = " or ".join(f"{module}:{one}" for one in named[:3])
        return f"{module!r} is a module; pass the class of the adapter after a colon, as in {classes}"
    return ""


def _file_of(module: str) -> pathlib.Path | None:
    """Return the file of a module without importing anything; None if there is none."""
    spec, path = None, None
    for depth, _ in enumerate(parts := module.split("."), 1):
        if not all(part.isidentifier() for part in parts):
            return None
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            return None
        path = list(spec.submodule_search_locations or [])
    return pathlib.Path(spec.origin) if spec is not None and spec.origin and spec.has_location else None


def _classes_in(path: pathlib.Path) -> list[str]:
    """Return the classes that a file defines at its top level, without importing it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    return [one.name for one in tree.body if isinstance(one, ast.ClassDef) and not one.name.startswith("_")]


def _suggest(name: str) -> str:
    names = dict.fromkeys([*BUILT_IN, *registered()])
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    known = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(names)}."
    return f"{known} Pass your own adapter as module:Class"


def _adapters_of(module: object) -> list[str]:
    from shardproof.harness.adapters.base import Adapter

    return [name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, Adapter)]
