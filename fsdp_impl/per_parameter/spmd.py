"""Parameters on one mesh of all dimensions (SPMD), of which ``dp_mesh_dims`` names the data-parallel ones.

All parameters are DTensors on that mesh, or plain tensors that the package ``spmd_types`` has annotated.
"""

import importlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_impl.common import dtensor
from fsdp_impl.common.mesh import check_replicas, concatenate
from fsdp_impl.common.private import DTensorSpec, flatten_mesh
from fsdp_impl.per_parameter.mesh import ShardMesh, check_mesh
from fsdp_impl.per_parameter.param import Cut, UnshardedDTensor, local_and_dim, parts_of, shard_along

# Meshes


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names of the data-parallel dimensions of a mesh on which parameters already are DTensors.

    Attributes:
        shard: name or names of the dimensions to shard over; several are flattened into one.
        replicate: those to replicate over, likewise.

    Raises:
        ValueError: if both are ``None``.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("At least one of shard or replicate must be set in DataParallelMeshDims")

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


class SpmdMesh(ShardMesh):
    """The data-parallel ``part`` of a mesh.

    Attributes:
        full: the mesh, with names.
        dims: which of its dimensions are data parallel.
        data_parallel: their indices.
    """

    def __init__(self, part: DeviceMesh, full: DeviceMesh, dims: DataParallelMeshDims) -> None:
        super().__init__(part, sharded=bool(dims.shard_names))
        self.full, self.dims = full, dims
        names = full.mesh_dim_names or ()
        self.data_parallel = frozenset(names.index(name) for name in (*dims.shard_names, *dims.replicate_names))


def data_parallel_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> ShardMesh:
    """The data-parallel part of ``mesh``: all of it, or the named ``dims`` of a mesh that has others too.

    Several names of one kind are flattened into one dimension, which makes a process group the first time.
    """
    if dims is None:
        check_mesh(mesh)
        return ShardMesh(mesh)
    if mesh.mesh_dim_names is None:
        raise ValueError(f"mesh must have mesh_dim_names when dp_mesh_dims is provided, not {mesh}")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in mesh.mesh_dim_names:
            raise ValueError(f"dp_mesh_dims name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}")
    kinds = [_one_dim(mesh, names) for names in (dims.replicate_names, dims.shard_names) if names]
    part = kinds[0] if len(kinds) == 1 else concatenate(kinds)
    if part.ndim == 2:
        check_replicas(part)
    return SpmdMesh(part, mesh, dims)


def _one_dim(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    if len(names) == 1:
        return mesh[names[0]]
    flat: DeviceMesh = flatten_mesh(mesh[names], "_".join(names))
    return flat


# Parameters


def is_spmd(param: nn.Parameter, mesh: ShardMesh) -> bool:
    """Whether :func:`cut` is to cut ``param`` over ``mesh``."""
    return isinstance(mesh, SpmdMesh) or _is_annotated(param)


def cut(param: nn.Parameter, name: str, mesh: ShardMesh, placement: Shard | None) -> Cut:
    """Decide how ``param``, called ``name``, is cut over ``mesh``, or refuse to, as ``fully_shard`` says."""
    data, dim = local_and_dim(param, name, mesh, placement)
    types = Types(param, name, mesh) if _is_annotated(param) else None
    assert isinstance(mesh, SpmdMesh)  # or the types have refused it
    stored = param if types is None else DTensor.from_local(data, mesh.full, types.placements, run_check=False)
    old = _checked_spec(stored, name, mesh)
    unsharded = SpmdDTensor(old, mesh.data_parallel) if types is None else Annotated(old, mesh.data_parallel, types)
    return Cut(data, dim, _spec(old, dim, mesh), unsharded)


def _is_annotated(param: nn.Parameter) -> bool:
    # The attribute by which the package marks tensors; without one nothing is imported.
    return not isinstance(param, DTensor) and bool(getattr(param, "_local_type", None))


def _checked_spec(param: torch.Tensor, name: str, mesh: SpmdMesh) -> DTensorSpec:
    """The spec of ``param``, called ``name``; a ``ValueError`` unless it is replicated over data parallelism."""
    if not isinstance(param, DTensor):
        raise ValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via "
            f"distribute_module). Got plain tensor for parameter '{name}'."
        )
    spec = param._spec
    if spec.mesh is not mesh.full:
        raise ValueError(
            f"Expected the DTensor mesh of parameter '{name}' to be the same mesh passed to fully_shard, but got "
            f"different mesh objects: {spec.mesh} and {mesh.full}"
        )
    names = mesh.full.mesh_dim_names or ()
    for index in sorted(mesh.data_parallel):
        if not isinstance(spec.placements[index], Replicate):
            raise ValueError(
                f"Expected Replicate() on DP dim '{names[index]}' (index {index}) of parameter '{name}' but got "
                f"{spec.placements[index]}"
            )
    return spec


def _spec(old: DTensorSpec, dim: int, mesh: SpmdMesh) -> DTensorSpec:
    """The spec of what is cut along ``dim`` and was ``old`` before."""
    full, dims = mesh.full, mesh.dims
    names = full.mesh_dim_names or ()
    first = min((names.index(name) for name in dims.shard_names), default=0)
    meta = dtensor.meta_of(old)
    if len(dims.shard_names) <= 1 and len(dims.replicate_names) <= 1:
        placements = list(old.placements)
        if dims.shard_names:
            placements[first] = shard_along(dim, parts_of(full, old.placements, dim, start=first))
        return dtensor.spec_for(full, placements, meta.shape, meta.dtype)
    # Flattened dimensions: the data-parallel mesh takes the place of all its names, ahead of the others.
    others = [index for index in range(full.ndim) if index not in mesh.data_parallel]
    shard = shard_along(dim, parts_of(full, old.placements, dim))
    joined = concatenate([mesh.mesh, *(full[names[index]] for index in others)]) if others else mesh.mesh
    placements = [*mesh.placements(shard), *(old.placements[index] for index in others)]
    return dtensor.spec_for(joined, placements, meta.shape, meta.dtype)


@dataclass(frozen=True)
class SpmdDTensor(UnshardedDTensor):
    """On the mesh of all dimensions.

    Attributes:
        data_parallel: the dimensions over which FSDP itself reduces gradients.
    """

    data_parallel: frozenset[int]

    def wanted(self, grad: DTensor) -> tuple[Placement, ...]:
        """What is pending over data-parallel dimensions is summed by the reduction."""
        return tuple(
            grad.placements[index] if index in self.data_parallel else placement
            for index, placement in enumerate(self.spec.placements)
        )


# Annotated parameters


class Types:
    """What the package ``spmd_types`` has noted on a plain ``param``; how it and its gradient lie on ``mesh``."""

    def __init__(self, param: nn.Parameter, name: str, mesh: ShardMesh) -> None:
        if not isinstance(mesh, SpmdMesh):
            raise ValueError(f"Parameter '{name}' has spmd_types annotations, which require dp_mesh_dims")
        full, dims, self._spmd = mesh.full, mesh.dims, importlib.import_module("spmd_types")
        self._local, self._cuts = self._spmd.get_local_type(param), self._spmd.get_partition_spec(param)
        cuts = self._spmd.types.partition_spec_to_shard_types(self._cuts) if self._cuts is not None else {}
        axes = {dim: self._spmd.MeshAxis.of(full.get_group(dim)) for dim in full.mesh_dim_names or ()}
        known = {axes[dim]: self._spmd.R for dim in (*dims.shard_names, *dims.replicate_names)} | self._local | cuts
        if not known.keys() >= set(axes.values()):
            raise ValueError(f"Parameter '{name}' has incomplete spmd_types annotations for the mesh {full}")
        place = self._spmd.spmd_type_to_dtensor_placement
        self.placements: list[Placement] = [place(known[axis]) for axis in axes.values()]
        self.gradient: list[Placement] = [place(known[axis].backward_type()) for axis in axes.values()]

    def restore(self, param: nn.Parameter) -> None:
        """Note them on the unsharded ``param``."""
        self._spmd.assert_type(param, self._local, partition_spec=self._cuts)


@dataclass(frozen=True)
class Annotated(SpmdDTensor):
    """A plain unsharded parameter with ``types``, and its gradient, which is placed as these say."""

    types: Types

    def parameter(self, data: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """A plain parameter with the types of the original one."""
        param = nn.Parameter(data, requires_grad=requires_grad)
        self.types.restore(param)
        return param

    def gradient(self, grad: torch.Tensor, name: str) -> DTensor:
        """A DTensor of the plain ``grad``."""
        return DTensor.from_local(grad, self.spec.mesh, self.types.gradient, run_check=False)
