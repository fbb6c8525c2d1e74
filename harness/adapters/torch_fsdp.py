"""Adapter for torch's ``FullyShardedDataParallel``, a module wrapper with one flat parameter per unit."""

import dataclasses
from abc import abstractmethod
from typing import Any, ClassVar

import torch.distributed.fsdp
from torch import nn

from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.flat import FlatAdapter


class TorchFsdpAdapter(FlatAdapter):
    """``torch.distributed.fsdp.FullyShardedDataParallel``."""

    name = "torch.fsdp"
    api: ClassVar[Any] = torch.distributed.fsdp
    # Models outlive their last reference: findings/F019.py.
    traits = dataclasses.replace(
        FlatAdapter.traits, frees_models=False, simulates=True,
        wrong_calls=frozenset(
            {"F-25", "F-29", "F-31", "F-36", "F-45", "F-396", "F-422", "F-423", "F-424", "F-425", "F-426"}
        ),
    )  # fmt: skip

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        # What it puts on the CPU where it is already, it frees: findings/F041.py.
        lacks = {Capability.FULL_PARAMS_ON_CPU, "precision.full_precision_in_eval"}
        return super().capabilities() - lacks | {Capability.STATE_HELPERS}

    def _key_kinds(self) -> Any:
        from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType

        return OptimStateKeyType


class EngineFsdpAdapter(TorchFsdpAdapter):
    """Base class for packages that wrap a model in torch's wrapper by a policy and options, the same for each unit.

    What these cannot express is wrapped as user code would, and the package takes it as it is.
    """

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        # Cases that call torch's own wrapper say nothing about the package around it.
        return super().capabilities() - {Capability.FSDP1_API, Capability.STATE_HELPERS}

    @abstractmethod
    def _give(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        """Return the wrapper that the package makes of a model with these options, or of one with wrappers."""

    def _mixed_precision(self, unit: str) -> Any:
        policy = super()._mixed_precision(unit)
        if policy is None or self.config.auto_wrap_policy is not None:
            return policy
        # The case says what batch norms compute in, which a policy that wraps would leave in float32.
        return dataclasses.replace(policy, _module_classes_to_ignore=())

    def _shard(self, model: nn.Module, names: list[str], options: dict[str, Any]) -> nn.Module:
        config = self.config
        by_hand = config.auto_wrap_policy is not None and config.auto_wrap_policy.rule == "by-hand"
        if by_hand or config.plain_root or config.ignored_inside or config.sync_module_states == "root":
            return self._give(super()._shard(model, names, options), {})
        options = options | {"mixed_precision": self._mixed_precision("")}
        del options["device_id"]  # a package passes its own
        if names:
            units = {model.get_submodule(name): name for name in names}
            options["auto_wrap_policy"] = self.api.wrap.CustomPolicy(
                lambda module: module in units and {"mixed_precision": self._mixed_precision(units[module])}
            )
        return self._give(model, options)
