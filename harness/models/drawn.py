"""Models described by plain data: what the cases that draw their models and schedules train.

A description is frozen, can be pickled, and its ``repr`` is Python that makes it again. :class:`DrawnModel` is its
model. Every computation is smooth, so that an ulp before a kink cannot become a difference after it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardproof.harness.models.plain import Container, pack, unpack
from shardproof.harness.models.recomputation import Means, checkpoint_by_hooks, checkpoint_wrapper
from shardproof.harness.models.ties import TiedMLP

Kind = Literal[
    "shift", "linear", "bias-free", "wide", "gain", "pixel", "row", "cube", "conv", "norm", "listed", "embedding",
    "tied", "no-rows", "buffer",
]  # fmt: skip
"""What a :class:`Part` computes with; see :func:`_part`."""

Runs = Literal["always", "even", "odd", "never"]
"""In which microbatches a block runs; they are counted from 0 over all steps. A block that does not run is skipped."""

Unit = Literal["", "own", "joined"]
"""Whether a block is a unit: no, a unit of its own, or a part of the unit of the block before it in the same list."""


class Described:
    """A dataclass whose ``repr`` leaves out the fields that have their default."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given())})"

    def given(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the value of each field that does not have its default."""
        assert dataclasses.is_dataclass(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default or type(value) is not type(field.default):
                yield field.name, value


@dataclasses.dataclass(frozen=True, repr=False)
class Part(Described):
    """Parameters that a block computes with.

    Attributes:
        width: a size of some kinds, such as the rows of an embedding.
        frozen: which of its parameters require no gradient.
    """

    kind: Kind = "shift"
    width: int = 1
    frozen: Literal["", "first", "all"] = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Block(Described):
    """A module: parts, then blocks inside of it, then the parts ``after``, around which the input is added.

    Attributes:
        unit: whether it is a unit; the root is one in any case.
        calls: how many times in a row it is called.
        returns: what it returns its output in; "spare" is a tuple with a second output that nobody uses.
        recomputed: by which means backward computes it again.
    """

    parts: tuple[Part, ...] = ()
    blocks: tuple["Block", ...] = ()
    after: tuple[Part, ...] = ()
    unit: Unit = ""
    calls: int = 1
    runs: Runs = "always"
    returns: Literal["", "spare"] | Container = ""
    recomputed: Literal[""] | Means = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Described):
    """A model.

    Attributes:
        root: the trunk; its own parts belong to the root's unit.
        heads: blocks on its output, each of which adds an output to the model's.
        dim: the width of everything that blocks exchange.
    """

    root: Block = Block((Part(),))
    heads: tuple[Block, ...] = ()
    dim: int = 1

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """Yield the name of the module and the description of each block but the trunk, outer blocks first."""
        yield from _inside("root", self.root)
        yield from _listed("heads", self.heads)

    def units(self) -> list[list[str]]:
        """Return the units as lists of names of modules, without the root's own."""
        lists: dict[str, list[list[str]]] = {}
        for name, block in self.blocks():
            siblings = lists.setdefault(name.rpartition(".")[0], [])
            if block.unit == "joined" and siblings:
                siblings[-1].append(name)
            elif block.unit:
                siblings.append([name])
        return [unit for siblings in lists.values() for unit in siblings]

    def parts(self) -> list[Part]:
        """Return the parts of all blocks."""
        blocks = [self.root, *(block for _, block in self.blocks())]
        return [part for block in blocks for part in (*block.parts, *block.after)]


def _listed(prefix: str, blocks: tuple[Block, ...]) -> Iterator[tuple[str, Block]]:
    for index, block in enumerate(blocks):
        yield f"{prefix}.{index}", block
        yield from _inside(f"{prefix}.{index}", block)


def _inside(name: str, block: Block) -> Iterator[tuple[str, Block]]:
    yield from _listed(f"{name}.blocks", block.blocks)


def has_trained(block: Block) -> bool:
    """Whether every microbatch uses a parameter of the block that is trained and has elements."""
    parts = (*block.parts, *block.after)
    own = any(not part.frozen and part.kind not in ("no-rows", "buffer") for part in parts)
    return block.runs == "always" and (own or any(map(has_trained, block.blocks)))


class DrawnModel(nn.Module):
    """The model of a :class:`Plan`.

    Input: (rows, dim), and the number of the microbatch, counted over all steps. Output: a tuple of (rows, dim)
    tensors, that of the trunk and those of the heads.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.root = _Module(plan.root, plan.dim)
        self.heads = _Blocks(plan.heads, plan.dim)

    def forward(self, x: torch.Tensor, turn: int) -> tuple[torch.Tensor, ...]:
        x = self.root(x, turn)
        return (x, *(self.heads.run(index, x, turn) for index in range(len(self.heads))))


def recompute(model: nn.Module, plan: Plan) -> nn.Module:
    """Make backward recompute the blocks of a plan's model, not sharded yet, by the means of each, in place."""
    # Inner blocks first: a wrapper takes the place of its block.
    for name, block in reversed(list(plan.blocks())):
        parent, _, index = name.rpartition(".")
        blocks = model.get_submodule(parent)
        assert isinstance(blocks, _Blocks)
        if block.recomputed == "hooks":
            checkpoint_by_hooks(blocks[int(index)])
        elif block.recomputed == "wrapper":
            blocks[int(index)] = checkpoint_wrapper(blocks[int(index)])
        elif block.recomputed:
            blocks.recomputed[int(index)] = block.recomputed
    return model


class _Blocks(nn.ModuleList):
    """Blocks, which their parent runs by :meth:`run`.

    Attributes:
        described: their descriptions, which modules that take the place of a block do not have.
        recomputed: for each, the means of the call that recomputes it.
    """

    def __init__(self, blocks: tuple[Block, ...], dim: int) -> None:
        super().__init__(_Module(block, dim) for block in blocks)
        self.described = blocks
        self.recomputed: list[str] = [""] * len(blocks)

    def run(self, index: int, x: torch.Tensor, turn: int) -> torch.Tensor:
        """Call one block as often as its description asks for, on (rows, dim), and return (rows, dim)."""
        block, means = self.described[index], self.recomputed[index]
        for _ in range(block.calls if _TURNS[block.runs](turn) else 0):
            if means:
                returned = checkpoint(self[index], x, turn, use_reentrant=means == "reentrant-call")
            else:
                returned = self[index](x, turn)
            x = _unpacked(returned, block.returns)
        return x


_TURNS: dict[Runs, Callable[[int], bool]] = {
    "always": lambda turn: True,
    "even": lambda turn: turn % 2 == 0,
    "odd": lambda turn: turn % 2 == 1,
    "never": lambda turn: False,
}


def _unpacked(returned: Any, returns: Literal["", "spare"] | Container) -> torch.Tensor:
    if returns == "spare":
        returned = returned[0]
    elif returns:
        returned = unpack(returned, returns)
    assert isinstance(returned, torch.Tensor), f"a block that returns a tensor returned a {type(returned).__name__}"
    return returned


class _Module(nn.Module):
    """The module of one block. Input: (rows, dim), and the number of the microbatch."""

    def __init__(self, block: Block, dim: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(_part(part, dim) for part in block.parts)
        self.blocks = _Blocks(block.blocks, dim)
        self.after = nn.ModuleList(_part(part, dim) for part in block.after)
        self.returns = block.returns

    def forward(self, x: torch.Tensor, turn: int) -> Any:
        hidden = x
        for part in self.parts:
            hidden = part(hidden)
        for index in range(len(self.blocks)):
            hidden = self.blocks.run(index, hidden, turn)
        for part in self.after:
            hidden = part(hidden)
        # The input is added, so that no gradient vanishes however many blocks follow each other.
        out = x + torch.tanh(hidden)
        if self.returns == "spare":
            return out, torch.sin(out)
        return pack(out, self.returns) if self.returns else out


def _part(part: Part, dim: int) -> nn.Module:
    """Make the module of a part: (rows, dim) to (rows, dim)."""
    module: nn.Module
    match part.kind:
        case "linear" | "bias-free":
            module = nn.Sequential(nn.Linear(dim, dim, bias=part.kind == "linear"), nn.Tanh())
        case "wide":
            module = nn.Sequential(nn.Linear(dim, part.width), nn.Tanh(), nn.Linear(part.width, dim))
        case "norm":
            module = _Normed(dim)
        case "tied":
            module = TiedMLP(dim)
        case "embedding":
            module = _Positions(part.width, dim)
        case _:
            module = _Simple(part.kind, part.width, dim)
    parameters = list(module.parameters())
    for parameter in parameters[:1] if part.frozen == "first" else parameters if part.frozen else []:
        parameter.requires_grad_(False)
    return module


class _Normed(nn.Module):
    """Adds the norm to its input, through which alone a gradient passes where a row has one element."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=1.0)  # large, so that an almost constant row amplifies no rounding error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x)
        return x + normed


class _Positions(nn.Module):
    """Adds rows of an embedding, which take turns: with few rows of input, some of the embedding are not used."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(width, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.embedding(torch.arange(len(x), device=x.device) % self.embedding.num_embeddings)
        return x + rows


class _Simple(nn.Module):
    """Computes with one parameter, a list of two, or a buffer."""

    def __init__(self, kind: Kind, width: int, dim: int) -> None:
        super().__init__()
        self.kind = kind
        shapes: dict[Kind, tuple[int, ...]] = {
            "shift": (dim,), "gain": (1,), "pixel": (1, 1), "row": (1, dim), "cube": (width, 2, dim),
            "conv": (width, 1, 1), "no-rows": (0, dim), "buffer": (dim,), "listed": (width, dim),
        }  # fmt: skip
        values = torch.randn(shapes[kind])
        if kind == "buffer":
            self.register_buffer("values", values)
        elif kind == "listed":
            self.listed = nn.ParameterList([torch.randn(dim), values])
        else:
            self.values = nn.Parameter(values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "shift" | "row":
                return x + self.values
            case "gain" | "pixel" | "buffer":
                return x * torch.sin(self.values)
            case "cube":
                return x + torch.tanh(self.values).sum((0, 1))
            case "conv":
                return torch.tanh(F.conv1d(x.unsqueeze(1), self.values)).mean(1)
            case "no-rows":
                return x + self.values.sum(0)
            case "listed":
                first, second = self.listed
                both: torch.Tensor = x * first + torch.tanh(second).sum(0)
                return both
        raise AssertionError(f"no computation for {self.kind}")
