"""The wrapper: ``FullyShardedDataParallel``."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_impl.flat import construct, lazy_init, summon
from fsdp_impl.flat.clip import clip_grad_norm
from fsdp_impl.flat.collect import wrappers
from fsdp_impl.flat.group import FlatGroup
from fsdp_impl.flat.names import WRAPPED, clean, without_checkpointing
from fsdp_impl.flat.optim_state_methods import OptimStateMethods
from fsdp_impl.flat.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_impl.flat.state_dict_methods import StateDictMethods
from fsdp_impl.flat.unit import FlatUnit


class FullyShardedDataParallel(StateDictMethods, OptimStateMethods):
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
        built = construct.build(
            module,
            type(self),
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
        self._ignored = built.ignored
        self._use_orig_params = use_orig_params
        self._synced = sync_module_states
        self._buffer_dtypes = {clean(name): buffer.dtype for name, buffer in module.named_buffers()}
        self.process_group = built.ranks.group
        self.rank, self.world_size = built.ranks.group.rank(), built.ranks.group.size()
        self.sharding_strategy = built.strategy
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.cpu_offload = cpu_offload or CPUOffload()
        self.compute_device = built.device
        self.limit_all_gathers = limit_all_gathers
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self._fsdp_wrapped_module = module
        self._unit = FlatUnit(
            self,
            built.group,
            built.ranks,
            built.device,
            built.strategy,
            self.mixed_precision,
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
            limits_gathers=limit_all_gathers,
        )

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without a checkpointing wrapper around it."""
        return without_checkpointing(self._fsdp_wrapped_module)

    @property
    def _group(self) -> FlatGroup | None:
        return self._unit.group

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
            if name == WRAPPED:
                raise
            return getattr(super().__getattr__(WRAPPED), name)

    def __getitem__(self, key: Any) -> Any:
        """The wrapped module's item, for an ``nn.Sequential``."""
        wrapped: Any = self._fsdp_wrapped_module
        return wrapped[key]

    def check_is_root(self) -> bool:
        """Whether no wrapper is around this one; settles it if no forward has."""
        lazy_init.ensure(self._unit)
        return bool(self._unit.is_root)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list["FullyShardedDataParallel"]:
        """The wrappers in ``module``, itself included; with ``root_only`` those around which there is no other."""
        found = list(wrappers(module))
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
        """Call ``fn`` with every module, children first, while this unit's parameters are whole; changes stay."""
        is_settled = self._unit.is_root is not None
        with summon.full_params(self, recurse=False):
            super().apply(fn)
        if not is_settled and self._unit.is_root:
            # Gathering had to decide who is the root; it may not have asked the right one.
            lazy_init.undo(self._unit)
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
        return clip_grad_norm(self, float(max_norm), float(norm_type))

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
        with summon.full_params(
            module,
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        ):
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
            if unit.strategy.is_hybrid:
                raise AssertionError(f"Communication hook is not supported for hybrid strategies: {unit.strategy}")
            if unit.reducer is not None and unit.reducer.comm_hook is not None:
                raise AssertionError("A communication hook is already registered")
        for unit in units:
            if unit.reducer is not None:
                unit.reducer.comm_hook = (state, hook)
