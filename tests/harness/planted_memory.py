"""References that free too late, or that step with wrong optimizer state."""

from __future__ import annotations

import torch

from fsdp_impl.common.phase import Phase
from fsdp_impl.per_parameter.group import ParamGroup
from fsdp_impl.per_parameter.unit import Unit
from shardproof.harness.adapters.reference import ReferenceAdapter
from tests.harness.planted import _Planted

_free = ParamGroup._free_unsharded
_end = Unit._end_of_backward


class KeepsBytesAfterForward(_Planted):
    """Units show shards after forward and keep the gathered bytes until backward."""

    name = "keeps-bytes-after-forward"
    module_, seam = ParamGroup, "_free_unsharded"

    @staticmethod
    def wrong(group: ParamGroup) -> None:
        if group.phase is not Phase.FORWARD:
            _free(group)


class KeepsUnusedUnits(_Planted):
    """A unit without gradients is not freed at the end of backward, and the next step uses its old values."""

    name = "keeps-unused-units"
    module_, seam = Unit, "_end_of_backward"

    @staticmethod
    def wrong(unit: Unit) -> None:
        for other in unit.iteration.units:
            params = other.group.shards.params if other.group is not None else []
            if other.group is not None and all(one.unsharded is None or one.unsharded.grad is None for one in params):
                other.group.phase = Phase.POST_BACKWARD
        _end(unit)


class KeepsBytesAfterBackward(_Planted):
    """Units show shards after backward and keep the gathered bytes."""

    name = "keeps-bytes-after-backward"
    module_, seam = ParamGroup, "_free_unsharded"

    @staticmethod
    def wrong(group: ParamGroup) -> None:
        if group.phase is not Phase.POST_BACKWARD:
            _free(group)


class DoubledMomentum(ReferenceAdapter):
    """The state of the optimizer is wrong after a step whose parameters are right."""

    name = "doubled-momentum"

    def step(self) -> None:
        super().step()
        assert self.optimizer is not None
        for state in self.optimizer.state.values():
            if isinstance(found := state.get("exp_avg"), torch.Tensor):
                found.mul_(2)
