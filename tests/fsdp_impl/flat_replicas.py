"""Models under ``FullyShardedDataParallel``, and the warnings that they give."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fsdp_impl import FullyShardedDataParallel, ShardingStrategy

FULL, ZERO2, NONE = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD


@contextmanager
def quiet() -> Iterator[None]:
    """``NO_SHARD`` is deprecated, and says so each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy")
        yield


def wrap(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
    with quiet():
        return FullyShardedDataParallel(module, **options)


def wrap_children(model: nn.Sequential, **options: Any) -> FullyShardedDataParallel:
    """Every child but the first is a unit; the first stays with the root."""
    for index in range(1, len(model)):
        model[index] = wrap(model[index], **options)
    return wrap(model, **options)
