"""Tensors without memory, on which operators compute shapes and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.harness.tensors.trees import tensors_of

#: From how many parts on a tensor is split in one piece of work.
_MANY = 16


class _Quickly(TorchDispatchMode):
    """Splits a tensor into thousands of parts without a dispatch for each, and leaves real tensors to torch.

    Implementations cut a parameter into as many parts as there are ranks, empty ones too, and keep one. What they get
    is the same; it takes a fraction of the time. Real tensors are those of meshes, which implementations read.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func is torch.ops.aten.split.Tensor and type(args[0]) is FakeTensor:
            whole, size = args[0], args[1]
            if whole.shape[args[2] if len(args) > 2 else 0] > _MANY * max(size, 1):
                with in_kernel_invocation_manager(self._fake):
                    parts = func(*args, **(kwargs or {}))
                return self._wrapped(parts, whole)
        is_empty = func is torch.ops.aten.new_empty.default and args[1] == [0] and not any((kwargs or {}).values())
        if is_empty and type(args[0]) is FakeTensor:
            with no_dispatch():
                nothing = torch.empty(0, dtype=args[0].dtype, device="meta")
            return self._wrapped([nothing], args[0])[0]
        if not types and next(tensors_of([args, kwargs or {}]), None) is not None:
            with no_dispatch():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _wrapped(self, parts: Sequence[torch.Tensor], like: FakeTensor) -> list[torch.Tensor]:
        with no_dispatch():
            return [FakeTensor(self._fake, part, like.fake_device) for part in parts]


@contextlib.contextmanager
def _addresses() -> Iterator[None]:
    """Give each storage without memory an address of its own.

    All of them have address 0, and implementations compare addresses to see whether two tensors share memory.
    """
    storage_class, real = torch.UntypedStorage, torch.UntypedStorage.data_ptr

    def of_storage(storage: torch.UntypedStorage) -> int:
        if storage.device.type != "meta":
            return real(storage)
        return storage._cdata if storage.nbytes() else 0

    def of_tensor(tensor: torch.Tensor) -> int:
        address = of_storage(tensor.untyped_storage())
        return address + int(tensor.storage_offset()) * tensor.element_size() if address and tensor.numel() else 0

    storage_class.data_ptr = of_storage  # type: ignore[method-assign, assignment]
    FakeTensor.data_ptr = of_tensor  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del storage_class.data_ptr, FakeTensor.data_ptr


class Tensors:
    """Makes the tensors of one simulation; every context of it is of one kind, so that their tensors mix."""

    def __init__(self) -> None:
        self._fake = FakeTensorMode()
        self._quickly = _Quickly(self._fake)

    @contextlib.contextmanager
    def without_memory(self, *watching: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        """Make every tensor that is made in the context one without memory.

        Args:
            watching: contexts that see each operator, such as a Recorder's; the last one sees it first.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(_addresses())
            for one in (self._fake, *watching, self._quickly):
                stack.enter_context(one)
            yield
