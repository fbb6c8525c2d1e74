"""A unit: the modules of one ``fully_shard`` call and what happens around their forward and backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _State

from fsdp_impl.common import streams
from fsdp_impl.common.containers import map_tensors
from fsdp_impl.per_parameter import hooks, lazy_init, prefetch, registry
from fsdp_impl.per_parameter.context import CommContext, IterationContext
from fsdp_impl.per_parameter.group import ParamGroup, Phase
from fsdp_impl.per_parameter.param import ShardedParam
from fsdp_impl.per_parameter.reduction import Reducer, take_unsharded_grads


class Unit(_State):
    """State of one ``fully_shard`` call, shared by its modules.

    Attributes:
        modules: the modules given, in order.
        group: their parameters, ``None`` if no parameters were left to shard.
        is_root: ``None`` before lazy initialisation.
        auto_reshard: whether ``reshard_after_forward`` was left to us: ``True``, but for the root ``False``.
    """

    modules: tuple[nn.Module, ...]
    device: torch.device
    group: ParamGroup | None
    auto_reshard: bool

    def __init__(self) -> None:
        self.is_root: bool | None = None
        self.phase = Phase.IDLE
        self.iteration = IterationContext()
        # Modules whose forward is still to come in this pass, for units of several modules.
        self.to_run: set[nn.Module] = set()

    def setup(
        self, modules: tuple[nn.Module, ...], device: torch.device, group: ParamGroup | None, *, auto_reshard: bool
    ) -> None:
        """Install the unit on its modules. Apart from ``__init__``, whose arguments are the decorator's."""
        self.modules = modules
        self.device = device
        self.group = group
        self.auto_reshard = auto_reshard
        self.comm = group.comm if group is not None else CommContext(device)
        self.reducer = Reducer(group) if group is not None else None
        for module in modules:
            registry.insert(module, self)
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward)
        for holder in dict.fromkeys(owner.module for param in self._params() for owner in param.owners):
            holder.register_state_dict_pre_hook(self._before_state_dict)
            holder.register_load_state_dict_pre_hook(self._before_state_dict)
            holder.register_load_state_dict_post_hook(self._after_load)

    # Forward

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.phase is Phase.PRE_BACKWARD:
            # Activation checkpointing runs forward again inside backward, after pre-backward has unsharded. An earlier
            # post-backward may have resharded since, if the unit ran twice.
            self._unshard_now()
            return args, kwargs
        if not self.to_run:
            self.to_run.update(self.modules)
        entering = self.phase is not Phase.FORWARD
        self.phase = Phase.FORWARD
        if entering:
            args, kwargs = self._root_pre_forward(args, kwargs)
        if self.group is None:
            return args, kwargs
        entering = self.group.phase is not Phase.FORWARD
        self.group.phase = Phase.FORWARD
        self._unshard_now()
        if entering:
            args, kwargs = hooks.call_after_backward(self._post_backward, (args, kwargs))
        return args, kwargs

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.phase is Phase.PRE_BACKWARD:
            return output
        self.to_run.discard(module)
        if self.to_run:
            return output
        self._complete_forward(output)
        if self.iteration.forward_root is self:
            self._root_post_forward(output)
        return output

    def _root_pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        lazy_init.ensure(self)
        if self.iteration.forward_root is not None:
            return args, kwargs
        self.iteration.forward_root = self
        # Gathers read the sharded parameters, which the optimizer wrote on the current stream.
        streams.join(self.comm.gather_stream, streams.current(self.device))
        if self.device.type != "cpu":
            args, kwargs = map_tensors(lambda tensor: tensor.to(self.device), (args, kwargs))
        return args, kwargs

    def _root_post_forward(self, output: Any) -> None:
        # A unit of several modules of which some did not run is complete only now. Inner units first, as their
        # forwards would have ended.
        for unit in reversed(self.iteration.units):
            if unit is not self and unit.to_run:
                unit.to_run.clear()
                unit._complete_forward(output)
        self.comm.release_output()
        self.iteration.forward_root = None

    def _complete_forward(self, output: Any) -> None:
        if self.group is not None:
            # Recomputation inside backward neither ends the life of the parameters nor is a forward to prefetch for.
            if not hooks.in_backward():
                self.group.reshard()
                prefetch.record_forward(self.group, self.iteration)
            self.group.phase = Phase.IDLE
        hooks.call_before_backward(self._pre_backward, output)
        self.phase = Phase.IDLE

    def _unshard_now(self) -> None:
        if self.group is not None:
            self.group.unshard()
            self.group.wait_for_unshard()

    # Backward

    def _pre_backward(self) -> None:
        self.phase = Phase.PRE_BACKWARD
        if not self.iteration.callback_queued:
            self.iteration.callback_queued = True
            hooks.call_at_end_of_backward(self._end_of_backward)
        if self.group is None or self.group.phase is Phase.PRE_BACKWARD:
            return
        self.group.phase = Phase.PRE_BACKWARD
        self._unshard_now()
        prefetch.prefetch_previous(self.group, self.iteration)

    def _post_backward(self) -> None:
        """Reshard and reduce. Called again by the end of backward; then there is nothing left to do."""
        group = self.group
        if group is None:
            return
        assert self.reducer is not None
        group.phase = Phase.POST_BACKWARD
        params, grads = take_unsharded_grads(group)
        group.reshard()
        if params:
            self.reducer.reduce(params, grads)

    def _end_of_backward(self) -> None:
        self.iteration.forward_root = None
        for unit in self.iteration.units:
            unit.to_run.clear()
            unit.phase = Phase.IDLE
            if unit.group is None:
                continue
            if unit.group.phase is not Phase.POST_BACKWARD:
                # None of its inputs required grad, so autograd did not pass its post-backward; or it did not take part,
                # but forward or a prefetch left it unsharded.
                unit._post_backward()
            unit.group.phase = Phase.IDLE
            # A prefetch that missed: next time the values will be others.
            unit.group.drop_pending()
            unit.group.forward_indices.clear()
        self.iteration.forward_order.clear()
        self.comm.finish_reductions()
        self.iteration.callback_queued = False

    # By hand

    def unshard(self, *, async_op: bool) -> None:
        """Issue the gather, also before lazy initialisation."""
        if self.group is not None:
            lazy_init.check_groups([self.group])
            self.group.unshard(async_op=async_op)

    def wait_for_unshard(self) -> None:
        if self.group is not None:
            self.group.wait_for_unshard()

    def reshard(self) -> None:
        if self.group is not None:
            self.group.drop_pending()
            self.group.reshard()

    def refresh(self) -> None:
        """Notice parameters that ``.to()``, ``to_empty`` and the like replaced."""
        if self.group is not None:
            self.group.refresh()

    def _before_state_dict(self, *_: Any) -> None:
        """State dicts are taken of, and loaded into, sharded parameters."""
        if self.group is not None:
            self.group.drop_pending()
            self.group.to_sharded()

    def _after_load(self, *_: Any) -> None:
        """With ``assign=True`` loading replaced the parameters."""
        self.refresh()

    def _params(self) -> Sequence[ShardedParam]:
        return self.group.shards.params if self.group is not None else ()
