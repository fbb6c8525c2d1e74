"""Tensors that choose what is gathered in their place: two halves of their numbers, which add up to the same bits."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardproof.harness.tensors import private
from shardproof.harness.tensors.trees import map_leaves, map_tensors, tensors_of


@dataclasses.dataclass
class Calls:
    """What the hooks of all tensors of a model were given and have returned.

    Attributes:
        before: of each call of ``fsdp_pre_all_gather``, the mesh's size, the full size, the number of outputs of
            the module, and the compute dtype of the policy.
        ranks: of the meshes that ``fsdp_pre_all_gather`` was given.
        gathered: the memory of what ``fsdp_post_all_gather`` was given, of each call.
        storages: of the full tensors that it has made, in the order of the first gathers.
        filled: how often it filled a tensor that it had made before.
        pads: how many of the two halves the first hook pads, on ranks that hold fewer rows: both, as it must.
        cuts: whether the second hook leaves out the rows of padding, as it may, when it makes a tensor.
    """

    before: list[tuple[int, tuple[int, ...], int, torch.dtype | None]] = dataclasses.field(default_factory=list)
    ranks: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    gathered: list[StorageWeakRef] = dataclasses.field(default_factory=list)
    storages: list[torch.UntypedStorage] = dataclasses.field(default_factory=list)
    filled: int = 0
    pads: int = 2
    cuts: bool = True


class Halves(torch.Tensor):
    """A tensor that is gathered as its values in bfloat16 and, apart, in its own dtype what those lack.

    It holds a plain tensor, as quantised tensors do. (A subclass that is itself the tensor would not outlive the
    operations by which a DTensor is made.)

    Attributes:
        held: the plain tensor.
        calls: shared by all tensors of a model.
    """

    held: torch.Tensor
    calls: Calls

    @staticmethod
    def __new__(cls, held: torch.Tensor, calls: Calls) -> Halves:
        made: Halves = private.need("torch.Tensor._make_wrapper_subclass")(
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=held.device
        )
        made.held, made.calls = held, calls
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["held"], self.calls

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], calls: Any, size: Any, stride: Any) -> Halves:
        return cls(inner["held"], calls)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        (first, *_) = [one for one in tensors_of((args, kwargs)) if isinstance(one, Halves)]
        unwrap = functools.partial(map_leaves, lambda one: one.held, kind=Halves)
        found = func(*unwrap(args), **unwrap(kwargs or {}))
        if func._schema.is_mutable:
            return args[0]
        return map_tensors(lambda one: cls(one, first.calls), found)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Any:
        """Return the two halves of the padded shard, and the full size."""
        return before(self.held, self.calls, mesh, outer_size, module, mp_policy)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        """Add up the two halves."""
        return after(self.calls, outputs, metadata, param_dtype, out)


def before(shard: torch.Tensor, calls: Calls, mesh: Any, size: torch.Size, module: Any, policy: Any) -> Any:
    """Return the two halves of the padded shard, and the full size."""
    calls.before.append((mesh.size(), tuple(size), getattr(module, "out_features", 0), policy.param_dtype))
    calls.ranks.add(tuple(mesh.mesh.flatten().tolist()))
    padded = shard.new_zeros(-(-size[0] // mesh.size()), *size[1:])
    padded[: shard.size(0)].copy_(shard)
    high = padded.to(torch.bfloat16)
    # Exact: what bfloat16 cuts off has fewer bits than the dtype.
    halves = (high, padded - high.to(padded.dtype))
    return tuple(half if index < calls.pads else half[: shard.size(0)] for index, half in enumerate(halves)), size


def after(calls: Calls, outputs: Any, size: torch.Size, dtype: torch.dtype, out: torch.Tensor | None) -> Any:
    """Add up the two halves, into a new tensor or into the one that was made before."""
    high, rest = outputs
    calls.gathered += [StorageWeakRef(output.untyped_storage()) for output in outputs]
    for output in outputs:
        begin, numel = output.storage_offset(), output.untyped_storage().nbytes() // output.element_size()
        assert begin == 0 and numel >= output.numel(), f"a gathered tensor begins at {begin} of {numel} elements"
    padded = (high.to(rest.dtype) + rest).to(dtype)
    whole = padded[: size[0]]
    if out is not None:
        calls.filled += 1
        # What autograd has saved is not changed: these are the same values again.
        with torch.no_grad(), private.need("torch.autograd._unsafe_preserve_version_counter")(out):
            out.copy_(whole)
        return None
    whole = whole.clone() if calls.cuts else padded
    calls.storages.append(whole.untyped_storage())
    return whole, (whole,)


def extend(model: nn.Module, calls: Calls) -> None:
    """Replace the matrices of a model by tensors with hooks, in place.

    Args:
        model: the model, not sharded yet.
        calls: takes what the hooks are given.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 2:
                setattr(module, name, nn.Parameter(Halves(parameter.detach(), calls)))


def extend_shard(parameter: DTensor, calls: Calls, *, both: bool = True, older: bool = False) -> None:
    """Give the shard of one sharded parameter the hooks.

    Args:
        parameter: the parameter; its local tensor itself gets them, of which ``to_local`` may make an alias.
        calls: takes what the hooks are given.
        both: whether it gets both hooks, or the first alone, which is to be refused.
        older: whether the first hook is of the older form, which is given the mesh alone.
    """
    shard: Any = parameter._local_tensor
    shard.fsdp_pre_all_gather = lambda mesh, size, stride, module, policy: before(
        shard, calls, mesh, size, module, policy
    )
    if older:
        size = parameter.size()
        module, policy = types.SimpleNamespace(out_features=size[0]), types.SimpleNamespace(param_dtype=None)
        shard.fsdp_pre_all_gather = lambda mesh: before(shard, calls, mesh, size, module, policy)
    if both:
        shard.fsdp_post_all_gather = lambda outputs, metadata, dtype, *, out=None: after(
            calls, outputs, metadata, dtype, out
        )
