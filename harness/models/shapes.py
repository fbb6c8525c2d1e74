"""Models with unusual parameters, inputs, outputs, sizes, state or initialization: each is hard in one way."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardproof.harness.models.plain import Container, Packed, Stacked, pack, unpack
from shardproof.harness.tensors.trees import tensors_of


class ManyShapes(nn.Module):
    """A unit ``body`` whose parameters have one to four dimensions, one element and few rows, and a root.

    ``body`` also has a :class:`torch.nn.ParameterList`, a persistent buffer that scales its output and, with
    ``has_empty``, a parameter without rows. Input: (batch, 3, 6, 6). Output: (batch, 4).
    """

    def __init__(self, *, has_empty: bool = False) -> None:
        super().__init__()
        self.body = _Body(has_empty=has_empty)
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.head(self.body(x)))


class _Body(nn.Module):
    scale: torch.Tensor

    def __init__(self, *, has_empty: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.line = nn.Conv1d(5, 5, 2, bias=False)
        self.one = nn.Parameter(torch.randn(1))
        self.row = nn.Parameter(torch.randn(1, 5))
        self.empty = nn.Parameter(torch.randn(0, 4)) if has_empty else None
        self.listed = nn.ParameterList([torch.randn(5), torch.randn(3, 5)])
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.conv(x)).flatten(2)
        hidden = torch.tanh(self.line(hidden)).mean(2) * self.one + self.row
        if self.empty is not None:
            hidden = hidden + self.empty.sum()
        return self.scale * torch.tanh(hidden * self.listed[0] + self.listed[1].sum(0))


class Recurrent(nn.Module):
    """A unit ``body``, a GRU, and a root with ``head``; both keep their parameters beside their names too.

    The GRU of recent versions of torch looks before each forward whether its list still is right; ``head`` does not.
    Input: (batch, length, dim). Output: (batch, length, dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.body = nn.GRU(dim, dim + 1, batch_first=True)
        self.head = Remembering(dim + 1, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # cuDNN rounds the products of recurrent modules to TF32, which no float64 oracle can judge.
        with torch.backends.cudnn.flags(enabled=False):
            hidden, _ = self.body(x)
        return torch.tanh(self.head(hidden))


class Remembering(nn.Linear):
    """A Linear that computes with what was set last as its weight and bias, as recurrent modules do on a GPU."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("weight", "bias"):
            self.__dict__[f"latest_{name}"] = value

    def _apply(self, *args: Any, **options: Any) -> Any:
        super()._apply(*args, **options)  # type: ignore[no-untyped-call]
        self.weight, self.bias = self.weight, self.bias
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.__dict__["latest_weight"], self.__dict__["latest_bias"])


class Keywords(Stacked):
    """Three units ``layers.N`` that take their inputs by keyword, nested in containers, beside None and a number.

    One tensor comes twice, as query and key of an attention do. Input and output: (batch, dim).
    """

    def __init__(self, dim: int, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Keyworded(dim, 2 + index) for index in range(depth))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, skip = x, torch.tanh(x)
        for layer in self.layers:
            inputs: dict[str, Any] = {"hidden": [hidden], "skips": (hidden, None, skip)}
            output = layer(inputs=inputs, mask=None, times=2)
            assert inputs["hidden"][0] is hidden, "a unit leaves the containers of its caller as they are"
            hidden, skip = output, output * 0.5
        out: torch.Tensor = self.out(hidden)
        return out


class _Keyworded(nn.Module):
    def __init__(self, dim: int, multiplier: int) -> None:
        super().__init__()
        self.into = nn.Linear(dim, multiplier * dim)
        self.back = nn.Linear(multiplier * dim, dim)

    def forward(self, *, inputs: dict[str, Any], mask: torch.Tensor | None, times: int) -> torch.Tensor:
        assert mask is None, "a keyword argument that is None stays None"
        (hidden,), (again, nothing, skip) = inputs["hidden"], inputs["skips"]
        assert nothing is None, "None within a container stays None"
        out: torch.Tensor = skip + torch.tanh(self.back(torch.tanh(self.into(hidden * times)))) * again
        return out


class SkippedMember(nn.Module):
    """Linear(dim, dim) as ``used``, then ``out``; a Linear(dim, dim) ``skipped`` never runs.

    Cases put ``used`` and ``skipped`` into one unit. Input and output: (batch, dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.used = nn.Linear(dim, dim)
        self.skipped = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.tanh(self.used(x)))
        return out


class TwoScales(nn.Module):
    """A unit ``low`` and a root that multiply their inputs by a weight, so that a gradient is the input itself.

    ``low`` computes in the dtype of its weight, which may be another than the root's, on the first ``low`` columns.
    Input: (rows, columns). Output: (rows, low + columns), in float32 or wider.
    """

    def __init__(self, rows: int, low: int, columns: int) -> None:
        super().__init__()
        self.low = _Scale(rows, low)
        self.weight = nn.Parameter(torch.ones(rows, columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.low(x), x * self.weight], dim=1)


class _Scale(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = x[:, : self.weight.shape[1]].to(self.weight.dtype) * self.weight
        return part.float()


class Spoiled(nn.Module):
    """A Linear(9, 9) whose output is scaled by one plus the sum of a parameter ``odd``, which may not be shardable.

    It has any shape and floating-point dtype. Input and output: (batch, 9), in float32.
    """

    def __init__(self, odd: torch.Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(9, 9)
        self.odd = nn.Parameter(odd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) * (1 + self.odd.sum().to(x.dtype))


class Permuted(nn.Module):
    """A Linear(dim, dim) whose output is put into the order of a frozen parameter of integers.

    Input and output: (batch, dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)
        self.order = nn.Parameter(torch.arange(dim).flip(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))[:, self.order]


class EqualLayers(Stacked):
    """``depth`` layers of one square weight each, with a tanh between them; the root has no parameters of its own.

    Input and output: (batch, dim). A layer has 4 x dim x dim bytes.
    """

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


WIDTH = 12


class Rows(Stacked):
    """Four MLPs ``layers.N`` of different hidden widths and, in the root's own unit, a Linear.

    Of ``size`` ranks all hold as many rows of the first layer; of the second the last quarter holds none, because
    chunks are rounded up; of the third the last four ranks hold none, of the last layer the second half; of the root's
    own unit 12 ranks hold all. No two units have the same size, however many ranks there are.

    The number of elements of every parameter is a multiple of four, so that flat parameters need no alignment. Input
    and output: (batch, 12).
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        hidden = (2 * size, 3 * size + 4, size - 4, size // 2)
        self.layers = nn.ModuleList(_MLP(width - width % 4) for width in hidden)
        self.out = nn.Linear(WIDTH, WIDTH)


class _MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, max(hidden, 4))
        self.out_proj = nn.Linear(max(hidden, 4), WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out_proj(torch.tanh(self.in_proj(x)))
        return out


class Drawn(nn.Module):
    """``tanh(x @ weight + shift) * gain``, where ``gain`` is a buffer; an integer buffer has the seed of all values.

    Input: (batch, rows). Output: (batch, columns).
    """

    gain: torch.Tensor
    number: torch.Tensor

    def __init__(self, rows: int, columns: int, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.shift = nn.Parameter(torch.empty(columns))
        self.register_buffer("gain", torch.empty(columns), persistent=False)
        self.register_buffer("number", torch.tensor(0))
        self.seed = seed
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give parameters and buffers the values of the seed, also where parameters are shards by now."""
        generator = torch.Generator().manual_seed(self.seed)
        for tensor in (self.weight, self.shift, self.gain):
            put(tensor, torch.randn(tensor.shape, generator=generator))
        self.number.fill_(self.seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight + self.shift) * self.gain


class Offset(nn.Module):
    """``x + offset`` for (batch, columns); the offset is a buffer of values of a seed, and there is no parameter."""

    offset: torch.Tensor

    def __init__(self, columns: int, seed: int) -> None:
        super().__init__()
        self.register_buffer("offset", torch.empty(columns))
        self.seed = seed
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give the buffer the values of the seed."""
        put(self.offset, torch.randn(self.offset.shape, generator=torch.Generator().manual_seed(self.seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset


class DrawnStack(Stacked):
    """An :class:`Offset`, three :class:`Drawn` layers, one that belongs to the root's own unit, and a factor.

    The factor is a parameter of the root module itself, around the modules that make values of their own. Input and
    output: (batch, dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.start = Offset(dim, 5)
        self.layers = nn.ModuleList(Drawn(dim, dim, seed) for seed in (1, 2, 3))
        self.out = Drawn(dim, dim, 4)
        self.factor = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give the factor its values."""
        put(self.factor, torch.randn(self.factor.shape, generator=torch.Generator().manual_seed(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.run_layers(self.start(x)))
        return out * self.factor


def put(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write full values to a plain tensor or, its part of them, to a DTensor; does not communicate."""
    if isinstance(tensor, DTensor):
        placed = values.to(tensor.device)
        tensor.copy_(distribute_tensor(placed, tensor.device_mesh, tensor.placements, src_data_rank=None))
    else:
        tensor.copy_(values)


class Lending(nn.Module):
    """Two :class:`plain.Packed` blocks ``layers.N`` that take the same container, whose tensors must stay in it.

    Input and output: (batch, dim).
    """

    def __init__(self, dim: int, container: Container) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Packed(dim, container) for _ in range(2))
        self.entry = nn.Linear(dim, dim)
        self.container = container

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lent = pack(torch.tanh(self.entry(x)), self.container)
        before = list(tensors_of(lent))
        outputs = [unpack(layer(lent), self.container) for layer in self.layers]
        changed = [index for index, tensor in enumerate(tensors_of(lent)) if tensor is not before[index]]
        assert not changed, f"a unit has replaced tensors {changed} in the {self.container} that it was given"
        return outputs[0] * outputs[1]


# A model with all that a state dict can hold, for cases about state dicts and checkpoints.


class Recorder(nn.Module):
    """Linear(dim, dim), GELU, a Linear(dim, dim) with the same weight, and what state dicts hold besides.

    ``gain`` is a parameter of one row, ``base`` a frozen one if the model has those. ``offset`` is a floating-point
    buffer, ``calls`` an integer one that counts the forwards, and ``scratch`` is not saved. Input and output: (...,
    dim).
    """

    offset: torch.Tensor
    calls: torch.Tensor
    scratch: torch.Tensor

    def __init__(self, dim: int, *, freezes: bool) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim)
        self.second.weight = self.first.weight
        self.gain = nn.Parameter(torch.randn(1, dim))
        self.base = nn.Parameter(torch.randn(dim, 3), requires_grad=not freezes)
        self.register_buffer("offset", torch.randn(dim))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(dim), persistent=False)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.runs += 1
        hidden = self.second(F.gelu(self.first(x))) * self.gain + self.offset * self.scratch
        return torch.tanh(hidden + hidden @ self.base @ self.base.t())


class ExtraRecorder(Recorder):
    """A :class:`Recorder` whose extra state is the number of forwards, as a number."""

    def get_extra_state(self) -> dict[str, int]:
        """The number of forwards."""
        return {"runs": self.runs}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Count on from the number that was saved."""
        self.runs = int(state["runs"])


class Stateful(Stacked):
    """Layers of :class:`Recorder`, each a unit, and a Linear(dim, dim) of the root's own.

    Input and output: (..., dim). Each layer has a frozen parameter if the model ``freezes``.
    """

    def __init__(self, dim: int = 5, *, depth: int = 2, freezes: bool = True, has_extra: bool = False) -> None:
        super().__init__()
        kind = ExtraRecorder if has_extra else Recorder
        self.layers = nn.ModuleList(kind(dim, freezes=freezes) for _ in range(depth))
        self.out = nn.Linear(dim, dim)


def by_columns(model: nn.Module) -> nn.Module:
    """Lay the elements of each matrix column by column."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.detach().t().contiguous().t()
    return model
