"""Whole parameters in a context of a script, beside those of an unsharded model."""

from __future__ import annotations

import torch
from torch import nn

from shardproof.harness.adapters.base import WholeParameters
from shardproof.harness.parity.rank import Rank
from shardproof.harness.parity.run import Run


def check_whole(rank: Rank, how: WholeParameters, found: dict[str, nn.Parameter], plain: nn.Module) -> bool:
    """Check what a context gives this rank, and return whether it has whole parameters."""
    expected = dict(plain.named_parameters())
    if how.first_rank_only and rank.index:
        count = sum(parameter.numel() for parameter in found.values())
        numel = sum(parameter.numel() for parameter in expected.values())
        assert count < numel, f"this rank has {count} of {numel} elements, although the first rank alone should"
        return False
    assert found.keys() == expected.keys(), f"the names differ in {sorted(found.keys() ^ expected.keys())}"
    for name, parameter in found.items():
        device = "cpu" if how.on_cpu else rank.device.type
        assert parameter.device.type == device, f"{name} is on {parameter.device} instead of {device}"
        right = expected[name].detach().to(parameter.device)
        assert parameter.shape == right.shape, f"{name} has the shape {tuple(parameter.shape)}"
        assert torch.equal(parameter.detach(), right), f"{name} has other values than the unsharded model"
    return True


@torch.no_grad()
def write(parameters: dict[str, nn.Parameter]) -> None:
    """Change each element of each parameter in another way."""
    for parameter in parameters.values():
        parameter.mul_(torch.arange(1.0, parameter.numel() + 1, device=parameter.device).view_as(parameter) / 64)


def check_values(run: Run, plain: nn.Module) -> None:
    """Check that this rank holds its part of the parameters of an unsharded model."""
    full = dict(plain.named_parameters())
    for name, piece in run.adapter.parameters().items():
        assert torch.equal(piece.tensor, piece.cut(full[name].detach())), f"{name} has other values after the context"


def halve(run: Run, plain: nn.Module) -> None:
    """Halve the parameters where the optimizer updates them, and those of plain copies."""
    with torch.no_grad():
        for parameter in (*run.adapter.held_parameters().values(), *plain.parameters()):
            parameter.mul_(0.5)
