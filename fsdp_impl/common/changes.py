"""Notice that unsharded values are older than the sharded parameters from which they were gathered."""

import itertools
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_impl.common.hooks import outside_graphs

# Note: stale values
#
# A group's unsharded values may outlive a forward: after an evaluation, by an unshard of the user's, as a gather in
# flight. Before the next outermost forward, and before an unshard by hand, `drop_stale` decides for all groups under
# one root together: if any sharded parameter of any of them has changed, nothing that was gathered is used again.
#
# A gather is a collective, so that the decision must be equal on all ranks of its group, also on a rank that holds no
# element of the changed parameter. It is equal where every rank runs the same statements, because each kind of evidence
# shows there whatever the rank holds:
# - Versions. An in-place operation counts on an empty tensor. User code that skips empty shards still changes others of
#   the model: therefore all groups under a root decide together.
# - Steps. Fused kernels count no version, and an optimizer may hold frozen or empty shards alone. A step counts for the
#   groups of which the optimizer has a parameter, and for no others: a model that lives on one rank may step there.
# - Notes. A load and a writeback count by themselves.
# - Memory. New data have another storage, on a rank without elements too, where their address is 0 as that of the old.
#   It is compared for what is gathered alone, with storages that are kept for this: one that is freed can come back.
#
# Each decision looks at all groups: a look for each of many unshards by hand would cost their square. A group that is
# not gathered has nothing stale, and is gathered from the values of now whatever is decided. So an unshard of such a
# group looks only if it is the first since the last outermost forward, step or note, which is equal on all ranks too.
# The next decision still sees every change since the last one. It may then drop what was gathered after the change: one
# gather more where user code writes to shards between two unshards.

_numbers = itertools.count()
_all: "WeakValueDictionary[int, Changes]" = WeakValueDictionary()


class Looks:
    """The looks of unshards by hand at all groups under one root (see Note: stale values).

    Attributes:
        are_due: whether the next unshard by hand is to look, also of a group that is not gathered.
    """

    are_due = True


class Changes:
    """The changes of one group's sharded parameters (see Note: stale values).

    Attributes:
        looks: of the groups under the root of the group.
    """

    def __init__(self) -> None:
        self.looks = Looks()
        self._number = next(_numbers)
        self._count = 0
        self._seen: tuple[int, ...] = ()
        _all[self._number] = self

    def watch(self, param: torch.Tensor) -> None:
        """Count the steps of optimizers that have ``param``, a shard, and of those that get what it is swapped with."""
        # A number: what is saved or copied with the parameter must not lead to the group.
        param._fsdp_impl_changes = self._number  # type: ignore[attr-defined]

    def note(self) -> None:
        """Count a change that no version counter shows on every rank."""
        self._count += 1
        self.looks.are_due = True

    def look(self, versions: Sequence[int]) -> bool:
        """Whether anything has changed since the last look; ``versions`` are the counters of the group's tensors."""
        before, self._seen = self._seen, (self._count, *versions)
        return before != self._seen

    def would_see(self, versions: Sequence[int]) -> bool:
        """The answer of :meth:`look`, which the next look still gives."""
        return self._seen != (self._count, *versions)


class Gathered(Protocol):
    """A group, as far as its unsharded values may be stale."""

    changes: Changes

    def versions(self) -> Sequence[int]:
        """The version counters of all that user code can write to, in one order, for as long as none is replaced."""
        ...

    def is_gathered(self) -> bool:
        """Whether the unsharded values are there, or a gather is in flight."""
        ...

    def has_moved(self) -> bool:
        """Whether a sharded parameter has other memory than when the group was gathered."""
        ...

    def drop(self) -> None:
        """Reshard, and forget a gather in flight."""
        ...


def drop_stale(groups: Sequence[Gathered]) -> None:
    """Drop all that is gathered of ``groups`` if a sharded parameter of any has changed (see Note: stale values)."""
    changed = [group for group in groups if group.changes.look(group.versions())]
    gathered = [group for group in groups if group.is_gathered()]
    if changed or any(group.has_moved() for group in gathered):
        for group in gathered:
            group.drop()


def is_stale(groups: Sequence[Gathered]) -> bool:
    """Whether :func:`drop_stale` would find a change in ``groups``, which it still finds then."""
    changed = any(group.changes.would_see(group.versions()) for group in groups)
    return changed or any(group.has_moved() for group in groups if group.is_gathered())


@outside_graphs
def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    groups = optimizer.param_groups
    for number in {getattr(param, "_fsdp_impl_changes", None) for group in groups for param in group["params"]}:
        if number is not None and (changes := _all.get(number)) is not None:
            changes.note()


# For good: it is for all optimizers, and holds nothing.
register_optimizer_step_post_hook(_count_step)
