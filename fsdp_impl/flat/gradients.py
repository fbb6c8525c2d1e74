"""The gradients that optimizers see: of the sharded parameters, or between them whole ones that are not reduced yet.

Inside ``no_sync`` gradients accumulate unsharded in the leaf's ``grad``. Until they are reduced, the sharded parameters
show them (as wholes: of another shape than the parameter), so that ``zero_grad`` reaches them; the sharded gradients of
earlier reductions are set aside meanwhile.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from fsdp_impl.flat.group import FlatGroup


class _Shown(NamedTuple):
    param: nn.Parameter
    grad: torch.Tensor
    aside: torch.Tensor | None


class Gradients:
    """The gradients of one group."""

    def __init__(self, group: FlatGroup) -> None:
        self._group = group
        # What one reduction made, and the views of it that were given out: adding to all of them is one addition.
        self._last: torch.Tensor | None = None
        self._last_views: list[tuple[nn.Parameter, torch.Tensor]] = []
        # Unsharded gradients on show, with the sharded ones that they hide.
        self._shown: list[_Shown] = []

    @torch.no_grad()
    def add(self, reduced: torch.Tensor) -> None:
        """Add ``reduced`` (1-D, ``layout.shard_numel``, where shards live) to the sharded gradients.

        Where there are none, views of it become the gradients.
        """
        if self._last is not None and self._is_current() and self._last.dtype == reduced.dtype:
            self._last.add_(reduced)
            return
        views: list[tuple[nn.Parameter, torch.Tensor]] = []
        all_new = True
        for param, which in self._group.shards.holders():
            view = self._group.shards.part(which, reduced)
            if param.grad is None:
                set_grad(param, view)
                views.append((param, _grad_of(param)))
            else:
                param.grad.add_(view)
                all_new = False
        self._last = reduced if all_new else None
        self._last_views = views if all_new else []

    def show_unsharded(self) -> None:
        """Let the sharded parameters show what has accumulated unsharded; undone by :meth:`hide_unsharded`."""
        leaf = self._group.leaf
        if leaf is None or leaf.grad is None or self._shown:
            return
        for param, whole in self._wholes(leaf.grad):
            self._shown.append(_Shown(param, whole, param.grad))
            param.grad = None
            set_grad(param, whole)

    def hide_unsharded(self) -> None:
        """Show sharded gradients again. What the user has dropped meanwhile, by ``zero_grad``, is dropped here too."""
        if not self._shown:
            return
        shown, self._shown = self._shown, []
        leaf = self._group.leaf
        kept = [entry for entry in shown if entry.param.grad is not None]
        for param, whole, aside in shown:
            dropped = param.grad is None
            if dropped and kept:
                whole.zero_()
            param.grad = None
            if aside is not None and not dropped:
                set_grad(param, aside)
        if not kept and leaf is not None:
            leaf.grad = None

    def _wholes(self, grad: torch.Tensor) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """The unsharded gradient by the parameters that show it: on all ranks, wherever the shard cuts."""
        shards = self._group.shards
        if not shards.use_orig:
            return [(shards.flat, grad)]
        parts = shards.layout.split(grad)
        return [(param, part) for param, part in zip(shards.originals, parts, strict=True) if param.requires_grad]

    def _is_current(self) -> bool:
        held: Sequence[tuple[nn.Parameter, torch.Tensor]] = self._last_views
        return bool(held) and all(param.grad is not None and _grad_of(param) is grad for param, grad in held)


def set_grad(param: nn.Parameter, grad: torch.Tensor) -> None:
    """Make ``grad`` the gradient of ``param``, also where shape, dtype or device differ from the parameter's."""
    if grad.size() == param.size() and grad.dtype == param.dtype and grad.device == param.device:
        param.grad = grad
        return
    # autograd checks what is assigned to `grad`, not what its data become.
    param.grad = torch.empty_like(param)
    param.grad.data = grad


def _grad_of(param: nn.Parameter) -> torch.Tensor:
    assert param.grad is not None
    return param.grad
