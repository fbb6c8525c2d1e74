"""Unsharded gradients: accumulate those that are not reduced yet, take them for a reduction, copy them in."""

from collections.abc import Sequence

import torch

from fsdp_impl.common.layout import Layout
from fsdp_impl.per_parameter.group import ParamGroup
from fsdp_impl.per_parameter.param import ShardedParam


@torch.no_grad()
def accumulate(group: ParamGroup) -> None:
    """Keep the gradients of a backward that does not reduce, in the reduce dtype: sums in a low precision lose bits."""
    for param in group.shards.params:
        param.accumulate(group.precision.reduce_dtype)


@torch.no_grad()
def take(group: ParamGroup) -> tuple[list[ShardedParam], list[torch.Tensor]]:
    """Take the gradients that autograd left on unsharded parameters, and the parameters that have one."""
    params: list[ShardedParam] = []
    grads: list[torch.Tensor] = []
    for param in group.shards.params:
        grad = param.take_grad(group.precision.reduce_dtype)
        if grad is None and group.options.reduce_unused and param.sharded.requires_grad:
            grad = param.zero_grad(group.device)
        if grad is not None:
            params.append(param)
            grads.append(grad)
    return params, grads


def drop(group: ParamGroup) -> None:
    """Forget all unsharded gradients."""
    for param in group.shards.params:
        param.accumulated = None
        if param.unsharded is not None:
            param.unsharded.grad = None


def reduce_dtype(group: ParamGroup, params: Sequence[ShardedParam], grads: Sequence[torch.Tensor]) -> torch.dtype:
    """The policy's reduce dtype, or the one that all ``grads`` have.

    Asked at each reduction, not settled once: parameters may be cast, frozen and unfrozen in between.

    Raises:
        ValueError: if the gradients differ in dtype and the policy does not say which to take.
    """
    if group.precision.reduce_dtype is not None:
        return group.precision.reduce_dtype
    dtypes = {grad.dtype for grad in grads}
    if len(dtypes) > 1:
        found = {param.fqn: grad.dtype for param, grad in zip(params, grads, strict=True)}
        raise ValueError(f"FSDP reduces the gradients of a group together and expects one dtype, but got {found}")
    return dtypes.pop()


def copy_in(
    params: Sequence[ShardedParam], grads: Sequence[torch.Tensor], layout: Layout, contributions: torch.Tensor
) -> None:
    """Cut every gradient into padded chunks (padding zero) and lay them out rank-major in ``contributions``.

    ``contributions`` is 1-D, ``layout.world * layout.numel``, of the reduce dtype, which may differ from the
    gradients': the kernel casts.
    """
    # The kernel refuses empty tensors, which need no room either.
    filled = [_rows(grad, param.dim, layout.world) for param, grad in zip(params, grads, strict=True) if grad.numel()]
    if not filled:
        return
    if len({grad.dtype for grad in filled}) > 1:
        # One parameter's gradient was accumulated in the reduce dtype, another's is new and in that of compute.
        filled = [grad.to(layout.dtype) for grad in filled]
    torch._chunk_cat(filled, 0, layout.world, out=contributions.view(layout.world, -1))


def _rows(grad: torch.Tensor, dim: int, world: int) -> torch.Tensor:
    """``grad`` with the chunks along ``dim`` one after the other along dimension 0."""
    return grad if dim == 0 or world == 1 else torch.cat(torch.chunk(grad, world, dim=dim), dim=0)
