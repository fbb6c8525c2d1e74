"""State dicts of optimizers, by the names of the module without wrappers, made ready for an optimizer of this rank."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_impl.common import dtensor
from fsdp_impl.flat import resharded
from fsdp_impl.flat.optim_state import ParamGroups, Place, State, Table, copy_of, params_of, to_cpu
from fsdp_impl.flat.state_dict import SavedUnit


@torch.no_grad()
def load(
    table: Table,
    groups: ParamGroups,
    given: State,
    *,
    rank0_only: bool = False,
    by_name: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> State:
    """What an optimizer of ``groups`` on this rank can load of the state dict ``given``, which is by names.

    A collective with ``rank0_only``, where the first rank's argument counts alone, and where states are DTensors.
    """
    if rank0_only:
        given = _from_first_rank(given, process_group or table.process_group)
    parts: dict[str, State] = {}
    for saved in table.units:
        for index, name in enumerate(saved.names):
            if name in given["state"]:
                parts[name] = _shard_state(saved, index, given["state"][name])
    found: dict[Any, State] = {}
    own: list[dict[str, Any]] = []
    number = 0
    for group in groups:
        keys = []
        for param in params_of([group]):
            place = table.place(param)
            key: Any = place.names[0] if by_name else number
            number += 1
            keys.append(key)
            state = _state_to_load(place, parts, given["state"])
            if state is not None:
                found[key] = state
        own.append({**_options_for(table.names([group]), group, given["param_groups"]), "params": keys})
    return {"state": found, "param_groups": own}


def _from_first_rank(given: State, process_group: dist.ProcessGroup) -> State:
    sent: list[Any] = [None]
    if process_group.rank() == 0:
        states = {
            name: {key: to_cpu(_whole(value)) for key, value in state.items()} for name, state in given["state"].items()
        }
        sent = [{**given, "state": states}]
    dist.broadcast_object_list(sent, group_src=0, group=process_group)
    received: State = sent[0]
    return received


def _whole(value: Any) -> Any:
    return dtensor.whole(value) if isinstance(value, torch.Tensor) else value


def _shard_state(saved: SavedUnit, index: int, state: State) -> State:
    """This rank's part of what is laid out like parameter ``index``, where its shards live; the rest as it is."""
    found: State = {}
    size, home = resharded.full_size(saved.group, index), saved.group.shards.flat.device
    for key, value in state.items():
        value = _whole(value)
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == size:
            local = resharded.local_part(saved.group, index, value)
            found[key] = _Part(saved.group.shards.cut_one(index, local).to(home, copy=True))
        else:
            found[key] = copy_of(value)
    return found


class _Part(NamedTuple):
    """This rank's part of something that is laid out like a parameter."""

    tensor: torch.Tensor


def _state_to_load(place: Place, parts: dict[str, State], given: dict[str, State]) -> State | None:
    if place.saved is None:
        state = given.get(place.names[0])
        return None if state is None else {key: copy_of(_whole(value)) for key, value in state.items()}
    shards = place.saved.group.shards
    states = {index: parts[name] for index, name in zip(place.indices, place.names, strict=True) if name in parts}
    if not states:
        return None
    if not shards.use_orig:
        return _joined(place.saved, states)
    ((index, state),) = states.items()
    if shards.spans[index].numel == 0:
        # No gradient ever comes here, so the optimizer keeps nothing.
        return None
    size = shards.originals[index].size()
    return {key: value.tensor.view(size) if isinstance(value, _Part) else value for key, value in state.items()}


def _joined(saved: SavedUnit, states: dict[int, State]) -> State:
    """The state of the flat parameter; zeros where a parameter has none."""
    shards = saved.group.shards
    found: State = {}
    for index, state in states.items():
        span = shards.spans[index]
        for key, value in state.items():
            if not isinstance(value, _Part):
                found.setdefault(key, value)
                continue
            if key not in found:
                found[key] = torch.zeros_like(shards.flat.detach(), dtype=value.tensor.dtype)
            found[key][span.offset : span.offset + span.numel].copy_(value.tensor)
    return found


def _options_for(names: Sequence[str], own: dict[str, Any], given: ParamGroups) -> dict[str, Any]:
    """The options of the group that had these parameters when they were saved; the optimizer's own if none had."""
    for group in given:
        if set(names) & set(group["params"]):
            return {key: value for key, value in group.items() if key != "params"}
    return {key: value for key, value in own.items() if key != "params"}
