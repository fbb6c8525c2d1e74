"""A unit: what happens around the forward and backward of one wrapper, and which unit to gather ahead of its use."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from fsdp_impl.common import hooks, modes, ranges, streams
from fsdp_impl.common.changes import drop_stale
from fsdp_impl.common.containers import cast, map_tensors, tensors_requiring_grad
from fsdp_impl.common.iteration import Backward, BackwardEvent, Iteration, Phase
from fsdp_impl.common.order import OrderCheck
from fsdp_impl.common.owner import Owner
from fsdp_impl.common.private import queue_callback
from fsdp_impl.flat.group import FlatContext, FlatGroup
from fsdp_impl.flat.options import (
    BackwardPrefetch,
    Ignored,
    MixedPrecision,
    ShardingStrategy,
    StateDictSettings,
    settings_of,
)
from fsdp_impl.flat.ranks import Ranks
from fsdp_impl.flat.reduction import Gradients, Reducer
from fsdp_impl.flat.shards import FlatShards

# Note: references
# A model that nobody has any more is freed at once, not when the garbage collector runs: no chain of references leads
# from a unit back to itself. Strong ones go down: wrapper -> unit -> group -> shards -> wrapped modules, and so to the
# wrappers inside; and from a graph that has yet to run backward to the units that it needs. What leads up is weak: a
# unit's wrapper, the units and groups of an iteration, and what the unsharded parameter calls once it has its gradient.


class IterationContext(Iteration["FlatUnit", FlatGroup]):
    """The state of one forward and backward of the units under one root.

    In backward the group whose forward came before is gathered ahead: its gather is issued before (or, to save memory,
    after) a unit's backward. In forward the host runs ahead of the device and gathers are queued early by themselves;
    where it does not, ``forward_prefetch`` gathers the group that came next in the first forward.
    """

    def __init__(self, units: Iterable["FlatUnit"] = (), order: OrderCheck | None = None) -> None:
        super().__init__(units, order)
        # Groups in the order of the first training forward's gathers, each once: what forward prefetches. Weak, as all
        # here (Note: references): a group leads to the wrappers inside its modules, and so back here.
        self._first_order: list[ref[FlatGroup]] = []

    def record_first(self, group: FlatGroup) -> None:
        """Note ``group``'s first gather, once and for all."""
        if group.first_index is None:
            group.first_index = len(self._first_order)
            self._first_order.append(ref(group))

    def prefetch_next(self, group: FlatGroup) -> None:
        """Issue the gather of the group that came after ``group`` in the first forward."""
        assert group.first_index is not None
        index = group.first_index + 1
        if index < len(self._first_order) and (following := self._first_order[index]()) is not None:
            _prefetch(following, ahead=True)

    def prefetch_previous(self, group: FlatGroup, *, ahead: bool) -> None:
        """Issue the gather of the group that ran forward before ``group``, if backward has yet to reach it.

        ``ahead``: before the compute of ``group`` is queued; not behind it.
        """
        previous = self.pass_forward(group)
        while previous is group:  # it ran twice in a row, and is gathered once for both
            previous = self.pass_forward(group)
        if previous is not None and previous.wanted_in_backward:
            _prefetch(previous, ahead=ahead)


def _prefetch(target: FlatGroup, *, ahead: bool) -> None:
    with ranges.named("prefetch", target.label):
        target.unshard(ahead=ahead)


@dataclass(frozen=True)
class UnitOptions:
    """What the constructor's arguments came to for one unit; see ``FullyShardedDataParallel``.

    Attributes:
        synced: whether the first rank's values were given to all.
        use_orig: whether the original parameters stay visible.
        buffer_dtypes: of buffers that are not ignored, by their names from the wrapped module, before any cast.
        full_in_evaluation: the same by their places, if evaluation is to be in full precision, else ``None``.
    """

    ranks: Ranks
    device: torch.device
    strategy: ShardingStrategy
    precision: MixedPrecision
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limits_gathers: bool
    use_orig: bool
    synced: bool
    ignored: Ignored
    buffer_dtypes: dict[str, torch.dtype]
    full_in_evaluation: dict[Owner, torch.dtype] | None


class FlatUnit:
    """State of one wrapper.

    Attributes:
        group: its parameters, ``None`` if there were none left to shard.
        checks_order: whether the order of forwards is checked, if this becomes the root.
        is_root: ``None`` before lazy initialisation.
        in_full_precision: whether no mixed precision is used, in evaluation where the environment selects that.
        is_summoned: whether the modules hold whole parameters, inside ``summon_full_params``.
        is_exposed: whether the modules hold flat parameters instead of original ones, inside ``.to()``.
        syncs: whether backward reduces gradients; ``no_sync`` clears it.

    Args:
        initialize: called with the unit before each forward; the first call under a root decides who it is.
    """

    def __init__(
        self,
        wrapper: nn.Module,
        shards: FlatShards | None,
        options: UnitOptions,
        initialize: Callable[["FlatUnit"], None],
    ) -> None:
        self._wrapper = ref(wrapper)
        self._initialize = initialize
        self.options = options
        self.device = options.device
        self.checks_order = dist.get_debug_level() == dist.DebugLevel.DETAIL
        self.state_dict_settings: StateDictSettings = settings_of()
        self.is_root: bool | None = None
        self.phase = Phase.IDLE
        self.syncs = True
        self.in_full_precision = False
        self.is_summoned = False
        self.is_exposed = False
        self.context = FlatContext(options.device)
        self.iteration = IterationContext()
        self.group: FlatGroup | None = None
        self.gradients: Gradients | None = None
        self.reducer: Reducer | None = None
        if shards is not None:
            precision = options.precision
            self.group = FlatGroup(shards, options.device, precision.param_dtype, self.context, self._on_gradient)
            self.gradients = Gradients(self.group)
            self.reducer = Reducer(self.group, self.gradients, precision)

    @property
    def wrapper(self) -> nn.Module:
        wrapper = self._wrapper()
        assert wrapper is not None, "a unit outlived its wrapper"
        return wrapper

    def share(self, context: FlatContext, iteration: IterationContext) -> None:
        self.context = context
        self.iteration = iteration
        if self.group is not None:
            self.group.share_context(context)
            self.group.first_index = None

    # Forward

    @hooks.outside_graphs
    def pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Unshard, and return the inputs to run forward with."""
        if self._recomputes():
            # After pre-backward has unsharded; an earlier post-backward may have resharded since.
            self._unshard_now()
            return self._cast_inputs(args, kwargs)
        self._initialize(self)
        if self.iteration.forward_root is None:
            args, kwargs = self._root_pre_forward(args, kwargs)
        self.phase = Phase.FORWARD
        if self.group is not None:
            if not hooks.in_backward():
                if self.iteration.order is not None:
                    self.iteration.order.before_gather(self.group.names, self.group.ranks.group)
                self.iteration.record_first(self.group)
            self._unshard_now()
            if self.options.forward_prefetch and not hooks.in_backward():
                self.iteration.prefetch_next(self.group)
            if not self.group.shards.flat.requires_grad:
                # Nothing accumulates, so there is no other sign that backward has passed.
                args, kwargs = hooks.call_after_backward(self._reshard_after_backward, (args, kwargs))
        return self._cast_inputs(args, kwargs)

    @hooks.outside_graphs
    def post_forward(self, output: Any) -> Any:
        """Reshard, and return the output to give to the caller."""
        if self._recomputes():
            return output
        if self.group is not None:
            # A re-entrant recomputation, inside backward, is followed by its own backward: it would gather again.
            if self._frees_after_forward() and not hooks.in_backward():
                self.group.reshard()
            else:
                # Kept, but not shown (Note: held by modules).
                self.group.shards.register()
            if not hooks.in_backward():
                self.iteration.record_forward(self.group)
            if torch.is_grad_enabled():
                self.group.wanted_in_backward = bool(tensors_requiring_grad(output))
        hooks.call_before_backward(self._pre_backward, output)
        self.phase = Phase.IDLE
        if self.iteration.forward_root is self:
            if self.is_root and self.iteration.order is not None:
                self.iteration.order.end(group.ranks.group for group in self.iteration.groups)
            self._root_post_forward()
        return output

    @hooks.outside_graphs
    def abandon_forward(self) -> None:
        """Forward raised: be ready for another one, whatever has been gathered."""
        if self._recomputes():
            return
        self.phase = Phase.IDLE
        if hooks.in_backward():
            # So ends a recomputation that has all that backward needs. Backward goes on, with what is gathered.
            if self.group is not None:
                self.group.shards.register()
            if self.iteration.forward_root is self:
                self._root_post_forward()
            return
        if self.iteration.forward_root is self:
            for group in self.iteration.groups:
                group.reshard()
            self._forget_order()
            self._root_post_forward()
        elif self.group is not None:
            # The model around it may catch the exception, and no backward will pass the unit.
            self.group.reshard()

    def _recomputes(self) -> bool:
        """Whether activation checkpointing runs this forward again, inside the unit's backward."""
        return self.phase is Phase.PRE_BACKWARD and hooks.in_backward()

    def _root_pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.recover()
        self.iteration.begin_forward(self, self.wrapper)
        if self.is_root and self.iteration.order is not None:
            self.iteration.order.begin(training=self.wrapper.training)
        if self.options.full_in_evaluation is not None and not hooks.in_backward():
            changes = [unit.choose_precision() for unit in self.iteration.units]
            if any(changes):
                cast_buffers(self.iteration.units)
        drop_stale(self.iteration.groups)
        self._hide_unsharded_gradients()
        # Gathers read the sharded parameters, which the optimizer wrote on the current stream.
        streams.join(self.context.gather_stream, streams.current(self.device))
        if self.device.type != "cpu":
            args, kwargs = map_tensors(lambda tensor: tensor.to(self.device), (args, kwargs))
        return args, kwargs

    def _root_post_forward(self) -> None:
        self.iteration.end_forward()
        self.context.release_all_retired()
        if not hooks.in_backward():
            # A unit inside of a module that is recomputed is the root of that forward; backward goes on after it.
            self._show_unsharded_gradients()
        if not torch.is_grad_enabled():
            self.iteration.forget_latest_forwards()

    def _frees_after_forward(self) -> bool:
        """Backward begins where forward ends: the root's parameters would be freed just to be gathered again."""
        return self.options.strategy.reshards_after_forward and not self.is_root

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        precision = self.options.precision
        wanted = precision.cast_root_forward_inputs if self.is_root else False
        casts = wanted or precision.cast_forward_inputs
        if precision.param_dtype is not None and casts and not self.in_full_precision:
            args, kwargs = cast(precision.param_dtype, (args, kwargs))
        return args, kwargs

    def choose_precision(self) -> bool:
        """Decide about full precision, before the root's forward; returns whether it changes."""
        module = self.group.shards.module if self.group is not None else self.wrapper
        full = self.options.full_in_evaluation is not None and not module.training
        if full == self.in_full_precision:
            return False
        self.in_full_precision = full
        if self.group is not None and self.reducer is not None:
            self.group.drop()
            precision = MixedPrecision() if full else self.options.precision
            self.group.param_dtype = precision.param_dtype
            self.reducer.reduce_dtype = precision.reduce_dtype or precision.param_dtype
        return True

    def _unshard_now(self, *, again: bool = False) -> None:
        if self.group is not None:
            self.group.unshard()
            self.group.wait_for_unshard(again=again)

    # Backward

    @hooks.outside_graphs
    def _pre_backward(self) -> None:
        if self.is_summoned:
            raise ValueError("expected to be in states ['IDLE'] but current state is SUMMON_FULL_PARAMS in backward()")
        entering = self.phase is not Phase.PRE_BACKWARD
        self._queue_end_of_backward()
        self.phase = Phase.PRE_BACKWARD
        if self.group is None or not entering:
            return
        self.group.wanted_in_backward = False
        self._check_kept()
        self._unshard_now(again=True)
        if self.options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            # Also where there is no gather left to issue: the last unit needs no third buffer.
            self.context.release_retired(ahead=True)
            self.iteration.prefetch_previous(self.group, ahead=True)

    @hooks.outside_graphs
    def _on_gradient(self) -> None:
        """All gradients of this backward for the unit's parameters are added up."""
        assert self.group is not None and self.group.leaf is not None
        grad = self.group.leaf.grad
        if grad is not None:
            modes.check_plain(grad, self.group.label)
        self._queue_end_of_backward()
        self._reshard_after_backward()
        if self.syncs:
            self._reduce()

    @hooks.outside_graphs
    def _reshard_after_backward(self) -> None:
        assert self.group is not None
        self.phase = Phase.POST_BACKWARD
        if self._frees_after_backward():
            self.group.reshard()
        if self.options.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self.iteration.prefetch_previous(self.group, ahead=False)

    def _frees_after_backward(self) -> bool:
        # Without a reduction there is likely to be another microbatch: strategies that trade memory for gathers keep.
        return self.syncs or self.options.strategy.reshards_after_forward

    def _reduce(self) -> None:
        assert self.group is not None and self.reducer is not None
        leaf = self.group.leaf
        if leaf is None or leaf.grad is None:
            return
        # Taken, so that the next backward adds to another tensor while this one is being read.
        grad, leaf.grad = leaf.grad, None
        self.reducer.reduce(grad)

    def _check_kept(self) -> None:
        """Values that stayed since forward must be those that forward used."""
        assert self.group is not None
        keeps = not self.options.strategy.reshards_after_forward and self.group.ranks.size > 1
        if keeps and self.group.is_unsharded and self.group.shards.has_changed():
            raise AssertionError(
                "FSDP does not support changing the parameters between forward and backward for "
                f"{self.options.strategy}: {self.group.label}"
            )

    def _queue_end_of_backward(self) -> None:
        if not self.iteration.backward.is_running:
            self.iteration.on(BackwardEvent.BEGINS)
            self._hide_unsharded_gradients()
            queue_callback(self._end_of_backward)

    @hooks.outside_graphs
    def _end_of_backward(self) -> None:
        for unit in self.iteration.units:
            unit._finish_backward()
        self._show_unsharded_gradients()
        self._forget_order()
        self.context.release_all_retired()
        self.context.finish_reductions()
        self.iteration.on(BackwardEvent.ENDS_ITERATION)

    def recover(self) -> None:
        """Leave the last backward behind if it raised before its end: what it had not reduced is lost."""
        if self.iteration.backward is Backward.NONE or hooks.in_backward():
            return
        for unit in self.iteration.units:
            unit.phase = Phase.IDLE
            if unit.group is not None:
                unit.group.reshard()
                if unit.group.leaf is not None:
                    unit.group.leaf.grad = None
        self._forget_order()
        self.context.release_all_retired()
        self.context.finish_reductions()
        self.iteration.on(BackwardEvent.RESET)

    def check_idle(self) -> None:
        """Refuse, by an ``AssertionError``, to gather by hand in forward, backward or ``summon_full_params``."""
        self.recover()
        if self.phase is not Phase.IDLE:
            raise AssertionError("Cannot manually unshard parameters during forward/backward")
        if self.is_summoned:
            raise AssertionError("Cannot manually unshard parameters when already unsharding parameters")

    def _finish_backward(self) -> None:
        if self.phase is Phase.FORWARD:
            return  # which computes gradients on its way; its parameters are in use
        self.phase = Phase.IDLE
        if self.group is None:
            return
        if self.syncs:
            # Not reached by this backward, but by one that did not reduce.
            self._reduce()
        if self._frees_after_backward():
            if self.group.is_unsharded:
                # By pre-backward or a prefetch, and no gradient came.
                self.group.reshard()
        else:
            self.group.shards.register()

    def _show_unsharded_gradients(self) -> None:
        for unit in self.iteration.units:
            if unit.gradients is not None:
                unit.gradients.show_unsharded()

    def _hide_unsharded_gradients(self) -> None:
        for unit in self.iteration.units:
            if unit.gradients is not None:
                unit.gradients.hide_unsharded()

    def _forget_order(self) -> None:
        self.iteration.forget_forwards()
        for group in self.iteration.groups:
            group.wanted_in_backward = False


def cast_buffers(units: Sequence[FlatUnit]) -> None:
    """Move buffers to where the innermost unit around them computes, floating-point ones to its dtype.

    They are not sharded; they are cast once and stay so, but for evaluation in full precision.
    """
    seen: set[torch.Tensor] = set()
    for unit in reversed(units):  # inner units come later in the order of modules()
        ignored = unit.options.ignored.buffers()
        for module in unit.wrapper.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer not in seen:
                    seen.add(buffer)
                    if buffer not in ignored:
                        _cast_buffer(buffer, Owner(module, name), unit)


def _cast_buffer(buffer: torch.Tensor, owner: Owner, unit: FlatUnit) -> None:
    dtype = unit.options.precision.buffer_dtype if buffer.is_floating_point() else None
    if dtype is not None and unit.in_full_precision:
        dtype = (unit.options.full_in_evaluation or {}).get(owner)
    if buffer.device != unit.device or (dtype is not None and buffer.dtype != dtype):
        buffer.data = buffer.to(device=unit.device, dtype=dtype or buffer.dtype)
