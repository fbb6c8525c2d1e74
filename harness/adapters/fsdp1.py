"""The methods of adapters that only the API of ``FullyShardedDataParallel`` has, named like its calls."""

from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from shardproof.harness.adapters.base import Adapter, StateForm, of_capability
from shardproof.harness.adapters.capability import Capability

KeyKind = Literal["name", "number"]
"""The keys of parameters in an optimizer's state dict: names, or numbers in the optimizer's groups."""


class Fsdp1Methods(Adapter):
    """An adapter with comm hooks, or with deprecated state dicts of optimizers."""

    @of_capability(Capability.REDUCTION_HOOK)
    def register_comm_hook(self, hook: Callable[..., None]) -> None:
        """Let ``hook`` reduce the gradients of all units in place of the implementation. Called once, before training.

        Needs :attr:`Capability.REDUCTION_HOOK`.

        Args:
            hook: called with this rank's whole gradients of one unit, 1-D, and an empty tensor for this rank's share of
                their average, which it fills; the gradients alone, to average in place, where nothing is sharded.
        """
        raise NotImplementedError

    @of_capability(Capability.OPTIMIZER_KEYS)
    def legacy_optim_state_dict(self, *, form: StateForm) -> dict[str, Any]:
        """Return the optimizer's state dict by deprecated calls (collective).

        Needs :attr:`Capability.OPTIMIZER_KEYS`.
        """
        raise NotImplementedError

    @of_capability(Capability.OPTIMIZER_KEYS)
    def load_legacy_optim_state_dict(self, state: dict[str, Any], *, form: StateForm) -> None:
        """Load what :meth:`legacy_optim_state_dict` returned (collective). Needs :attr:`Capability.OPTIMIZER_KEYS`."""
        raise NotImplementedError

    @of_capability(Capability.OPTIMIZER_KEYS)
    def rekey_optim_state_dict(
        self, state: dict[str, Any], *, by: KeyKind, model: nn.Module, optimizer: Any
    ) -> dict[str, Any]:
        """Return a full state dict of an optimizer with the other kind of keys, those of ``by``.

        The model is unsharded, and the optimizer one of its parameters. Needs :attr:`Capability.OPTIMIZER_KEYS`.
        """
        raise NotImplementedError


def as_fsdp1(adapter: Adapter) -> Fsdp1Methods:
    """Return the adapter of a case that needs one of these methods."""
    assert isinstance(adapter, Fsdp1Methods), f"{adapter.name} has none of the methods that only FSDP1 has"
    return adapter
