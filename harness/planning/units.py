"""Which modules of a model become units: those that are named, by class or by name, or its repeated blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def choose(model: nn.Module, wanted: Sequence[str] = ()) -> list[str]:
    """Return the names of the modules that become units, the root aside, in the order of the model.

    Args:
        model: the model, not sharded yet.
        wanted: names of modules, and names of classes, of which every module becomes a unit. Without any, the units are
            the blocks that repeat: the modules in the outermost lists of several modules of one class with parameters.

    Raises:
        ValueError: no module has such a name or class; one line, which names the classes that the model has.
    """
    if not wanted:
        return [name for name in _repeated(model) if name]
    found = {name: type(module).__name__ for name, module in model.named_modules() if name and _has_parameters(module)}
    for one in wanted:
        if one not in found and one not in found.values():
            known = ", ".join(sorted(set(found.values())))
            raise ValueError(f"--unit {one}: no module with parameters has this class or name; classes are {known}")
    return [name for name, kind in found.items() if kind in wanted or name in wanted]


def _repeated(module: nn.Module, prefix: str = "") -> Iterator[str]:
    children = [(f"{prefix}{name}", child) for name, child in module.named_children() if _has_parameters(child)]
    if isinstance(module, _LISTS) and len(children) > 1 and len({type(child) for _, child in children}) == 1:
        yield from (name for name, _ in children)
        return
    for name, child in children:
        yield from _repeated(child, f"{name}.")


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
