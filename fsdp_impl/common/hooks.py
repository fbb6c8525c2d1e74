"""Where autograd calls back."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakMethod

import torch

from fsdp_impl.common.containers import map_tensors, tensors_requiring_grad
from fsdp_impl.common.private import current_graph_task_id, disable_dynamo, eval_frame_callback, func_transform

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

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # An input that is returned as it is must have a tangent that is a view of the input's.
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)


class _CallOnBackwardInTransforms(_CallOnBackward):
    """The same for the transforms of ``torch.func``, which want the context apart; each call then reads a signature."""

    @staticmethod
    def forward(callback: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.callback = inputs[0]

    @staticmethod
    def vmap(_: Any, in_dims: tuple[Any, ...], callback: Callable[[], None], *inputs: torch.Tensor) -> tuple[Any, Any]:
        return cast(Any, _CallOnBackwardInTransforms).apply(callback, *inputs), in_dims[1:]


def call_after_backward(callback: Callable[[], None], inputs: Any) -> Any:
    """Call ``callback`` when backward has passed the module that ``inputs`` are given to; returns inputs to give.

    Never called if no tensor of ``inputs`` requires grad: the end of backward must then do.
    """
    if not torch.is_grad_enabled():
        return inputs
    tensors = tensors_requiring_grad(inputs)
    if not tensors:
        return inputs
    function = _CallOnBackward if func_transform() is None else _CallOnBackwardInTransforms
    replaced = iter(cast(Any, function).apply(callback, *tensors))
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
