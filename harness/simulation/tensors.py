"""Tensors without memory, on which operators compute shapes and nothing else."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardproof.harness.tensors import private
from shardproof.harness.tensors.private import TorchDispatchMode
from shardproof.harness.tensors.trees import tensors_of

FakeTensor = private.take("torch._subclasses.fake_tensor.FakeTensor")
FakeTensorMode = private.take("torch._subclasses.fake_tensor.FakeTensorMode")
no_dispatch = private.take("torch.utils._mode_utils.no_dispatch")

#: From how many parts on a tensor is split in one piece of work.
_MANY = 16

_in_kernel = private.take("torch._subclasses.fake_tensor.in_kernel_invocation_manager")
_make_subclass = private.take("torch.Tensor._make_subclass")
_throw_on_mutable_data_ptr = private.take("torch._C._set_throw_on_mutable_data_ptr")

_DEVICE = torch.ops.prim.device.default
_SPLIT = torch.ops.aten.split.Tensor
_NEW_EMPTY = torch.ops.aten.new_empty.default


class _Quickly(TorchDispatchMode):
    """Splits a tensor into thousands of parts without a dispatch for each, and leaves real tensors to torch.

    Implementations cut a parameter into as many parts as there are ranks, empty ones too, and keep one. What they get
    is the same; it takes a fraction of the time. Real tensors are those of meshes, which implementations read.
    """

    def __init__(self, fake: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self._is_quick = "simulation" not in private.mends()
        self._states: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As for a Recorder: nothing is compiled, and the wrapper costs more than what it wraps.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_quick and args and type(args[0]) is FakeTensor:
            if func is _DEVICE:
                return args[0].fake_device
            if func is _NEW_EMPTY and args[1] == [0] and not any(kwargs.values()):
                return self._empty(args[0])
            if func is _SPLIT and args[0].shape[args[2] if len(args) > 2 else 0] > _MANY * max(args[1], 1):
                return self._split(args, kwargs)
        if not types and next(tensors_of([args, kwargs]), None) is not None:
            with no_dispatch():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        with _in_kernel(self._fake):
            parts = _SPLIT(*args, **kwargs)
        device = args[0].fake_device
        state = self._state(device)
        with no_dispatch():
            return [_wrapped(part, device, state) for part in parts]

    def _empty(self, like: Any) -> torch.Tensor:
        device = like.fake_device
        state = self._state(device)
        with no_dispatch():
            return _wrapped(torch.empty(0, dtype=like.dtype, device="meta"), device, state)

    def _state(self, device: torch.device) -> dict[str, Any]:
        """Return the attributes of a new tensor without memory, which are the same for all on one device."""
        if device not in self._states:
            with no_dispatch():
                self._states[device] = vars(FakeTensor(self._fake, torch.empty(0, device="meta"), device))
        return self._states[device]


def _wrapped(meta: torch.Tensor, device: torch.device, state: dict[str, Any]) -> torch.Tensor:
    """Do what FakeTensor's constructor does, which sets its attributes one by one and takes five times as long."""
    made: torch.Tensor = _make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
    _throw_on_mutable_data_ptr(made)
    vars(made).update(state)
    return made


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
    FakeTensor.data_ptr = of_tensor
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

        Other contexts may watch each operator, such as a Recorder's; the last one sees it first.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(_addresses())
            for one in (self._fake, *watching, self._quickly):
                stack.enter_context(one)
            yield
