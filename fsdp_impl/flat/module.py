"""The wrapper: ``FullyShardedDataParallel``. Its methods are in the other files; here are their names and contracts."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_impl.common.iteration import Phase
from fsdp_impl.flat import construct, reduction, registry, state_dict, summon
from fsdp_impl.flat.optim_state import OptimStateMethods
from fsdp_impl.flat.options import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    settings_of,
)
from fsdp_impl.flat.registry import WRAPPED, without_checkpointing


class FullyShardedDataParallel(OptimStateMethods, nn.Module):
    """Shards the parameters of ``module`` that no wrapper inside it has taken, over the ranks of a process group.

    The parameters become one flat parameter of which each rank keeps a part. Forward and backward gather it for as long
    as they need it; gradients are averaged over the ranks and sharded the same way. Make the optimizer after wrapping.

    Args:
        module: the module; its parameters are replaced, so use the wrapper in its place.
        process_group: the ranks; for hybrid strategies a pair (sharded over, replicated over). All ranks by default.
        sharding_strategy: see :class:`ShardingStrategy`; ``FULL_SHARD`` by default.
        cpu_offload: whether shards live on the CPU.
        auto_wrap_policy: which modules inside ``module`` to wrap first, each with the same arguments: a callable
            ``policy(module=, recurse=, nonwrapped_numel=) -> bool`` or a policy object.
        backward_prefetch: see :class:`BackwardPrefetch`; ``None`` gathers only when needed.
        mixed_precision: see :class:`MixedPrecision`.
        ignored_modules: modules to leave alone, with all in them.
        param_init_fn: called with each module that has parameters or buffers on the meta device.
        device_id: the device to compute on; parameters on the CPU are moved there.
        sync_module_states: whether the first rank's parameters and buffers are given to all.
        forward_prefetch: whether forward gathers the next unit, in the order of the first forward, ahead of time.
        limit_all_gathers: whether gathers wait for compute, so that three unsharded units exist at most.
        use_orig_params: whether the original parameters stay visible, as views of the shard.
        ignored_states: parameters to leave alone, or modules.
        device_mesh: the ranks as a mesh: one dimension, or for hybrid strategies (replicate, shard).

    Raises:
        ValueError: for arguments that exclude each other or are of the wrong kind, and for parameters that cannot be
            flattened into one tensor.
        RuntimeError: if the parameters are on several devices.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self._unit = construct.build(
            self,
            module,
            construct.Arguments(
                process_group=process_group,
                sharding_strategy=sharding_strategy,
                cpu_offload=cpu_offload,
                auto_wrap_policy=auto_wrap_policy,
                backward_prefetch=backward_prefetch,
                mixed_precision=mixed_precision,
                ignored_modules=ignored_modules,
                param_init_fn=param_init_fn,
                device_id=device_id,
                sync_module_states=sync_module_states,
                forward_prefetch=forward_prefetch,
                limit_all_gathers=limit_all_gathers,
                use_orig_params=use_orig_params,
                ignored_states=ignored_states,
                device_mesh=device_mesh,
            ),
        )
        options = self._unit.options
        self.process_group = options.ranks.group
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self.sharding_strategy = options.strategy
        self.mixed_precision = options.precision
        self.cpu_offload = cpu_offload or CPUOffload()
        self.compute_device = options.device
        self.limit_all_gathers = limit_all_gathers
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self._fsdp_wrapped_module = module
        registry.insert(self, self._unit)
        self.register_load_state_dict_post_hook(state_dict.clean_keys)  # type: ignore[no-untyped-call]
        if self._unit.group is not None:
            self._unit.group.register()

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without a checkpointing wrapper around it."""
        return without_checkpointing(self._fsdp_wrapped_module)

    @property
    def _flat_param(self) -> nn.Parameter | None:
        """The sharded flat parameter, ``None`` without parameters."""
        return self._unit.group.shards.flat if self._unit.group is not None else None

    @property
    def params(self) -> list[nn.Parameter]:
        """The sharded flat parameter in a list, which is empty without parameters."""
        return [self._unit.group.shards.flat] if self._unit.group is not None else []

    def __getattr__(self, name: str) -> Any:
        """Attributes that the wrapper lacks are the wrapped module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(WRAPPED), name)

    def __getitem__(self, key: Any) -> Any:
        """The wrapped module's item, for an ``nn.Sequential``."""
        wrapped: Any = self._fsdp_wrapped_module
        return wrapped[key]

    def check_is_root(self) -> bool:
        """Whether no wrapper is around this one; settles it if no forward has."""
        construct.initialize(self._unit)
        return bool(self._unit.is_root)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list["FullyShardedDataParallel"]:
        """The wrappers in ``module``, itself included; with ``root_only`` those around which there is no other."""
        found = [inner for inner in module.modules() if isinstance(inner, FullyShardedDataParallel)]
        return [wrapper for wrapper in found if wrapper.check_is_root()] if root_only else found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward with its parameters gathered."""
        try:
            args, kwargs = self._unit.pre_forward(args, kwargs)
            return self._unit.post_forward(self._fsdp_wrapped_module(*args, **kwargs))
        except BaseException:
            self._unit.abandon_forward()
            raise

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """Call ``fn`` with every module, children first, while this unit's parameters are whole; changes stay.

        Raises:
            ValueError: during forward or backward, and inside ``summon_full_params``.
        """
        self._unit.recover()
        if self._unit.is_summoned or self._unit.phase is not Phase.IDLE:
            state = "SUMMONED" if self._unit.is_summoned else self._unit.phase.name
            raise ValueError(f"expected to be in states ['IDLE'] but current state is {state} in apply()")
        is_settled = self._unit.is_root is not None
        with self.summon_full_params(self, recurse=False):
            super().apply(fn)
        if not is_settled and self._unit.is_root:
            # Gathering had to decide who is the root; it may not have asked the right one.
            construct.undo(self._unit)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "FullyShardedDataParallel":
        """``.to()`` and the like act on flat parameters, which own the memory."""
        with summon.flat_params_exposed(self):
            apply: Any = super()._apply
            apply(fn, recurse)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As ``nn.Module`` does; inside ``summon_full_params`` without what wrappers add to names."""
        for name, param in super().named_parameters(prefix, recurse, remove_duplicate):
            yield self._shown_name(name), param

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As ``nn.Module`` does; inside ``summon_full_params`` without what wrappers add to names."""
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield self._shown_name(name), buffer

    def _shown_name(self, name: str) -> str:
        return name.replace(f"{WRAPPED}.", "") if self._unit.is_summoned else name

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside accumulates unsharded gradients, without communication; the next one outside reduces all.

        Raises:
            RuntimeError: if a wrapper is around this one.
        """
        if not self.check_is_root():
            raise RuntimeError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module."
            )
        units = self._unit.iteration.units
        before = [unit.syncs for unit in units]
        for unit in units:
            unit.syncs = False
        try:
            yield
        finally:
            for unit, syncs in zip(units, before, strict=True):
                unit.syncs = syncs

    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Scale all gradients in place by ``min(1, max_norm / (total_norm + 1e-6))``. Collective.

        Returns:
            The norm before clipping, the same on every rank: 0-dim, of the dtype that this rank's gradients have
            together, float32 if there are none.

        Raises:
            RuntimeError: if a wrapper is around this one.
        """
        if not self.check_is_root():
            raise RuntimeError("`clip_grad_norm_()` should only be called on the root FSDP instance")
        groups, device = self._unit.iteration.groups, self.compute_device
        return reduction.clip_grad_norm(groups, self.parameters(), device, self.rank, float(max_norm), float(norm_type))

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Inside, the parameters are whole. Collective; forward and backward may not run inside.

        Args:
            module: whose wrappers to gather; itself need not be one.
            recurse: all wrappers in ``module``; else only ``module`` itself.
            writeback: keep changes of the parameters (and with ``with_grads`` the gradients).
            rank0_only: gather on the first rank; the others keep their shards.
            offload_to_cpu: the whole parameters live on the CPU.
            with_grads: gather gradients too, with ``use_orig_params``.

        Raises:
            NotImplementedError: for ``writeback`` with ``rank0_only``; for ``with_grads`` with ``offload_to_cpu`` or
                without ``use_orig_params``; for ``offload_to_cpu`` where nothing is sharded.
            AssertionError: in the midst of forward or backward, or inside another such context.
        """
        if recurse:
            units = registry.units_in(module)
        else:
            own = registry.unit_of(module)
            units = [own] if own is not None else []
        with ExitStack() as stack:
            for unit in units:
                summon.check(unit, writeback, rank0_only, offload_to_cpu, with_grads)
                if with_grads and unit.gradients is not None:
                    stack.enter_context(summon.reduced_shown(unit.gradients))
                stack.enter_context(summon.unit_full(unit, writeback, rank0_only, offload_to_cpu, with_grads))
            yield

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Replace the reduction of gradients, in all units, before the first forward and only once.

        Args:
            state: the first argument of each call.
            hook: ``hook(state, grad, shard)`` reduces the unsharded ``grad`` into ``shard``; where nothing is sharded,
                ``hook(state, grad)`` reduces ``grad`` in place. Averaging is the hook's part too.

        Raises:
            AssertionError: if a wrapper is around this one, for hybrid strategies, and at a second call.
            ValueError: if ``hook`` is not callable.
        """
        if not self.check_is_root():
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        if not callable(hook):
            raise ValueError(f"The communication hook must be callable but got {hook}")
        units = self._unit.iteration.units
        for unit in units:
            if unit.options.strategy.is_hybrid:
                raise AssertionError(
                    f"Communication hook is not supported for hybrid strategies: {unit.options.strategy}"
                )
            if unit.reducer is not None and unit.reducer.comm_hook is not None:
                raise AssertionError("A communication hook is already registered")
        for unit in units:
            if unit.reducer is not None:
                unit.reducer.comm_hook = (state, hook)

    # State dicts

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """As ``nn.Module`` does, without what wrappers add to names; of the type that was set. Collective.

        Values of parameters are copies; ``keep_vars`` applies to the rest.

        Raises:
            AssertionError: during forward or backward, and inside ``summon_full_params``.
            RuntimeError: for local state dicts of what is not sharded.
        """
        given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
        destination, prefix = given.get("destination", destination), given.get("prefix", prefix)
        self._unit.check_idle()
        # By itself first: what else the caller has in `destination`, under whatever names, is none of the wrapper's.
        found: Any = super().state_dict(prefix=prefix, keep_vars=given.get("keep_vars", keep_vars))
        state_dict.finish(self._unit, found, prefix)
        if destination is None:
            return found
        destination.update(found)
        if hasattr(destination, "_metadata"):
            destination._metadata.update(found._metadata)
        return destination

    def _load_from_state_dict(
        self,
        given: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Called by ``load_state_dict`` for each module, outer ones first, with what is under their prefix."""
        self._unit.check_idle()
        missing, errors = state_dict.load(self._unit, given, prefix)
        if strict:
            missing_keys.extend(missing)
        error_msgs.extend(errors)
        super()._load_from_state_dict(given, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set what state dicts of all wrappers in ``module``, itself included, consist of.

        Returns:
            What was set before.

        Raises:
            RuntimeError: for a configuration of another type.
            AssertionError: if the wrappers' settings differ.
            ValueError: if there is no wrapper.
        """
        settings = settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
        before = state_dict.settings_in(module)
        state_dict.set_settings(module, settings)
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """What is set for the wrappers in ``module``, itself included.

        Raises:
            AssertionError: if the wrappers' settings differ.
            ValueError: if there is no wrapper.
        """
        return state_dict.settings_in(module)

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """:meth:`set_state_dict_type` for as long as the context lasts."""
        before = FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            state_dict.set_settings(module, before)
