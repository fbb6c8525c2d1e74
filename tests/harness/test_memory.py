"""The census of tensors: what counts, and that garbage does not."""

from __future__ import annotations

import torch

from shardproof.harness.tensors import memory

CPU = torch.device("cpu")
NUMEL = 1000


class Keep(torch.autograd.Function):
    """A node that holds an object, as an implementation's hooks hold its units."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def cycles_through_autograd(layers):
    """Garbage of which each collection finds one layer only."""
    x = torch.ones(NUMEL, requires_grad=True)
    for _ in range(layers):
        kept = {}
        kept["output"] = x = Keep.apply(x, kept)


def test_garbage_behind_nodes_of_autograd_is_not_counted():
    before = memory.held_bytes(CPU)
    cycles_through_autograd(5)
    assert memory.held_bytes(CPU) == memory.tensor_bytes(CPU) == before


def test_each_storage_counts_once():
    before = memory.held_bytes(CPU)
    whole = torch.zeros(NUMEL)
    parts = [whole[:10], whole.view(10, -1)]
    assert memory.held_bytes(CPU) - before == NUMEL * whole.element_size()
    assert memory.bytes_of([whole, whole]) == NUMEL * whole.element_size()
    del whole, parts
    assert memory.held_bytes(CPU) == before
