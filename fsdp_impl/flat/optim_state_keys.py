"""What state dicts of optimizers call their parameters."""

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any

State = dict[str, Any]


class OptimStateKeyType(Enum):
    """What an optimizer's state dict calls its parameters."""

    PARAM_NAME = auto()
    """By their names."""
    PARAM_ID = auto()
    """By their numbers, in the order of the optimizer's parameter groups."""


def rename(given: State, names: Sequence[str], kind: OptimStateKeyType) -> State:
    """By names or by numbers, where ``names`` are in the order of the numbers.

    Raises:
        ValueError: for keys that are neither.
    """
    keys: Iterable[Any] = [*given["state"], *(key for group in given["param_groups"] for key in group["params"])]
    to: dict[Any, Any]
    if kind is OptimStateKeyType.PARAM_NAME:
        to = dict(enumerate(names))
    else:
        to = {name: number for number, name in enumerate(names)}
    if all(key in to.values() for key in keys):
        return given
    if unknown := [key for key in keys if key not in to]:
        raise ValueError(f"The optimizer state dict has the key {unknown[0]!r}, and the model no such parameter")
    renamed = [{**group, "params": [to[key] for key in group["params"]]} for group in given["param_groups"]]
    if kind is OptimStateKeyType.PARAM_ID:
        # ``load_state_dict`` looks at places, not at numbers: an optimizer counts its groups through, one by one.
        renamed = [{**group, "params": sorted(group["params"])} for group in renamed]
        renamed.sort(key=lambda group: group["params"][:1])
    return {"state": {to[key]: state for key, state in given["state"].items()}, "param_groups": renamed}
