"""What a failure says of parameters without gradients, of shared parameters, and of what an implementation refuses."""

import pytest

# Before the inner runs, which forget what they import: torch's module of it cannot be imported twice.
import shardproof.harness.adapters.torch_fully_shard  # noqa: F401
from tests.harness.inner import error_lines

pytestmark = pytest.mark.sampled

IMPORTS = """
import pytest
import torch
from torch import nn
from shardproof.testing import models, world
from shardproof.harness.models.ties import TiedMLP
"""

ADAPTERS = """
import contextlib
import dataclasses
import torch
from torch import nn
from shardproof.harness.adapters.reference import ReferenceAdapter

class Zeros(ReferenceAdapter):
    name = "zeros"
    @contextlib.contextmanager
    def microbatch(self, *, is_last):
        with super().microbatch(is_last=is_last):
            yield
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

class DeclaredZeros(Zeros):
    name = "declared-zeros"
    traits = dataclasses.replace(ReferenceAdapter.traits, unused_gradient="zero")

class Trains(ReferenceAdapter):
    name = "trains"
    def __init__(self, model, *, optimizer, config):
        super().__init__(model.requires_grad_(True), optimizer=optimizer, config=config)

class Unties(ReferenceAdapter):
    name = "unties"
    def __init__(self, model, *, optimizer, config):
        model.second.weight = nn.Parameter(model.first.weight.detach().clone())
        super().__init__(model, optimizer=optimizer, config=config)

class UntiesQuietly(Unties):
    name = "unties-quietly"
    def named_parameters(self):
        return {name: one for name, one in super().named_parameters().items() if name != "second.weight"}
"""

UNUSED = """
@world(2)
def test_case(rank):
    pair = rank.pair(models.TwoHeads(dim=8), units=[["head0"]], baseline="replicated", find_unused_parameters=True)
    for step in range(3):
        pair.step(rank.batch(step, (4, 8)), loss=models.first_head if step else models.both_heads)
        pair.check()
"""

FROZEN = """
@world(2)
def test_case(rank):
    model = models.Tower(dim=8, depth=2)
    model.layers[0].requires_grad_(False)
    pair = rank.pair(model, units=model.units())
    pair.step(rank.batch(0, (4, 8)))
    pair.check()
"""

TIED = """
class Wide(TiedMLP):
    def __init__(self, dim):
        super().__init__(dim)
        self.out = nn.Linear(dim, 16 * dim)
    def forward(self, x):
        return self.out(super().forward(x))
@world(2)
def test_case(rank):
    pair = rank.pair(Wide(8), units=UNITS)
    pair.step(rank.batch(0, (4, 8)))
    pair.check()
"""

UNTIED = "untied: 'first.weight' and 'second.weight' are one parameter of the original model and several after sharding"
TRAIT = "which an adapter declares with the trait unused_gradient='zero'"


@pytest.fixture
def fails(run, pytester):
    """Run a case on an adapter that fails it, or passes, and return the output."""
    pytester.syspathinsert()
    pytester.path.joinpath("adapters.py").write_text(ADAPTERS)

    def fails(source, implementation, **outcomes):
        result = run(IMPORTS + source, "--device", "cpu", "--impl", implementation)
        result.assert_outcomes(**(outcomes or {"failed": 1}))
        assert not error_lines(result)
        return result.stdout

    return fails


LARGER = TIED.replace("Wide(8)", "TiedMLP(64)").replace("(4, 8)", "(4, 64)")
ON_FROZEN = "  the sharded run has a gradient, but the parameter is frozen (requires_grad=False)"
ZERO = f"  it is zero, as when zeros stand for a missing gradient, {TRAIT}"
EXPLAINED = {
    "zeros for an unused parameter": (
        UNUSED, "Zeros",
        ["*diverges from the baseline: gradient of 'head*",
         "  the sharded run has a gradient, but no rank used the parameter", ZERO],
    ),
    "zeros for a frozen parameter": (FROZEN, "Zeros", [ON_FROZEN, ZERO]),
    "a frozen parameter that is trained": (FROZEN, "Trains", [ON_FROZEN]),
    "untied with names of their own": (TIED, "Unties", [f"*unknown: second.weight; {UNTIED}"]),
    "untied with one name": (
        TIED, "UntiesQuietly",
        ["*diverges from the baseline: gradient of 'first.weight' in the first step *", f"  {UNTIED}"],
    ),
    # The size alone would be called a model that is not sharded.
    "untied with more memory than the share": (
        LARGER, "UntiesQuietly",
        ["*the model is not sharded: sharding on rank 0", "  holds * bytes of parameters after sharding; its share *",
         f"  {UNTIED}"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", EXPLAINED)
def test_what_a_failure_says(fails, what):
    source, adapter, lines = EXPLAINED[what]
    shown = fails(source.replace("UNITS", "[]"), f"adapters:{adapter}")
    shown.fnmatch_lines(lines)
    assert adapter != "Trains" or "unused_gradient" not in shown.str(), "no trait allows it"


def test_zeros_that_are_declared_pass(fails):
    """Also under momentum, which moves a parameter whose gradient is zero and not one that has none."""
    fails(UNUSED, "adapters:DeclaredZeros", passed=1)


@pytest.mark.parametrize("implementation", ["reference", "torch.fully_shard"])
def test_an_implementation_that_refuses_ties_says_so_itself(fails, implementation):
    """Untied parameters take more memory, which the harness measures before the first forward refuses them."""
    shown = fails(LARGER.replace("UNITS", '[["first"], ["second"]]'), implementation)
    shown.fnmatch_lines(["ValueError: *second.weight*"])
    assert "the model is not sharded" not in shown.str()


@pytest.mark.parametrize("implementation", ["reference", "torch.fully_shard"])
def test_an_implementation_that_refuses_a_mesh_says_so_itself(fails, implementation):
    case = FROZEN.replace("units=model.units()", "mesh=rank.mesh((2, 1, 1), ('a', 'b', 'c'))")
    fails(case, implementation).fnmatch_lines(["ValueError: *fully_shard expects a 1D or 2D DeviceMesh but got *"])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("units=[[]]", "units = [[]]: a unit has at least one module"),
        ("mesh=torch.distributed.device_mesh.DeviceMesh('cpu', [0])", "rank 1 is not in the mesh, whose ranks are [0]"),
    ],
)
def test_what_no_implementation_is_asked(fails, options, told):
    shown = fails(FROZEN.replace("units=model.units()", options), "reference")
    shown.fnmatch_lines([f"ValueError: {told}".replace("[", "[[]")])
