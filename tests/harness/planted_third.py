"""Adapters of a reference of which one place is edited: jobs that stop and go on, saves behind them, and large meshes.

Beside them are mistakes where a reference does nothing: in checkpoints of an implementation's own, as engines have, and
in what an implementation that shards gradients or states alone says of itself.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.harness.adapters.base import Config, OptimizerFactory, original_name
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from shardproof.harness.adapters.torch_zero_optimizer import TorchZeroOptimizerAdapter
from tests.harness.planted_reductions import Edit, edited

PER_PARAMETER = {
    # Process groups that are made anew. What is remembered outlives the case, so the ranks must be fresh.
    "smaller-meshes-by-their-ranks": Edit(
        "per_parameter.mesh:_smaller_mesh",
        "_smaller_meshes.setdefault(mesh.group, {})",
        'globals().setdefault("_by_ranks", {})',
        is_apart=True,
    ),
    "groups-by-their-ranks": Edit(
        "per_parameter.mesh:ShardMesh.__post_init__",
        "self.mesh.get_group(last) if self.sharded else None",
        'globals().setdefault("_groups", {}).setdefault(str(self.mesh), self.mesh.get_group(last))',
        is_apart=True,
    ),
    "default-mesh-of-the-first-world": Edit(
        "per_parameter.mesh:default_mesh",
        'init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))',
        'globals().setdefault("_first", init_device_mesh(accelerator.type if accelerator else "cpu", '
        "(dist.get_world_size(),)))",
        is_apart=True,
    ),
    # Saves in the background.
    "shards-move-when-gathered": Edit(
        "per_parameter.shards:Shards.gather_input",
        "    source = self._filled_buffer() if self._buffer is None else self._buffer\n",
        "    source, left = self._filled_buffer(), [param.local for param in self.params]\n"
        "    for param, slot in zip(self.params, self.layout.slots, strict=True):\n"
        "        param.move_to(shard_view(source, slot))\n"
        "    self._buffer = source\n"
        "    torch._foreach_zero_(left)\n",
    ),
    # Pipelines.
    "later-backwards-not-gathered": Edit(
        "per_parameter.unit:Unit._pre_backward",
        "    self._unshard_now()\n",
        "    if self.iteration.forward_order:\n        self._unshard_now()\n",
    ),
    # Gradients of gradients.
    "graphs-dropped": Edit("common.modes:check_plain", "if grad.requires_grad:", "if False:"),
    # Four dimensions: with three, the root of the meshes has no other.
    "parameters-on-the-root-mesh": Edit(
        "common.mesh:concatenate",
        "concatenate_meshes(list(meshes))",
        "meshes[0]._get_root_mesh()",
    ),
}

FLAT = {
    "flat-groups-by-their-ranks": Edit(
        "flat.ranks:resolve",
        "group = device_mesh.get_group(mesh_dim=0)",
        'group = globals().setdefault("_groups", {}).setdefault(str(device_mesh), device_mesh.get_group(mesh_dim=0))',
        is_apart=True,
    ),
    "flat-default-group-of-the-first-world": Edit(
        "flat.ranks:_default_group",
        "dist.group.WORLD",
        'globals().setdefault("_first", dist.group.WORLD)',
        is_apart=True,
    ),
    "flat-graphs-dropped": Edit("common.modes:check_plain", "if grad.requires_grad:", "if False:"),
}

#: Adapters by the names of their bugs.
ADAPTERS = edited(__name__, {ReferenceAdapter: PER_PARAMETER, ReferenceFlatAdapter: FLAT})


class OwnCheckpoint(ReferenceAdapter):
    """Saves the shards of each rank in a file of its own, as engines do; the sound one."""

    name = "own-checkpoint"
    traits = dataclasses.replace(ReferenceAdapter.traits, isolation="shared")

    @classmethod
    def capabilities(cls) -> frozenset[Capability]:
        return super().capabilities() | {Capability.OWN_CHECKPOINT}

    def save_own(self, directory: pathlib.Path) -> None:
        directory.mkdir(exist_ok=True)
        assert self.optimizer is not None
        model = self.module.state_dict()
        shards = {name: self.shard_of(value) for name, value in model.items()}
        layout = {name: (isinstance(value, DTensor), tuple(value.shape)) for name, value in model.items()}
        saved = {"model": shards, "layout": layout, "optimizer": self.local(self.optimizer.state_dict())}
        torch.save(saved, directory / f"{dist.get_rank()}.pt")
        dist.barrier()

    def load_own(self, directory: pathlib.Path) -> None:
        saved = torch.load(directory / f"{dist.get_rank()}.pt", weights_only=False)
        with torch.no_grad():
            for name, value in self.module.state_dict().items():
                self.shard_of(value).copy_(saved["model"][name])
        self.load_optimizer(saved["optimizer"])

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        """Restore the groups' options and the tensors of state, into those that there are."""
        assert self.optimizer is not None
        for group, one in zip(self.optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in one.items() if key != "params"})
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, state in saved["state"].items():
            for key, value in state.items():
                self.shard_of(self.optimizer.state[parameters[number]][key]).copy_(value)

    def consolidated(self, directory: pathlib.Path) -> dict[str, torch.Tensor]:
        files = [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(dist.get_world_size())]
        return {original_name(name): self.joined(name, files) for name in files[0]["model"]}

    def joined(self, name: str, files: list[dict[str, Any]]) -> torch.Tensor:
        """Put a tensor together from the parts of all ranks."""
        is_divided, shape = files[0]["layout"][name]
        parts = [file["model"][name] for file in files]
        return torch.cat(parts).view(shape) if is_divided else parts[0]

    @staticmethod
    def shard_of(value: torch.Tensor) -> torch.Tensor:
        """What this rank has of a tensor."""
        return value.to_local() if isinstance(value, DTensor) else value

    def local(self, state: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's state dict with what this rank has of each tensor."""
        kept = {
            number: {key: self.shard_of(value).clone() for key, value in one.items()}
            for number, one in state["state"].items()
        }
        return {"state": kept, "param_groups": [dict(group) for group in state["param_groups"]]}


class WithoutState(OwnCheckpoint):
    """Loads the weights and the options of the optimizer's groups, and leaves its states as they are."""

    name = "own-without-state"

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        super().load_optimizer(saved | {"state": {}})


class WithoutRates(OwnCheckpoint):
    """Loads the states of the optimizer and leaves the options of its groups."""

    name = "own-without-rates"

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        assert self.optimizer is not None
        groups = [dict(group) for group in self.optimizer.param_groups]
        super().load_optimizer(saved | {"param_groups": groups})


class FirstShard(OwnCheckpoint):
    """Puts whole weights together from as many rows of each rank as the first has, as if sizes divided."""

    name = "own-first-shard"

    def joined(self, name: str, files: list[dict[str, Any]]) -> torch.Tensor:
        is_divided, shape = files[0]["layout"][name]
        parts = [file["model"][name] for file in files]
        if not is_divided:
            return parts[0]
        padded = [torch.cat([part, part.new_zeros(len(parts[0]) - len(part), *part.shape[1:])]) for part in parts]
        return torch.cat(padded[::-1])[: shape[0]]


class WithoutFrozen(OwnCheckpoint):
    """Makes whole weights of what is trained alone."""

    name = "own-without-frozen"

    def consolidated(self, directory: pathlib.Path) -> dict[str, torch.Tensor]:
        trained = {name for name, value in self.named_parameters().items() if value.requires_grad}
        return {name: value for name, value in super().consolidated(directory).items() if name in trained}


#: Mistakes in checkpoints of an implementation's own, by name.
CHECKPOINTS = {one.name: one for one in (WithoutState, WithoutRates, FirstShard, WithoutFrozen)}


class ClaimsGradients(TorchZeroOptimizerAdapter):
    """Says that gradients are divided too, although DDP leaves them whole on every rank."""

    name = "claims-gradients"
    traits = dataclasses.replace(TorchZeroOptimizerAdapter.traits, shards=frozenset({"gradients", "optimizer"}))


class WholeState(TorchZeroOptimizerAdapter):
    """Says that the optimizer's state is divided, and makes an ordinary optimizer."""

    name = "whole-state"

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        self.optimizer = optimizer(self.module.parameters()) if optimizer else None
