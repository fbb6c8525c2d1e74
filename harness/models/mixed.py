"""Models whose arithmetic is the same in every order and by every kernel, for cases that compare bits."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.utils.checkpoint import checkpoint


class ForwardDtypes(NamedTuple):
    """The dtypes in one forward of a :class:`Scale`."""

    input: torch.dtype
    weight: torch.dtype
    offset: torch.dtype


class Scale(nn.Module):
    """``x * weight + offset + shift``, element by element, for inputs of (rows, columns).

    ``offset`` is a floating-point buffer and ``calls`` an integer one; a third is None, as that of a norm that keeps no
    statistics. ``seen`` has the dtypes of each forward.
    """

    weight: nn.Parameter
    shift: nn.Parameter
    offset: torch.Tensor
    calls: torch.Tensor

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))
        self.shift = nn.Parameter(torch.randn(rows, columns))
        self.register_buffer("offset", torch.randn(rows, columns))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("absent", None)
        self.seen: list[ForwardDtypes] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(ForwardDtypes(x.dtype, self.weight.dtype, self.offset.dtype))
        return x * self.weight + self.offset + self.shift


class Mixed(nn.Module):
    """Two units ``low`` and ``high``, one :class:`Scale` each, and a parameter of the root.

    Input and output: (rows, columns). No gradient is a sum over a batch, so that none depends on the order in which a
    kernel adds. With ``recomputes`` backward computes ``low`` again.
    """

    def __init__(self, rows: int = 6, columns: int = 4, *, recomputes: bool = False) -> None:
        super().__init__()
        self.low, self.high = Scale(rows, columns), Scale(rows, columns)
        self.gain = nn.Parameter(torch.randn(rows, columns))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = checkpoint(self.low, x, use_reentrant=False) if self.recomputes else self.low(x)
        output: torch.Tensor = self.high(low) * self.gain
        return output


def split_columns(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut ``low`` and ``high`` of a :class:`Mixed` along their columns, in place; inputs and outputs stay whole.

    The tensor-parallel mesh has one dimension.
    """
    assert isinstance(model, Mixed)
    for unit in (model.low, model.high):
        # The type of these functions differs between versions of torch.
        distribute_module(unit, mesh, _cut_columns, input_fn=_columns_of, output_fn=_whole_of)  # type: ignore[arg-type]
    return model


def _cut_columns(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in list(module._parameters.items()):
        if parameter is not None:
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(1)])))
    for key, buffer in list(module._buffers.items()):
        if buffer is not None and buffer.ndim:
            module.register_buffer(key, distribute_tensor(buffer, mesh, [Shard(1)]))


def _columns_of(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    (x,) = inputs
    return (DTensor.from_local(x, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)]),)


def _whole_of(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    return output.redistribute(placements=[Replicate()]).to_local()


class Normed(nn.Module):
    """A :class:`Scale` and a batch norm in a unit ``inner``, a batch norm that is a unit ``norm``, and one of the root.

    Input and output: (rows, columns). A momentum of None averages the running statistics over all batches.
    """

    def __init__(self, rows: int = 7, columns: int = 5, *, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.inner = nn.Sequential(Scale(rows, columns), nn.BatchNorm1d(columns, momentum=momentum))
        self.norm = nn.BatchNorm1d(columns, momentum=momentum)
        self.last = nn.BatchNorm1d(columns, momentum=momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(torch.tanh(self.norm(torch.tanh(self.inner(x)))))
        return output
