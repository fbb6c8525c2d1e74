"""Ranks that train by themselves, or have parameters of their own: experts, outer steps, master weights.

Each healthy loop stands beside its broken twin.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from shardproof.harness.parity.rank import Rank
from shardproof.harness.training.doctor import doctor
from shardproof.testing import world
from tests.harness.test_doctor_loops import Data, adamw, perceptron, sgd, titles, train

NOT_REDUCED = "gradients are not reduced [D11, S2]"
SCALES = "ranks scale gradients differently [D10, S6]"
FACTORS = "parameters have different factors [D12, S1]"
DIFFER = "replicas differ [D2, S9]"
SKIPS = "some ranks skip a step [D1, S9]"


# Ranks that do not step


def past_hooks(data, steps_on=(0, 1)):
    """User code calls ``forward()`` of DDP, which broadcasts statistics before a module inside of it begins."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    optimizer = sgd(model)
    for inputs, labels in data.batches():
        optimizer.zero_grad()
        F.cross_entropy(model.forward(inputs), labels).backward()
        if data.rank in steps_on:
            optimizer.step()


# Ranks that train by themselves


def clip_alone(model):
    """Each rank clips by the norm of its own gradients."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def scale_alone(model):
    """Each rank normalizes its own gradients."""
    norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
    for one in model.parameters():
        one.grad /= norm


def weigh_alone(model, data):
    """Each rank has a weight of its own."""
    for one in model.parameters():
        one.grad *= 1 + data.rank


def outer_steps(data, change, *, period=4, steps=8, make=adamw):
    """Ranks step by themselves, and now and then together by the mean of their changes (DiLoCo)."""
    model = perceptron()
    optimizer = make(model)
    shared = [one.detach().clone() for one in model.parameters()]
    outer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(steps):
        inputs, labels = data.batch()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        change(model)
        optimizer.step()
        if step % period == period - 1:
            with torch.no_grad():
                for own, one in zip(shared, model.parameters(), strict=True):
                    own.grad = own - one
                    dist.all_reduce(own.grad)
                    own.grad /= 2
                outer.step()
                for own, one in zip(shared, model.parameters(), strict=True):
                    one.copy_(own)


def reduce(model):
    for one in model.parameters():
        dist.all_reduce(one.grad)
        one.grad /= 2


def changed(data, change, *, wrap=DDP):
    """Gradients that are reduced, and changed before the step by a number of each rank's own."""
    model = perceptron()
    model = model if wrap is nn.Identity else wrap(model)

    def before(step):
        if wrap is nn.Identity:
            reduce(model)
        change(model, data)

    train(model, sgd(model), data, before=before)


def clip_by_rank(model, data):
    """The limit is one of each rank."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.1 / (1 + data.rank))


# Experts


class Gather(torch.autograd.Function):
    """Gives each rank the tokens of all."""

    @staticmethod
    def forward(context, tokens):
        parts = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tokens.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class Combine(torch.autograd.Function):
    """Gives each rank the sum of what all have computed for its tokens."""

    @staticmethod
    def forward(context, tokens):
        tokens = tokens.contiguous().clone()
        dist.all_reduce(tokens)
        return tokens.chunk(dist.get_world_size())[dist.get_rank()].clone()

    @staticmethod
    def backward(context, gradient):
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts)


class Experts(nn.Module):
    """A dense part, and an expert of each rank."""

    def __init__(self, rank, *, exchanges=True, seed=None):
        super().__init__()
        torch.manual_seed(0)
        self.rank, self.exchanges = rank, exchanges
        self.dense, self.router, self.out = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 3)
        torch.manual_seed(rank + 1 if seed is None else seed)
        self.expert = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, inputs):
        tokens = self.dense(inputs)
        if not self.exchanges:
            return self.out(tokens + self.expert(tokens))
        gates = self.router(tokens).softmax(-1)
        every, gate = Gather.apply(tokens), Gather.apply(gates)
        return self.out(tokens + Combine.apply(self.expert(every) * gate[:, self.rank, None]))


def clip_all(net):
    """Clip by the norm of the dense part and of the experts of all ranks."""
    squares = sum(one.grad.square().sum() for one in net.expert.parameters())
    dist.all_reduce(squares)
    squares += sum(one.grad.square().sum() for name, one in net.named_parameters() if "expert" not in name)
    for one in net.parameters():
        one.grad *= min(1.0, float(0.1 / squares.sqrt()))


def experts(data, *, divides=True, clips=None, make=sgd, **options):
    """Experts of ranks beside a part that DDP reduces."""
    net = Experts(data.rank, **options)
    names = [name for name, _ in net.named_parameters() if name.startswith("expert")]
    DDP._set_params_and_buffers_to_ignore_for_model(net, names)
    net.router.requires_grad_(net.exchanges)
    model = DDP(net)

    def before(step):
        for one in net.expert.parameters() if divides else ():
            one.grad /= 2
        if clips is not None:
            clips(net)

    train(
        model,
        make(nn.ModuleList([net.dense, net.out, net.expert, *([net.router] * net.exchanges)])),
        data,
        before=before,
    )


def divides_later(data, *, writes_all=True):
    """User code reduces the gradients of the last layer, of which DDP knows nothing."""
    net = perceptron()
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["4.weight", "4.bias"])
    model = DDP(net)

    def before(step):
        for one in net[4].parameters():
            dist.all_reduce(one.grad)
            one.grad /= 2 if writes_all else 1

    train(model, sgd(model), data, before=before)


# Master weights


def masters(data, *, by=1.0, grads="none"):
    """The optimizer steps float32 copies of the parameters, and a second trainer goes on where the first has ended."""
    for _ in range(2):
        model = DDP(perceptron().bfloat16())
        kept = [one.detach().float().clone().requires_grad_() for one in model.parameters()]
        optimizer = torch.optim.AdamW(kept, lr=1e-2)
        for _ in range(4):
            inputs, labels = data.batch()
            F.cross_entropy(model(inputs.bfloat16()).float(), labels).backward()
            for own, one in zip(kept, model.parameters(), strict=True):
                own.grad = one.grad.float() * by
                if grads == "none":
                    one.grad = None
                else:
                    one.grad.zero_()
            nn.utils.clip_grad_norm_(kept, 1.0)
            optimizer.step()
            with torch.no_grad():
                for own, one in zip(kept, model.parameters(), strict=True):
                    one.copy_(own)


def zeroed(data):
    """Gradients are zero where the optimizer steps: the loop has moved the parameters by them itself."""
    model = DDP(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def before(step):
        with torch.no_grad():
            for one in model.parameters():
                one -= 0.1 * one.grad
                one.grad.zero_()

    train(model, optimizer, data, before=before)


class Scaled(nn.Module):
    """A perceptron with a temperature that its unit ignores."""

    def __init__(self):
        super().__init__()
        self.net, self.temperature = perceptron(), nn.Parameter(torch.tensor([2.0]))
        fully_shard(self, ignored_params={self.temperature})

    def forward(self, x):
        return self.net(x) * self.temperature


def ignored_number(data, reduces=True):
    """What ``fully_shard`` ignores is reduced by hand, or not at all."""
    model = Scaled()
    optimizer = adamw(model)
    for inputs, labels in data.batches():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        if reduces:
            dist.all_reduce(model.temperature.grad)
            model.temperature.grad /= dist.get_world_size()
        optimizer.step()


#: Healthy loops: the notes that are printed.
HEALTHY = {
    "past the hooks": (past_hooks, set()),
    "outer steps, clipped": (lambda data: outer_steps(data, clip_alone), {NOT_REDUCED}),
    "outer steps, normalized": (lambda data: outer_steps(data, scale_alone, make=sgd), {NOT_REDUCED}),
    "outer steps, weighed": (lambda data: outer_steps(data, functools.partial(weigh_alone, data=data)), {NOT_REDUCED}),
    "outer steps of two": (lambda data: outer_steps(data, clip_alone, period=2), {NOT_REDUCED}),
    "a number that FSDP2 ignores": (ignored_number, set()),
    "experts": (experts, set()),
    "experts of Adam": (lambda data: experts(data, make=adamw), set()),
    "experts that begin alike": (lambda data: experts(data, seed=7), set()),
    "experts, clipped by all": (lambda data: experts(data, clips=clip_all), set()),
    "heads of each rank": (lambda data: experts(data, divides=False, exchanges=False), set()),
    "reduced by hand": (divides_later, set()),
    "master weights": (masters, set()),
    "master weights, zeroed": (lambda data: masters(data, grads="zero"), set()),
    "moved by hand": (zeroed, set()),
}

#: Loops with a mistake, and all that is said.
BROKEN = {
    "one rank does not step, past the hooks": (lambda data: past_hooks(data, steps_on=(1,)), SKIPS),
    "weighed under DDP": (lambda data: changed(data, weigh_alone), DIFFER),
    "weighed under FSDP2": (lambda data: changed(data, weigh_alone, wrap=fully_shard), SCALES),
    "clipped by limits of ranks under FSDP2": (lambda data: changed(data, clip_by_rank, wrap=fully_shard), SCALES),
    "clipped by limits of ranks, reduced by hand": (lambda data: changed(data, clip_by_rank, wrap=nn.Identity), DIFFER),
    "experts that are not divided": (lambda data: experts(data, divides=False), FACTORS),
    "experts that begin alike, not divided": (lambda data: experts(data, divides=False, seed=7), FACTORS),
    "experts not divided, clipped by all": (lambda data: experts(data, divides=False, clips=clip_all), FACTORS),
    "clipped by the norm of each rank's expert": (lambda data: experts(data, clips=clip_alone), DIFFER),
    "summed by hand": (lambda data: divides_later(data, writes_all=False), FACTORS),
}  # fmt: skip


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loop_has_no_finding(rank: Rank, name):
    loop, noted = HEALTHY[name]
    findings, notes = titles(loop, rank, is_healthy=True)
    assert not findings and notes == noted


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", BROKEN)
def test_its_broken_twin_is_found(rank: Rank, name):
    loop, said = BROKEN[name]
    findings, notes = titles(loop, rank)
    assert said in findings | notes, (findings, notes)


@pytest.mark.sampled
@world(2)
def test_numbers_of_ranks_are_no_multiples_of_each_other(rank: Rank):
    with doctor(on_finding="collect", patience=20) as watching:
        ignored_number(Data(rank.index), reduces=False)
    (found,) = [one.render() for one in watching.findings if "replicas differ" in one.title]
    assert "each rank has its own gradients: nothing has reduced them" in found and "scales" not in found, found
