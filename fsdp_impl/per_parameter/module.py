"""``FSDPModule``: what a module can do once it is a unit."""

from typing import Any, NoReturn, cast

from torch import nn

from fsdp_impl.per_parameter import after_forward
from fsdp_impl.per_parameter.registry import unit_of
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


class FSDPModule:
    """Mixed into the class of every module that is given to ``fully_shard``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the original class: a slice of a sharded ``Sequential`` is not a unit."""
        original: type[Any] = cls.__mro__[2]  # [FSDPName, FSDPModule, Name, ...]
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

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward``, of the root too, from the next forward on.

        Args:
            reshard_after_forward: whether to reshard after forward.
            recurse: whether to change it for the units inside this module too.

        Raises:
            ValueError: if it is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for unit in self._units(recurse=recurse):
            unit.auto_reshard = False
            if unit.group is not None:
                unit.group.after_forward = after_forward.resolve(reshard_after_forward, unit.group.mesh)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``.to()``, ``to_empty`` and the like change the sharded parameters."""
        self.reshard()
        result = cast(Any, super())._apply(*args, **kwargs)
        self._unit().refresh()
        return result

    def _unit(self) -> Unit:
        unit = unit_of(cast(nn.Module, self))
        assert unit is not None, f"{type(self).__name__} has lost its unit"
        return unit

    def _units(self, *, recurse: bool) -> list[Unit]:
        if not recurse:
            return [self._unit()]
        found = (unit_of(module) for module in cast(nn.Module, self).modules())
        return list(dict.fromkeys(unit for unit in found if unit is not None))


_classes: dict[type, type] = {}


def mix_in(module: nn.Module) -> None:
    """Change the class ``Name`` of ``module`` to ``FSDPName``, a subclass of both :class:`FSDPModule` and ``Name``."""
    original = type(module)
    if original not in _classes:
        namespace = {"__deepcopy__": _refuse_deepcopy, "__module__": original.__module__}
        _classes[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), namespace)
    module.__class__ = _classes[original]


def _refuse_deepcopy(*_: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")
