"""Pipelines under the doctor whose stages pass on gradients: each healthy one stands next to its broken twin."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.harness.test_doctor_loops import titles

MIXED = "gradients of microbatches are mixed up between stages [D32]"
STALE = "a stage uses gradients of an earlier step [D32, S12]"
UNUSED = "a stage leaves out gradients of microbatches [D32, S10]"
UNEVEN = "a stage scales gradients of microbatches unevenly [D32, S5]"

MICROBATCHES, ROWS, DIM = 4, 6, 8


def stage_of(rank, stages=2):
    torch.manual_seed(10 + rank)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM if rank < stages - 1 else 3))


def batches(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(MICROBATCHES * ROWS, DIM, generator=generator).chunk(MICROBATCHES)


def received(like, source):
    dist.recv(found := torch.empty_like(like), source)
    return found


def first(model, xs, *, order, recomputes, skips, warmup, scales, most, shares):
    """The first stage: ``warmup`` microbatches forward, then one backward for each forward, then what is left."""
    kept, number, gradient = [], 0, None

    def backward():
        nonlocal number, gradient
        output = kept.pop(order)
        if gradient is None or not (shares and number % 2):
            gradient = received(output, 1)
        else:
            received(output, 1)
        if number < most:
            output.backward(scales(number) * gradient)
        number += 1

    for count, x in enumerate(xs):
        output = checkpoint(model, x, use_reentrant=False) if recomputes else model(x)
        dist.send(output.detach(), 1)
        kept.append(output + 0 * x.sum() if skips else output)
        if count >= warmup:
            backward()
    while kept:
        backward()


def last(model, xs, *, warmup, skips, keeps):
    """The last stage; ``keeps`` has the gradients that are sent, of which a stale one is left there."""
    kept = []

    def backward(number):
        inputs, loss = kept.pop(0)
        loss.backward()
        keeps.setdefault(number, inputs.grad)
        dist.send(keeps[number], 0)

    done = 0
    for count, x in enumerate(xs):
        inputs = received(x, 0).requires_grad_()
        output = model(inputs)
        loss = F.cross_entropy(output, x[:, :3].argmax(1)) / MICROBATCHES
        kept.append((inputs, loss + inputs.square().mean() / 9 if skips else loss))
        if count >= warmup:
            backward(done)
            done += 1
    while kept:
        backward(done)
        done += 1


def piped(
    data, *, order=0, recomputes=False, skips=False, warmup=MICROBATCHES, scales=lambda number: 1.0,
    most=MICROBATCHES, shares=False, is_stale=False, accumulates=1,
):  # fmt: skip
    model = stage_of(data.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    keeps = {}
    for step in range(3):
        optimizer.zero_grad()
        for part in range(accumulates):
            xs = batches(10 * step + part)
            if not is_stale:
                keeps = {}
            if data.rank == 0:
                first(model, xs, order=order, recomputes=recomputes, skips=skips, warmup=warmup, scales=scales,
                      most=most, shares=shares)  # fmt: skip
            else:
                last(model, xs, warmup=warmup, skips=skips, keeps=keeps)
        optimizer.step()


def scheduled(data, make, *, stages=2):
    """torch's own pipeline, of one stage on each rank or of several."""
    modules = [stage_of(number, stages) for number in range(data.rank, stages, 2)]
    parts = [
        PipelineStage(one, number, stages, torch.device("cpu"))
        for one, number in zip(modules, range(data.rank, stages, 2), strict=True)
    ]
    schedule = make(parts if stages > 2 else parts[0], MICROBATCHES, loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW([one for module in modules for one in module.parameters()], lr=1e-3)
    for step in range(3):
        x = torch.cat(batches(step))
        optimizer.zero_grad()
        options = {"target": x[:, :3].argmax(1)} if data.rank == 1 else {}
        schedule.step(*([x] if data.rank == 0 else []), **options)
        optimizer.step()


HEALTHY = {
    "all forward, then all backward": piped,
    "one forward, one backward": lambda data: piped(data, warmup=1),
    "recomputed": lambda data: piped(data, recomputes=True),
    "accumulated": lambda data: piped(data, accumulates=2),
    "a skip over the stage": lambda data: piped(data, skips=True),
    "scaled on the way": lambda data: piped(data, scales=lambda number: 0.5),
    "torch's GPipe": lambda data: scheduled(data, ScheduleGPipe),
    "torch's 1F1B": lambda data: scheduled(data, Schedule1F1B),
    "torch's interleaved 1F1B": lambda data: scheduled(data, ScheduleInterleaved1F1B, stages=4),
    "torch's zero bubble": lambda data: scheduled(data, ScheduleInterleavedZeroBubble, stages=4),
}

BROKEN = {
    "last in, first out": (lambda data: piped(data, order=-1), MIXED),
    "last in, first out of one forward, one backward": (lambda data: piped(data, order=-1, warmup=2), MIXED),
    "last in, first out, recomputed": (lambda data: piped(data, order=-1, recomputes=True), MIXED),
    "last in, first out, accumulated": (lambda data: piped(data, order=-1, accumulates=2), MIXED),
    "last in, first out, with a skip": (lambda data: piped(data, order=-1, skips=True), MIXED),
    "one gradient for two microbatches": (lambda data: piped(data, shares=True), MIXED),
    "gradients of the first step": (lambda data: piped(data, is_stale=True), STALE),
    "a microbatch without backward": (lambda data: piped(data, most=3), UNUSED),
    "scaled by the number": (lambda data: piped(data, scales=lambda number: 1 / (1 + number)), UNEVEN),
}


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_pipeline_has_no_finding(rank: Rank, name):
    findings, notes = titles(HEALTHY[name], rank, is_healthy=True)
    assert not findings and not [one for one in notes if "D32" in one]


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", BROKEN)
def test_its_broken_twin_is_found(rank: Rank, name):
    loop, expected = BROKEN[name]
    findings, notes = titles(loop, rank, is_healthy=True)
    assert [one for one in (*findings, *notes) if "D32" in one] == [expected]
