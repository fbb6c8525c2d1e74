"""Ordinary loops under the doctor, each beside the mistake that it is easily taken for.

A healthy loop has no finding, and of what may be meant a note at most; its broken twin has the finding that is named.
"""

import contextlib
import copy
import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from shardproof.harness.parity.rank import Rank
from shardproof.harness.training.doctor import doctor
from shardproof.testing import world

STEPS = 4
FLAT = functools.partial(FSDP, use_orig_params=True, device_id=torch.device("cpu"))
UNLIKE = "ranks step by different settings of the optimizer [D18]"


def perceptron(norm=None):
    torch.manual_seed(0)
    first = [nn.Linear(6, 8), *([norm(8)] if norm else []), nn.Tanh()]
    return nn.Sequential(*first, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Data:
    """Batches of a rank: inputs and labels."""

    def __init__(self, rank):
        self.rank, self.generator = rank, torch.Generator().manual_seed(100 + rank)

    def noise(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def batch(self):
        return self.noise(8, 6), torch.randint(3, (8,), generator=self.generator)

    def batches(self):
        return (self.batch() for _ in range(STEPS))


def train(model, optimizer, data, *, before=None, after=None, draw=Data.batch):
    """The plain loop; ``before`` and ``after`` are called with the step's number around the optimizer's."""
    for step in range(STEPS):
        inputs, labels = draw(data)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        if before is not None:
            before(step)
        optimizer.step()
        if after is not None:
            after(step)


# Closures


def closures(data, make=sgd, *, microbatches=1, zeroes="first"):
    """Train by ``step(closure)``; the closure clears gradients first, in each microbatch, or never."""
    model = DDP(perceptron())
    optimizer = make(model)
    for _ in range(STEPS):
        batches = [data.batch() for _ in range(microbatches)]

        def closure(batches=batches):
            total = torch.zeros(())
            for number, (inputs, labels) in enumerate(batches):
                loss = F.cross_entropy(model(inputs), labels) / len(batches)
                if zeroes == "each" or (zeroes == "first" and number == 0):
                    optimizer.zero_grad()
                loss.backward()
                total += loss.detach()
            dist.all_reduce(total)  # or ranks would search along other lines
            return total

        optimizer.step(closure)


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


def sharpness_aware(data, *, synchronizes=True):
    """Two passes over each batch, the second at parameters that are moved; by the second alone the optimizer steps."""
    model = DDP(perceptron())
    optimizer = sgd(model)
    for inputs, labels in data.batches():
        F.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            kept = [one.clone() for one in model.parameters()]
            for one in model.parameters():
                one += 0.05 * one.grad / one.grad.norm()
        optimizer.zero_grad()
        with contextlib.nullcontext() if synchronizes else model.no_sync():
            F.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            for one, before in zip(model.parameters(), kept, strict=True):
                one.copy_(before)
        optimizer.step()
        optimizer.zero_grad()


def adversarial(data):
    """The first pass is for the gradient of the inputs."""
    model = DDP(perceptron())
    optimizer = sgd(model)
    for inputs, labels in data.batches():
        inputs.requires_grad_()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.zero_grad()
        F.cross_entropy(model((inputs + 0.1 * inputs.grad.sign()).detach()), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


# Steps that are skipped


def skips(data, steps, *, alone=False, make=perceptron, factor=1.0):
    """Skip steps by a norm that the loop computes itself, or after a loss that is not finite."""
    model = DDP(make())
    optimizer = sgd(model)
    for step in range(STEPS + len(steps)):
        inputs, labels = data.batch()
        optimizer.zero_grad()
        is_skipped = step in steps and (data.rank == 1 or not alone)
        (F.cross_entropy(model(inputs), labels) * (factor if is_skipped else 1)).backward()
        if not is_skipped:
            optimizer.step()


def clears_each(data):
    model = DDP(perceptron())
    optimizer = adamw(model)
    for _ in range(STEPS):
        for inputs, labels in (data.batch(), data.batch()):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


# One batch several times


def consistency(data):
    """R-Drop: two forwards of a batch, and one backward."""
    model = DDP(nn.Sequential(perceptron(), nn.Dropout(0.3)))
    optimizer = sgd(model)
    for inputs, labels in data.batches():
        one, other = model(inputs), model(inputs)
        apart = F.kl_div(one.log_softmax(-1), other.softmax(-1), reduction="batchmean")
        optimizer.zero_grad()
        (F.cross_entropy(one, labels) + F.cross_entropy(other, labels) + apart).backward()
        optimizer.step()


def repeats(data, *, losses=1):
    """Two backward passes of one batch: by a sampler that repeats it, or of two losses."""
    model = DDP(perceptron())
    optimizer = sgd(model)
    for inputs, labels in data.batches():
        optimizer.zero_grad()
        with model.no_sync():
            F.cross_entropy(model(inputs), labels).backward()
        outputs = model(inputs)
        (F.cross_entropy(outputs, labels) if losses == 1 else outputs.square().mean()).backward()
        optimizer.step()


def draws(data, *, shares=False, dropout=0.0, loads=False):
    """A bandit: ranks have the same inputs, of which each draws its own actions; or all draw the same."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(perceptron(), nn.Dropout(dropout)))
    optimizer = sgd(model)
    inputs = torch.randn(STEPS * 8, 6, generator=torch.Generator().manual_seed(7))
    loader = DataLoader(inputs, 8) if loads else inputs.split(8)
    torch.manual_seed(data.rank)
    for given in loader:
        actions = torch.randint(3, (8,), generator=data.generator) * (not shares)
        optimizer.zero_grad()
        F.cross_entropy(model(given), actions).backward()
        optimizer.step()


# Gradients of rounding noise


def left_out(data):
    model = DDP(perceptron(nn.BatchNorm1d))
    held = [one for name, one in model.module.named_parameters() if name != "0.bias"]
    train(model, torch.optim.SGD(held, lr=0.01), data)


def in_turn(data, *, begins=STEPS - 1, holds=True):
    """The optimizer of the first layer steps after those that are watched; it may not have the layer."""
    model = DDP(perceptron())
    first, *rest = model.module.children()
    body = torch.optim.SGD((first if holds else nn.Linear(6, 8)).parameters(), lr=0.1)
    head = torch.optim.AdamW(nn.ModuleList(rest).parameters())
    train(model, head, data, before=lambda step: body.step() if step >= begins else None)


def by_groups(data, *rates):
    model = DDP(perceptron())
    groups = [
        {"params": list(one.parameters()), "lr": rate} for one, rate in zip(model.module[::2], rates, strict=True)
    ]
    train(model, torch.optim.AdamW(groups, weight_decay=0.0), data)


def metered(data, *, orders=lambda rank: 1):
    """Numbers of all ranks are reduced after each step, which may mix them up where ranks have another order."""
    model = DDP(perceptron())

    def after(step):
        for operator in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[:: orders(data.rank)]:
            dist.all_reduce(torch.ones(()), operator)

    train(model, adamw(model), data, after=after)


def unfrozen(data, *, adds=True):
    """The first layer trains from the second step on; the optimizer may have the others alone."""
    model = perceptron()
    first, *rest = model.children()
    first.requires_grad_(False)
    optimizer = adamw(nn.ModuleList(rest))

    def after(step):
        if step == 0:
            first.requires_grad_()
            if adds:
                optimizer.add_param_group({"params": list(first.parameters())})

    train(model, optimizer, data, before=lambda step: reduces_by_hand(model), after=after)


def plateaus(data, *, reduces=True, wrap=None):
    """The learning rate falls with a loss, which is the mean of all ranks or each one's own."""
    model = (wrap or fully_shard)(perceptron())
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.0)

    def after(step):
        loss = torch.tensor(float(step if data.rank else -step))  # that of rank 0 falls, and the others' grow
        if reduces:
            dist.all_reduce(loss)
        scheduler.step(loss)

    train(model, optimizer, data, after=after)


def aged(data, *, sends=True):
    """Optimizer states are loaded when training begins: on all ranks, or on the first alone."""
    model = fully_shard(perceptron())
    optimizer = adamw(model)
    for one in model.parameters() if sends or data.rank == 0 else ():
        moments = {key: torch.zeros_like(one) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[one] = {"step": torch.tensor(7.0), **moments}
    train(model, optimizer, data)


class HoldsOne(torch.optim.SGD):
    """Forgets the first parameter that it has."""

    @torch.no_grad()
    def step(self):
        for one in self.param_groups[0]["params"][1:]:
            one -= 0.1 * one.grad


# Reductions


def reduced_by(data, hook, state=None):
    model = DDP(perceptron())
    model.register_comm_hook(state, hook)
    train(model, sgd(model), data)


def rounds_to(dtype, lost=()):
    """Return a hook that reduces in a dtype, to which some ranks contribute nothing."""

    def rounding(_, bucket):
        part = bucket.buffer().to(dtype) * (dist.get_rank() not in lost)
        future = dist.all_reduce(part, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].float() / dist.get_world_size())

    return rounding


def largest_of(share, lost=()):
    """Return a hook that reduces the largest elements alone."""

    def sparse(_, bucket):
        own = bucket.buffer()
        limit = own.abs().quantile(1 - share)
        part = torch.where(own.abs() >= limit, own, 0.0) * (dist.get_rank() not in lost)
        future = dist.all_reduce(part, async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / dist.get_world_size())

    return sparse


def reduces_in_bfloat16(data):
    model = perceptron()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    train(model, sgd(model), data)


def averages(data, make=sgd, *, every=2, wraps=True):
    """Local SGD: ranks train apart, and their parameters are averaged now and then."""
    model = perceptron()
    wrapper = DDP(model) if wraps else model

    def average(step):
        if step % every == every - 1:
            for one in model.parameters():
                dist.all_reduce(one.data)
                one.data /= dist.get_world_size()

    with wrapper.no_sync() if wraps else contextlib.nullcontext():
        train(wrapper, make(model), data, after=average)


def redundancy_free(data, hook=None, *, synchronizes=True, resumes=False):
    model = DDP(perceptron())
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)

    def resume(step):
        if step == 0:
            optimizer.consolidate_state_dict()
            kept = [optimizer.state_dict() if data.rank == 0 else None]
            dist.broadcast_object_list(kept)
            optimizer.load_state_dict(kept[0])  # which has None for what other ranks step

    with contextlib.nullcontext() if synchronizes else model.no_sync():
        train(model, optimizer, data, after=resume if resumes else None)


class Sharded(torch.optim.Optimizer):
    """Momentum whose states are sharded: reduces gradients by itself, updates a part, and gathers parameters."""

    def __init__(self, model, *, reduces=True, gathers=True):
        super().__init__(list(model.parameters()), {"lr": 0.1})
        self.reduces, self.gathers = reduces, gathers

    @torch.no_grad()
    def step(self):
        count, rank = dist.get_world_size(), dist.get_rank()
        for parameter in self.param_groups[0]["params"]:
            size = math.ceil(parameter.numel() / count)
            padding = (0, size * count - parameter.numel())
            parts = list(F.pad(parameter.grad.flatten(), padding).chunk(count))
            gradient = parts[rank].clone()
            if self.reduces:
                dist.reduce_scatter(gradient, parts)
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(gradient))
            momentum.lerp_(gradient / count, 0.1)
            mine = list(F.pad(parameter.flatten(), padding).chunk(count))
            mine[rank] = mine[rank] - 0.1 * momentum
            if self.gathers:
                dist.all_gather(mine, mine[rank].clone())
            parameter.copy_(torch.cat(mine)[: parameter.numel()].view_as(parameter))


def sharded(data, **options):
    model = perceptron()
    train(model, Sharded(model, **options), data)


# Factors and layers


class Layers(nn.Module):
    """Layers of which some have no turn, or are detached."""

    def __init__(self, *, idle=(), detached=()):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.idle, self.detached = idle, detached

    def forward(self, inputs):
        values = self.first(inputs)
        for number, layer in enumerate(self.layers):
            if number not in self.idle:
                new = layer(values).tanh()
                values = values + (new.detach() if number in self.detached else new)
        return self.last(values)


def layered(data, **options):
    model = DDP(Layers(**options), find_unused_parameters=True)
    train(model, adamw(model), data)


def scaled(data, factors):
    """Gradients of layers are multiplied by a factor each, as muP does."""
    model = Layers()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for layer, factor in zip(model.layers, factors, strict=True):

        def scale(one, factor=factor):
            one.grad *= factor

        for one in layer.parameters():
            one.register_post_accumulate_grad_hook(scale)
    train(model, adamw(model), data)


def hooked(data, hooks):
    """Gradients of layers are changed by a hook each, before DDP reduces them."""
    model = Layers()
    for layer, hook in zip(model.layers, hooks, strict=True):
        for one in layer.parameters() if hook is not None else ():
            one.register_hook(hook)
    train(DDP(model), sgd(model), data)


def times(factor):
    return lambda gradient: gradient * factor


def masked(gradient):
    return gradient * (torch.arange(gradient.numel()).view_as(gradient) % 3 > 0)


def limited(gradient):
    return gradient.clamp(-1e-3, 1e-3)


# Several models


def adversaries(data, *, zeroes="before"):
    """As the DCGAN of PyTorch's examples: the generator's loss leaves gradients in the discriminator."""
    torch.manual_seed(0)
    generator, critic = DDP(nn.Linear(4, 6)), DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    of_generator, of_critic = adamw(generator), adamw(critic)
    for real, _ in data.batches():
        if zeroes == "before":
            of_critic.zero_grad()
        F.softplus(-critic(real)).mean().backward()
        fake = generator(data.noise(8, 4))
        F.softplus(critic(fake.detach())).mean().backward()
        of_critic.step()
        if zeroes == "after":
            of_critic.zero_grad()
        of_generator.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        of_generator.step()


def distilled(data):
    model = DDP(perceptron(nn.LayerNorm))
    teacher = copy.deepcopy(model.module)
    optimizer = sgd(model)
    for inputs, labels in data.batches():
        optimizer.zero_grad()
        outputs = model(inputs)
        (F.cross_entropy(outputs, labels) + F.mse_loss(outputs, teacher(inputs).detach() + 1)).backward()
        optimizer.step()


def normalized(data, norm, lr=0.01, dtype=None):
    def draw(data):
        inputs, labels = data.batch()
        return inputs.to(dtype), labels

    model = DDP(perceptron(norm).to(dtype))
    train(model, sgd(model, lr), data, draw=draw)


def held_back(data):
    model = DDP(perceptron())
    train(model, HoldsOne(model.parameters(), lr=0.1), data)


# Gradients that torch.autograd.grad() returns


def fast_weights(model, loss, *, order):
    """An inner step of meta-learning; of the first order its weights are leaves of their own."""
    weights = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=order == 2)
    moved = {name: one - 0.1 * grad for (name, one), grad in zip(weights.items(), gradients, strict=True)}
    return moved if order == 2 else {name: one.detach().requires_grad_() for name, one in moved.items()}


def meta_learning(data, order):
    """Gradients are reduced by hand; of the first order those of the inner weights are."""
    model = perceptron()
    optimizer = sgd(model)
    for inputs, labels in data.batches():
        optimizer.zero_grad()
        fast = fast_weights(model, F.cross_entropy(model(inputs[:4]), labels[:4]), order=order)
        F.cross_entropy(functional_call(model, fast, (inputs[4:],)), labels[4:]).backward()
        for name, one in model.named_parameters():
            one.grad = fast[name].grad if order == 1 else one.grad
        reduces_by_hand(model)
        optimizer.step()


def learners(data):
    """Copies of a model with an output of one element adapt on each rank; what they find is reduced for the model."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = adamw(model)
    for inputs, _ in data.batches():
        learner = copy.deepcopy(model)
        inner = sgd(learner)
        for _ in range(3):
            inner.zero_grad()
            (learner(inputs) - 1).square().mean().backward()
            inner.step()
        for one, own in zip(model.parameters(), learner.parameters(), strict=True):
            one.grad = own.grad
        reduces_by_hand(model)
        optimizer.step()


def penalized(data, *, reduces=True):
    """The norm of the gradient of all parameters is a part of the loss."""
    model = perceptron()
    optimizer = sgd(model)
    for inputs, labels in data.batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + 0.1 * sum(one.square().sum() for one in gradients)).backward()
        reduces_by_hand(model, loses=not reduces)
        optimizer.step()


def returned(data, *, microbatches=1, reduces=True):
    """The loop puts what is returned into ``.grad`` itself."""
    model = perceptron()
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for inputs, labels in (data.batch() for _ in range(microbatches)):
            loss = F.cross_entropy(model(inputs), labels)
            for one, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
                one.grad = gradient if one.grad is None else 0.5 * one.grad + gradient
        reduces_by_hand(model, loses=not reduces)
        optimizer.step()


def vectorized(data, *, reduces=True):
    """Inner steps of several tasks at once, by torch.func."""
    model = perceptron()
    optimizer = sgd(model)

    def outer(weights, inputs, labels):
        def inner(weights):
            return F.cross_entropy(functional_call(model, weights, (inputs[:2],)), labels[:2])

        steps = grad(inner)(weights)
        fast = {name: one - 0.1 * steps[name] for name, one in weights.items()}
        return F.cross_entropy(functional_call(model, fast, (inputs[2:],)), labels[2:])

    for inputs, labels in data.batches():
        optimizer.zero_grad()
        tasks = inputs.unflatten(0, (2, 4)), labels.unflatten(0, (2, 4))
        vmap(outer, in_dims=(None, 0, 0))(dict(model.named_parameters()), *tasks).mean().backward()
        reduces_by_hand(model, loses=not reduces)
        optimizer.step()


class Owners(torch.optim.Optimizer):
    """Each rank has the momentum of some parameters, steps these, and sends them."""

    def __init__(self, model, *, sends=True):
        super().__init__(list(model.parameters()), {"lr": 0.1})
        self.sends = sends

    @torch.no_grad()
    def step(self):
        for number, one in enumerate(self.param_groups[0]["params"]):
            owner = number % dist.get_world_size()
            if owner == dist.get_rank():
                momentum = self.state[one].setdefault("momentum", torch.zeros_like(one))
                one.sub_(self.param_groups[0]["lr"] * momentum.lerp_(one.grad, 0.1))
            if self.sends:
                dist.broadcast(one.detach(), owner)


def owned(data, *, begins=0.0, **options):
    """The rate of the first step is zero, as that of many warm-ups."""
    model = DDP(perceptron())
    optimizer = Owners(model, **options)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: begins if step == 0 else 1.0)
    train(model, optimizer, data, after=lambda step: rates.step())


def loaded(data, *, loads=True):
    """Momentum of an earlier training is loaded, on rank 0 or on all."""
    model = DDP(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    earlier = torch.optim.SGD(perceptron().parameters(), lr=0.1, momentum=0.9)
    for one in earlier.param_groups[0]["params"]:
        one.grad = torch.ones_like(one)
    earlier.step()
    if loads or data.rank == 0:
        optimizer.load_state_dict(earlier.state_dict())
    train(model, optimizer, data)


def dropped(data, *, sends=True):
    """ZeRO-2 by hand: gradients are summed for their owner and dropped elsewhere; owners send what they step."""
    model = perceptron()
    own = {one: number % dist.get_world_size() for number, one in enumerate(model.parameters())}
    optimizer = torch.optim.AdamW([one for one, owner in own.items() if owner == data.rank], lr=1e-2)

    def before(step):
        for one, owner in own.items():
            dist.reduce(one.grad, owner)
            one.grad = one.grad / dist.get_world_size() if owner == data.rank else None

    def after(step):
        for one, owner in own.items() if sends else ():
            dist.broadcast(one.data, owner)

    train(model, optimizer, data, before=before, after=after)


def single(data, *, clips=False):
    """A model of one parameter: a number for each rank is between its gradient and the mean of all, if nobody looks."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3, bias=False) if clips else nn.Sequential(nn.Linear(6, 3, bias=False))
    if clips:
        fully_shard(model)

    def before(step):
        if clips:
            mine = model.weight.grad.to_local()
            mine.mul_(0.01 / mine.norm())
        else:
            reduces_by_hand(model)

    train(model, sgd(model), data, before=before)


def goes_round(data):
    """Calls what DDP wraps, as for a method of the model."""
    wrapper = DDP(perceptron())
    train(wrapper.module, sgd(wrapper), data)


def reduces_by_hand(model, *, loses=False):
    for one in model.parameters():
        if one.grad is None:
            continue
        if loses:
            dist.broadcast(one.grad, 0)
        else:
            dist.all_reduce(one.grad.div_(dist.get_world_size()))


#: Healthy loops: the notes that are printed, by check.
HEALTHY = {
    "closure": (closures, ""),
    "closure of microbatches": (lambda data: closures(data, microbatches=2), ""),
    "closure of AdamW": (lambda data: closures(data, adamw), ""),
    "LBFGS": (lambda data: closures(data, lbfgs), ""),
    "SAM": (sharpness_aware, ""),
    "adversarial": (adversarial, ""),
    "skipped step": (lambda data: skips(data, [1]), "gradients are dropped without a step [D11, S4]"),
    "skipped first step": (lambda data: skips(data, [0]), "gradients are dropped without a step [D11, S4]"),
    "skipped infinity": (lambda data: skips(data, [0, 2], factor=math.inf), ""),
    "R-Drop": (consistency, ""),
    "two losses": (lambda data: repeats(data, losses=2), "a microbatch is read twice [D9, S11]"),
    "own actions": (draws, "ranks read the same data [D9, S11]"),
    "own actions and dropout": (lambda data: draws(data, dropout=0.3), "ranks read the same data [D9, S11]"),
    "BatchNorm": (lambda data: normalized(data, nn.BatchNorm1d), ""),
    "GroupNorm": (lambda data: normalized(data, lambda width: nn.GroupNorm(width, width)), ""),
    "bfloat16": (lambda data: normalized(data, nn.LayerNorm, 1e-3, torch.bfloat16),
                 "updates are lost to rounding [D6, S13]"),
    "small rate": (lambda data: normalized(data, None, 1e-10), "updates are lost to rounding [D6, S13]"),
    "optimizers in turn": (in_turn, "an optimizer does not step in the watched steps [D4, S7]"),
    "unfrozen": (unfrozen, ""),
    "plateau": (plateaus, ""),
    "plateau of flat parameters": (lambda data: plateaus(data, wrap=FLAT), ""),
    "loaded states": (aged, ""),
    "numbers of all ranks": (metered, ""),
    "rates of groups": (lambda data: by_groups(data, 1e-3, 1e-2, 1e-2), ""),
    "rate of zero": (lambda data: by_groups(data, 0.0, 0.0, 1e-2), "a learning rate is 0 [D6, S7]"),
    "fp16_compress_hook": (lambda data: reduced_by(data, default_hooks.fp16_compress_hook), ""),
    "bfloat16 hook": (lambda data: reduced_by(data, rounds_to(torch.bfloat16)), ""),
    "sparse hook": (lambda data: reduced_by(data, largest_of(0.3)),
                    "a communication hook changes gradients, which are not judged [D11]"),
    "reduce_dtype": (reduces_in_bfloat16, ""),
    "local SGD": (averages, "parameters are averaged, and gradients are not [D11, S2]"),
    "local SGD without a wrapper": (lambda data: averages(data, wraps=False), "gradients are not reduced [D11, S2]"),
    "each rank by itself": (lambda data: averages(data, adamw, every=9, wraps=False),
                            "gradients are not reduced [D11, S2]"),
    "ZeRO": (redundancy_free, ""),
    "ZeRO that resumes": (lambda data: redundancy_free(data, resumes=True), ""),
    "ZeRO with a hook": (lambda data: redundancy_free(data, rounds_to(torch.bfloat16)), ""),
    "sharded optimizer": (sharded, "gradients are reduced in the optimizer's step, and not judged [D11, S2]"),
    "muP": (lambda data: scaled(data, [0.5, 0.5, 0.5]), "parameters have different factors [D12, S1]"),
    "layer-wise decay": (lambda data: scaled(data, [0.64, 0.8, 1]), "parameters have different factors [D12, S1]"),
    "muP by hooks of tensors": (lambda data: hooked(data, [times(0.5)] * 3),
                                "parameters have different factors [D12, S1]"),
    "masks in hooks": (lambda data: hooked(data, [masked] * 3), ""),
    "limits in hooks": (lambda data: hooked(data, [limited, None, None]), ""),
    "hooks that look": (lambda data: hooked(data, [lambda gradient: None] * 3), ""),
    "layer drop": (lambda data: layered(data, idle=[1]), "modules have no turn [D5, S10]"),
    "GAN": (adversaries, ""),
    "distillation": (distilled, ""),
    "meta-learning": (lambda data: meta_learning(data, 2), ""),
    "meta-learning of the first order": (lambda data: meta_learning(data, 1), ""),
    "meta-learning of copies": (learners, "gradients are not reduced [D11, S2]"),
    "gradient penalty": (penalized, ""),
    "returned gradients": (returned, ""),
    "returned gradients of microbatches": (lambda data: returned(data, microbatches=3), ""),
    "meta-learning by torch.func": (vectorized, ""),
    "owners": (owned, ""),
    "dropped off the owner": (dropped, ""),
    "states on all ranks": (loaded, ""),
    "one parameter": (single, ""),
}  # fmt: skip

#: Loops with a mistake, and the finding.
BROKEN = {
    "closure loses a microbatch": (lambda data: closures(data, microbatches=2, zeroes="each"),
                                   "gradients lack microbatches [D11, S4]"),
    "LBFGS loses a microbatch": (lambda data: closures(data, lbfgs, microbatches=2, zeroes="each"),
                                 "gradients lack microbatches [D11, S4]"),
    "LBFGS never zeroes": (lambda data: closures(data, lbfgs, zeroes="never"), "gradients are never zeroed [D11, S4]"),
    "SAM without a reduction": (lambda data: sharpness_aware(data, synchronizes=False),
                                "gradients are not reduced [D11, S2]"),
    "zero_grad in each": (clears_each, "gradients lack microbatches [D11, S4]"),
    "one rank skips": (lambda data: skips(data, [1], alone=True), "some ranks skip a step [D1, S9]"),
    "one rank skips first": (lambda data: skips(data, [0], alone=True), "some ranks skip a step [D1, S9]"),
    "sampler repeats": (repeats, "a microbatch is read twice [D9, S11]"),
    "same actions": (lambda data: draws(data, shares=True), "ranks read the same data [D9, S11]"),
    "no sampler under dropout": (lambda data: draws(data, shares=True, dropout=0.3, loads=True),
                                 "ranks read the same data [D9, S11]"),
    "parameter in no optimizer": (left_out, "parameters are in no optimizer [D4, S7]"),
    "numbers mixed up": (lambda data: metered(data, orders=lambda rank: 1 - 2 * rank),
                         "ranks issue different collectives [D13]"),
    "layer in no optimizer": (lambda data: in_turn(data, holds=False), "parameters are in no optimizer [D4, S7]"),
    "unfrozen for no optimizer": (lambda data: unfrozen(data, adds=False), "parameters are in no optimizer [D4, S7]"),
    "plateau by rank": (lambda data: plateaus(data, reduces=False), UNLIKE),
    "plateau of flat parameters by rank": (lambda data: plateaus(data, reduces=False, wrap=FLAT), UNLIKE),
    "states loaded by one rank": (lambda data: aged(data, sends=False), UNLIKE),
    "parameter held back": (held_back, "parameters do not move [D6, S7]"),
    "hook loses a rank": (lambda data: reduced_by(data, rounds_to(torch.bfloat16, lost=[1])),
                          "gradients are not reduced [D11, S2]"),
    "sparse hook loses a rank": (lambda data: reduced_by(data, largest_of(0.5, lost=[1])),
                                 "some ranks are missing from the gradients [D11, S3]"),
    "never averaged": (lambda data: averages(data, every=9), "gradients are not reduced [D11, S2]"),
    "ZeRO without a reduction": (lambda data: redundancy_free(data, synchronizes=False),
                                 "gradients are not reduced [D11, S2]"),
    "sharded without a gather": (lambda data: sharded(data, gathers=False), "replicas differ after the step [D1, S9]"),
    "sharded without a reduction": (lambda data: sharded(data, reduces=False), "gradients are not reduced [D11, S2]"),
    "wrong factor": (lambda data: scaled(data, [0.5, 0.25, 0.5]), "parameters have different factors [D12, S1]"),
    "wrong factor in a hook": (lambda data: hooked(data, [times(0.5), times(0.25), times(0.5)]),
                               "parameters have different factors [D12, S1]"),
    "factor in one hook": (lambda data: hooked(data, [None, times(0.5), None]),
                           "parameters have different factors [D12, S1]"),
    "detached layer": (lambda data: layered(data, detached=[1]), "parameters get no gradient [D5, S10]"),
    "GAN never zeroed": (lambda data: adversaries(data, zeroes="never"), "gradients are never zeroed [D11, S4]"),
    "gradient penalty loses a rank": (lambda data: penalized(data, reduces=False),
                                      "gradients are not reduced [D11, S2]"),
    "returned gradients lose a rank": (lambda data: returned(data, reduces=False),
                                       "gradients are not reduced [D11, S2]"),
    "meta-learning by torch.func loses a rank": (lambda data: vectorized(data, reduces=False),
                                                 "gradients are not reduced [D11, S2]"),
    "owners that do not send": (lambda data: owned(data, sends=False), "replicas differ after the step [D1, S9]"),
    "dropped and not sent": (lambda data: dropped(data, sends=False), "some have no gradient [D2, S9]"),
    "states on one rank": (lambda data: loaded(data, loads=False), "replicas differ after the step [D1, S9]"),
    "one parameter clipped by each rank": (lambda data: single(data, clips=True),
                                           "ranks scale gradients differently [D10, S6]"),
    "what DDP wraps": (goes_round, "gradients are not reduced [D11, S2]"),
}  # fmt: skip

#: Of each class one pair is trained by day.
BY_DAY = {
    "closure", "closure loses a microbatch", "skipped step", "one rank skips", "R-Drop", "sampler repeats", "BatchNorm",
    "parameter held back", "optimizers in turn", "layer in no optimizer", "fp16_compress_hook", "hook loses a rank",
    "ZeRO", "sharded without a gather", "muP", "wrong factor", "layer drop", "detached layer", "GAN",
    "GAN never zeroed", "plateau", "plateau by rank", "states loaded by one rank",
}  # fmt: skip


def titles(loop, rank: Rank, *, is_healthy: bool = False, **options) -> tuple[set[str], set[str]]:
    """The findings and the notes of a loop, each with its checks, without the number of the step.

    A healthy one is watched to the end.
    """
    with doctor(on_finding="collect", patience=20, **options) as watching:
        loop(Data(rank.index))
    assert (watching.findings and not is_healthy) or watching.summary().startswith("steps 0-2 of 2 ranks")
    told = [(one.is_note, one.render().splitlines()[0].rpartition(": ")[2]) for one in watching.findings]
    return {head for is_note, head in told if not is_note}, {head for is_note, head in told if is_note}


def rows(table):
    return [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in table]


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", rows(HEALTHY))
def test_a_healthy_loop_has_no_finding(rank: Rank, name):
    loop, note = HEALTHY[name]
    findings, notes = titles(loop, rank, is_healthy=True)
    assert not findings and notes == ({note} if note else set())


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", rows(BROKEN))
def test_its_broken_twin_is_found(rank: Rank, name):
    loop, finding = BROKEN[name]
    findings, _ = titles(loop, rank)
    assert finding in findings


class Summed(torch.autograd.Function):
    """The sum over ranks, each of which uses it alike."""

    @staticmethod
    def forward(ctx, values):
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Part(nn.Module):
    """Columns and then rows of two layers on each rank, and layers of which each rank has a copy."""

    def __init__(self, rank, dropout):
        super().__init__()
        torch.manual_seed(0)
        self.last, (up, down) = nn.Linear(6, 3), (torch.randn(8, 6) / 2, torch.randn(6, 8) / 2)
        self.up, self.down = (nn.Parameter(one.chunk(2, dim)[rank].clone()) for dim, one in ((0, up), (1, down)))
        self.norm, self.dropout = nn.LayerNorm(6), dropout

    def forward(self, inputs):
        values = Summed.apply(F.linear(F.linear(self.norm(inputs), self.up).relu(), self.down))
        return self.last(F.dropout(values, self.dropout))


@pytest.mark.sampled
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@world(2)
def test_copies_beside_parts_of_one_model_are_told_what_they_need(rank: Rank, dropout):
    """Norms of a part need a sum; what has another mask on each rank needs the same random numbers, and no wrapper."""
    with doctor(on_finding="collect", patience=20) as watching:
        model = Part(rank.index, dropout)
        torch.manual_seed(rank.index)
        train(model, sgd(model), Data(0))
    told = {one.title: one for one in watching.findings}
    (note,) = [one for one in told.values() if "D11" in one.checks and one.is_note]
    assert any("'norm.weight', 'norm.bias': of one value" in line and "need the sum" in line for line in note.lines)
    copies = told.get("gradients are not reduced")
    assert (copies is not None) == bool(dropout)
    assert copies is None or (
        "'last.weight'" in copies.lines[0]
        and "('up', 'down' differ from the start)" in copies.lines[1]
        and copies.lines[2].startswith("random numbers, as of dropout, must be equal")
    )


def test_each_loop_by_day_is_in_a_table():
    assert not BY_DAY - {*HEALTHY, *BROKEN}
