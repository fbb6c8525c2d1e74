"""Chapter CALLS: calls that change no training, in each state of a model and in each moment of its training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.suites.anytime import BEFORE, FAMILIES, ON_META, Held, Scene, change_of, train
from shardproof.testing import Capability, Rank, Run, contract, deadline, models, needs, world
from shardproof.testing.compare import check_bits, local_of
from shardproof.testing.make import Accumulation, Precision, cut_over
from shardproof.testing.refuse import Refusal
from shardproof.testing.train import optim, parallel, recompute, ties

DIM = 9


def _plain(rank: Rank) -> tuple[Any, dict[str, Any]]:
    return models.Tower(dim=DIM), {}


def _frozen(rank: Rank) -> tuple[Any, dict[str, Any]]:
    """A layer and a bias that are not trained, in a model that is in evaluation when it is sharded."""
    model = models.Tower(dim=DIM)
    model.layers[1].requires_grad_(False)
    model.get_parameter("layers.2.in_proj.bias").requires_grad_(False)
    return model, {"prepare": lambda plain: plain.eval()}


def _empty(rank: Rank) -> tuple[Any, dict[str, Any]]:
    """A layer of one row in between, and a unit of one element, of which the last rank has nothing."""
    model = models.Tower(dim=DIM)
    model.layers.insert(1, nn.Sequential(nn.Linear(DIM, 1), nn.Linear(1, 1, bias=False), nn.Linear(1, DIM)))
    return model, {"units": [["layers.1.1"], *model.units()]}


def _checkpointed(rank: Rank) -> tuple[Any, dict[str, Any]]:
    return models.Tower(dim=DIM), {"prepare": lambda model: recompute(model, "wrapper")}


class _Shared(nn.Module):
    """Two modules that share one and a buffer, one after the other, tanh. Input and output: (..., dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential() for _ in range(2))
        shared, scale = nn.Linear(dim, dim), torch.full((dim,), 0.5)
        for one in (self.first, self.second):
            one.append(shared)
            one.register_buffer("scale", scale, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(self.first(x) * self.first.scale) * self.second.scale)


def _tied(rank: Rank) -> tuple[Any, dict[str, Any]]:
    model = ties.TiedStack(DIM)
    model.layers.append(_Shared(DIM))
    return model, {}


def _without_own(rank: Rank) -> tuple[Any, dict[str, Any]]:
    """A root whose parameters all belong to units inside, and a policy that names the dtype that they have."""
    model = models.NormedStack(DIM)
    del model.layers[2]  # three units are a first one, a last one, and one in between
    units = [["norm"], *model.units()]
    return model, {"units": units, "precision": Precision(param_dtype=torch.float32)}


def _compiled(rank: Rank) -> tuple[Any, dict[str, Any]]:
    def compiled(model: Any) -> Any:
        for layer in model.layers:
            layer.compile(backend="eager")
        return model

    return models.Tower(dim=DIM, depth=2), {"prepare": compiled}


def _subgroup(rank: Rank) -> tuple[Any, dict[str, Any]]:
    return models.Tower(dim=DIM), {"mesh": rank.mesh((2, 2), ("replicate", "shard"))["shard"]}


def _replicas(rank: Rank) -> tuple[Any, dict[str, Any]]:
    return models.Tower(dim=DIM), {"mesh": rank.mesh((2, 2), ("replicate", "shard"))}


def _tensor_parallel(rank: Rank) -> tuple[Any, dict[str, Any]]:
    return parallel.MLPStack(8), cut_over(rank.mesh((2, 2), ("dp", "tp")), parallel.parallelize_mlps)


def _kept(rank: Rank) -> tuple[Any, dict[str, Any]]:
    """Parameters that stay gathered until backward."""
    return models.Tower(dim=DIM), {"reshard_after_forward": False}


def _whole(rank: Rank) -> tuple[Any, dict[str, Any]]:
    return models.Tower(dim=DIM), {"shards": False}


def _flat(rank: Rank) -> tuple[Any, dict[str, Any]]:
    return models.Tower(dim=DIM), {"flat_parameters": True}


_STATES: dict[str, Callable[[Rank], tuple[Any, dict[str, Any]]]] = {
    "plain": _plain, "frozen": _frozen, "empty-shards": _empty, "checkpointed": _checkpointed, "tied": _tied,
    "root-without-parameters": _without_own, "compiled": _compiled, "compiled-inside": _compiled,
    "kept": _kept, "whole": _whole, "flat": _flat,
    "subgroup": _subgroup, "replicas": _replicas, "tensor-parallel": _tensor_parallel,
    "tensor-parallel-deferred": _tensor_parallel,
}  # fmt: skip
UNITS = needs(Capability.MANUAL_RESHARD, Capability.ASYNC_UNSHARD)
WRAPPERS = needs(Capability.FSDP1_API)
#: The calls of most trainings last, which ``quick`` takes: test_state_helpers.py reads and loads state dicts there.
FAMILY = pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(one, marks=UNITS) for one in ("dropped-unshards", "optimizer-states", "state-dicts", "modules")),
        *(
            pytest.param(one, marks=WRAPPERS)
            for one in ("wrapped-training", "wrapped-optimizer-states", "wrapped-state-dicts", "wrappers")
        ),
    ],
)


@contract("CALLS-14")
@world(2)
@deadline(60)
@needs(Capability.DEFERRED_REDUCTION, Capability.OWN_OPTIMIZER)
@FAMILY
@pytest.mark.parametrize(
    "state",
    [
        # Compiled ones first: quick takes the last that can run, and a compilation costs more than all else.
        pytest.param("compiled", marks=needs(Capability.COMPILED_MODULES)),
        pytest.param("compiled-inside", marks=WRAPPERS),
        "plain", "frozen", "empty-shards", "checkpointed", "tied",
        pytest.param("kept", marks=needs(Capability.RESHARD_AFTER_FORWARD)),
        pytest.param("whole", marks=needs(Capability.NO_SHARD)),
        pytest.param("flat", marks=needs("flat_parameters")),
        pytest.param("root-without-parameters", marks=needs("precision.param_dtype")),
    ],
)  # fmt: skip
def test_calls_that_change_nothing(rank: Rank, state: str, family: str) -> None:
    """Calls that read, or set what is in force, return the right values and change no training, at any moment."""
    check_calls(rank, state, family)


@contract("CALLS-14")
@world(4)
@deadline(60)
@needs(Capability.DEFERRED_REDUCTION, Capability.OWN_OPTIMIZER)
@FAMILY
@pytest.mark.parametrize(
    "state",
    [
        "subgroup", pytest.param("replicas", marks=needs(Capability.HYBRID)),
        pytest.param("tensor-parallel", marks=needs(Capability.TENSOR_PARALLEL)),
        pytest.param("tensor-parallel-deferred", marks=needs(Capability.TENSOR_PARALLEL)),
    ],
)  # fmt: skip
def test_calls_that_change_nothing_on_meshes(rank: Rank, state: str, family: str) -> None:
    """On a part of the ranks, on replicas and beside tensor parallelism such calls change no training either."""
    check_calls(rank, state, family)


@contract("CALLS-14")
@world(2)
@needs(Capability.MANUAL_RESHARD, Capability.ASYNC_UNSHARD, Capability.META_LOAD, Capability.FULL_STATE_DICT)
def test_calls_on_the_meta_device(rank: Rank) -> None:
    """Before a model has values, settings are taken and an unshard is refused; loaded, it trains as without calls."""
    saved = models.Tower(dim=DIM)

    def made() -> Run:
        def to_meta(model: nn.Module) -> nn.Module:
            return model.to("meta")

        return rank.run(models.copy_of(saved), units=saved.units(), materialize=False, prepare=to_meta)

    def trained(run: Run) -> dict[str, torch.Tensor]:
        state = saved.state_dict() if rank.index == 0 else {}
        run.adapter.restore({"model": {name: value.clone() for name, value in state.items()}}, form="first-rank")
        outputs = [run.adapter.forward(rank.batch(step, (4, DIM))) for step in range(2)]
        for output in outputs:
            run.adapter.backward(models.mean_square(output))
        gradients = {name: one.grad for name, one in run.adapter.named_parameters().items()}
        return {f"gradient of {name!r}": local_of(one) for name, one in gradients.items() if one is not None} | {
            f"output {number}": output.detach() for number, output in enumerate(outputs)
        }

    run, nothing = made(), Held({}, {}, {}, torch.empty(0), torch.empty(0))
    scene = Scene(rank, run, BEFORE, 0, True, nothing, nothing)
    for call in ON_META:
        if call.applies(scene):
            call.make(scene)
    for unit in scene.units:
        Refusal(rank, unit.unshard).check_names("meta")
    values = [name for name, value in scene.model.state_dict().items() if not value.is_meta]
    assert not values, f"these are not on the meta device any more: {values}"
    found, expected = trained(run), trained(made())
    assert found.keys() == expected.keys(), f"with the calls there are {sorted(found)}, without {sorted(expected)}"
    for name, value in expected.items():
        check_bits(name, found[name], value, sides="with the calls and without")


def check_calls(rank: Rank, state: str, family: str) -> None:
    """Make all calls of a family in all moments of a training; if that changes it, find the calls that do."""
    model, options = _STATES[state](rank)
    # torch's wrappers raise beside it in the microbatch after a deferred one: findings/F403.py
    count = 1 if state == "tensor-parallel" else 2
    # One state alone: on the CPU older calls save the last of several in place of each: findings/F171.py.
    optimizer = optim.sgd() if family == "wrapped-optimizer-states" else optim.adamw()
    options |= {"optimizer": optimizer, "microbatches": count, "accumulation": Accumulation()}

    def make() -> Run:
        run = rank.run(models.copy_of(model), **({"units": model.units()} | options))
        # A wrapper around a module has a mode of its own.
        modes = {one.training for one in run.adapter.module.modules() if not hasattr(one, "check_is_root")}
        assert modes == {state != "frozen"}, f"sharding has changed whether modules are training: {modes}"
        return run

    mesh = options.get("mesh")
    batches = [
        [
            rank.batch(step, (4, 8 if "parallel" in state else DIM), microbatch=number, mesh=mesh)
            for number in range(count)
        ]
        for step in range(3)
    ]
    expected = train(rank, make(), batches, lambda *_: None)
    if (changed := change_of(rank, make, batches, expected, FAMILIES[family])) is None:
        return
    calls, text = FAMILIES[family], changed
    while len(calls) > 1:
        halves = (calls[: len(calls) // 2], calls[len(calls) // 2 :])
        changes = ((half, change_of(rank, make, batches, expected, half)) for half in halves)
        calls, text = next(((half, one) for half, one in changes if one is not None), ((), ""))
    culprit = f"{calls[0].name}: {text}" if calls else "calls of both halves together"
    raise AssertionError(f"calls that are to change nothing: {changed}\nby itself: {culprit}")
