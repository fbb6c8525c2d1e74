"""One parameter: how it is cut, and what the modules see of it, sharded and not.

A parameter has three forms. The *original* one is cut at construction and dropped. The *sharded* parameter, a DTensor,
is what optimizers and checkpoints use; it lasts as long as the model. The *unsharded* parameter is an autograd leaf
whose bytes come with each gather and go with each reshard (see Note: unsharded parameters).

Its local tensor may be of a class that chooses what is gathered in its place (an *extension*).
"""

import dataclasses
import importlib
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_impl.common import dtensor
from fsdp_impl.common.changes import Changes
from fsdp_impl.common.layout import contiguous_stride
from fsdp_impl.common.mesh import concatenate
from fsdp_impl.common.owner import Owner
from fsdp_impl.common.private import DTensorSpec, StridedShard, preserve_version_counter, sets_grad_dtype
from fsdp_impl.per_parameter.mesh import ShardMesh, mesh_of_parameter
from fsdp_impl.per_parameter.options import MixedPrecisionPolicy

# How a parameter is cut


PlacementFn = Callable[[nn.Parameter], Any]
"""Returns ``None``, a ``Shard``, or a ``ShardPlacementResult``."""


@dataclass(frozen=True)
class Cut:
    """One original parameter and its cut.

    Attributes:
        data: what is cut: the parameter, or of a DTensor the local tensor.
        spec: of the sharded parameter.
        unsharded: of the unsharded parameter, if that is a DTensor.
        data_parallel: the dimensions of ``unsharded``'s mesh over which FSDP itself reduces gradients.
        types: of a plain parameter that is annotated; its unsharded parameter is plain too.
    """

    data: torch.Tensor
    dim: int
    spec: DTensorSpec
    unsharded: DTensorSpec | None
    data_parallel: frozenset[int] = frozenset()
    types: "Types | None" = None


class Types:
    """What the package ``spmd_types`` has noted on a plain ``param``; how it and its gradient lie on ``mesh``."""

    def __init__(self, param: nn.Parameter, name: str, mesh: ShardMesh) -> None:
        if mesh.spmd is None:
            raise ValueError(f"Parameter '{name}' has spmd_types annotations, which require dp_mesh_dims")
        (full, dims), self._spmd = mesh.spmd, importlib.import_module("spmd_types")
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


def place(
    param: nn.Parameter, name: str, mesh: ShardMesh, placement_fn: PlacementFn | None
) -> tuple[Shard | None, ShardMesh]:
    """Decide along which dimension ``param``, called ``name``, is cut, and over which mesh if not over ``mesh``."""
    placement = placement_fn(param) if placement_fn is not None else None
    if (info := getattr(placement, "mesh_info", None)) is not None:
        placement, mesh = placement.placement, mesh_of_parameter(info, name)  # type: ignore[union-attr]
    if placement is not None and not isinstance(placement, Shard):
        raise ValueError(f"Invalid shard_placement_fn result: {placement} for parameter {name}")
    return placement, mesh


def cut(param: nn.Parameter, name: str, mesh: ShardMesh, placement: Shard | None) -> Cut:
    """Decide how ``param``, called ``name``, is cut over ``mesh``, or refuse to, as ``fully_shard`` says."""
    data = dtensor.local_of(param) if isinstance(param, DTensor) else param.detach()
    dim = _checked_dim(placement, data, param, name, mesh)
    # The attribute by which the package marks tensors; without one nothing is imported.
    if not isinstance(param, DTensor) and getattr(param, "_local_type", None):
        types = Types(param, name, mesh)
        stored = DTensor.from_local(data, mesh.spmd[0], types.placements, run_check=False)  # type: ignore[index]
        return dataclasses.replace(_cut_spmd(nn.Parameter(stored), data, name, dim, mesh), types=types)
    if mesh.spmd is not None:
        return _cut_spmd(param, data, name, dim, mesh)
    if isinstance(param, DTensor):
        return _cut_tensor_parallel(param, data, dim, mesh)
    spec = dtensor.spec_for(mesh.mesh, mesh.placements(Shard(dim)), param.size(), param.dtype)
    return Cut(data, dim, spec, None)


def _checked_dim(placement: Shard | None, data: torch.Tensor, param: nn.Parameter, name: str, mesh: ShardMesh) -> int:
    if placement is None:
        return 0
    dim = placement.dim + data.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < data.ndim:
        raise AssertionError(f"Shard dim {dim} is invalid for {data.ndim}D tensor: {param.shape} of {name}")
    if dim > 0 and data.size(dim) % mesh.size != 0:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: {data.size()} of {name} (world size: {mesh.size})"
        )
    return dim


def _shard(dim: int, split_factor: int) -> Placement:
    """Shard along ``dim``; strided if other mesh dimensions cut it before, into ``split_factor`` parts.

    The mesh lists data parallelism first, but it cuts last: what is cut is already a tensor-parallel shard. A plain
    ``Shard`` would claim the order of the mesh, and a full tensor would be put together in the wrong order.
    """
    return StridedShard(dim, split_factor=split_factor) if split_factor > 1 else Shard(dim)


def _parts(mesh: DeviceMesh, placements: tuple[Placement, ...], dim: int, start: int = 0) -> int:
    """Into how many parts the mesh dimensions from ``start`` on cut ``dim``."""
    cutting = [
        mesh.size(index)
        for index, placement in enumerate(placements)
        if index >= start and isinstance(placement, (Shard, StridedShard)) and placement.dim == dim
    ]
    return math.prod(cutting)


def _cut_tensor_parallel(param: DTensor, data: torch.Tensor, dim: int, mesh: ShardMesh) -> Cut:
    """A DTensor on a mesh of its own dimensions (tensor, sequence or expert parallel) beside the data-parallel ones."""
    old = param._spec
    shard = _shard(dim, _parts(old.mesh, old.placements, dim))
    spec = dtensor.spec_for(
        concatenate([mesh.mesh, old.mesh]), (*mesh.placements(shard), *old.placements), param.size(), param.dtype
    )
    return Cut(data, dim, spec, old)


def _cut_spmd(param: nn.Parameter, data: torch.Tensor, name: str, dim: int, mesh: ShardMesh) -> Cut:
    """A DTensor on one mesh of all dimensions, some of which are the data-parallel ones."""
    assert mesh.spmd is not None
    full, dims = mesh.spmd
    if not isinstance(param, DTensor):
        raise ValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via "
            f"distribute_module). Got plain tensor for parameter '{name}'."
        )
    old = param._spec
    if old.mesh is not full:
        raise ValueError(
            f"Expected the DTensor mesh of parameter '{name}' to be the same mesh passed to fully_shard, but got "
            f"different mesh objects: {old.mesh} and {full}"
        )
    names = full.mesh_dim_names
    assert names is not None
    data_parallel = frozenset(names.index(which) for which in (*dims.shard_names, *dims.replicate_names))
    for index in sorted(data_parallel):
        if not isinstance(old.placements[index], Replicate):
            raise ValueError(
                f"Expected Replicate() on DP dim '{names[index]}' (index {index}) of parameter '{name}' but got "
                f"{old.placements[index]}"
            )
    spec = _spmd_spec(old, dim, mesh, data_parallel)
    return Cut(data, dim, spec, old, data_parallel)


def _spmd_spec(old: DTensorSpec, dim: int, mesh: ShardMesh, data_parallel: frozenset[int]) -> DTensorSpec:
    assert mesh.spmd is not None
    full, dims = mesh.spmd
    names = full.mesh_dim_names or ()
    first = min((names.index(name) for name in dims.shard_names), default=0)
    shard = _shard(dim, _parts(full, old.placements, dim, start=first))
    meta = dtensor.meta_of(old)
    if len(dims.shard_names) <= 1 and len(dims.replicate_names) <= 1:
        placements = list(old.placements)
        if dims.shard_names:
            placements[first] = shard
        return dtensor.spec_for(full, placements, meta.shape, meta.dtype)
    # Flattened dimensions: the data-parallel mesh takes the place of all its names, ahead of the others.
    others = [index for index in range(full.ndim) if index not in data_parallel]
    shard = _shard(dim, _parts(full, old.placements, dim))
    joined = concatenate([mesh.mesh, *(full[names[index]] for index in others)]) if others else mesh.mesh
    placements = [*mesh.placements(shard), *(old.placements[index] for index in others)]
    return dtensor.spec_for(joined, placements, meta.shape, meta.dtype)


# A parameter of a group

# Numbers original parameters. Not id(): a freed parameter's id comes back with another one.
_serial_numbers = itertools.count()


class ShardedParam:
    """One parameter of a group, cut as its :class:`Cut` says.

    Attributes:
        owners: where it is registered, at least once.
        fqn: its name from the root, set at lazy initialisation; before, its name in its module.
        precision: the policy of this parameter.
        size: the unsharded size; of a tensor-parallel parameter that of this rank's part.
        slot: the local tensor of ``sharded`` while it lies in the group's buffer, at ``slot_pointer``; else ``None``.
        accumulated: gradient of the unsharded parameter in the reduce dtype, of backwards that did not reduce.
        extension: what hooks of the local tensor need, if it brings any.
        serial: the same for two ShardedParams made from one original parameter, which is a mistake to report.
    """

    def __init__(
        self,
        original: nn.Parameter,
        cut: Cut,
        owners: list[Owner],
        local: torch.Tensor,
        changes: Changes,
        *,
        precision: MixedPrecisionPolicy,
        in_slot: bool,
    ) -> None:
        self.owners = owners
        self.fqn = owners[0].name
        self.size = cut.data.size()
        self.dim = cut.dim
        self.spec = cut.spec
        self.unsharded_spec = cut.unsharded
        self.data_parallel, self.types = cut.data_parallel, cut.types
        self.precision = precision
        self.sharded = nn.Parameter(dtensor.wrap(local, self.spec), requires_grad=original.requires_grad)
        # What user code has set as ``grad_dtype``; torch's casts and loads make tensors without it.
        self._own_grad_dtype: tuple[torch.dtype | None, ...] = ()
        self.keep_grad_dtype(original)
        self.keep_grad_dtype(self.sharded)
        self._changes = changes
        changes.watch(self.sharded)
        self.slot: torch.Tensor | None = None
        self.slot_pointer = 0
        if in_slot:
            self.move_to(local)  # nn.Parameter has detached: another tensor, with a version of its own
        self.extension: Extension | None = None
        self.unsharded: nn.Parameter | None = None
        self.accumulated: torch.Tensor | None = None
        self.serial = _serial_number(original)
        # What all forms had when they were last compared.
        self.trains = original.requires_grad

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, without padding."""
        local: torch.Tensor = self.sharded._local_tensor  # type: ignore[attr-defined]
        return local

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.sharded._local_tensor.dtype  # type: ignore[attr-defined]
        return dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the unsharded parameter. Only floating-point parameters are cast."""
        wanted = self.precision.param_dtype
        return wanted if wanted is not None and self.dtype.is_floating_point else self.dtype

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """Dtype of the sharded gradient; ``None`` is whatever it was reduced in."""
        return self.sharded.grad_dtype

    def take_own_grad(self) -> torch.Tensor | None:
        """Take the sharded gradient if user code has set its dtype, which a cast of the parameter would change."""
        self.keep_grad_dtype(self.sharded)
        if not self._own_grad_dtype:
            return None
        grad, self.sharded.grad = self.sharded.grad, None
        return grad

    def keep_grad_dtype(self, param: nn.Parameter) -> None:
        """Remember what user code has set on ``param``, or set there what it has set before."""
        if sets_grad_dtype(param):
            self._own_grad_dtype = (param.grad_dtype,)
        elif self._own_grad_dtype:
            (param.grad_dtype,) = self._own_grad_dtype

    def make_unsharded(self, data: torch.Tensor) -> None:
        """Let the unsharded parameter live in ``data`` (``size``, ``compute_dtype``)."""
        if self.unsharded_spec is not None and self.types is None:
            data = dtensor.wrap(data, dtensor.with_dtype(self.unsharded_spec, data.dtype))
        # A cast between two microbatches makes it anew; what the first has left here is still to be reduced.
        grad = None if self.unsharded is None else self.unsharded.grad
        self.unsharded = nn.Parameter(data, requires_grad=self.trains)
        if self.types is not None:
            self.types.restore(self.unsharded)
        # Any: autograd would round what it has computed in a wider dtype, and the reduction has one of its own.
        self.unsharded.grad_dtype = None
        if grad is not None:
            self.unsharded.grad = grad.to(torch.promote_types(grad.dtype, data.dtype))

    def register(self, param: nn.Parameter) -> None:
        """Make ``param`` what the owners hold."""
        for owner in self.owners:
            owner.hold(param)

    def held(self) -> Any:
        """What the owners hold now; the sharded parameter if all of them are gone (see Note: ownership)."""
        for owner in self.owners:
            if (module := owner.find()) is not None:
                # Past nn.Module.__getattr__, which is slow; what is not found so is on a module with attributes of its
                # own.
                held = module._parameters.get(owner.name)
                return getattr(module, owner.name) if held is None else held
        return self.sharded

    def adopt(self) -> None:
        """Take what the owners hold now for the sharded parameter, and look whether it lies in its slot (Note: slots).

        ``load_state_dict(assign=True)`` and users replace the parameter; ``.to()`` and ``to_empty`` keep the object
        but swap its local tensor.

        A ``ValueError`` if that is no longer a DTensor of the same size, mesh and placements.
        """
        held = self.held()
        is_same = held is self.sharded
        if not is_same:
            self._check(held)
            self.sharded = held
            self.register(held)
        elif len(self.owners) > 1:
            self.register(held)  # a load assigns a shared parameter under each of its names
        local = self.sharded._local_tensor  # type: ignore[attr-defined]  # not by the property: asked at each gather
        if is_same and self.slot is not None and local is self.slot and local.data_ptr() == self.slot_pointer:
            return
        self.keep_grad_dtype(held)
        self.slot = None
        self.spec = dtensor.with_dtype(self.spec, local.dtype)
        # Conversions swap a DTensor with another one, whose attributes the object has then.
        self._changes.watch(held)

    def move_to(self, slot: torch.Tensor) -> None:
        """Live in ``slot``, which holds the same values."""
        self.sharded._local_tensor = slot  # type: ignore[attr-defined]
        self.slot = slot
        self.slot_pointer = slot.data_ptr()

    def sync_requires_grad(self, shown: nn.Parameter) -> None:
        """Users freeze and unfreeze the sharded parameter, or ``shown``, which modules hold in its place."""
        wanted = (self.sharded if shown.requires_grad == self.trains else shown).requires_grad
        for form in (self.sharded, self.unsharded, shown):
            if form is not None and form.requires_grad != wanted:
                form.requires_grad_(wanted)
        self.trains = wanted

    def _check(self, held: Any) -> None:
        if not isinstance(held, DTensor):
            raise ValueError(f"FSDP expects {self.fqn} to stay a DTensor, but it was replaced by a {type(held)}")
        spec = self.spec
        size = dtensor.meta_of(spec).shape
        if (held.size(), held.device_mesh, held.placements) != (size, spec.mesh, spec.placements):
            raise ValueError(
                f"FSDP expects {self.fqn} to stay a DTensor of size {tuple(size)} placed "
                f"{spec.placements} on {spec.mesh}, but it was replaced by one of size {tuple(held.size())} "
                f"placed {held.placements} on {held.device_mesh}"
            )

    def __repr__(self) -> str:
        return f"ShardedParam({self.fqn}, size={tuple(self.size)})"


def displaced(params: Sequence[ShardedParam]) -> list[ShardedParam]:
    """Those that :meth:`ShardedParam.adopt` has to look at, mostly none; each gather asks this, so without calls."""
    found = []
    for param in params:
        owner, sharded, slot = param.owners[0], param.sharded, param.slot
        module = owner.reference()
        if (
            slot is None
            or sharded._local_tensor is not slot  # type: ignore[attr-defined]
            or slot.data_ptr() != param.slot_pointer
            or module is None
            or module._parameters.get(owner.name) is not sharded
            or len(param.owners) > 1
        ):
            found.append(param)
    return found


def _serial_number(original: nn.Parameter) -> int:
    if not hasattr(original, "_fsdp_impl_serial"):
        original._fsdp_impl_serial = next(_serial_numbers)  # type: ignore[attr-defined]
    serial: int = original._fsdp_impl_serial  # type: ignore[attr-defined]
    return serial


# Tensor subclasses that choose what is gathered
#
# A sharded local tensor with `fsdp_pre_all_gather` and `fsdp_post_all_gather`, of its class or set on the object, is
# not gathered as it is. Before each gather the first returns the tensors to gather instead, quantised for instance, and
# any metadata; after it the second makes the unsharded parameter of the gathered ones. A third may say that these are
# not needed any more then.

RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def has_hooks(local: torch.Tensor) -> bool:
    """Whether ``local`` brings the two methods; an ``AssertionError`` if it brings one of them, or the third alone."""
    before, after = hasattr(local, "fsdp_pre_all_gather"), hasattr(local, "fsdp_post_all_gather")
    if before != after:
        raise AssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather extensions: "
            f"{type(local)} has only fsdp_{'pre' if before else 'post'}_all_gather"
        )
    if hasattr(local, RELEASES) and not before:
        raise AssertionError(f"{RELEASES} requires fsdp_pre_all_gather and fsdp_post_all_gather: {type(local)}")
    return before


class Extension:
    """What the hooks of ``local``, one parameter's, need between calls."""

    def __init__(self, local: torch.Tensor) -> None:
        self._releases = getattr(local, RELEASES, bool)()
        if not isinstance(self._releases, bool):
            raise AssertionError(f"{RELEASES} must return a bool, not {self._releases}")
        # Gathered tensors, 1-D, each the beginning of a storage of its own, which has no bytes between reshard and
        # unshard.
        self.gathered: list[torch.Tensor] = []
        # Of this rank's inputs.
        self.sizes: list[torch.Size] = []
        self._metadata: Any = None
        # Storages of the unsharded parameter, as returned by the hook, and their bytes: freed and allocated with the
        # group.
        self._inner: list[tuple[torch.UntypedStorage, int]] = []

    def inputs(
        self,
        param: "ShardedParam",
        padded: torch.Size,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        device: torch.device,
    ) -> list[torch.Tensor]:
        """The tensors to gather, flat and in any dtypes; each rank must give as much as of ``padded``, a full chunk."""
        local: Any = param.local.to(device, non_blocking=True) if param.local.device != device else param.local
        hook = local.fsdp_pre_all_gather
        number = len(inspect.signature(hook).parameters)
        if number == 1:  # an older form
            inputs, self._metadata = hook(mesh)
        elif number == 5:
            module = param.owners[0].find()
            inputs, self._metadata = hook(mesh, param.size, contiguous_stride(param.size), module, policy)
            self._check_padded(param, inputs, padded)
        else:
            raise AssertionError(
                f"Invalid fsdp_pre_all_gather: {inspect.signature(hook)}\nExpects fsdp_pre_all_gather(self, mesh: "
                "DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: "
                "MixedPrecisionPolicy)"
            )
        self.sizes = [tensor.size() for tensor in inputs]
        return [tensor.reshape(-1) for tensor in inputs]

    def finish(self, param: "ShardedParam", dtype: torch.dtype) -> None:
        """Make the unsharded parameter of :attr:`gathered`, or fill the one that was made before."""
        outputs = tuple(tensor.view(-1, *size[1:]) for tensor, size in zip(self.gathered, self.sizes, strict=True))
        hook = param.local.fsdp_post_all_gather  # type: ignore[attr-defined]
        if param.unsharded is not None:
            for storage, nbytes in self._inner:
                if storage.size() != nbytes:
                    storage.resize_(nbytes)
            with preserve_version_counter(param.unsharded):
                hook(outputs, self._metadata, dtype, out=param.unsharded)
            self._release()
            return
        data, inner = hook(outputs, self._metadata, dtype)
        self._inner = [(tensor.untyped_storage(), tensor.untyped_storage().size()) for tensor in inner]
        if data.size() != param.size:  # padded, as the gathered tensors are
            data = torch.as_strided(data, param.size, contiguous_stride(param.size), int(data.storage_offset()))
        param.make_unsharded(data)
        self._release()

    def _release(self) -> None:
        for tensor in self.gathered if self._releases else ():
            tensor.untyped_storage().resize_(0)

    def free(self) -> None:
        """Give the bytes of the unsharded parameter back."""
        for storage, _ in self._inner:
            if storage.size() != 0:
                storage.resize_(0)

    def _check_padded(self, param: "ShardedParam", inputs: Sequence[torch.Tensor], padded: torch.Size) -> None:
        # Only ranks with padding can notice; the others would wait for them in the gather.
        if param.local.size() != padded and any(tensor.size() != padded for tensor in inputs):
            raise AssertionError(
                f"When a parameter is unevenly sharded by FSDP (orig size={tuple(param.size)}), fsdp_pre_all_gather "
                f"must return all-gather inputs with the padded sharded size {tuple(padded)} but got "
                f"{[tuple(tensor.size()) for tensor in inputs]} for {param.fqn}"
            )


def cut_extended(data: torch.Tensor, padded: torch.Size, dim: int, start: int, rows: int) -> torch.Tensor:
    """This rank's shard of ``data``, of its own class and in memory of its own."""
    whole = data.new_zeros(padded)
    shard = whole.narrow(dim, 0, rows)
    if rows > 0:
        shard.copy_(data.narrow(dim, start, rows))
    return shard


def is_extended(data: torch.Tensor) -> bool:
    """Whether ``data`` is of a class that brings the hooks, so that it cannot live in a buffer of plain numbers."""
    return type(data) not in (torch.Tensor, nn.Parameter) and has_hooks(data)
