"""Lets an implementation that asks for the address of memory see that it has some, where tensors have no memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.fsdp import _flat_param


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


@contextlib.contextmanager
def sizes_for_addresses() -> Iterator[None]:
    """Make ``torch.distributed.fsdp`` look at the size of a storage where it looks at its address, which is 0 here.

    It asks whether a flat parameter that stays gathered after forward has been freed, and would find that each has.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_flat_param, "_data_ptr_allocated", _has_bytes)
        yield
