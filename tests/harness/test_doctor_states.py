"""Loops with frozen, tied, loaded and narrow parameters, buffers, replicas by hand, recomputation and tokens.

Each healthy one stands beside its broken twin.
"""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardproof.harness.parity.rank import Rank
from shardproof.harness.training.doctor import doctor
from shardproof.harness.watching.ties import Ties
from shardproof.testing import world
from tests.harness.test_doctor_loops import FLAT, STEPS, Data, adamw, perceptron, reduces_by_hand, titles, train

UNLIKE = "note: buffers differ between ranks [D20, S9]"
MIXED = "parameters are a mixture of ranks' values [D21, S9]"
REDRAWN = "recomputations draw other random numbers [D22]"
TWICE = "running statistics move twice a step [D22]"
EVALUATES = "the model trains in eval mode [D19]"
PARTED = "parameters were tied and are not [D8, S8]"


# Frozen parameters


def frozen(data, *, clears=True):
    """The first layer is frozen after a step; its gradient may stay, as zeros."""
    model = perceptron()
    optimizer = adamw(model)
    for step in range(STEPS):
        inputs, labels = data.batch()
        optimizer.zero_grad(set_to_none=clears)
        F.cross_entropy(model(inputs), labels).backward()
        reduces_by_hand(model)
        optimizer.step()
        if step == 0:
            model[0].requires_grad_(False)


def partly_frozen(data, *, holds=True, replaces=None, moves=False):
    """The first layer is frozen, with or without a place in the optimizer; something may replace its parameters."""
    model = perceptron()
    first, *rest = model.children()
    first.requires_grad_(False)
    for name, one in [*first.named_parameters()] if replaces is not None else ():
        setattr(first, name, replaces(one))
    fully_shard(model)
    optimizer = adamw(model if holds else nn.ModuleList(rest))

    def before(step):
        for one in first.parameters() if moves else ():
            one.grad = torch.ones_like(one)

    train(model, optimizer, data, before=before)


# Buffers


class Router(nn.Module):
    """Experts that tokens choose by a score with a bias, which balances their load."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.experts = nn.Linear(6, 3, bias=False), nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.register_buffer("bias", torch.zeros(3))
        self.load = torch.zeros(3)

    def forward(self, inputs):
        scores = self.gate(inputs).sigmoid()
        weights = torch.where(F.one_hot((scores + self.bias).argmax(-1), 3).bool(), scores, 1e-3)
        self.load = weights.detach().sum(0)
        return sum(weights[:, n : n + 1] * expert(inputs) for n, expert in enumerate(self.experts))

    def balance(self, *, reduces):
        if reduces:
            dist.all_reduce(self.load)
        self.bias -= 0.1 * (self.load / self.load.sum() - 1 / 3)


def routed(data, wrap=fully_shard, *, reduces=True):
    """The bias of a router follows the load of all ranks, or of each rank's own data; without a wrapper as well."""
    torch.manual_seed(0)
    router = Router()
    model = nn.Sequential(nn.Linear(6, 6), router)
    model = model if wrap is None else wrap(model)

    def before(step):
        if wrap is None:
            reduces_by_hand(model)

    train(model, adamw(model), data, before=before, after=lambda step: router.balance(reduces=reduces))


def normalized(data, wrap):
    """BatchNorm, whose running statistics are of each rank's own data."""
    model = wrap(perceptron(nn.BatchNorm1d))
    train(model, adamw(model), data)


# Replicas without a wrapper


def begins_apart(data, *, broadcasts=False):
    """Ranks begin with different weights and average their gradients; a broadcast may follow the first backward."""
    model = perceptron()
    with torch.no_grad():
        for one in model.parameters():
            one.add_(0.1 * dist.get_rank())

    def before(step):
        reduces_by_hand(model)
        for one in model.parameters() if broadcasts and step == 0 else ():
            dist.broadcast(one.detach(), 0)

    train(model, adamw(model), data, before=before)


# Narrow dtypes


def narrow(data, *, lr, betas=(0.9, 0.95), dtype=torch.bfloat16, wrap=DDP):
    """Parameters and moments in a narrow dtype, by updates that may be below the spacing of most of their values."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)
    model = wrap(nn.Sequential(*layers).to(dtype))

    def draw(data):
        inputs, labels = data.batch()
        return inputs.to(dtype), labels

    train(model, torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=0.0), data, draw=draw)


# Tied parameters


class Tied(nn.Module):
    """A language model whose head may have the embedding's weight."""

    def __init__(self, *, tie):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)).tanh())

    def resize(self):
        self.embed, self.head = nn.Embedding(13, 6), nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def untie(self):
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())

    def cast(self):
        """Make each parameter anew, also one that was two."""
        for module in (self.embed, self.head):
            module.weight = nn.Parameter(module.weight.detach().double().float())

    def tie(self):
        self.head.weight = self.embed.weight

    def tie_back(self):
        self.embed.weight = self.head.weight


class TiedHead(nn.Module):
    """The same with the embedding within a module, so that the forward begins at the head, as hooks see it."""

    def __init__(self):
        super().__init__()
        model = Tied(tie=True)
        self.inner, self.head = nn.ModuleDict({"embed": model.embed, "body": model.body}), model.head

    def forward(self, tokens):
        return self.head(self.inner["body"](self.inner["embed"](tokens)).tanh())


def summed_by_hand(data, *, is_twice=False):
    """Sum the gradients of each parameter, or of the parameters of each module, so that a tied one is summed twice."""
    model = TiedHead()

    def reduces(model):
        held = [one for module in model.modules() for one in module.parameters(recurse=False)]
        for one in held if is_twice else model.parameters():
            dist.all_reduce(one.grad)
            one.grad.div_(dist.get_world_size())

    tied(data, nn.Sequential, model=model, reduces=reduces)


def tied(data, wrap=DDP, *, tie=True, before=None, after=None, at_step=None, model=None, reduces=reduces_by_hand):
    """Train a model with or without a tie; a method of it is called before or after it is wrapped, or at a step."""
    model = Tied(tie=tie) if model is None else model
    if before is not None:
        before(model)
    wrapped = model if wrap is None else wrap(model)
    if after is not None:
        after(model)
    optimizer = adamw(wrapped)
    for step in range(STEPS):
        tokens = torch.randint(11, (4, 5), generator=data.generator)
        if at_step is not None and step == 1:
            at_step(model)
            optimizer = adamw(wrapped)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if wrap in (None, nn.Sequential):
            reduces(model)
        optimizer.step()


def tied_late(data):
    """DDP waits for the parameter that it was made with, and torch raises in the second forward."""
    with contextlib.suppress(RuntimeError):
        tied(data, tie=False, after=Tied.tie)


UNUSED = functools.partial(DDP, find_unused_parameters=True)


# Initial values


def loaded(data, *, where="none", who=(0, 1), seeds=(0, 0), norm=nn.LayerNorm, how=nn.Module.load_state_dict):
    """Ranks build a model, by a seed each, and some load it before fully_shard(), or all after it."""
    torch.manual_seed(5)
    state = {name: torch.randn(one.shape) for name, one in normalized_layers(norm).state_dict().items()}
    torch.manual_seed(seeds[data.rank])
    model = normalized_layers(norm)
    if data.rank in who and where in ("before", "both"):
        how(model, state)
    elif where == "meta" and data.rank:
        model = model.to("meta")
    fsdp.fully_shard(model[0])
    sharded = fsdp.fully_shard(model)
    if where in ("after", "meta", "both"):
        if where == "meta" and data.rank:
            model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=where != "after")
        set_model_state_dict(sharded, state if where == "after" or not data.rank else {}, options=options)
    train(sharded, adamw(sharded), data)


def normalized_layers(norm):
    return nn.Sequential(nn.Linear(6, 16), norm(16) if norm else nn.Identity(), nn.Tanh(), nn.Linear(16, 3))


def load_then_send(model, state):
    if dist.get_rank() == 0:
        model.load_state_dict(state)
    for one in model.parameters():
        dist.broadcast(one.detach(), 0)


# Recomputation


class Noise(nn.Module):
    def forward(self, inputs):
        return inputs * (torch.rand_like(inputs) > 0.3)


class Checkpointed(nn.Module):
    """Layers with something random between them, which backward recomputes."""

    def __init__(self, noise, **options):
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), noise, nn.Linear(8, 6)) for _ in range(2))
        self.blocks, self.last, self.options = nn.ModuleList(blocks), nn.Linear(6, 3), options

    def forward(self, inputs):
        for block in self.blocks:
            inputs = inputs + checkpoint(block, inputs, **self.options)
        return self.last(inputs)


def recomputed(data, wrap=DDP, *, noise=nn.Dropout(0.3), is_training=True, use_reentrant=False, **options):  # noqa: B008
    """Train with checkpoints; those of two forwards are recomputed by one backward."""
    model = Checkpointed(noise, use_reentrant=use_reentrant, **options).train(is_training)
    for block in model.blocks if wrap is fully_shard else ():
        fully_shard(block)
    model = wrap(model).train(is_training)
    optimizer = adamw(model)
    for inputs, labels in data.batches():
        inputs.requires_grad_(use_reentrant)
        optimizer.zero_grad()
        with contextlib.nullcontext() if wrap is fully_shard else model.no_sync():
            F.cross_entropy(model(inputs), labels).backward()
        F.cross_entropy(model(inputs.detach().flip(0).requires_grad_(use_reentrant)), labels).backward()
        optimizer.step()


def saving_noise():
    """Save random numbers, and recompute all else."""
    of = torch.ops.aten.rand_like.default

    def policy(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operator is of else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


FORGETS = {"preserve_rng_state": False}


# Tokens


def counted(data, by, wrap=DDP, *, lengths=True, heads=1, at_the_end=False):
    """Three microbatches of sequences, whose loss is a sum that is divided by some count of tokens."""
    torch.manual_seed(0)
    layers = wrap(nn.Sequential(perceptron(), nn.Linear(3, 4 * heads)))
    optimizer = adamw(layers)
    for _ in range(STEPS):
        batches = [(data.noise(16, 6), torch.randint(4, (16,), generator=data.generator)) for _ in range(3)]
        for number, (_, labels) in enumerate(batches) if lengths else ():
            labels[5 + 3 * number + data.rank :] = -100
        mine = torch.tensor([float((labels >= 0).sum()) for _, labels in batches])
        both = mine.clone()
        dist.all_reduce(both)
        optimizer.zero_grad()
        for number, (inputs, labels) in enumerate(batches):
            outputs = layers(inputs).chunk(heads, -1)
            loss = F.cross_entropy(outputs[0], labels, reduction="sum")
            count = {"step": both.sum() / 2, "microbatch": both[number] * 3 / 2, "own": mine[number]}[by]
            if heads == 2:  # the second has labels of another number
                loss = loss / mine[number] + F.cross_entropy(outputs[1][:4], inputs[:4].argmax(-1) % 4)
            (loss if at_the_end or heads == 2 else loss / count).backward()
        for one in layers.parameters() if at_the_end else ():
            one.grad /= both.sum() / 2
        optimizer.step()


OF_MICROBATCHES = "each microbatch of all ranks counts alike, whatever its tokens [D17, S5]"


#: Healthy loops: the notes that are printed, by check.
HEALTHY = {
    "frozen after a step": (frozen, "parameters stop training [D19]"),
    "frozen in the optimizer": (partly_frozen, "the optimizer holds frozen parameters [D19]"),
    "frozen": (lambda data: partly_frozen(data, holds=False), ""),
    "frozen with gradients by hand": (lambda data: partly_frozen(data, moves=True), "frozen parameters move [D19]"),
    "frozen and replaced": (lambda data: partly_frozen(data, replaces=lambda old: nn.Parameter(old.detach().clone())),
                            "frozen parameters train [D19]"),
    "frozen and replaced by frozen ones": (
        lambda data: partly_frozen(data, holds=False, replaces=lambda old: nn.Parameter(old.detach(), False)), ""),
    "router": (routed, ""),
    "router under DDP": (lambda data: routed(data, DDP), ""),
    "router by hand": (lambda data: routed(data, None), ""),
    "BatchNorm under FSDP2": (lambda data: normalized(data, fully_shard), ""),
    "BatchNorm under DDP": (lambda data: normalized(data, DDP), ""),
    "BatchNorm of each rank": (lambda data: normalized(data, functools.partial(DDP, broadcast_buffers=False)), ""),
    "begins apart and broadcasts": (lambda data: begins_apart(data, broadcasts=True), ""),
    "bfloat16": (lambda data: narrow(data, lr=1e-2), ""),
    "bfloat16 under FSDP2": (lambda data: narrow(data, lr=1e-2, wrap=fully_shard), ""),
    "small rate in float32": (lambda data: narrow(data, lr=2e-4, betas=(0.9, 0.999), dtype=torch.float32), ""),
    "tied under DDP": (tied, ""),
    "tied head": (lambda data: tied(data, model=TiedHead()), ""),
    "tied head by hand": (summed_by_hand, ""),
    "tied under FSDP1": (lambda data: tied(data, FLAT), ""),
    "tied under FSDP2": (lambda data: tied(data, fully_shard), ""),
    "tied back under FSDP2": (lambda data: tied(data, fully_shard, tie=False, before=Tied.tie_back), ""),
    "not tied": (lambda data: tied(data, tie=False), ""),
    "tied late where DDP finds what is unused": (lambda data: tied(data, UNUSED, tie=False, after=Tied.tie), ""),
    "resized": (lambda data: tied(data, before=Tied.resize), ""),
    "resized under FSDP2": (lambda data: tied(data, fully_shard, before=Tied.resize), ""),
    "untied": (lambda data: tied(data, before=Tied.untie), PARTED),
    "untied at a step": (lambda data: tied(data, None, at_step=Tied.untie), PARTED),
    "one seed": (loaded, ""),
    "a seed for each rank": (lambda data: loaded(data, seeds=(0, 1)), ""),
    "loaded by all": (lambda data: loaded(data, where="before", seeds=(0, 1)), ""),
    "loaded by one and sent": (lambda data: loaded(data, where="before", how=load_then_send), ""),
    "loaded after a seed for each rank": (lambda data: loaded(data, where="after", seeds=(0, 1)), ""),
    "loaded by one and then from it": (lambda data: loaded(data, where="both", who=[0]), ""),
    "loaded by one from the meta device": (lambda data: loaded(data, where="meta"), ""),
    "recomputed": (recomputed, ""),
    "recomputed and reentrant": (lambda data: recomputed(data, use_reentrant=True), ""),
    "recomputed under FSDP2": (lambda data: recomputed(data, fully_shard), ""),
    "recomputed without dropout": (lambda data: recomputed(data, noise=nn.Dropout(0.0), **FORGETS), ""),
    "a norm of its batch recomputed": (lambda data: recomputed(data, noise=nn.LayerNorm(8)), ""),
    "running statistics that do not move, recomputed": (
        lambda data: recomputed(data, noise=nn.BatchNorm1d(8, momentum=0.0)), ""),
    "running statistics recomputed in eval": (
        lambda data: recomputed(data, noise=nn.BatchNorm1d(8), is_training=False), EVALUATES),
    "running statistics recomputed": (lambda data: recomputed(data, noise=nn.BatchNorm1d(8)), TWICE),
    "recomputed in eval": (lambda data: recomputed(data, is_training=False, **FORGETS), EVALUATES),
    "recomputed by saved numbers": (
        lambda data: recomputed(data, noise=Noise(), context_fn=saving_noise, **FORGETS), ""),
    "tokens of the step": (lambda data: counted(data, "step"), ""),
    "tokens of the step at the end": (lambda data: counted(data, "step", at_the_end=True), ""),
    "tokens of the step under FSDP2": (lambda data: counted(data, "step", fully_shard), ""),
    "tokens of fixed lengths": (lambda data: counted(data, "microbatch", lengths=False), ""),
    "own tokens of fixed lengths": (lambda data: counted(data, "own", lengths=False), ""),
    "tokens of two heads": (lambda data: counted(data, "own", heads=2), ""),
}  # fmt: skip

#: Loops with a mistake, and the finding, or the note where the mistake may be meant.
BROKEN = {
    "frozen and stepped": (lambda data: frozen(data, clears=False), "frozen parameters move [D19]"),
    "router by rank": (lambda data: routed(data, reduces=False), UNLIKE),
    "router under DDP by rank": (lambda data: routed(data, DDP, reduces=False), UNLIKE),
    "router by hand by rank": (lambda data: routed(data, None, reduces=False), UNLIKE),
    "begins apart": (begins_apart, "ranks began with different parameters, and average their gradients [D1, S9]"),
    "small rate in bfloat16": (lambda data: narrow(data, lr=2e-4), "note: updates are lost to rounding [D6, S13]"),
    "small rate in bfloat16 under FSDP2": (lambda data: narrow(data, lr=2e-4, wrap=fully_shard),
                                           "note: updates are lost to rounding [D6, S13]"),
    "slow moments in bfloat16": (lambda data: narrow(data, lr=1e-2, betas=(0.9, 0.999)),
                                 "note: moments are lost to rounding [D6, S13]"),
    "tied late": (tied_late, "gradients are not reduced [D11, S2]"),
    "tied late under FSDP2": (lambda data: tied(data, fully_shard, tie=False, after=Tied.tie),
                              "gradients are not the sum of what ranks computed [D11, S8]"),
    "tied head summed twice": (lambda data: summed_by_hand(data, is_twice=True),
                               "note: parameters have different factors [D12, S1]"),
    "untied late": (lambda data: tied(data, after=Tied.untie), "gradients are not reduced [D11, S2]"),
    "cast apart": (lambda data: tied(data, before=Tied.cast), "tied parameters are no longer tied [D8, S8]"),
    "cast apart at a step": (lambda data: tied(data, None, at_step=Tied.cast),
                             "tied parameters are no longer tied [D8, S8]"),
    "loaded by one rank": (lambda data: loaded(data, where="before", who=[0]), MIXED),
    "assigned by one rank": (lambda data: loaded(
        data, where="before", who=[0], how=functools.partial(nn.Module.load_state_dict, assign=True)), MIXED),
    "loaded by one rank of two seeds": (lambda data: loaded(data, where="before", who=[1], seeds=(0, 1)), MIXED),
    "loaded by one rank without a norm": (lambda data: loaded(data, where="before", who=[0], norm=None),
                                          f"note: {MIXED}"),
    "recomputes another dropout": (lambda data: recomputed(data, **FORGETS), REDRAWN),
    "recomputes another dropout, reentrant": (lambda data: recomputed(data, use_reentrant=True, **FORGETS), REDRAWN),
    "recomputes another dropout under FSDP2": (lambda data: recomputed(data, fully_shard, **FORGETS), REDRAWN),
    "recomputes other noise": (lambda data: recomputed(data, noise=Noise(), **FORGETS), f"note: {REDRAWN}"),
    "tokens of each microbatch": (lambda data: counted(data, "microbatch"), f"note: {OF_MICROBATCHES}"),
    "tokens of each microbatch under FSDP2": (lambda data: counted(data, "microbatch", fully_shard),
                                              f"note: {OF_MICROBATCHES}"),
}  # fmt: skip


# Two models


def adversaries(data, watch, *, zeroes=True):
    """A generator and then a critic under FSDP2, each with an optimizer; the critic's gradients may stay."""
    torch.manual_seed(0)
    generator = fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6)))
    critic = fully_shard(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    of_generator, of_critic = adamw(generator), adamw(critic)
    with contextlib.ExitStack() as stack:
        watching = [stack.enter_context(one) for one in watch((generator, of_generator), (critic, of_critic))]
        for real, _ in data.batches():
            fake = generator(data.noise(8, 4))
            if zeroes:
                of_critic.zero_grad()
            (F.softplus(-critic(real)) + F.softplus(critic(fake.detach()))).mean().backward()
            of_critic.step()
            of_generator.zero_grad()
            F.softplus(-critic(fake)).mean().backward()
            of_generator.step()
    return watching


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("zeroes", [True, False])
def test_each_of_two_models_has_a_doctor_of_its_own(rank: Rank, zeroes):
    """One for both watches both, and tells which root a finding is of."""
    make = functools.partial(doctor, on_finding="collect", patience=20)
    both = adversaries(Data(rank.index), lambda *models: [make(*one) for one in models], zeroes=zeroes)
    found = [[one.render().splitlines()[0] for one in watching.findings] for watching in both]
    assert found == [[], [] if zeroes else ["step 1: gradients are never zeroed [D11, S4]"]]
    assert not any("another AdamW" in watching.summary() for watching in both)
    assert [watching.summary().partition(" parameters (")[2].partition(")")[0] for watching in both] == [
        "72 elements", "65 elements"
    ]  # fmt: skip
    (first,) = adversaries(Data(rank.index), lambda *models: [make()], zeroes=zeroes)
    assert [one.render().splitlines()[0] for one in first.findings if not one.is_note] == [
        one.replace("step 1: ", "step 1: Sequential 'critic': ") for one in found[1]
    ]
    title, *roots = [line for line in first.summary().splitlines() if "elements)" in line]
    assert "2 roots, 8 parameters (137 elements), AdamW" in title
    assert [line.split("steps 0-2")[0].split() for line in roots] == [
        ["root", "Sequential", "'generator',"], ["root", "Sequential", "'critic',"]
    ]  # fmt: skip


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
    findings, notes = titles(loop, rank, is_healthy=finding.startswith("note: "), registered=Ties())
    assert finding in findings | {f"note: {one}" for one in notes}


@pytest.mark.sampled
@world(2)
def test_a_tie_of_the_first_forward_is_known_without_the_command(rank: Rank):
    """Of what was tied before, nobody knows without ``ties=``."""
    findings, notes = titles(lambda data: tied(data, None, at_step=Tied.cast), rank, is_healthy=True)
    assert not findings and notes == {PARTED}
    assert titles(lambda data: tied(data, before=Tied.cast), rank, is_healthy=True) == (set(), set())
    ties = [("embed.weight", "head.weight")]
    findings, _ = titles(lambda data: tied(data, before=Tied.cast), rank, ties=ties)
    assert findings == {"tied parameters are no longer tied [D8, S8]"}
