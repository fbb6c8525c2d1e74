"""Measures the bytes of tensors that a rank holds: from its device's allocator, or a census of storages."""

import gc
import time
from collections.abc import Iterable, Mapping

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from shardproof.harness.tensors import devices, notes

#: The limit on garbage collections in a row. A graph needs one per layer and a last one that finds nothing; the deepest
#: model of the cases needs far fewer than this.
_MOST_ROUNDS = 1000

#: Seconds in which a thread of gloo has run again, also where each core has ten others to run.
_GLOO_SECONDS = 2.0


def collect_garbage() -> None:
    """Run the garbage collector until it finds nothing.

    One collection is not enough: autograd nodes hold references in C++, which the collector cannot follow, so it finds
    the objects that a node held only after the node has been freed. A census between two collections would count
    tensors that the next census no longer finds.
    """
    rounds = 0
    while gc.collect():
        rounds += 1
        assert rounds < _MOST_ROUNDS, "there is new garbage after every collection"


def retire_objects() -> None:
    """Leave the objects that exist now out of every later walk and garbage collection.

    A rank's process accumulates objects that live as long as it does, such as torch's caches of operators; to walk over
    them again for every case would take a third of its time. Their memory is still freed when the last reference goes.
    """
    collect_garbage()
    gc.freeze()


def finish_backward(device: torch.device) -> None:
    """Run a backward of one element, after which autograd has dropped the graphs of those before it.

    What was ready to run when a backward raised stays in the queue of its thread until the next backward there, and
    with it the graph, its hooks and through them perhaps a model.

    The thread of a device may also hold the last graph when backward has returned: to drop Python objects it waits for
    the interpreter, which the caller of backward has. It begins another backward only after that. On the CPU backward
    runs in the thread of its caller.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), dtype=torch.float32, device=device, requires_grad=True).backward()


def held_bytes(device: torch.device) -> int:
    """The bytes of all live tensors on ``device``, after garbage collection.

    Where the device's allocator counts, these are the bytes requested from it, before it rounds them to blocks; the
    host waits for the device. Elsewhere, as on the CPU, they are the bytes of the storages of all tensors that the
    garbage collector tracks, each storage once; a storage that is referenced from C++ alone, or by retired objects, is
    not counted.
    """
    held = _held_bytes(device)
    notes.tell("held", count=held, limit=None)
    return held


def _held_bytes(device: torch.device) -> int:
    finish_backward(device)
    collect_garbage()
    if devices.counts_memory(device):
        torch.accelerator.synchronize(device)
        # A tensor that was freed while another stream was registered to use it (`record_stream`) counts until the
        # allocator queries that stream again; emptying the cache makes it do so.
        torch.get_device_module(device).empty_cache()
        return devices.requested_bytes(device, "current")
    return sum(_storages(device).values())


def settled_bytes(device: torch.device, *, limit: int) -> int:
    """:func:`held_bytes`, once gloo's threads have dropped the tensors of collectives that have ended.

    A thread of gloo lets those who wait for a collective go on, and drops its tensors when it runs next: on a busy host
    that may be later than a census, which then counts a parameter that was broadcast before it was sharded. Nothing
    tells when the thread has done it. So where more than ``limit`` bytes are held on the CPU, this looks until they are
    not, for two seconds at most: what somebody keeps is there after that as well.
    """
    held = _held_bytes(device)
    last = time.monotonic() + _GLOO_SECONDS
    while device.type == "cpu" and held > limit and time.monotonic() < last:
        time.sleep(0.001)  # the thread needs a core
        held = _held_bytes(device)
    notes.tell("held", count=held, limit=limit)
    return held


#: The highest peaks that a device's one counter had when it was begun anew, by what is measured and by device: a case
#: and the harness measure at the same time, one within the other.
_earlier_peaks: dict[tuple[str, torch.device], int] = {}


def forget_peak(device: torch.device) -> None:
    """Begin to measure the peak of a device's memory anew, once all work on the device has run."""
    torch.accelerator.synchronize(device)
    _begin_peak("case", device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes that tensors on a device had requested at once since :func:`forget_peak`.

    Requests count, and not the allocator's blocks, whose sizes are rounded. A tensor's memory counts from the host's
    call that allocates it to the host's call that frees it, whatever the streams have reached.
    """
    return _peak("case", device)


def begin_step_peak(device: torch.device) -> int:
    """Begin to measure the peak of a step, apart from what a case measures and without waiting for the device.

    Returns the bytes that tensors on the device have requested now.
    """
    _begin_peak("step", device)
    return devices.requested_bytes(device, "current")


def step_peak(device: torch.device) -> int:
    """The most bytes that tensors on a device had requested at once since :func:`begin_step_peak`."""
    return _peak("step", device)


def _begin_peak(what: str, device: torch.device) -> None:
    for other in ("case", "step"):
        _earlier_peaks[other, device] = _peak(other, device)
    torch.get_device_module(device).reset_peak_memory_stats(device)
    _earlier_peaks[what, device] = 0


def _peak(what: str, device: torch.device) -> int:
    return max(devices.requested_bytes(device, "peak"), _earlier_peaks.get((what, device), 0))


def tensor_bytes(device: torch.device) -> int:
    """The bytes of the storages that Python tensors on ``device`` keep alive, after garbage collection.

    Unlike the allocator's statistics, this leaves out memory that libraries keep, such as the workspaces of cuBLAS.
    """
    collect_garbage()
    return sum(_storages(device).values())


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of all elements of ``tensors``; a tensor that occurs several times counts once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in tensors}.values())


def is_allocated(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own that has not been freed."""
    return _has_storage(tensor) and tensor.untyped_storage().nbytes() > 0


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of the elements of a plain tensor, in order, whatever its device and strides."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def module_names() -> list[str]:
    """The class names of all live modules, after garbage collection; sorted, one entry per module.

    Graph modules of ``torch.fx`` are left out, because its caches keep graphs alive.
    """
    collect_garbage()
    classes = (type(found) for found in gc.get_objects())
    return sorted(one.__name__ for one in classes if issubclass(one, nn.Module) and not issubclass(one, fx.GraphModule))


def _storages(device: torch.device) -> dict[int, int]:
    """The bytes of each storage on ``device`` that a Python tensor references, by the storage's address."""
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        # ``type`` instead of ``isinstance``: lazy proxies elsewhere in the process run code when their ``__class__`` is
        # read.
        if issubclass(type(found), torch.Tensor) and _has_storage(found) and found.device == device:
            storage = found.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    sizes.pop(0, None)
    return sizes


def _has_storage(tensor: torch.Tensor) -> bool:
    # A wrapper such as DTensor has no memory of its own; the census finds its inner tensor separately.
    if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return False
    # The compiler's fake tensors have no memory either, whatever device they claim.
    return tensor.untyped_storage().device == tensor.device


# Frees what models hold that an implementation keeps alive: they would fill the device, one a case.


@torch.no_grad()
def free(held: object) -> None:
    """Free the memory of all tensors in nested lists, tuples and mappings, whoever keeps the tensors.

    They are those of a model that is never used again. Pinned memory cannot be freed so; it is the host's, and does not
    fill the device.
    """
    if isinstance(held, DTensor):
        free(held.to_local())
    elif isinstance(held, torch.Tensor):
        storage = held.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
    elif isinstance(held, Mapping):
        for value in held.values():
            free(value)
    elif isinstance(held, list | tuple):
        for value in held:
            free(value)
