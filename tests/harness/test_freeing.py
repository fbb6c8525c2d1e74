"""What adapters free at the end of a case where an implementation keeps its models."""

from __future__ import annotations

import torch
from torch import nn

from shardproof.harness.tensors.memory import free


def test_all_tensors_are_freed_however_they_are_nested():
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    state = {parameter: {"momentum": torch.ones(4), "step": 3}, "names": ["weight"]}
    view = torch.ones(2, 4)[0]
    free([(parameter, parameter.grad, None), state, {"views": [view]}])
    tensors = [parameter, parameter.grad, state[parameter]["momentum"], view]
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * 4


def test_memory_of_others_stays():
    """Pinned memory cannot be resized either, and there is none without a device."""
    tensor = torch.frombuffer(bytearray(16), dtype=torch.float32)
    free([tensor])
    assert tensor.tolist() == [0.0] * 4
