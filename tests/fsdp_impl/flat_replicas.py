"""A plain copy of the model beside one that ``FullyShardedDataParallel`` shards, and what of the two must agree."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fsdp_impl import FullyShardedDataParallel, ShardingStrategy
from tests.fsdp_impl.replicas import assert_close

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


def assert_same_whole(plain: nn.Module, sharded: nn.Module, *, grads: bool = True, **tolerance: float) -> None:
    """Parameters agree, and with ``grads`` gradients (for which ``use_orig_params`` must be set); collective."""
    with FullyShardedDataParallel.summon_full_params(sharded, writeback=False, with_grads=grads):
        for (name, expected), (other, param) in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
            assert name == other
            assert_close(name, param.detach(), expected.detach(), **tolerance)
            if not grads:
                continue
            assert (param.grad is None) == (expected.grad is None), f"gradient of {name}"
            if param.grad is not None and expected.grad is not None:
                assert_close(f"gradient of {name}", param.grad, expected.grad, **tolerance)


def texts(fn: Callable[[], Any]) -> list[str]:
    """The warnings that ``fn`` gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fn()
    return [str(warning.message) for warning in caught]
