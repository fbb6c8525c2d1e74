"""Chapter EXPERTS: parameters of one unit on several meshes, as the experts of a layer next to its router."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardproof.testing import Capability, Pair, Rank, contract, models, needs, states, world
from shardproof.testing.make import Accumulation, Adapter, Clip, Settings, everywhere, pair_by_units, run_by_units
from shardproof.testing.train import (
    Computations,
    Means,
    Mixture,
    Routing,
    batches,
    checked_steps,
    divide_experts,
    optim,
    recompute,
    train_and_check,
)

pytestmark = [needs("parameter_meshes", Capability.TENSOR_PARALLEL), world(4)]

SET = needs(Capability.UNIT_SETTINGS, "gradient_divide_factors")
ALONE = needs(Capability.SINGLE_RANK)
EXPERTS = ("layers.0.experts", "layers.1.experts")


@dataclasses.dataclass(frozen=True)
class ExpertMeshes:
    """The ranks that share a batch and the parameters of a :class:`Mixture`, and which of them share which expert."""

    dense: DeviceMesh  # all parameters but those of experts are sharded over it, and each of its ranks has its own rows
    experts: DeviceMesh  # the ranks that have the same experts, which are sharded over it
    options: dict[str, Any]

    @classmethod
    def over(cls, rank: Rank, *, ep: int = 2, tp: int = 1, copies: int = 1, skips: bool = False) -> ExpertMeshes:
        """Divide experts among ``ep`` ranks, and cut each over ``tp`` ranks, in so many replicas (collective)."""
        names = ("copy", "dp", "ep", "tp")
        mesh = rank.mesh((copies, rank.world_size // (copies * ep * tp), ep, tp), names, joined=names[1:3])
        dense, experts = mesh["dp_ep"], mesh["dp"]
        if copies > 1:
            dense, experts = mesh["copy", "dp_ep"], mesh["copy", "dp"]
        options: dict[str, Any] = {"mesh": dense}
        if ep > 1:
            over = mesh["ep", "tp"] if tp > 1 else mesh["ep"]
            options["prepare"] = functools.partial(divide_experts, mesh=over, skips=skips)
            options["parameter_meshes"] = dict.fromkeys(EXPERTS, experts)
        return cls(dense, experts, options)

    def pair(self, rank: Rank, model: Mixture | None = None, **options: Any) -> Pair:
        """A pair whose gradients are divided by the number of rows' holders, whatever their mesh (collective)."""
        pair = pair_by_units(rank, model or Mixture(), **(self.options | options))
        self.divide(pair, self.dense.size())
        return pair

    def divide(self, pair: Pair, factor: float) -> None:
        """Set by what the sums of all gradients are divided."""
        # Sums that are divided afterwards: torch's other reductions by a factor gloo does not have (F-39). A mesh of
        # one rank reduces nothing, and torch divides by its factor twice if told so (F-110).
        pair.adapter.change(
            Settings(gradient_divide_factor=factor, force_sum_reduction_for_comms=self.experts.size() > 1), recurse=True
        )

    def average(self, adapter: Adapter, factor: float | None = None) -> None:
        """Make averages over all holders of rows of gradients that were divided by the documented rule."""
        for name in adapter.named_parameters():
            ranks = (self.experts if ".experts." in name else self.dense).size()
            for gradient in adapter.own_gradients([name]):
                gradient.mul_((factor or ranks) / self.dense.size())

    def batches(self, rank: Rank, steps: int, **options: Any) -> Iterator[Any]:
        """Batches of unequally many rows, a rank's own."""
        return batches(
            rank, steps, (3 + 2 * self.dense.mesh.flatten().tolist().index(rank.index), 4), mesh=self.dense, **options
        )

    def counts(self, pair: Pair) -> collections.Counter[str]:
        """How often the last step gathered and reduced among which ranks, but for those of expert parallelism."""
        named = {tuple(self.experts.mesh.tolist()): "experts", tuple(self.dense.mesh.tolist()): "dense"}
        found = [one for one in pair.last_trace() if one.kind in ("all_gather", "reduce_scatter")]
        return collections.Counter(f"{one.phase} {one.kind} {named.get(one.group, one.group)}" for one in found)


@contract("EXPERTS-1")
@SET
@pytest.mark.parametrize(
    ("what", "reshard_after_forward"),
    [
        ("ragged", None),
        pytest.param("ragged", False, marks=needs(Capability.RESHARD_AFTER_FORWARD)),
        pytest.param("tied", True, marks=needs(Capability.RESHARD_AFTER_FORWARD)),
        ("one", None),
        pytest.param("by-columns", None, marks=needs("shard_dim")),
        pytest.param("own-units", True, marks=needs("unit_meshes", Capability.RESHARD_AFTER_FORWARD)),
    ],
)
def test_experts_next_to_their_router(rank: Rank, what: str, reshard_after_forward: bool | None) -> None:
    """Experts that are divided among two ranks, and sharded among two others, train in one unit with their router.

    Or they are units inside that unit; or they are cut by columns, as where there are fewer experts than ranks.
    """
    meshes = ExpertMeshes.over(rank)
    options: Any = meshes.options | {"reshard_after_forward": reshard_after_forward}
    routing: Any = what if what in ("tied", "one") else "ragged"
    model = Mixture(routing=routing)
    units = model.units()
    if what == "by-columns":
        options["shard_dim"] = second_of_three
    elif what == "own-units":
        units = [*([name] for name in EXPERTS), *units]
        options["unit_meshes"] = options.pop("parameter_meshes")
    pair = rank.pair(model, units=units, **options)
    meshes.divide(pair, meshes.dense.size())
    train_and_check(pair, meshes.batches(rank, 3), set_to_none="even")


def second_of_three(parameter: nn.Parameter) -> int | None:
    """The second dimension of a parameter of three."""
    return 1 if parameter.ndim == 3 else None


@contract("EXPERTS-2")
@needs(Capability.COUNTED_UNITS, Capability.RESHARD_AFTER_FORWARD, Capability.ROOT_RESHARD)
def test_collectives_of_each_mesh(rank: Rank) -> None:
    """A unit is gathered by one collective on each of its meshes, and reduced by one, among the ranks of the mesh."""
    meshes = ExpertMeshes.over(rank)
    pair = pair_by_units(rank, Mixture(), reshard_after_forward=True, after_backward=meshes.average, **meshes.options)
    steps = ("forward all_gather", "backward all_gather", "backward reduce_scatter")
    expected = {f"{step} {kind}": count for step in steps for kind, count in (("dense", 3), ("experts", 2))}
    for _ in checked_steps(pair, meshes.batches(rank, 2)):
        assert meshes.counts(pair) == expected, f"{meshes.counts(pair)} instead of {expected}"


@contract("EXPERTS-3")
@pytest.mark.parametrize(
    ("factor", "copies"),
    [
        pytest.param(None, 1, id="own"),
        pytest.param(1, 1, id="one", marks=SET),
        pytest.param(4, 1, id="ranks", marks=SET),
        pytest.param(None, 2, id="replicas", marks=[needs(Capability.HYBRID), ALONE]),
    ],
)
def test_factors(rank: Rank, factor: int | None, copies: int) -> None:
    """An average is one over the ranks of a parameter's own mesh; a factor divides the sums of all meshes."""
    meshes = ExpertMeshes.over(rank, copies=copies)
    options: Any = meshes.options | {"after_backward": functools.partial(meshes.average, factor=factor)}
    pair = pair_by_units(rank, Mixture(), baseline="ddp" if copies == 1 else "replicated", **options)
    if factor is not None:
        meshes.divide(pair, factor)
    train_and_check(pair, meshes.batches(rank, 2))


@contract("EXPERTS-4")
@SET
@needs(Capability.CLIPPING, "clip.norm_type")
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_total_norm(rank: Rank, norm_type: float) -> None:
    """The total norm is that of the gradients on all meshes together, by which all of them are scaled."""
    meshes = ExpertMeshes.over(rank)
    pair = meshes.pair(rank, clip=Clip(max_norm=1e-3, norm_type=norm_type))
    train_and_check(pair, meshes.batches(rank, 2))


@contract("EXPERTS-5")
@SET
@pytest.mark.parametrize(
    ("routing", "skips"),
    [
        ("parted", False),
        *(pytest.param(one, True, marks=needs(Capability.RANKS_DIFFER)) for one in ("parted", "starved")),
    ],
)
def test_experts_without_tokens(rank: Rank, routing: Routing, skips: bool) -> None:
    """Experts without tokens on some of their holders, or on all, have the gradients of the others, or zeros.

    All holders step: decay and momentum move what has no gradient on this rank. With ``skips`` such a rank leaves its
    experts out, so that autograd computes no gradient there.
    """
    meshes = ExpertMeshes.over(rank, skips=skips)
    options: Any = {"ranks_differ": skips, "optimizer": optim.of_kind("nesterov", "for-loop")}
    pair = meshes.pair(rank, Mixture(routing=routing), **options)
    # The ranks of one expert-parallel group have rows of the first kind alone, which do not reach the last experts.
    sign = 1 if meshes.experts.get_local_rank() == 0 else -1
    train_and_check(pair, (sign * batch.abs() for batch in meshes.batches(rank, 3)))


@contract("EXPERTS-5")
@needs(Capability.ADAM, Capability.RANKS_DIFFER)
def test_equal_steps_of_all_holders(rank: Rank) -> None:
    """All holders of an expert have made the same number of steps of Adam, with tokens or without."""
    meshes = ExpertMeshes.over(rank, skips=True)
    run = run_by_units(rank, Mixture(routing="parted"), ranks_differ=True, optimizer=optim.adamw(), **meshes.options)
    sign = 1 if meshes.experts.get_local_rank() == 0 else -1
    for batch in meshes.batches(rank, 2):
        run.step([(sign * batch.abs(),)], loss=models.mean_square)
    state: Any = run.adapter.optimizer and run.adapter.optimizer.state
    steps = {name: float(state[one]["step"]) for name, one in run.adapter.held_parameters().items() if one in state}
    everyone = rank.exchange(steps)
    expected = dict.fromkeys(run.adapter.held_parameters(), 2.0)
    assert everyone == [expected] * rank.world_size, f"steps by rank: {everyone}"


@contract("EXPERTS-6")
@world(2)
@ALONE
@pytest.mark.parametrize("factor", [None, pytest.param(2, marks=SET)])
def test_as_many_parts_as_ranks(rank: Rank, factor: int | None) -> None:
    """Each rank has experts of its own, which nothing gathers or reduces: their gradients are sums over all tokens."""
    meshes = ExpertMeshes.over(rank, ep=rank.world_size)
    average = functools.partial(meshes.average, factor=factor)
    pair = pair_by_units(rank, Mixture(), after_backward=average, **meshes.options)
    if factor is not None:
        meshes.divide(pair, factor)
    for _ in checked_steps(pair, meshes.batches(rank, 3), set_to_none="even"):
        found = {name.rpartition(" ")[2] for name in meshes.counts(pair)}
        assert found == {"dense"}, f"gathered or reduced among {found}"


@contract("EXPERTS-7")
@world(4, 8)
@SET
@ALONE
def test_tensor_parallel_experts(rank: Rank) -> None:
    """Experts that are divided among two ranks and each cut over two others, sharded over one rank or over two."""
    meshes = ExpertMeshes.over(rank, tp=2)
    model = Mixture()
    full = {name: value.detach().clone().to(rank.device) for name, value in model.named_parameters()}
    pair = meshes.pair(rank, model)
    for name, parameter in pair.adapter.named_parameters().items():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else full[name]
        assert torch.equal(whole, full[name]), f"the shards of {name} are put together in another order"
    train_and_check(pair, meshes.batches(rank, 3))


@contract("EXPERTS-8")
@SET
@needs(Capability.RECOMPUTATION, Capability.RECOMPUTES_GATHERED, Capability.COUNTED_UNITS)
@pytest.mark.parametrize("means", ["hooks", "reentrant-call"])
def test_recomputed(rank: Rank, means: Means) -> None:
    """Layers that backward recomputes, with their exchange of tokens, train as others do, and are gathered once."""
    meshes, computations = ExpertMeshes.over(rank), Computations(inside="router")

    def prepare(plain: nn.Module) -> nn.Module:
        computations.watch(plain)
        return recompute(meshes.options["prepare"](plain), means)

    pair = meshes.pair(rank, prepare=prepare)
    for batch in meshes.batches(rank, 2):
        pair.step(batch, before_loss=computations.before_loss)
        computations.check()
        pair.check()
        gathered = {name: count for name, count in meshes.counts(pair).items() if "backward all_gather" in name}
        expected = {"backward all_gather dense": 2, "backward all_gather experts": 2}
        assert gathered == expected, f"{gathered} instead of {expected}"


@contract("EXPERTS-8")
@SET
@needs(Capability.DEFERRED_REDUCTION)
@pytest.mark.parametrize(
    "accumulation",
    [
        None,
        Accumulation(),
        pytest.param(Accumulation(reshard_after_backward=False), marks=needs("accumulation.reshard_after_backward")),
    ],
    ids=["none", "all", "kept"],
)
def test_microbatches(rank: Rank, accumulation: Accumulation | None) -> None:
    """Gradients of several microbatches add up on all meshes, reduced each time or by the last backward alone."""
    meshes = ExpertMeshes.over(rank)
    pair = meshes.pair(rank, microbatches=3, accumulation=accumulation)
    for _ in checked_steps(pair, meshes.batches(rank, 2, microbatches=3)):
        each = (3, 2) if accumulation else (9, 6)
        found = tuple(meshes.counts(pair)[f"backward reduce_scatter {kind}"] for kind in ("dense", "experts"))
        assert found == each, f"(dense, experts) are reduced {found} times instead of {each}"


@contract("EXPERTS-9")
@SET
def test_frozen_router(rank: Rank) -> None:
    """A frozen router gets no gradient and is not reduced, while the experts of its unit train; later it trains too."""
    meshes, model = ExpertMeshes.over(rank), Mixture()
    for layer in model.layers:
        layer.get_submodule("router").requires_grad_(False)
    pair = meshes.pair(rank, model, baseline="replicated")
    for step, batch in enumerate(meshes.batches(rank, 4)):
        if step == 2:
            for parameter in (one for named in everywhere(pair) for one in named.values()):
                parameter.requires_grad_()
        pair.checked_step(batch)
        reduced = {kind: meshes.counts(pair)[f"backward reduce_scatter {kind}"] for kind in ("dense", "experts")}
        expected = {"dense": 1 if step < 2 else 3, "experts": 2}
        assert reduced == expected, f"reduced {reduced} times instead of {expected} in step {step}"


@contract("EXPERTS-10")
@needs(
    Capability.ADAM, Capability.DISTRIBUTED_CHECKPOINT, Capability.TENSOR_PARALLEL_CHECKPOINT, Capability.SINGLE_RANK
)
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1)])
def test_onto_another_degree(rank: Rank, before: int, after: int) -> None:
    """A checkpoint of experts that are divided among so many ranks loads where they are divided among others."""
    saved, loaded = (run_on(rank, degree, number) for number, degree in enumerate((before, after)))
    expected = states.read(rank, saved)
    states.check_held(rank, saved, expected)
    states.save(saved, rank.tmp_path / "checkpoint")
    states.load(loaded, rank.tmp_path / "checkpoint")
    states.check_same(rank, states.read(rank, loaded), expected)
    states.check_held(rank, loaded, expected)


def run_on(rank: Rank, ep: int, number: int) -> Any:
    """A run that has made one step, of other values for each number (collective)."""
    torch.manual_seed(rank.seeds.init + number)
    meshes = ExpertMeshes.over(rank, ep=ep)
    run = run_by_units(rank, Mixture(), optimizer=optim.adamw(), **meshes.options)
    run.step([(next(meshes.batches(rank, 1)),)], loss=models.mean_square)
    return run


@contract("EXPERTS-11")
@needs(Capability.MANUAL_RESHARD, Capability.REGISTERED_STATE)
@pytest.mark.parametrize("method", ["forward", pytest.param("mix", marks=needs(Capability.FORWARD_METHOD))])
def test_calls_on_a_unit(rank: Rank, method: str) -> None:
    """`unshard()`, `reshard()` and registered methods gather and free the parameters of a unit on all its meshes."""
    meshes = ExpertMeshes.over(rank)
    pair = meshes.pair(rank, Mixture() if method == "forward" else ByMethod())
    if method != "forward":
        for name in ("layers.0", "layers.1"):
            pair.adapter.register_forward_method(name, method)
    for _ in checked_steps(pair, meshes.batches(rank, 2)):
        pair.adapter.unshard(waits=True)
        check_elements(pair, lambda name: 2 if ".experts." in name else 1, "after unshard()")
        pair.adapter.reshard()
        check_elements(pair, lambda name: 4, "after reshard()")


class ByMethod(Mixture):
    """Calls a method of its layers in place of forward."""

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.mix(x)  # type: ignore[operator]
        return x


def check_elements(pair: Pair, parts: Callable[[str], int], when: str) -> None:
    """Of each registered parameter this rank has one of so many parts."""
    found = {name: piece.tensor.numel() for name, piece in pair.adapter.registered().items()}
    expected = {name: value.numel() // parts(name) for name, value in Mixture().named_parameters()}
    wrong = {name: found[name] for name in expected if found[name] != expected[name]}
    assert not wrong, f"{when} other numbers of elements: {wrong}"
