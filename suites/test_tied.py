"""Chapter TIED: a parameter that several modules of one unit share."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.testing import Capability, Pair, Rank, contract, models, needs, world
from shardproof.testing.axes import RESHARD, RESHARD_ROOT, with_first
from shardproof.testing.make import Clip, pair_by_units
from shardproof.testing.train import Computations, batches, checked_steps, recompute, ties, train_and_check

pytestmark = [needs(Capability.TIED_PARAMETERS), world(2)]

DIM = 9
RECOMPUTED = needs(Capability.RECOMPUTATION)
#: Recomputed or not, what happens after forward.
WAYS = pytest.mark.parametrize(
    ("recomputes", "reshard_after_forward"),
    [
        *with_first(False, RESHARD[:3]),
        *(pytest.param(True, *item.values, marks=[*item.marks, RECOMPUTED]) for item in RESHARD[1:3]),
    ],
)


@contract("TIED-1")
@world(2, 4)
@WAYS
def test_tied_embedding(rank: Rank, recomputes: bool, reshard_after_forward: bool | None) -> None:
    """An output projection that is the embedding sums both gradients and is one parameter of the root's own unit."""
    config = models.TransformerConfig(layers=3, vocabulary=4 * rank.world_size + 1, is_tied=True)
    model = models.Transformer(config)
    computations = Computations(inside="w1")
    prepare = (lambda plain: recompute(computations.watch(plain), "hooks")) if recomputes else None
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward, prepare=prepare)
    for step in range(3):
        check_names(pair, ["output.weight"])
        tokens = rank.tokens(step, (2, config.length), vocabulary=config.vocabulary)
        pair.step(tokens, before_loss=computations.before_loss, set_to_none=step % 2 == 0)
        if recomputes:
            computations.check()
        pair.check()


@contract("TIED-1", "TIED-2")
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
@pytest.mark.parametrize("modules", [2, 1], ids=["of-two-modules", "of-one-module"])
def test_tied_inside_of_units(rank: Rank, modules: int, reshard_after_forward: bool | None) -> None:
    """A unit that is freed and gathered again has its shared parameter registered in both places, with one state."""
    model = ties.TiedStack(DIM, layer=ties.TiedMLP if modules == 2 else ties.TwoNames)
    second = "second.weight" if modules == 2 else "second"
    pair = rank.pair(model, units=model.units(), reshard_after_forward=reshard_after_forward)
    for step in range(3):
        check_names(pair, [f"layers.{index}.{second}" for index in range(len(model.layers))])
        pair.checked_step(rank.batch(step, (4, DIM)), set_to_none=step % 2 == 0)
        check_states(pair)


@contract("TIED-2")
@needs(Capability.DTENSOR_PARAMETERS, Capability.REGISTERED_STATE)
def test_tied_after_assigning(rank: Rank) -> None:
    """A load that assigns a shared parameter, in one place or in both, leaves it shared: an optimizer has it once."""
    run, batch = rank.run(ties.TiedMLP(DIM)), (rank.batch(0, (4, DIM)),)
    run.evaluate(batch)
    whole, expected = run.original_module(""), list(run.adapter.named_parameters())
    for module in (run.original_module("first"), whole):
        module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
        found = list(run.adapter.named_parameters())
        assert found == expected, f"after the load the parameters are {found} instead of {expected}"


@contract("TIED-2")
@needs(Capability.DTENSOR_PARAMETERS, Capability.REGISTERED_STATE)
def test_copies_of_states(rank: Rank) -> None:
    """A deep copy of a state dict copies a shared parameter too, under each of its names."""
    run = rank.run(nn.Sequential(nn.Linear(DIM, DIM), ties.TiedMLP(DIM)))  # the shared one is not at the start
    state = run.original_module("").state_dict()
    copied = copy.deepcopy(state)
    missing = {"1.first.weight", "1.second.weight"} - copied.keys()
    assert not missing, f"the state dict lacks {', '.join(sorted(missing))}"
    for name, value in state.items():
        assert isinstance(value, DTensor)
        assert isinstance(copied[name], DTensor), f"the copy of {name} is a {type(copied[name]).__name__}"
        assert torch.equal(copied[name].to_local(), value.to_local()), f"the copy of {name} has other values"
        is_own = copied[name].to_local().data_ptr() != value.to_local().data_ptr()
        assert is_own, f"the copy of {name} shares memory with the original"


@contract("TIED-1")
@needs("shard_dim")  # a unit calls the shard-dimension function when it takes a parameter
def test_new_parameters_at_freed_addresses(rank: Rank) -> None:
    """New parameters at the addresses of freed ones are not taken for shared ones."""
    layers: list[nn.Module] = []

    def keep(plain: nn.Sequential) -> nn.Sequential:
        layers.extend(plain)
        return plain

    def make_next(parameter: nn.Parameter) -> None:
        (number,) = [n for n, layer in enumerate(layers) if any(parameter is one for one in layer.parameters())]
        if parameter.ndim == 2 and number + 1 < len(layers):
            following = layers[number + 1]
            for name, value in list(following.named_parameters()):
                setattr(following, name, nn.Parameter(value.detach().clone()))

    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(12)))
    units = [[str(number)] for number in range(len(model))]
    pair = rank.pair(model, units=units, prepare=keep, shard_dim=make_next)
    pair.checked_step(rank.batch(0, (4, DIM)))


@contract("TIED-2")
@needs(Capability.CLIP_BY_CALL)
def test_tied_gradients_count_once(rank: Rank) -> None:
    """The total norm counts the gradient of a shared parameter, the sum of both, once."""
    pair = pair_by_units(rank, ties.TiedStack(DIM), clip=Clip(1e-3))
    train_and_check(pair, batches(rank, 3, (4, DIM)))


@contract("TIED-3")
@needs(Capability.COUNTED_UNITS)
@pytest.mark.parametrize("reshard_after_forward", RESHARD_ROOT[:3])
def test_tied_parameters_move_once(rank: Rank, reshard_after_forward: bool | None) -> None:
    """The collectives of a unit have the bytes of its parameters, the shared one once."""
    pair = pair_by_units(rank, ties.TiedStack(DIM), reshard_after_forward=reshard_after_forward)
    units = len(pair.units)
    again = {None: units - 1, False: 0}.get(reshard_after_forward, units)
    for _ in checked_steps(pair, batches(rank, 2, (4, DIM))):
        pair.check_counts("forward", all_gather=units)
        pair.check_counts("backward", all_gather=again, reduce_scatter=units)
        pair.check_bytes()


def check_names(pair: Pair, others: list[str]) -> None:
    """A shared parameter is registered under the first of its names, and all its places have one object."""
    shown = pair.adapter.named_parameters()
    found = [name for name in others if name in shown]
    assert not found, f"registered again besides the first name of the same parameter: {found}"


def check_states(pair: Pair) -> None:
    """The optimizer has no parameter, and no state, twice (its groups may have fewer, where a rank has no element)."""
    optimizer = pair.adapter.optimizer
    if optimizer is None:
        return  # an engine owns the step
    known = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert len(known) == len(set(known)), "the optimizer has a parameter twice"
    distinct = len(list(pair.oracle.model.parameters()))
    assert len(optimizer.state) <= distinct, f"{len(optimizer.state)} states for {distinct} parameters"
