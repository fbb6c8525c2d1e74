"""Adapter for ``torch.distributed.optim.ZeroRedundancyOptimizer``: replicas divide the optimizer's state."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.adapters.base import Config, KeysLeftOver, OptimizerFactory, StateForm, options_of, state_pieces
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.replicas import OF_DDP, DdpAdapter, class_and_options, group_of
from shardproof.harness.tensors.pieces import Piece


class TorchZeroOptimizerAdapter(DdpAdapter):
    """``ZeroRedundancyOptimizer`` beside ``DistributedDataParallel``: each rank updates whole parameters of its own.

    It takes a class and options. The case's optimizer is made once, for its groups, which have the options, and its
    class; it is then dropped.
    """

    name = "torch.zero_optimizer"
    traits = dataclasses.replace(DdpAdapter.traits, shards=frozenset({"optimizer"}))

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        # Its states are those that ``consolidate_state_dict`` makes.
        return OF_DDP - {Capability.STATE_HELPERS} | {"sync_module_states", Capability.ZERO_API}

    @staticmethod
    def zero_optimizer(parameters: Any, optimizer_class: Any, **options: Any) -> torch.optim.Optimizer:
        """Call ``ZeroRedundancyOptimizer``."""
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes most of a second

        return ZeroRedundancyOptimizer(parameters, optimizer_class, **options)

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        # Before DDP sends anything: it may refuse the parameters.
        zero = self._zero(model, optimizer, config) if optimizer else None
        super().__init__(model, optimizer=None, config=config)
        self.optimizer = zero

    def optimizer_state(self) -> dict[str, dict[str, Piece]] | None:
        """Return the state of the parameters that this rank updates; the optimizer inside the optimizer has it."""
        if self.optimizer is None:
            return None
        zero: Any = self.optimizer
        pieces, state = self.parameters(), zero.optim.state
        return {
            name: state_pieces(state[parameter], pieces[name].cut)
            for name, parameter in self.held_parameters().items()
            if state.get(parameter)
        }

    def checkpoint(self, *, form: StateForm = "sharded") -> dict[str, Any]:
        """Return state dicts (collective). That of the optimizer is whole, as ``consolidate_state_dict`` makes it."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        state = {"model": get_model_state_dict(self.module, options=options_of(form))}
        if self.optimizer is not None:
            zero: Any = self.optimizer
            names = self._names()
            state["optimizer"] = {}
            for rank in [0] if form == "first-rank" else range(dist.get_world_size(self.group)):
                zero.consolidate_state_dict(to=rank)
                # The next call drops what this one has brought here.
                if rank == dist.get_rank(self.group):
                    state["optimizer"] = _renamed(zero.state_dict(), dict(enumerate(names)))
        return state

    def restore(self, state: dict[str, Any], *, form: StateForm = "sharded", strict: bool = True) -> KeysLeftOver:
        """Load state dicts (collective). The optimizer's is sent from the first rank here, as user code has to."""
        keys = super().restore({"model": state["model"]}, form=form, strict=strict)
        if "optimizer" in state:
            sent = [state["optimizer"]]
            if form == "first-rank":
                dist.broadcast_object_list(sent, src=0, group=self.group)
            numbers = {name: number for number, name in enumerate(self._names())}
            self._checkpointed_optimizer().load_state_dict(_renamed(sent[0], numbers))
        return keys

    @classmethod
    def _zero(cls, model: nn.Module, optimizer: OptimizerFactory, config: Config) -> torch.optim.Optimizer:
        made = optimizer(model.parameters())
        kind, options = class_and_options(made)
        return cls.zero_optimizer(made.param_groups, kind, process_group=group_of(config), **options)

    def _names(self) -> list[str]:
        """Return the names of the optimizer's parameters, in the order of its state dict."""
        names = {parameter: name for name, parameter in self.held_parameters().items()}
        return [names[one] for group in self._checkpointed_optimizer().param_groups for one in group["params"]]


def _renamed(state: dict[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with other keys for its parameters: the parameters that ``keys`` has."""
    return {
        "state": {keys[key]: value for key, value in state["state"].items() if key in keys},
        "param_groups": [
            {**group, "params": [keys[key] for key in group["params"] if key in keys]}
            for group in state["param_groups"]
        ],
    }
