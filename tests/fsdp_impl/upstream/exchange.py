"""The names of the reference for those of ``torch.distributed.fsdp``, in every module of torch that has them."""

import importlib
import sys
from typing import Any

# Where a test may import a public name of FSDP from, and the module of the reference that has it.
_HOMES = {
    "torch.distributed.fsdp": "fsdp_impl",
    "torch.distributed.fsdp.wrap": "fsdp_impl.wrap",
    "torch.distributed.fsdp._fully_shard": "fsdp_impl",
    "torch.distributed.fsdp._fully_shard._fsdp_api": "fsdp_impl",
    "torch.distributed.fsdp._fully_shard._fsdp_common": "fsdp_impl",
}
# Modules with helpers of tests and with state dicts, which keep the names under which they imported them.
_USERS = ("torch.distributed._composable.fsdp", "torch.distributed.checkpoint.state_dict")


def pairs() -> dict[str, tuple[Any, Any]]:
    """Return, by name, what torch and the reference each have of the reference's public names."""
    found: dict[str, tuple[Any, Any]] = {}
    for home, own in _HOMES.items():
        theirs, ours = importlib.import_module(home), importlib.import_module(own)
        for name in ours.__all__:
            if hasattr(theirs, name) and name not in found:
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
