"""Adapters with one bug of a kind each, for the tests of ``--explain``; what is wrong shows in one place first."""

import dataclasses
import re
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from fsdp_impl.common import hooks
from fsdp_impl.common.iteration import Phase
from fsdp_impl.per_parameter import unit
from fsdp_impl.per_parameter.group import ParamGroup
from shardproof.harness.adapters.base import Adapter, Config
from shardproof.harness.adapters.reference import ReferenceAdapter, ReferenceFlatAdapter
from shardproof.harness.adapters.torch_fsdp import TorchFsdpAdapter
from shardproof.harness.adapters.torch_fully_shard import TorchFullyShardAdapter

UNIT = "layers.1"


class _Planted(ReferenceAdapter):
    """Replaces functions of the reference before the first model of the process is sharded, for good."""

    traits = dataclasses.replace(ReferenceAdapter.traits, isolation="adapter")
    changes: ClassVar[tuple[tuple[Any, str, Any], ...]] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for owner, name, wrong in self.changes:
            setattr(owner, name, wrong)
        super().__init__(*args, **kwargs)


_reshard = ParamGroup.reshard


def _never_freed(self: ParamGroup, phase: Phase) -> None:
    if self.label != UNIT:
        _reshard(self, phase)


class StaleParameters(_Planted):
    """One unit is never freed, and not gathered again after the optimizer's step."""

    changes = ((ParamGroup, "reshard", _never_freed), (unit, "drop_stale", lambda groups: None))


def _scaled(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    ctx.callback()
    return (None, *(grad * 1.5 for grad in grads))


class ScaledAtTheBorder(_Planted):
    """The gradient that leaves a unit through its inputs is scaled."""

    changes = ((hooks._CallOnBackward, "backward", staticmethod(_scaled)),)


class LostCasts(ReferenceAdapter):
    """The dtype of compute is not passed on."""

    def __init__(self, model: nn.Module, *, optimizer: Any, config: Config) -> None:
        lost = dataclasses.replace(config.precision, param_dtype=None)
        super().__init__(model, optimizer=optimizer, config=dataclasses.replace(config, precision=lost))
        self.config = config  # of which the baseline's casts are made


class UnsyncedBuffer(ReferenceFlatAdapter):
    """A buffer of the second rank has not the value that the first rank sent."""

    def __init__(self, model: nn.Module, **kwargs: Any) -> None:
        if dist.get_rank() == 1:
            model.get_submodule(UNIT).get_buffer("offset").add_(1)
        super().__init__(model, **kwargs)


class _Stepping(Adapter):
    """Changes what an optimizer's step has done; mixed into an adapter."""

    def step(self) -> None:
        before = {name: value.detach().clone() for name, value in self.held_parameters().items()}
        super().step()
        with torch.no_grad():
            self.spoil(before)

    def spoil(self, before: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError


class SkippedUpdate(_Stepping, TorchFullyShardAdapter):
    """A parameter that two modules share is left out of the optimizer's step."""

    def spoil(self, before: dict[str, torch.Tensor]) -> None:
        self.held_parameters()[f"{UNIT}.first.weight"].copy_(before[f"{UNIT}.first.weight"])


class SwappedState(_Stepping, TorchFullyShardAdapter):
    """The optimizer's state of two parameters of one shape is exchanged after each step."""

    def spoil(self, before: dict[str, torch.Tensor]) -> None:
        held = self.held_parameters()
        assert self.optimizer is not None
        one, two = (self.optimizer.state[held[f"layers.{index}.out_proj.bias"]] for index in (0, 2))
        one["momentum_buffer"], two["momentum_buffer"] = two["momentum_buffer"], one["momentum_buffer"]


class WrongModule(TorchFsdpAdapter):
    """One module computes something else on the second rank."""

    def __init__(self, model: nn.Module, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        if dist.get_rank() == 1:
            inner = model.get_submodule(UNIT)
            inner = getattr(inner, "_fsdp_wrapped_module", inner)
            inner.get_submodule("in_proj").register_forward_hook(lambda module, args, output: output * 1.01)


class Unsteady(ReferenceAdapter):
    """Fails in the first run of a case in its process."""

    traits = dataclasses.replace(ReferenceAdapter.traits, isolation="adapter")
    has_failed = False

    def step(self) -> None:
        super().step()
        if not Unsteady.has_failed:
            for value in self.module.parameters():
                value.data.add_(1)
        Unsteady.has_failed = True


class Raising(ReferenceAdapter):
    """Raises an error in the backward of the second step."""

    def backward(self, loss: torch.Tensor) -> None:
        self._calls = getattr(self, "_calls", 0) + 1
        if self._calls == 2:
            raise RuntimeError("planted")
        super().backward(loss)


for _name, _kind in list(globals().items()):
    if isinstance(_kind, type) and issubclass(_kind, Adapter) and _kind.__module__ == __name__:
        _kind.name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", _name).lower()
