"""The arguments of a forward, as cases pass them."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one forward.

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


def as_inputs(arguments: Any) -> Inputs:
    """Normalize the arguments of one forward: ``Inputs``, a tuple of positional arguments, or a single one."""
    if isinstance(arguments, Inputs):
        return arguments
    return Inputs(arguments if isinstance(arguments, tuple) else (arguments,))


def as_microbatches(batch: Any) -> list[Inputs]:
    """Normalize a batch to a list of microbatches.

    Args:
        batch: one microbatch, or a list of them, each as :func:`as_inputs` takes it.
    """
    return [as_inputs(arguments) for arguments in (batch if isinstance(batch, list) else [batch])]
