"""Reads buffers and plain tensors of modules when training begins: those that never change are constants."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardproof.harness.tensors.fingerprints import host_rows
from shardproof.harness.watching.names import attributes_of, buffers_of, kind_of, modules_of
from shardproof.harness.watching.samples import some_of


@dataclasses.dataclass(frozen=True)
class Constant:
    """A buffer or a plain attribute of a module of user code, by a sample of its elements.

    Attributes:
        numel: how many elements it has in full.
        values: how many different values are in the sample.
        is_zero: whether they are all zero.
        has_nan: whether one is not a number.
        is_saved: whether state dicts have it.
    """

    numel: int
    values: int
    is_zero: bool
    has_nan: bool
    is_saved: bool


@torch.no_grad()
def constants_of(roots: Sequence[nn.Module]) -> dict[str, Constant]:
    """Return the floating-point tensors that the forward of their module names in its code, by canonical name."""
    found, rows, sizes = dict[str, torch.Tensor](), [], []
    read = {name for root in roots for name in _read_in(root)}
    saved = {name for root in roots for name in _saved_in(root)}
    for name, one in tensors_of(roots).items():
        some = some_of(one) if name in read and one.is_floating_point() and one.device.type != "meta" else None
        if some is not None:
            found[name] = one
            rows.append(torch.stack([(some == 0).all(), some.isnan().any()]))
            sizes.append(some.unique().numel())
    flags = zip(found.items(), host_rows(rows), sizes, strict=True)
    return {
        name: Constant(one.numel(), values, bool(is_zero), bool(has_nan), name in saved)
        for (name, one), (is_zero, has_nan), values in flags
    }


def tensors_of(roots: Sequence[nn.Module]) -> Mapping[str, torch.Tensor]:
    """Return buffers and plain attributes of modules of user code, by canonical name."""
    return {name: one for root in roots for each in (buffers_of, attributes_of) for name, one in each(root)}


def _read_in(root: nn.Module) -> Iterator[str]:
    for name, module in modules_of(root):
        code: Any = getattr(inspect.unwrap(kind_of(module).forward), "__code__", None)
        for last in code.co_names if code is not None else ():
            yield f"{name}.{last}" if name else last


def _saved_in(root: nn.Module) -> Iterator[str]:
    for name, module in modules_of(root):
        for last in module._buffers.keys() - module._non_persistent_buffers_set:
            yield f"{name}.{last}" if name else last
