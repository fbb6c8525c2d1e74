"""Loops under the doctor with loss scalers, schedulers, state dicts and shards that ranks draw themselves.

Each healthy one stands beside its broken twin.
"""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LinearLR, SequentialLR

from shardproof.harness.parity.rank import Rank
from shardproof.harness.watching.ties import Ties
from shardproof.testing import world
from tests.harness.test_doctor_loops import STEPS, adamw, perceptron, sgd, titles, train

DIVIDED = "gradients are unscaled again [D24, S5]"
COPIED = "shards are copies [D23]"
IDLE = "a scheduler steps an optimizer that does not step [D25]"
RESTORED = "a restored state is the current one [D26]"


# Loss scalers


def scaled(data, *, unscales="last", clears="last", microbatches=2, skips=False, wrap=DDP):
    """Unscale and clip at the end of a step or in each microbatch, whose gradients may be cleared after it."""
    model = wrap(perceptron())
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(STEPS):
        for number in range(microbatches):
            inputs, labels = data.batch()
            is_last = number == microbatches - 1
            loss = F.cross_entropy(model(inputs), labels) / microbatches
            scaler.scale(loss * torch.inf if skips and step == 1 else loss).backward()
            if is_last:
                end_step(model, optimizer, scaler)
            elif unscales == "each":
                end_step(model, optimizer, scaler, steps=False)
            if is_last or clears == "each":
                optimizer.zero_grad()


def end_step(model, optimizer, scaler, *, steps=True):
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if steps:
        scaler.step(optimizer)
    scaler.update()


def scaled_in_parts(data):
    """Gradients of each microbatch are unscaled and clipped alone, and summed in buffers of user code."""
    model = DDP(perceptron())
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(STEPS):
        sums = [torch.zeros_like(one) for one in model.parameters()]
        for _ in range(2):
            inputs, labels = data.batch()
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(inputs), labels)).backward()
            end_step(model, optimizer, scaler, steps=False)
            for total, one in zip(sums, model.parameters(), strict=True):
                total += one.grad
        for total, one in zip(sums, model.parameters(), strict=True):
            one.grad = total
        optimizer.step()


def scaled_by_two(data):
    """Two optimizers of one model have one scaler."""
    model = DDP(perceptron())
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizers = [torch.optim.AdamW(one, lr=1e-2) for one in (first, second)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for inputs, labels in data.batches():
        scaler.scale(F.cross_entropy(model(inputs), labels)).backward()
        for one in optimizers:
            scaler.unscale_(one)
        for one in optimizers:
            scaler.step(one)
        scaler.update()
        model.zero_grad()


# Schedulers


def scheduled(data, *, stage=None, make=None, again=False, keeps=None, wrap=DDP):
    """A scheduler from the start; after so many steps the optimizer is made anew, perhaps with a scheduler."""
    model = wrap(perceptron())
    make = make or (lambda optimizer: CosineAnnealingLR(optimizer, T_max=20))
    optimizer = adamw(model)
    scheduler, kept = make(optimizer), None
    for step, (inputs, labels) in enumerate(data.batches()):
        if step == stage:
            kept = keeps(optimizer) if keeps else None
            optimizer = adamw(model)
            scheduler = make(optimizer) if again else scheduler
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()
    del kept


def scheduled_before_sharding(data):
    """The scheduler has an optimizer of the parameters that fully_shard() replaces."""
    model = perceptron()
    scheduler = CosineAnnealingLR(adamw(model), T_max=20)
    fully_shard(model)
    train(model, adamw(model), data, after=lambda step: scheduler.step())


def by_turns(data, *, schedules="both"):
    """Two optimizers of the same parameters step in turn."""
    model = DDP(perceptron())
    optimizers = [adamw(model), sgd(model)]
    schedulers = [CosineAnnealingLR(one, T_max=20) for one in optimizers[: 2 if schedules == "both" else 1]]
    for step, (inputs, labels) in enumerate(data.batches()):
        optimizer = optimizers[step % 2]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        for one in schedulers:
            one.step()


def sequence(optimizer):
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1), CosineAnnealingLR(optimizer, 9)], milestones=[2])


def chain(optimizer):
    return ChainedScheduler([LinearLR(optimizer, 0.1), CosineAnnealingLR(optimizer, 9)])


class Wrapped:
    """Steps a scheduler when its optimizer has stepped, as accelerate's AcceleratedScheduler does."""

    def __init__(self, optimizer):
        self.optimizers, self.scheduler = [optimizer], CosineAnnealingLR(optimizer, T_max=20)

    def step(self):
        self.scheduler.step()


class Outer(torch.optim.Optimizer):
    """An optimizer around another one, which has its groups, as SAM has; the loop steps the inner one."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__([one for group in inner.param_groups for one in group["params"]], {"lr": 1e-2})
        self.param_groups = inner.param_groups


def scheduled_outside(data):
    model = DDP(perceptron())
    inner = adamw(model)
    scheduler = CosineAnnealingLR(Outer(inner), T_max=20)
    train(model, inner, data, after=lambda step: scheduler.step())


def scheduled_by_copies(data):
    """Rates are copied from the optimizer of a scheduler, which does not step, to the one that does."""
    model = DDP(perceptron())
    optimizer = adamw(model)
    scheduler = CosineAnnealingLR(adamw(model), T_max=20)

    def after(step):
        scheduler.step()
        optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]

    train(model, optimizer, data, after=after)


def scheduled_beside(data):
    """A scheduler of another model, which does not train in this stage, and one of no model, for another number."""
    model = DDP(perceptron())
    models = nn.Linear(3, 3), perceptron(), nn.Linear(1, 1)
    others = [CosineAnnealingLR(adamw(one), T_max=9) for one in models]
    train(model, adamw(model), data, after=lambda step: [one.step() for one in others])


# State dicts


def restored(data, take=nn.Module.state_dict, *, after=1, part=False, wrap=DDP, writes=False):
    """Keep a state before the first step, and load it back after some step."""
    model = wrap(perceptron())
    kept = take(model)

    def load(step):
        if step == after:
            state = {name: one.clone() if part and "0" in name else one for name, one in kept.items()}
            for one in state.values() if writes else ():
                one.mul_(0.5)
            model.load_state_dict(state)

    train(model, adamw(model), data, after=load)


def saved(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def loaded_at_once(data, *, steps=(0, 1, 2)):
    """Load a module's own state right when it is taken, also before the first step and into another module."""
    model, other = DDP(perceptron()), perceptron()
    model.load_state_dict(model.state_dict())

    def after(step):
        model.load_state_dict(model.state_dict())
        other.load_state_dict(model.module.state_dict())

    train(model, adamw(model), data, after=after)


# Initial shards


def drawn(data, *, seeds=(0, 0), draws="shards", names=("0", "2"), mesh=None, norm=nn.Identity):
    """Ranks draw their shards after fully_shard(), by a seed each, or take them of full parameters."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 16), norm(), nn.Linear(16, 4))
    options = {} if mesh is None else {"mesh": init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))}
    fully_shard(model, **options)
    model.to_empty(device="cpu")
    torch.manual_seed(seeds[data.rank])
    with torch.no_grad():
        for name, one in model.named_parameters():
            local, full = one.to_local(), torch.randn(one.shape)
            if draws == "tensors":  # on CPUs alike on all ranks
                nn.init.normal_(one)
                continue
            if draws == "rows":  # of one row, as Mamba's A_log
                local.copy_(torch.arange(1.0, one.shape[-1] + 1) if one.ndim > 1 else torch.ones(()))
            elif name.endswith("bias"):
                local.zero_()
            elif draws == "shards" and name[0] in names:
                torch.manual_seed(seeds[data.rank])
                local.normal_()
            else:
                local.copy_(full.chunk(2)[data.rank] if mesh is None else full)
    train(model, adamw(model), data)


#: Healthy loops: the notes that are printed, by check.
HEALTHY = {
    "unscaled once": (scaled, ""),
    "unscaled once under FSDP2": (lambda data: scaled(data, wrap=fully_shard), ""),
    "unscaled and cleared in each microbatch": (
        lambda data: scaled(data, unscales="each", clears="each", microbatches=1), ""),
    "unscaled after a step that is skipped": (lambda data: scaled(data, skips=True, microbatches=1), ""),
    "unscaled in parts": (scaled_in_parts, ""),
    "unscaled for two optimizers": (scaled_by_two, ""),
    "scheduler": (scheduled, ""),
    "scheduler of a sequence": (lambda data: scheduled(data, make=sequence), ""),
    "scheduler of a chain": (lambda data: scheduled(data, make=chain), ""),
    "scheduler of a sequence, made anew": (lambda data: scheduled(data, make=sequence, stage=0, again=True), ""),
    "scheduler in a wrapper": (lambda data: scheduled(data, make=Wrapped), ""),
    "scheduler made anew": (lambda data: scheduled(data, stage=0, again=True), ""),
    "schedulers by turns": (by_turns, ""),
    "scheduler of one by turns": (lambda data: by_turns(data, schedules="one"), ""),
    "scheduler of an outer optimizer": (scheduled_outside, ""),
    "scheduler whose rates are copied": (scheduled_by_copies, ""),
    "schedulers of other models": (scheduled_beside, ""),
    "scheduler of an optimizer in a list": (lambda data: scheduled(data, stage=0, keeps=lambda one: [one]), IDLE),
    "scheduler of an optimizer with a name": (lambda data: scheduled(data, stage=0, keeps=lambda one: one), IDLE),
    "restored from clones": (lambda data: restored(data, lambda one: copy.deepcopy(one.state_dict())), ""),
    "restored from a file": (lambda data: restored(data, saved), ""),
    "restored in part": (lambda data: restored(data, part=True), ""),
    "restored in place": (lambda data: restored(data, writes=True), ""),
    "restored after the last step": (lambda data: restored(data, after=STEPS), ""),
    "loaded at once": (loaded_at_once, ""),
    "shards of full parameters": (lambda data: drawn(data, draws="full"), ""),
    "shards by two seeds": (lambda data: drawn(data, seeds=(0, 1)), ""),
    "shards that torch draws": (lambda data: drawn(data, draws="tensors"), ""),
    "shards of one row": (lambda data: drawn(data, draws="rows"), ""),
    "shards of replicas": (lambda data: drawn(data, mesh=(2, 1)), ""),
    "a parameter by one seed": (lambda data: drawn(data, names=("2",)), COPIED),
}  # fmt: skip

#: Loops with a mistake, and the finding.
BROKEN = {
    "unscaled in each microbatch": (lambda data: scaled(data, unscales="each"), DIVIDED),
    "unscaled in each microbatch under FSDP2": (
        lambda data: scaled(data, unscales="each", wrap=fully_shard), DIVIDED),
    "scheduler of an earlier optimizer": (lambda data: scheduled(data, stage=0), IDLE),
    "scheduler of an earlier optimizer under FSDP2": (lambda data: scheduled(data, stage=0, wrap=fully_shard), IDLE),
    "scheduler before sharding": (scheduled_before_sharding, IDLE),
    "restored from its own tensors": (restored, RESTORED),
    "restored from its own tensors under FSDP2": (lambda data: restored(data, wrap=fully_shard), RESTORED),
    "shards by one seed": (drawn, COPIED),
}  # fmt: skip


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loop_has_no_finding(rank: Rank, name):
    loop, note = HEALTHY[name]
    findings, notes = titles(loop, rank, is_healthy=True, registered=Ties())
    assert not findings and notes == ({note} if note else set())


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", BROKEN)
def test_its_broken_twin_is_found(rank: Rank, name):
    loop, finding = BROKEN[name]
    findings, _ = titles(loop, rank, registered=Ties())
    assert findings == {finding}
