"""Adapters of a reference of which one place is edited: casts, dtypes of sums, divide factors, ignored parameters."""

from __future__ import annotations

from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness.planted_reductions import Edit, edited

PER_PARAMETER = {
    # Inputs and outputs.
    "inputs-cast-unasked": Edit("per_parameter.unit:_cast_inputs", " or not policy.cast_forward_inputs", ""),
    "keywords-not-cast": Edit(
        "per_parameter.unit:_cast_inputs",
        "args, kwargs = cast(policy.param_dtype, (args, kwargs))",
        "args = cast(policy.param_dtype, args)",
    ),
    "recomputed-inputs-not-cast": Edit(
        "per_parameter.unit:Unit.pre_forward",
        "self._unshard_now()\n        return _cast_inputs(self._policy, args, kwargs)",
        "self._unshard_now()\n        return args, kwargs",
    ),
    "outputs-not-cast": Edit("per_parameter.unit:_cast_output", "if policy.output_dtype is None", "if True"),
    "lists-not-seen": Edit(
        "common.containers:map_tensors", "isinstance(value, (tuple, list))", "isinstance(value, tuple)"
    ),
    # Gradients.
    "reduced-in-the-dtype-of-compute": Edit(
        "per_parameter.reduction:_reduce_dtype", "group.precision.reduce_dtype or param.dtype", "param.compute_dtype"
    ),
    "unnamed-reduced-in-the-dtype-of-compute": Edit(
        "per_parameter.reduction:_reduce_dtype", "or param.dtype", "or param.compute_dtype"
    ),
    "sums-in-the-dtype-of-compute": Edit(
        "per_parameter.reduction:accumulate", "_reduce_dtype(group, param)", "param.compute_dtype"
    ),
    "unnamed-sums-in-the-dtype-of-compute": Edit(
        "per_parameter.reduction:accumulate",
        "_reduce_dtype(group, param)",
        "group.precision.reduce_dtype or param.compute_dtype",
    ),
    "microbatches-rounded-before-the-sum": Edit(
        "per_parameter.reduction:_accumulate_one", ".add_(grad)", ".add_(grad.to(dtype))"
    ),
    "gradients-in-the-dtype-of-compute": Edit(
        "per_parameter.param:ShardedParam.make_unsharded", "self.unsharded.grad_dtype = None", "pass"
    ),
    "last-microbatch-not-added": Edit(
        "per_parameter.reduction:_take_one", "        _accumulate_one(param, dtype)\n", ""
    ),
    # Division.
    "factor-forgotten": Edit(
        "per_parameter.reduction:Reducer._division", "if options.divide_factor is not None:", "if False:"
    ),
    "factor-is-the-ranks": Edit("common.divide:divide", "if divisor == world and world > 1", "if world > 1"),
    "ranks-after-the-sum": Edit("common.divide:divide", "after=divisor / before", "after=world / before"),
    # Ignored parameters.
    "ignored-are-sharded": Edit("per_parameter.construct:managed_params", "if param not in ignored:", "if True:"),
}

FLAT = {
    "flat-inputs-cast-unasked": Edit("flat.unit:FlatUnit._cast_inputs", " and casts and", " and"),
    "flat-root-alone-casts": Edit(
        "flat.unit:FlatUnit._cast_inputs", "casts = wanted or precision.cast_forward_inputs", "casts = wanted"
    ),
    "flat-recomputed-inputs-not-cast": Edit(
        "flat.unit:FlatUnit.pre_forward",
        "self._unshard_now()\n        return self._cast_inputs(args, kwargs)",
        "self._unshard_now()\n        return args, kwargs",
    ),
    "flat-reduced-in-the-dtype-of-compute": Edit(
        "flat.reduction:Reducer.reduce", "grad.to(self.reduce_dtype or grad.dtype)", "grad"
    ),
    "flat-gradients-stay-low": Edit(
        "flat.reduction:Reducer._accumulate", "shard.dtype if self._keep_low_precision else flat.dtype", "shard.dtype"
    ),
    "flat-buffers-in-the-dtype-of-compute": Edit(
        "flat.unit:_cast_buffer", "dtype = unit.precision.buffer_dtype", "dtype = unit.precision.param_dtype"
    ),
    "flat-buffers-of-the-outermost-unit": Edit("flat.unit:cast_buffers", "reversed(units)", "units"),
    # As parameters are, from originals of a higher dtype that no forward changes.
    "flat-buffers-cast-anew": Edit(
        "flat.unit:FlatUnit._root_pre_forward",
        "    self.iteration.forward_root = self\n",
        """    self.iteration.forward_root = self
    for buffer in self.wrapper.buffers() if self.precision.buffer_dtype is not None else []:
        buffer.copy_(self.__dict__.setdefault("originals", {}).setdefault(buffer, buffer.clone()))
""",
    ),
    "flat-integers-cast": Edit("flat.unit:_cast_buffer", " if buffer.is_floating_point() else None", ""),
    "flat-buffers-saved-as-they-are": Edit("flat.state_dict:finish", "value.to(dtype)", "value"),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER, ReferenceFlatAdapter: FLAT})
