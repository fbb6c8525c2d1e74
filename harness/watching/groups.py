"""Which groups of ranks does a model tell of? Its DTensors, the user's mesh, and the wrappers that reduce."""

import dataclasses
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from shardproof.harness.tensors import private
from shardproof.harness.watching.names import meshes_of_units, modules_of, objects_of, parameters_of
from shardproof.harness.watching.records import Groups, NotWatchable, Reducers

#: The names of mesh dimensions over which ranks have different data, as trainers call them.
DATA = (
    "dp", "dp_replicate", "dp_shard", "dp_shard_cp", "dp_cp", "fsdp", "replicate", "shard", "batch", "cp", "data",
    "data_parallel",
)  # fmt: skip

#: How names of dimensions begin over which ranks compute parts of one model.
_OF_MODELS = ("tp", "sp", "pp", "ep", "mp", "model", "tensor", "expert", "pipe", "stage")


#: How the name of a data set begins to which no sampler gives a rank's part.
ITERABLE = "the IterableDataset"


class Wrappers(NamedTuple):
    """The wrappers by DDP or FSDP1 of models: what would reduce their gradients.

    Attributes:
        inside: those that models are, or have in them.
        around: those in which models are: the loop calls what is in them, and not them.
    """

    inside: tuple[Any, ...]
    around: tuple[Any, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of their classes."""
        return _classes((*self.inside, *self.around))

    @property
    def bypassed(self) -> tuple[str, ...]:
        """The names of the classes of those that the loop does not call."""
        return _classes(self.around)

    @property
    def replicated(self) -> tuple[int, ...]:
        """The ranks that DDP keeps equal; empty without it."""
        for module in (*self.inside, *self.around):
            if isinstance(module, DistributedDataParallel):
                return tuple(dist.get_process_group_ranks(module.process_group))
        return ()

    @property
    def sends_buffers(self) -> bool:
        """Whether DDP replaces the buffers of all ranks by those of one before each forward."""
        return any(isinstance(one, DistributedDataParallel) and one.broadcast_buffers for one in self.inside)

    @property
    def hooks(self) -> tuple[str, ...]:
        """The names of the communication hooks that user code has registered."""
        found = []
        for module in (*self.inside, *self.around):
            hooks = [hook for hook, _ in getattr(module, "_comm_hooks", ())] or [getattr(module, "_comm_hook", None)]
            found += [getattr(hook, "__name__", type(hook).__name__) for hook in hooks if hook is not None]
        return tuple(dict.fromkeys(found))


def wrappers_of(models: Sequence[nn.Module]) -> Wrappers:
    """Return the wrappers of models, by one walk over all objects of the process."""
    mine = {id(model) for model in models}
    around = []
    for one in objects_of(nn.Module):
        if not _is_wrapper(one):
            continue
        if id(one) not in mine and any(id(module) in mine for module in one.modules()):
            around.append(one)
    inside = (module for model in models for _, module in modules_of(model) if _is_wrapper(module))
    return Wrappers(tuple(inside), tuple(around))


def groups_of(
    models: Sequence[nn.Module],
    wrappers: Wrappers,
    *,
    mesh: DeviceMesh | None,
    groups: Mapping[str, dist.ProcessGroup],
    data: Sequence[str],
) -> Groups:
    """Return the groups that this rank is in.

    Raises:
        NotWatchable: ``data`` names none of the dimensions of the user's own mesh or groups, or is the user's own and
            names none that are known.
    """
    found, used = _Naming(tuple(data)), _used(models)
    for one in [mesh] if mesh is not None else _meshes(models):
        found.take_mesh(one, "mesh" if mesh is not None else "DTensors", used)
    for name, group in groups.items():
        found.take_group(name, group)
    if (mesh is not None or groups or (found.named and not found.is_default)) and not found.over_data:
        known = ", ".join(found.named)
        raise NotWatchable(f"doctor: data={tuple(data)!r}: no mesh dimension of this name; known: {known}")
    for module in (*wrappers.inside, *wrappers.around):
        found.take_wrapper(module)
    return Groups(found.named, ", ".join(dict.fromkeys(found.sources)), tuple(dict.fromkeys(found.over_data)))


class _Used(NamedTuple):
    """What groups of ranks are used for by models.

    Attributes:
        units: the groups over which units of FSDP2 shard or replicate.
        divided: those over which others divide parameters.
    """

    units: list[set[int]]
    divided: set[tuple[int, ...]]

    def is_of_data(self, name: str, members: tuple[int, ...]) -> bool:
        """Whether FSDP's units shard or replicate over a dimension, or no parts of one model are computed over it."""
        is_of_units = any(set(members) <= unit for unit in self.units)
        return is_of_units or (members not in self.divided and not name.startswith(_OF_MODELS))


@dataclasses.dataclass
class _Naming:
    """The groups of a rank, as one after another is found.

    Attributes:
        data: the names of those over which ranks have different data, as the user has them.
        named: by name, the ranks.
        over_data: the names among them over which ranks have different data.
        sources: where they come from.
    """

    data: tuple[str, ...]
    named: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    over_data: list[str] = dataclasses.field(default_factory=list)
    sources: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_default(self) -> bool:
        """Whether the names of data are not the user's own."""
        return self.data == DATA

    def take_mesh(self, mesh: DeviceMesh, source: str, used: _Used) -> None:
        """Take the dimensions of a mesh."""
        self.sources.append(source)
        for number, name in enumerate(_dimensions(mesh)):
            members = tuple(dist.get_process_group_ranks(mesh.get_group(number)))
            self.named.setdefault(name, members)
            is_named = name in self.data or (name.startswith("dp") and "dp" in self.data)
            # A name that says nothing is judged by what the dimension is for.
            if is_named or (self.is_default and used.is_of_data(name, members)):
                self.over_data.append(name)

    def take_group(self, name: str, group: dist.ProcessGroup) -> None:
        """Take a group that the user has named."""
        self.sources.append("groups")
        self.named[name] = tuple(dist.get_process_group_ranks(group))
        if name in self.data:
            self.over_data.append(name)

    def take_wrapper(self, module: Any) -> None:
        """Take the group of a wrapper, which reduces over ranks of different data, if no known one has it in it."""
        members = tuple(dist.get_process_group_ranks(module.process_group))
        name = "dp" if isinstance(module, DistributedDataParallel) else "fsdp"
        if not any(set(members) <= set(self.named[known]) for known in self.over_data):
            self.sources.append(type(module).__name__)
            self.named.setdefault(name, members)
            self.over_data.append(name)


def reducers_of(models: Sequence[nn.Module], wrappers: Wrappers) -> Reducers:
    """Return what reduces the gradients of models in backward."""
    units = ["fully_shard"] if any(meshes_of_units(model) for model in models) else []
    ignored = _ignored_by(wrappers)
    names = [name for model in models for name, one in parameters_of(model) if id(one) in ignored]
    return Reducers(
        (*wrappers.names, *units), wrappers.hooks, wrappers.bypassed, frozenset(names), wrappers.sends_buffers
    )


def _ignored_by(wrappers: Wrappers) -> set[int]:
    """Return the ids of the plain parameters that user code has DDP ignore, and keeps as it will."""
    found = set[int]()
    for module in (*wrappers.inside, *wrappers.around):
        if isinstance(module, DistributedDataParallel):
            named = module.module.named_parameters(remove_duplicate=False)
            plain = [(name, one) for name, one in named if not isinstance(one, DTensor)]
            found |= {id(one) for name, one in plain if name in module.parameters_to_ignore}
    return found


def samplers() -> list[str]:
    """Return the samplers of the data loaders of this process: "DistributedSampler(num_replicas=2, rank=0)".

    Of an IterableDataset, which has none, it is the data set: "the IterableDataset Stream". A loop that makes a loader
    where it begins, as in ``for batch in DataLoader(data)``, keeps what iterates over it alone.
    """
    iterator = private.find("torch.utils.data.dataloader._BaseDataLoaderIter") or DataLoader
    found = []
    for one in gc.get_objects():
        if issubclass(type(one), DataLoader):  # not by isinstance, which asks proxies of dead objects
            found.append(_sampler_of(one.dataset, one.sampler if one.batch_sampler is None else one.batch_sampler))
        elif issubclass(type(one), iterator):
            found.append(_sampler_of(one._dataset, one._index_sampler))
    return list(dict.fromkeys(found))


def _sampler_of(data: Any, sampler: Any) -> str:
    """Name what gives a rank its part of a data set; ``sampler`` may be that of batches."""
    if isinstance(data, IterableDataset):  # which torch gives a sampler that says nothing
        return f"{ITERABLE} {type(data).__name__}"
    sampler = sampler.sampler if type(sampler) is BatchSampler else sampler
    kind = type(sampler).__name__
    if isinstance(sampler, DistributedSampler):
        return f"{kind}(num_replicas={sampler.num_replicas}, rank={sampler.rank})"
    return kind


def sizes_of_flat(models: Sequence[nn.Module]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return how many elements of each original parameter in a flat one this rank holds, and the ranks that share it.

    The ranks hold consecutive parts of the flattened parameter, in the order of the group.
    """
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    for model in models:
        inside: dict[int, tuple[int, ...]] = {}
        for name, module in modules_of(model):
            members = inside.get(id(module), ())
            if _is_flat(module) and getattr(module, "sharding_strategy", None) != ShardingStrategy.NO_SHARD:
                members = tuple(dist.get_process_group_ranks(module.process_group))  # type: ignore[arg-type]
            for child in module.children():
                inside[id(child)] = members
            for last, parameter in module._parameters.items():
                if members and parameter is not None and not isinstance(parameter, DTensor):
                    found[f"{name}.{last}" if name else last] = (parameter.numel(), members)
    return found


def shapes_of_flat(models: Sequence[nn.Module]) -> dict[str, torch.Size]:
    """Return the full shapes of the original parameters in flat ones."""
    shapes = {id(parameter): flat._shapes[number] for flat, number, parameter in _in_flat(models)}
    every = (pair for model in models for pair in parameters_of(model))
    return {name: shapes[id(parameter)] for name, parameter in every if id(parameter) in shapes}


def _in_flat(models: Sequence[nn.Module]) -> Iterator[tuple[Any, int, nn.Parameter]]:
    """Yield the original parameters of units of FSDP1, each with its flat one and its number in that."""
    for model in models:
        for module in model.modules():
            handle: Any = getattr(module, "_handle", None) if _is_flat(module) else None
            for number, parameter in enumerate((handle and handle.flat_param._params) or ()):
                yield handle.flat_param, number, parameter


def places_of_flat(models: Sequence[nn.Module]) -> dict[str, tuple[int, int]]:
    """Return where this rank's part of each original parameter in a flat one begins, and how many elements all have.

    As sizes of all ranks tell it, without asking them: a unit of FSDP1 knows which part of each it has.
    """
    flat: dict[int, tuple[int, int]] = {}
    for unit, number, parameter in _in_flat(models):
        infos, full = unit._shard_param_infos, unit._shapes[number].numel()
        if infos[number].in_shard:
            begin = infos[number].intra_param_start_idx
        else:  # it is in those of earlier ranks, or of later ones
            begin = 0 if any(one.in_shard for one in infos[:number]) else full
        flat[id(parameter)] = begin, full
    found = {}
    for model in models:
        parameters = dict(parameters_of(model))
        for name, (numel, members) in sizes_of_flat([model]).items():
            # Of what is one flat parameter to users too, all ranks have as much.
            whole = members.index(dist.get_rank()) * numel, len(members) * numel
            found[name] = flat.get(id(parameters[name]), whole)
    return found


def _is_flat(module: nn.Module) -> bool:
    return any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__)


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel) or _is_flat(module)


def _classes(modules: Sequence[nn.Module]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(type(module).__name__ for module in modules))


def _meshes(models: Sequence[nn.Module]) -> Iterator[DeviceMesh]:
    once = []
    for model in models:
        for _, parameter in parameters_of(model):
            if isinstance(parameter, DTensor) and parameter.device_mesh not in once:
                once.append(parameter.device_mesh)
    # Those with most dimensions first: they name what the others are parts of.
    yield from sorted(once, key=lambda one: -one.ndim)


def _used(models: Sequence[nn.Module]) -> _Used:
    units: list[set[int]] = []
    divided: set[tuple[int, ...]] = set()
    for model in models:
        units += [set(one.mesh.flatten().tolist()) for one in meshes_of_units(model)]
        for module in model.modules():
            if isinstance(module, ParametrizationList):
                continue  # gathered by the parametrization before anything is computed with it
            for parameter in module._parameters.values():
                if not isinstance(parameter, DTensor):
                    continue
                for number, placement in enumerate(parameter.placements):
                    if not placement.is_replicate():
                        divided.add(tuple(dist.get_process_group_ranks(parameter.device_mesh.get_group(number))))
    return _Used(units, divided)


def _dimensions(mesh: DeviceMesh) -> list[str]:
    if mesh.mesh_dim_names:
        return list(mesh.mesh_dim_names)
    return ["mesh"] if mesh.ndim == 1 else [f"mesh{number}" for number in range(mesh.ndim)]
