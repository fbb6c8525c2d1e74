"""Reduce the gradients of a group: reduce-scatter over the shards, all-reduce over the replicas."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from fsdp_impl.common import collectives, divide, streams
from fsdp_impl.common.layout import Layout, build_layout, shard_view
from fsdp_impl.common.streams import Event, Stream
from fsdp_impl.per_parameter import gradients
from fsdp_impl.per_parameter.accumulation import Accumulator
from fsdp_impl.per_parameter.group import ParamGroup
from fsdp_impl.per_parameter.param import ShardedParam


class Reduced(NamedTuple):
    """Sums of the gradients of ``params``: ``shards`` is 1-D, laid out as ``layout``, of the reduce dtype."""

    params: tuple[ShardedParam, ...]
    layout: Layout
    shards: torch.Tensor


class Reducer:
    """Reduces the gradients of one group."""

    def __init__(self, group: ParamGroup) -> None:
        self._group = group
        self._accumulator = Accumulator(offloads=group.shards.offloads, pins=group.shards.pins)
        # Shards that replicas have not summed yet, in the memory of the reduce stream.
        self._partial: Reduced | None = None
        self._layouts: dict[tuple[Any, ...], Layout] = {}

    @torch.no_grad()
    def reduce(self, params: Sequence[ShardedParam], grads: list[torch.Tensor]) -> None:
        """Average ``grads`` (unsharded sizes) over the ranks and add each shard to ``param.sharded.grad``.

        Empties ``grads``, to free them as soon as they are copied in. With replicas and without
        ``options.all_reduce_grads`` the shards are kept, and added to the next ones.

        Raises:
            ValueError: if the gradients differ in dtype and there is no reduce dtype.
        """
        group, comm = self._group, self._group.comm
        completes_partial = self._partial is not None and group.options.all_reduce_grads
        if not params and not completes_partial:
            return
        with record_function(f"FSDP::reduce ({group.label})"):
            comm.release_reduce_inputs()
            comm.release_reduce_outputs()
            contributions, layout = self._copy_in(params, grads) if params else (None, None)
            streams.join(comm.reduce_stream, streams.current(group.device))
            with streams.use(comm.reduce_stream):
                summed = None
                if contributions is not None and layout is not None:
                    summed = Reduced(tuple(params), layout, self._reduce_scatter(contributions, layout))
                reduced = streams.record(comm.reduce_stream)
                total = self._with_partial(summed)
            if group.mesh.replicas is not None and not group.options.all_reduce_grads:
                self._partial, done = total, streams.record(comm.reduce_stream)
                comm.note_reduced(comm.reduce_stream, done)
            else:
                done = self._finish(total)
            if contributions is not None:
                # At shard size 1 the input is the output and is read until it has been accumulated.
                comm.keep_reduce_input(contributions, done if total.shards is contributions else reduced)

    def reset(self) -> None:
        """Forget shards that replicas have not summed."""
        self._partial = None

    def _copy_in(self, params: Sequence[ShardedParam], grads: list[torch.Tensor]) -> tuple[torch.Tensor, Layout]:
        """In the memory of the current stream, on which autograd made the gradients that are copied in."""
        layout = self._layout(params, gradients.reduce_dtype(self._group, params, grads))
        contributions = self._allocate(layout.world * layout.numel, layout.dtype)
        gradients.copy_in(params, grads, layout, contributions)
        grads.clear()
        return contributions, layout

    def _reduce_scatter(self, contributions: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The summed shards: 1-D of ``layout``, in the memory of the reduce stream."""
        group = self._group
        division = self._division(layout.dtype)
        divide.scale(contributions, division.before)
        if group.mesh.size == 1:
            return contributions
        output = self._allocate(layout.numel, layout.dtype)
        process_group = group.reduce_group
        assert process_group is not None
        if group.options.reduce_scatter is not None:
            group.options.reduce_scatter(
                output_tensor=output, input_tensor=contributions, group=process_group, op=division.reduce_op
            )
        else:
            collectives.reduce(output, contributions, process_group, division.reduce_op, unit=group.label)
        return output

    def _finish(self, total: Reduced) -> Event:
        """All-reduce, divide and accumulate; returns the event after which the gradients are there."""
        group, comm = self._group, self._group.comm
        stream = self._all_reduce_stream()
        division = self._division(total.layout.dtype)
        if stream is not comm.reduce_stream:
            streams.join(stream, comm.reduce_stream)
        with streams.use(stream):
            if group.mesh.replicas is not None:
                collectives.all_reduce(total.shards, group.mesh.replicas, division.all_reduce_op, unit=group.label)
            if group.options.all_reduce_hook is not None:
                group.options.all_reduce_hook(total.shards)
            divide.scale(total.shards, division.after)
            layout = self._layout(total.params, total.params[0].dtype)
            is_copying = self._accumulator.add(total.params, layout, total.shards.to(layout.dtype))
            done = streams.record(stream)
        comm.note_reduced(stream, done, host_waits=is_copying)
        if stream is not comm.reduce_stream:
            comm.keep_reduce_output(total.shards, done)
        return done

    def _all_reduce_stream(self) -> Stream:
        """All-reduces use other links than reduce-scatters, so they have a stream of their own."""
        options, comm = self._group.options, self._group.comm
        if options.all_reduce_hook is not None and options.all_reduce_hook_stream is not None:
            return options.all_reduce_hook_stream
        if self._group.mesh.replicas is not None or options.all_reduce_hook is not None:
            return comm.all_reduce_stream
        return comm.reduce_stream

    def _with_partial(self, summed: Reduced | None) -> Reduced:
        """``summed`` and what earlier backwards left, added up, on the reduce stream."""
        partial, self._partial = self._partial, None
        if partial is None or summed is None:
            total = summed or partial
            assert total is not None
            return total
        if partial.params == summed.params and partial.layout.dtype == summed.layout.dtype:
            summed.shards.add_(partial.shards)
            if self._group.mesh.size == 1:
                # Once a reduction's input, so in the memory of the current stream, which must not take it yet.
                self._group.comm.keep_reduce_input(partial.shards, streams.record(self._group.comm.reduce_stream))
            return summed
        # Another set of parameters had gradients then.
        either = set(partial.params) | set(summed.params)
        params = tuple(param for param in self._group.shards.params if param in either)
        layout = self._layout(params, summed.layout.dtype)
        shards = torch.zeros(layout.numel, dtype=layout.dtype, device=self._group.device)
        views = dict(zip(params, (shard_view(shards, slot) for slot in layout.slots), strict=True))
        for part in (partial, summed):
            for param, slot in zip(part.params, part.layout.slots, strict=True):
                views[param].add_(shard_view(part.shards, slot))
        return Reduced(params, layout, shards)

    def _division(self, dtype: torch.dtype) -> divide.Division:
        options, mesh = self._group.options, self._group.mesh
        extra: dict[str, Any] = {}
        if options.divide_factor is not None:
            extra["factor"] = options.divide_factor
        if options.force_sum:
            extra["force_sum"] = True
        return divide.divide(dtype, mesh.size, mesh.replicate_size, **extra)

    def _layout(self, params: Sequence[ShardedParam], dtype: torch.dtype) -> Layout:
        key = (dtype, *(param.serial for param in params))
        if key not in self._layouts:
            mesh, sizes, dims = self._group.mesh, [p.size for p in params], [p.dim for p in params]
            self._layouts[key] = build_layout(sizes, [dtype] * len(params), mesh.size, mesh.rank, dims)
        return self._layouts[key]

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        group = self._group
        if group.options.reduce_scatter is not None:
            return group.options.reduce_scatter.allocate((numel,), dtype=dtype, device=group.device)
        return torch.empty(numel, dtype=dtype, device=group.device)
