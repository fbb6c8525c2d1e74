"""State dicts of models with one flaw, and what loading them reports."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardproof.harness.adapters.base import Piece

#: The flaws of a state dict, with the entry that is missing, unknown or of another size.
FLAWED = {
    "missing": "out.weight",
    "missing-buffer": "layers.0.offset",
    "missing-in-a-unit": "layers.1.first.bias",
    "unknown": "stray",
    "unknown-in-a-unit": "layers.0.stray",
    "misfit": "out.bias",
    "misfit-in-a-unit": "layers.0.base",
}


def spoil(state: dict[str, Any], flaw: str) -> None:
    """Give the state dict of a model one flaw."""
    if flaw.startswith("missing"):
        del state[FLAWED[flaw]]
    elif flaw.startswith("unknown"):
        state[FLAWED[flaw]] = torch.ones(2)
    else:
        value = state[FLAWED[flaw]]
        larger = torch.zeros((value.shape[0] + 1, *value.shape[1:]), device=value.device)
        if isinstance(value, DTensor):
            larger = distribute_tensor(larger, value.device_mesh, value.placements)
        state[FLAWED[flaw]] = larger


def spoilt_load(model: nn.Module, flaw: str, *, strict: bool) -> Any:
    """Load a state dict with a flaw into an unsharded model."""
    state = dict(model.state_dict())
    spoil(state, flaw)
    return model.load_state_dict(state, strict=strict)


def report_of(load: Callable[[], Any]) -> dict[str, list[str]]:
    """The names that loading reports, by returning them or by an error."""
    try:
        missing, unexpected = load()
        return {"missing": sorted(missing), "unexpected": sorted(unexpected)}
    except RuntimeError as error:
        lines = str(error).splitlines()
    found = {"error": ["RuntimeError"]}
    for kind in ("Missing", "Unexpected"):
        found[kind] = sorted(name for line in lines if kind in line for name in re.findall(r'"([^"]+)"', line))
    found["misfit"] = sorted(re.findall(r"size mismatch for (\S+):", "\n".join(lines)))
    return found


def choice(name: str, piece: Piece, before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Whether a rank has the old or the new values of a parameter; None if it has none."""
    if not piece.tensor.numel():
        return None
    mine = piece.tensor.cpu()
    found = [which for which, state in (("old", before), ("new", after)) if torch.equal(mine, piece.cut(state[name]))]
    return found[0] if found else "neither"
