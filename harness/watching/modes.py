"""The modules of a model that compute otherwise in training, and constants that a narrow dtype rounds."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from shardproof.harness.tensors.fingerprints import host_rows
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching.following import has_statistics, is_dropout
from shardproof.harness.watching.names import modules_of
from shardproof.harness.watching.records import Mode
from shardproof.harness.watching.samples import is_narrow, some_of

#: A buffer with fewer elements is no table of constants.
_TABLE = 8

#: Multiples of one part of so many are exact in each dtype, as the values of masks and counts are.
_PARTS = 8


def modes_of(roots: Sequence[nn.Module], called: Mapping[int, bool], again: Collection[str]) -> list[Mode]:
    """Return the dropouts and the norms of running statistics of a model.

    Args:
        called: the ids of modules that a forward with gradients of the step has called.
        again: the names of norms whose running statistics a recomputation moves once more.
    """
    found = []
    for root in roots:
        above: dict[int, nn.Module] = {}
        for name, module in modules_of(root):
            above.update((id(child), module) for child in module.children())
            if not (has_statistics(module) or is_dropout(module)):
                continue
            own = list(module.parameters())
            around = own or list(above.get(id(module), module).parameters())
            trains = any(one.requires_grad for one in around) or not around
            written = sum(one._version for one in own)
            is_norm, is_called = has_statistics(module), id(module) in called
            found.append(Mode(name, is_norm, module.training, is_called, trains, written, name in again))
    return found


def rounded_constants(roots: Sequence[nn.Module]) -> list[str]:
    """Return the buffers that no state dict has, as tables of rotations are, of a dtype that rounds their values."""
    tables = {name: one for root in roots for name, one in _tables_of(root)}
    samples = {name: own.float() for name, one in tables.items() if (own := some_of(one)) is not None}
    are_exact = host_rows([((one * _PARTS).frac() == 0).all() for one in samples.values()])
    return [name for name, is_exact in zip(samples, are_exact, strict=True) if not is_exact]


def _tables_of(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, module in modules_of(root):
        for last in module._non_persistent_buffers_set:
            buffer = module._buffers.get(last)
            if buffer is None or not is_narrow(buffer) or local_of(buffer).numel() < _TABLE:
                continue
            yield f"{name}.{last}" if name else last, buffer
