"""Settings that a script cannot choose, and calls that only the root of a model has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from shardproof.harness.adapters.base import Adapter, Settings
from shardproof.harness.collectives.own import Own


def _prefetch_of_a_layer(adapter: Adapter) -> None:
    adapter.prefetch(forward={"layers.0": ["layers.1.in_proj"]}, backward={})


def _memory_of_another(adapter: Adapter) -> None:
    adapter.change(Settings(reduce_scatter=Own()), unit="layers.1")
    adapter.change(Settings(group_memory=True), unit="layers.1")


def _memory_of_another_gather(adapter: Adapter) -> None:
    adapter.change(Settings(gather=Own()), unit="layers.1")
    adapter.change(Settings(group_memory=True), unit="layers.1")


def _set(**settings: Any) -> Callable[[Adapter], None]:
    return lambda adapter: adapter.change(Settings(**settings))


#: What a script cannot choose, with words one of which is in the error.
WRONG_SETTINGS: dict[str, tuple[Callable[[Adapter], object], tuple[str, ...]]] = {
    "a-size-after-forward": (_set(reshard_after_forward=2), ("bool",)),
    "no-inputs": (_set(reduce_inputs=0), ("max_input_buffers",)),
    "half-an-input": (_set(reduce_inputs=1.5), ("max_input_buffers",)),
    "a-choice-of-inputs": (_set(reduce_inputs=True), ("max_input_buffers",)),
    "a-layer-that-is-no-unit": (_prefetch_of_a_layer, ("FSDPModule", "Linear")),
    "a-method-that-is-not-there": (lambda adapter: adapter.register_forward_method("layers.0", "absent"), ("absent",)),
    "memory-of-another": (_memory_of_another, ("custom",)),
    "memory-of-another-gather": (_memory_of_another_gather, ("custom",)),
    "a-deep-copy": (lambda adapter: copy.deepcopy(adapter.module), ("deepcopy",)),
}


def _defer(adapter: Adapter) -> None:
    with adapter.microbatch(is_last=False):
        pass


#: What a script calls on the root, and cannot call on another unit.
OF_THE_ROOT: dict[str, Callable[[Adapter], Any]] = {
    "deferring": _defer,
    "clipping": lambda adapter: adapter.clip(),
    "recovering": lambda adapter: adapter.recover(),
}
