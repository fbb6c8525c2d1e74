"""The doctor's lines about a loop are true of it: reasons, counts, samplers, and who reads the same.

Each row is close to a script of a blind trial, of which a line was untrue or of no use.
"""

import functools
import inspect
import pathlib
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from shardproof.harness.parity.rank import Rank
from shardproof.harness.training import (
    buffers,
    comparing,
    freezing,
    invariants,
    judge,
    norms,
    reduction,
    updates,
)
from shardproof.harness.training.doctor import doctor
from shardproof.harness.training.findings import next_lines
from shardproof.testing import world
from tests.harness.test_doctor_loops import STEPS, Data, perceptron, reduces_by_hand, sgd, train


def told(loop, rank: Rank) -> tuple[list[str], str]:
    """The findings and notes of a loop as they are printed, and the summary."""
    with doctor(on_finding="collect", patience=20) as watching:
        loop(rank)
    return [one.render() for one in watching.findings], watching.summary()


# Parts of one model, by hand


class Reduced(torch.autograd.Function):
    """Sums over ranks what passes, in the forward or in the backward."""

    @staticmethod
    def forward(ctx, values, is_in_backward):
        ctx.is_in_backward = is_in_backward
        values = values.clone()
        if not is_in_backward:
            dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.is_in_backward:
            dist.all_reduce(gradient)
        return gradient, None


class Divided(nn.Module):
    """Columns and then rows of two layers on each rank, between layers of which each rank has a copy."""

    def __init__(self, rank, *, dropout=0.0, sums=True, size=2):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, (up, down) = nn.Linear(6, 6), nn.Linear(6, 3), (torch.randn(8, 6), torch.randn(6, 8))
        self.up, self.down = (nn.Parameter(one.chunk(size, dim)[rank % size]) for dim, one in ((0, up), (1, down)))
        self.dropout, self.sums = dropout, sums

    def forward(self, inputs):
        values = self.first(inputs)
        values = Reduced.apply(values, True) if self.sums else values
        values = Reduced.apply(F.linear(F.linear(values, self.up).relu(), self.down), False)
        return self.last(F.dropout(values, self.dropout))


def divided(rank: Rank, *, seed=0, **options):
    model = Divided(rank.index, **options)
    torch.manual_seed(seed)
    train(model, sgd(model), Data(0))


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_of_ranks_that_compute_parts_of_one_model_nothing_is_said_of_their_data(rank: Rank, dropout: float) -> None:
    found, _ = told(functools.partial(divided, dropout=dropout), rank)
    assert [one.splitlines()[0].rpartition(": ")[2] for one in found] == [
        "parameters differ between ranks from the start, and no gradient of theirs is reduced over all [D11, S2]"
    ]


@pytest.mark.sampled
@world(2)
def test_parts_of_one_model_whose_copies_drift_have_one_line_about_their_data(rank: Rank) -> None:
    found, _ = told(functools.partial(divided, sums=False), rank)
    (note,) = [one.splitlines() for one in found if "D9" in one]
    assert note[0] == "note: step 0: ranks with parameters of their own read the same data [D9, S11]"
    assert len(note) == 2 and note[1].startswith(
        "  ranks 0-1 read the same data in the step, as ranks must that compute parts of one model: 'up', 'down' differ"
    )
    assert any("gradients are not reduced [D11, S2]" in one and "'first.weight'" in one for one in found)


@pytest.mark.sampled
@world(2)
def test_values_that_were_not_broadcast_are_no_parts_where_they_are_reduced(rank: Rank) -> None:
    def loop(rank):
        model = perceptron()
        with torch.no_grad():
            model[0].weight += rank.index
        train(model, sgd(model), Data(0), before=lambda step: reduces_by_hand(model))

    found, _ = told(loop, rank)
    assert any(
        "ranks read the same data [D9, S11]" in one and "'0.weight' differ from the start" in one for one in found
    )


@pytest.mark.sampled
@world(4)
def test_copies_of_parts_that_read_the_same_are_noted_with_no_word_of_actions(rank: Rank) -> None:
    """Ranks 0 and 2 hold the same part, so that they are to read different data."""

    def loop(rank):
        groups = [[dist.new_group(ranks) for ranks in sets] for sets in ([(0, 1), (2, 3)], [(0, 2), (1, 3)])]
        of_model, of_data = groups[0][rank.index // 2], groups[1][rank.index % 2]
        model = Divided(rank.index)
        sums = dist.all_reduce

        def before(step):
            for one in model.parameters():
                sums(one.grad.div_(2), group=of_data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", lambda values: sums(values, group=of_model))
            train(model, sgd(model), Data(0), before=before)

    (note,) = [one for one in told(loop, rank)[0] if "D9" in one]
    assert "ranks read the same data [D9, S11]" in note and "the 4 ranks (ranks 0-3)" in note
    assert "'up', 'down' differ from the start" in note and "actions" not in note


@pytest.mark.sampled
@world(4)
@pytest.mark.parametrize("is_same", [True, False])
def test_data_parallel_ranks_are_counted_and_not_all_ranks(rank: Rank, is_same: bool) -> None:
    def loop(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(perceptron(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        train(model, sgd(model), Data(0 if is_same else mesh.get_local_rank("dp")))

    found = [one for one in told(loop, rank)[0] if "D9" in one]
    said = "the 2 data-parallel ranks of dp, which are ranks 0-1 and ranks 2-3 (tp), read the same data in the step"
    assert len(found) == is_same and all(said in one for one in found)


# Optimizers in backward, and loss scalers


def steps_in_backward(rank: Rank):
    model, data = perceptron(), Data(rank.index)
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}

    def hook(parameter):
        dist.all_reduce(parameter.grad.div_(2))
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(hook)
    for inputs, labels in data.batches():
        F.cross_entropy(model(inputs), labels).backward()


@pytest.mark.sampled
@world(2)
def test_gradients_that_an_optimizer_in_backward_has_consumed_are_named_as_such(rank: Rank) -> None:
    found, summary = told(steps_in_backward, rank)
    assert not found and "not judged, as an optimizer steps within backward and consumes gradients there" in summary
    assert "no forward of a watched module" not in summary


def scaled(rank: Rank, *, is_each, clips, unscales=True):
    """Three microbatches a step; after each, or the last, the scaler unscales, gradients may be clipped, it updates."""
    model, data = DDP(perceptron()), Data(rank.index)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(3 * STEPS):
        inputs, labels = data.batch()
        is_last = number % 3 == 2
        model.require_backward_grad_sync = is_last
        scaler.scale(F.cross_entropy(model(inputs), labels) / 3).backward()
        if unscales and (is_each or is_last):
            scaler.unscale_(optimizer)
        if clips and (is_each or is_last):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if is_last:
            scaler.step(optimizer)
            optimizer.zero_grad()
        if is_last or (unscales and is_each):
            scaler.update()


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("is_each", [False, True])
def test_a_scaler_that_is_updated_without_a_step_drops_no_microbatch(rank: Rank, is_each: bool, clips: bool) -> None:
    """One that unscales after each microbatch weights them apart, and clips what is still to be unscaled."""
    found, summary = told(functools.partial(scaled, is_each=is_each, clips=clips), rank)
    assert "6 different microbatches, 3 a step on a rank" in summary
    assert ("every gradient is the mean over 2 ranks (c = 0.5 x the sum of 6 parts" in summary) != is_each
    assert [re.search(r"\[D\d+", one)[0] for one in found] == ["[D24"] * is_each, found


@pytest.mark.sampled
@world(2)
def test_gradients_that_are_clipped_while_they_are_scaled_name_that(rank: Rank) -> None:
    """Each microbatch is clipped, and the scaler unscales all of them when it steps."""
    found, _ = told(functools.partial(scaled, is_each=True, clips=True, unscales=False), rank)
    of_gradients = [one for one in found if "[D11" in one]
    seen = "seen: gradients were clipped, and the loss scaler unscaled them after that"
    assert of_gradients and all(seen in one and "next: record" not in one for one in of_gradients), found


def test_the_recordings_to_make_have_their_condition_next_to_them():
    text = " ".join(next_lines(2))
    assert "the rows of a step must be the same in both" in text and "by rank are not the same" in text


# Loaders, and data that are fixed


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(64, 6, generator=torch.Generator().manual_seed(3)))


def loads(rank: Rank, *, of):
    """The loop makes its loader where it begins, and keeps what iterates over it alone; inputs are not the batch."""
    model = DDP(perceptron())
    optimizer = sgd(model)
    rows = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(3)))
    sampler = DistributedSampler(rows, *((2, rank.index) if of == "ranks" else (1, 0)))
    for step, batch in enumerate(DataLoader(Stream(), 8) if of == "stream" else DataLoader(rows, 8, sampler=sampler)):
        if step == STEPS:
            break
        inputs = (batch if of == "stream" else batch[0]).clamp(min=-1)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


#: By what a loop loads, the line of its finding about the loader.
LOADED = {
    "one": "seen: DistributedSampler(num_replicas=1, rank=0) on each rank",
    "stream": "seen: the IterableDataset Stream on each rank, without a sampler",
    "ranks": "",
}


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("of", LOADED)
def test_the_sampler_of_a_loader_that_nothing_keeps_is_seen(rank: Rank, of: str) -> None:
    found, _ = told(functools.partial(loads, of=of), rank)
    assert len(found) == bool(LOADED[of])
    assert all("ranks read the same data [D9, S11]" in one and LOADED[of] in one for one in found)


def prompted(rank: Rank, *, changes=False, dropout=0.0):
    """Each rank draws its own actions for prompts that are the same on all ranks, and may be in each step."""
    torch.manual_seed(0)
    model, data = DDP(nn.Sequential(perceptron(), nn.Dropout(dropout))), Data(rank.index)
    torch.manual_seed(rank.index)
    optimizer, prompts = sgd(model), torch.Generator().manual_seed(7)
    inputs = torch.randn(8, 6, generator=prompts)
    for _ in range(STEPS):
        inputs = torch.randn(8, 6, generator=prompts) if changes else inputs
        F.cross_entropy(model(inputs), torch.randint(3, (8,), generator=data.generator)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_fixed_data_of_all_ranks_are_one_note_of_one_line(rank: Rank, dropout: float) -> None:
    (note,), _ = told(functools.partial(prompted, dropout=dropout), rank)
    head, line = note.splitlines()
    assert head == "note: step 0: ranks and steps read the same data [D9, S11]"
    assert "the 2 ranks read the same microbatches in all of the steps 0-2" in line
    assert ("by dropout" in line) == bool(dropout)


@pytest.mark.sampled
@world(2)
def test_data_of_all_ranks_that_change_are_noted_as_before(rank: Rank) -> None:
    (note,), _ = told(functools.partial(prompted, changes=True), rank)
    assert note.startswith("note: step 0: ranks read the same data [D9, S11]") and "its own actions" in note


@pytest.mark.sampled
@world(2)
def test_a_note_that_waits_is_reported_if_the_loop_fails(rank: Rank) -> None:
    watching = doctor(on_finding="collect", patience=20)
    with pytest.raises(ZeroDivisionError), watching:
        torch.manual_seed(0)
        model, data = DDP(perceptron()), Data(rank.index)
        optimizer = sgd(model)
        for step in range(STEPS):
            F.cross_entropy(model(torch.ones(8, 6)), data.batch()[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
            1 / (1 - step)
    assert [one.title for one in watching.findings] == ["ranks read the same data"]


def test_no_line_of_the_doctor_guesses():
    """What is printed was seen, or is what to do; in check and compare as well."""
    modules = (invariants, norms, updates, buffers, freezing, reduction, judge, comparing)
    sources = [pathlib.Path(inspect.getsourcefile(one)).read_text() for one in modules]
    assert not [line.strip() for text in sources for line in text.splitlines() if re.search("as (when|with) ", line)]
