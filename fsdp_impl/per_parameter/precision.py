"""Casts at the borders of a unit's forward."""

from typing import Any

from fsdp_impl.common.containers import cast
from fsdp_impl.common.policies import MixedPrecisionPolicy


def cast_inputs(policy: MixedPrecisionPolicy, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast floating-point tensors in ``args`` and ``kwargs``, in any container, as ``policy`` says."""
    if policy.param_dtype is None or not policy.cast_forward_inputs:
        return args, kwargs
    args, kwargs = cast(policy.param_dtype, (args, kwargs))
    return args, kwargs


def cast_output(policy: MixedPrecisionPolicy, output: Any) -> Any:
    """Cast floating-point tensors in ``output``, in any container, as ``policy`` says."""
    return output if policy.output_dtype is None else cast(policy.output_dtype, output)
