"""Models with unusual parameters, inputs, outputs or nesting: each has one thing that implementations get wrong."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from shardproof.harness.models.plain import MLP, Container, Packed, Stacked, pack, unpack
from shardproof.harness.tensors.trees import tensors_of


class ManyShapes(nn.Module):
    """A unit ``body`` whose parameters have one to four dimensions, one element and few rows, and a root.

    ``body`` also has a :class:`torch.nn.ParameterList`, and a persistent buffer that scales its output.

    Input: (batch, 3, 6, 6). Output: (batch, 4).

    Args:
        has_empty: whether ``body`` also has a parameter without rows.
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


class Nested(nn.Module):
    """Units at three depths: ``blocks.N`` with ``blocks.N.attention`` in it, which has ``projection`` in it.

    Each level has parameters of its own beside those of the level inside, and computes with them before and after it
    calls that level. No two units have the same size, so that the bytes of a collective determine its unit.

    Input and output: (batch, dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.entry = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(_Outer(dim, width) for width in (dim + 1, 3 * dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = x + block(x)
        return x

    def units(self) -> list[list[str]]:
        """Lists of module names, one list for each unit, outer modules first."""
        inside = ("", ".attention", ".attention.projection")
        return [[f"blocks.{index}{name}"] for index in range(len(self.blocks)) for name in inside]


class _Outer(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.attention = _Middle(width)
        self.before = nn.Linear(dim, width)
        self.after = nn.Linear(width, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.after(self.attention(torch.tanh(self.before(x)))))


class _Middle(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.randn(width))
        self.shift = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.projection(self.gain * x)) * self.gain + self.shift


Nesting = Literal[
    "tuple", "list", "dict", "ordered-dict", "namedtuple", "dataclass", "late-dataclass", "nested", "deep"
]


class NamedTriple(NamedTuple):
    """Three trained tensors.

    Attributes:
        first: a tensor.
        second: a tensor.
        third: a tensor.
    """

    first: torch.Tensor
    second: torch.Tensor
    third: torch.Tensor


@dataclasses.dataclass
class RecordOfThree:
    """Three trained tensors, with values of other kinds between them.

    Attributes:
        first: a tensor.
        nothing: None.
        second: a tensor.
        count: a number.
        third: a tensor.
    """

    first: torch.Tensor
    nothing: None
    second: torch.Tensor
    count: int
    third: torch.Tensor


@dataclasses.dataclass
class LateRecord:
    """Three trained tensors, of which the constructor takes none but the first.

    Attributes:
        first: a tensor.
        second: a tensor, set later.
        third: a tensor, set later.
    """

    first: torch.Tensor
    second: torch.Tensor = dataclasses.field(init=False)
    third: torch.Tensor = dataclasses.field(init=False)


class ThreeOutputs(nn.Module):
    """Linear(dim, dim), then a unit ``branches`` that returns three tensors in a container.

    Each of the three depends on every parameter of the model, so that a loss of any one of them trains all.

    Input: (batch, dim). Output: the container, of three (batch, dim) tensors; see :func:`pack_three`. A
    :class:`LateRecord` becomes a tuple.
    """

    def __init__(self, dim: int, nesting: Nesting) -> None:
        super().__init__()
        self.entry = nn.Linear(dim, dim)
        self.branches = _Three(dim, nesting)

    def forward(self, x: torch.Tensor) -> Any:
        packed: Any = self.branches(torch.tanh(self.entry(x)))
        if isinstance(packed, LateRecord):
            return packed.first, packed.second, packed.third
        return packed


class _Three(nn.Module):
    def __init__(self, dim: int, nesting: Nesting) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.nesting = nesting

    def forward(self, x: torch.Tensor) -> Any:
        a, b, c = (torch.tanh(layer(x)) for layer in self.layers)
        return pack_three(a * b + c, a + b * c, torch.tanh(a - b - c), self.nesting)


def pack_three(first: torch.Tensor, second: torch.Tensor, third: torch.Tensor, nesting: Nesting) -> Any:
    """Put three tensors into a container, in this order; "nested" has containers of every kind within each other.

    "deep" is twenty lists deep.
    """
    record = LateRecord(first)
    record.second, record.third = second, third
    deep: list[Any] = [third]
    for _ in range(18):
        deep = [deep]
    packed: dict[Nesting, Any] = {
        "tuple": (first, second, third),
        "list": [first, second, third],
        "dict": {"first": first, "constant": torch.zeros(2), "second": second, "third": third},
        "ordered-dict": collections.OrderedDict(first=first, second=second, third=third),
        "namedtuple": NamedTriple(first, second, third),
        "dataclass": RecordOfThree(first, None, second, 3, third),
        "late-dataclass": record,
        "nested": {"a": [first, None, (second,)], "b": (7, {"c": [[third]]})},
        "deep": [first, second, deep],
    }
    return packed[nesting]


def chain(function: Callable[[torch.Tensor], torch.Tensor]) -> type[nn.ModuleList]:
    """Define a list with a forward of its own, which runs its modules one after the other, each before ``function``.

    The class has one name whatever the function, as one that is defined again in a notebook has. Input and output: as
    of its modules.
    """

    class Chain(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self:
                x = function(module(x))
            return x

    return Chain


class Named(nn.Module):
    """Two Linear(dim, dim) in a dict of modules. Input and output: (..., dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(dim, dim) for name in ("first", "second")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


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


class Keywords(nn.Module):
    """Three units ``layers.N`` that take their inputs by keyword, nested in containers, beside None and a number.

    One tensor comes twice, as query and key of an attention do.

    Input and output: (batch, dim).
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

    def units(self) -> list[list[str]]:
        """Lists of module names, one list for each unit: each layer is a unit."""
        return [[f"layers.{index}"] for index in range(len(self.layers))]


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


class TwoCalls(nn.Module):
    """Calls ``inner``, a Linear(dim, dim), twice on one input, adds both results, and calls ``outer``.

    Neither call of ``inner`` gets an input that requires a gradient unless the model's own input does.

    Input: (batch, dim). Output: (batch, dim + 1).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)
        self.outer = nn.Linear(dim, dim + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(torch.tanh(self.inner(x)) + self.inner(x).square())
        return out


class SkippedMember(nn.Module):
    """Linear(dim, dim) as ``used``, then ``out``; a Linear(dim, dim) ``skipped`` never runs.

    Cases put ``used`` and ``skipped`` into one unit.

    Input and output: (batch, dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.used = nn.Linear(dim, dim)
        self.skipped = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.tanh(self.used(x)))
        return out


class Fan(nn.Module):
    """The sum of ``arms``, MLPs of different sizes on one input, among which backward has no order, and ``out``.

    Input and output: (batch, dim).

    Args:
        dim: the width.
        names: of the arms, in the order of their sizes and calls.
    """

    def __init__(self, dim: int, names: Sequence[str]) -> None:
        super().__init__()
        self.out = nn.Linear(dim, dim)
        self.arms = nn.ModuleDict({name: MLP(dim, multiplier=1 + index) for index, name in enumerate(names)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.stack([arm(x) for arm in self.arms.values()]).sum(0))
        return out


class InPlaceStack(nn.Module):
    """Units ``layers.N`` whose output, a view of what they computed, is changed in place by their caller.

    The view is of rows or, where the width of a unit is even, of every other column. Input and output: (batch, dim).
    """

    def __init__(self, dim: int, depth: int = 3) -> None:
        super().__init__()
        self.entry = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(_ReturnsView(dim, dim + index) for index in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for layer in self.layers:
            out = layer(x)
            out += x
            x = out
        return x

    def units(self) -> list[list[str]]:
        """Lists of module names, one list for each unit: each layer is a unit."""
        return [[f"layers.{index}"] for index in range(len(self.layers))]


class _ReturnsView(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(dim, width)
        self.back = nn.Linear(width, 2 * dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both: torch.Tensor = self.back(torch.tanh(self.into(x)))
        if self.into.out_features % 2 == 0:
            return both[:, ::2]
        return both.view(2 * x.shape[0], x.shape[1])[: x.shape[0]]


class TwoScales(nn.Module):
    """A unit ``low`` and a root that multiply their inputs by a weight, so that a gradient is the input itself.

    ``low`` computes in the dtype of its weight, which may be another than the root's.

    Input: (rows, columns). Output: (rows, low + columns), in float32 or wider.

    Args:
        rows: the first dimension of both weights.
        low: the second dimension of the weight of ``low``, at most ``columns``.
        columns: that of the weight of the root.
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


class ThreeInputs(nn.Module):
    """The first of three tensors, in any containers, plus the second times the third; it has no parameters.

    Attributes:
        devices: where the tensors of all calls were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[torch.device] = []

    def forward(self, *args: Any, **keywords: Any) -> torch.Tensor:
        first, second, third = tensors_of((args, keywords))
        self.devices.extend(tensor.device for tensor in (first, second, third))
        return first + second * third


class Spoiled(nn.Module):
    """A Linear(9, 9) whose output is scaled by one plus the sum of a parameter ``odd``, which may not be shardable.

    Input and output: (batch, 9), in float32.

    Args:
        odd: the values of the parameter, of any shape and floating-point dtype.
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


class ScaledBase(nn.Module):
    """``scale * tanh(base x)``, where ``base``, a Linear(dim, dim), is frozen and ``scale`` has one element.

    Input and output: (..., dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1))
        self.base = nn.Linear(dim, dim).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * torch.tanh(self.base(x))


class ScaledStack(Stacked):
    """Layers of :class:`ScaledBase`, and a parameter of one element that is all that the root has of its own.

    What trains has fewer elements than there are ranks, so that an optimizer changes nothing of what most ranks hold.

    Input and output: (..., dim).
    """

    def __init__(self, dim: int, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ScaledBase(dim) for _ in range(depth))
        self.gain = nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run_layers(x) * self.gain


class Forces(nn.Module):
    """Adds to the output of a unit ``energy`` a gradient of it that forward computes itself, as models of forces do.

    Input and output: (batch, dim). The gradient of the input within forward is a constant for backward.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.energy = MLP(dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(place).square().sum(), place)
        out: torch.Tensor = self.out(self.energy(x) + force)
        return out


class ForcesOfUnit(nn.Module):
    """As :class:`Forces`, but the unit ``energy`` computes the gradient of its input itself, without autograd too.

    Input and output: (batch, dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.energy = _Energy(dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy, force = self.energy(x, x.detach().requires_grad_())
        out: torch.Tensor = self.out(energy + force)
        return out


class _Energy(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = MLP(dim)

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            (force,) = torch.autograd.grad(self.inner(place).square().sum(), place)
        return self.inner(x), force
