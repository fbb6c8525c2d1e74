"""Checks by size that an implementation divides what its adapter claims to divide.

Bytes are counted in the rank's memory once the model is sharded. Elements are counted where a training script sees
them: in the registered parameters, in their gradients, and in the state of the optimizer. Counting reads and does not
wait for a device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.harness.adapters.base import Adapter, Config, Traits
from shardproof.harness.tensors import memory, trees
from shardproof.harness.verdicts.finding import Finding, Location, Stage, raise_first

#: How many shares of the parameters each member of ``traits.held_from_start`` is; what is gathered is counted apart.
_SHARES = {"master": 1, "gradients": 1, "optimizer": 2, "gathered": 0}

NOT_SHARDED = "the model is not sharded"
"""The title of failures about the size of what a rank holds."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What one rank may hold of a model's parameters, by what its adapter declares.

    Attributes:
        numel: the elements of the whole model.
        share: the most elements of the model's parameters that are this rank's share, with padding.
        padding: the elements of the share by which units are padded.
        byte_share: the bytes of that share, with everything else that is declared as held from the start.
        byte_limit: the most bytes that a rank may hold once the model is sharded.
    """

    numel: int
    share: int
    padding: int
    byte_share: int
    byte_limit: int

    @property
    def can_tell(self) -> bool:
        """Whether a rank's share is less than the whole model, which padding may prevent if the model is tiny."""
        return 0 < self.share < self.numel


def sizes_of(model: nn.Module, config: Config, traits: Traits) -> Sizes:
    """Return what one rank may hold of a model that is not sharded yet."""
    parameters = list(model.parameters())
    itemsize = config.cast.itemsize if config.cast else max((value.element_size() for value in parameters), default=0)
    numel = sum(value.numel() for value in parameters)
    ignored = {id(model.get_parameter(name)) for name in config.ignored}
    shares = [
        value.numel() if id(value) in ignored else traits.local_numel(value.shape, config.shard_size)
        for value in parameters
    ]
    padding = traits.collective_padding * (len(config.units) + 1)
    share = sum(shares) + padding
    # What is held besides the parameters is a share too, never the full model.
    held = share * (1 + sum(_SHARES[what] for what in traits.held_from_start))
    if "gathered" in traits.held_from_start or config.sync_states:
        # What each of gloo's two threads has sent or gathered last stays allocated in full until it is released.
        held += config.shard_size * sum(sorted(shares)[-2:])
    # The margin is half of what sharding the parameters saves: bookkeeping tensors are smaller, an unsharded model
    # exceeds it.
    margin = max(numel - share, 0) // 2
    return Sizes(numel, share, padding, itemsize * held, itemsize * (held + margin))


@dataclasses.dataclass(frozen=True)
class Counts:
    """The elements that one rank holds of something and those of all of it; ``held`` is None if it was not counted."""

    held: int | None
    full: int

    @property
    def is_all(self) -> bool:
        """Whether the rank holds at least everything."""
        return self.held is not None and 0 < self.full <= self.held


def registered_numel(adapter: Adapter) -> int:
    """Return the elements that this rank holds of the parameters that the adapter's module registers."""
    return _numel(adapter.module.parameters())


def gradient_numel(adapter: Adapter) -> int:
    """Return the elements that this rank holds of the gradients of the registered parameters."""
    grads = (value.grad for value in adapter.module.parameters() if value.is_leaf)
    return _numel(grad for grad in grads if grad is not None)


def state_numel(adapter: Adapter) -> int | None:
    """Return the elements of the optimizer's state on this rank, without its scalars; None if there is no optimizer.

    An optimizer around another one has no state itself. What the adapter reads of the other's then counts.
    """
    if adapter.optimizer is None:
        return None
    held = sum(_numel(_tensors(state)) for state in adapter.optimizer.state.values())
    shown = adapter.optimizer_state() or {}
    read = _numel(piece.tensor for pieces in shown.values() for piece in pieces.values() if piece.tensor.ndim)
    return held or read


def states_per_parameter(optimizer: torch.optim.Optimizer | None) -> int:
    """Return how many tensors, besides scalars, an optimizer keeps for one parameter."""
    return 0 if optimizer is None else max((len(_tensors(state)) for state in optimizer.state.values()), default=0)


def _tensors(state: dict[str, object]) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor) and value.ndim]


@torch.no_grad()
def _numel(tensors: Iterable[torch.Tensor]) -> int:
    found = {id(tensor): tensor for tensor in tensors}.values()
    return sum((one.to_local() if isinstance(one, DTensor) else one).numel() for one in found)


def kept_outside(model: nn.Module) -> list[str]:
    """Say which modules keep tensors in attributes of their own, as ``nn.LSTM`` keeps a list of its weights.

    Sharding replaces registered parameters, and does not know of such attributes: they keep the full ones.
    """
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found = []
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules") or not isinstance(value, (list, tuple, dict)):
                continue
            kept = [one for one in trees.tensors_of(value) if id(one) not in known and memory.is_allocated(one)]
            if nbytes := memory.bytes_of(kept):
                kind = type(module).__name__
                found.append(f"{name or 'the model'} ({kind}) keeps {nbytes} bytes of tensors in {attribute!r}")
    return found


def all_of(what: str, counts: Sequence[Counts]) -> Finding | None:
    """Return a finding if every rank holds all of something that the implementation claims to shard.

    Args:
        what: a member of ``traits.shards``.
    """
    if not all(one.is_all for one in counts):
        return None
    named = "optimizer state" if what == "optimizer" else what
    them = "it" if what == "optimizer" else "them"
    text = f"the implementation claims to shard {named}, and every rank holds all of {them}"
    return Finding(Location(stage=Stage.SHARDING), f"{text} ({counts[0].full} elements)")


def check_sharded(shown: Sequence[tuple[Counts, Finding | None]]) -> None:
    """Raise if the parameters of a new run are not divided.

    Args:
        shown: by rank, the elements of the registered parameters, and the rank's own finding about its bytes.

    Raises:
        Divergence: every rank holds all parameters, or any rank more bytes than it may.
    """
    everywhere = all_of("parameters", [counts for counts, _ in shown])
    raise_first([everywhere] if everywhere else [finding for _, finding in shown], title=NOT_SHARDED)
