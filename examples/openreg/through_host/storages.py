"""``UntypedStorage.resize_`` for a device whose hooks have no ``resizePrivateUse1Bytes``."""

import functools
from typing import Any

import torch

from through_host import _storages  # type: ignore[attr-defined]


def register() -> None:
    """Resize storages of the device with its allocator; those of other devices as torch does."""
    device = torch._C._get_privateuse1_backend_name()
    original = torch.UntypedStorage.resize_

    @functools.wraps(original)
    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.device.type != device:
            return original(storage, size)
        _storages.resize(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
        return storage

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
