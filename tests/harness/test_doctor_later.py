"""Loops that go wrong after the watched steps, beside healthy ones that do alike: the doctor looks at states again."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import DataLoader

from shardproof.harness.parity.rank import Rank
from shardproof.harness.training.doctor import doctor
from shardproof.testing import world
from tests.harness.test_doctor_loops import Data, adamw, perceptron, sgd, titles

#: Looks are at step 4, at step 8 and at the end.
STEPS = 10

APART = "replicas differ in a later step [D1, S9]"
LOCAL = "gradients of replicas differ in a later step [D2, S2]"
STATES = "optimizer states of replicas differ in a later step [D3, S9]"
UNLIKE = "ranks step by different settings of the optimizer [D18]"
MOVED = "frozen parameters move between steps [D19]"
BUFFERS = "buffers differ between ranks [D20, S9]"
IDLE = "a scheduler steps an optimizer that does not step [D25]"
RESTORED = "a restored state is the current one [D26]"
PACED = "a scheduler is stepped several times for each step [D27]"
EVALUATES = "modules are in evaluation mode in a later step [D28]"
TRAINS = "modules are in training mode in a later step [D28]"
DRAWN = "random generators of ranks differ in a later step [D28, S9]"
LEVELLED = "groups of different learning rates step by one [D28]"


def train(model, optimizer, data, *, before=None, after=None, microbatches=1, steps=STEPS):
    """The plain loop; calls are given the step's number, ``before`` each backward with that of the microbatch too."""
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(microbatches):
            inputs, labels = data.batch()
            with (before(step, number) if before is not None else None) or contextlib.nullcontext():
                (F.cross_entropy(model(inputs), labels) / microbatches).backward()
        optimizer.step()
        if after is not None:
            after(step)


def replicate_and_shard(model):
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    return model


# Replicas


def written(data, write, *, at=5, wrap=DDP, make=adamw, **options):
    """After a step something writes parameters."""
    model = wrap(perceptron())
    optimizer = make(model)

    def after(step):
        if step == at:
            with torch.no_grad():
                write(data, model, optimizer)

    train(model, optimizer, data, after=after, **options)


def local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def mask(data, model, optimizer):
    """A mask that each rank draws from its own data's generator."""
    for one in model.parameters():
        local(one).mul_(torch.rand(local(one).shape, generator=data.generator) < 0.8)


def mask_alike(data, model, optimizer):
    made = torch.Generator().manual_seed(5)
    for one in model.parameters():
        local(one).mul_(torch.rand(local(one).shape, generator=made) < 0.8)


def load_on_one(data, model, optimizer):
    """Rank 1 goes back to another checkpoint than rank 0."""
    if data.rank == 1:
        model.load_state_dict({name: one * 0.5 for name, one in model.state_dict().items()})


def load(data, model, optimizer):
    model.load_state_dict({name: one * 0.5 for name, one in model.state_dict().items()})


def average_with_first(data, model, optimizer):
    """Rank 0 alone takes the average of its weights with earlier ones."""
    for one in model.parameters() if data.rank == 0 else ():
        one.mul_(0.9)


def forget_moments(data, model, optimizer):
    """Rank 0 alone begins its moments anew, right before the optimizer would show it."""
    for state in optimizer.state.values() if data.rank == 0 else ():
        state["exp_avg"].zero_()


def short_window(data, *, last=5, syncs=False):
    """The last window of an epoch is shorter, and its only backward comes where no gradient is synchronized."""
    model = DDP(perceptron())

    def before(step, number):
        is_short = step == last
        return model.no_sync() if is_short and not syncs else None

    train(model, adamw(model), data, before=before)


def closures(data, *, write=None):
    """The optimizer calls a closure, which computes the last microbatch; those before it are not synchronized."""
    model = DDP(perceptron())
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            inputs, labels = data.batch()
            F.cross_entropy(model(inputs), labels).backward()
        inputs, labels = data.batch()

        def closure(inputs=inputs, labels=labels):
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        optimizer.step(closure)
        if write is not None and step == 5:
            with torch.no_grad():
                write(data, model, optimizer)


def local_sgd(data, *, begins=5, period=2):
    """From some step on ranks train apart, and average their parameters now and then."""
    model = DDP(perceptron())

    def before(step, number):
        return model.no_sync() if step >= begins else None

    def after(step):
        if step >= begins and step % period == 0:
            for one in model.parameters():
                dist.all_reduce(one.data)
                one.data /= 2

    train(model, sgd(model), data, before=before, after=after)


def rates_by_rank(data, *, wrap=fully_shard, by_rank=True):
    """A plateau of a rank's own number lowers the rate of one rank."""

    def lower(data, model, optimizer):
        if data.rank == 0 or not by_rank:
            optimizer.param_groups[0]["lr"] *= 0.5

    written(data, lower, at=3, wrap=wrap)


# Frozen parameters


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.base.requires_grad_(False)

    def forward(self, inputs):
        return self.base(inputs) + self.b(self.a(inputs))

    @torch.no_grad()
    def merge(self, sign=1):
        self.base.weight += sign * (self.b.weight @ self.a.weight)


def merged(data, *, unmerges=False, at=3, on=(0, 1)):
    net = Adapted()
    model = DDP(net)

    def after(step):
        if step == at and data.rank in on:
            net.merge()
            if unmerges:
                net.merge(-1)

    train(model, torch.optim.AdamW([one for one in net.parameters() if one.requires_grad], lr=1e-2), data, after=after)


def with_teacher(data, *, each=1, loads=False):
    """A teacher in the model follows it after each step, or is loaded later."""
    net = nn.ModuleDict({"student": perceptron(), "teacher": perceptron().requires_grad_(False)})
    net.forward = lambda inputs: net["student"](inputs) + 0.1 * net["teacher"](inputs)
    model = DDP(net)

    def after(step):
        if loads and step == 5:
            net["teacher"].load_state_dict(net["student"].state_dict())
        elif not loads and step % each == each - 1:
            with torch.no_grad():
                for one, own in zip(net["teacher"].parameters(), net["student"].parameters(), strict=True):
                    one.lerp_(own, 0.5)

    train(model, adamw(net["student"]), data, after=after)


# Buffers


class Counted(nn.Module):
    """Counts how often each class is chosen, and adds a bias by that, as routers do."""

    def __init__(self):
        super().__init__()
        self.inner = perceptron()
        self.register_buffer("bias", torch.zeros(3))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, inputs):
        found = self.inner(inputs) + self.bias
        self.count += F.one_hot(found.argmax(-1), 3).sum(0)
        return found


def routed(data, *, reduces=True, begins=3):
    """From some step on the bias follows the counts of all ranks, or of each its own."""
    net = Counted()
    model = DDP(net, broadcast_buffers=False)

    def after(step):
        if step >= begins:
            count = net.count.clone()
            if reduces:
                dist.all_reduce(count)
            net.bias -= 0.01 * (count - count.mean()).sign()
        net.count.zero_()

    train(model, adamw(model), data, after=after)


# Modes


def dropping():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))


def evaluated(data, *, returns=True, make=dropping, at=3):
    """An evaluation after some step, after which the model may stay in evaluation mode."""
    torch.manual_seed(data.rank)
    model = DDP(make())

    def after(step):
        if step == at:
            model.eval()
            with torch.no_grad():
                model(data.batch()[0])
            model.train(returns)

    train(model, adamw(model), data, after=after)


def frozen_statistics(data, *, stays=True):
    """A normalization is to stay in evaluation mode; each epoch begins with ``model.train()``."""
    model = DDP(perceptron(nn.BatchNorm1d))
    model.module[1].eval()

    def after(step):
        if step == 5:
            model.train()
            if stays:
                model.module[1].eval()

    train(model, adamw(model), data, after=after)


# Random generators


def sampled(data, draw, *, ranks=(0,), seeds=(1, 1), at=3):
    """After a step some ranks draw in an evaluation; each epoch is shuffled by the global generator."""
    model = DDP(perceptron())
    torch.manual_seed(seeds[data.rank])

    def after(step):
        if step == at and data.rank in ranks:
            draw(model)
        if step % 3 == 2:
            torch.randperm(8)

    train(model, adamw(model), data, after=after)


def draw_globally(model):
    model.module(torch.randn(4, 6))


def draw_in_a_fork(model):
    with torch.random.fork_rng(devices=[]):
        draw_globally(model)


def loaded_by_one(data):
    """Rank 0 evaluates by a loader, which draws a seed; training shuffles by a sampler of its own."""
    torch.manual_seed(1)
    model = DDP(perceptron())

    def after(step):
        if step == 3 and data.rank == 0:
            for batch in DataLoader(torch.randn(8, 6, generator=data.generator), batch_size=4, shuffle=True):
                model.module(batch)

    train(model, adamw(model), data, after=after)


# Learning rates


def grouped(data, schedule, *, begins=0, rates=(1e-3, 1e-2)):
    """Two groups of different learning rates, and a schedule by hand."""
    net = perceptron()
    first, *rest = net.children()
    groups = [{"params": first.parameters(), "lr": rates[0]}, {"params": nn.Sequential(*rest).parameters()}]
    model, optimizer = DDP(net), torch.optim.AdamW(groups, lr=rates[1])

    def adjust(step):
        for number, group in enumerate(optimizer.param_groups) if step >= begins else ():
            group["lr"] = schedule(step, rates[number])

    adjust(0)
    train(model, optimizer, data, after=lambda step: adjust(step + 1))


def one_rate(step, rate):
    return 1e-2 / (1 + step)


def own_rate(step, rate):
    return rate / (1 + step)


def floor(step, rate):
    return max(rate / (1 + step), 9e-4)


# Schedulers and state dicts


def scheduled(data, *, at="step", microbatches=3, make=lambda one: CosineAnnealingLR(one, T_max=50), times=1, begins=0):
    """A scheduler is stepped after each step, after each microbatch, or several times."""
    model = DDP(perceptron())
    optimizer = adamw(model)
    scheduler = make(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(microbatches):
            inputs, labels = data.batch()
            with contextlib.nullcontext() if number == microbatches - 1 else model.no_sync():
                (F.cross_entropy(model(inputs), labels) / microbatches).backward()
            if number == microbatches - 1:
                optimizer.step()
            if at == "microbatch" or number == microbatches - 1:
                for _ in range(times if step >= begins else 1):
                    scheduler.step()


def second_stage(data, *, again=False, at=4):
    """The optimizer is made anew for a second stage, perhaps with a scheduler."""
    model = DDP(perceptron())
    optimizer = adamw(model)
    scheduler = CosineAnnealingLR(optimizer, T_max=20)
    for step in range(STEPS):
        if step == at:
            optimizer = adamw(model)
            scheduler = CosineAnnealingLR(optimizer, T_max=20) if again else scheduler
        inputs, labels = data.batch()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()


def restored(data, take, *, taken=3, back=6):
    """The best state is kept, and loaded back later."""
    model = DDP(perceptron())
    kept = {}

    def after(step):
        if step == taken:
            kept.update(take(model))
        if step == back:
            model.load_state_dict(kept)

    train(model, adamw(model), data, after=after)


def cloned(model):
    return {name: one.clone() for name, one in model.state_dict().items()}


def saved(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def two_roots(data, *, at=None):
    """Two models in turn; after a step a mask of each rank's own is put on the second."""
    first, second = DDP(perceptron()), DDP(nn.Sequential(nn.Linear(6, 3)))
    optimizers = adamw(first), adamw(second)
    for step in range(STEPS):
        for model, optimizer in zip((first, second), optimizers, strict=True):
            inputs, labels = data.batch()
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        if step == at:
            with torch.no_grad():
                mask(data, second, optimizers[1])


def uneven(data):
    """The ranks have different numbers of batches, under ``join()``."""
    model = DDP(perceptron())
    optimizer = adamw(model)
    with model.join():
        for _ in range(STEPS - data.rank):
            inputs, labels = data.batch()
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


def evaluates_at_the_end(data):
    """Rank 0 alone goes back to an earlier state when training has ended, and evaluates it, by drawn inputs."""
    torch.manual_seed(1)
    net = Adapted()
    model = DDP(net)
    train(model, torch.optim.AdamW([one for one in net.parameters() if one.requires_grad]), data)
    if data.rank == 0:
        net.merge()
        model.eval()
        draw_globally(model)


#: Healthy loops: the notes that are printed.
HEALTHY = {
    "masked alike": (lambda data: written(data, mask_alike), ""),
    "loaded on all ranks": (lambda data: written(data, load), ""),
    "masked alike under HSDP": (lambda data: written(data, mask_alike, wrap=replicate_and_shard), ""),
    "short window with a sync": (lambda data: short_window(data, syncs=True), ""),
    "closures": (closures, ""),
    "local SGD from a later step on": (local_sgd, APART),
    "rates of all ranks": (lambda data: rates_by_rank(data, by_rank=False), ""),
    "merged and taken out": (lambda data: merged(data, unmerges=True), ""),
    "a teacher that follows": (with_teacher, ""),
    "a teacher that is loaded": (lambda data: with_teacher(data, loads=True), ""),
    "a target that follows later": (lambda data: with_teacher(data, each=4), MOVED),
    "merged at the end": (lambda data: merged(data, at=STEPS - 1), ""),
    "evaluated by one rank at the end": (evaluates_at_the_end, ""),
    "router of all ranks": (routed, ""),
    "evaluated and trained": (evaluated, ""),
    "evaluated without modes": (lambda data: evaluated(data, returns=False, make=perceptron), ""),
    "statistics stay frozen": (frozen_statistics, "the model trains in eval mode [D19]"),
    "drawn in a fork": (lambda data: sampled(data, draw_in_a_fork), ""),
    "drawn on all ranks": (lambda data: sampled(data, draw_globally, ranks=(0, 1)), ""),
    "drawn by seeds of ranks": (lambda data: sampled(data, draw_globally, seeds=(1, 2)), ""),
    "loaded by one rank": (loaded_by_one, ""),
    "rates of groups": (lambda data: grouped(data, own_rate), ""),
    "rates of groups with a floor": (lambda data: grouped(data, floor), ""),
    "scheduled for each step": (scheduled, ""),
    "scheduled for each step of one microbatch": (lambda data: scheduled(data, at="microbatch", microbatches=1), ""),
    "a second stage with its scheduler": (lambda data: second_stage(data, again=True), ""),
    "restored from clones": (lambda data: restored(data, cloned), ""),
    "restored from a file": (lambda data: restored(data, saved), ""),
    "two roots": (two_roots, ""),
    "uneven ranks": (uneven, ""),
}

#: Loops with a mistake, and all that is said.
BROKEN = {
    "masked by each rank": (lambda data: written(data, mask), APART),
    "masked by each rank under HSDP": (lambda data: written(data, mask, wrap=replicate_and_shard), APART),
    "loaded by one rank": (lambda data: written(data, load_on_one, at=3), APART),
    "averaged by one rank": (lambda data: written(data, average_with_first), APART),
    "masked between closures": (lambda data: closures(data, write=mask), APART),
    "short window without a sync": (short_window, APART),
    "moments of one rank": (lambda data: written(data, forget_moments, at=7), STATES),
    "a look without a sync": (lambda data: short_window(data, last=8), LOCAL),
    "rates by rank": (rates_by_rank, UNLIKE),
    "merged and left": (merged, MOVED),
    "merged by one rank": (lambda data: merged(data, on=(0,)), APART),
    "router of each rank": (lambda data: routed(data, reduces=False), BUFFERS),
    "evaluation mode stays": (lambda data: evaluated(data, returns=False), EVALUATES),
    "statistics are thawed": (lambda data: frozen_statistics(data, stays=False), TRAINS),
    "drawn by one rank": (lambda data: sampled(data, draw_globally), DRAWN),
    "one rate for all groups": (lambda data: grouped(data, one_rate), LEVELLED),
    "one rate for all groups later": (lambda data: grouped(data, one_rate, begins=5, rates=(1e-4, 1e-2)), LEVELLED),
    "scheduled for each microbatch": (lambda data: scheduled(data, at="microbatch"), PACED),
    "scheduled twice": (lambda data: scheduled(data, microbatches=1, times=2), PACED),
    "scheduled by a lambda for each microbatch": (
        lambda data: scheduled(data, at="microbatch", make=lambda one: LambdaLR(one, lambda step: 0.9**step)), PACED),
    "a second stage without its scheduler": (second_stage, IDLE),
    "restored from its own tensors": (lambda data: restored(data, nn.Module.state_dict), RESTORED),
    "second root masked": (lambda data: two_roots(data, at=5), APART),
}  # fmt: skip


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loop_has_no_finding(rank: Rank, name):
    loop, note = HEALTHY[name]
    findings, notes = titles(loop, rank, is_healthy=True)
    assert not findings and notes == ({note} if note else set())


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", BROKEN)
def test_its_broken_twin_is_found(rank: Rank, name):
    loop, said = BROKEN[name]
    findings, notes = titles(loop, rank)
    assert said in findings | notes


@world(2)
def test_looks_are_said_in_one_line_and_no_bit_of_a_loss_changes(rank: Rank):
    def losses():
        torch.manual_seed(3)
        model, data, found = DDP(dropping()), Data(rank.index), []
        optimizer = adamw(model)
        for _ in range(STEPS):
            inputs, labels = data.batch()
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    text = io.StringIO()
    with contextlib.redirect_stderr(text), doctor(patience=20):
        watched = losses()
    assert watched == losses()
    last = "shardproof doctor: looked again at step 4, step 8, the end: no further finding"
    assert (text.getvalue().splitlines()[-1:] == [last]) == (rank.index == 0)


@world(2)
def test_looks_follow_the_steps_that_are_named(rank: Rank):
    text = io.StringIO()
    with contextlib.redirect_stderr(text), doctor(patience=20, steps=(0, 1)):
        written(Data(rank.index), mask, at=1)
    heads = [line for line in text.getvalue().splitlines() if not line.startswith("  ")]
    assert [one.partition(": ")[2] for one in heads[1:]] == ([
        f"step 3: {APART}", "looked again at step 3, step 7, the end: 1 further finding",
    ] if rank.index == 0 else [])  # fmt: skip


@world(2)
def test_a_rank_that_leaves_ends_the_looks(rank: Rank):
    """Of ranks that are not at the same step at the end nothing is said, nor waited for longer than for a look."""
    from shardproof.harness.training import ranks

    rank.monkeypatch.setattr(ranks, "_PATIENCE_OF_LOOKS", 2)
    text = io.StringIO()
    with contextlib.redirect_stderr(text), doctor(patience=20) as watching:
        model = DDP(perceptron())
        optimizer, data = adamw(model), Data(rank.index)
        train(model, optimizer, data, steps=6)
        if rank.index == 0:  # one step more, without the others
            with model.no_sync():
                train(model.module, optimizer, data, steps=1)
    assert not watching.findings
    last = "shardproof doctor: looked again at step 4: no further finding"
    assert (text.getvalue().splitlines()[-1:] == [last]) == (rank.index == 0)
