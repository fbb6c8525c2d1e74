"""Tensor subclasses that choose what is gathered (``fsdp_pre_all_gather``, ``fsdp_post_all_gather``).

A sharded local tensor with these methods, be they of its class or set on the object, is not gathered as it is. Before
each gather the first returns the tensors to gather instead, quantised for instance, and any metadata; after it the
second makes the unsharded parameter of the gathered ones.
"""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_impl.common.layout import contiguous_stride
from fsdp_impl.common.policies import MixedPrecisionPolicy

if TYPE_CHECKING:
    from fsdp_impl.per_parameter.param import ShardedParam


def has_hooks(local: torch.Tensor) -> bool:
    """Whether ``local`` brings the two methods.

    Raises:
        AssertionError: if it brings one of them.
    """
    before, after = hasattr(local, "fsdp_pre_all_gather"), hasattr(local, "fsdp_post_all_gather")
    if before != after:
        raise AssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather extensions: "
            f"{type(local)} has only fsdp_{'pre' if before else 'post'}_all_gather"
        )
    return before


class Extension:
    """What one parameter's hooks need between calls."""

    def __init__(self) -> None:
        # Gathered tensors, 1-D: views of the group's unsharded memory, without bytes between reshard and unshard.
        self.gathered: list[torch.Tensor] = []
        # Of this rank's inputs.
        self.sizes: list[torch.Size] = []
        self._metadata: Any = None
        # What the unsharded parameter lives in, as its maker told, with its sizes: freed and allocated with the group.
        self._inner: list[tuple[torch.UntypedStorage, int]] = []

    def inputs(
        self,
        param: "ShardedParam",
        padded: torch.Size,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        device: torch.device,
    ) -> list[torch.Tensor]:
        """The tensors to gather, flat and in any dtypes.

        Args:
            param: the parameter.
            padded: the size of a full chunk; every rank must give as much.
            mesh: the sharded dimension, for the hook.
            policy: for the hook.
            device: where to gather.
        """
        local: Any = param.local.to(device, non_blocking=True) if param.local.device != device else param.local
        hook = local.fsdp_pre_all_gather
        number = len(inspect.signature(hook).parameters)
        if number == 1:  # an older form
            inputs, self._metadata = hook(mesh)
        elif number == 5:
            module = param.owners[0].module
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
            with cast(Any, torch.autograd)._unsafe_preserve_version_counter(param.unsharded):
                hook(outputs, self._metadata, dtype, out=param.unsharded)
            return
        data, inner = hook(outputs, self._metadata, dtype)
        self._inner = [(tensor.untyped_storage(), tensor.untyped_storage().size()) for tensor in inner]
        if data.size() != param.size:  # padded, as the gathered tensors are
            data = torch.as_strided(data, param.size, contiguous_stride(param.size), 0)
        param.make_unsharded(data)

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


def cut_local(data: torch.Tensor, padded: torch.Size, dim: int, start: int, rows: int) -> torch.Tensor:
    """This rank's shard of ``data``, of its own class and in memory of its own."""
    whole = data.new_zeros(padded)
    shard = whole.narrow(dim, 0, rows)
    if rows > 0:
        shard.copy_(data.narrow(dim, start, rows))
    return shard


def is_foreign(data: torch.Tensor) -> bool:
    """Whether ``data`` is of a class that brings the hooks, so that it cannot live in a buffer of plain numbers."""
    return type(data) not in (torch.Tensor, nn.Parameter) and has_hooks(data)
