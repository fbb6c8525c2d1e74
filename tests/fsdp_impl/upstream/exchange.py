"""The names of the reference for those of ``torch.distributed.fsdp``, in every module of torch that has them."""

import importlib
import sys
from typing import Any

# Where a test may import a public name of FSDP from.
_HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.wrap",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fsdp_api",
    "torch.distributed.fsdp._fully_shard._fsdp_common",
)
# Modules with helpers of tests and with state dicts, which keep the names under which they imported them.
_USERS = ("torch.distributed._composable.fsdp", "torch.distributed.checkpoint.state_dict")


def pairs() -> dict[str, tuple[Any, Any]]:
    """Return, by name, what torch and the reference each have of the reference's public names."""
    import fsdp_impl
    import fsdp_impl.wrap

    found: dict[str, tuple[Any, Any]] = {}
    for home in _HOMES:
        theirs = importlib.import_module(home)
        for ours in (fsdp_impl, fsdp_impl.wrap):
            for name in ours.__all__:
                if hasattr(theirs, name) and name not in found and hasattr(ours, name):
                    found[name] = (getattr(theirs, name), getattr(ours, name))
    return {name: pair for name, pair in found.items() if pair[0] is not pair[1]}


def exchange() -> dict[int, Any]:
    """Replace torch's FSDP by the reference wherever a module of torch has it by name.

    Modules that are imported later find the replaced names in their homes. The class of a test is not changed: call
    this before the test's module is imported.

    Returns:
        By the ``id`` of each of torch's objects, the reference's.
    """
    swapped = {id(theirs): ours for theirs, ours in pairs().values()}
    for name in _USERS:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name == "torch" or name.startswith("torch."):
            for key, value in list(vars(module).items()):
                if id(value) in swapped:
                    setattr(module, key, swapped[id(value)])
    return swapped
