"""One parameter: what the modules see of it, sharded and not.

Three tensors tell its life. The *original* parameter is cut at construction and let go. The *sharded* parameter, a
DTensor, is what optimizers and checkpoints know; it lasts as long as the model. The *unsharded* parameter is an
autograd leaf whose bytes come with each gather and go with each reshard; it is made once, because autograd keeps
references to it between forward and backward.
"""

import itertools
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fsdp_impl.common import dtensor
from fsdp_impl.common.owner import Owner
from fsdp_impl.per_parameter.cut import Cut
from fsdp_impl.per_parameter.extensions import Extension

# Numbers original parameters. Not id(): a freed parameter's id comes back with another one.
_serial_numbers = itertools.count()


class ShardedParam:
    """One parameter of a group.

    Attributes:
        owners: where it is registered, at least once.
        fqn: its name from the root, known from lazy initialisation on; before, its name in its module.
        size: the unsharded size; of a tensor-parallel parameter that of this rank's part.
        dim: the dimension that it is cut along.
        sharded: the sharded parameter.
        slot: the local tensor of ``sharded`` while it lies in the group's buffer, else ``None``.
        unsharded: the unsharded parameter, ``None`` before the first unshard.
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
        *,
        param_dtype: torch.dtype | None,
        in_slot: bool,
    ) -> None:
        self.owners = owners
        self.fqn = owners[0].name
        self.size = cut.data.size()
        self.dim = cut.dim
        self.spec = cut.spec
        self._unsharded_spec = cut.unsharded
        self._data_parallel = cut.data_parallel
        self._param_dtype = param_dtype
        self.sharded = nn.Parameter(dtensor.wrap(local, self.spec), requires_grad=original.requires_grad)
        # Not `local` itself: nn.Parameter detaches, which makes another tensor object of the same memory.
        self.slot: torch.Tensor | None = self.local if in_slot else None
        self._slot_pointer = self.local.data_ptr() if in_slot else 0
        self.extension: Extension | None = None
        self.unsharded: nn.Parameter | None = None
        self.accumulated: torch.Tensor | None = None
        self.serial = _serial_number(original)
        self.register(self.sharded)

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, without padding."""
        return dtensor.local_of(self.sharded)

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the unsharded parameter. Only floating-point parameters are cast."""
        return self._param_dtype if self._param_dtype is not None and self.dtype.is_floating_point else self.dtype

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether the unsharded parameter is a DTensor too."""
        return self._unsharded_spec is not None

    def make_unsharded(self, data: torch.Tensor) -> None:
        """Let the unsharded parameter live in ``data`` (``size``, ``compute_dtype``)."""
        if self._unsharded_spec is not None:
            data = dtensor.wrap(data, dtensor.with_dtype(self._unsharded_spec, data.dtype))
        self.unsharded = nn.Parameter(data, requires_grad=False)

    def register(self, param: nn.Parameter) -> None:
        """Make ``param`` what the owners hold."""
        for owner in self.owners:
            if type(owner.module).__setattr__ is nn.Module.__setattr__:
                # The checks of nn.Module.__setattr__ cost more than all else here, and hold by construction.
                owner.module._parameters[owner.name] = param
            else:
                setattr(owner.module, owner.name, param)

    def adopt(self) -> None:
        """Take what the owners hold now for the sharded parameter, and note whether it still lies in its slot.

        ``load_state_dict(assign=True)`` and users replace the parameter; ``.to()`` and ``to_empty`` keep the object
        but swap its local tensor.

        Raises:
            ValueError: if it is no longer a DTensor of the same size, mesh and placements.
        """
        owner = self.owners[0]
        # Past nn.Module.__getattr__, which is slow; what is not found there is a module with attributes of its own.
        held = owner.module._parameters.get(owner.name)
        held = getattr(owner.module, owner.name) if held is None else held
        if held is not self.sharded:
            self._check(held)
            self.sharded = held
            self.register(held)
        local = self.local
        if self.slot is not None and local is self.slot and local.data_ptr() == self._slot_pointer:
            return
        self.slot = None
        self.spec = dtensor.with_dtype(self.spec, local.dtype)

    def move_to(self, slot: torch.Tensor) -> None:
        """Live in ``slot``, which holds the same values."""
        dtensor.set_local(self.sharded, slot)
        self.slot = slot
        self._slot_pointer = slot.data_ptr()

    def sync_requires_grad(self) -> None:
        """Users freeze and unfreeze the sharded parameter; autograd asks the unsharded one."""
        assert self.unsharded is not None
        if self.unsharded.requires_grad != self.sharded.requires_grad:
            self.unsharded.requires_grad_(self.sharded.requires_grad)

    def accumulate(self, dtype: torch.dtype | None) -> None:
        """Add the unsharded gradient, if there is one, to those of earlier backwards, in ``dtype`` if given."""
        grad = None if self.unsharded is None else self.unsharded.grad
        if self.unsharded is None or grad is None:
            return
        if self.accumulated is not None:
            self.accumulated += grad
        elif dtype is not None and dtype != grad.dtype:
            self.accumulated = grad.to(dtype)
        else:
            return  # it stays where it is, and autograd adds to it
        self.unsharded.grad = None

    def take_grad(self, dtype: torch.dtype | None) -> torch.Tensor | None:
        """Take the gradient of all backwards since the last reduction, ``None`` if there is none.

        A plain tensor of ``size``: a tensor-parallel gradient that is a pending sum over its mesh is summed here, in
        the reduce dtype ``dtype`` if given. A sum in the dtype of compute would lose what the reduce dtype is for.
        """
        if self.accumulated is not None:
            self.accumulate(dtype)
            grad, self.accumulated = self.accumulated, None
        elif self.unsharded is not None and self.unsharded.grad is not None:
            grad, self.unsharded.grad = self.unsharded.grad, None
        else:
            return None
        return grad if self._unsharded_spec is None else self._local_grad(grad, self._unsharded_spec, dtype)

    def zero_grad(self, device: torch.device) -> torch.Tensor:
        """A gradient of zeros, as :meth:`take_grad` returns one."""
        return torch.zeros(self.size, dtype=self.compute_dtype, device=device)

    def _local_grad(self, grad: torch.Tensor, spec: DTensorSpec, dtype: torch.dtype | None) -> torch.Tensor:
        assert isinstance(grad, DTensor), f"{self.fqn} is a DTensor but its gradient is a {type(grad)}"
        # What is pending over data-parallel dimensions is summed by the reduction.
        wanted = tuple(
            grad.placements[index] if index in self._data_parallel else placement
            for index, placement in enumerate(spec.placements)
        )
        if grad.placements != wanted:
            if dtype is not None and any(isinstance(placement, Partial) for placement in grad.placements):
                grad = cast(DTensor, grad.to(dtype))
            grad = grad.redistribute(placements=wanted)
        local = dtensor.local_of(grad)
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local

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


def _serial_number(original: nn.Parameter) -> int:
    if not hasattr(original, "_fsdp_impl_serial"):
        original._fsdp_impl_serial = next(_serial_numbers)  # type: ignore[attr-defined]
    serial: int = original._fsdp_impl_serial  # type: ignore[attr-defined]
    return serial
