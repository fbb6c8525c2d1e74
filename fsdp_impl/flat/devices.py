"""Where a module's parameters are, and where they are computed with."""

import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

_CPU = torch.device("cpu")


def requested(device_id: int | torch.device | None, rank: int) -> torch.device | None:
    """The device that ``device_id`` names, with an index unless it is the CPU.

    Warns if the index is left to us.
    """
    if device_id is None:
        return None
    device = torch.device(device_id)
    if device.type == "cpu" or device.index is not None:
        return device
    current = torch.device(device.type, torch.get_device_module(device.type).current_device())
    warnings.warn(
        f"FSDP got the argument `device_id` {device_id} on rank {rank}, which does not have an explicit index. FSDP "
        f"will use the current device {current}. If this is incorrect, please explicitly call "
        f"`torch.{device.type}.set_device()` before FSDP initialization or pass in the explicit device index as the "
        "`device_id` argument.",
        stacklevel=4,
    )
    return current


def device_type(params: Iterable[nn.Parameter], asked: torch.device | None, group: dist.ProcessGroup | None) -> str:
    """The kind of device to compute on: the one asked for, else the parameters', else the accelerator.

    The CPU without an accelerator, and where ``group`` has no back end for the accelerator.

    Raises:
        RuntimeError: if parameters are on accelerators of several kinds.
    """
    if asked is not None:
        return asked.type
    kinds = {param.device.type for param in params} - {"cpu", "meta"}
    if len(kinds) > 1:
        raise RuntimeError(f"FSDP does not support modules with different device types but got params on {kinds}")
    if kinds:
        return kinds.pop()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    served = group._device_types if group is not None else [torch.device(accelerator.type)]
    return accelerator.type if torch.device(accelerator.type) in served else "cpu"


def check_single(params: Iterable[nn.Parameter], asked: torch.device | None) -> None:
    """Refuse parameters on several devices, unless ``device_id`` says where those on the CPU shall go.

    Raises:
        RuntimeError: if they are.
    """
    devices = {param.device for param in params}
    if len(devices) == 2 and _CPU in devices:
        if asked is None:
            raise RuntimeError(
                "To support a module with both CPU and GPU params, please pass in device_id argument. Found params on "
                f"{devices}"
            )
    elif len(devices) > 1:
        raise RuntimeError(f"FSDP only supports single device modules but got params on {devices}")


def compute_device(params: Iterable[nn.Parameter], asked: torch.device | None, kind: str, rank: int) -> torch.device:
    """The device to compute on.

    Raises:
        ValueError: if the parameters are on another accelerator than the one asked for.
    """
    param = next(iter(params), None)
    if param is not None and param.device.type not in ("cpu", "meta"):
        device = param.device
    elif kind == "cpu":
        device = _CPU
    else:
        device = torch.device(kind, torch.get_device_module(kind).current_device())
    if asked is not None and device != asked:
        raise ValueError(f"Inconsistent compute device and `device_id` on rank {rank}: {device} vs {asked}")
    return device


def move(params: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move what is on the CPU, in place."""
    for tensor in [*params, *buffers]:
        if tensor.device == _CPU and device != _CPU:
            with torch.no_grad():
                tensor.data = tensor.to(device)
                if tensor.grad is not None:
                    tensor.grad.data = tensor.grad.to(device)


def warn_of_cpu(params: Iterable[nn.Parameter], kind: str) -> None:
    """Tell that sharding will happen on the CPU although compute will not."""
    param = next(iter(params), None)
    if param is not None and param.device == _CPU and kind != "cpu":
        warnings.warn(
            "The passed-in `module` is on CPU and will thus have FSDP's sharding initialization run on CPU, which may "
            "be slower than on GPU. We recommend passing in the `device_id` argument for FSDP to move `module` to GPU "
            "for the sharding initialization. `module` must also be on GPU device to work with the "
            "`sync_module_states=True` flag since that requires GPU communication.",
            stacklevel=4,
        )
