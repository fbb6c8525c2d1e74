"""Collectives that user code gives to an implementation instead of its own."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class Own:
    """An all-gather or a reduce-scatter of the script's own, in memory of its own.

    What lies in the output of a gather is this rank's part of it: a backend would write to it what other ranks send.

    Args:
        margin: elements around each tensor in its block of memory.
    """

    def __init__(self, margin: int = 0) -> None:
        self._margin = margin
        self.groups: list[dist.ProcessGroup] = []
        self.ops: list[Any] = []
        self._memory: set[int] = set()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        block = torch.empty(math.prod(size) + 2 * self._margin, dtype=dtype, device=device)
        self._memory.add(block.untyped_storage().data_ptr())
        return block[self._margin : block.numel() - self._margin].view(*size)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **options: Any) -> Any:
        for name, tensor in (("input", input_tensor), ("output", output_tensor)):
            assert tensor.untyped_storage().data_ptr() in self._memory, f"the {name} was not allocated by the script"
        if (
            "op" not in options
            and input_tensor.untyped_storage().data_ptr() == output_tensor.untyped_storage().data_ptr()
        ):
            begin = (input_tensor.data_ptr() - output_tensor.data_ptr()) // input_tensor.element_size()
            mine = group.rank() * input_tensor.numel()
            assert begin == mine, f"the input begins at element {begin} of the output, where {mine} is this rank's part"
        self.groups.append(group)
        collective: Any = dist.reduce_scatter_tensor if "op" in options else dist.all_gather_into_tensor
        if "op" in options:
            self.ops.append(options["op"])
        return collective(output_tensor, input_tensor, group=group, **options)
