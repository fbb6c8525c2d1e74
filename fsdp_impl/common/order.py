"""Check that all ranks run the units forward in one order, and in the same one every time.

Ranks that gather different units exchange wrong numbers where the sizes happen to agree, and hang where they do not.
The first forward is compared across ranks, unit by unit, before each gather: one all-reduce of two integers tells
whether all ranks mean the same unit, however many they are; names are exchanged only to report that they do not. Later
forwards are compared with the first, on each rank by itself, which costs no communication and therefore only warns.
"""

import hashlib
import warnings
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist


class OrderCheck:
    """The order of forwards under one root. Evaluation is not checked: it may take other paths on purpose."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: list[list[str]] = []
        self._position = 0
        self._compares_ranks = True
        self._is_active = False
        self._has_warned = False

    def begin(self, *, training: bool) -> None:
        """A forward of the root begins."""
        self._is_active = training and torch.is_grad_enabled()
        self._position = 0
        if self._compares_ranks:
            self._first.clear()  # of a first forward that raised

    def before_gather(self, names: Sequence[str], group: dist.ProcessGroup | None) -> None:
        """The unit of the parameters ``names`` is about to be gathered over ``group``, unless it still is unsharded.

        A ``RuntimeError`` in the first forward, if another rank gathers another unit.
        """
        if not self._is_active:
            return
        if self._compares_ranks:
            self._compare_ranks(list(names), group)
            self._first.append(list(names))
            return
        expected = self._first[self._position] if self._position < len(self._first) else None
        self._position += 1
        if names != expected:
            self._warn(expected, list(names))

    def end(self, groups: Iterable[dist.ProcessGroup | None]) -> None:
        """The root's forward ended; a ``RuntimeError`` after the first one, if another rank goes on.

        ``groups`` are those of all units under the root.
        """
        if not self._is_active:
            return
        self._is_active = False
        if not self._compares_ranks:
            if self._position < len(self._first):
                self._warn(self._first[self._position], None)
            return
        for group in dict.fromkeys(groups):
            self._compare_ranks(None, group)
        self._compares_ranks = False

    def _compare_ranks(self, names: list[str] | None, group: dist.ProcessGroup | None) -> None:
        if group is None or group.size() == 1 or self._agree(names, group):
            return
        self._is_active = False
        theirs: list[list[str] | None] = [None] * group.size()
        dist.all_gather_object(theirs, names, group=group)
        index = next(index for index, other in enumerate(theirs) if other != theirs[0])
        ranks = dist.get_process_group_ranks(group)
        raise RuntimeError(
            f"Forward order differs across ranks: rank {ranks[0]} {_doing(theirs[0])} while "
            f"rank {ranks[index]} {_doing(theirs[index])}"
        )

    def _agree(self, names: list[str] | None, group: dist.ProcessGroup) -> bool:
        """Whether all ranks of ``group`` give the same ``names``: their largest number is their smallest."""
        number = _number(names)
        extremes = torch.tensor([number, -number], dtype=torch.int64, device=self._device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        largest, negative_smallest = extremes.tolist()
        return bool(largest == -negative_smallest)

    def _warn(self, expected: list[str] | None, names: list[str] | None) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        wanted = "not all-gather any more parameters in the forward"
        if expected is not None:
            wanted = f"all-gather for {[expected]}"
        found = "ending the forward" if names is None else f"trying to all-gather parameters for {[names]}"
        warnings.warn(
            f"Forward order differs from that of the first iteration on rank {dist.get_rank()}. "
            "Collectives are unchecked and may give incorrect results or hang\n"
            f"Expected to {wanted} but {found}",
            stacklevel=4,
        )


def _doing(names: list[str] | None) -> str:
    return "is not all-gathering any more" if names is None else f"is all-gathering parameters for {[names]}"


def _number(names: list[str] | None) -> int:
    """A number that stands for ``names``; 56 bits, so that its negative is one too."""
    text = "" if names is None else "\n".join(["unit", *names])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
