"""The methods of the wrapper that are about state dicts of modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from fsdp_impl.flat import state_dict
from fsdp_impl.flat.collect import wrappers
from fsdp_impl.flat.names import clean
from fsdp_impl.flat.state_dict_options import (
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    settings_of,
)

if TYPE_CHECKING:
    from fsdp_impl.flat.unit import FlatUnit


class StateDictMethods(nn.Module):
    """What :class:`FullyShardedDataParallel` adds to ``nn.Module`` for state dicts."""

    _unit: "FlatUnit"
    _state_dict_settings: StateDictSettings = settings_of()

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """As ``nn.Module`` does, without what wrappers add to names; of the type that was set. Collective.

        Values are copies, whatever ``keep_vars`` says of others.

        Raises:
            AssertionError: during forward or backward, and inside ``summon_full_params``.
            RuntimeError: for local state dicts of what is not sharded.
        """
        given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
        destination, prefix = given.get("destination", destination), given.get("prefix", prefix)
        state_dict.check_idle(self._unit)
        found = super().state_dict(destination=destination, prefix=prefix, keep_vars=given.get("keep_vars", keep_vars))
        state_dict.finish(self._unit, found, prefix, self._state_dict_settings)
        state_dict.clean_metadata(found, prefix)
        return found

    def _load_from_state_dict(
        self,
        state_dict_: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Called by ``load_state_dict`` for each module, outer ones first, with what is under their prefix."""
        state_dict.check_idle(self._unit)
        missing, errors = state_dict.load(self._unit, state_dict_, prefix, self._state_dict_settings)
        if strict:
            missing_keys.extend(map(clean, missing))
        error_msgs.extend(errors)
        super()._load_from_state_dict(
            state_dict_, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set what state dicts of all wrappers in ``module``, itself included, consist of.

        Returns:
            What was set before.

        Raises:
            RuntimeError: for a configuration of another type.
            AssertionError: if the wrappers' settings differ.
            ValueError: if there is no wrapper.
        """
        settings = settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
        before = StateDictMethods.get_state_dict_type(module)
        for wrapper in wrappers(module):
            wrapper._state_dict_settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """What is set for the wrappers in ``module``, itself included.

        Raises:
            AssertionError: if the wrappers' settings differ.
            ValueError: if there is no wrapper.
        """
        found = [wrapper._state_dict_settings for wrapper in wrappers(module)]
        if not found:
            raise ValueError(f"Expects a module with FSDP modules but got {type(module)}")
        for other in found:
            if other != found[0]:
                raise AssertionError(
                    f"All FSDP modules must have the same state dict settings. Got {other} and {found[0]}."
                )
        return found[0]

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """:meth:`set_state_dict_type` for as long as the context lasts."""
        before = StateDictMethods.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for wrapper in wrappers(module):
                wrapper._state_dict_settings = before
