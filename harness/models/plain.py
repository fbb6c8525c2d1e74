"""The small models that cases train, and their losses.

The models are smooth unless a kink is what the case tests: with a ReLU, a difference of one ulp near zero changes the
gradient. Default sizes are deliberately not divisible by the number of ranks, because most bugs of sharded layouts do
not show at sizes that are.
"""

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardproof.harness.tensors.trees import tensors_of


class TwoHeads(nn.Module):
    """Two layers Linear(dim, dim) on one input.

    Input: (batch, dim). Output: the tuple (tanh(head0 x), tanh(head1 x)), each (batch, dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.head0 = nn.Linear(dim, dim)
        self.head1 = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.head0(x)), torch.tanh(self.head1(x))


class SkippedModule(TwoHeads):
    """As :class:`TwoHeads`, but ``head1`` never runs. Input: (batch, dim). Output: tanh(head0 x), (batch, dim)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.tanh(self.head0(x))


class MLP(nn.Module):
    """Linear(dim, multiplier x dim), GELU, Linear(multiplier x dim, dim), tanh. Input and output: (..., dim)."""

    def __init__(self, dim: int, multiplier: int = 4) -> None:
        super().__init__()
        self.in_proj = nn.Linear(dim, multiplier * dim)
        self.out_proj = nn.Linear(multiplier * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out_proj(F.gelu(self.in_proj(x))))


class Stacked(nn.Module):
    """Base class of models with ``layers`` that are called in sequence, and then ``out`` in the root's own unit.

    Each layer is a unit; all other parameters belong to the root's own unit. ``calls`` says whether backward recomputes
    each layer from its input; see ``shardproof.harness.models.recomputation``.
    """

    layers: nn.ModuleList
    out: nn.Module
    calls: Literal["plain", "recomputed", "recomputed-reentrant"] = "plain"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.run_layers(x))
        return out

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        """Call each layer on the output of the previous layer; the first is called on ``x``."""
        for layer in self.layers:
            if self.calls == "plain":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.calls == "recomputed-reentrant")
        return x

    def units(self) -> list[list[str]]:
        """Lists of module names, one list per unit: each layer is a unit."""
        return [[f"layers.{index}"] for index in range(len(self.layers))]


class Tower(Stacked):
    """``depth`` MLPs with multipliers 2, 3, 4, ... and a Linear(dim, dim) in the root's own unit.

    No two units have the same size, so that the bytes of a collective determine its unit. Input and output: (..., dim).
    """

    def __init__(self, dim: int, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(dim, multiplier=2 + index) for index in range(depth))
        self.out = nn.Linear(dim, dim)


class NormedStack(Stacked):
    """A LayerNorm without bias and three MLPs.

    Cases shard ``norm`` as a unit as well, so that the root has no parameters of its own. Input and output: (..., dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, bias=False)
        self.layers = nn.ModuleList(MLP(dim, multiplier) for multiplier in (3, 4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run_layers(self.norm(x))


def two_linear(first: tuple[int, int], second: tuple[int, int]) -> nn.Sequential:
    """Linear(*first), GELU, Linear(*second), of input and output widths; a single unit if only the root is sharded."""
    return nn.Sequential(nn.Linear(*first), nn.GELU(), nn.Linear(*second))


class ReusedInner(nn.Module):
    """Runs ``before`` once, ``inner``, a Linear(dim, dim), twice and then ``outer``, a Linear(dim, dim + 1), once.

    Backward needs the weight of ``inner`` for both of its calls: the input of the first requires a gradient too. Input:
    (batch, dim). Output: (batch, dim + 1).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.before = nn.Linear(dim, dim)
        self.inner = nn.Linear(dim, dim)
        self.outer = nn.Linear(dim, dim + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(torch.tanh(self.inner(torch.tanh(self.inner(self.before(x))))))
        return out


class Encoder(nn.Module):
    """A Linear(dim, dim) that only the methods call; calling the module itself is an error."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """The tanh of the linear layer's output, (batch, dim) to (batch, dim); the parent calls this method."""
        return torch.tanh(self.inner(x))

    def stretched(self, x: torch.Tensor, *, by: float = 1.0) -> torch.Tensor:
        """``by`` times the linear layer's output, (batch, dim) to (batch, dim)."""
        stretched: torch.Tensor = self.inner(x) * by
        return stretched

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("only other methods are called")


class TwoStage(nn.Module):
    """Runs a method of ``encoder`` other than forward, then ``projector``, a Linear(dim, dim + 1).

    Input: (batch, dim). Output: (batch, dim + 1).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.encoder = Encoder(dim)
        self.projector = nn.Linear(dim, dim + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.projector(self.encoder.features(x))
        return out


class TwoEncoders(nn.Module):
    """Runs methods other than forward of two units of one class, ``first`` and ``second``: one of each, then another.

    Input and output: (batch, dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = Encoder(dim)
        self.second = Encoder(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second.stretched(self.second.features(self.first.features(x)), by=2.0))


class NoInputs(nn.Module):
    """A single (dim, dim) parameter that the root owns, and a forward without inputs.

    Output: the tanh of the parameter, (dim, dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim))

    def forward(self) -> torch.Tensor:
        return torch.tanh(self.weight)


Container = Literal[
    "list",
    "tuple",
    "dict",
    "namedtuple",
    "dataclass",
    "frozen-dataclass",
    "late-dataclass",
    "ordered-dict",
    "list-class",
    "tuple-class",
    "dict-dataclass",
]


class NamedPair(NamedTuple):
    """A namedtuple that is passed between units; ``y`` needs no gradient, here and in the classes that follow."""

    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Record:
    """A dataclass that is passed between units."""

    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class FrozenRecord:
    """A dataclass whose fields cannot be set."""

    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class LatePair:
    """A dataclass whose second field is set once it is made: the constructor does not take it, and puts zeros there."""

    x: torch.Tensor
    y: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.y = torch.zeros_like(self.x)


class OwnList(list[torch.Tensor]):
    """A class of lists."""


class OwnTuple(tuple[torch.Tensor, ...]):
    """A class of tuples that names no fields."""


@dataclasses.dataclass
class Output(collections.OrderedDict[str, torch.Tensor]):
    """A dict and a dataclass, whose keys and attributes are the same, as model libraries return it."""

    x: torch.Tensor
    y: torch.Tensor

    def __post_init__(self) -> None:
        for name in ("x", "y"):
            super().__setitem__(name, getattr(self, name))

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def __reduce__(self) -> Any:
        return type(self), (self["x"], self["y"])


class Packed(nn.Module):
    """Two layers of Linear(dim, dim) and tanh that take a container of a tensor and return one.

    Input and output: a container of a (batch, dim) tensor, as :func:`pack` makes it.
    """

    def __init__(self, dim: int, container: Container) -> None:
        super().__init__()
        self.lin1 = nn.Linear(dim, dim)
        self.lin2 = nn.Linear(dim, dim)
        self.container = container

    def forward(self, packed: Any) -> Any:
        hidden = torch.tanh(self.lin1(unpack(packed, self.container)))
        return pack(torch.tanh(self.lin2(hidden)), self.container)


class Packing(nn.Module):
    """Puts a tensor into a container, or takes it out if ``inverse``; has no parameters."""

    def __init__(self, container: Container, *, inverse: bool = False) -> None:
        super().__init__()
        self.container = container
        self.inverse = inverse

    def forward(self, value: Any) -> Any:
        return unpack(value, self.container) if self.inverse else pack(value, self.container)


def packed_stack(dim: int, container: Container, depth: int = 3) -> nn.Sequential:
    """A model whose ``depth`` :class:`Packed` blocks exchange only containers.

    The first module packs its input and the last one unpacks its output. Input and output: (batch, dim).
    """
    blocks = [Packed(dim, container) for _ in range(depth)]
    return nn.Sequential(Packing(container), *blocks, Packing(container, inverse=True))


def pack(x: torch.Tensor, container: Container) -> Any:
    """Put ``x`` into a container; one with fields also gets a tensor that needs no gradient."""
    constant = torch.ones_like(x)
    late = LatePair(x)
    late.y = constant
    packed: dict[Container, Any] = {
        "list": [x],
        "tuple": (x,),
        "dict": {"x": x},
        "namedtuple": NamedPair(x, constant),
        "dataclass": Record(x, constant),
        "frozen-dataclass": FrozenRecord(x, constant),
        "late-dataclass": late,
        "ordered-dict": collections.OrderedDict(x=x),
        "list-class": OwnList([x]),
        "tuple-class": OwnTuple([x]),
        "dict-dataclass": Output(x, constant),
    }
    return packed[container]


def unpack(packed: Any, container: Container) -> torch.Tensor:
    """Take the activation out of a container.

    Raises:
        AssertionError: the container is not of the expected type, its keys and attributes are not the same, or it has
            lost a field, so a unit must have changed it.
    """
    kinds: dict[Container, type] = {
        "list": list, "tuple": tuple, "dict": dict, "namedtuple": NamedPair, "dataclass": Record,
        "frozen-dataclass": FrozenRecord, "late-dataclass": LatePair, "ordered-dict": collections.OrderedDict,
        "list-class": OwnList, "tuple-class": OwnTuple, "dict-dataclass": Output,
    }  # fmt: skip
    kind = kinds[container]
    assert type(packed) is kind, f"expected {kind.__name__} between units, got {type(packed).__name__}"
    if isinstance(packed, Output):
        assert packed["x"] is packed.x, "the key x and the attribute x between units are different tensors"
    if isinstance(packed, LatePair):
        assert bool((packed.y == 1).all()), "a dataclass was made anew between units: what was set since is lost"
    x: torch.Tensor = next(tensors_of(packed))
    return x


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes of :class:`Transformer`; the defaults give a few thousand parameters.

    Attributes:
        layers: the number of blocks.
        vocabulary: the number of different tokens.
        length: the longest sequence, in tokens.
        dim: the width of the residual stream; ``heads`` divides it.
        is_tied: whether the output projection shares its weight with the token embedding.
    """

    layers: int = 2
    vocabulary: int = 11
    length: int = 8
    dim: int = 12
    heads: int = 3
    is_tied: bool = False


class Block(nn.Module):
    """A pre-norm block of causal attention without biases and a GELU feed-forward with biases.

    Input and output: (batch, length, dim).
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.w1 = nn.Linear(dim, 4 * dim)
        self.w2 = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self._attend(self.qkv(self.attention_norm(x))))
        out: torch.Tensor = x + self.w2(F.gelu(self.w1(self.feed_forward_norm(x))))
        return out

    def _attend(self, qkv: torch.Tensor) -> torch.Tensor:
        # Separate operations, because fused attention kernels differ between devices and dtypes, and the oracle runs in
        # float64.
        batch, length, _ = qkv.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=qkv.device).triu(1)
        mixed: torch.Tensor = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return mixed.transpose(1, 2).reshape(batch, length, -1)


class Transformer(Stacked):
    """A causal language model. Input: int64 tokens, (batch, length). Output: logits, (batch, length, vocabulary)."""

    block: Callable[[int, int], nn.Module] = Block

    def __init__(self, config: TransformerConfig | None = None) -> None:
        super().__init__()
        config = config or TransformerConfig()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.positions = nn.Embedding(config.length, config.dim)
        self.layers = nn.ModuleList(self.block(config.dim, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocabulary, bias=False)
        if config.is_tied:
            self.output.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits: torch.Tensor = self.output(self.norm(self.run_layers(x)))
        return logits


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy of a model, for a case that trains twins."""
    return copy.deepcopy(model)


# losses ------------------------------------------------------------------------------------


def mean_square(output: torch.Tensor) -> torch.Tensor:
    """The mean of the squares. Every output element contributes to the loss, and none cancels another."""
    return output.square().mean()


def ramp_square(output: torch.Tensor) -> torch.Tensor:
    """The mean square difference between the output and a ramp from -1 to 1 along the last dimension.

    It is the loss for the output of a normalisation. The mean square of such an output is almost constant, so the
    gradients of :func:`mean_square` would be rounding noise.
    """
    ramp = torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype, device=output.device)
    return mean_square(output - ramp)


def both_heads(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A loss that depends on both outputs of :class:`TwoHeads`."""
    return (outputs[0] * outputs[1]).mean() + mean_square(outputs[0])


def first_head(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A loss that ignores the second output of :class:`TwoHeads`."""
    return mean_square(outputs[0])


# A model of which each microbatch uses another part.


class Branches(nn.Module):
    """A Linear(dim, dim) and tanh, then one of several MLPs, chosen by an argument.

    The MLPs have different sizes, unless they are ``alike``, and dimensions that neither two nor four ranks divide for
    an odd ``dim``. Input: (batch, dim), and the number of the branch, or of several to run one after the other. Output:
    (batch, dim).
    """

    def __init__(self, dim: int, branches: int = 3, *, alike: bool = False) -> None:
        super().__init__()
        self.entry = nn.Linear(dim, dim)
        self.branches = nn.ModuleList(MLP(dim, multiplier=1 if alike else 1 + index) for index in range(branches))

    def forward(self, x: torch.Tensor, branch: int | tuple[int, ...]) -> torch.Tensor:
        x = torch.tanh(self.entry(x))
        for number in (branch,) if isinstance(branch, int) else branch:
            x = self.branches[number](x)
        return x

    def units(self) -> list[list[str]]:
        """Lists of module names, one list per unit: each branch is a unit."""
        return [[f"branches.{index}"] for index in range(len(self.branches))]
