"""Chapter BUFFERS: tensors of a model that are not trained."""

import pytest
import torch
from torch import nn

from shardproof.testing import Capability, Hardware, Rank, contract, models, needs, world
from shardproof.testing.axes import KEEPS
from shardproof.testing.casts import check_statistics, run_and_replica
from shardproof.testing.compare import uncut
from shardproof.testing.train import mixed, optim

pytestmark = world(2)

SHAPE = (7, 5)
NAMES = ("replicate", "shard")
UNITS = (("inner",), ("norm",))


@contract("BUFFERS-1")
@pytest.mark.parametrize("momentum", [0.1, None], ids=["moving", "cumulative"])
@KEEPS
def test_running_statistics(rank: Rank, reshard_after_forward: bool | None, momentum: float | None) -> None:
    """Running statistics are each rank's own, within units and between them, and evaluation uses them."""
    model = mixed.Normed(*SHAPE, momentum=momentum)
    check(rank, model, reshard_after_forward=reshard_after_forward)


@contract("BUFFERS-1")
@world(4)
@needs(Capability.HYBRID)
def test_running_statistics_of_replicas(rank: Rank) -> None:
    """Replicas share their parameters and not their running statistics."""
    check(rank, mixed.Normed(*SHAPE), mesh=rank.mesh((2, 2), NAMES), steps=2)


@contract("BUFFERS-1")
@world(2)  # the order of a sum of four is not the baseline's
@needs(Capability.HYBRID, Capability.SINGLE_RANK)
def test_running_statistics_of_replicas_of_one(rank: Rank) -> None:
    """Nor do replicas of one rank."""
    check(rank, mixed.Normed(*SHAPE), mesh=rank.mesh((2, 1), NAMES), steps=2)


@contract("BUFFERS-1")
@needs(Hardware.ACCELERATOR)  # torch has it on accelerators only
def test_statistics_of_all_ranks(rank: Rank) -> None:
    """A synchronized batch norm within a unit, or of the root, takes the statistics of all ranks."""
    check(rank, nn.SyncBatchNorm.convert_sync_batchnorm(mixed.Normed(*SHAPE)))


@contract("BUFFERS-2")
@needs("sync_module_states", Capability.COUNTED_UNITS)
def test_syncing_the_root_takes_buffers_of_the_first_rank(rank: Rank) -> None:
    """If the root alone is to take the first rank's values, its units' buffers take those of the first rank too."""
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 7)).to(rank.device)
    with torch.no_grad():
        for number, tensor in enumerate([*model.buffers(), *model[2].parameters()], start=1):
            tensor.fill_(10 * number + rank.index)
    first = rank.exchange({name: value.detach().cpu() for name, value in model.state_dict().items()})[0]
    names = [name for name, _ in model.named_buffers()]
    run = rank.run(model, units=[["0"], ["1"]], sync_module_states="root")
    buffers = {name: run.original_module("1").get_buffer(name.partition(".")[2]) for name in names}
    found = {name: piece.tensor for name, piece in run.adapter.parameters().items()} | buffers
    cuts = {name: piece.cut for name, piece in run.adapter.parameters().items()}
    wrong = [name for name, one in found.items() if not torch.equal(one.cpu(), cuts.get(name, uncut)(first[name]))]
    by_rank = rank.exchange(wrong)
    assert not any(by_rank), f"not those of the first rank: {by_rank}"


@contract("BUFFERS-3")
@needs(Capability.CAST_AFTER_INIT, Capability.DISTRIBUTED_CHECKPOINT)
def test_buffers_of_a_model_that_is_cast(rank: Rank) -> None:
    """A model that is cast after sharding saves its buffers in the dtypes that they have then, bit for bit."""
    model = mixed.Normed(*SHAPE)
    names = [name for name, _ in model.named_buffers()]
    run = rank.run(model, units=UNITS, optimizer=None)
    run.adapter.module.double()
    run.forward_backward((rank.batch(0, SHAPE).double(),), loss=models.ramp_square)
    saved = run.adapter.checkpoint()["model"]
    for name in names:
        module, _, key = name.rpartition(".")
        held = run.original_module(module).get_buffer(key)
        found = saved[name]
        assert found.dtype == held.dtype, f"{name} is saved in {found.dtype}, and the model has it in {held.dtype}"
        assert torch.equal(found, held), f"{name} is saved with other values than the model has"


def check(rank: Rank, model: nn.Module, *, steps: int = 3, **options: object) -> None:
    """Train and evaluate a :class:`mixed.Normed` and full copies, and compare all buffers after each step."""
    run, replica = run_and_replica(rank, model, units=UNITS, optimizer=optim.sgd(), **options)
    for step in range(steps):
        training, evaluation = ((rank.batch(step, SHAPE, microbatch=number),) for number in range(2))
        check_statistics(rank, run, replica, training, evaluation, number=step, loss=models.ramp_square)
