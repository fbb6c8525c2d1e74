"""``FSDPModule``: what a module can do once it is a unit."""

import functools
import types
from typing import Any, NoReturn, cast

from torch import nn

from fsdp_impl.common.order import OrderCheck
from fsdp_impl.per_parameter.registry import unit_of
from fsdp_impl.per_parameter.settings import Settings
from fsdp_impl.per_parameter.unit import Unit


class UnshardHandle:
    """A pending unshard."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Finish the unshard: afterwards the module holds unsharded parameters. Forward does so by itself."""
        if self._unit is not None:
            self._unit.wait_for_unshard()
            self._unit = None


class FSDPModule(Settings):
    """Mixed into the class of every module that is given to ``fully_shard``."""

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
        unit = self._unit()
        unit.unshard(async_op=async_op)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's own unsharded parameters and register the sharded ones. A pending unshard is dropped."""
        self._unit().reshard()

    def reset_iter_state(self) -> None:
        """Recover after an exception in forward or backward: free what is unsharded, forget what is in flight.

        Gradients that are not reduced yet are lost: an accumulation starts anew.

        Raises:
            RuntimeError: if this is not the root.
        """
        self._unit().reset()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``.to()``, ``to_empty`` and the like change the sharded parameters."""
        self.reshard()
        result = cast(Any, super())._apply(*args, **kwargs)
        self._unit().refresh()
        return result


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

    Nothing if ``module`` is not an ``FSDPModule``, so that a script needs no case distinction.

    Raises:
        ValueError: if there is no such method.
    """
    unit = unit_of(module)
    if unit is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = unit_of(self)
        assert own is not None
        args, kwargs = own.pre_forward(self, args, kwargs)
        return own.post_forward(self, args, method(*args, **kwargs))

    setattr(module, method_name, types.MethodType(wrapped, module))


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
