"""One parameter: how it is cut, and what the modules see of it, sharded and not.

A parameter has three forms. The *original* one is cut at construction and dropped. The *sharded* parameter, a DTensor,
is what optimizers and checkpoints use; it lasts as long as the model. The *unsharded* parameter is an autograd leaf
whose bytes come with each gather and go with each reshard (see Note: unsharded parameters).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_impl.common import dtensor
from fsdp_impl.common.changes import Changes
from fsdp_impl.common.mesh import concatenate
from fsdp_impl.common.owner import Owner
from fsdp_impl.common.private import DTensorSpec, StridedShard, sets_grad_dtype
from fsdp_impl.per_parameter.mesh import ShardMesh, mesh_of_parameter
from fsdp_impl.per_parameter.options import MixedPrecisionPolicy

# How a parameter is cut


PlacementFn = Callable[[nn.Parameter], Any]
"""Returns ``None``, a ``Shard``, or a ``ShardPlacementResult``."""


@dataclass(frozen=True)
class UnshardedDTensor:
    """An unsharded parameter of ``spec``, on a mesh of tensor, sequence or expert parallelism.

    Derived classes are those of a mesh that has the data-parallel dimensions too (:mod:`spmd`).
    """

    spec: DTensorSpec

    def parameter(self, data: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """The unsharded parameter, of which ``data`` is this rank's part."""
        whole = dtensor.wrap(data, dtensor.with_dtype(self.spec, data.dtype))
        return nn.Parameter(whole, requires_grad=requires_grad)

    def gradient(self, grad: torch.Tensor, name: str) -> DTensor:
        """``grad`` as a DTensor; ``name`` names the parameter."""
        assert isinstance(grad, DTensor), f"{name} is a DTensor but its gradient is a {type(grad)}"
        return grad

    def wanted(self, grad: DTensor) -> tuple[Placement, ...]:
        """The placements with which the local tensor of ``grad`` is this rank's part of the gradient."""
        return self.spec.placements


@dataclass(frozen=True)
class Cut:
    """One original parameter and its cut.

    Attributes:
        data: what is cut: the parameter, or of a DTensor the local tensor.
        spec: of the sharded parameter.
        unsharded: how the unsharded parameter is a DTensor; ``None`` of a plain one.
    """

    data: torch.Tensor
    dim: int
    spec: DTensorSpec
    unsharded: UnshardedDTensor | None


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
    data, dim = local_and_dim(param, name, mesh, placement)
    if isinstance(param, DTensor):
        return _cut_tensor_parallel(param, data, dim, mesh)
    spec = dtensor.spec_for(mesh.mesh, mesh.placements(Shard(dim)), param.size(), param.dtype)
    return Cut(data, dim, spec, None)


def local_and_dim(param: nn.Parameter, name: str, mesh: ShardMesh, placement: Shard | None) -> tuple[torch.Tensor, int]:
    """This rank's part of ``param``, called ``name``, and the dimension to cut it along; refuses what cannot be cut."""
    data = dtensor.local_of(param) if isinstance(param, DTensor) else param.detach()
    return data, _checked_dim(placement, data, param, name, mesh)


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


def shard_along(dim: int, split_factor: int) -> Placement:
    """Shard along ``dim``; strided if other mesh dimensions cut it before, into ``split_factor`` parts.

    The mesh lists data parallelism first, but it cuts last: what is cut is already a tensor-parallel shard. A plain
    ``Shard`` would claim the order of the mesh, and a full tensor would be put together in the wrong order.
    """
    return StridedShard(dim, split_factor=split_factor) if split_factor > 1 else Shard(dim)


def parts_of(mesh: DeviceMesh, placements: tuple[Placement, ...], dim: int, start: int = 0) -> int:
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
    shard = shard_along(dim, parts_of(old.mesh, old.placements, dim))
    spec = dtensor.spec_for(
        concatenate([mesh.mesh, old.mesh]), (*mesh.placements(shard), *old.placements), param.size(), param.dtype
    )
    return Cut(data, dim, spec, UnshardedDTensor(old))


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
        self.unsharded_form = cut.unsharded
        self.precision = precision
        self.sharded = nn.Parameter(dtensor.wrap(local, self.spec), requires_grad=original.requires_grad)
        self.own_grad_dtype = OwnGradDtype()
        self.own_grad_dtype.keep(original)
        self.own_grad_dtype.keep(self.sharded)
        self._changes = changes
        changes.watch(self.sharded)
        self.slot: torch.Tensor | None = None
        self.slot_pointer = 0
        if in_slot:
            self.move_to(local)  # nn.Parameter has detached: another tensor, with a version of its own
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

    def make_unsharded(self, data: torch.Tensor) -> None:
        """Let the unsharded parameter live in ``data`` (``size``, ``compute_dtype``)."""
        # A cast between two microbatches makes it anew; what the first has left here is still to be reduced.
        grad = None if self.unsharded is None else self.unsharded.grad
        if self.unsharded_form is None:
            self.unsharded = nn.Parameter(data, requires_grad=self.trains)
        else:
            self.unsharded = self.unsharded_form.parameter(data, requires_grad=self.trains)
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
        if is_same and self.lies_in_slot():
            return
        self.own_grad_dtype.keep(held)
        self.slot = None
        self.spec = dtensor.with_dtype(self.spec, self.dtype)
        # Conversions swap a DTensor with another one, whose attributes the object has then.
        self._changes.watch(held)

    def lies_in_slot(self) -> bool:
        """Whether the local tensor is that of its slot, and has no other data."""
        return self.slot is not None and self.local is self.slot and self.slot.data_ptr() == self.slot_pointer

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


# A dtype of gradients that user code has set


class OwnGradDtype:
    """The ``grad_dtype`` that user code has set on one parameter; torch's casts and loads make tensors without it."""

    def __init__(self) -> None:
        self._set: tuple[torch.dtype | None, ...] = ()

    def keep(self, param: nn.Parameter) -> None:
        """Remember what user code has set on ``param``, or set there what it has set before."""
        if sets_grad_dtype(param):
            self._set = (param.grad_dtype,)
        elif self._set:
            (param.grad_dtype,) = self._set

    def take_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        """Take the gradient of ``param`` if user code has set its dtype, which a cast of the parameter would change."""
        self.keep(param)
        if not self._set:
            return None
        grad, param.grad = param.grad, None
        return grad


@contextmanager
def own_grad_dtypes_kept(params: Sequence[ShardedParam]) -> Iterator[None]:
    """Inside, where ``params`` may be cast, gradients whose dtype user code has set are not."""
    taken = [(param, param.own_grad_dtype.take_grad(param.sharded)) for param in params]
    yield
    for param, grad in taken:
        if grad is not None:
            param.sharded.grad = grad.to(param.sharded.device)
