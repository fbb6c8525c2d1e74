"""Chapter DETERMINISM: the same run gives the same bits."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.testing import Capability, Rank, Run, contract, models, needs, states, world
from shardproof.testing.axes import FLAT, KEEPS, REPLICAS, subjects
from shardproof.testing.compare import Finding, Location, Stage, StepPicture, check_exact, exact_difference, step_label
from shardproof.testing.make import Accumulation, Clip, StateForm, pair_by_units, pair_of_mlps, run_by_units, two_runs
from shardproof.testing.train import batches, check_twins, mixed, optim, parallel, shapes, tokens, train_and_check

pytestmark = world(2, own_hash_seeds=True)

WHY = "the same implementation, seeds and data, and deterministic algorithms"
WHY_LOADED = "the same values and states, the same data"
FULL = needs(Capability.FULL_STATE_DICT)


@contract("DETERMINISM-1")
@world(2, 4)
@KEEPS
def test_two_runs(rank: Rank, reshard_after_forward: bool | None) -> None:
    """Two runs in one process, with the same seeds and data, have the same bits in every step."""
    clip = Clip(max_norm=0.01) if Capability.CLIPPING in rank.implementation.capabilities() else None
    options: dict[str, Any] = {"clip": clip, "optimizer": optim.adamw()}
    # Many parameters and steps: in a step, another order of their norms often gives the same total.
    model = models.Transformer(models.TransformerConfig(layers=6))
    runs = two_runs(rank, model, reshard_after_forward=reshard_after_forward, **options)
    check_twins(rank, runs, tokens(rank, 6, (3, 8), vocabulary=11), why=WHY)


@contract("DETERMINISM-1")
@world(4)
@needs(Capability.HYBRID)
@REPLICAS
def test_replicas(rank: Rank, shape: tuple[int, int]) -> None:
    """Replicas have the same bits after every step; a difference of one rounding would grow unnoticed."""
    mesh = rank.mesh(shape, ("replicate", "shard"))
    run = run_by_units(rank, models.Transformer(), mesh=mesh, optimizer=optim.sgd())
    first = int(mesh.mesh[0, mesh.get_local_rank("shard")])
    for step, batch in enumerate(tokens(rank, 3, (3, 8), vocabulary=11)):
        mine = tensors_of_step(run.settle(run.step([(batch,)], loss=models.mean_square)))
        expected = rank.exchange(mine)[first]
        finding = None
        for (stage, name), tensor in mine.items():
            difference = exact_difference(tensor, expected[stage, name])
            if difference is not None and finding is None:
                index, here, there = difference
                text = f"is {here!r} here and {there!r} on rank {first}, which holds the same share"
                place = Location(stage=stage, step=step, rank=rank.index, name=name, element=index)
                finding = Finding(place, text)
        rank.agree(finding, title=f"replicas have different bits after {step_label(step)}")


@contract("DETERMINISM-2")
@world(2, 4, own_hash_seeds=True)
@FLAT
@KEEPS
def test_steps_with_own_hash_seeds(rank: Rank, reshard_after_forward: bool | None, flat: bool) -> None:
    """Ranks with different hash seeds gather, reduce, accumulate and clip alike."""
    model = models.Transformer()
    hybrid = rank.world_size == 4 and Capability.HYBRID in rank.implementation.capabilities()
    mesh = rank.mesh((2, 2), ("replicate", "shard")) if hybrid else rank.mesh()
    clip = Clip(max_norm=0.01) if Capability.CLIPPING in rank.implementation.capabilities() else None
    options: Any = {"flat_parameters": flat, "reshard_after_forward": reshard_after_forward}
    pair = pair_by_units(rank, model, mesh=mesh, microbatches=2, clip=clip, **options)
    train_and_check(pair, tokens(rank, 2, (3, 8), vocabulary=11, microbatches=2))


@contract("DETERMINISM-2")
@world(4, own_hash_seeds=True)
@needs(Capability.TENSOR_PARALLEL, Capability.CLIP_BY_CALL)
@FLAT
def test_two_dimensions_with_own_hash_seeds(rank: Rank, flat: bool) -> None:
    """Ranks with different hash seeds also do so with tensor parallelism, with a norm over both mesh dimensions."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    options: Any = {"clip": Clip(max_norm=0.01), "flat_parameters": flat}
    pair = pair_of_mlps(rank, mesh, parallel.MLPStack(17, normed=True), sequence=True, **options)
    train_and_check(pair, batches(rank, 2, (2, 6, 17), mesh=mesh["dp"]), loss=models.ramp_square)


@contract("DETERMINISM-2")
@world(2, 4, own_hash_seeds=True)
@needs(Capability.UNUSED_MODULE, Capability.DEFERRED_REDUCTION)
@FLAT
def test_waiting_units_with_own_hash_seeds(rank: Rank, flat: bool) -> None:
    """Deferred reductions of units that the last backward does not reach are issued in one order on all ranks."""
    options: Any = {
        "microbatches": 5,
        "accumulation": Accumulation(),
        "find_unused_parameters": True,
        "flat_parameters": flat,
    }
    pair = pair_by_units(rank, models.Branches(9, 5), baseline="replicated", **options)
    drawn = batches(rank, 2, (2, 9), microbatches=5)
    train_and_check(pair, ([(batch, number) for number, batch in enumerate(several)] for several in drawn))


@contract("DETERMINISM-2")
@needs(Capability.REGISTERED_STATE)  # flat parameters have one dtype
def test_dtypes_with_own_hash_seeds(rank: Rank) -> None:
    """A unit with frozen parameters of several dtypes has the values of each, and the gradient of the trainable one."""
    model = shapes.TwoScales(6, 3, 6)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8):
        values = torch.arange(36, dtype=dtype).reshape(6, 6)
        model.register_parameter(f"of_{str(dtype).partition('.')[2]}", nn.Parameter(values, requires_grad=False))
    expected = {name: value.detach().to(rank.device, copy=True) for name, value in model.named_parameters()}
    run = rank.run(model)
    inputs = torch.full((6, 6), float(rank.index + 1), device=rank.device)
    for _ in range(2):
        output = run.adapter.forward(inputs)
        for name, piece in run.adapter.registered().items():
            assert torch.equal(piece.tensor, piece.cut(expected[name])), f"{name} has other values than it was given"
        run.adapter.backward(output.sum())
        gradient = run.adapter.gradients()["weight"]
        assert gradient is not None and gradient.tensor.eq(1.5).all(), "the gradient of weight is not the average"
        run.adapter.zero_grad(set_to_none=True)


@contract("DETERMINISM-2")
@needs("sync_module_states", Capability.DISTRIBUTED_CHECKPOINT, Capability.SHARDED)
@FLAT
def test_start_with_own_hash_seeds(rank: Rank, flat: bool) -> None:
    """Each parameter and each buffer has the first rank's values if a model is to begin with those."""
    torch.manual_seed(rank.seeds.init + rank.index)
    model = mixed.Mixed()
    first = rank.exchange({name: value.clone() for name, value in model.state_dict().items()})[0]
    run = rank.run(model, units=[["high"]], sync_module_states=True, flat_parameters=flat)
    states.check_same(rank, states.read(rank, run), {"model": first})


@contract("DETERMINISM-2")
@needs(Capability.META_LOAD, Capability.FULL_STATE_DICT)
def test_values_of_the_first_rank_with_own_hash_seeds(rank: Rank) -> None:
    """A model that loads the first rank's state dict has its values, also if ranks have different hash seeds."""
    torch.manual_seed(rank.seeds.init + 1)
    saved = {name: value.clone() for name, value in mixed.Mixed().state_dict().items()}
    run = rank.run(mixed.Mixed(), units=[["low"], ["high"]], prepare=lambda model: model.to("meta"), materialize=False)
    run.adapter.restore({"model": copy.deepcopy(saved) if rank.index == 0 else {}}, form="first-rank")
    states.check_same(rank, states.read(rank, run), {"model": saved})


@contract("DETERMINISM-2")
@world(2, 4, own_hash_seeds=True)
@needs(Capability.DISTRIBUTED_CHECKPOINT, Capability.TIED_PARAMETERS)
@subjects("form", ["sharded", pytest.param("full", marks=FULL), pytest.param("first-rank", marks=FULL)])
@FLAT
def test_states_with_own_hash_seeds(rank: Rank, flat: bool, form: StateForm) -> None:
    """State dicts of model and optimizer have the names in one order, load, and training goes on with the same bits."""
    options: Any = {"for_flat": flat, "flat_parameters": flat, "optimizer": optim.Averages}
    saved, loaded = states.make(rank, 0, **options), states.make(rank, 1, **options)
    states.train(rank, saved, 0)
    if form == "sharded":
        check_order(rank, saved)
    states.check_loads(rank, saved, loaded, form)
    if form == "sharded":  # otherwise the two share tensors that an implementation without shards has saved and loaded
        check_exact(rank, states.train(rank, loaded, 4), states.train(rank, saved, 4), step=4, why=WHY_LOADED)


def check_order(rank: Rank, run: Run) -> None:
    """The state dicts of all ranks have the same names in the same order: user code gathers them one by one."""
    state = run.adapter.checkpoint()
    kept = state["optimizer"]["state"].items()
    everyone = rank.exchange([*state["model"], *(f"{key} of {name}" for name, values in kept for key in values)])
    other = next((found for found in everyone if found != everyone[0]), everyone[0])
    assert other == everyone[0], f"the state dicts of ranks have {everyone[0]}, and {other}"


def tensors_of_step(picture: StepPicture) -> dict[tuple[Stage, str], torch.Tensor]:
    """This rank's shares of the gradients, the parameters and the optimizer's state."""
    found = {(Stage.GRADIENT, name): piece for name, piece in picture.gradients.items()}
    found |= {(Stage.PARAMETER, name): piece for name, piece in picture.parameters.items()}
    for name, state in (picture.state or {}).items():
        found |= {(Stage.OPTIMIZER_STATE, f"{name}: {key}"): piece for key, piece in state.items()}
    return {place: piece.tensor for place, piece in found.items() if piece is not None}
