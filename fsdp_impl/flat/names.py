"""Names without what wrappers add to them."""

from torch import nn

#: The attribute under which a wrapper holds its module.
WRAPPED = "_fsdp_wrapped_module"

# What checkpointing wrappers of torch call their module.
_CHECKPOINTED = "_checkpoint_wrapped_module"


def clean(name: str) -> str:
    """``name`` of a parameter, buffer or module as it was before any wrapping."""
    return ".".join(part for part in name.split(".") if part not in (WRAPPED, _CHECKPOINTED))


def without_checkpointing(module: nn.Module) -> nn.Module:
    """The module inside a checkpointing wrapper of torch; any other as it is."""
    inner = getattr(module, _CHECKPOINTED, None)
    return inner if isinstance(inner, nn.Module) else module


def module_names(root: nn.Module) -> dict[nn.Module, str]:
    """The clean names of all modules in ``root``; ``"(root)"`` for ``root`` itself and what it wraps."""
    return {module: clean(name) or "(root)" for name, module in root.named_modules()}
