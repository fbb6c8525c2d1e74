"""What a run was asked to test: implementations, device type and worlds, checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardproof.harness.adapters import registry

if TYPE_CHECKING:
    from shardproof.harness.adapters.base import Adapter

DEFAULT_IMPLEMENTATIONS = ("reference",)
DEFAULT_DEADLINES = {"cpu": 60.0, "cuda": 30.0}


@dataclasses.dataclass(frozen=True)
class Selection:
    """The checked options of a run."""

    implementations: dict[str, type[Adapter]]
    device: str
    device_count: int
    """Devices of a CUDA run; CPU ranks share cores, so any number of them can exist."""
    worlds: tuple[int, ...] | None
    deadline: float
    check_collectives: bool = False
    """Whether ranks compare each collective before they enter it."""

    def allows(self, size: int) -> bool:
        """Whether ``--world`` lets cases of this world through."""
        return self.worlds is None or size in self.worlds

    def has_devices_for(self, size: int) -> bool:
        """Whether a world of this size can exist here."""
        return self.device == "cpu" or size <= self.device_count


def resolve(
    *,
    implementations: str | None,
    device: str,
    worlds: str | None,
    deadline: float | None,
    check_collectives: bool = False,
) -> Selection:
    """Check what was asked for, by the options' texts.

    Raises:
        ValueError: an implementation, the device or a world that cannot exist; one line.
    """
    chosen, count = _device(device)
    sizes = None if worlds is None else _worlds(worlds)
    for size in sizes or ():
        if chosen != "cpu" and size > count:
            raise ValueError(f"--world {size}: there are {count} {chosen} devices; a rank needs one of its own")
    adapters = _adapters(implementations, chosen)
    if deadline is not None and not deadline > 0:
        raise ValueError(f"--deadline {deadline:g}: expected a positive number of seconds")
    return Selection(adapters, chosen, count, sizes, deadline or DEFAULT_DEADLINES[chosen], check_collectives)


def _device(asked: str) -> tuple[str, int]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cuda" and not count:
        raise ValueError("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    # One device makes no world that shards, so ``auto`` takes CUDA from two on.
    return ("cuda" if asked == "cuda" or (asked == "auto" and count > 1) else "cpu"), count


def _worlds(text: str) -> tuple[int, ...]:
    sizes = []
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise ValueError(f"--world {text}: expected positive numbers of ranks such as 2,4, not {part!r}")
        sizes.append(int(part))
    return tuple(sizes)


def _adapters(text: str | None, device: str) -> dict[str, type[Adapter]]:
    names: Sequence[str] = DEFAULT_IMPLEMENTATIONS if text is None else [part.strip() for part in text.split(",")]
    adapters = {}
    for name in names:
        if not name:
            raise ValueError(f"--impl {text}: expected names such as reference,torch.fully_shard")
        adapters[name] = registry.load(name)
        reason = adapters[name].availability(device)
        if reason:
            raise ValueError(f"implementation {name!r} cannot run here on {device}: {reason}")
    return adapters
