"""Collectives in the forward of a ``torch.autograd.Function`` of user code, and the gradients of its backward."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardproof.harness.collectives.trace import Collective
from shardproof.harness.tensors.fingerprints import host_rows, row_hashes
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching import calls
from shardproof.harness.watching.records import Crossing

#: The kinds of collectives whose result has a part of each rank, or is the sum of theirs.
_GATHERS, _SUMS = ("all_gather",), ("all_reduce",)

#: How many frames above a collective are looked at, and how many nodes of a graph.
_FRAMES, _NODES = 24, 1 << 18

#: The functions of torch that gather with a gradient, and the nodes that pass on what they are given.
_OF_TORCH, _SAME = "torch.distributed.nn.functional", ("Clone", "ToCopy", "View", "UnsafeView", "Contiguous")

#: How many crossings of a step are told.
_MOST = 8


class _Passed(NamedTuple):
    """A backward of a function: two flags, and the loss, on their devices."""

    kind: str
    collective: str
    group: tuple[int, ...]
    flags: torch.Tensor
    loss: torch.Tensor


class _Padded(NamedTuple):
    """The padding of a tensor that a function gathers: how many rows of it take part in the loss, on its device."""

    kind: str
    group: tuple[int, ...]
    rows: torch.Tensor


class _Passing:
    """The backward of a function: whether it passes on its rank's own part of what comes, and no more.

    Args:
        kind: the name of the function's class.
        collective: the kind of the collective in its forward.
        group: the global ranks.
        loss: of which the backward pass is.
        passed: takes what was seen.
    """

    def __init__(
        self, kind: str, collective: str, group: tuple[int, ...], loss: torch.Tensor, passed: list[_Passed]
    ) -> None:
        self._kind, self._collective, self._group = kind, collective, group
        self._loss, self._passed = loss, passed
        self._own: torch.Tensor | None = None
        self._others: list[torch.Tensor] = []

    def before(self, entering: Any) -> None:
        """Keep the rank's own part of what comes: the backward may write it in place."""
        with contextlib.suppress(Exception), torch.no_grad():
            number, parts = 0, list(entering[:1])
            if self._collective in _GATHERS:
                number, parts = self._group.index(dist.get_rank()), _parts_of(entering, len(self._group))
            self._own = parts[number].clone() if parts and parts[number] is not None else None
            self._others = [one.ne(0).any() for at, one in enumerate(parts) if at != number and one is not None]

    def after(self, leaving: Any, entering: Any) -> None:
        """Compare it with what is passed on."""
        with contextlib.suppress(Exception), torch.no_grad():
            own, given = self._own, [one for one in leaving if one is not None]
            self._own = None
            if own is None or len(given) != 1 or own.numel() != given[0].numel() or len(self._passed) >= _MOST:
                return
            is_own = (own.reshape(given[0].shape) == given[0]).all() & given[0].ne(0).any()
            uses_others = torch.stack(self._others).any() if self._others else torch.ones_like(is_own)
            flags = torch.stack([is_own, uses_others]).float()
            self._passed.append(_Passed(self._kind, self._collective, self._group, flags, self._loss))


class Crossings(calls.Listener):
    """Sees them in this process."""

    def __init__(self) -> None:
        self._kinds: dict[types.CodeType, type | None] = {}
        self._seen: dict[type, tuple[str, tuple[int, ...]]] = {}
        self._passed: list[_Passed] = []
        self._padded: list[_Padded] = []
        self._patches = contextlib.ExitStack()
        self._is_begun = False

    def begin(self) -> Callable[[], list[Crossing]]:
        """Begin to look, and return what tells what was seen since the last call; of further roots nothing."""
        if self._is_begun:
            return list
        self._is_begun = True
        self._patches.enter_context(calls.observed(self))
        return self.take

    def take(self) -> list[Crossing]:
        """Return what was seen since the last call."""
        flags = host_rows([one.flags for one in self._passed])
        losses = host_rows([one.loss for one in self._passed])
        found = [
            Crossing(one.kind, one.collective, one.group, own > 0, others > 0, loss)
            for one, (own, others), loss in zip(self._passed, flags, losses, strict=True)
        ]
        self._passed.clear()  # which hooks of graphs have
        counts = host_rows([one.rows for one in self._padded])
        found += [
            Crossing(one.kind, _GATHERS[0], one.group, is_own=False, uses_others=False, loss=0.0, padding=int(count))
            for one, count in zip(self._padded, counts, strict=True)
            if count
        ]
        self._padded.clear()
        return found

    def on_collective(self, collective: Collective) -> None:
        """Note the function of user code in whose forward it is issued."""
        with contextlib.suppress(Exception):
            is_of_group = collective.kind in (*_GATHERS, *_SUMS) and len(collective.group) > 1
            if is_of_group and (kind := self._function()) is not None:
                self._seen[kind] = collective.kind, collective.group

    def _function(self) -> type | None:
        frame: types.FrameType | None = sys._getframe(2)
        for _ in range(_FRAMES):
            if frame is None:
                return None
            code = frame.f_code
            if code.co_name == "forward":
                if code not in self._kinds:
                    self._kinds[code] = next((one for one in _functions() if _code_of(one) is code), None)
                if (kind := self._kinds[code]) is not None:
                    return kind
            frame = frame.f_back
        return None

    def on_backward(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hook such functions of its graph."""
        with contextlib.suppress(Exception):
            if self._seen and len(self._passed) < _MOST and tensors[0].numel() == 1:
                loss = local_of(tensors[0].detach()).float().reshape(()).clone()
                for node in _nodes_of(tensors[0]):
                    if (kind := getattr(type(node), "_forward_cls", None)) in self._seen:
                        self._hook(node, kind, loss)

    def _hook(self, node: Any, kind: type, loss: torch.Tensor) -> None:
        collective, group = self._seen[kind]
        if kind.__module__ != _OF_TORCH:
            passing = _Passing(kind.__name__, collective, group, loss, self._passed)
            node.register_prehook(passing.before)
            node.register_hook(passing.after)
        for padding in _paddings_of(node) if collective in _GATHERS else ():
            pads = getattr(padding, "_saved_pad", ())
            padding.register_prehook(functools.partial(_count_padding, self._padded, kind.__name__, group, pads))

    def close(self) -> None:
        """Look no more."""
        self._patches.close()
        self._kinds.clear()
        self._seen.clear()
        self._passed.clear()
        self._padded.clear()


def _functions() -> Iterator[type]:
    """Yield the functions of user code, and those of torch that gather."""
    waiting = [torch.autograd.Function]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            if not kind.__module__.startswith("torch.") or kind.__module__ == _OF_TORCH:
                yield kind


def _code_of(kind: Any) -> types.CodeType | None:
    return getattr(kind.forward, "__code__", None)


def _nodes_of(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield the nodes of a graph, each once."""
    waiting: list[Any] = [tensor.grad_fn]
    seen = set[Any]()
    while waiting and len(seen) < _NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [one for one, _ in node.next_functions]


def _paddings_of(node: Any) -> Iterator[Any]:
    """Yield the nodes of paddings by a constant of what a node was given."""
    for child, _ in node.next_functions:
        found = child
        while found is not None and type(found).__name__.startswith(_SAME):
            found = next((one for one, _ in found.next_functions if one is not None), None)
        if type(found).__name__.startswith("ConstantPadNd"):
            yield found


def _count_padding(
    padded: list[_Padded], kind: str, group: tuple[int, ...], pads: Sequence[int], entering: Sequence[Any]
) -> None:
    """Count the rows of padding that have a gradient; ``pads`` are pairs, the last dimension first.

    A row with the gradient of another one may be one more of a sum, to which zeros add nothing.
    """
    with contextlib.suppress(Exception), torch.no_grad():
        by_dim = [(dim, *pair) for dim, pair in enumerate(zip(pads[::2], pads[1::2], strict=True), 1) if any(pair)]
        if len(by_dim) != 1:
            return
        (dim, begin, end), gradient = by_dim[0], entering[0]
        rows = gradient.movedim(-dim, 0).reshape(gradient.shape[-dim], -1)
        padding, own = torch.cat([rows[:begin], rows[len(rows) - end :]]), rows[begin : len(rows) - end]
        takes_part = padding.ne(0).any(1) & ~torch.isin(row_hashes(padding), row_hashes(own))
        padded.append(_Padded(kind, group, takes_part.sum().float()))


def _parts_of(entering: Sequence[Any], size: int) -> list[Any]:
    """Return the gradients of what each rank has sent, as a gather returns it: one by one, stacked, or in one row."""
    if len(entering) == size:
        return list(entering)
    whole = entering[0] if len(entering) == 1 else None
    return list(whole.chunk(size)) if whole is not None and whole.ndim and whole.shape[0] % size == 0 else []
