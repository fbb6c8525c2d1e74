"""Where a parameter is registered, and who owns whom."""

from weakref import ref

from torch import nn

# Note: ownership
#
# A module owns its unit, through the hooks that the unit registers on it; a unit owns its group, the parameters and
# their buffers. Units refer to modules and to each other weakly. So a model that is deleted gives its memory back at
# once, where a cycle would keep it until the garbage collector runs.
#
# The graph of a forward owns the units that its backward passes. Backward still works when the model has been deleted
# meanwhile: then there are units whose modules are gone.


class Owner:
    """A module attribute that holds the parameter; shared parameters have several. Equal if both name the same."""

    __slots__ = ("name", "reference")

    def __init__(self, module: nn.Module, name: str) -> None:
        self.reference = ref(module)  # for loops in which calls of `find` would add up
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owner) and (self.reference, self.name) == (other.reference, other.name)

    def __hash__(self) -> int:
        return hash((self.reference, self.name))

    @property
    def module(self) -> nn.Module:
        """The module, where it is known to be there: a forward runs, or a user calls its methods."""
        module = self.reference()
        assert module is not None, f"the module that held {self.name} is gone"
        return module

    def find(self) -> nn.Module | None:
        """The module, ``None`` if it is gone (see Note: ownership)."""
        return self.reference()

    def hold(self, param: nn.Parameter) -> None:
        """Let the module, if it is still there, hold ``param``."""
        module = self.reference()
        if module is None:
            return
        if type(module).__setattr__ is nn.Module.__setattr__:
            # The checks of nn.Module.__setattr__ cost more than all else here, and hold by construction.
            module._parameters[self.name] = param
        else:
            module.__dict__.pop(self.name, None)
            setattr(module, self.name, param)
