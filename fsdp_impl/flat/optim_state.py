"""State dicts of optimizers: states by the names of the module without wrappers, whole or sharded, and back.

The optimizer has the parameters of a unit as one flat parameter or as parts of the original ones. Whatever is as
large as what it has, such as a momentum, is *laid out* like it, and is gathered and cut as parameters are. Anything
else, such as a number of steps, is the same for all parts and is copied.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_impl.common import dtensor
from fsdp_impl.flat.group import FlatGroup
from fsdp_impl.flat.options import FullOptimStateDictConfig, StateDictSettings, StateDictType
from fsdp_impl.flat.registry import clean
from fsdp_impl.flat.state_dict import (
    SavedUnit,
    full_size,
    local_part,
    part_of,
    settings_in,
    sharded_copy,
    units_with_names,
    whole_copy,
    whole_values,
)

State = dict[str, Any]
ParamGroups = Sequence[dict[str, Any]]


class OptimStateKeyType(Enum):
    """What an optimizer's state dict calls its parameters."""

    PARAM_NAME = auto()
    """By their names."""
    PARAM_ID = auto()
    """By their numbers, in the order of the optimizer's parameter groups."""


@dataclass(frozen=True)
class Form:
    """What a saved state dict of an optimizer consists of: DTensors or whole tensors, of which ranks, and where."""

    shards: bool
    rank0_only: bool
    offload_to_cpu: bool


def form_of(settings: StateDictSettings) -> Form:
    """The form that a user has set; a ``NotImplementedError`` for ``LOCAL_STATE_DICT``."""
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        raise NotImplementedError(
            "A local state dict of an optimizer is its own: save optim.state_dict(), and load it as it is"
        )
    config = settings.optim_state_dict_config
    return Form(
        shards=settings.state_dict_type is StateDictType.SHARDED_STATE_DICT,
        rank0_only=isinstance(config, FullOptimStateDictConfig) and config.rank0_only,
        offload_to_cpu=config.offload_to_cpu,
    )


class OptimizerParameter(NamedTuple):
    """What a parameter of an optimizer is: part of a unit, or one that no unit has."""

    saved: SavedUnit | None
    indices: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class _LaidOut:
    """Stands for a tensor that is laid out like the parameter, when ranks exchange what states they have."""

    dtype: torch.dtype


class Table:
    """The parameters of a model as optimizers have them; a ``ValueError`` if there is no wrapper in it."""

    def __init__(self, model: nn.Module) -> None:
        self.units = list(units_with_names(model))
        if not self.units:
            raise ValueError(f"Expects a module with FSDP modules but got {type(model)}")
        self._parameters: dict[int, OptimizerParameter] = {}
        for saved in self.units:
            saved.unit.check_idle()
            shards = saved.group.shards
            shards.adopt()
            if shards.use_orig:
                for index, param in enumerate(shards.originals):
                    self._parameters[id(param)] = OptimizerParameter(saved, (index,), (saved.names[index],))
            else:
                indices = tuple(range(len(saved.names)))
                self._parameters[id(shards.flat)] = OptimizerParameter(saved, indices, tuple(saved.names))
        self._names = {id(param): clean(name) for name, param in model.named_parameters()}
        for key, name in self._names.items():
            self._parameters.setdefault(key, OptimizerParameter(None, (), (name,)))

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self.units[0].unit.options.ranks.group

    def parameter(self, param: torch.Tensor) -> OptimizerParameter:
        """Where ``param`` belongs; a ``ValueError`` if the model does not have it."""
        if id(param) not in self._parameters:
            raise ValueError(
                f"The optimizer has a parameter of shape {tuple(param.shape)} that the model does not have"
            )
        return self._parameters[id(param)]

    def state_of(self, number: int, param: torch.Tensor, given: dict[Any, State]) -> State | None:
        """What ``given`` has of ``param``, by its number or, of an optimizer that names parameters, by its name."""
        return given.get(number, given.get(self._names.get(id(param), self.parameter(param).names[0])))

    def managed_names(self, groups: ParamGroups) -> list[str]:
        """The names of those parameters in ``groups`` that units have; others may be on some ranks only."""
        parameters = map(self.parameter, params_of(groups))
        return [name for parameter in parameters if parameter.saved is not None for name in parameter.names]

    def names(self, groups: ParamGroups) -> list[str]:
        return [name for param in params_of(groups) for name in self.parameter(param).names]


def groups_of(optim: Any, model: nn.Module) -> ParamGroups:
    """The parameter groups of an optimizer, or of what one could be made from; by default all parameters."""
    if isinstance(optim, torch.optim.Optimizer):
        return optim.param_groups
    given = list(model.parameters() if optim is None else optim)
    if optim is not None and not given:
        raise ValueError("Optimizer input should not be empty")
    kinds = {
        dict if isinstance(one, dict) else torch.Tensor if isinstance(one, torch.Tensor) else None for one in given
    }
    if len(kinds) > 1 or None in kinds:
        raise TypeError("Optimizer input should be an iterable of Tensors or dicts")
    return given if dict in kinds else [{"params": given}]


def params_of(groups: ParamGroups) -> Iterator[torch.Tensor]:
    """The parameters, in the order of their numbers."""
    for group in groups:
        params = group["params"]
        yield from [params] if isinstance(params, torch.Tensor) else params


# Saving


@torch.no_grad()
def save(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    given: State | None,
    form: Form,
    process_group: dist.ProcessGroup | None,
) -> State:
    """The state dict ``given`` of ``optim``, its own by default, by names; without groups if it has none. Collective.

    Parameters that no unit has, and their states, are each rank's own.
    """
    table = Table(model)
    groups = groups_of(optim, model)
    given = optim.state_dict() if given is None else given
    states = {clean(key) if isinstance(key, str) else key: state for key, state in given["state"].items()}
    process_group = process_group or table.process_group
    check_same_params(table.managed_names(groups), process_group)
    found: dict[str, State] = {}
    per_unit: dict[int, dict[int, State]] = {}
    for number, param in enumerate(params_of(groups)):
        parameter = table.parameter(param)
        state = table.state_of(number, param, states)
        if parameter.saved is None:
            if state is not None:
                found[parameter.names[0]] = {key: copy_of(value) for key, value in state.items()}
        elif state is not None:
            parts = per_unit.setdefault(id(parameter.saved), {})
            parts |= {index: _part_of_state(parameter.saved, index, state) for index in parameter.indices}
    for saved in table.units:
        found |= _whole_states(saved, per_unit.get(id(saved), {}), shards=form.shards)
    if form.rank0_only and process_group.rank() != 0:
        return {}
    if form.offload_to_cpu:
        found = {name: {key: to_cpu(value) for key, value in state.items()} for name, state in found.items()}
    if "param_groups" not in given:
        return {"state": found}
    named = [
        {**{key: value for key, value in options.items() if key != "params"}, "params": table.names([group])}
        for group, options in zip(groups, given["param_groups"], strict=True)
    ]
    return {"state": found, "param_groups": named}


def check_same_params(names: Sequence[str], process_group: dist.ProcessGroup) -> None:
    """Raise a ``RuntimeError`` on all ranks if one's optimizer lacks parameters of the first one's. Collective."""
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
        return {
            key: shards.elements(index, value) if _is_laid_out(value, span.numel) else value
            for key, value in state.items()
        }
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
    for beside in _groups_beside(group):
        # A rank may have nothing of a parameter, of which all make a whole copy together.
        known = _merge(known, beside)
    found: dict[str, State] = {saved.names[index]: {} for index in sorted(known)}
    items = [item for state in known.values() for item in state.items()]
    keys = dict.fromkeys((key, kind) for key, kind in items if isinstance(kind, _LaidOut))
    wholes: dict[Any, list[torch.Tensor]] = {}
    for key, kind in keys:
        shard = torch.zeros_like(group.shards.flat.detach(), dtype=kind.dtype)
        for index, state in parts.items():
            if _is_laid_out(state.get(key), spans[index].numel):
                shard[spans[index].offset : spans[index].offset + spans[index].numel].copy_(state[key])
        wholes[key, kind] = whole_values(group, shard)
    for index, state in sorted(known.items()):
        for key, kind in state.items():
            value = wholes[key, kind][index] if isinstance(kind, _LaidOut) else None
            if value is None:
                found[saved.names[index]][key] = copy_of(kind)
            else:
                found[saved.names[index]][key] = sharded_copy(group, index, value) if shards else whole_copy(value)
    return found


def _groups_beside(group: FlatGroup) -> list[dist.ProcessGroup]:
    """Those of the meshes that parameters of ``group`` are DTensors on, in one order on all ranks."""
    meshes = dict.fromkeys(spec.mesh for spec in group.shards.specs if spec is not None)
    return list(dict.fromkeys(mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim) if mesh.size(dim) > 1))


def _merge(mine: dict[int, State], process_group: dist.ProcessGroup | None) -> dict[int, State]:
    """The states of each parameter from all ranks; where they differ, those of the first rank."""
    everyone: list[Any] = [mine]
    if process_group is not None:
        everyone = [None] * process_group.size()
        sent = {index: {key: to_cpu(value) for key, value in state.items()} for index, state in mine.items()}
        dist.all_gather_object(everyone, sent, group=process_group)
    known: dict[int, State] = {}
    for states in everyone:
        for index, state in states.items():
            known[index] = {**state, **known.get(index, {})}
    return known


def to_cpu(value: Any) -> Any:
    if isinstance(value, DTensor):
        return dtensor.wrap(dtensor.local_of(value).cpu(), value._spec)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def copy_of(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


# Loading


@torch.no_grad()
def load(
    model: nn.Module,
    optim: Any,
    given: State,
    *,
    rank0_only: bool = False,
    by_name: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> State:
    """What ``optim`` on this rank, given as to :func:`groups_of`, can load of the state dict ``given`` by names.

    Parameters that no saved group lists are left out: the caller adds them to groups and state, with their numbers.

    A collective with ``rank0_only``, where the first rank's argument counts alone, and where states are DTensors. These
    are a ``ValueError`` on all ranks with ``rank0_only``, if they are spread over ranks that take no part.
    """
    table = Table(model)
    groups = groups_of(optim, model)
    if "state" not in given and not rank0_only:
        raise ValueError('`optim_state_dict` must have the key "state" to be a valid optimizer state dict')
    if rank0_only:
        given = _from_first_rank(given, process_group or table.process_group)
    parts: dict[str, State] = {}
    for saved in table.units:
        for index, name in enumerate(saved.names):
            if name in given["state"]:
                parts[name] = _shard_state(saved, index, given["state"][name])
    saved_groups = given.get("param_groups", ())
    listed = {name for group in saved_groups for name in group["params"]}
    found: dict[Any, State] = {}
    own: list[dict[str, Any]] = []
    # Such an optimizer was given the model's named parameters, whose names have those of wrappers.
    shown: dict[torch.Tensor, str] = {param: name for name, param in model.named_parameters()} if by_name else {}
    number = 0
    for group in groups:
        keys = []
        for param in params_of([group]):
            parameter = table.parameter(param)
            key: Any = shown.get(param, parameter.names[0]) if by_name else number
            number += 1
            if not listed.isdisjoint(parameter.names):
                keys.append(key)
            state = _state_to_load(param, parameter, parts, given["state"])
            if state is not None:
                found[key] = state
        own.append({**_options_for(table.names([group]), group, saved_groups), "params": keys})
    # What is no dict of states is user code's own.
    found |= {key: copy_of(value) for key, value in given["state"].items() if not isinstance(value, dict)}
    return {"state": found, "param_groups": own} if "param_groups" in given else {"state": found}


def _from_first_rank(given: State, process_group: dist.ProcessGroup) -> State:
    sent: list[Any] = [None]
    if process_group.rank() == 0 and (name := _first_over(given, process_group)) is not None:
        sent = [name]
    elif process_group.rank() == 0:
        states = {
            name: {key: to_cpu(_whole(value)) for key, value in state.items()} for name, state in given["state"].items()
        }
        sent = [{**given, "state": states}]
    dist.broadcast_object_list(sent, group_src=0, group=process_group)
    if isinstance(sent[0], str):
        raise ValueError(
            f"The first rank's optimizer state of {sent[0]} is a DTensor over ranks that it is sent to, which take no "
            "part in making it whole: load it without rank0_only, or save a full state dict"
        )
    received: State = sent[0]
    return received


def _first_over(given: State, process_group: dist.ProcessGroup) -> str | None:
    """The first parameter in ``given`` of which a state is spread over several ranks of ``process_group``."""
    ranks = set(dist.get_process_group_ranks(process_group))
    for name, state in given["state"].items():
        meshes = [value.device_mesh for value in state.values() if isinstance(value, DTensor)]
        if any(len(ranks.intersection(mesh.mesh.flatten().tolist())) > 1 for mesh in meshes):
            return str(name)
    return None


def _whole(value: Any) -> Any:
    return dtensor.whole(value) if isinstance(value, torch.Tensor) else value


def _shard_state(saved: SavedUnit, index: int, state: State) -> State:
    """This rank's part of what is laid out like parameter ``index``, where its shards live; the rest as it is."""
    found: State = {}
    size, home = full_size(saved.group, index), saved.group.shards.flat.device
    for key, value in state.items():
        value = _whole(value)
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == size:
            local = local_part(saved.group, index, value)
            found[key] = _Part(saved.group.shards.cut_one(index, local).to(home, copy=True))
        else:
            found[key] = copy_of(value)
    return found


class _Part(NamedTuple):
    """This rank's part of something that is laid out like a parameter."""

    tensor: torch.Tensor


def _state_to_load(
    param: torch.Tensor, parameter: OptimizerParameter, parts: dict[str, State], given: dict[str, State]
) -> State | None:
    if parameter.saved is None:
        state = given.get(parameter.names[0])
        return None if state is None else {key: _placed_as(param, value) for key, value in state.items()}
    shards = parameter.saved.group.shards
    states = {
        index: parts[name] for index, name in zip(parameter.indices, parameter.names, strict=True) if name in parts
    }
    if not states:
        return None
    if not shards.use_orig:
        return _joined(parameter.saved, states)
    ((index, state),) = states.items()
    if shards.spans[index].numel == 0:
        # No gradient ever comes here, so the optimizer keeps nothing.
        return None
    return {
        key: shards.like_part(index, value.tensor) if isinstance(value, _Part) else value
        for key, value in state.items()
    }


def _placed_as(param: torch.Tensor, value: Any) -> Any:
    """A copy of a state of ``param``, which no unit has: a DTensor if it is laid out like a parameter that is one."""
    whole = _whole(value)
    if not isinstance(param, DTensor) or not isinstance(whole, torch.Tensor) or whole.shape != param.shape:
        return copy_of(whole)
    local = part_of(whole, param._spec).clone(memory_format=torch.contiguous_format)
    return dtensor.wrap(local, dtensor.with_dtype(param._spec, local.dtype))


def _joined(saved: SavedUnit, states: dict[int, State]) -> State:
    """The state of the flat parameter; zeros where a parameter has nothing that is laid out like it.

    Raises:
        ValueError: if the parameters have states of other names or kinds, or differ in one that there is once for the
            flat parameter, such as a number of steps; also where one has none.
    """
    shards, every = saved.group.shards, range(len(saved.names))
    names = {frozenset(state) for state in states.values()}
    if len(names) > 1:
        raise ValueError(f"Differing optimizer state names for the unflattened parameters: {saved.names}")
    found: State = {}
    for key in next(iter(states.values())):
        values = [states[index][key] if index in states else None for index in every]
        if not any(isinstance(value, _Part) for value in values):
            found[key] = _one_for_all(key, values, saved.names)
            continue
        parts = [part for part in values if part is not None]
        if not all(isinstance(part, _Part) for part in parts) or len({part.tensor.dtype for part in parts}) > 1:
            raise ValueError(f"Differing optimizer state types for state {key} of the parameters {saved.names}")
        found[key] = torch.zeros_like(shards.flat.detach(), dtype=parts[0].tensor.dtype)
        for span, part in zip(shards.spans, values, strict=True):
            if part is not None:
                found[key][span.offset : span.offset + span.numel].copy_(part.tensor)
    return found


def _one_for_all(key: str, values: Sequence[Any], names: Sequence[str]) -> Any:
    plain = [value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value for value in values]
    dtypes = [value.dtype if isinstance(value, torch.Tensor) else None for value in values]
    if any(isinstance(value, torch.Tensor) for value in plain):
        raise ValueError(f"Optimizer state {key} does not have the shape of its parameter, among those of {names}")
    if any(value != plain[0] for value in plain) or any(dtype != dtypes[0] for dtype in dtypes):
        raise ValueError(
            "All unflattened parameters comprising a single flat parameter must have scalar state with the same value "
            f"and dtype but got values {plain} and dtypes {dtypes} for state {key} and unflattened parameter names "
            f"{list(names)}"
        )
    return values[0]


def _options_for(names: Sequence[str], own: dict[str, Any], given: ParamGroups) -> dict[str, Any]:
    """The options of the group that had these parameters, or none, when it was saved; the optimizer's own if none had.

    A group without parameters may get some later, and needs its options then.
    """
    for group in given:
        if set(names) & set(group["params"]) or not (names or group["params"]):
            return {key: value for key, value in group.items() if key != "params"}
    return {key: value for key, value in own.items() if key != "params"}


# Names and numbers


def rekey(given: State, kind: OptimStateKeyType, model: nn.Module, optim: Any) -> State:
    """See :meth:`OptimStateMethods.rekey_optim_state_dict`."""
    named: dict[torch.Tensor, str] = {param: clean(name) for name, param in model.named_parameters()}
    params = list(params_of(groups_of(optim, model)))
    if unknown := [tuple(param.size()) for param in params if param not in named]:
        raise ValueError(f"The optimizer has a parameter of size {unknown[0]}, and the model no such parameter")
    names = [named[param] for param in params]
    keys: Iterable[Any] = [*given["state"], *(key for group in given["param_groups"] for key in group["params"])]
    to: dict[Any, Any] = dict(enumerate(names))
    if kind is OptimStateKeyType.PARAM_ID:
        to = {name: number for number, name in to.items()}
    if all(key in to.values() for key in keys):
        return given
    if unknown := [key for key in keys if key not in to]:
        raise ValueError(f"The optimizer state dict has the key {unknown[0]!r}, and the model no such parameter")
    renamed = [{**group, "params": [to[key] for key in group["params"]]} for group in given["param_groups"]]
    if kind is OptimStateKeyType.PARAM_ID:
        # ``load_state_dict`` looks at places, not at numbers: an optimizer counts its groups through, one by one.
        renamed = [{**group, "params": sorted(group["params"])} for group in renamed]
        renamed.sort(key=lambda group: group["params"][:1])
    return {"state": {to[key]: state for key, state in given["state"].items()}, "param_groups": renamed}


# The wrapper's methods


class OptimStateMethods:
    """What ``FullyShardedDataParallel`` offers for optimizers. The older methods are what the first two do."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The optimizer's state dict by the names of the model without wrappers, of the type that was set. Collective.

        Args:
            model: the model, or what is around it.
            optim_state_dict: what ``optim.state_dict()`` returned; asked for if not given.
            group: the ranks that must agree on what the optimizer has; those of the first wrapper by default.

        Returns:
            Whole tensors, or DTensors for ``SHARDED_STATE_DICT``; nothing on other ranks than the first if so set.

        Raises:
            RuntimeError: if a rank's optimizer lacks parameters of units that the first rank's has.
            NotImplementedError: for ``LOCAL_STATE_DICT``.
        """
        form = form_of(settings_in(model))
        return save(model, optim, optim_state_dict, form, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """What ``optim.load_state_dict()`` takes of a state dict by names, from any number of ranks and any wrapping.

        A collective where tensors are DTensors, or with ``rank0_only``, where the first rank's argument counts alone.

        Args:
            model: the model, or what is around it.
            optim_state_dict: as :meth:`optim_state_dict` returns it, or an unwrapped model's by names.
            is_named_optimizer: whether the optimizer identifies parameters by name.
            load_directly: load it as well.
            group: the ranks to give the first one's argument to; those of the first wrapper by default.

        Raises:
            NotImplementedError: for ``LOCAL_STATE_DICT``.
        """
        form = form_of(settings_in(model))
        found = load(
            model,
            optim,
            optim_state_dict,
            rank0_only=form.rank0_only,
            by_name=is_named_optimizer,
            process_group=group,
        )
        if load_directly:
            optim.load_state_dict(found)
        return found

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """:meth:`optim_state_dict` with whole tensors on the CPU, whatever was set."""
        _warn_optim_input(optim_input)
        form = Form(shards=False, rank0_only=rank0_only, offload_to_cpu=True)
        return save(model, optim, None, form, group)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """:meth:`optim_state_dict` with DTensors, whatever was set."""
        form = Form(shards=True, rank0_only=False, offload_to_cpu=False)
        return save(model, optim, None, form, group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """:meth:`optim_state_dict_to_load` of whole tensors that every rank has."""
        _warn_optim_input(optim_input)
        return load(model, optim if optim is not None else optim_input, full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """:meth:`optim_state_dict_to_load` of DTensors. Collective."""
        return load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """:meth:`optim_state_dict_to_load` of whole tensors that the first rank has. Collective."""
        _warn_optim_input(optim_input)
        known = optim if optim is not None else optim_input
        return load(model, known, full_optim_state_dict or {}, rank0_only=True, process_group=group)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """The same state dict by names or by numbers, for an optimizer of the unwrapped ``model``.

        Raises:
            ValueError: for keys of parameters that the model, or the optimizer, does not have.
        """
        _warn_optim_input(optim_input)
        known = optim if optim is not None else optim_input
        return rekey(optim_state_dict, optim_state_key_type, model, known)


def _warn_optim_input(optim_input: Any) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated: give `optim`, or nothing, in its place.",
            FutureWarning,
            stacklevel=3,
        )
