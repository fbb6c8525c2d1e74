"""Where Megatron's tensor-parallel parameters belong, for the ``layout`` of a doctor or a recording.

Read in Megatron Core, and tried on parameters with its attributes; Megatron itself needs CUDA, and was not run.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.tensors.layouts import Layout
from shardproof.harness.watching.model import LayoutOf
from shardproof.harness.watching.names import parameters_of


def layout(model: nn.Module, group: dist.ProcessGroup) -> LayoutOf:
    """Return the layout of a model's parameters and gradients under Megatron's tensor parallelism.

    Args:
        model: where its parameters are cut they have ``tensor_model_parallel``, ``partition_dim`` and
            ``partition_stride``. With a stride of two, as of a gated linear layer, a rank holds a part of each half.
        group: the tensor-parallel group.
    """
    rank, size, ranks = dist.get_rank(group), dist.get_world_size(group), tuple(dist.get_process_group_ranks(group))
    parameters: dict[str, Any] = dict(parameters_of(model))
    cut = {
        name: (one.partition_dim, one.partition_stride)
        for name, one in parameters.items()
        if getattr(one, "tensor_model_parallel", False)
    }

    def layout_of(name: str, tensor: torch.Tensor) -> Layout | None:
        if name not in cut:
            return None
        dim, stride = cut[name]
        chunk = tensor.shape[dim] // stride
        starts = [(number * size + rank) * chunk for number in range(stride)]
        shape, dims = list(tensor.shape), [((0, length),) for length in tensor.shape]
        shape[dim] *= size
        dims[dim] = tuple((start, start + chunk) for start in starts)  # type: ignore[assignment]
        return Layout(Box(tuple(shape), tuple(dims)), mesh=ranks)

    return layout_of
