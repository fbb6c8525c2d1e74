"""A CPU for programs that are written for GPUs, and the bits of their losses; ``run.py`` imports it into each program.

Names of torch that take a GPU take the CPU here: ``.cuda()``, ``.to("cuda:0")``, the backend NCCL, ``device_ids``.
Each rank begins with a seed of its own, for programs that set none.
"""

import builtins
import contextlib
import functools
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ.get("RANK", "0"))
#: The folder of the data that ``run.py`` makes.
DATA = os.environ.get("PROGRAMS_DATA", "")

#: Losses after which a program ends: the doctor watches three steps.
LAST = 6
_printed = 0


def loss(value: Any, last: int = LAST) -> None:
    """Write a loss in full; end the program after the last one, on every rank."""
    global _printed
    value = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)
    # Into a file, because a bar of progress may share the terminal's line.
    with open(os.environ["PROGRAMS_LOSSES"] + f".{RANK}", "a") as file:
        file.write(f"{float(value.double().mean()).hex()}\n")
    _printed += 1
    if _printed == last:
        dist.barrier()
        sys.stderr.flush()
        os._exit(0)  # the threads of a group that is in use abort a process that ends in the middle of its loop


def _is_gpu(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return device.startswith("cuda") if isinstance(device, str) else type(device) is int


def _moves_to_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def moved(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if arguments and _is_gpu(arguments[0]):
            arguments = ("cpu", *arguments[1:])
        if _is_gpu(keywords.get("device")):
            keywords["device"] = "cpu"
        return function(self, *arguments, **keywords)

    return moved


def _nothing() -> Callable[..., None]:
    """A function of its own for each name, because the compiler keeps a table of torch's functions."""
    return lambda *_, **__: None


def _initialize(backend: Any = None, *arguments: Any, **keywords: Any) -> None:
    keywords.pop("device_id", None)
    _init_process_group("gloo", *arguments, **keywords)


def _wrap(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **keywords: Any) -> None:
    _init_ddp(self, module, **keywords)


_init_process_group, _init_ddp = dist.init_process_group, DistributedDataParallel.__init__
dist.init_process_group = dist.distributed_c10d.init_process_group = functools.wraps(_init_process_group)(_initialize)
DistributedDataParallel.__init__ = functools.wraps(_init_ddp)(_wrap)  # type: ignore[method-assign]
for kind in (torch.Tensor, torch.nn.Module):
    kind.to = _moves_to_cpu(kind.to)
    kind.cuda = lambda self, *arguments, **keywords: self
torch.Tensor.pin_memory = lambda self, *arguments: self  # type: ignore[method-assign, assignment, misc]
for name in ("set_device", "synchronize", "reset_peak_memory_stats", "empty_cache"):
    setattr(torch.cuda, name, _nothing())
for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
    setattr(torch.cuda, name, lambda *_, __name=name: 0)

# Edits of any file of a program may use this module.
builtins.on_cpu = sys.modules[__name__]  # type: ignore[attr-defined]

torch.manual_seed(1 + RANK)
random.seed(1 + RANK)
with contextlib.suppress(ImportError):
    import numpy

    numpy.random.seed(1 + RANK)
# Compiling takes longer than these runs.
torch.compiler.set_stance("force_eager")
# A torchvision whose binaries are for another build of torch lacks operators that no program here calls.
for name in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
