"""Check that all ranks run the units forward in one order, and in the same one every time (``validate_order``).

Ranks that gather different units exchange wrong numbers where the sizes happen to agree, and hang where they do not.
The first forward is compared across ranks, unit by unit, before each gather; later ones with the first, on each rank
by itself, which costs no communication and therefore only warns.
"""

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp_impl.per_parameter.group import ParamGroup

_Names = list[str]


class OrderCheck:
    """The order of forwards under one root. Evaluation is not checked: it may take other paths on purpose."""

    def __init__(self) -> None:
        self._first: list[_Names] = []
        self._position = 0
        self._compares_ranks = True
        self._is_active = False
        self._has_warned = False

    def begin(self, *, training: bool) -> None:
        """A forward of the root begins."""
        self._is_active = training and torch.is_grad_enabled()
        self._position = 0

    def before_gather(self, group: ParamGroup) -> None:
        """``group`` is about to be gathered for its forward, unless it is still unsharded.

        Raises:
            RuntimeError: in the first forward, if another rank gathers another group.
        """
        if not self._is_active:
            return
        names = [param.fqn for param in group.shards.params]
        if self._compares_ranks:
            self._compare_ranks(names, group.mesh.group)
            self._first.append(names)
            return
        expected = self._first[self._position] if self._position < len(self._first) else None
        self._position += 1
        if names != expected:
            self._warn(expected, names)

    def end(self, groups: Sequence[ParamGroup]) -> None:
        """The root's forward ended; ``groups`` are all under the root.

        Raises:
            RuntimeError: after the first forward, if another rank goes on.
        """
        if not self._is_active:
            return
        self._is_active = False
        if not self._compares_ranks:
            if self._position < len(self._first):
                self._warn(self._first[self._position], None)
            return
        for process_group in dict.fromkeys(group.mesh.group for group in groups):
            self._compare_ranks(None, process_group)
        self._compares_ranks = False

    def _compare_ranks(self, names: _Names | None, process_group: dist.ProcessGroup | None) -> None:
        if process_group is None or process_group.size() == 1:
            return
        theirs: list[_Names | None] = [None] * process_group.size()
        dist.all_gather_object(theirs, names, group=process_group)
        for index, other in enumerate(theirs):
            if other != theirs[0]:
                ranks = dist.get_process_group_ranks(process_group)
                self._is_active = False
                raise RuntimeError(
                    f"Forward order differs across ranks: rank {ranks[0]} {_doing(theirs[0])} while "
                    f"rank {ranks[index]} {_doing(other)}"
                )

    def _warn(self, expected: _Names | None, names: _Names | None) -> None:
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
            stacklevel=2,
        )


def _doing(names: _Names | None) -> str:
    return "is not all-gathering any more" if names is None else f"is all-gathering parameters for {[names]}"
