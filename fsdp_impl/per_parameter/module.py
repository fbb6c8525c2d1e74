"""``FSDPModule``: what a module can do, and what a user may change about it, once it is a unit."""

import functools
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, cast
from weakref import ref

import torch
from torch import nn

from fsdp_impl.common.order import OrderCheck
from fsdp_impl.common.streams import Stream
from fsdp_impl.per_parameter import communication, lazy_init
from fsdp_impl.per_parameter.group import FREE, KEEP, ParamGroup, Residence
from fsdp_impl.per_parameter.options import AllGather, ReduceScatter
from fsdp_impl.per_parameter.param import own_grad_dtypes_kept
from fsdp_impl.per_parameter.unit import Unit, unit_of


class UnshardHandle:
    """A pending unshard."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Finish the unshard: afterwards the module holds unsharded parameters. Forward does so by itself."""
        for unit in self._units:
            unit.wait_for_unshard()
        self._units = []


class GradientReductionHandle:
    """The end of a backward, with reductions that may still run."""

    def __init__(self, unit: Unit, pending: int | None) -> None:
        self._unit, self._pending = unit, pending

    def wait(self) -> None:
        """Finish backward: afterwards the gradients may be read. Nothing if it has been called before.

        Raises:
            RuntimeError: if ``reset_iter_state`` has dropped the gradients.
        """
        if self._pending is not None:
            self._unit.finish(self._pending)
            self._pending = None


class FSDPModule:
    """Mixed into the class of every module that is given to ``fully_shard``.

    Setters hold from the next forward on; those without ``recurse`` change this module's own unit only.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the original class: a slice of a sharded ``Sequential`` is not a unit."""
        original: type[Any] = cls._original_class  # type: ignore[attr-defined]  # of FSDPName, see mix_in
        instance = original.__new__(original, *args, **kwargs)
        # Python calls __init__ on instances of `cls` only, and this is none.
        instance.__init__(*args, **kwargs)
        return instance

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters (not those of units inside it).

        Args:
            async_op: return at once, with a handle to wait on. Forward waits by itself, so waiting is only needed for
                using the parameters otherwise.

        Raises:
            RuntimeError: if parameters are still on the meta device.
        """
        units = self._units(recurse=False)
        for unit in units:
            if unit.group is not None and unit.group.residence is Residence.SHARDED:
                lazy_init.check_groups([unit.group])  # there may not have been a forward yet
            unit.unshard(async_op=async_op)
        handle = UnshardHandle(units)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's own unsharded parameters and register the sharded ones. A pending unshard is dropped."""
        for unit in self._units(recurse=False):
            unit.reshard()

    def reset_iter_state(self) -> None:
        """Recover after an exception in forward or backward: free what is unsharded, forget what is in flight.

        Gradients that are not reduced yet are lost: an accumulation starts anew.

        Raises:
            RuntimeError: if this is not the root.
        """
        self._unit().reset()

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End one or several backwards, where :meth:`set_manual_backward_finalization` has left that to the caller.

        Reduces what they have left unreduced, and reshards, as the settings of now require. Nothing before the first
        forward.

        Args:
            async_op: return at once, with a handle to wait on before the gradients are used, and before a forward.

        Raises:
            RuntimeError: if this is not the root, if backward runs or ends by itself, if the last handle has not been
                waited on, or if replicas would not all-reduce.
        """
        unit = self._unit()
        handle = GradientReductionHandle(unit, unit.finalize())
        if async_op:
            return handle
        handle.wait()
        return None

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``.to()``, ``to_empty`` and the like change the sharded parameters."""
        self.reshard()
        params = [param for group in self._groups(recurse=False) for param in group.shards.params]
        with own_grad_dtypes_kept(params):
            result = cast(Any, super())._apply(*args, **kwargs)
            for unit in self._units(recurse=False):
                unit.refresh()
        return result

    # Settings: gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. While it does not, they accumulate unsharded, without communication."""
        for group in self._groups(recurse=recurse):
            group.options.reduce_grads = requires_gradient_sync
            group.options.all_reduce_grads = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward all-reduces over replicas. While it does not, reduced shards accumulate."""
        for group in self._groups(recurse=recurse):
            group.options.all_reduce_grads = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward ends with waiting for reductions and forgetting the order of forwards."""
        self._unit().iteration.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether backwards end by :meth:`finalize_backward`, whatever :meth:`set_is_last_backward` says.

        Raises:
            RuntimeError: if this is not the root, or between a backward and its finalization.
        """
        self._unit().finalize_by_hand(enabled)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by ``factor`` instead of the number of data-parallel ranks."""
        for group in self._groups(recurse=False):
            group.options.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Old name of :meth:`set_gradient_divide_factor`."""
        warnings.warn("Use `set_gradient_divide_factor` instead", DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduce by sums only, and divide after; some back ends are faster then, or have sums only."""
        for group in self._groups(recurse=False):
            group.options.force_sum = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Reduce zeros for trainable parameters without gradient, where ranks may use different ones."""
        for group in self._groups(recurse=recurse):
            group.options.reduce_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many inputs of reductions may be in flight (1): more memory, fewer waits where reductions are slow.

        The largest number of all units under a root holds for all.

        Raises:
            TypeError: if it is not an int.
            ValueError: if it is less than 1, or more with reductions in symmetric memory.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__} {max_input_buffers}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        for group in self._groups(recurse=recurse):
            communication.set_reduce_inputs(group.options, max_input_buffers, label=group.label)
        unit = self._unit()
        under_root = (group.options.max_reduce_inputs for group in unit.iteration.groups)
        unit.comm.max_reduce_inputs = max(under_root, default=1)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Stream = None) -> None:
        """Call ``hook`` with the reduced flat shard, after the all-reduce if there are replicas.

        Args:
            hook: changes its argument in place.
            stream: where it runs; by default where all-reduces do. On the CPU everything runs in order.

        Raises:
            ValueError: if a stream is given and there are replicas, or if the unit has parameters on several meshes.
        """
        for group in self._groups_of_one_mesh("set_all_reduce_hook"):
            if stream is not None and group.mesh.replicas is not None:
                raise ValueError(f"stream cannot be set when using native HSDP, but got {stream}")
            group.options.all_reduce_hook = hook
            if stream is not None and group.device.type != "cpu":
                group.options.all_reduce_hook_stream = stream

    # Settings: unshard and reshard

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward``, of the root too, from the next forward on.

        Raises:
            ValueError: if it is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for unit in self._units(recurse=recurse):
            unit.auto_reshard = False
            if unit.group is not None:
                unit.group.after_forward = FREE if reshard_after_forward else KEEP

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether backward frees the unsharded parameters. They must be freed before an optimizer step."""
        for group in self._groups(recurse=recurse):
            group.options.reshard_after_backward = reshard_after_backward

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether what is resharded keeps its memory, and each gather fills the same addresses, as CUDA graphs need."""
        for group in self._groups(recurse=recurse):
            group.options.keep_unsharded = keep

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers the parameters; an embedding's backward does not need them."""
        for group in self._groups(recurse=False):
            group.options.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Gather ``modules`` during this module's forward, in this order, ahead of what else would.

        Raises:
            ValueError: if one of them is not an ``FSDPModule``.
        """
        self._unit().forward_prefetch = _groups_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Gather ``modules`` during this module's backward, in this order, instead of the unit that ran before it.

        Raises:
            ValueError: if one of them is not an ``FSDPModule``.
        """
        self._unit().backward_prefetch = _groups_of(modules) if modules else None

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next forward's gathers wait for ``event``, recorded after the optimizer, not for the current stream.

        Used once. Work that follows the optimizer step then no longer delays the gathers.
        """
        self._unit().iteration.post_optim_event = event

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Issue the gathers of forward and backward asynchronously, in the memory of the current stream."""
        for group in self._groups(recurse=True):
            group.options.unshard_async = async_op

    # Settings: communication

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather with ``comm``, and in buffers that it allocates; see :class:`options.AllGather`.

        Raises:
            ValueError: if the unit has parameters on several meshes.
        """
        for group in self._groups_of_one_mesh("set_custom_all_gather"):
            group.options.all_gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce with ``comm``, and in buffers that it allocates; see :class:`options.ReduceScatter`.

        Raises:
            ValueError: if the unit has parameters on several meshes.
        """
        for group in self._groups_of_one_mesh("set_custom_reduce_scatter"):
            group.options.reduce_scatter = comm

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether buffers come from the process group's allocator, if it has one for the device.

        Raises:
            AssertionError: if communication was replaced by a user's.
        """
        for group in self._groups(recurse=False):
            communication.use_group_memory(group.options, group.mesh.group, enable=enable)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Let buffers live in symmetric memory, which NCCL's fastest gathers need. Collective.

        Reductions use it only after :meth:`set_force_sum_reduction_for_comms`.

        Raises:
            AssertionError: if communication was replaced by a user's.
            NotImplementedError: for another back end than NCCL, and off CUDA.
        """
        for group in self._groups(recurse=False):
            communication.use_symmetric_memory(
                group.options, group.mesh.group, backend, group.device, label=group.label
            )

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether reductions have a process group of their own, so that they overlap with gathers on the wire.

        Collective over the ranks of each shard group, the first time.
        """
        for group in self._groups(recurse=recurse):
            communication.separate_reduce_group(group.options, group.mesh.group, enable=enable)

    # Helpers

    def _unit(self) -> Unit:
        unit = unit_of(cast(nn.Module, self))
        assert unit is not None, f"{type(self).__name__} has lost its unit"
        return unit

    def _units(self, *, recurse: bool) -> list[Unit]:
        if not recurse:
            return list(self._unit().parts)
        found = (unit_of(module) for module in cast(nn.Module, self).modules())
        return list(dict.fromkeys(part for unit in found if unit is not None for part in unit.parts))

    def _groups_of_one_mesh(self, method: str) -> list[ParamGroup]:
        """The groups of this module's own unit, to which ``method`` gives one function for one process group."""
        groups = self._groups(recurse=False)
        if len(groups) > 1:
            meshes = ", ".join(dict.fromkeys(str(group.mesh.mesh) for group in groups))
            raise ValueError(f"{method} is not supported for a unit with parameters on several meshes: {meshes}")
        return groups

    def _groups(self, *, recurse: bool) -> list[ParamGroup]:
        return [unit.group for unit in self._units(recurse=recurse) if unit.group is not None]


def _groups_of(modules: Sequence[Any]) -> list[ParamGroup]:
    units = [unit_of(module) if isinstance(module, nn.Module) else None for module in modules]
    for module, unit in zip(modules, units, strict=True):
        if unit is None:
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    parts = [part for unit in units if unit is not None for part in unit.parts]
    return [part.group for part in parts if part.group is not None]


_classes: dict[type, type] = {}


def mix_in(module: nn.Module) -> None:
    """Change the class ``Name`` of ``module`` to ``FSDPName``, a subclass of both :class:`FSDPModule` and ``Name``."""
    original = type(module)
    if original not in _classes:
        namespace = {
            "__deepcopy__": _refuse_deepcopy,
            "__module__": original.__module__,
            "_original_class": original,
        }
        _classes[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), namespace)
    module.__class__ = _classes[original]


def _refuse_deepcopy(*_: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module``'s method ``method_name`` unshard and reshard as its forward does.

    Nothing if ``module`` is not an ``FSDPModule``, so that user code needs no case distinction.

    Raises:
        ValueError: if there is no such method.
    """
    unit = unit_of(module)
    if unit is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    kind = type(module)
    if method_name in vars(module) or not hasattr(kind, method_name):
        method = getattr(module, method_name)

        @functools.wraps(method)
        def own(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _run_as_forward(self, method, args, kwargs)

        setattr(module, method_name, types.MethodType(own, module))
        return
    # On the class: an attribute of the module that is bound to it would be a cycle (see Note: ownership).
    unit.forward_methods.add((ref(module), method_name))
    if method_name in vars(kind):
        return

    @functools.wraps(getattr(kind, method_name))
    def shared(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        method, unit = getattr(super(kind, self), method_name), unit_of(self)
        if unit is None or (ref(self), method_name) not in unit.forward_methods:
            return method(*args, **kwargs)
        return _run_as_forward(self, method, args, kwargs)

    setattr(kind, method_name, shared)


def _run_as_forward(module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    unit = unit_of(module)
    assert unit is not None
    for part in unit.parts:
        args, kwargs = part.pre_forward(module, args, kwargs)
    output = method(*args, **kwargs)
    for part in reversed(unit.parts):
        output = part.post_forward(module, args, output)
    return output


def share_comm_ctx(modules: list[Any]) -> None:
    """Let several roots, such as the stages of a pipeline, share streams and the memory of buffers in flight.

    Raises:
        ValueError: if one of ``modules`` is not an ``FSDPModule``.
    """
    units = [unit_of(module) if isinstance(module, nn.Module) else None for module in modules]
    for module, unit in zip(modules, units, strict=True):
        if unit is None:
            raise ValueError(f"Expects list of FSDPModules but got {module}")
    roots = [unit for unit in units if unit is not None]
    for root in roots[1:]:
        for unit in root.iteration.units or [root]:
            unit.share_comm(roots[0].comm)


def validate_order(model: nn.Module) -> None:
    """Check from now on that training forwards run the units in ``model`` in one order, on all ranks.

    The first one costs two small collectives for each unit. Without this call nothing is checked and it costs nothing.

    Raises:
        ValueError: if there is no ``FSDPModule`` in ``model``.
        RuntimeError: not here: from the first forward in which a rank gathers what another does not. Later forwards
            that differ from the first warn instead, once.
    """
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    if not units:
        raise ValueError(f"Expects a model with FSDPModules but got {type(model)}: {model}")
    for unit in units:
        unit.iteration.order = OrderCheck(unit.device)
