"""A plain copy of the model beside the sharded one, and what of the two must agree."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _comm_mode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_impl import FSDPModule
from shardproof.harness.judging.numerics import distance
from shardproof.harness.parity.rank import Rank

_COUNTED = {*_comm_mode.c10d_collective_ops, *_comm_mode.NATIVE_TO_PY_MAPPING}
GATHER, REDUCE, ALL_REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"


class MLP(nn.Module):
    """Two linear layers with a smooth activation; hidden size ``2 * dim``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(dim, 2 * dim)
        self.out_proj = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out_proj(torch.tanh(self.in_proj(x))))


def tower(dim: int, depth: int = 3) -> nn.Sequential:
    """A linear layer, which stays with the root, and ``depth`` MLPs; the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(dim, dim), *(MLP(dim) for _ in range(depth)))


def home() -> torch.device:
    """The device of this rank, for what is made without a ``rank`` at hand."""
    accelerated = dist.get_backend() != "gloo"
    return torch.device("cuda", torch.cuda.current_device()) if accelerated else torch.device("cpu")


def plain_copy(model: nn.Module) -> nn.Module:
    """Made before sharding."""
    return copy.deepcopy(model).to(home())


def batch(rank: Rank, step: int, shape: tuple[int, ...], *, index: int | None = None) -> torch.Tensor:
    """Another one on each rank, or for ``index`` the same on those that give the same."""
    generator = torch.Generator().manual_seed(1000 * step + (rank.index if index is None else index))
    return torch.randn(shape, generator=generator).to(rank.device)


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """What data parallelism means: the gradients of ``model`` averaged over ``group``."""
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad.div_(dist.get_world_size(group))


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of ``tensor``; of one that is offloaded too."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to(tensor.device_mesh.device_type).full_tensor()


def assert_same(plain: nn.Module, sharded: nn.Module, *, grads: bool = True, **tolerance: float) -> None:
    """Parameters and gradients agree; collective."""
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for (name, expected), (other, param) in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
        assert name == other
        assert isinstance(param, DTensor), name
        assert_close(name, full(param.detach()), expected.detach(), **tolerance)
        if not grads:
            continue
        assert (param.grad is None) == (expected.grad is None), f"gradient of {name}"
        if param.grad is not None and expected.grad is not None:
            assert param.grad.dtype == param.dtype
            assert_close(f"gradient of {name}", full(param.grad), expected.grad, **tolerance)


def assert_close(name: str, actual: torch.Tensor, expected: torch.Tensor, **tolerance: float) -> None:
    """By the rule of the suites with the plain copy for an oracle, or by a tolerance of the test's own."""
    actual, expected = actual.cpu(), expected.cpu()
    if tolerance or not expected.is_floating_point():
        torch.testing.assert_close(actual, expected, msg=lambda text: f"{name}: {text}", **tolerance)
        return
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name
    magnitude = float(expected.abs().max()) if expected.numel() else 0.0
    found = distance(actual, expected, expected.double(), magnitude=magnitude)
    assert not found.is_too_far, (
        f"{name}: {found.sharded_ulps:.3g} ulps from the plain copy, at most {found.allowed_ulps:g} are allowed"
    )


def counts(fn: Callable[[], Any]) -> dict[str, int]:
    """How often ``fn`` issued each collective; those of FSDP by their constants above, others by their own names."""
    with _Collectives() as mode:
        fn()
    return dict(mode.found)


class _Collectives(TorchDispatchMode):
    """Counts what CommDebugMode counts, without its hooks and notes of each operation of each module.

    It lets DTensors take their operations apart first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        packet = getattr(func, "_overloadpacket", None)
        if packet in _COUNTED:
            self.found[str(packet).rsplit(".", 1)[-1]] += 1
        return func(*args, **(kwargs or {}))
