"""The methods of the wrapper that are about state dicts of optimizers."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_impl.flat import optim_state, optim_state_load
from fsdp_impl.flat.names import clean
from fsdp_impl.flat.optim_state import Table, groups_of
from fsdp_impl.flat.optim_state_keys import OptimStateKeyType, rename
from fsdp_impl.flat.state_dict_methods import StateDictMethods
from fsdp_impl.flat.state_dict_options import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    StateDictType,
)

State = dict[str, Any]


class OptimStateMethods:
    """What :class:`FullyShardedDataParallel` has for optimizers; the older methods are what the two newer ones do."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: State | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """The optimizer's state dict by the names of the model without wrappers, of the type that was set. Collective.

        Args:
            model: the model, or what is around it.
            optim: its optimizer.
            optim_state_dict: what ``optim.state_dict()`` returned; asked for if not given.
            group: the ranks that must agree on what the optimizer has; those of the first wrapper by default.

        Returns:
            Whole tensors, or DTensors for ``SHARDED_STATE_DICT``; nothing on other ranks than the first if so set.

        Raises:
            RuntimeError: if a rank's optimizer lacks parameters that the first rank's has.
            NotImplementedError: for ``LOCAL_STATE_DICT``.
        """
        settings = StateDictMethods.get_state_dict_type(model)
        config = settings.optim_state_dict_config
        _refuse_local(settings.state_dict_type)
        return _saved(
            model,
            optim,
            optim_state_dict,
            shards=settings.state_dict_type is StateDictType.SHARDED_STATE_DICT,
            rank0_only=_is_rank0_only(config),
            offload_to_cpu=config.offload_to_cpu,
            group=group,
        )

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: State,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """What ``optim.load_state_dict()`` takes of a state dict by names, from any number of ranks and any wrapping.

        A collective where tensors are DTensors, or with ``rank0_only``, where the first rank's argument counts alone.

        Args:
            model: the model, or what is around it.
            optim: its optimizer.
            optim_state_dict: as :meth:`optim_state_dict` returns it, or an unwrapped model's by names.
            is_named_optimizer: whether the optimizer knows parameters by name.
            load_directly: load it as well.
            group: the ranks to give the first one's argument to; those of the first wrapper by default.

        Raises:
            NotImplementedError: for ``LOCAL_STATE_DICT``.
        """
        settings = StateDictMethods.get_state_dict_type(model)
        _refuse_local(settings.state_dict_type)
        found = optim_state_load.load(
            Table(model),
            groups_of(optim, model),
            optim_state_dict,
            rank0_only=_is_rank0_only(settings.optim_state_dict_config),
            by_name=is_named_optimizer,
            process_group=group,
        )
        if load_directly:
            optim.load_state_dict(found)
        return found

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """:meth:`optim_state_dict` with whole tensors on the CPU, whatever was set."""
        _warn_optim_input(optim_input)
        return _saved(model, optim, None, shards=False, rank0_only=rank0_only, offload_to_cpu=True, group=group)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> State:
        """:meth:`optim_state_dict` with DTensors, whatever was set."""
        return _saved(model, optim, None, shards=True, rank0_only=False, offload_to_cpu=False, group=group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: State,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> State:
        """:meth:`optim_state_dict_to_load` of whole tensors that every rank has."""
        return _loadable(full_optim_state_dict, model, optim_input, optim)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: State, model: nn.Module, optim: torch.optim.Optimizer
    ) -> State:
        """:meth:`optim_state_dict_to_load` of DTensors. Collective."""
        return _loadable(sharded_optim_state_dict, model, None, optim)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: State | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> State:
        """:meth:`optim_state_dict_to_load` of whole tensors that the first rank has. Collective."""
        return _loadable(full_optim_state_dict or {}, model, optim_input, optim, rank0_only=True, group=group)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: State,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> State:
        """The same state dict by names or by numbers, for an optimizer of the unwrapped ``model``.

        Raises:
            ValueError: for keys of parameters that the model, or the optimizer, does not have.
        """
        _warn_optim_input(optim_input)
        named = {param: clean(name) for name, param in model.named_parameters()}
        groups = groups_of(optim if optim is not None else optim_input, model)
        names = [named[param] for param in optim_state.params_of(groups)]  # type: ignore[index]
        return rename(optim_state_dict, names, optim_state_key_type)


def _saved(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    given: State | None,
    *,
    shards: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    group: dist.ProcessGroup | None,
) -> State:
    table = Table(model)
    return optim_state.save(
        table,
        groups_of(optim, model),
        optim.state_dict() if given is None else given,
        shards=shards,
        rank0_only=rank0_only,
        offload_to_cpu=offload_to_cpu,
        process_group=group,
    )


def _loadable(
    given: State,
    model: nn.Module,
    optim_input: Any,
    optim: torch.optim.Optimizer | None,
    *,
    rank0_only: bool = False,
    group: dist.ProcessGroup | None = None,
) -> State:
    _warn_optim_input(optim_input)
    groups = groups_of(optim if optim is not None else optim_input, model)
    return optim_state_load.load(Table(model), groups, given, rank0_only=rank0_only, process_group=group)


def _refuse_local(kind: StateDictType) -> None:
    if kind is StateDictType.LOCAL_STATE_DICT:
        raise NotImplementedError(
            "A local state dict of an optimizer is its own: save optim.state_dict(), and load it as it is"
        )


def _is_rank0_only(config: OptimStateDictConfig) -> bool:
    return isinstance(config, FullOptimStateDictConfig) and config.rank0_only


def _warn_optim_input(optim_input: Any) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated: give `optim`, or nothing, in its place.",
            FutureWarning,
            stacklevel=4,
        )
