"""Chapter WRAPPING: units that an implementation finds itself, by a rule."""

import copy
import dataclasses
import functools
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardproof.testing import Capability, Pair, Rank, Run, contract, models, needs, world
from shardproof.testing.axes import REPLICAS, subjects
from shardproof.testing.make import Precision, WrapPolicy, sharded
from shardproof.testing.refuse import Refusal
from shardproof.testing.train import batches, checked_steps, shapes, train_and_check


class Parts(nn.Module):
    """A linear layer, two blocks in a list, self-attention, and two heads in a list, with these numbers of elements:

    ==================  ========
    entry                     42
    blocks.0                 109
    blocks.0.inner            49
    blocks.0.back             48
    blocks.1                 174
    blocks.1.inner            84
    blocks.1.back             78
    attention                168
    attention.out_proj        42
    heads                     70
    heads.0, heads.1          35
    ==================  ========

    What is left of a block is its norm, of 12 elements. Attention reads the weight of ``out_proj`` without calling it.

    Where user code has taken a module out, ``removed`` is None. Input: (batch, 6). Output: (batch, 5).
    """

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(6, 6)
        self.register_module("removed", None)
        self.blocks = nn.ModuleList(PartsBlock(width) for width in (7, 12))
        self.attention = nn.MultiheadAttention(6, 2)
        self.heads = nn.ModuleList(nn.Linear(6, 5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.entry(x))
        for block in self.blocks:
            x = x + block(x)
        # With weights, attention is computed by separate operations, the same on every device.
        x = x + self.attention(x, x, x, need_weights=True)[0]
        first, second = self.heads
        return torch.tanh(first(x)) * torch.tanh(second(x))


class PartsBase(nn.Module):
    """Common base class of blocks, as in model libraries."""


class PartsBlock(PartsBase):
    """LayerNorm, Linear(6, width), tanh and Linear(width, 6)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Linear(6, width)
        self.back = nn.Linear(width, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.back(torch.tanh(self.inner(self.norm(x))))
        return out


class Normed(nn.Module):
    """Linear(4, 6), BatchNorm1d and Linear(6, 4), which note dtypes of the last forward around the norm in ``seen``."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 4)
        self.seen: dict[str, list[torch.dtype]] = {}
        self.norm.register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        self.seen["norm"] = [args[0].dtype, weight.dtype]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        before = x.dtype
        x = self.norm(x)
        self.seen["around"] = [before, x.dtype]
        out: torch.Tensor = self.out(x)
        return out


pytestmark = [needs("auto_wrap_policy", Capability.COUNTED_UNITS), world(2)]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule, the modules of a :class:`Parts` that it should make units, and the ignored ones.

    The modules of ``keeps`` are units that stay gathered until backward.
    """

    policy: WrapPolicy
    units: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()


#: A rule that finds no unit.
NOTHING = WrapPolicy("size", min_num_params=10**9)
BLOCKS = ("blocks.0", "blocks.1")
LINEARS = ("entry", "blocks.0.inner", "blocks.0.back", "blocks.1.inner", "blocks.1.back")

BY_SIZE = {
    # Elements in inner units do not count: each block is left with 12. A list becomes no unit, nor does attention,
    # nor anything inside it.
    "42": Rule(WrapPolicy("size", min_num_params=42), LINEARS),
    # A module of exactly the size is a unit, and so is a module around it that is left with enough elements.
    "84": Rule(WrapPolicy("size", min_num_params=84), ("blocks.0", "blocks.1.inner", "blocks.1")),
    "91": Rule(WrapPolicy("size", min_num_params=91), BLOCKS),
    "169": Rule(WrapPolicy("size", min_num_params=169), ("blocks.1",)),
    "none": Rule(WrapPolicy("size", min_num_params=564), ()),
    "leaves": Rule(
        WrapPolicy("size", min_num_params=42, force_leaf_modules=(PartsBase, nn.MultiheadAttention)), ("entry",)
    ),
    "attention": Rule(WrapPolicy("size", min_num_params=100, force_leaf_modules=()), (*BLOCKS, "attention")),
    "excluded": Rule(WrapPolicy("size", min_num_params=42, exclude_wrap_modules=(nn.Linear, nn.ModuleList)), BLOCKS),
}


def keeps_blocks(module: nn.Module) -> bool | dict[str, Any]:
    """Choose attention, and blocks that stay gathered until backward."""
    if isinstance(module, PartsBlock):
        return {"reshard_after_forward": False}
    return isinstance(module, nn.MultiheadAttention)


OF_CLASSES: tuple[Literal["classes", "objects", "called-objects"], ...] = ("classes", "objects", "called-objects")
BY_FUNCTION: tuple[Literal["custom", "by-hand"], ...] = ("custom", "by-hand")
BY_CHOICE: dict[str, Rule] = {
    **{
        kind: Rule(
            WrapPolicy(kind, module_classes=(PartsBase, nn.LayerNorm)), ("blocks.0.norm", "blocks.1.norm", *BLOCKS)
        )
        for kind in OF_CLASSES
    },
    "function": Rule(
        WrapPolicy("function", lambda_fn=lambda module: getattr(module, "out_features", 0) == 5), ("heads.0", "heads.1")
    ),
    **{
        kind: Rule(WrapPolicy(kind, lambda_fn=keeps_blocks), (*BLOCKS, "attention"), keeps=BLOCKS)
        for kind in BY_FUNCTION
    },
}
BESIDE_IGNORED = {
    # A block whose first layer is ignored is left with 60 elements, and the other block with 90.
    "too-small": Rule(
        WrapPolicy("size", min_num_params=61), ("blocks.1.inner", "blocks.1.back"), ignored=("blocks.0.inner",)
    ),
    "large-enough": Rule(WrapPolicy("size", min_num_params=79), BLOCKS, ignored=("blocks.1.inner",)),
    "a-block": Rule(
        WrapPolicy("size", min_num_params=42), ("entry", "blocks.1.inner", "blocks.1.back"), ignored=("blocks.0",)
    ),
    "classes": Rule(WrapPolicy("classes", module_classes=(PartsBlock,)), ("blocks.1",), ignored=("blocks.0",)),
    "objects": Rule(WrapPolicy("objects", module_classes=(PartsBlock,)), ("blocks.1",), ignored=("blocks.0",)),
}


@contract("WRAPPING-1")
@subjects("rule", BY_SIZE)
def test_by_size(rank: Rank, rule: str) -> None:
    """Children first, each module that is left with enough elements is a unit."""
    train(rank, BY_SIZE[rule])


@contract("WRAPPING-2")
@subjects("rule", BY_CHOICE)
def test_by_choice(rank: Rank, rule: str) -> None:
    """Modules of some classes or their subclasses, or for which a function returns True, are units, also nested."""
    train(rank, BY_CHOICE[rule])


@contract("WRAPPING-2")
def test_by_hand_after_an_error(rank: Rank) -> None:
    """An error between the calls that make units by hand ends their context: the next one works as the first."""

    def fails(module: nn.Module) -> bool:
        raise ValueError("no choice")

    failed = Refusal(
        rank, lambda: sharded(rank, Parts().to(rank.device), auto_wrap_policy=WrapPolicy("by-hand", lambda_fn=fails))
    )
    assert failed.text == "ValueError: no choice", failed.text
    train(rank, BY_CHOICE["by-hand"])


@contract("WRAPPING-2")
@subjects("rule", ["classes", "objects"])
def test_module_in_two_places(rank: Rank, rule: Literal["classes", "objects"]) -> None:
    """A chosen module that its model holds under two names is one unit, in both places."""
    shared = nn.Linear(6, 6)
    model = nn.Sequential(nn.Linear(6, 6), shared, nn.Tanh(), shared)
    pair = rank.pair(model, units=[["0"], ["1"]], auto_wrap_policy=WrapPolicy(rule, module_classes=(nn.Linear,)))
    train_and_check(pair, batches(rank, 2, (4, 6)))
    first, second = (pair.adapter.module.get_submodule(name) for name in ("1", "3"))
    assert first is second, f"in the two places of one module are {first} and {second}"


@contract("WRAPPING-5")
def test_by_hand_within_by_hand(rank: Rank) -> None:
    """A context in which user code wraps by hand is refused within another."""
    inner = WrapPolicy("by-hand", lambda_fn=lambda module: False)

    def nests(module: nn.Module) -> bool:
        sharded(rank, nn.Linear(3, 3).to(rank.device), auto_wrap_policy=inner)
        return False

    outer = WrapPolicy("by-hand", lambda_fn=nests)
    Refusal(rank, lambda: sharded(rank, Parts().to(rank.device), auto_wrap_policy=outer)).check_names(
        "autowrap", "enable_wrap"
    )


@contract("WRAPPING-5")
@pytest.mark.parametrize("answer", [None, 3], ids=["nothing", "a-number"])
def test_answers_that_a_rule_cannot_give(rank: Rank, answer: Any) -> None:
    """A rule whose result is neither a bool nor the options of a unit is refused with that result."""
    policy = WrapPolicy("custom", lambda_fn=lambda module: answer)
    Refusal(rank, lambda: sharded(rank, Parts().to(rank.device), auto_wrap_policy=policy)).check_names(
        f"returned {answer}"
    )


@contract("WRAPPING-2")
@subjects(
    "option",
    [
        "keeps",
        pytest.param("function", marks=needs(Capability.META_DEVICE)),
        pytest.param("first-rank", marks=needs("sync_module_states")),
    ],
)
def test_units_have_the_options_of_the_model(rank: Rank, option: str) -> None:
    """Units that a rule finds have the model's options: what forward frees, and who initializes the values."""
    model = shapes.DrawnStack(dim=9)
    units = [["layers.0"], ["layers.1"], ["layers.2"], ["out"]]
    options: dict[str, Any] = {
        "keeps": {"reshard_after_forward": False},
        "first-rank": {"sync_module_states": True},
    }.get(
        option,
        {"param_init_fn": functools.partial(make_twice, device=rank.device), "prepare": lambda plain: plain.to("meta")},
    )
    full = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(rank.index + 1 if option == "first-rank" else 1)
        for parameter in full.parameters():
            parameter.mul_(2 if option == "function" else 1)
    run = rank.run(
        model, units=units, auto_wrap_policy=WrapPolicy("classes", module_classes=(shapes.Drawn,)), **options
    )
    expected = {name: value.detach().to(rank.device) for name, value in full.named_parameters()}
    found = run.adapter.parameters()
    wrong = [name for name, piece in found.items() if not torch.equal(piece.tensor, piece.cut(expected[name]))]
    assert not wrong, f"other values than those of the option: {wrong}"
    run.forward_backward((rank.batch(0, (4, 9)),), loss=models.mean_square)
    gathered = [item.unit for item in run.trace if (item.phase, item.kind) == ("backward", "all_gather")]
    assert len(gathered) == (0 if option == "keeps" else len(units)), f"backward gathers {gathered}"


def make_twice(module: nn.Module, *, device: torch.device) -> None:
    """Initialize a module on a device, and double its parameters."""
    module.to_empty(device=device, recurse=False)
    if isinstance(module, (shapes.Drawn, shapes.DrawnStack, shapes.Offset)):
        module.reset_parameters()
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.mul_(2)


@contract("WRAPPING-2")
@world(4)
@needs(Capability.HYBRID)
@pytest.mark.parametrize("as_groups", [pytest.param(True, marks=needs("as_groups")), False])
@REPLICAS
def test_units_of_replicas(rank: Rank, shape: tuple[int, int], as_groups: bool) -> None:
    """If a model is sharded within replicas, so are the units that a rule finds, among the same ranks."""
    mesh = rank.mesh(shape, ("replicate", "shard"))
    pair = train(rank, BY_CHOICE["classes"], mesh=mesh, as_groups=as_groups)
    groups = {item.group for item in pair.last_trace()}
    several = [dim for dim, size in enumerate(shape) if size > 1]  # one rank sends nothing
    known = {tuple(sorted(dist.get_process_group_ranks(mesh.get_group(dim)))) for dim in several}
    assert groups == known, f"collectives among {groups} instead of {known}"


@contract("WRAPPING-3")
@needs("ignored_modules")
@subjects("rule", BESIDE_IGNORED)
def test_next_to_ignored_modules(rank: Rank, rule: str) -> None:
    """An ignored module is no unit, nor anything inside it, and its elements do not count for a module around it."""
    pair = train(rank, BESIDE_IGNORED[rule])
    for name in BESIDE_IGNORED[rule].ignored:
        parent, _, child = name.rpartition(".")
        found = pair.sharded.original_module(parent).get_submodule(child)
        assert found is pair.sharded.original_module(name), f"{name} was replaced by a {type(found).__name__}"


@contract("WRAPPING-4")
@needs("precision.param_dtype")
def test_batch_norm_in_full_precision(rank: Rank) -> None:
    """With a compute dtype, batch normalisation becomes a unit without one; its output has its input's dtype."""
    bfloat16 = torch.bfloat16
    run, seen = run_normed(rank, Precision(param_dtype=bfloat16))
    for step in range(2):
        run.forward_backward((rank.batch(step, (4, 4)),), loss=torch.sum)
        assert seen == {"norm": [torch.float32, torch.float32], "around": [bfloat16, bfloat16]}, seen
    gathered = [item.dtype for item in run.trace if (item.phase, item.kind) == ("forward", "all_gather")]
    assert gathered == 2 * ["bfloat16", "float32"], f"forward gathers in {gathered}"


@contract("WRAPPING-4")
@needs("precision.param_dtype", "ignored_modules")
def test_ignored_batch_norm(rank: Rank) -> None:
    """An ignored batch normalisation becomes no unit, with a compute dtype either."""
    model = Normed()
    model.norm.requires_grad_(False)
    names = ("norm.weight", "norm.bias")
    precision = Precision(param_dtype=torch.bfloat16)
    run = rank.run(
        model, ignored_params=names, ignored_modules=("norm",), auto_wrap_policy=NOTHING, precision=precision
    )
    found = run.adapter.submodule("")
    assert run.original_module("norm") is model.norm, f"norm was replaced by a {type(model.norm).__name__}: {found}"
    run.forward_backward((rank.batch(0, (4, 4)),), loss=torch.sum)
    gathered = [item.dtype for item in run.trace if (item.phase, item.kind) == ("forward", "all_gather")]
    assert gathered == ["bfloat16"], f"forward gathers in {gathered}"


@contract("WRAPPING-4")
@needs("precision.param_dtype", "precision.full_precision_in_eval")
def test_batch_norm_after_a_step(rank: Rank) -> None:
    """A batch normalisation's output has its current input's dtype: after a bfloat16 step, float32 in an evaluation."""
    run, seen = run_normed(rank, Precision(param_dtype=torch.bfloat16, full_precision_in_eval=True))
    run.forward_backward((rank.batch(0, (4, 4)),), loss=torch.sum)
    assert seen["around"] == [torch.bfloat16] * 2, seen
    run.adapter.module.eval()
    run.evaluate((rank.batch(0, (4, 4)),))
    assert seen["around"] == [torch.float32] * 2, f"in full precision, before and after it: {seen['around']}"


def run_normed(rank: Rank, precision: Precision) -> tuple[Run, dict[str, list[torch.dtype]]]:
    """A run of a :class:`Normed` whose norm is a unit in full precision, and the dtypes that the model sees."""
    model, units = Normed(), {"norm": Precision()}
    run = rank.run(model, units=[["norm"]], auto_wrap_policy=NOTHING, precision=precision, unit_precision=units)
    return run, model.seen


def train(rank: Rank, rule: Rule, **options: Any) -> Pair:
    """Train with a rule: the units are those that it should find, each gathered and reduced by one collective.

    Ignored modules are frozen as well, so that they have no gradient, which would be the rank's own.
    """
    model = Parts()
    for module in rule.ignored:
        model.get_submodule(module).requires_grad_(False)
    ignored = tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    units = [[name] for name in rule.units]
    pair = rank.pair(
        model,
        units=units,
        auto_wrap_policy=rule.policy,
        ignored_params=ignored,
        ignored_modules=rule.ignored,
        **options,
    )
    mesh = options.get("mesh")
    replicas = {"all_reduce": len(units) + 1} if mesh else {}
    shards = mesh is None or mesh.size(-1) > 1
    for _ in checked_steps(pair, batches(rank, 2, (4, 6))):
        pair.check_counts("forward", all_gather=shards * (len(units) + 1))
        gathers, reductions = shards * (len(units) - len(rule.keeps)), shards * (len(units) + 1)
        pair.check_counts("backward", all_gather=gathers, reduce_scatter=reductions, **replicas)
        pair.check_bytes()
    return pair
