"""Loops that train several roots under the doctor, each healthy one beside its twin with a mistake in one root alone.

The doctor is as under the command: it is given no model, and finds the roots by their forwards.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from shardproof.harness.parity.rank import Rank
from shardproof.harness.training.doctor import Unhealthy, doctor
from shardproof.harness.watching.roots import RootName, labels
from shardproof.harness.watching.ties import Ties
from shardproof.testing import world
from tests.harness.test_doctor_loops import STEPS, Data, adamw, reduces_by_hand, sgd


class Generator(nn.Sequential):
    """Noise to samples."""


class Critic(nn.Sequential):
    """Samples to a score."""


def none(model):
    return model


def shard(model):
    """Call fully_shard() by its module, in which it is seen."""
    return fsdp.fully_shard(model)


def networks(kind=Critic):
    torch.manual_seed(0)
    first, second = nn.Linear(4, 6), nn.Linear(6, 6)
    return Generator(first, nn.Tanh(), second), kind(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def both(models):
    return torch.optim.AdamW([one for model in models for one in model.parameters()], lr=1e-2)


def adversaries(
    data, wrap=DDP, *, of_critic=adamw, wraps_critic=True, kind=Critic, detached=True, made_early=False, over=None,
    loaded_by=(),
):  # fmt: skip
    """A generator and a critic, each with an optimizer; the critic may come first, or lack its wrapper."""
    generator, critic = networks(kind)
    state = {name: torch.randn(one.shape) for name, one in critic.state_dict().items()}
    if data.rank in loaded_by:
        critic.load_state_dict(state)
    early = adamw(critic)
    generator = wrap(generator)
    critic = wrap(critic) if wraps_critic else critic
    of_generator = adamw(generator)
    of_critic = early if made_early else of_critic(critic if over is None else generator)
    del early
    losses = []
    for real, _ in data.batches():
        noise = data.noise(8, 4)
        with torch.set_grad_enabled(detached):
            fake = generator(noise)
        of_critic.zero_grad()
        loss = (F.softplus(-critic(real)) + F.softplus(critic(fake.detach()))).mean()
        loss.backward()
        if wrap is none:
            reduces_by_hand(critic)
        nn.utils.clip_grad_norm_(critic.parameters(), 0.1)
        of_critic.step()
        of_generator.zero_grad()
        other = F.softplus(-critic(fake if detached else generator(noise))).mean()
        other.backward()
        if wrap is none:
            reduces_by_hand(generator)
        of_generator.step()
        losses += [loss.item(), other.item()]
    return losses


def by_rank(model, data):
    """A learning rate of each rank's own."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2 * (1 + data.rank))


class Headed(nn.Module):
    """A head on an encoder, which several models may have."""

    def __init__(self, encoder, outputs):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(8, outputs)

    def forward(self, inputs):
        return self.head(self.encoder(inputs).tanh())


class Actor(Headed):
    """A policy."""


class Value(Headed):
    """A value."""


def actor_critic(data, wrap=DDP, *, shares=False, warm=0, lr=1e-2, reduces=True):
    """An actor and a value network with an optimizer each, or one on an encoder of both; the value may come later."""
    torch.manual_seed(0)
    encoder = nn.Linear(6, 8)
    actor, value = Actor(encoder, 3), Value(encoder if shares else nn.Linear(6, 8), 1)
    actor, value = wrap(actor), wrap(value)
    shared = {id(one) for one in encoder.parameters()} if shares else set()
    rest = [one for one in value.parameters() if id(one) not in shared]
    lr = lr if isinstance(lr, float) else lr(data)
    of_actor, of_value = adamw(actor), torch.optim.AdamW(rest, lr=lr)
    losses = []
    for step in range(2 + STEPS):
        inputs, classes = data.batch()
        of_actor.zero_grad()
        of_value.zero_grad()
        loss = F.cross_entropy(actor(inputs), classes)
        if step >= warm:
            loss = loss + value(inputs).square().mean()
        loss.backward()
        for model in (actor, *((value,) if step >= warm and reduces else ())):
            for one in model.parameters() if wrap is none else ():
                if one.grad is not None and not getattr(one.grad, "is_reduced", False):
                    dist.all_reduce(one.grad)
                    one.grad.div_(dist.get_world_size()).is_reduced = True
        of_actor.step()
        if step >= warm:
            of_value.step()
        losses.append(loss.item())
    return losses


def tower(*, ties):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    if ties:
        model[2].weight = model[0].weight
    return model


def towers(data, *, wraps=(True, True), ties=(False, False)):
    """Two towers of one class with one optimizer, of which the second may have no wrapper, and each a tie."""
    torch.manual_seed(0)
    query, document = (tower(ties=is_tied) for is_tied in ties)
    query, document = (
        DDP(one) if is_wrapped else one for one, is_wrapped in zip((query, document), wraps, strict=True)
    )
    optimizer = both([query, document])
    losses = []
    for inputs, _ in data.batches():
        loss = (query(inputs) - document(inputs.flip(0))).square().mean() + query(inputs).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*query.parameters(), *document.parameters()], 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses


def two_heads(data):
    """A root that is called twice in a step, and one with two heads, whose labels are of different numbers."""
    torch.manual_seed(0)
    first, second = DDP(nn.Linear(6, 3)), DDP(nn.Sequential(nn.Linear(6, 6)))
    optimizers = adamw(first), adamw(second)
    losses = []
    for inputs, classes in data.batches():
        some = torch.where(torch.arange(len(classes)) % 2 == 0, classes, -100)
        loss = first(inputs).square().mean() + first(inputs.flip(0)).square().mean()
        heads = second(inputs).split(3, dim=1)
        loss = loss + F.cross_entropy(heads[0], classes) + F.cross_entropy(heads[1], some)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def followed(data, *, averages=False, gradients=False):
    """A student with a teacher that does not train, a copy of it or its average; with gradients that go nowhere."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    teacher = copy.deepcopy(model.module)
    optimizer = sgd(model)
    losses = []
    for inputs, classes in data.batches():
        optimizer.zero_grad()
        with torch.set_grad_enabled(gradients):
            target = teacher(inputs)
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, classes) + F.mse_loss(outputs, target if gradients else target.detach())
        loss.backward()
        optimizer.step()
        for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True) if averages else ():
            slow.data.lerp_(fast.data, 0.1)
        losses.append(loss.item())
    return losses


def encodes(data, *, first=True):
    """A part of the model is called by itself, before the whole one or after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    optimizer = adamw(model)
    losses = []
    for inputs, classes in data.batches():
        optimizer.zero_grad()
        part = model[0](inputs).square().mean() if first else 0.0
        loss = F.cross_entropy(model(inputs), classes) + part
        loss = loss if first else loss + model[0](inputs).square().mean()
        loss.backward()
        reduces_by_hand(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def turns(data):
    """Two optimizers that alternate, over two roots that are both called in each step."""
    generator, critic = networks()
    generator, critic = DDP(generator), DDP(critic)
    optimizers = adamw(generator), adamw(critic)
    losses = []
    for step in range(2 * STEPS):
        loss = critic(generator(data.noise(8, 4))).square().mean()
        generator.zero_grad()
        critic.zero_grad()
        loss.backward()
        optimizers[step % 2].step()
        losses.append(loss.item())
    return losses


def named(one):
    """A finding without the number of its step."""
    return one.render().splitlines()[0].replace(f"step {one.step}: ", "")


SHARDED = functools.partial(adversaries, wrap=shard)
BY_HAND = functools.partial(adversaries, wrap=none)

#: Healthy loops, and the roots that are watched.
HEALTHY = {
    "GAN": (adversaries, ["Generator", "Critic"]),
    "GAN under FSDP2": (SHARDED, ["Generator", "Critic"]),
    "GAN under FSDP2, the critic first": (lambda data: SHARDED(data, detached=False), ["Critic", "Generator"]),
    "GAN by hand": (BY_HAND, ["Generator", "Critic"]),
    "GAN of one class": (
        lambda data: adversaries(data, kind=Generator), ["Generator 'generator'", "Generator 'critic'"]),
    "actor and value": (actor_critic, ["Actor", "Value"]),
    "actor and value under FSDP2": (lambda data: actor_critic(data, shard), ["Actor", "Value"]),
    "actor and value by hand": (lambda data: actor_critic(data, none), ["Actor", "Value"]),
    "a value that comes later": (lambda data: actor_critic(data, warm=3), ["Actor", "Value"]),
    "an encoder of both": (lambda data: actor_critic(data, none, shares=True), ["Actor", "Value"]),
    "towers": (towers, ["Sequential 'query'", "Sequential 'document'"]),
    "a tied tower first": (
        lambda data: towers(data, ties=(True, False)), ["Sequential 'query'", "Sequential 'document'"]),
    "a tied tower last": (
        lambda data: towers(data, ties=(False, True)), ["Sequential 'query'", "Sequential 'document'"]),
    "a critic that all ranks load": (lambda data: SHARDED(data, loaded_by=(0, 1)), ["Generator", "Critic"]),
    "two heads beside another root": (two_heads, ["Linear", "Sequential"]),
    "a copy": (followed, []),
    "a copy with gradients": (lambda data: followed(data, gradients=True), []),
    "an average": (lambda data: followed(data, averages=True), []),
    "a part first": (encodes, []),
    "a part last": (lambda data: encodes(data, first=False), []),
    "taking turns": (turns, ["Generator", "Critic"]),
}  # fmt: skip

UNREDUCED = "gradients are not reduced [D11, S2]"
NOTED = "note: Critic: " + UNREDUCED
SCALED = "Critic: ranks scale gradients differently [D10, S6]"
UNHELD = "parameters are in no optimizer [D4, S7]"
DEAD = "the optimizer holds dead parameters [D4, S7]"
RATES = "ranks step by different settings of the optimizer [D18]"
MIXED = "parameters are a mixture of ranks' values [D21, S9]"
APART = "replicas differ after the step [D1, S9]"

#: Loops with a mistake in one root alone, and all that is told of it.
BROKEN = {
    "a bare critic": (lambda data: adversaries(data, wraps_critic=False), [f"Critic: {UNREDUCED}"]),
    "a bare critic under FSDP2": (lambda data: SHARDED(data, wraps_critic=False), [f"Critic: {UNREDUCED}"]),
    "a bare critic comes first": (lambda data: SHARDED(data, wraps_critic=False, detached=False),
                                  [NOTED, SCALED, f"Critic: {UNREDUCED}"]),
    "rates": (lambda data: adversaries(data, of_critic=lambda model: by_rank(model, data)), [f"Critic: {APART}"]),
    "rates under FSDP2": (
        lambda data: SHARDED(data, of_critic=lambda model: by_rank(model, data)), [f"Critic: {RATES}"]),
    "a critic's early optimizer": (lambda data: SHARDED(data, made_early=True), [f"Critic: {DEAD}"]),
    "the first one's early optimizer": (
        lambda data: SHARDED(data, made_early=True, detached=False), [f"Critic: {DEAD}"]),
    "the other's parameters": (lambda data: adversaries(data, over="generator"), [f"Critic: {UNHELD}"]),
    "a bare tower": (lambda data: towers(data, wraps=(True, False)), [f"Sequential 'document': {UNREDUCED}"]),
    "a critic that one rank loads": (lambda data: SHARDED(data, loaded_by=(0,)), [f"note: Critic: {MIXED}"]),
    "a value by rank": (lambda data: actor_critic(data, lr=lambda data: 1e-2 * (1 + data.rank)), [f"Value: {APART}"]),
    "a late value by rank": (lambda data: actor_critic(data, warm=3, lr=lambda data: 1e-2 * (1 + data.rank)),
                             [f"Value: {APART}"]),
    "a value that is not reduced": (lambda data: actor_critic(data, none, reduces=False), [f"Value: {UNREDUCED}"]),
}  # fmt: skip

#: What is noted of a healthy loop, because the loop might not mean it.
NOTED_OF = {"a copy with gradients": ["note: a copy of the model gets gradients [D31, S7]"]}

#: Those that run by day.
BY_DAY = {"GAN", "GAN under FSDP2, the critic first", "an encoder of both", "a copy with gradients", "a bare critic",
          "rates under FSDP2", "a critic's early optimizer", "a late value by rank", "a tied tower first",
          "a critic that one rank loads"}  # fmt: skip


def rows(table):
    return [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in table]


def roots_in(summary):
    """The roots that a summary has lines of."""
    return [line.split(", step")[0].split("root", 1)[1].strip() for line in summary.splitlines() if " root  " in line]


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", rows(HEALTHY))
def test_in_healthy_roots_nothing_is_found(rank: Rank, name):
    """Nor is something noted but of one, and losses have the same bits as without the doctor."""
    loop, roots = HEALTHY[name]
    with doctor(on_finding="collect", patience=20, registered=Ties()) as watching:
        losses = loop(Data(rank.index))
    assert [named(one) for one in watching.findings] == NOTED_OF.get(name, [])
    assert roots_in(watching.summary()) == roots, watching.summary()
    assert losses == loop(Data(rank.index))


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", rows(BROKEN))
def test_a_mistake_in_one_root_has_its_name(rank: Rank, name):
    loop, told = BROKEN[name]
    with doctor(on_finding="collect", patience=20, registered=Ties()) as watching:
        loop(Data(rank.index))
    assert [named(one) for one in watching.findings] == told, watching.summary()
    title, *_ = watching.summary().splitlines()
    assert f"{sum(not one.startswith('note: ') for one in told) or 'no'} finding" in title


@pytest.mark.sampled
@world(2)
def test_a_finding_of_any_root_is_one_exception(rank: Rank):
    with pytest.raises(Unhealthy) as raised, doctor(on_finding="raise", patience=20):
        adversaries(Data(rank.index), of_critic=lambda model: by_rank(model, Data(rank.index)))
    assert str(raised.value).startswith("step 0: Critic: replicas differ after the step [D1, S9]")


def test_roots_of_one_class_have_names_of_their_own():
    given = [("A", "a"), ("B", "b"), ("B", "c"), ("C", "d"), ("C", "d"), ("D", ""), ("D", "e")]
    assert labels(RootName(*one) for one in given) == ["A", "B 'b'", "B 'c'", "C 1", "C 2", "D 1", "D 'e'"]


def test_each_loop_by_day_is_in_a_table():
    assert not BY_DAY - {*HEALTHY, *BROKEN}
