"""State dicts of wrappers: values under the names of the module without wrappers.

``nn.Module`` walks the modules; each wrapper corrects, for the parameters of its own unit, what that walk found or is
about to look for. So wrappers may stand anywhere, also inside modules that are none. From flat shards to parameters
whole or sharded along their first dimension, and back, is the second half.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_impl.common import dtensor
from fsdp_impl.common.layout import shard_rows
from fsdp_impl.common.mesh import concatenate
from fsdp_impl.common.private import DTensorSpec, StridedShard, local_shape_and_offset
from fsdp_impl.flat.group import FlatGroup
from fsdp_impl.flat.options import FullStateDictConfig, StateDictSettings, StateDictType
from fsdp_impl.flat.registry import WRAPPED, clean, unit_of, units_in
from fsdp_impl.flat.shards import FLAT_PARAM
from fsdp_impl.flat.unit import FlatUnit


def settings_in(module: nn.Module) -> StateDictSettings:
    """See ``FullyShardedDataParallel.get_state_dict_type``."""
    found = [unit.state_dict_settings for unit in units_in(module)]
    if not found:
        raise ValueError(f"Expects a module with FSDP modules but got {type(module)}")
    for other in found:
        if other != found[0]:
            raise AssertionError(
                f"All FSDP modules must have the same state dict settings. Got {other} and {found[0]}."
            )
    return found[0]


def set_settings(module: nn.Module, settings: StateDictSettings) -> None:
    for unit in units_in(module):
        unit.state_dict_settings = settings


class Key(NamedTuple):
    """One name of one of a unit's parameters, given by its place among them; shared parameters have several."""

    name: str
    param: int


def keys_of(unit: FlatUnit) -> list[Key]:
    """The names of a unit's parameters from its wrapper, without what wrappers add."""
    if unit.group is None:
        return []
    paths: dict[nn.Module, list[str]] = defaultdict(list)
    for path, module in unit.wrapper.get_submodule(WRAPPED).named_modules(remove_duplicate=False):
        paths[module].append(clean(path))
    return [
        Key(f"{path}.{owner.name}" if path else owner.name, index)
        for index, owners in enumerate(unit.group.shards.owners)
        for owner in owners
        for path in paths[owner.module]
    ]


# Saving


@torch.no_grad()
def finish(unit: FlatUnit, found: dict[str, Any], prefix: str) -> None:
    """Turn what the walk through the wrapper left under ``prefix`` into the wrapper's state dict. Collective."""
    settings = unit.state_dict_settings
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    _rename(found, f"{prefix}{WRAPPED}.", prefix)
    if unit.group is not None:
        unit.group.shards.adopt()
        if is_local:
            _put_local(unit, unit.group, found, prefix)
        else:
            _put_named(unit, unit.group, found, prefix, settings.state_dict_type)
    # Buffers that no policy has cast have the dtype that they were given, by a cast of the model too. A local state has
    # them as they are.
    casts_buffers = unit.options.precision.buffer_dtype is not None
    for name, dtype in unit.options.buffer_dtypes.items() if casts_buffers and not is_local else ():
        if isinstance(value := found.get(prefix + name), torch.Tensor) and value.dtype != dtype:
            found[prefix + name] = value.to(dtype)
    config = settings.state_dict_config
    if isinstance(config, FullStateDictConfig) and config.rank0_only and unit.options.ranks.group.rank() != 0:
        for key in [key for key in found if key.startswith(prefix)]:
            del found[key]
    elif config.offload_to_cpu:
        for key in [key for key in found if key.startswith(prefix)]:
            if isinstance(found[key], torch.Tensor):
                found[key] = found[key].cpu()
    _clean_metadata(found, prefix)


def _put_named(unit: FlatUnit, group: FlatGroup, found: dict[str, Any], prefix: str, kind: StateDictType) -> None:
    found.pop(prefix + FLAT_PARAM, None)
    values = whole_values(group, group.shards.flat)
    for name, index in keys_of(unit):
        if kind is StateDictType.FULL_STATE_DICT:
            found[prefix + name] = whole_copy(values[index])
        else:
            found[prefix + name] = sharded_copy(group, index, values[index])


def _put_local(unit: FlatUnit, group: FlatGroup, found: dict[str, Any], prefix: str) -> None:
    if not group.shards.is_sharded:
        raise RuntimeError("``local_state_dict`` can only be used when parameters are flatten and sharded.")
    if group.ranks.mesh is not None:
        raise RuntimeError("DeviceMesh is not compatible with LOCAL_STATE_DICT. Please set SHARDED_STATE_DICT")
    for name, _ in keys_of(unit):
        found.pop(prefix + name, None)
    found[prefix + FLAT_PARAM] = group.shards.flat.detach().clone()


def _clean_metadata(found: Any, prefix: str) -> None:
    """The versions that the walk noted go by the same names as the values."""
    metadata = getattr(found, "_metadata", None)
    if metadata is not None:
        _rename(metadata, f"{prefix}{WRAPPED}.", prefix)
        if (own := metadata.pop(prefix + WRAPPED, None)) is not None:
            metadata[prefix[:-1]] = own


# Loading


@torch.no_grad()
def load(unit: FlatUnit, given: dict[str, Any], prefix: str) -> tuple[list[str], list[str]]:
    """Take the values of the unit's parameters out of ``given``, and leave what the walk on will find in place.

    A collective for sharded state dicts, and for DTensors in any. Returns the names that were missing, and what was
    wrong with others.
    """
    missing: list[str] = []
    errors: list[str] = []
    if unit.group is not None:
        unit.group.shards.adopt()
        unit.group.changes.note()
        if unit.state_dict_settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
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


def clean_keys(module: nn.Module, incompatible: Any) -> None:
    """Take what wrappers add out of the names of missing and unexpected keys, when a wrapper has been loaded.

    The modules inside it found the names under which :func:`load` left what they look for.
    """
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = map(clean, keys)


def _take_named(
    unit: FlatUnit, group: FlatGroup, given: dict[str, Any], prefix: str, missing: list[str], errors: list[str]
) -> None:
    for name, index in keys_of(unit):
        value = given.pop(prefix + name, None)
        if value is None:
            missing.append(prefix + name)
            continue
        expected = full_size(group, index)
        if value.shape != expected:
            errors.append(_mismatch(prefix + name, value.shape, expected))
            continue
        group.shards.put(index, local_part(group, index, dtensor.whole(value)), group.shards.flat.detach())


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
    for path, module in model.named_modules():
        unit = unit_of(module)
        if unit is None or unit.group is None:
            continue
        prefix = f"{path}." if clean(path) else ""
        first: dict[int, str] = {}
        for name, index in keys_of(unit):
            first.setdefault(index, clean(prefix + name))
        yield SavedUnit(unit, unit.group, [first[index] for index in range(len(first))])


# From flat shards to parameters whole or sharded along their first dimension, and back


def whole_values(group: FlatGroup, shard: torch.Tensor) -> list[torch.Tensor]:
    """The parameters, or what is laid out like them, of which ``shard`` is this rank's part. Collective.

    They are views of memory that may be the shard's own; DTensors where the parameters are.
    """
    shard = shard.detach()
    sharded = group.shards.is_sharded or shard.device != group.device
    return group.views(group.gather_full(shard) if sharded else shard)


def whole_copy(value: torch.Tensor) -> torch.Tensor:
    """A whole copy of a value of :func:`whole_values`. Collective over the mesh of a DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()


def full_size(group: FlatGroup, index: int) -> torch.Size:
    """The shape of parameter ``index`` when nothing has cut it."""
    spec = group.shards.specs[index]
    return group.shards.layout.pieces[index].size if spec is None else dtensor.meta_of(spec).shape


def sharded_copy(group: FlatGroup, index: int, value: torch.Tensor) -> DTensor:
    """A value of :func:`whole_values` as a DTensor, of which this rank has a copy of its rows.

    Over the data-parallel mesh (replicas first), and behind it the mesh that the parameter is a DTensor of.
    """
    ranks, spec = group.ranks, group.shards.specs[index]
    local = dtensor.local_of(value) if isinstance(value, DTensor) else value
    start, rows = shard_rows(local.size(0), ranks.size, ranks.rank)
    mesh = ranks.mesh
    if mesh is None:
        if spec is not None:
            raise ValueError("Sharded state dicts of DTensor parameters need a device_mesh, not a process group")
        mesh = DeviceMesh.from_group(ranks.group, group.device.type)
    placements: list[Placement] = [Replicate()] * mesh.ndim
    behind: Sequence[Placement] = () if spec is None else spec.placements
    if ranks.size > 1:
        placements[-1] = _rows(mesh, behind, spec.mesh if spec is not None else None)
    if spec is not None:
        mesh = concatenate([mesh, spec.mesh])
    whole_spec = dtensor.spec_for(mesh, [*placements, *behind], full_size(group, index), value.dtype)
    return dtensor.wrap(local.detach().narrow(0, start, rows).clone(memory_format=torch.contiguous_format), whole_spec)


def _rows(mesh: DeviceMesh, behind: Sequence[Placement], other: DeviceMesh | None) -> Placement:
    """Rows of what the dimensions ``behind`` have cut already."""
    pieces = 1
    for dim, placement in enumerate(behind):
        if isinstance(placement, Shard) and placement.dim == 0 and other is not None:
            pieces *= other.size(dim)
    return StridedShard(0, split_factor=pieces) if pieces > 1 else Shard(0)


def local_part(group: FlatGroup, index: int, whole: torch.Tensor) -> torch.Tensor:
    """What of a ``whole`` tensor the unsharded parameter ``index`` has on this rank: all, unless it is a DTensor."""
    spec = group.shards.specs[index]
    return whole if spec is None else part_of(whole, spec)


def part_of(whole: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """What this rank has of a ``whole`` tensor that is placed as ``spec`` requires."""
    size, offset = local_shape_and_offset(whole.shape, spec.mesh, spec.placements)
    for dim, (length, first) in enumerate(zip(size, offset, strict=True)):
        whole = whole.narrow(dim, min(first, whole.size(dim)), length)
    return whole
