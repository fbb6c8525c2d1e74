"""Plans: simulated numbers against trainings with real tensors and against closed formulas, units, and rings."""

import importlib.util
import itertools
import sys

import pytest
import torch
from torch import nn

from shardproof.harness.adapters import registry
from shardproof.harness.parity.rank import Rank
from shardproof.harness.planning import anatomy, packaged, planned, presets, request, tensor_parallel
from shardproof.harness.planning.request import PlanRequest
from shardproof.harness.planning.subject import Built, ModelError, microbatch, subject_of
from shardproof.harness.simulation.memory import Ledger
from shardproof.harness.simulation.world import simulated_world
from shardproof.harness.tensors import memory
from shardproof.testing import world
from tests.harness import planned_models
from tests.harness.planned_models import objects_of_others_rest  # noqa: F401

MODELS = "tests.harness.planned_models"
IMPLEMENTATIONS = ("reference", "torch.fully_shard", "reference.flat", "torch.fsdp")
MIXED = {"compute": torch.bfloat16, "reduce": torch.float32}


def request_of(model, implementation, **changes):
    return PlanRequest(model=f"{MODELS}:{model}", implementation=implementation, batch=2, sequence=16, **changes)


class Real:
    """A training with real tensors, of one rank, among ranks that do not exist.

    Attributes:
        between: the bytes of live tensors between two steps, as the garbage collector finds them.
        peaks: the most bytes in each phase.
    """

    def __init__(self, request, ranks):
        cpu, ledger = torch.device("cpu"), Ledger()
        with simulated_world(ranks, rank=request.rank) as world:
            mesh, before = world.mesh(), memory.tensor_bytes(cpu)
            subject = subject_of(request.model)
            known = anatomy.examine(subject.build(16).model, request.units)
            with ledger.during("build"):
                built = anatomy.build(request, subject, known)
                config = anatomy.config_of(request, known, mesh)
                kind = registry.load(request.implementation)
                adapter = kind(built.model, optimizer=request.make_optimizer, config=config)
            inputs, loss = built.inputs, built.loss
            del built
            for step in range(2):
                self.between = memory.tensor_bytes(cpu) - before
                ledger.step = step
                with adapter.microbatch(is_last=True):
                    with ledger.during("forward"):
                        given = inputs(request.batch, request.sequence)
                        value = loss(adapter.forward(*given), *given)
                    with ledger.during("backward"):
                        adapter.backward(value)
                    del given, value
                with ledger.during("step"):
                    adapter.step()
                    adapter.zero_grad(set_to_none=True)
            # Where nothing is allocated or freed, what is held at the end was held all the time.
            peaks, held = ledger.peaks(step=1), ledger.held()
            self.peaks = [peaks.get(phase, held).total for phase in ("forward", "backward", "step")]
            adapter.teardown()


CASES = {"gpt": ("gpt", {}), "llama-mixed": ("llama", MIXED), "odd-recomputed": ("odd", {"checkpointing": True})}
CASES["tied-kept"] = ("tied", {"reshard_after_forward": False})
#: Of all pairs these run in CI; the others at night.
IN_CI = {("gpt", "torch.fully_shard"), ("llama-mixed", "reference"), ("odd-recomputed", "reference.flat")}


def pairs(first, second, in_ci):
    """All pairs; those that are not for CI are marked nightly."""
    every = itertools.product(first, second)
    return [pytest.param(*one, marks=() if one in in_ci else pytest.mark.nightly) for one in every]


@pytest.mark.parametrize("case, implementation", pairs(CASES, IMPLEMENTATIONS, IN_CI))
def test_a_simulation_holds_what_real_tensors_hold(case, implementation):
    """Byte for byte on the CPU: between two steps by a census, at the peak of each phase by a ledger."""
    model, options = CASES[case]
    request = request_of(model, implementation, **options)
    real = Real(request, 2)
    subject = subject_of(request.model)
    found = planned.simulate(
        request, subject, planned.examined(request, subject), registry.load(implementation), (2,), as_on_a_device=False
    )
    totals = [sum(phase.at_peak.values()) for phase in found.phases]
    assert totals == [real.between, *real.peaks]


RESHARDS = {"default": None, "freed": True, "kept": False}
EXACT_IN_CI = {("freed", "reference"), ("kept", "torch.fsdp")}


@pytest.mark.parametrize("reshards, implementation", pairs(RESHARDS, IMPLEMENTATIONS, EXACT_IN_CI))
def test_the_formulas_are_exact_where_sizes_divide(implementation, reshards):
    request = request_of("gpt", implementation, optimizer="momentum", reshard_after_forward=RESHARDS[reshards], **MIXED)
    (world,) = planned.plan(request, [(3, 2)], node_size=8).worlds
    assert len(world.formulas) == 9
    assert {one.quantity: one.simulated - one.value for one in world.formulas if one.simulated != one.value} == {}


@pytest.mark.parametrize("implementation, reduced", [("reference", "float32"), ("reference.flat", "bfloat16")])
def test_gradients_are_reduced_by_default_as_the_implementation_does(implementation, reduced):
    request = request_of("gpt", implementation, optimizer="momentum", compute=torch.bfloat16)
    plan = planned.plan(request, [(2,)], node_size=8)
    assert plan.settings["reduced as"] == reduced
    assert [one.simulated for one in plan.worlds[0].formulas] == [one.value for one in plan.worlds[0].formulas]


@pytest.mark.nightly
def test_what_formulas_leave_out_is_shown():
    """Padding, where sizes do not divide, and the counters of Adam."""
    (world,) = planned.plan(request_of("odd", "torch.fully_shard"), [(3,)], node_size=8).worlds
    shown = {one.quantity: one.simulated - one.value for one in world.formulas}
    assert shown["gathers"] == shown["reductions"] == 0
    assert shown["shards"] > 0 and shown["optimizer state"] > 0 and shown["bytes of gathers"] > 0


@pytest.mark.nightly
def test_a_rank_that_is_not_the_first():
    """The last of three ranks holds parts with padding, whose optimizer state has none."""
    requests = [request_of("odd", "torch.fully_shard", rank=rank) for rank in (0, 2)]
    first, last = (planned.plan(one, [(3,)], node_size=8).worlds[0] for one in requests)
    assert [one.nbytes for one in first.traffic] == [one.nbytes for one in last.traffic]
    assert first.phases[0].at_peak["optimizer"] > last.phases[0].at_peak["optimizer"]


def test_dtype_of_the_parameters():
    (world,) = planned.plan(request_of("tied", "reference", dtype=torch.bfloat16), [(2,)], node_size=8).worlds
    numel = sum(parameter.numel() for parameter in planned_models.tied().parameters())
    assert world.phases[0].at_peak["shards"] == numel * 2 / 2
    assert {one.dtype for one in world.traffic} == {"bfloat16"}


def test_recomputed_activations_do_not_wait_for_backward():
    requests = [request_of("gpt", "reference.flat", checkpointing=is_asked) for is_asked in (False, True)]
    kept, recomputed = (planned.plan(one, [(2,)], node_size=8).worlds[0] for one in requests)
    assert recomputed.phases[1].most["activations"] < kept.phases[1].most["activations"] / 2
    assert recomputed.traffic == kept.traffic


def test_units_are_the_blocks_that_repeat():
    units = ["encoder.layers.0", "encoder.layers.1", "heads.0", "heads.2"]
    assert anatomy.choose_units(planned_models.two_lists()) == units
    assert anatomy.choose_units(planned_models.gpt()) == ["layers.0", "layers.1"]
    assert anatomy.choose_units(planned_models.one_layer()[0]) == []


def test_units_by_class_and_by_name():
    assert anatomy.choose_units(planned_models.two_lists(), ["LayerNorm", "ModuleDict"]) == ["encoder", "norm"]
    assert anatomy.choose_units(planned_models.gpt(), ["GptBlock", "head"]) == ["layers.0", "layers.1", "head"]
    with pytest.raises(ValueError, match=r"^--unit Conv2d: no .*; classes are LayerNorm, Linear, ModuleDict, "):
        anatomy.choose_units(planned_models.two_lists(), ["Linear", "Conv2d"])


def test_a_unit_has_the_parameters_that_no_inner_unit_has():
    found = anatomy.examine(planned_models.two_lists(), ["ModuleDict", "Linear"])
    sizes = {name: sum(shape.numel() for shape in shapes) for name, shapes in found.shapes.items() if shapes}
    assert sizes == {"encoder.layers.0": 20, "encoder.layers.1": 20, "heads.0": 20, "heads.2": 10, "": 8}


@pytest.mark.parametrize(
    "kind, size, factor",
    [("all_gather", 4, 0.75), ("reduce_scatter", 8, 0.875), ("all_reduce", 2, 1.0), ("broadcast", 4, 1.0)],
)
def test_what_a_ring_sends(kind, size, factor):
    assert planned.sent(kind, 800, size) == factor * 800
    assert planned.sent(kind, 800, 1) == 0


@pytest.mark.parametrize(
    "group, node_size, part",
    [
        (range(8), 8, 0),  # within a host
        (range(16), 8, 2 / 16),  # two links between two hosts
        (range(3, 64, 8), 8, 1),  # one rank on each host
        (range(0, 16, 4), 8, 2 / 4),
        ([5], 2, 0),
    ],
)
def test_which_part_of_a_ring_leaves_a_host(group, node_size, part):
    assert planned.crossing(list(group), node_size) == part


def test_worlds_of_the_same_kind():
    assert request.parse("64x8") == (64, 8) and request.parse("512") == (512,)
    assert request.scaled((64, 8), 16) == (2, 8) and request.scaled((64,), 16) == (16,)
    assert request.parse_worlds("64, 8,64") == [8, 64]
    assert request.hosts_of((64, 8), 8) == 64 and request.hosts_of((3,), 8) == 1


@pytest.mark.parametrize("name", presets.KNOWN)
def test_a_known_shape_has_the_parameters_of_its_name(name):
    shape = presets.shape_of(name)
    with torch.device("meta"):
        model = presets.build(shape, shape.length)
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert float(name.partition(":")[2].removesuffix("b")) == pytest.approx(numel / 1e9, rel=0.04, abs=0.05)
    assert len(anatomy.choose_units(model)) == shape.layers


# Shapes that are cut down, models of transformers, their data, and their tensor-parallel plans


def built(name, length=16, **sizes):
    torch.manual_seed(0)
    return subject_of(name, **sizes).build(length)


def loss_of(made, **numbers):
    given = microbatch(made, batch=2, sequence=16, **{"step": 0, "rank": 0, "index": 0} | numbers)
    return made.loss(made.model(*given), *given)


@pytest.mark.parametrize("name", presets.KNOWN)
def test_a_shape_of_its_own_width_is_itself(name):
    shape = presets.shape_of(name)
    assert presets.resized(shape, layers=None, dim=shape.dim) == shape
    small = presets.resized(shape, layers=2, dim=64)
    assert (small.layers, small.dim) == (2, 64)
    assert small.heads // small.key_heads == shape.heads // shape.key_heads or name == "llama:3.2b"  # 3, for 64
    assert abs(small.hidden / 64 - shape.hidden / shape.dim) < 8 / 64
    assert loss_of(built(name, layers=2, dim=64)).isfinite()


def test_widths_that_have_no_heads():
    shape = presets.shape_of("llama:70b")
    found = [presets.resized(shape, layers=None, dim=dim) for dim in (128, 48, 24)]
    assert [(one.heads, one.key_heads) for one in found] == [(16, 2), (6, 3), (2, 1)]
    with pytest.raises(ValueError, match=r"^--dim 7 does not divide into heads of an even size of at least 8$"):
        presets.resized(shape, layers=None, dim=7)


NEEDS_TRANSFORMERS = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers has a tox environment of its own"
)


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize("name", packaged.KNOWN)
def test_models_of_transformers(name):
    made = built(name)
    assert len(anatomy.choose_units(made.model)) == 2
    loss_of(made).backward()
    assert [name for name, one in made.model.named_parameters() if one.grad is None or not one.grad.any()] == []
    made = built(name, layers=3, dim=32)
    assert len(anatomy.choose_units(made.model)) == 3
    made.model.double()
    assert loss_of(made).isfinite()


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    subject = subject_of("transformers:llama")
    line = r"^--model 'transformers:llama' needs transformers: pip install 'transformers>=5'$"
    with pytest.raises(ModelError, match=line):
        subject.build(16)


def test_data_follow_from_their_numbers_alone():
    made, images = built("gpt:0.1b", layers=1, dim=64), planned_models.one_layer()
    first = microbatch(made, step=1, rank=2, index=3, batch=2, sequence=16)
    again = microbatch(built("gpt:0.1b", layers=1, dim=64), step=1, rank=2, index=3, batch=2, sequence=16)
    assert torch.equal(first[0], again[0]) and first[0].max() < 4192 and first[0].unique().numel() > 16
    state = torch.get_rng_state()
    for other in ({"step": 2}, {"rank": 1}, {"index": 0}):
        numbers = {"step": 1, "rank": 2, "index": 3} | other
        assert not torch.equal(first[0], microbatch(made, batch=2, sequence=16, **numbers)[0])
    (drawn,) = microbatch(Built(*images), step=0, rank=0, index=0, batch=2, sequence=16)
    assert drawn.shape == (2, 8) and drawn.unique().numel() == 16
    assert torch.equal(state, torch.get_rng_state())


@world(2)
@pytest.mark.parametrize("name", ["gpt:0.1b", "llama:8b", pytest.param("transformers:llama", marks=NEEDS_TRANSFORMERS)])
def test_a_model_that_tensor_parallel_ranks_share_computes_the_same(rank: Rank, name):
    whole, shared = (built(name, layers=2, dim=64) for _ in range(2))
    tied = len(list(whole.model.parameters()))
    tensor_parallel.split(shared.model, rank.mesh())
    assert len(list(shared.model.parameters())) == tied
    for made in (whole, shared):
        made.model.double()
        loss_of(made).backward()
    of_shared = dict(shared.model.named_parameters())
    cut = sum(one.numel() for one in of_shared.values() if not one.placements[0].is_replicate())
    assert cut > 0.9 * sum(one.numel() for one in of_shared.values())
    for name, parameter in whole.model.named_parameters():
        torch.testing.assert_close(of_shared[name].grad.full_tensor(), parameter.grad, msg=name)
    nn.utils.clip_grad_norm_(shared.model.parameters(), 1.0)


def test_models_without_a_plan():
    with simulated_world(4) as fake:
        with pytest.raises(ModelError, match=r"^Sequential has no tensor-parallel plan$"):
            tensor_parallel.split(planned_models.one_layer()[0], fake.mesh())
        line = r"^Llama has 2 key heads, which 4 tensor-parallel ranks do not divide"
        with pytest.raises(ModelError, match=line):
            tensor_parallel.split(planned_models.llama(), fake.mesh())
        line = r"^Gpt has 37 features in 'layers.0.up', which 4 tensor-parallel ranks do not divide$"
        with pytest.raises(ModelError, match=line):
            tensor_parallel.split(planned_models.odd(), fake.mesh())
