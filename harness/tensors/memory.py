"""How many bytes of tensors a rank holds: by the allocator on CUDA, by a census of storages on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

#: Far more than the deepest model of the cases needs: one round for each layer of its graph and one to be sure.
_MOST_ROUNDS = 1000


def collect_garbage() -> None:
    """Collect until nothing is found.

    One round is not enough: autograd's nodes hold objects from C++, where the collector does not look, so what a node
    held is only found once the node has gone. A census in between would count tensors that the next one misses.
    """
    rounds = 0
    while gc.collect():
        rounds += 1
        assert rounds < _MOST_ROUNDS, "there is new garbage after every collection"


def held_bytes(device: torch.device) -> int:
    """Bytes of the tensors alive on ``device``, after garbage is collected.

    On CUDA what was asked of the caching allocator, without its rounding to blocks. On the CPU the storages of
    all tensors that the garbage collector knows, each once; a storage that only C++ holds is not seen.
    """
    collect_garbage()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        # What was freed while another stream was noted to use it (`record_stream`) counts until the allocator looks at
        # that stream again, which this makes it do.
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_stats(device)["requested_bytes.all.current"])
    return sum(_storages(device).values())


def tensor_bytes(device: torch.device) -> int:
    """Bytes of the storages that Python's tensors on ``device`` keep alive, after garbage is collected.

    Unlike the allocator's figure it leaves out what libraries keep, such as cuBLAS's workspaces.
    """
    collect_garbage()
    return sum(_storages(device).values())


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the elements of these tensors, each tensor once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in tensors}.values())


def module_names() -> list[str]:
    """The classes of the modules that are alive, after garbage is collected; sorted, one entry a module.

    Without those that ``torch.fx`` makes: its caches keep graphs.
    """
    collect_garbage()
    classes = (type(found) for found in gc.get_objects())
    return sorted(one.__name__ for one in classes if issubclass(one, nn.Module) and not issubclass(one, fx.GraphModule))


def _storages(device: torch.device) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        # ``type`` and not ``isinstance``: lazy proxies elsewhere in the process run code when asked for their class.
        if issubclass(type(found), torch.Tensor) and _has_storage(found) and found.device == device:
            storage = found.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    sizes.pop(0, None)
    return sizes


def _has_storage(tensor: torch.Tensor) -> bool:
    # A wrapper such as DTensor has no memory of its own; its inner tensor is found by itself.
    # The compiler's fake tensors have none either, and functional ones are wrappers of fakes.
    is_plain = not isinstance(tensor, FakeTensor) and not is_traceable_wrapper_subclass(tensor)
    return tensor.layout is torch.strided and is_plain
