"""Detects process state that a case leaves behind in a rank.

``picture`` takes a snapshot of that state before and after each case, and ``differences`` compares the two. ``Patches``
finds functions and classes of torch that were replaced.
"""

import collections
import os
import pathlib
import threading
from typing import Any

import torch
import torch.distributed.tensor
import torch.nn.parallel.distributed
import torch.utils.checkpoint

from shardproof.harness.tensors import memory, private

_MODULE_HOOKS = (
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.nn.modules.module._global_backward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
    "torch.nn.modules.module._global_parameter_registration_hooks",
)
_DISPATCH_MODES = "torch.utils._python_dispatch._get_current_dispatch_mode_stack"

#: Entries of the picture that may change when an implementation is first used in a process, because it may then set up
#: state that it keeps. If one does, the case runs once more there, where a change counts as a leak.
AFTER_FIRST_USE = ("threads", "open files", "modules", "device memory")

#: State that torch.compile creates once and keeps for the life of the process: the monitor thread of tqdm, because it
#: makes a progress bar for each graph, shown or not, where inductor has found Triton's assembler and library, the
#: address of a function of torch that its C++ kernels call, and functions that replace some of torch's own. Where it
#: caches what it has compiled is set before the first case.
_COMPILER_THREADS = ("tqdm_monitor",)
_COMPILER_VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")
_COMPILER = pathlib.Path(torch.__file__).parent / "_dynamo"

#: The modules and classes of torch that a training loop and the baseline use, whose functions an adapter may replace.
_NAMESPACES = (
    torch, torch.Tensor, torch.nn, torch.nn.functional, torch.nn.init, torch.nn.utils, torch.nn.utils.clip_grad,
    torch.nn.Parameter, *dict.fromkeys(kind for kind in vars(torch.nn.modules).values() if isinstance(kind, type)),
    torch.nn.parallel.distributed, torch.nn.parallel.DistributedDataParallel, torch.autograd, torch.autograd.graph,
    torch.autograd.Function, torch.utils.checkpoint, torch.optim, torch.optim.Optimizer, torch.optim.SGD,
    torch.optim.Adam, torch.optim.AdamW, torch.distributed, torch.distributed.distributed_c10d,
    torch.distributed.ProcessGroup, torch.distributed.device_mesh.DeviceMesh, torch.distributed.tensor,
    torch.distributed.tensor.DTensor, *filter(None, [private.find("torch.distributed._functional_collectives")]),
)  # fmt: skip

#: Names that torch rebinds by itself: ``Storage`` follows the default dtype, which the picture has.
_REBOUND = ("torch.Storage",)

#: Bytes of device memory in tensors that a case may leave behind: implementations keep buffers for reuse. CPU memory is
#: not compared, because gloo's threads hold the tensors of a collective for a moment after it has ended.
_MEMORY_GRAIN = 1 << 16


def picture(device: torch.device, *, groups: int, directory: str) -> dict[str, Any]:
    """Take a snapshot of the process-wide state that all cases on this rank share, by names that appear in messages.

    Open files in the world's directory are left out, because NCCL's threads open the rendezvous file when they poll it.
    """
    memory.finish_backward(device)
    state: dict[str, Any] = {
        "gradient mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled(device.type),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic cuDNN": torch.backends.cudnn.deterministic,
        "float32 matrix products": torch.get_float32_matmul_precision(),
        "process groups": groups,
        "working directory": os.getcwd(),
        "environment": {name: value for name, value in os.environ.items() if name not in _COMPILER_VARIABLES},
        "threads": _threads(),
        "open files": [path for path in _open_files() if not path.startswith(f"{directory}/")],
    }
    if (modes := private.find(_DISPATCH_MODES)) is not None:
        state["dispatch modes"] = len(modes())
    for path in _MODULE_HOOKS:
        if (hooks := private.find(path)) is not None:
            state[f"modules' {path.rpartition('.')[2].strip('_').replace('_', ' ')}"] = len(hooks)
    state["modules"] = memory.module_names()
    if device.type != "cpu":
        state["device memory"] = memory.tensor_bytes(device)
    return state


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    """Describe each entry of two pictures that changed, in one line, by the entry's name.

    Items that disappeared from a list, such as threads that ended, and small growth of device memory are not reported.
    """
    changed = [name for name, value in before.items() if after[name] != value]
    return {name: line for name in changed if (line := _line(name, before[name], after[name]))}


class Patches:
    """The functions and classes of ``_NAMESPACES``, as they were when this object was made."""

    def __init__(self) -> None:
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
            # torch wraps the step of an optimizer's class when it makes the first instance.
            kind([torch.zeros(1)])
        self._before = [_contents(space) for space in _NAMESPACES]

    def found(self) -> list[str]:
        """The names of what has been replaced since; what did not exist before does not count."""
        found = []
        for index, (space, before, values) in enumerate(self._before):
            # A tuple compares its items by identity first: with 4,400 names this takes 0.1 ms.
            if not _are_same(tuple(vars(space).values()), values):
                is_class = isinstance(space, type)
                path = f"{space.__module__}.{space.__qualname__}" if is_class else space.__name__
                names = [f"{path}.{name}" for name in _replaced(space, before)]
                replaced = [name for name in names if name not in _REBOUND]
                found += replaced
                if not replaced:  # torch imports some of its modules when they are first used
                    self._before[index] = _contents(space)
        return found


def _contents(space: Any) -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
    return space, dict(vars(space)), tuple(vars(space).values())


def _are_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    try:
        return one == other
    except Exception:  # objects that differ may be tensors, which have no single truth value
        return False


def _replaced(space: Any, before: dict[str, Any]) -> list[str]:
    now = vars(space)
    found = [name for name, value in before.items() if callable(value) and now.get(name) is not value]
    if isinstance(space, type):
        # A name that is new in a class may replace one of its base classes.
        new = [name for name in now.keys() - before.keys() if callable(now[name])]
        found += [name for name in new if any(name in vars(base) for base in space.__mro__[1:])]
    return sorted(name for name in found if not _is_the_compilers(now.get(name)))


def _is_the_compilers(value: Any) -> bool:
    """Whether a function was made by torch.compile, which wraps some of torch's own at its first use, for good."""
    code = getattr(value, "__code__", None)
    return code is not None and pathlib.Path(code.co_filename).is_relative_to(_COMPILER)


def _line(name: str, before: Any, after: Any) -> str | None:
    if name == "environment":
        changed = (name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        return f"environment variables changed: {', '.join(sorted(changed))}"
    if name == "device memory":
        return f"device memory: grew by {after - before} bytes" if after - before > _MEMORY_GRAIN else None
    if isinstance(before, list):
        # Items that are only in `before` have ended since and were not left behind.
        more = collections.Counter(after) - collections.Counter(before)
        hint = "; often a hook or closure keeps them" if name == "modules" else ""
        listed = ", ".join(f"{count} x {item}" if count > 1 else item for item, count in more.items())
        return f"{name}: {listed}{hint}" if more else None
    return f"{name}: {before} became {after}"


def _threads() -> list[str]:
    """Return the names of the threads that Python started.

    Python has a name for another one as long as code of Python runs in it: for autograd's of a device, in which a hook
    that torch calls may log a warning, and which has not always gone when backward returns.
    """
    found = (thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))
    return sorted(thread.name for thread in found if thread.name not in _COMPILER_THREADS)


def _open_files() -> list[str]:
    """Return the paths of the open regular files: sockets, pipes and devices belong to process groups and drivers."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the descriptor of the listing itself
            continue
        if path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/memfd:")):
            found.append(path)
    return sorted(found)
