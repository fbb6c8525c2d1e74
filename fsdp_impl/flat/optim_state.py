"""State dicts of optimizers: states by the names of the module without wrappers, whole or sharded, and back.

The optimizer knows the parameters of a unit as one flat parameter or as parts of the original ones. Whatever is as
large as what it knows, such as a momentum, is *laid out* like it, and is gathered and cut as parameters are. Anything
else, such as a number of steps, is the same for all parts and is copied.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_impl.common import dtensor
from fsdp_impl.flat import resharded
from fsdp_impl.flat.names import clean
from fsdp_impl.flat.state_dict import SavedUnit, check_idle, units_with_names

State = dict[str, Any]
ParamGroups = Sequence[dict[str, Any]]


class Place(NamedTuple):
    """What a parameter that an optimizer may know is: part of a unit, or one that no unit has."""

    saved: SavedUnit | None
    indices: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class _LaidOut:
    """Stands for a tensor that is laid out like the parameter, when ranks say what states they have."""

    dtype: torch.dtype


class Table:
    """The parameters of a model as optimizers know them.

    Raises:
        ValueError: if there is no wrapper in the model.
        AssertionError: during forward or backward, and inside ``summon_full_params``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.units = list(units_with_names(model))
        if not self.units:
            raise ValueError(f"Expects a module with FSDP modules but got {type(model)}")
        self._places: dict[int, Place] = {}
        for saved in self.units:
            check_idle(saved.unit)
            shards = saved.group.shards
            shards.adopt()
            if shards.use_orig:
                for index, param in enumerate(shards.originals):
                    self._places[id(param)] = Place(saved, (index,), (saved.names[index],))
            else:
                indices = tuple(range(len(saved.names)))
                self._places[id(shards.flat)] = Place(saved, indices, tuple(saved.names))
        for name, param in model.named_parameters():
            self._places.setdefault(id(param), Place(None, (), (clean(name),)))

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks among which states are exchanged, unless others are named."""
        return self.units[0].unit.ranks.group

    def place(self, param: torch.Tensor) -> Place:
        """Where ``param`` belongs.

        Raises:
            ValueError: if the model does not have it.
        """
        if id(param) not in self._places:
            raise ValueError(
                f"The optimizer has a parameter of shape {tuple(param.shape)} that the model does not have"
            )
        return self._places[id(param)]

    def names(self, groups: ParamGroups) -> list[str]:
        """The names of all parameters in ``groups``."""
        return [name for param in params_of(groups) for name in self.place(param).names]


def groups_of(optim: Any, model: nn.Module) -> ParamGroups:
    """The parameter groups of an optimizer, or of what one could be made from; by default all parameters."""
    if isinstance(optim, torch.optim.Optimizer):
        return optim.param_groups
    given = list(model.parameters() if optim is None else optim)
    return given if given and isinstance(given[0], dict) else [{"params": given}]


def params_of(groups: ParamGroups) -> Iterator[torch.Tensor]:
    """The parameters, in the order of their numbers."""
    for group in groups:
        params = group["params"]
        yield from [params] if isinstance(params, torch.Tensor) else params


# Saving


@torch.no_grad()
def save(
    table: Table,
    groups: ParamGroups,
    given: State,
    *,
    shards: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    process_group: dist.ProcessGroup | None,
) -> State:
    """The state dict ``given`` of an optimizer of ``groups``, by names; with ``shards`` as DTensors. Collective.

    Raises:
        RuntimeError: if a rank's optimizer lacks parameters that the first rank's has.
    """
    process_group = process_group or table.process_group
    check_same_params(table.names(groups), process_group)
    found: dict[str, State] = {}
    per_unit: dict[int, dict[int, State]] = {}
    for number, param in enumerate(params_of(groups)):
        place = table.place(param)
        state = given["state"].get(number, given["state"].get(place.names[0]))
        if place.saved is None:
            if state is not None:
                found[place.names[0]] = {key: copy_of(value) for key, value in state.items()}
        elif state is not None:
            parts = per_unit.setdefault(id(place.saved), {})
            parts |= {index: _part_of_state(place.saved, index, state) for index in place.indices}
    for saved in table.units:
        found |= _whole_states(saved, per_unit.get(id(saved), {}), shards=shards)
    if rank0_only and process_group.rank() != 0:
        return {}
    if offload_to_cpu:
        found = {name: {key: to_cpu(value) for key, value in state.items()} for name, state in found.items()}
    named = [
        {**{key: value for key, value in options.items() if key != "params"}, "params": table.names([group])}
        for group, options in zip(groups, given["param_groups"], strict=True)
    ]
    return {"state": found, "param_groups": named}


def check_same_params(names: Sequence[str], process_group: dist.ProcessGroup) -> None:
    """Every rank's optimizer must have the parameters that the first rank's has. Collective.

    Raises:
        RuntimeError: on all ranks, if one does not.
    """
    everyone: list[Any] = [None] * process_group.size()
    dist.all_gather_object(everyone, list(names), group=process_group)
    missing = [[name for name in everyone[0] if name not in set(other)] for other in everyone]
    if any(missing):
        text = "".join(
            f"\nRank {rank} is missing states for the parameters: {found}"
            for rank, found in enumerate(missing)
            if found
        )
        raise RuntimeError(
            "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer but "
            f"some ranks are missing some of those states{text}"
        )


def _part_of_state(saved: SavedUnit, index: int, state: State) -> State:
    """Of a state of the flat parameter, or of the original one, what is about parameter ``index`` on this rank."""
    shards = saved.group.shards
    span = shards.spans[index]
    if shards.use_orig:
        return {key: value.reshape(-1) if _is_laid_out(value, span.numel) else value for key, value in state.items()}
    return {
        key: value[span.offset : span.offset + span.numel] if _is_laid_out(value, shards.flat.numel()) else value
        for key, value in state.items()
    }


def _is_laid_out(value: Any, numel: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == numel


def _whole_states(saved: SavedUnit, parts: dict[int, State], *, shards: bool) -> dict[str, State]:
    """The states of one unit's parameters from what each rank has of them. Collective."""
    group, spans = saved.group, saved.group.shards.spans
    mine = {
        index: {
            key: _LaidOut(value.dtype) if _is_laid_out(value, spans[index].numel) else value
            for key, value in state.items()
        }
        for index, state in parts.items()
        if spans[index].numel
    }
    known = _merge(mine, group.ranks.shard_group)
    found: dict[str, State] = {saved.names[index]: {} for index in sorted(known)}
    keys = dict.fromkeys((key, kind) for state in known.values() for key, kind in state.items() if _stands_for(kind))
    wholes: dict[Any, list[torch.Tensor]] = {}
    for key, kind in keys:
        shard = torch.zeros_like(group.shards.flat.detach(), dtype=kind.dtype)
        for index, state in parts.items():
            if _is_laid_out(state.get(key), spans[index].numel):
                shard[spans[index].offset : spans[index].offset + spans[index].numel].copy_(state[key])
        wholes[key, kind] = resharded.whole_values(group, shard)
    for index, state in sorted(known.items()):
        for key, kind in state.items():
            value = wholes[key, kind][index] if _stands_for(kind) else None
            if value is None:
                found[saved.names[index]][key] = copy_of(kind)
            else:
                found[saved.names[index]][key] = (
                    resharded.sharded(group, index, value) if shards else resharded.full(value)
                )
    return found


def _stands_for(kind: Any) -> bool:
    return isinstance(kind, _LaidOut)


def _merge(mine: dict[int, State], process_group: dist.ProcessGroup | None) -> dict[int, State]:
    """What any rank says of each parameter; of ranks that say different things, the first."""
    everyone: list[Any] = [mine]
    if process_group is not None:
        everyone = [None] * process_group.size()
        dist.all_gather_object(everyone, _on_cpu(mine), group=process_group)
    known: dict[int, State] = {}
    for states in everyone:
        for index, state in states.items():
            known[index] = {**state, **known.get(index, {})}
    return known


def _on_cpu(states: dict[int, State]) -> dict[int, State]:
    return {index: {key: to_cpu(value) for key, value in state.items()} for index, state in states.items()}


def to_cpu(value: Any) -> Any:
    if isinstance(value, DTensor):
        return dtensor.wrap(dtensor.local_of(value).cpu(), value._spec)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def copy_of(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
