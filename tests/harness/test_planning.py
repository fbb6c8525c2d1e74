"""Plans: simulated numbers against trainings with real tensors and against closed formulas, units, and rings."""

from __future__ import annotations

import pytest
import torch

from shardproof.harness.adapters import registry
from shardproof.harness.planning import anatomy, planned, presets, request
from shardproof.harness.planning.request import Request
from shardproof.harness.planning.subject import subject_of
from shardproof.harness.simulation.memory import Ledger
from shardproof.harness.simulation.world import simulated_world
from shardproof.harness.tensors import memory
from tests.harness import planned_models
from tests.harness.planned_models import objects_of_others_rest  # noqa: F401

MODELS = "tests.harness.planned_models"
IMPLEMENTATIONS = ("reference", "torch.fully_shard", "reference.flat", "torch.fsdp")
MIXED = {"compute": torch.bfloat16, "reduce": torch.float32}


def request_of(model, implementation, **changes):
    return Request(model=f"{MODELS}:{model}", implementation=implementation, batch=2, sequence=16, **changes)


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
                adapter = registry.load(request.implementation)(
                    built.model, optimizer=request.make_optimizer, config=config
                )
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


CASES = {
    "gpt": ("gpt", {}),
    "llama-mixed": ("llama", MIXED),
    "tied-kept": ("tied", {"reshard_after_forward": False}),
    "odd-recomputed": ("odd", {"checkpointing": True}),
}
#: Of all pairs these run in CI; the others at night.
IN_CI = {
    ("gpt", "torch.fully_shard"), ("llama-mixed", "reference"), ("odd-recomputed", "reference.flat"),
}  # fmt: skip


def pairs(first, second, in_ci):
    """All pairs; those that are not for CI are marked nightly."""
    return [
        pytest.param(one, other, marks=() if (one, other) in in_ci else pytest.mark.nightly)
        for one in first
        for other in second
    ]


@pytest.mark.parametrize("case, implementation", pairs(CASES, IMPLEMENTATIONS, IN_CI))
def test_a_simulation_holds_what_real_tensors_hold(case, implementation):
    """Byte for byte on the CPU: between two steps by a census, at the peak of each phase by a ledger."""
    model, options = CASES[case]
    request = request_of(model, implementation, **options)
    real = Real(request, 2)
    subject = subject_of(request.model)
    found = planned.simulate(
        request,
        subject,
        planned.examined(request, subject),
        registry.load(implementation),
        (2,),
        as_on_a_device=False,
    )
    totals = [sum(phase.at_peak.values()) for phase in found.phases]
    assert totals == [real.between, *real.peaks]


RESHARDS = {"default": None, "freed": True, "kept": False}
EXACT_IN_CI = {
    ("freed", "reference"), ("kept", "torch.fsdp"),
}  # fmt: skip


@pytest.mark.parametrize("reshards, implementation", pairs(RESHARDS, IMPLEMENTATIONS, EXACT_IN_CI))
def test_the_formulas_are_exact_where_sizes_divide(implementation, reshards):
    request = request_of("gpt", implementation, optimizer="momentum", reshard_after_forward=RESHARDS[reshards], **MIXED)
    (world,) = planned.plan(request, [(3, 2)], node_size=8).worlds
    assert len(world.formulas) == 9
    assert [(one.quantity, one.simulated) for one in world.formulas] == [
        (one.quantity, one.value) for one in world.formulas
    ]


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
    first, last = (
        planned.plan(request_of("odd", "torch.fully_shard", rank=rank), [(3,)], node_size=8).worlds[0]
        for rank in (0, 2)
    )
    assert [one.nbytes for one in first.traffic] == [one.nbytes for one in last.traffic]
    assert first.phases[0].at_peak["optimizer"] > last.phases[0].at_peak["optimizer"]


def test_dtype_of_the_parameters():
    (world,) = planned.plan(request_of("tied", "reference", dtype=torch.bfloat16), [(2,)], node_size=8).worlds
    numel = sum(parameter.numel() for parameter in planned_models.tied().parameters())
    assert world.phases[0].at_peak["shards"] == numel * 2 / 2
    assert {one.dtype for one in world.traffic} == {"bfloat16"}


def test_recomputed_activations_do_not_wait_for_backward():
    kept, recomputed = (
        planned.plan(request_of("gpt", "reference.flat", checkpointing=is_asked), [(2,)], node_size=8).worlds[0]
        for is_asked in (False, True)
    )
    assert recomputed.phases[1].most["activations"] < kept.phases[1].most["activations"] / 2
    assert recomputed.traffic == kept.traffic


def test_units_are_the_blocks_that_repeat():
    assert anatomy.choose_units(planned_models.two_lists()) == [
        "encoder.layers.0",
        "encoder.layers.1",
        "heads.0",
        "heads.2",
    ]
    assert anatomy.choose_units(planned_models.gpt()) == ["layers.0", "layers.1"]
    assert anatomy.choose_units(planned_models.one_layer()[0]) == []


def test_units_by_class_and_by_name():
    assert anatomy.choose_units(planned_models.two_lists(), ["LayerNorm", "ModuleDict"]) == ["encoder", "norm"]
    assert anatomy.choose_units(planned_models.gpt(), ["GptBlock", "head"]) == ["layers.0", "layers.1", "head"]
    with pytest.raises(ValueError, match=r"^--unit Conv2d: no .*; classes are LayerNorm, Linear, ModuleDict, "):
        anatomy.choose_units(planned_models.two_lists(), ["Linear", "Conv2d"])


def test_a_unit_has_the_parameters_that_no_inner_unit_has():
    found = anatomy.examine(planned_models.two_lists(), ["ModuleDict", "Linear"])
    assert {name: sum(shape.numel() for shape in sizes) for name, sizes in found.shapes.items() if sizes} == {
        "encoder.layers.0": 20,
        "encoder.layers.1": 20,
        "heads.0": 20,
        "heads.2": 10,
        "": 8,
    }


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
