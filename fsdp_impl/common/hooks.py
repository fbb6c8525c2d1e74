"""Where autograd and optimizers call back."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakMethod

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_impl.common.containers import map_tensors, tensors_requiring_grad
from fsdp_impl.common.private import current_graph_task_id, disable_dynamo, eval_frame_callback

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_graphs(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep ``torch.compile`` out of ``fn``: a graph would fix who holds which parameters when it was traced."""
    apart = cast(Callable[_P, _R], disable_dynamo(fn))

    @functools.wraps(fn)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # Where nothing is traced or compiled, as nearly always, `apart` would find that out in a dozen calls.
        if torch.compiler.is_dynamo_compiling() or eval_frame_callback() is not None:
            return apart(*args, **kwargs)
        return fn(*args, **kwargs)

    return run


class _CallOnBackward(torch.autograd.Function):
    """Identity whose backward calls ``callback`` once the gradients of all its inputs are known."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.callback = callback
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.callback()
        return (None, *grads)


def call_after_backward(callback: Callable[[], None], inputs: Any) -> Any:
    """Call ``callback`` when backward has passed the module that ``inputs`` are given to; returns inputs to give.

    Never called if no tensor of ``inputs`` requires grad: the end of backward must then do.
    """
    if not torch.is_grad_enabled():
        return inputs
    tensors = tensors_requiring_grad(inputs)
    if not tensors:
        return inputs
    replaced = iter(cast(Any, _CallOnBackward).apply(callback, *tensors))
    return map_tensors(lambda tensor: next(replaced) if tensor.requires_grad else tensor, inputs)


def call_before_backward(callback: Callable[[], None], outputs: Any) -> None:
    """Call ``callback`` when backward reaches any tensor of ``outputs``, so before the module that made them."""
    if not torch.is_grad_enabled():
        return

    for tensor in tensors_requiring_grad(outputs):
        _hook(tensor, callback)


def _hook(tensor: torch.Tensor, callback: Callable[[], None]) -> None:
    reached = False

    def on_grad(_: torch.Tensor) -> None:
        nonlocal reached
        reached = True
        callback()

    def on_base_grad(_: tuple[torch.Tensor, ...]) -> None:
        if not reached:
            callback()

    tensor.register_hook(on_grad)
    # An in-place operation on a view (`out += residual`) gives the view another history, without the hook, that leads
    # to whatever made its base. Nothing would gather the parameters then.
    if tensor._base is not None and tensor._base.grad_fn is not None:
        tensor._base.grad_fn.register_prehook(on_base_grad)


def call_when_accumulated(leaf: torch.Tensor, method: Callable[[], None]) -> None:
    """Call the bound ``method`` whenever autograd has added to ``leaf.grad``, as long as its object lives.

    The object is held weakly: the garbage collector does not see what torch's hooks of this kind hold, so an object
    that holds ``leaf`` in turn would stay for ever, and the model with it.
    """
    held = WeakMethod(method)

    def on_accumulated(_: torch.Tensor) -> None:
        if (call := held()) is not None:
            call()

    leaf.register_post_accumulate_grad_hook(on_accumulated)


def in_backward() -> bool:
    """Whether autograd is running, as during the recomputation of activation checkpointing."""
    return running_backward() is not None


def running_backward() -> int | None:
    """The number of the backward that autograd is running, the innermost one; its final callbacks belong to it."""
    number = current_graph_task_id()
    return None if number == -1 else number


def post_accumulate_of(param: torch.Tensor) -> tuple[Callable[[torch.Tensor], None], ...]:
    """The functions that users gave to ``param.register_post_accumulate_grad_hook``."""
    return tuple((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


def run_post_accumulate(param: torch.Tensor) -> None:
    """Autograd accumulates into unsharded parameters; users hook the sharded ones, whose gradient is there now."""
    if not getattr(param, "_post_accumulate_grad_hooks", None):
        return  # as for nearly all
    for hook in post_accumulate_of(param):
        hook(param)


# How many steps the optimizers of shards have taken in this process. A fused optimizer does not count a version of what
# it writes, so values that were gathered before a step cannot be known by versions alone.
_optimizer_steps = [0]


@outside_graphs
def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if any(hasattr(param, "_fsdp_impl_shard") for group in optimizer.param_groups for param in group["params"]):
        _optimizer_steps[0] += 1


# For good: it is for all optimizers, and holds nothing.
register_optimizer_step_post_hook(_count_step)


def count_steps_of(param: torch.Tensor) -> None:
    """Let :func:`optimizer_steps` count the steps of optimizers that have ``param``, a shard."""
    param._fsdp_impl_shard = True  # type: ignore[attr-defined]


def optimizer_steps() -> int:
    """How many steps the optimizers of shards have taken in this process, whichever shards."""
    return _optimizer_steps[0]
