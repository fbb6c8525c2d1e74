"""State dicts of wrappers: values under the names of the module without wrappers.

``nn.Module`` walks the modules; each wrapper corrects, for the parameters of its own unit, what that walk found or is
about to look for. So wrappers may stand anywhere, also inside modules that are none.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_impl.common import dtensor
from fsdp_impl.common.phase import Phase
from fsdp_impl.flat import resharded
from fsdp_impl.flat.group import FlatGroup
from fsdp_impl.flat.names import WRAPPED, clean
from fsdp_impl.flat.shards import FLAT_PARAM
from fsdp_impl.flat.state_dict_options import FullStateDictConfig, StateDictSettings, StateDictType
from fsdp_impl.flat.unit import FlatUnit


class Key(NamedTuple):
    """One name of one of a unit's parameters, given by its place among them; shared parameters have several."""

    name: str
    param: int


def keys_of(unit: FlatUnit) -> list[Key]:
    """The names of a unit's parameters from its wrapper, without what wrappers add."""
    if unit.group is None:
        return []
    paths: dict[nn.Module, list[str]] = defaultdict(list)
    for path, module in unit.wrapper._fsdp_wrapped_module.named_modules(remove_duplicate=False):
        paths[module].append(clean(path))
    return [
        Key(f"{path}.{owner.name}" if path else owner.name, index)
        for index, owners in enumerate(unit.group.shards.owners)
        for owner in owners
        for path in paths[owner.module]
    ]


def check_idle(unit: FlatUnit) -> None:
    """Refuse to gather in the midst of something.

    Raises:
        AssertionError: during forward or backward, or inside ``summon_full_params``.
    """
    if unit.phase is not Phase.IDLE:
        raise AssertionError("Cannot manually unshard parameters during forward/backward")
    if unit.is_summoned:
        raise AssertionError("Cannot manually unshard parameters when already unsharding parameters")


# Saving


@torch.no_grad()
def finish(unit: FlatUnit, found: dict[str, Any], prefix: str, settings: StateDictSettings) -> None:
    """Turn what the walk through the wrapper left under ``prefix`` into the wrapper's state dict. Collective.

    Raises:
        RuntimeError: for local state dicts of what is not sharded.
    """
    _rename(found, f"{prefix}{WRAPPED}.", prefix)
    if unit.group is not None:
        unit.group.shards.adopt()
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            _put_local(unit, unit.group, found, prefix)
        else:
            _put_named(unit, unit.group, found, prefix, settings.state_dict_type)
    for name, dtype in unit.wrapper._buffer_dtypes.items():
        if isinstance(value := found.get(prefix + name), torch.Tensor) and value.dtype != dtype:
            found[prefix + name] = value.to(dtype)
    config = settings.state_dict_config
    if isinstance(config, FullStateDictConfig) and config.rank0_only and unit.ranks.group.rank() != 0:
        for key in [key for key in found if key.startswith(prefix)]:
            del found[key]
    elif config.offload_to_cpu:
        for key in [key for key in found if key.startswith(prefix)]:
            if isinstance(found[key], torch.Tensor):
                found[key] = found[key].cpu()


def _put_named(unit: FlatUnit, group: FlatGroup, found: dict[str, Any], prefix: str, kind: StateDictType) -> None:
    found.pop(prefix + FLAT_PARAM, None)
    values = resharded.whole_values(group, group.shards.flat)
    for name, index in keys_of(unit):
        if kind is StateDictType.FULL_STATE_DICT:
            found[prefix + name] = resharded.full(values[index])
        else:
            found[prefix + name] = resharded.sharded(group, index, values[index])


def _put_local(unit: FlatUnit, group: FlatGroup, found: dict[str, Any], prefix: str) -> None:
    if not group.shards.is_sharded:
        raise RuntimeError("``local_state_dict`` can only be used when parameters are flatten and sharded.")
    for name, _ in keys_of(unit):
        found.pop(prefix + name, None)
    found[prefix + FLAT_PARAM] = group.shards.flat.detach().clone()


def clean_metadata(found: Any, prefix: str) -> None:
    """The versions that the walk noted go by the same names as the values."""
    metadata = getattr(found, "_metadata", None)
    if metadata is not None:
        _rename(metadata, f"{prefix}{WRAPPED}.", prefix)
        if (own := metadata.pop(prefix + WRAPPED, None)) is not None:
            metadata[prefix[:-1]] = own


# Loading


@torch.no_grad()
def load(
    unit: FlatUnit, given: dict[str, Any], prefix: str, settings: StateDictSettings
) -> tuple[list[str], list[str]]:
    """Take the values of the unit's parameters out of ``given``, and leave what the walk on will find in place.

    A collective for sharded state dicts, and for DTensors in any.

    Returns:
        Names that were missing, and what was wrong with the others.
    """
    missing: list[str] = []
    errors: list[str] = []
    if unit.group is not None:
        unit.group.shards.adopt()
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            _take_local(unit.group, given, prefix, missing, errors)
        else:
            _take_named(unit, unit.group, given, prefix, missing, errors)
    _rename(given, prefix, f"{prefix}{WRAPPED}.")
    if unit.group is not None:
        shards = unit.group.shards
        inner = f"{prefix}{WRAPPED}."
        if shards.use_orig:
            # The walk will copy each to itself.
            given.update({inner + name: shards.originals[index] for name, index in keys_of(unit)})
        else:
            given[inner + FLAT_PARAM] = shards.flat
    return missing, errors


def _take_named(
    unit: FlatUnit, group: FlatGroup, given: dict[str, Any], prefix: str, missing: list[str], errors: list[str]
) -> None:
    for name, index in keys_of(unit):
        value = given.pop(prefix + name, None)
        if value is None:
            missing.append(prefix + name)
            continue
        expected = resharded.full_size(group, index)
        if value.shape != expected:
            errors.append(_mismatch(prefix + name, value.shape, expected))
            continue
        resharded.write(group, index, resharded.local_part(group, index, dtensor.whole(value)))


def _take_local(group: FlatGroup, given: dict[str, Any], prefix: str, missing: list[str], errors: list[str]) -> None:
    value = given.pop(prefix + FLAT_PARAM, None)
    flat = group.shards.flat.detach()
    if value is None:
        missing.append(prefix + FLAT_PARAM)
    elif value.shape != flat.shape:
        errors.append(_mismatch(prefix + FLAT_PARAM, value.shape, flat.shape))
    else:
        flat.copy_(value)


def _mismatch(name: str, found: torch.Size, expected: torch.Size) -> str:
    return (
        f"size mismatch for {clean(name)}: copying a param with shape {found} from checkpoint, the shape in current "
        f"model is {expected}."
    )


def _rename(found: dict[str, Any], old: str, new: str) -> None:
    """Give ``new`` to every key that begins with ``old``, in the order in which they are."""
    for key in [key for key in found if key.startswith(old)]:
        found[new + key[len(old) :]] = found.pop(key)


class SavedUnit(NamedTuple):
    """A unit beside the names of its parameters from the whole model."""

    unit: FlatUnit
    group: FlatGroup
    names: list[str]


def units_with_names(model: nn.Module) -> Iterator[SavedUnit]:
    """The units in ``model`` that have parameters, with their parameters' first names from ``model``."""
    from fsdp_impl.flat.module import FullyShardedDataParallel

    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._unit.group is not None:
            prefix = f"{path}." if clean(path) else ""
            first: dict[int, str] = {}
            for name, index in keys_of(module._unit):
                first.setdefault(index, clean(prefix + name))
            yield SavedUnit(module._unit, module._unit.group, [first[index] for index in range(len(first))])
