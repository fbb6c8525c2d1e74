"""Parameters that choose themselves what is gathered, by hooks of their local tensors.

A sharded local tensor with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, of its class or set on the object, is
not gathered as it is. Before each gather the first returns the tensors to gather instead, quantised for instance, and
any metadata; after it the second makes the unsharded parameter of the gathered ones. A third may say that these are not
needed any more then.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_impl.common.layout import contiguous_stride, shard_rows
from fsdp_impl.common.private import preserve_version_counter
from fsdp_impl.per_parameter.layout import UnshardedBuffer, build_layout, shard_size, shard_view
from fsdp_impl.per_parameter.options import MixedPrecisionPolicy
from fsdp_impl.per_parameter.param import Cut, ShardedParam
from fsdp_impl.per_parameter.shards import Memory, Shards

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


def is_extended(data: torch.Tensor) -> bool:
    """Whether ``data`` is of a class that brings the hooks, so that it cannot live in a buffer of plain numbers."""
    return type(data) not in (torch.Tensor, nn.Parameter) and has_hooks(data)


class ExtendableShards(Shards):
    """The sharded parameters of one group, of which some may bring hooks.

    Without any they are those of :class:`Shards`. With some, each lies in a tensor of its own class, and all are copied
    into the gather's input: what the hooks return, and the others cast to the dtype of compute.
    """

    def _cut(self, cuts: Sequence[Cut]) -> list[torch.Tensor]:
        # Of what the hooks have returned last: unsharded sizes, in the order of the slots, and the indices of theirs. A
        # hook may expect that a tensor it is given begins its storage.
        self._sizes: list[torch.Size] = []
        self._apart: set[int] = set()
        self._extensions: dict[ShardedParam, Extension] = {}
        self.are_extended = any(is_extended(cut.data) for cut in cuts)
        return self._cut_apart(cuts) if self.are_extended else super()._cut(cuts)

    def _cut_apart(self, cuts: Sequence[Cut]) -> list[torch.Tensor]:
        found = []
        for cut in cuts:
            start, rows = shard_rows(cut.data.size(cut.dim), self._mesh.size, self._mesh.rank)
            padded = shard_size(cut.data.size(), self._mesh.size, 0, cut.dim)
            local = _cut_extended(cut.data, padded, cut.dim, start, rows)
            home = "cpu" if self.offloads and not local.is_meta else local.device
            found.append(local.to(home).pin_memory() if self.pins and not local.is_meta else local.to(home))
        return found

    def find_extensions(self) -> None:
        """Look which parameters bring hooks, now that they are final."""
        for param in self.params:
            param.adopt()
            if param not in self._extensions and has_hooks(param.local):
                self._extensions[param] = Extension(param.local)
                self.are_extended = True

    def memory(self) -> list[Memory]:
        """The local tensors. A subclass that is gathered by hooks may lie nowhere."""
        return [Memory(param.local, None, 0) for param in self.params] if self.are_extended else super().memory()

    def gather_input(self, device: torch.device) -> torch.Tensor:
        """What to gather: 1-D, in the order of ``gather_layout``, padding zero."""
        if not self.are_extended:
            return super().gather_input(device)
        self.check_home()
        pieces: list[torch.Tensor] = []
        sizes: list[torch.Size] = []
        dims: list[int] = []
        apart: set[int] = set()
        mesh, shard_mesh = self._mesh, self._mesh.shard_dim_mesh()
        for param in self.params:
            extension = self._extensions.get(param)
            if extension is None:
                pieces.append(param.local.to(device, param.compute_dtype))
                sizes.append(param.size)
                dims.append(param.dim)
                continue
            padded = shard_size(param.size, mesh.size, 0, param.dim)
            inputs = extension.inputs(param, padded, shard_mesh, param.precision, device)
            apart |= set(range(len(pieces), len(pieces) + len(inputs)))
            pieces += inputs
            sizes += [torch.Size([piece.numel() * mesh.size]) for piece in inputs]
            dims += [0] * len(inputs)
        layout = build_layout(sizes, [piece.dtype for piece in pieces], mesh.size, mesh.rank, dims)
        if (layout, sizes, apart) != (self.gather_layout, self._sizes, self._apart):
            self.gather_layout, self._sizes, self._apart = layout, sizes, apart
        buffer = torch.zeros(layout.numel, dtype=layout.dtype, device=device)
        for slot, piece in zip(layout.slots, pieces, strict=True):
            shard_view(buffer, slot).copy_(piece)
        return buffer

    def make_unsharded(self, device: torch.device) -> UnshardedBuffer:
        """Let the unsharded parameters, and what the hooks have gathered, live in memory that is returned."""
        if not self.are_extended:
            return super().make_unsharded(device)
        buffer = UnshardedBuffer(self._sizes, self.gather_layout, device, apart=self._apart)
        remaining = iter(buffer.tensors)
        with torch.inference_mode(False):
            for param in self.params:
                extension = self._extensions.get(param)
                if extension is None:
                    param.make_unsharded(next(remaining))
                else:
                    param.unsharded = None
                    extension.gathered = [next(remaining) for _ in extension.sizes]
        return buffer

    def finish_unsharded(self) -> None:
        """The gathered tensors are in place: let the hooks make unsharded parameters of theirs."""
        if not self.are_extended:
            return
        with torch.inference_mode(False), torch.no_grad():
            for param, extension in self._extensions.items():
                extension.finish(param, param.compute_dtype)

    def free_unsharded(self) -> None:
        """Free what the hooks allocated beside the gathered tensors."""
        for extension in self._extensions.values():
            extension.free()


def _cut_extended(data: torch.Tensor, padded: torch.Size, dim: int, start: int, rows: int) -> torch.Tensor:
    """This rank's shard of ``data``, of its own class and in memory of its own."""
    whole = data.new_zeros(padded)
    shard = whole.narrow(dim, 0, rows)
    if rows > 0:
        shard.copy_(data.narrow(dim, start, rows))
    return shard


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
        param: ShardedParam,
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

    def finish(self, param: ShardedParam, dtype: torch.dtype) -> None:
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

    def _check_padded(self, param: ShardedParam, inputs: Sequence[torch.Tensor], padded: torch.Size) -> None:
        # Only ranks with padding can notice; the others would wait for them in the gather.
        if param.local.size() != padded and any(tensor.size() != padded for tensor in inputs):
            raise AssertionError(
                f"When a parameter is unevenly sharded by FSDP (orig size={tuple(param.size)}), fsdp_pre_all_gather "
                f"must return all-gather inputs with the padded sharded size {tuple(padded)} but got "
                f"{[tuple(tensor.size()) for tensor in inputs]} for {param.fqn}"
            )
