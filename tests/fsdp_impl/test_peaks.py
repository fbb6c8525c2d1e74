"""The most bytes that forward and backward hold at a time, counted in the host's order as on a device.

On the CPU there are no streams, and a buffer that would wait for one is freed at once. Here streams and events are
stand-ins, so that buffers live as long as on a device: from the call that allocates them to the call that frees them.
The other rank is not there, and collectives allocate nothing.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.profiler import record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_impl
from fsdp_impl.common import streams
from tests.allocated import allocated

WORLD = 2
DIM = 512
#: Bytes of a layer of float32.
LAYER = 4 * DIM * DIM
#: Activations, scalars, and what aligns buffers.
CRUMBS = LAYER / 10
#: What two implementations differ by in these.
ALIGNMENT = LAYER / 40


class Event:
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def device_like(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of two of which this process is one, and streams that are there and order nothing."""
    monkeypatch.setattr(streams, "create", lambda device, priority=0: object())
    monkeypatch.setattr(streams, "current", lambda device: CURRENT)
    monkeypatch.setattr(streams, "use", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(streams, "record", lambda stream: Event())
    monkeypatch.setattr(streams, "wait", lambda stream, event: None)
    monkeypatch.setattr(streams, "join", lambda stream, other: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


CURRENT = object()


class Layers(nn.Module):
    """Layers of one square weight each; the root has nothing."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Mixed(nn.Module):
    """Layers of several parameters of odd sizes, and parameters of the root around them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.before = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM + 1), nn.GELU(), nn.Linear(2 * DIM + 1, DIM))
            for _ in range(depth)
        )
        self.after = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.after(x)


class Peaks(NamedTuple):
    """In bytes, beyond what is held before a step."""

    forward: float
    backward: float


def per_parameter(package: Any) -> Callable[[Any, torch.dtype | None], nn.Module]:
    def shard(model: Any, dtype: torch.dtype | None) -> nn.Module:
        policy = package.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        for layer in model.layers:
            package.fully_shard(layer, mp_policy=policy)
        return package.fully_shard(model, mp_policy=policy)

    return shard


def flattened(package: Any, **options: Any) -> Callable[[Any, torch.dtype | None], nn.Module]:
    def shard(model: Any, dtype: torch.dtype | None) -> nn.Module:
        units = set(model.layers)
        policy = package.MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else None
        own = {"mixed_precision": policy, "use_orig_params": True, "device_id": torch.device("cpu")}
        own["auto_wrap_policy"] = lambda module, recurse, **_: recurse or module in units
        return package.FullyShardedDataParallel(model, **own, **options)

    return shard


def peaks(shard: Callable[[Any, torch.dtype | None], nn.Module], model: nn.Module, dtype: torch.dtype | None) -> Peaks:
    """Those of the third step; the gradients of the step before are gone."""
    sharded = shard(model, dtype)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1e-3)

    def step() -> None:
        loss = sharded(torch.ones(1, DIM)).float().square().mean()
        with record_function("backward"):
            loss.backward()
        with record_function("step"):
            optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    most, held = allocated(step)
    assert held == 0, f"a step leaves {held} bytes behind"
    return Peaks(most["forward"], most["backward"])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model", [Layers, Mixed])
@pytest.mark.parametrize("depth", [2, 8])
def test_at_most_those_of_torch(model: Callable[[int], nn.Module], depth: int, dtype: torch.dtype | None) -> None:
    ours = peaks(per_parameter(fsdp_impl), model(depth), dtype)
    theirs = peaks(per_parameter(fsdp), model(depth), dtype)
    for phase, most, allowed in zip(Peaks._fields, ours, theirs, strict=True):
        assert most <= allowed + ALIGNMENT, f"{phase}: {most / LAYER:.2f} layers, torch's {allowed / LAYER:.2f}"


#: Layers that a phase holds besides the shards of gradients. In forward a unit's gather and its parameters, or the
#: gather of the unit before. In backward a unit's parameters and gradients, the gather of the next one and the input of
#: the reduction before; the gradient of a flat parameter is put together from those of its parts, which costs one more.
HELD = {"float32": {"reference": (2, 4), "reference.flat": (2, 5)}}
#: The same where parameters and gradients are bfloat16 and half as large, and reductions float32.
HELD["bfloat16"] = {"reference": (1, 2.5), "reference.flat": (1, 3)}
SHARDINGS = {"reference": per_parameter(fsdp_impl), "reference.flat": flattened(fsdp_impl)}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_what_units_hold(name: str, dtype: torch.dtype | None) -> None:
    """However many there are: all of the buffers are those of the units at hand."""
    for depth in (4, 12):
        found = peaks(SHARDINGS[name], Layers(depth), dtype)
        forward, backward = HELD["float32" if dtype is None else "bfloat16"][name]
        # The last unit but one allocates as much as earlier units, in addition to the shards of their gradients.
        allowed = Peaks(LAYER * forward, LAYER * (backward + (depth - 2) / WORLD))
        for phase, most, expected in zip(Peaks._fields, found, allowed, strict=True):
            text = f"{phase} of {depth} layers: {most / LAYER:.2f} layers, expected {expected / LAYER:.2f}"
            assert abs(most - expected) <= CRUMBS, text
