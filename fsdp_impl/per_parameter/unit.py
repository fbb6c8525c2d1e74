"""A unit: the modules of one ``fully_shard`` call and what happens around their forward and backward.

Which group to gather ahead of its use is decided here too. Forward needs no prefetch of its own: the host runs ahead of
the device, so the next group's gather is queued while this group's compute runs. In backward the gather of the group
that comes next, the one whose forward was the one before, is issued before this group's compute, so that it does not
queue behind this group's reduction. A user may name the modules to gather instead.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_impl.common import dtensor, hooks, modes, ranges, streams
from fsdp_impl.common.changes import Looks, drop_stale, is_stale
from fsdp_impl.common.containers import cast, map_tensors, tensors_requiring_grad
from fsdp_impl.common.iteration import PHASES, Backward, BackwardEvent, Iteration, Phase, UnitEvent, after
from fsdp_impl.common.private import State, queue_callback
from fsdp_impl.common.streams import Event
from fsdp_impl.per_parameter import reduction
from fsdp_impl.per_parameter.group import GatherContext, ParamGroup
from fsdp_impl.per_parameter.options import MixedPrecisionPolicy
from fsdp_impl.per_parameter.reduction import Reducer


class IterationContext(Iteration["Unit", ParamGroup]):
    """The state of one forward and backward of the units under one root.

    Attributes:
        is_last_backward: whether backward ends with waiting for reductions and forgetting the order of forwards.
        by_hand: whether not backward but the caller does that, by ``finalize_backward``.
        resets: how many times ``reset_iter_state`` has dropped what was under way.
        post_optim_event: what the next forward's gathers wait for instead of the current stream; used once.
        looks: those of unshards by hand at all groups.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_last_backward = True
        self.by_hand = False
        self.resets = 0
        self.post_optim_event: Event = None
        self.looks = Looks()


# Note: units of several meshes
#
# The parameters of a unit have one mesh. Where ``shard_placement_fn`` puts those of one call on several, the call makes
# a unit for each mesh, all of the same modules. Their hooks nest as if one unit were around the other: those of the
# last run first before forward and last after it. It is the outermost, which ``unit_of`` returns and which can be the
# root; the others are ``inner`` to it, and what a user asks of the module is asked of all of them.


class Unit(State):
    """State of one ``fully_shard`` call, shared by its modules; or of its parameters of one mesh.

    Attributes:
        group: their parameters, ``None`` if no parameters were left to shard.
        auto_reshard: whether ``reshard_after_forward`` was left to us: ``True``, but for the root ``False``.
        parts: this unit and then those that are inner to it, outer ones first (see Note: units of several meshes).
        is_root: ``None`` before lazy initialisation.
        forward_methods: methods of the modules around which the unit acts as around forward.

    Args:
        lazy_init: called with the unit before each of its forwards: settles who the root is.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        device: torch.device,
        group: ParamGroup | None,
        policy: MixedPrecisionPolicy,
        lazy_init: Callable[["Unit"], None],
        *,
        auto_reshard: bool,
        inner: "tuple[Unit, ...]" = (),
    ) -> None:
        self._inner = inner
        self._modules = tuple(ref(module) for module in modules)
        self.device = device
        self.group = group
        self.auto_reshard = auto_reshard
        self._policy = policy._without_function()
        self._lazy_init = lazy_init
        self.comm = group.comm if group is not None else GatherContext(device)
        self.reducer = Reducer(group) if group is not None else None
        self.is_root: bool | None = None
        self.phase = Phase.IDLE
        # Of the phase FORWARD: the backward in which it began, if a recomputation runs it; and, for units of several
        # modules, those whose forward is still to come in this pass.
        self._begun_in: int | None = None
        self.to_run: set[ref[nn.Module]] = set()
        self.iteration = IterationContext()
        self.forward_methods: set[tuple[ref[nn.Module], str]] = set()
        # What to gather during this unit's forward, and during its backward if the user has named anything for that.
        self.forward_prefetch: list[ParamGroup] = []
        self.backward_prefetch: list[ParamGroup] | None = None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules given, in order, that are still there."""
        return tuple(module for reference in self._modules if (module := reference()) is not None)

    @property
    def parts(self) -> "tuple[Unit, ...]":
        return (self, *reversed(self._inner))

    def register(self) -> None:
        """Install the unit on its modules, which hold the sharded parameters from now on."""
        if self.group is not None:
            self.group.register()
        for module in self.modules:
            _units[module] = ref(self)
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward)
        params = self.group.shards.params if self.group is not None else ()
        for holder in dict.fromkeys(owner.module for param in params for owner in param.owners):
            holder.register_state_dict_pre_hook(self._before_state_dict)
            # torch marks the hook, which a bound method does not allow.
            holder.register_state_dict_post_hook(partial(self._after_state_dict))
            holder.register_load_state_dict_pre_hook(self._before_state_dict)
            holder.register_load_state_dict_post_hook(self.refresh)

    def share_comm(self, comm: GatherContext) -> None:
        self.comm = comm
        if self.group is not None:
            self.group.comm = comm

    def _on(self, event: UnitEvent) -> None:
        """Follow ``event``; leaving a forward, wait for no module of it."""
        self.phase = after(PHASES, self.phase, event)
        if self.phase is not Phase.FORWARD:
            self.to_run.clear()

    # Forward

    @hooks.outside_graphs
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Unshard, and return the inputs to run forward with."""
        if self._is_in_backward():
            # Activation checkpointing runs forward again inside backward, after pre-backward has unsharded. An earlier
            # post-backward may have resharded since, if the unit ran twice.
            if self.phase is Phase.POST_BACKWARD and self.group is not None:
                # A re-entrant checkpoint runs a backward of its own, whose gradients nothing would reduce any more.
                inputs = (args, kwargs)
                args, kwargs = hooks.call_after_backward(self._post_backward, inputs)
            self._unshard_now()
            return _cast_inputs(self._policy, args, kwargs)
        if self._was_given_up(module):
            self._leave_forward()
        if not self.to_run:
            self.to_run.update(self._modules)
        entering = self.phase is not Phase.FORWARD
        if entering:
            # May raise; then this forward has not begun, and the next one is the first again.
            args, kwargs = self._root_pre_forward(module, args, kwargs)
            self._begun_in = hooks.running_backward()
        args, kwargs = _cast_inputs(self._policy, args, kwargs)
        if entering and self.group is not None and self.iteration.order is not None:
            names = [param.fqn for param in self.group.shards.params]
            self.iteration.order.before_gather(names, self.group.mesh.group)
        self._on(UnitEvent.FORWARD_BEGINS)
        self._unshard_now()
        if entering:
            if self.group is not None:
                args, kwargs = hooks.call_after_backward(self._post_backward, (args, kwargs))
            prefetch(self.forward_prefetch, Phase.FORWARD)
        return args, kwargs

    @hooks.outside_graphs
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reshard, and return the output to give to the caller."""
        if not self._is_in_backward():
            self.to_run.discard(ref(module))
            if self._is_outermost(module):
                self.to_run.clear()  # called by itself: the others do not follow
            if self.to_run:
                # The loss may use this module's output and none of those that follow.
                hooks.call_before_backward(self._pre_backward, output)
            else:
                self._complete_forward(output)
                if self.iteration.forward_root is self:
                    self._root_post_forward(output)
        return _cast_output(self._policy, output)

    def _is_outermost(self, module: nn.Module) -> bool:
        """Whether nothing else of a model runs forward around ``module``; a recomputation goes on with the others."""
        return self.iteration.is_outermost(self, module) and not hooks.in_backward()

    def _was_given_up(self, module: nn.Module) -> bool:
        """Whether the outermost forward begins again because it raised before, and a step or a load came in between.

        Without that, what is gathered is up to date: the forward may call itself, or be tried once more.
        """
        return self.phase is Phase.FORWARD and self._is_outermost(module) and is_stale(self.iteration.groups)

    def _leave_forward(self) -> None:
        """Forget a forward that raised; gradients of earlier microbatches stay."""
        for unit in self.iteration.units:
            unit._on(UnitEvent.GIVEN_UP)
        self.iteration.forget_latest_forwards()
        self.iteration.end_forward()

    def _root_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._lazy_init(self)
        self._check_waited("forward")
        if self.iteration.forward_root is not None:
            return args, kwargs
        self.iteration.begin_forward(self, module)
        if self.is_root and self.iteration.order is not None:
            self.iteration.order.begin(training=self.modules[0].training)
        # Units may have been left unsharded, by an evaluation or by hand, and users freeze what modules hold then.
        drop_stale(self.iteration.groups)
        self.iteration.looks.are_due = True
        for group in self.iteration.groups:
            group.sync_requires_grad()
        # Gathers read the sharded parameters, which the optimizer wrote on the current stream, or before the event.
        event, self.iteration.post_optim_event = self.iteration.post_optim_event, None
        if event is None:
            streams.join(self.comm.gather_stream, streams.current(self.device))
        else:
            streams.wait(self.comm.gather_stream, event)
        if self.device.type != "cpu":
            args, kwargs = map_tensors(lambda tensor: tensor.to(self.device), (args, kwargs))
        return args, kwargs

    def _root_post_forward(self, output: Any) -> None:
        # A unit of several modules of which some did not run is complete only now. Inner units first, as their
        # forwards would have ended.
        for unit in reversed(self.iteration.units):
            if unit is not self and unit.to_run:
                unit._complete_forward(output)
        self.comm.release_output()
        self.iteration.end_forward()
        if not torch.is_grad_enabled():
            self.iteration.forget_latest_forwards()
        if self.is_root and self.iteration.order is not None:
            self.iteration.order.end(group.mesh.group for group in self.iteration.groups)

    def _complete_forward(self, output: Any) -> None:
        # Recomputation inside backward neither ends the life of the parameters nor is a forward to prefetch for.
        if self.group is not None and not hooks.in_backward():
            self.group.reshard(self.phase)
            # Without autograd too: a re-entrant checkpoint runs forward so, and backward will pass it.
            if not torch.is_grad_enabled() or tensors_requiring_grad(output):
                self.iteration.record_forward(self.group)
        hooks.call_before_backward(self._pre_backward, output)
        self._on(UnitEvent.FORWARD_ENDS)

    def _unshard_now(self) -> None:
        if self.group is not None:
            with modes.no_grad():
                self.group.unshard(self.phase, async_op=self.group.options.unshard_async)
                self.group.wait_for_unshard(self.phase)

    # Backward

    @hooks.outside_graphs
    def _pre_backward(self) -> None:
        entering = self.phase is not Phase.PRE_BACKWARD
        self._on(UnitEvent.BACKWARD_REACHES)
        if not self.iteration.backward.is_running:
            self.iteration.on(BackwardEvent.BEGINS_BY_HAND if self.iteration.by_hand else BackwardEvent.BEGINS)
            queue_callback(self._end_of_backward)
        if not entering:
            return
        self._unshard_now()
        previous = self.iteration.pass_forward(self.group) if self.group is not None else None
        if self.backward_prefetch is not None:
            prefetch(self.backward_prefetch, self.phase)
        elif previous is not None:
            prefetch([previous], self.phase)

    @hooks.outside_graphs
    def _post_backward(self) -> None:
        """Reshard and reduce. Called again by the end of backward; then there is nothing left to do."""
        group = self.group
        if group is None:
            return
        assert self.reducer is not None
        if not self._is_computing():
            self._on(UnitEvent.BACKWARD_PASSES)
        if not group.options.reduce_grads:
            # Freed first: accumulating in another dtype makes a copy.
            self._reshard_after_backward(group)
            reduction.accumulate(group)
            self.reducer.is_unreduced = True
            return
        self.reducer.is_unreduced = False
        params, grads = reduction.take(group)
        self._reshard_after_backward(group)
        self.reducer.reduce(params, grads)

    def _reshard_after_backward(self, group: ParamGroup) -> None:
        if group.options.reshard_after_backward:
            group.reshard(Phase.POST_BACKWARD)

    def _is_in_backward(self) -> bool:
        """Whether backward has reached the unit, so that its forwards are recomputations."""
        return self.phase in (Phase.PRE_BACKWARD, Phase.POST_BACKWARD)

    def _is_computing(self) -> bool:
        """Whether its forward goes on after the backward that ends now, which it runs on its way."""
        # A recomputation in this backward ends as soon as it has all that backward needs, in the midst of a forward.
        return self.phase is Phase.FORWARD and self._begun_in != hooks.running_backward()

    @hooks.outside_graphs
    def _end_of_backward(self) -> None:
        if (root := self.iteration.forward_root) is not None and not root._is_computing():
            self.iteration.end_forward()
        by_hand = self.iteration.by_hand  # as it was when this backward began (see `finalize_by_hand`)
        is_last = self.iteration.is_last_backward and not by_hand
        for unit in self.iteration.units:
            if unit._is_computing():
                continue  # its parameters are in use
            if unit.phase is not Phase.POST_BACKWARD:
                # None of its inputs required grad, so autograd did not pass its post-backward; or it did not take part,
                # but forward or a prefetch left it unsharded.
                if by_hand and unit.group is not None and unit.group.options.reduce_grads:
                    assert unit.reducer is not None
                    unit.reducer.is_unreduced = True  # another backward may pass it: a pipeline's does, for its weights
                else:
                    unit._post_backward()
            unit._on(UnitEvent.BACKWARD_ENDS)
            if unit.group is not None and is_last:
                # A prefetch that missed: next time the values will be others.
                unit.group.drop_pending()
        if is_last:
            self._end_iteration()
        if self.iteration.backward.is_running:  # unless a hook has reset it
            self.iteration.on(BackwardEvent.ENDS_ITERATION if is_last else BackwardEvent.ENDS)

    def _end_iteration(self) -> None:
        self.iteration.forget_forwards()
        self.comm.finish_reductions()

    # The end of backward, by hand

    def finalize_by_hand(self, enabled: bool) -> None:
        """See ``FSDPModule.set_manual_backward_finalization``."""
        self._check_root("set_manual_backward_finalization")
        if self.iteration.backward is not Backward.NONE and self.iteration.by_hand != enabled:
            raise RuntimeError("set_manual_backward_finalization cannot change the mode before finalize_backward")
        self.iteration.by_hand = enabled

    @hooks.outside_graphs
    def finalize(self) -> int | None:
        """Issue what is left of the reductions; returns what to give to :meth:`finish`, ``None`` if nothing ran yet."""
        if self.is_root is None:
            return None
        self._check_root("finalize_backward")
        self._check_waited("finalizing backward again")
        iteration = self.iteration
        if not iteration.by_hand:
            raise RuntimeError("finalize_backward requires set_manual_backward_finalization(True) before backward")
        if iteration.backward.is_running:
            raise RuntimeError("finalize_backward must be called after backward completes")
        for unit in iteration.units:
            if unit.reducer is not None:
                unit.reducer.check_all_reduces()
        # In the order in which backward passes them.
        for unit in reversed(iteration.units):
            if unit.group is not None and unit.reducer is not None:
                unit.group.drop_pending()
                if unit.reducer.is_unreduced or unit.reducer.is_partial:
                    unit._post_backward()
                unit._reshard_after_backward(unit.group)
            unit._on(UnitEvent.BACKWARD_ENDS)
        iteration.on(BackwardEvent.FINALIZED)
        return iteration.resets

    def finish(self, resets: int) -> None:
        """Let the current stream see the gradients whose reductions :meth:`finalize` issued, which gave ``resets``."""
        if self.iteration.resets != resets:
            raise RuntimeError("reset_iter_state has invalidated this handle: its gradients are lost")
        self._end_iteration()
        self.iteration.on(BackwardEvent.WAITED)

    def _check_root(self, method: str) -> None:
        if self.is_root is False:
            raise RuntimeError(f"{method} must be called on the root FSDP module")

    def _check_waited(self, what: str) -> None:
        if self.iteration.backward.is_reducing:
            raise RuntimeError(f"The previous gradient reduction must be waited on before {what}")

    def reset(self) -> None:
        """See ``FSDPModule.reset_iter_state``."""
        self._check_root("reset_iter_state")
        self.comm.release_output()
        self.comm.finish_reductions()
        for unit in self.iteration.units or [self]:
            unit._on(UnitEvent.GIVEN_UP)
            if unit.group is not None:
                assert unit.reducer is not None
                unit.group.drop_pending()
                unit.group.to_sharded()
                reduction.drop(unit.group)
                unit.reducer.reset()
        self.iteration.forget_forwards()
        self.iteration.end_forward()
        self.iteration.on(BackwardEvent.RESET)
        self.iteration.resets += 1

    # By hand

    def unshard(self, *, async_op: bool) -> None:
        """Issue the gather by hand."""
        if self.group is None:
            return
        looks = self.iteration.looks
        if self.is_root is None or self.iteration.forward_root is not None or hooks.in_backward():
            drop_stale([self.group])  # in the midst of a forward or backward, the other groups are in use
        elif looks.are_due or self.group.is_gathered():
            looks.are_due = False
            drop_stale(self.iteration.groups)
        self.group.unshard(self.phase, async_op=async_op)

    def wait_for_unshard(self) -> None:
        if self.group is not None:
            self.group.wait_for_unshard(self.phase)

    def reshard(self) -> None:
        if self.group is not None:
            self.group.drop_pending()
            self.group.reshard(self.phase)

    def refresh(self, *_: Any) -> None:
        """Notice parameters that ``.to()``, ``to_empty`` and the like replaced, or a load with ``assign=True``."""
        if self.group is not None:
            self.group.refresh()

    def _before_state_dict(self, *_: Any) -> None:
        """State dicts are taken of, and loaded into, sharded parameters."""
        if self.group is not None:
            self.group.drop_pending()
            self.group.to_sharded()
            for param in self.group.shards.params:
                param.own_grad_dtype.keep(param.sharded)  # which a load may replace

    def _after_state_dict(self, holder: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Let scripts copy what they save: most shards are not at the beginning of the buffer."""
        assert self.group is not None
        for param in self.group.shards.params:
            for owner in param.owners:
                value = state.get(prefix + owner.name)
                # With keep_vars=True it is the parameter itself.
                if owner.find() is holder and isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
                    state[prefix + owner.name] = dtensor.at_offset_zero(value)


# From a module to its unit

# Weak on both sides (see Note: ownership).
_units: "WeakKeyDictionary[nn.Module, ref[Unit]]" = WeakKeyDictionary()


def unit_of(module: nn.Module) -> "Unit | None":
    """The unit that ``module`` was given to ``fully_shard`` for, if it was; of several the outermost."""
    reference = _units.get(module)
    return None if reference is None else reference()


def prefetch(targets: Iterable[ParamGroup], phase: Phase) -> None:
    """Issue the gathers of ``targets``, in order, for a unit in ``phase``."""
    for target in targets:
        with ranges.named("prefetch", target.label):
            target.unshard(phase, async_op=target.options.unshard_async)


def _cast_inputs(policy: MixedPrecisionPolicy, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if policy.param_dtype is None or not policy.cast_forward_inputs:
        return args, kwargs
    args, kwargs = cast(policy.param_dtype, (args, kwargs))
    return args, kwargs


def _cast_output(policy: MixedPrecisionPolicy, output: Any) -> Any:
    return output if policy.output_dtype is None else cast(policy.output_dtype, output)
