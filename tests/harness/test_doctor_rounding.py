"""Loops in narrow dtypes, whose gradients are rounded each time that they are scaled, and more than rounding explains.

And the gradients of frozen parameters in a flat one, which nobody keeps.
"""

import dataclasses
import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from shardproof.harness.judging import numerics
from shardproof.harness.parity.rank import Rank
from shardproof.harness.training.invariants import check_replicas
from shardproof.harness.training.norms import Scaling, check_norm, scale_of
from shardproof.testing import world
from tests.harness.test_doctor_checks import EVERY, Made, gradient
from tests.harness.test_doctor_loops import FLAT, STEPS, perceptron, reduces_by_hand, titles

OWN_SCALE = "ranks scale gradients differently [D10, S6]"

#: What a loop in a narrow dtype is noted for, whatever it scales.
OF_NARROW = {"updates are lost to rounding [D6, S13]", "moments are lost to rounding [D6, S13]"}


# Clipping


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip(model, limit=0.5):
    nn.utils.clip_grad_norm_(model.parameters(), limit)


def clip_by_own(model, limit=0.5):
    """Clip by the norm of what the rank holds."""
    norm = math.sqrt(sum(float(local(one.grad).double().square().sum()) for one in model.parameters()))
    for one in model.parameters():
        one.grad.mul_(min(1.0, limit / norm))


def clip_by_rounded(model, limit=0.5):
    """Divide by a count, and clip by a factor that is rounded to each gradient's dtype."""
    for one in model.parameters():
        one.grad.div_(3)
    norm = nn.utils.get_total_norm([one.grad for one in model.parameters()])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    for one in model.parameters():
        one.grad.mul_((limit / norm).clamp(max=1.0).to(one.dtype))


def scale_by_rank(model):
    for one in model.parameters():
        one.grad.mul_(0.9 - 0.1 * dist.get_rank())


def clipped(data, wrap, scale=clip, *, microbatches=1, dtype=torch.bfloat16, norms=False):
    """Train in a narrow dtype, all but perhaps the norms; the loss is large, so that clipping scales gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 24), nn.Linear(24, 3)).to(dtype)
    if norms:
        model[1].float().register_forward_pre_hook(lambda module, inputs: inputs[0].float())
        model[1].register_forward_hook(lambda module, inputs, output: output.to(dtype))
    wrapped = model if wrap is None else wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(microbatches):
            inputs, labels = data.batch()
            (20 * F.cross_entropy(wrapped(inputs.to(dtype)).float(), labels) / microbatches).backward()
        if wrap is None:
            reduces_by_hand(model)
        scale(wrapped)
        optimizer.step()


class Gained(nn.Module):
    """Layers in float32, of which a gain of one element in bfloat16 multiplies the outputs."""

    def __init__(self):
        super().__init__()
        self.layers, self.gain = perceptron(), nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    def forward(self, inputs):
        return self.layers(inputs) * self.gain


def gained(data, wrap=DDP):
    model = Gained() if wrap is None else wrap(Gained())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in data.batches():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        if wrap is None:
            reduces_by_hand(model)
        optimizer.step()


MIXED = functools.partial(fully_shard, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


# Frozen parameters of a unit of FSDP1


def adapted(data, *, freezes="before", begin=0, wrap=FLAT):
    """Train a part of one flat parameter; the rest is frozen before or after it is wrapped, or for some steps."""
    model = perceptron()
    base = [*model[0].parameters(), *model[2].parameters()]
    for one in base if freezes == "before" else ():
        one.requires_grad_(False)
    wrapped = wrap(model)
    for one in base if freezes == "after" else ():
        one.requires_grad_(False)
    optimizer = torch.optim.AdamW(wrapped.parameters() if begin else model[4].parameters(), lr=1e-2)
    for step in range(STEPS):
        if begin and step == begin:
            for one in base:
                one.requires_grad_(True)
        inputs, labels = data.batch()
        optimizer.zero_grad()
        F.cross_entropy(wrapped(inputs), labels).backward()
        optimizer.step()


def bypassed(data):
    """The loop calls the module within the wrapper, which gathers nothing and reduces nothing."""
    model = perceptron()
    model[0].requires_grad_(False)
    wrapped = DDP(model)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    for inputs, labels in data.batches():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    del wrapped


#: Healthy loops.
HEALTHY = {
    "FSDP2": lambda data: clipped(data, fully_shard),
    "FSDP2 with a policy": lambda data: clipped(data, MIXED),
    "FSDP2, accumulated": lambda data: clipped(data, fully_shard, microbatches=3),
    "FSDP2, twice rounded": lambda data: clipped(data, fully_shard, clip_by_rounded, microbatches=2),
    "FSDP2 in float16": lambda data: clipped(data, fully_shard, dtype=torch.float16),
    "norms in float32": lambda data: clipped(data, None, clip_by_rounded, norms=True),
    "FSDP1": lambda data: clipped(data, FLAT, lambda model: model.clip_grad_norm_(0.5)),
    "DDP": lambda data: clipped(data, DDP),
    "DDP, accumulated": lambda data: clipped(data, DDP, clip_by_rounded, microbatches=3),
    "by hand": lambda data: clipped(data, None),
    "by hand, accumulated": lambda data: clipped(data, None, clip_by_rounded, microbatches=3),
    "a gain in bfloat16": gained,
    "a gain in bfloat16 by hand": lambda data: gained(data, None),
    "adapters in a flat parameter": adapted,
    "frozen after wrapping": lambda data: adapted(data, freezes="after"),
    "unfrozen later": lambda data: adapted(data, begin=2),
    "frozen for some steps": lambda data: adapted(data, freezes="after", begin=2),
}  # fmt: skip

#: Mistakes that rounding does not explain.
BROKEN = {
    "FSDP2 by its own norm": (lambda data: clipped(data, fully_shard, clip_by_own), OWN_SCALE),
    "FSDP2 by its own norm, accumulated": (
        lambda data: clipped(data, fully_shard, clip_by_own, microbatches=3), OWN_SCALE),
    "FSDP2 by rank": (lambda data: clipped(data, fully_shard, scale_by_rank), OWN_SCALE),
    "FSDP2 in float16 by its own norm": (
        lambda data: clipped(data, fully_shard, clip_by_own, dtype=torch.float16), OWN_SCALE),
    "bypassed": (bypassed, "gradients are not reduced [D11, S2]"),
}  # fmt: skip


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", HEALTHY)
def test_rounding_is_no_finding(rank: Rank, name):
    findings, notes = titles(HEALTHY[name], rank, is_healthy=True)
    assert not findings and not notes - OF_NARROW


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", BROKEN)
def test_more_than_rounding_is_found(rank: Rank, name):
    loop, finding = BROKEN[name]
    assert finding in titles(loop, rank)[0]


# Records made by hand


def narrow(made, scale, dtype="bfloat16"):
    """Round gradients at the step to a dtype."""
    of = getattr(torch, dtype)
    for rank, own in enumerate(made.gradients):
        for name in own.at_step:
            rows = made.mean(name, rank)[slice(*made.rows(name, rank))].to(of)
            for stage, factor in (("after_backward", 1.0), ("at_step", scale(rank))):
                found = gradient((rows * factor).to(of).double(), made.box(name, rank))
                getattr(own, stage)[name] = type(found)(found.box, found.pending, found.fingerprint, dtype)
    return made.evidence()


@pytest.mark.parametrize(("dtype", "far"), [("bfloat16", 2.0**-6), ("float16", 2.0**-9), ("float32", 1e-4)])
def test_scales_are_apart_by_more_than_their_dtype_rounds(dtype, far):
    """Two roundings on each of two ranks are 2 eps, and 2.5 of it are none."""
    assert numerics.SCALES_APART + 2 * numerics.ROUNDINGS_OF_A_SCALE * numerics.rounding(dtype) >= far
    for times, count in ((0.5, 0), (2.5, 1)):
        evidence = narrow(Made(), lambda rank, times=times: 0.9 * (1 + (rank == 1) * times * far), dtype)
        assert len([*check_norm(evidence)]) == count, times


def test_a_scale_is_that_of_the_widest_dtype():
    made = Made()
    evidence = narrow(made, lambda rank: 0.961)
    of_narrow = scale_of(evidence, 0)
    assert of_narrow is not None and of_narrow.rounding == pytest.approx(2.0**-7, rel=1e-3)
    assert of_narrow.value == pytest.approx(0.961, rel=2.0**-8) and of_narrow.value != pytest.approx(0.961, rel=1e-6)
    for rank in EVERY:
        made.at_step(rank, "b", 2 * 0.961)
        wide = gradient(made.mean("b", rank)[slice(*made.rows("b", rank))], made.box("b", rank))
        made.gradients[rank].after_backward["b"] = wide
    of_wide = scale_of(made.evidence(), 0)
    assert of_wide == Scaling(pytest.approx(0.961, rel=1e-7), pytest.approx(2.0**-23, rel=1e-3))


def test_small_numbers_are_rounded_by_more():
    """Those below the smallest normal number by half of the smallest, whatever their size."""
    assert numerics.rounding("float16") == 2.0**-11
    assert numerics.rounding("float16", 100, 1e-5) == pytest.approx(2.0**-11 + 0.5 * 10 * 2.0**-24 / 1e-5)
    assert numerics.rounding("unknown") == numerics.rounding("bfloat16") and numerics.rounding("float32", 4, 0) > 1


@pytest.mark.parametrize(("dtype", "far", "is_note"), [
    ("bfloat16", 2.0**-8, True), ("bfloat16", 2.0**-5, False), ("float16", 2.0**-11, True), ("float16", 2.0**-8, False),
    ("float32", 2.0**-11, False)])  # fmt: skip
def test_replicas_differ_by_what_their_dtype_rounds(dtype, far, is_note):
    made = Made()
    narrow(made, lambda rank: 0.5, dtype)
    for name, one in list(made.gradients[2].at_step.items()):
        made.put(name, [2], after=(9,))
        moved = tuple(value * (1 + far) for value in one.fingerprint.sketch)
        made.gradients[2].at_step[name] = dataclasses.replace(
            one, fingerprint=dataclasses.replace(one.fingerprint, sketch=moved, bits=(1, 1, 0, 0)))  # fmt: skip
    found = [*check_replicas(made.evidence())]
    assert [one.is_note for one in found] == [is_note], [one.render() for one in found]
