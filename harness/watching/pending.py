"""Gradients whose digests are made on their device, and read when the step has ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from shardproof.harness.tensors.fingerprints import Digest, K, bits_of_all, digests, is_small, strided
from shardproof.harness.tensors.layouts import Layout
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching.names import name_of

#: Sparse gradients of more elements are not made dense.
_MOST_SPARSE = 1 << 26

#: The most elements of own gradients that are kept until others can be read with them.
_MOST_WAITING = 1 << 22

#: The parameters that are read to see whether any has been written: so many, of so many elements at most.
_MOST_VALUES, _FEW = 64, 1 << 12


class Pending:
    """A gradient whose digest is still on its device, or is still to be made of a tensor."""

    __slots__ = ("digest", "dtype", "is_returned", "layout", "tensor")

    def __init__(self, tensor: torch.Tensor, layout: Layout, *, is_returned: bool = False) -> None:
        self.layout, self.dtype, self.is_returned = layout, name_of(tensor.dtype), is_returned
        self.tensor: torch.Tensor | None = tensor
        self.digest: Digest | None = None


def digest(pending: Sequence[Pending]) -> None:
    """Make the digests of gradients, of those that are alike together."""
    tensors = [one.tensor for one in pending if one.tensor is not None]
    for one, made in zip(pending, digests(tensors, [one.layout.box for one in pending]), strict=True):
        one.digest, one.tensor = made, None


class OwnGradients:
    """The gradients of this rank alone in a step, by the names of parameters, for each backward pass in its order.

    A hook of a tensor runs for what ``torch.autograd.grad()`` returns to user code as well as for what a backward pass
    accumulates. The first may be an inner step of meta-learning, or a gradient whose norm is penalized: it counts
    only where a parameter gets no other in the step. Of a parameter with hooks of user code there are two: the one
    that they are given, and what they make of it.
    """

    def __init__(self) -> None:
        self._of: dict[str, list[tuple[int, Pending]]] = {}
        self._given: dict[str, list[tuple[int, Pending]]] = {}
        self._waiting: list[Pending] = []
        self._waiting_numel = 0

    def __bool__(self) -> bool:
        return bool(self._of)

    @property
    def names(self) -> set[str]:
        """The names of parameters that have some."""
        return set(self._of)

    def add(
        self, name: str, number: int, local: torch.Tensor, layout: Layout, *, is_given: bool, is_returned: bool
    ) -> Pending:
        """Add a gradient of a backward pass.

        Args:
            is_given: whether it is the one that hooks of user code are given.
            is_returned: whether ``torch.autograd.grad()`` may return it; :meth:`accumulate` tells that it does not.
        """
        pending = Pending(local, layout, is_returned=is_returned)
        (self._given if is_given else self._of).setdefault(name, []).append((number, pending))
        if not is_small(local):
            digest([pending])
            return pending
        # Small ones are read together; until then they are kept, whatever becomes of the gradient.
        pending.tensor = local.clone()
        self._waiting.append(pending)
        self._waiting_numel += local.numel()
        if self._waiting_numel > _MOST_WAITING:
            self.digest()
        return pending

    def accumulate(self, name: str) -> None:
        """Note that the last gradient of a parameter was accumulated into its ``.grad``."""
        for each in (self._of, self._given):
            for _, pending in each.get(name, [])[-1:]:
                pending.is_returned = False

    def digest(self) -> None:
        """Make the digests of those that wait for others."""
        digest(self._waiting)
        self._waiting, self._waiting_numel = [], 0

    def counted(self, *, is_given: bool = False) -> Iterator[tuple[str, int, Pending]]:
        """Yield names, numbers of backward passes, and gradients; of a name the returned ones where it has no other."""
        for name, parts in (self._given if is_given else self._of).items():
            accumulated = [part for part in parts if not part[1].is_returned]
            yield from ((name, number, one) for number, one in accumulated or parts)


def last_number(value: torch.Tensor | Pending) -> torch.Tensor:
    """Return what is finite if all of an output or of a gradient is."""
    return value if isinstance(value, torch.Tensor) else value.digest.numbers[K]  # type: ignore[union-attr]


def readable(gradient: torch.Tensor, layout: Layout) -> torch.Tensor | str:
    """Return the elements of a gradient, or what it is where they are too many or no numbers of a box."""
    local = local_of(gradient)
    is_large = local.layout is not torch.strided and local.numel() > _MOST_SPARSE
    if not is_large and (local := strided(local)).numel() == layout.box.numel:
        return local
    return f"sparse, of {local.numel():,} elements" if is_large else type(gradient).__name__


def ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in a dtype that has an order, which 8-bit floating-point ones lack."""
    values = strided(local_of(tensor.detach()))
    return values.float() if values.element_size() == 1 else values


def few_values(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[torch.Tensor]:
    """Return the bits of some parameters in one: those that an optimizer perturbs, as SAM does, are all of them.

    In one, because they are kept from forward to forward, beside a model that may be tiny.
    """
    small = [own for _, one in parameters if one.requires_grad and 0 < (own := local_of(one)).numel() <= _FEW]
    return [torch.stack(bits_of_all(small[:_MOST_VALUES])).sum(0)] if small else []
