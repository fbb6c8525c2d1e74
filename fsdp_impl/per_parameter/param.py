"""One parameter: what the modules see of it, sharded and not.

Three tensors tell its life. The *original* parameter is cut at construction and let go. The *sharded* parameter, a
DTensor, is what optimizers and checkpoints know; it lasts as long as the model. The *unsharded* parameter is an
autograd leaf whose bytes come with each gather and go with each reshard; it is made once, because autograd keeps
references to it between forward and backward.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_impl.common import dtensor
from fsdp_impl.common.mesh import ShardMesh

# Numbers original parameters. Not id(): a freed parameter's id comes back with another one.
_serial_numbers = itertools.count()


@dataclass(frozen=True)
class Owner:
    """A module attribute that holds the parameter; shared parameters have several."""

    module: nn.Module
    name: str


class ShardedParam:
    """One parameter of a group.

    Attributes:
        owners: where it is registered, at least once.
        fqn: its name from the root, known from lazy initialisation on; before, its name in its module.
        size: the unsharded size.
        sharded: the sharded parameter.
        slot: the local tensor of ``sharded`` while it lies in the group's buffer, else ``None``.
        unsharded: the unsharded parameter, ``None`` before the first unshard.
        serial: the same for two ShardedParams made from one original parameter, which is a mistake to report.
    """

    def __init__(self, original: nn.Parameter, owners: list[Owner], mesh: ShardMesh, local: torch.Tensor) -> None:
        self.owners = owners
        self.fqn = owners[0].name
        self.size = original.size()
        self.spec = dtensor.spec_for(mesh, self.size, original.dtype)
        self.sharded = nn.Parameter(dtensor.wrap(local, self.spec), requires_grad=original.requires_grad)
        # Not `local` itself: nn.Parameter detaches, which makes another tensor object of the same memory.
        self.slot: torch.Tensor | None = self.local
        self._slot_pointer = self.slot.data_ptr()
        self.unsharded: nn.Parameter | None = None
        self.serial = _serial_number(original)
        self.register(self.sharded)

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, without padding."""
        return dtensor.local_of(self.sharded)

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

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
        if local is self.slot and local.data_ptr() == self._slot_pointer:
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

    def _check(self, held: Any) -> None:
        if not isinstance(held, DTensor):
            raise ValueError(f"FSDP expects {self.fqn} to stay a DTensor, but it was replaced by a {type(held)}")
        spec = self.spec
        if (held.size(), held.device_mesh, held.placements) != (self.size, spec.mesh, spec.placements):
            raise ValueError(
                f"FSDP expects {self.fqn} to stay a DTensor of size {tuple(self.size)} placed "
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
