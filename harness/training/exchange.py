"""Sends what each rank has seen to all ranks, through a gloo group of its own and never for longer than it may."""

import datetime
import pickle
import re
from typing import Any

import torch
import torch.distributed as dist

from shardproof.harness.judging.texts import ranks_of


class Absent(RuntimeError):
    """A rank did not come within the time; the text names what is known."""


class Exchange:
    """All ranks make one at the same place, and call :meth:`all` equally often.

    Args:
        patience: seconds to wait for the slowest rank.

    Raises:
        Absent: a rank did not come within ``patience``.
    """

    def __init__(self, *, patience: float) -> None:
        # Without torch.distributed a process is alone.
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._patience = patience
        self._group: Any = None
        if self.size > 1:
            timeout = datetime.timedelta(seconds=patience)
            try:
                self._group = dist.new_group(backend="gloo", timeout=timeout)
            except RuntimeError as error:  # which waits for all ranks
                raise Absent(_absence(str(error), patience)) from error

    def all(self, value: Any, *, patience: float | None = None) -> list[Any]:
        """Return the values of all ranks, in their order.

        Args:
            patience: for this call, in seconds.

        Raises:
            Absent: a rank did not come within ``patience``, or has left.
        """
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        try:
            self._meet(self._patience if patience is None else patience)
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            self._gather(lengths, torch.tensor([data.numel()]))
            most = max(int(one) for one in lengths)
            padded = torch.zeros(most, dtype=torch.uint8)
            padded[: data.numel()] = data
            parts = [torch.zeros(most, dtype=torch.uint8) for _ in range(self.size)]
            self._gather(parts, padded)
        except RuntimeError as error:
            raise Absent(_absence(str(error), self._patience)) from error
        return [
            pickle.loads(bytes(part[: int(length)].numpy().tobytes()))
            for part, length in zip(parts, lengths, strict=True)
        ]

    @property
    def is_there(self) -> bool:
        """Whether the group of the exchange still is: user code may destroy all process groups, and make others."""
        if self._group is None:
            return self.size == 1
        try:
            return dist.is_initialized() and bool(dist.get_backend(self._group))
        except ValueError:
            return False

    def _meet(self, patience: float) -> None:
        # It tells rank 0 which ranks do not come.
        dist.monitored_barrier(self._group, datetime.timedelta(seconds=patience), wait_all_ranks=True)

    def _gather(self, parts: list[torch.Tensor], mine: torch.Tensor) -> None:
        dist.all_gather(parts, mine, group=self._group)

    def close(self) -> None:
        """Give the group back, if its process group still exists."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def _absence(text: str, patience: float) -> str:
    if named := re.search(r"Ranks? ([\d, ]+) failed to pass", text):
        return f"{ranks_of(map(int, named[1].split(',')))} did not come within {patience:g} s"
    return f"not all ranks came within {patience:g} s: {text.partition(chr(10))[0]}"
