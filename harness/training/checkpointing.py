"""Saves and loads a training by torch.distributed.checkpoint, for those who have no functions of their own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, objects: Mapping[str, Any]) -> None:
    """Write a checkpoint of the model, the optimizer, objects with a state dict, and torch's generator of each rank."""
    state_dict_saver.save(_state(model, optimizer, objects) | _random(), checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, objects: Mapping[str, Any]) -> None:
    """Load a checkpoint; the generators of ranks are those of it if there are equally many ranks."""
    found = _state(model, optimizer, objects)
    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    is_as_wide = _key(dist.get_world_size() - 1) in known and _key(dist.get_world_size()) not in known
    random = _random() if is_as_wide else {}
    state_dict_loader.load(found | random, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    for state in random.values():
        torch.set_rng_state(state)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, objects: Mapping[str, Any]) -> dict[str, Any]:
    parameters, states = get_state_dict(model, optimizer)
    stateful = {name: one for name, one in objects.items() if hasattr(one, "load_state_dict")}
    return {"model": parameters, "optimizer": states, **{f"objects.{name}": one for name, one in stateful.items()}}


def _key(rank: int) -> str:
    return f"random.{rank}"


def _random() -> dict[str, torch.Tensor]:
    return {_key(dist.get_rank()): torch.get_rng_state()}
