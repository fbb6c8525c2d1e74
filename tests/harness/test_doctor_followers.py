"""Loops under the doctor with copies of a model, norms in a mode, sums of gradients, and collectives in autograd.

Each healthy one stands beside its broken twin.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardproof.harness.parity.rank import Rank
from shardproof.harness.watching.ties import Ties
from shardproof.testing import world
from tests.harness.test_doctor_loops import STEPS, adamw, perceptron, sgd, titles, train

APART = "copies of the model differ between ranks [D31, S9]"
BEGAN = "a copy of the model began with other values [D31]"
DRIFT = "copies of the model drift apart [D31, S9]"
SOME = "copies of the model are written on some ranks only [D31, S9]"
LOST = "updates of a copy of the model are lost to rounding [D31, S13]"
MODE = "a copy of the model computes in training mode [D31]"
OFTEN = "a copy of the model is written for each microbatch [D31, S4]"
GRADIENTS = "a copy of the model gets gradients [D31, S7]"
MOVING = "statistics of frozen norms move [D19]"
EVAL = "the model trains in eval mode [D19]"
ROUNDED = "constants are rounded [D6, S13]"
SUM = "gradients are a sum, not a mean [D11, S1]"
PADS = "padding of gathered tensors takes part in the loss [D32]"
LACKS = "a collective in autograd lacks the gradients of other ranks [D32, S10]"


def network(*, norm=None, dropout=0.0):
    layers = [nn.Linear(6, 16), *([norm] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.Dropout(dropout)] if dropout else []), nn.Linear(16, 3))


def of_trained(model):
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)


# Copies


def keep_module(net):
    """A copy as a module."""
    own = copy.deepcopy(net).requires_grad_(False)
    return own, list(own.parameters())


def keep_list(net):
    """A copy as a list of an object."""
    own = Shadow(list(net.parameters()))
    return own, own.shadow


def keep_dict(net):
    """A copy as a dict by names."""
    own = {name: one.detach().clone() for name, one in net.named_parameters()}
    return own, list(own.values())


class Shadow:
    def __init__(self, parameters):
        self.shadow = [one.detach().clone() for one in parameters]


@torch.no_grad()
def average(shadow, net, decay=0.9):
    for own, one in zip(shadow, net.parameters(), strict=True):
        own.lerp_(one.to(own.dtype), 1 - decay)


def averaged(
    data, *, keep=keep_module, copied="after", seed="by rank", decay=lambda rank: 0.9, only=None, called=False,
    dtype=None, mode=False, dropout=0.0, norm=None, written="step", microbatches=1, gradients=False, drawn=False,
):  # fmt: skip
    """A moving average, kept and written in some way, which may be called as a teacher."""
    torch.manual_seed(data.rank if seed == "by rank" else 0)
    net = network(dropout=dropout, norm=norm)
    if dtype is not None:
        net.to(dtype)
    kept = keep(net) if copied == "before" else None
    model = DDP(net)
    owner, shadow = kept or keep(net)
    if drawn:
        owner.load_state_dict(network().state_dict() if drawn == "alike" else net.state_dict())
    if gradients:
        owner.requires_grad_(True)
    if called:
        owner.train(mode)
    optimizer = of_trained(model)
    for _ in range(STEPS):
        for _ in range(microbatches):
            inputs, labels = data.batch()
            target = owner(inputs) if called else 0.0
            logits = model(inputs if dtype is None else inputs.to(dtype)).float()
            target = target if gradients else torch.as_tensor(target).detach()
            (F.cross_entropy(logits, labels) + (logits - target).square().mean()).div(microbatches).backward()
            if written == "microbatch" and (only is None or data.rank == only):
                average(shadow, net, decay(data.rank))
        optimizer.step()
        optimizer.zero_grad()
        if written == "step" and (only is None or data.rank == only):
            average(shadow, net, decay(data.rank))


def by_torch(data, *, copied="after"):
    """torch's own moving average."""
    torch.manual_seed(data.rank)
    net = network()
    model = DDP(net) if copied == "after" else net
    mean = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model = model if copied == "after" else DDP(net)
    train(model, adamw(model), data, after=lambda step: mean.update_parameters(net))


def targets(data, *, every=2):
    """A target network, which is a copy of the parameters once in some steps."""
    net = network()
    model, target = DDP(net), copy.deepcopy(net)

    def after(step):
        if step % every == every - 1:
            target.load_state_dict(net.state_dict())

    train(model, adamw(model), data, after=after)


def best(data):
    """A copy of the best state by the rank's own loss, which differs between ranks, and is not called."""
    net, states = network(), []
    model = DDP(net)

    def after(step):
        if step % 2 == data.rank:
            states[:] = [copy.deepcopy(net.state_dict())]

    train(model, adamw(model), data, after=after)


def of_opponents(data):
    """Each rank plays against an earlier state of its own, which stays."""
    net = network()
    opponent = copy.deepcopy(net).requires_grad_(False)
    with torch.no_grad():
        for one in opponent.parameters():
            one.add_(0.1 * data.noise(*one.shape))
    model = DDP(net)
    train(model, adamw(model), data, before=lambda step: opponent(data.noise(2, 6)))


def twins(data):
    """Two critics of one architecture, and a network of the same shapes that is none of them."""
    torch.manual_seed(7 + data.rank)
    nets = nn.ModuleList([network(), network()])
    world_model = network().requires_grad_(False)
    model = DDP(Both(nets))
    train(model, adamw(model), data, before=lambda step: world_model(data.noise(2, 6)))


class Both(nn.Module):
    def __init__(self, nets):
        super().__init__()
        self.nets = nets

    def forward(self, inputs):
        return self.nets[0](inputs) + self.nets[1](inputs)


class Momentum(nn.Module):
    """A student and its teacher in one module, which is written in forward."""

    def __init__(self):
        super().__init__()
        self.student = network(norm=nn.BatchNorm1d(16))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, inputs):
        average(list(self.teacher.parameters()), self.student)
        with torch.no_grad():
            target = self.teacher(inputs)
        return self.student(inputs) + 0 * target


def in_one_module(data, *, microbatches=1):
    model = DDP(Momentum(), broadcast_buffers=False)
    optimizer = of_trained(model)
    for _ in range(STEPS):
        for _ in range(microbatches):
            inputs, labels = data.batch()
            (F.cross_entropy(model(inputs), labels) / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()


# Modes


class Detector(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)
        self.again = again
        self.body.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        if not self.again:
            self.body.eval()
        return self

    def forward(self, inputs):
        return self.head(self.body(inputs))


def frozen(data, *, again):
    """A frozen body, whose norm is in training mode again after ``train()``."""
    model = DDP(Detector(again), broadcast_buffers=False)
    model.train()
    train(model, of_trained(model), data)


def in_mode(data, *, mode, dropout=0.1):
    model = DDP(network(dropout=dropout))
    model.train(mode)
    train(model, adamw(model), data)


class Rotary(nn.Module):
    def __init__(self, values, persistent=False):
        super().__init__()
        self.register_buffer("table", values, persistent=persistent)
        self.inner = perceptron()

    def forward(self, inputs):
        return self.inner(inputs * self.table.sum().to(inputs.dtype).tanh())


def rotary(data, values, *, casts=True):
    net = Rotary(values)
    if casts:
        net.table.data = net.table.to(torch.bfloat16)
    model = DDP(net)
    train(model, adamw(model), data)


# Sums


def summing(divides):
    def hook(group, bucket):
        flat = bucket.buffer().div_(dist.get_world_size() if divides else 1)
        return dist.all_reduce(flat, async_op=True).get_future().then(lambda done: done.value()[0])

    return hook


def under_hook(data, *, divides, scale=1.0, reduction="mean"):
    model = DDP(perceptron())
    model.register_comm_hook(None, summing(divides))
    optimizer = sgd(model)
    for inputs, labels in data.batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels, reduction=reduction)
        (loss * scale).backward()
        optimizer.step()


def by_hand(data, *, divides):
    torch.manual_seed(3)
    net = perceptron()
    optimizer = sgd(net)
    for inputs, labels in data.batches():
        optimizer.zero_grad()
        F.mse_loss(net(inputs), F.one_hot(labels, 3).float()).backward()
        for one in net.parameters():
            dist.all_reduce(one.grad)
            one.grad.div_(dist.get_world_size() if divides else 1)
        optimizer.step()


# Collectives in autograd


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, sums):
        ctx.sums = sums
        parts = [torch.zeros_like(inputs) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, inputs.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if ctx.sums:
            dist.all_reduce(gradient)
        return gradient[dist.get_rank()], None


class GatherRows(torch.autograd.Function):
    """The same by the newer form, whose forward has no context, of one tensor of all rows."""

    @staticmethod
    def forward(inputs, sums):
        whole = inputs.new_zeros(dist.get_world_size() * len(inputs), *inputs.shape[1:])
        dist.all_gather_into_tensor(whole, inputs.contiguous())
        return whole

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.sums = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if ctx.sums:
            dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()], None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, sums):
        ctx.sums = sums
        dist.all_reduce(inputs := inputs.clone())
        return inputs

    @staticmethod
    def backward(ctx, gradient):
        if ctx.sums:
            dist.all_reduce(gradient := gradient.clone())
        return gradient, None


def contrasted(data, kind, *, sums, rows="own"):
    """A loss over the outputs of all ranks: of the rank's own rows, or of all rows, which all ranks compute alike."""
    model = DDP(perceptron())
    optimizer = sgd(model)
    for inputs, _ in data.batches():
        optimizer.zero_grad()
        own = model(inputs)
        every = kind.apply(own, sums).reshape(-1, own.shape[-1])
        logits = (own if rows == "own" else every) @ every.t()
        first = data.rank * len(own) if rows == "own" else 0
        F.cross_entropy(logits, torch.arange(first, first + len(logits))).backward()
        optimizer.step()


def uneven(data, gather, *, then, dim=0):
    """A contrastive loss over rows of all ranks, of which some have fewer; in one dimension they are padded."""
    torch.manual_seed(3)
    model = DDP(perceptron())
    optimizer = sgd(model)
    for inputs, _ in data.batches():
        optimizer.zero_grad()
        count = 8 - 3 * data.rank
        own = F.normalize(model(inputs[:count]))
        pads = (0, 0, 0, 8 - count) if dim == 0 else (0, 8 - count)
        parts = gather(F.pad(own if dim == 0 else own.t(), pads))
        every = torch.cat([one if dim == 0 else one.t() for one in parts])
        is_row = torch.cat([torch.arange(8) < 8 - 3 * rank for rank in range(2)])
        then(own, every, is_row, data.rank).backward()
        optimizer.step()


def contrast(own, every, first, is_row=None):
    """The mean over the 13 rows of both ranks."""
    logits = own @ every.t() / 0.2
    logits = logits if is_row is None else logits.masked_fill(~is_row, -1e9)
    return F.cross_entropy(logits, first + torch.arange(len(own)), reduction="sum") * 2 / 13


#: Losses that leave the padding out, or for which it is zeros of a sum.
LEFT_OUT = {
    "cut": lambda own, every, is_row, rank: contrast(own, every[is_row], 8 * rank),
    "masked": lambda own, every, is_row, rank: contrast(own, every, 8 * rank, is_row),
    "centred": lambda own, every, is_row, rank: (own - every.sum(0) / is_row.sum()).square().mean(),
}  # fmt: skip


def with_padding(own, every, is_row, rank):
    return contrast(own, every, 8 * rank)


def gathered(own):
    return torch.distributed.nn.functional.all_gather(own)


def as_parts(data):
    """A sum over ranks that compute one loss alike, as in tensor parallelism: its backward is the identity."""
    torch.manual_seed(3)
    net = perceptron()
    model = DDP(net)
    optimizer = sgd(model)
    for inputs, _ in data.batches():
        optimizer.zero_grad()
        total = Sum.apply(model(inputs).mean(0, keepdim=True), False)
        F.cross_entropy(total, torch.zeros(1, dtype=torch.long)).backward()
        optimizer.step()


TABLE = 1.0 / 10000 ** (torch.arange(16.0) / 16)

#: Healthy loops: the note that is printed.
HEALTHY = {
    "average as a module": (averaged, ""),
    "average as a list": (lambda data: averaged(data, keep=keep_list), ""),
    "average as a dict": (lambda data: averaged(data, keep=keep_dict), ""),
    "average of torch": (by_torch, ""),
    "average on one rank": (lambda data: averaged(data, only=0), ""),
    "average in a loop with microbatches": (lambda data: averaged(data, microbatches=2), ""),
    "average of a narrow model in float32": (
        lambda data: averaged(data, dtype=torch.bfloat16, decay=lambda rank: 0.999, keep=keep_wide), ""),
    "average of a few values in a narrow dtype": (
        lambda data: averaged(data, dtype=torch.bfloat16, decay=lambda rank: 0.2), ""),
    "copied before the broadcast, of one seed": (lambda data: averaged(data, copied="before", seed="one"), ""),
    "teacher in eval mode": (lambda data: averaged(data, called=True, dropout=0.1), ""),
    "target": (targets, ""),
    "best state": (best, ""),
    "opponents": (of_opponents, APART),
    "twins": (twins, ""),
    "student and teacher in one module": (in_one_module, ""),
    "frozen body in eval mode": (lambda data: frozen(data, again=False), ""),
    "training mode": (lambda data: in_mode(data, mode=True), ""),
    "eval mode without dropout": (lambda data: in_mode(data, mode=False, dropout=0.0), ""),
    "table in float32": (lambda data: rotary(data, TABLE, casts=False), ""),
    "mask in bfloat16": (lambda data: rotary(data, torch.ones(4, 4).tril()), ""),
    "hook that divides": (lambda data: under_hook(data, divides=True), ""),
    "hook that sums a part of the mean": (lambda data: under_hook(data, divides=False, scale=0.5), ""),
    "hook that sums sums": (lambda data: under_hook(data, divides=False, scale=0.01, reduction="sum"), ""),
    "mean by hand": (lambda data: by_hand(data, divides=True), ""),
    "gather": (lambda data: contrasted(data, Gather, sums=True), ""),
    "gather of rows": (lambda data: contrasted(data, GatherRows, sums=True), ""),
    "gather for a loss of all ranks": (lambda data: contrasted(data, Gather, sums=False, rows="all"), ""),
    "sum for a loss of all ranks": (as_parts, ""),
    "padding that is cut": (lambda data: uneven(data, gathered, then=LEFT_OUT["cut"]), ""),
    "padding that is masked": (lambda data: uneven(data, gathered, then=LEFT_OUT["masked"]), ""),
    "padding of a sum": (lambda data: uneven(data, gathered, then=LEFT_OUT["centred"]), ""),
}  # fmt: skip

#: Loops with a mistake, and the finding or the note.
BROKEN = {
    "teacher before the broadcast": (lambda data: averaged(data, copied="before"), APART),
    "list before the broadcast": (lambda data: averaged(data, copied="before", keep=keep_list), APART),
    "dict before the broadcast": (lambda data: averaged(data, copied="before", keep=keep_dict), APART),
    "average of torch before the broadcast": (lambda data: by_torch(data, copied="before"), APART),
    "average with a draw of its own": (lambda data: averaged(data, seed="one", drawn="alike"), BEGAN),
    "decay by rank": (lambda data: averaged(data, decay=lambda rank: 0.9 - 0.1 * rank), DRIFT),
    "teacher on one rank": (lambda data: averaged(data, only=0, called=True), SOME),
    "average in bfloat16": (
        lambda data: averaged(data, dtype=torch.bfloat16, decay=lambda rank: 0.999), LOST),
    "list in bfloat16": (
        lambda data: averaged(data, dtype=torch.bfloat16, decay=lambda rank: 0.999, keep=keep_list), LOST),
    "teacher with dropout": (lambda data: averaged(data, called=True, mode=True, dropout=0.1), MODE),
    "reference with moving statistics": (
        lambda data: averaged(data, called=True, mode=True, norm=nn.BatchNorm1d(16), written="never"), MODE),
    "average in each microbatch": (lambda data: averaged(data, microbatches=2, written="microbatch"), OFTEN),
    "average in each forward": (lambda data: in_one_module(data, microbatches=2), OFTEN),
    "teacher with gradients": (lambda data: averaged(data, called=True, gradients=True), GRADIENTS),
    "frozen body in training mode": (lambda data: frozen(data, again=True), MOVING),
    "eval mode": (lambda data: in_mode(data, mode=False), EVAL),
    "table in bfloat16": (lambda data: rotary(data, TABLE), ROUNDED),
    "hook that sums": (lambda data: under_hook(data, divides=False), SUM),
    "sum by hand": (lambda data: by_hand(data, divides=False), SUM),
    "padding": (lambda data: uneven(data, gathered, then=with_padding), PADS),
    "padding of a gather of its own": (
        lambda data: uneven(data, lambda own: Gather.apply(own, True), then=with_padding), PADS),
    "padding of columns": (lambda data: uneven(data, gathered, then=with_padding, dim=1), PADS),
    "gather takes its slice": (lambda data: contrasted(data, Gather, sums=False), LACKS),
    "gather of rows takes its slice": (lambda data: contrasted(data, GatherRows, sums=False), LACKS),
}  # fmt: skip


def keep_wide(net):
    """A copy as a list in float32."""
    own = [one.detach().float().clone() for one in net.parameters()]
    return own, own


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
    loop, title = BROKEN[name]
    findings, notes = titles(loop, rank, registered=Ties())
    assert findings | notes == {title} and findings == ({title} if title == APART else set())
