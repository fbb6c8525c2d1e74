"""The base class of adapters whose implementation wraps modules and shards one flat parameter per wrapper."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from shardproof.harness.adapters.base import (
    Accumulation,
    Adapter,
    Config,
    FullParams,
    KeysLeftOver,
    OptimizerFactory,
    Precision,
    StateForm,
    Traits,
    Units,
    WrapPolicy,
    inner_first,
    state_pieces,
    tensors_of_state,
)
from shardproof.harness.adapters.capability import COMMON_AND_CLIPPING, Capability
from shardproof.harness.adapters.config import ORDERED, make_scaler
from shardproof.harness.adapters.fsdp1 import Fsdp1Methods, KeyKind
from shardproof.harness.tensors.pieces import Cut, Piece, original_name, piece_of, uncut

# How the parameters of a unit lie in its flat parameter, and which part of each a rank holds.
#
# The layout is computed here from its specification and not read from the implementation: the parameters follow each
# other in the order of ``named_parameters()``, each as it lies in memory and at a multiple of an alignment, the end is
# padded to a multiple of the number of ranks, and each rank holds one of the equal parts.


@dataclasses.dataclass(frozen=True)
class ParameterPart:
    """The part of one parameter in one rank's shard of a flat parameter.

    Attributes:
        name: the name of the parameter in the original model.
        first: its first element in the shard.
        last: the element of the shard behind its last; equal to ``first`` if the rank holds nothing of the parameter.
        cut: the cut from the full tensor to the part, as a 1-D tensor.
    """

    name: str
    first: int
    last: int
    cut: Cut


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """The parameters of one flat parameter, in the order in which they lie.

    Attributes:
        module: the name of the wrapped module; "" is the root.
        names: the names of the parameters in the original model.
        numels: for each parameter, the number of elements that go into the flat parameter: those of this rank's
            tensor-parallel shard, or all elements of a parameter that is not tensor-parallel.
        cuts: for each parameter, the cut from its full tensor to these elements.
        orders: for each parameter, its dimensions in the order of memory.
        alignment: each parameter starts at a multiple of this number of elements.
    """

    module: str
    names: tuple[str, ...]
    numels: tuple[int, ...]
    cuts: tuple[Cut, ...]
    orders: tuple[tuple[int, ...], ...]
    alignment: int = 1

    def places(self, *, index: int, size: int) -> Iterator[ParameterPart]:
        """Yield the part of each parameter in the shard of one rank, by its index among those that share it."""
        starts, end = self._extents()
        length = math.ceil(end / size)
        parameters = zip(self.names, starts, self.numels, self.cuts, self.orders, strict=True)
        for name, start, numel, cut, order in parameters:
            offset = start - index * length
            first, last = (min(max(0, place), length) for place in (offset, offset + numel))
            part = functools.partial(_part, cut=cut, order=order, first=first - offset, last=last - offset)
            yield ParameterPart(name, first, last, part)

    def pieces(self, shard: torch.Tensor | None, *, index: int, size: int) -> Iterator[tuple[str, Piece | None]]:
        """Yield the name and the piece of each parameter in one rank's 1-D shard, as for :meth:`places`.

        The tensors of pieces are views of ``shard``. Without one, as for the gradient of an unused unit, there are no
        pieces.
        """
        length = math.ceil(self._extents()[1] / size)
        assert shard is None or shard.shape == (length,), (
            f"a shard of {tuple(shard.shape)} instead of {length} elements"
        )
        for place in self.places(index=index, size=size):
            yield place.name, None if shard is None else Piece(shard[place.first : place.last], place.cut)

    def _extents(self) -> tuple[list[int], int]:
        """Return the first element of each parameter in the flat parameter, and the one behind the last parameter."""
        starts, end = [], 0
        for numel in self.numels:
            starts.append(math.ceil(end / self.alignment) * self.alignment)
            end = starts[-1] + numel
        return starts, end


def _part(full: torch.Tensor, *, cut: Cut, order: tuple[int, ...], first: int, last: int) -> torch.Tensor:
    flat = cut(full).permute(order).flatten()
    return flat[min(first, flat.numel()) : min(last, flat.numel())] if last > first else flat[:0]


def flat_units(
    model: nn.Module, modules: Sequence[str], *, alignments: Mapping[str, int] | None = None,
    ignored: Sequence[str] = (),
) -> list[FlatLayout]:  # fmt: skip
    """Return the layouts of the flat parameters that wrapping makes; of modules that are left without parameters none.

    Args:
        model: the model before anything is wrapped.
        modules: the names of the modules in the order of wrapping; "" is the root. A parameter belongs to the first of
            them that contains it.
        alignments: by module, each parameter starts at a multiple of so many elements; 1 where it has none.
        ignored: the names of the parameters that belong to none.
    """
    claimed = {id(model.get_parameter(name)) for name in ignored}
    found = []
    for module in modules:
        prefix = f"{module}." if module else ""
        named = [
            (original_name(prefix + name), parameter)
            for name, parameter in model.get_submodule(module).named_parameters()
            if id(parameter) not in claimed
        ]
        claimed |= {id(parameter) for _, parameter in named}
        if named:
            pieces = [piece_of(parameter.detach()) for _, parameter in named]
            numels = tuple(piece.tensor.numel() for piece in pieces)
            names, cuts = tuple(name for name, _ in named), tuple(piece.cut for piece in pieces)
            orders = tuple(_order(piece.tensor) for piece in pieces)
            alignment = (alignments or {}).get(module, 1)
            found.append(FlatLayout(module, names, numels, cuts, orders, alignment))
    return found


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor in the order of memory: the widest stride first."""
    if tensor.is_contiguous():
        return tuple(range(tensor.ndim))
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))


#: The prefix that a wrapper adds to the names of everything inside the wrapped module.
_WRAPPED = "_fsdp_wrapped_module."

#: The documented defaults of ``MixedPrecision``.
_PRECISION_DEFAULTS = {
    "keep_low_precision_grads": False,
    "cast_forward_inputs": False,
    "cast_root_forward_inputs": True,
}
#: With ``use_orig_params=True``, each parameter starts at a multiple of 16 bytes in its flat parameter.
_ALIGNMENT_BYTES = 16
#: Counted in elements, the padding is largest for a dtype of 2 bytes.
_MOST_ALIGNMENT = 8


def share_of_flat(shape: torch.Size, size: int) -> int:
    """Return a rank's share, in elements, of what one parameter adds to the flat parameter, alignment included."""
    return math.ceil((math.prod(shape) + _MOST_ALIGNMENT - 1) / size)


class WrappingAdapter(Fsdp1Methods):
    """Drives a wrapper of one module, which may hold the parameters of the module in one flat parameter."""

    module: Any
    _held_flat: list[tuple[FlatLayout, nn.Parameter]]

    def _check(self, config: Config) -> None:
        keeps = Accumulation(reshard_after_backward=False)
        assert config.accumulation in (None, Accumulation(), keeps), "no_sync defers all of the reduction, of all units"
        assert config.accumulation != keeps or config.reshard_after_forward is False, (
            "parameters that are freed after forward are freed after backward too"
        )

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Enter ``no_sync`` for every microbatch but the last."""
        with contextlib.nullcontext() if is_last else self.module.no_sync():
            yield

    def clip(self) -> torch.Tensor:
        assert self.config.clip is not None
        return cast(torch.Tensor, self.module.clip_grad_norm_(self.config.clip.max_norm, self.config.clip.norm_type))

    def gradients(self) -> dict[str, Piece | None]:
        return self._flat_pieces(lambda parameter: parameter.grad)

    def parameters(self) -> dict[str, Piece]:
        pieces = self._flat_pieces(torch.Tensor.detach)
        return {name: piece for name, piece in pieces.items() if piece is not None}

    def optimizer_state(self) -> dict[str, dict[str, Piece]] | None:
        if self.optimizer is None:
            return None
        found: dict[str, dict[str, Piece]] = {}
        for unit, parameter in self._held_flat:
            state = tensors_of_state(self.optimizer.state.get(parameter, {}))
            for place in unit.places(index=self.config.shard_index, size=self.config.shard_size):
                parts = {key: one[place.first : place.last] if one.ndim else one for key, one in state.items()}
                found[place.name] = state_pieces(parts, place.cut)
        return found

    def own_gradients(self, names: Sequence[str]) -> list[torch.Tensor]:
        pieces = self.gradients()
        return [piece.tensor for name in names if (piece := pieces[name]) is not None]

    def _flat_pieces(self, read: Callable[[nn.Parameter], torch.Tensor | None]) -> dict[str, Piece | None]:
        """Return the pieces of all parameters in what ``read`` returns of each flat parameter."""
        index, size = self.config.shard_index, self.config.shard_size
        found: dict[str, Piece | None] = {}
        for unit, parameter in self._held_flat:
            shard = read(parameter)
            found |= unit.pieces(None if shard is None else shard.view(-1), index=index, size=size)
        return found


class BoundedGradScaler(ShardedGradScaler):
    """Keeps a scale that would be infinite after its growth, which torch's does not on the CPU (findings/F394.py)."""

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        before = self.get_scale()
        super().update(new_scale)
        if new_scale is None and math.isinf(self.get_scale()):
            super().update(before)


class FlatAdapter(WrappingAdapter):
    """Drives a ``FullyShardedDataParallel``, with ``use_orig_params=True`` unless the case wants flat parameters."""

    traits = Traits(
        local_numel=share_of_flat,
        # The end of the flat parameter is padded to a multiple of the number of ranks: at most one element per rank.
        collective_padding=1,
    )
    #: What :meth:`grad_scaler` makes.
    scaler: ClassVar[type[torch.amp.GradScaler]] = ShardedGradScaler
    # Not ``no_sync``, which surrounds every microbatch but the last, whatever the case chooses.
    option_names: ClassVar[dict[str, str]] = {
        "reshard_after_forward": "sharding_strategy",
        "precision.param_dtype": "param_dtype",
        "precision.reduce_dtype": "reduce_dtype",
        "ignored_params": "ignored_states",
        "clip.max_norm": "max_norm",
        "clip.norm_type": "norm_type",
    }

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        return None

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        # What the interface of ``FullyShardedDataParallel`` offers in every implementation.
        return (
            COMMON_AND_CLIPPING
            | ORDERED
            | Capability.of(
                "sharded reshard-after-forward hybrid no-shard unused-output recomputation cast-after-init "
                "precision.param_dtype precision.reduce_dtype precision.buffer_dtype precision.full_precision_in_eval "
                "precision.keep_low_precision_grads model-precision ignored_params ignored_modules auto_wrap_policy "
                "meta-device as_groups deferred-reduction accumulation.reshard_after_backward clip-empty-shards "
                "counted-units own-optimizer loss-scaling offload distributed-checkpoint full-state-dict "
                "summon-full-params full-params-on-cpu flat_parameters fsdp1-api sync_module_states order-validation "
                "tensor-parallel inputs-to-device autograd-calls ranks-differ reduction-hook backward-prefetch "
                "optimizer-keys step-in-backward unreduced-gradients default_mesh"
            )
        )

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        assert not config.gradient_divide_factors, "FullyShardedDataParallel divides by the number of ranks"
        self._check(config)
        assert not (config.shard_dim or config.unit_meshes or config.parameter_meshes), (
            "FullyShardedDataParallel has no such option"
        )
        names = names_of(config.units)
        itemsize = max((parameter.element_size() for parameter in model.parameters()), default=1)
        # Of the dtype in which the unit computes, to which its shard is cast before it is gathered.
        computed = {name: config.precision_of(name).param_dtype for name in [*names, ""]}
        sizes = {name: itemsize if dtype is None else dtype.itemsize for name, dtype in computed.items()}
        alignments = {} if config.flat_parameters else {name: _ALIGNMENT_BYTES // size for name, size in sizes.items()}
        self._units = flat_units(model, [*names, ""], alignments=alignments, ignored=config.ignored_params)
        options = self._options() | ({} if config.ignored_inside else self._ignored(model, "", config.ignored_params))
        if config.auto_wrap_policy is not None:
            options["auto_wrap_policy"] = self._policy(config.auto_wrap_policy)
            if config.auto_wrap_policy.rule == "by-hand":
                self._wrap_by_hand(model, config.auto_wrap_policy, options)
        self.module = self._shard(model, names if config.auto_wrap_policy is None else [], options)
        if config.cast is not None:
            self.module.to(config.cast)
        # The optimizer's references: modules register views of gathered parameters in their place while they compute.
        self._held = self.named_parameters()
        self._held_flat = [(unit, _flat_parameter(self.module, unit)) for unit in self._units if config.flat_parameters]
        self.optimizer = optimizer(self.module.parameters()) if optimizer else None

    def _shard(self, model: nn.Module, names: list[str], options: dict[str, Any]) -> nn.Module:
        """Wrap the modules of these names, and then the model."""
        config = self.config
        for name in names:
            parent, _, child = name.rpartition(".")
            inside = [one for one in config.ignored_params if config.ignored_inside and one.startswith(f"{name}.")]
            its = options | self._ignored(model, name, inside)
            if config.sync_module_states == "root":
                its["sync_module_states"] = False
            setattr(model.get_submodule(parent), child, self._wrap(model.get_submodule(name), name, its))
        return model if config.plain_root else self._wrap(model, "", options)

    def _options(self) -> dict[str, Any]:
        config = self.config
        return {
            **self._ranks(),
            "param_init_fn": config.param_init_fn,
            "sharding_strategy": self._strategy(config.reshard_after_forward),
            "cpu_offload": self.api.CPUOffload(offload_params=True) if config.offload else None,
            "device_id": _device(config.mesh.device_type),
            "use_orig_params": not config.flat_parameters,
            "sync_module_states": bool(config.sync_module_states),
            **self._ahead(),
        }

    def _ignored(self, model: nn.Module, unit: str, names: Sequence[str]) -> dict[str, Any]:
        """The options for parameters that are ignored, as modules where the case names those.

        Beside the modules only what they do not have comes by itself: no implementation takes both.
        """
        modules = [one for one in self.config.ignored_modules if f"{one}.".startswith(f"{unit}." if unit else "")]
        others = [name for name in names if not name.startswith(tuple(f"{one}." for one in modules))]
        found: dict[str, Any] = {}
        if modules and names:
            found["ignored_modules"] = [model.get_submodule(name) for name in modules]
        if others:
            found["ignored_states"] = [model.get_parameter(name) for name in others]
        return found

    def _ahead(self) -> dict[str, Any]:
        """The options about gathering ahead of which the case has chosen one."""
        config, prefetch = self.config, self.api.BackwardPrefetch
        chosen: dict[str, Any] = {}
        if config.backward_prefetch is not None:
            chosen["backward_prefetch"] = getattr(prefetch, config.backward_prefetch, None)
        if config.forward_prefetch is not None:
            chosen["forward_prefetch"] = config.forward_prefetch
        if config.limit_all_gathers is not None:
            chosen["limit_all_gathers"] = config.limit_all_gathers
        return chosen

    def _ranks(self) -> dict[str, Any]:
        if self.config.default_mesh:
            return {}
        return (
            {"process_group": _groups(self.config.mesh)} if self.config.as_groups else {"device_mesh": self.config.mesh}
        )

    def _policy(self, policy: WrapPolicy) -> Any:
        """Return the policy in the form in which the implementation takes it."""
        made = self.api.wrap
        match policy.rule:
            case "size":
                by_size = functools.partial(made.size_based_auto_wrap_policy, min_num_params=policy.min_num_params)
                if policy.force_leaf_modules is not None:
                    by_size = functools.partial(by_size, force_leaf_modules=set(policy.force_leaf_modules))
                if policy.exclude_wrap_modules is not None:
                    by_size = functools.partial(by_size, exclude_wrap_modules=set(policy.exclude_wrap_modules))
                return by_size
            case "classes":
                classes = set(policy.module_classes)
                return functools.partial(made.transformer_auto_wrap_policy, transformer_layer_cls=classes)
            case "function":
                return functools.partial(made.lambda_auto_wrap_policy, lambda_fn=policy.lambda_fn)
            case "objects":
                return made.ModuleWrapPolicy(policy.module_classes)
            case "called-objects":
                called = made.ModuleWrapPolicy(policy.module_classes)
                return lambda module, recurse, nonwrapped_numel: called(module, recurse)
            case "custom":
                return made.CustomPolicy(functools.partial(self._custom, policy))
            case "by-hand":
                return None

    def _wrap_by_hand(self, model: nn.Module, policy: WrapPolicy, options: dict[str, Any]) -> None:
        """Put each module that the rule chooses, inner ones first, into what ``wrap`` makes of it."""
        made, kind = self.api.wrap, self.api.FullyShardedDataParallel
        inner_last = [*model.named_modules()][1:]
        with made.enable_wrap(wrapper_cls=kind, mixed_precision=self._mixed_precision(""), **options):
            for name, module in reversed(inner_last):
                answer = self._custom(policy, module)
                if answer is not False:
                    parent, _, child = name.rpartition(".")
                    wrapped = made.wrap(module, **({} if answer is True else answer))
                    setattr(model.get_submodule(parent), child, wrapped)

    def _custom(self, policy: WrapPolicy, module: nn.Module) -> Any:
        """Return what a policy object expects of a module: whether to wrap it, or the wrapper's arguments."""
        assert policy.lambda_fn is not None
        answer = policy.lambda_fn(module)
        if not isinstance(answer, dict):
            return answer
        return {"sharding_strategy": self._strategy(answer["reshard_after_forward"])}

    def _wrap(self, module: nn.Module, unit: str, options: dict[str, Any]) -> nn.Module:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", str(int(self.config.precision_of(unit).full_precision_in_eval)))
            wrapper: nn.Module = self.api.FullyShardedDataParallel(
                module, mixed_precision=self._mixed_precision(unit), **options
            )
        return wrapper

    def _mixed_precision(self, unit: str) -> Any:
        precision = self.config.precision_of(unit)
        assert precision.output_dtype is None, "FullyShardedDataParallel leaves outputs alone"
        if precision == Precision():
            return None
        # The root's inputs are cast if either is set, and those of other units do not depend on the second.
        wanted = {
            "keep_low_precision_grads": precision.keep_low_precision_grads,
            "cast_forward_inputs": precision.cast_forward_inputs and unit != "",
            "cast_root_forward_inputs": precision.cast_forward_inputs == (unit == ""),
        }
        # What is the documented default is left to the implementation, as scripts leave it.
        chosen = {name: value for name, value in wanted.items() if value != _PRECISION_DEFAULTS[name]}
        return self.api.MixedPrecision(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            buffer_dtype=precision.buffer_dtype,
            **chosen,
        )

    def _strategy(self, reshards: Any) -> Any:
        strategies = self.api.ShardingStrategy
        hybrid = self.config.mesh.ndim > 1
        assert reshards is None or isinstance(reshards, bool), (
            f"there is no strategy that reshards to groups of {reshards}"
        )
        if not self.config.shards:
            assert self.config.mesh.ndim != 2, "shards=False needs a mesh of one dimension, not replicas x shards"
            return strategies.NO_SHARD
        if reshards is False:
            return strategies._HYBRID_SHARD_ZERO2 if hybrid else strategies.SHARD_GRAD_OP
        # None too: freeing after forward is the default of the implementations.
        return strategies.HYBRID_SHARD if hybrid else strategies.FULL_SHARD

    def grad_scaler(self, *, init_scale: float, growth_interval: int, **options: Any) -> torch.amp.GradScaler:
        """Make a scaler that asks all ranks: gradients are plain tensors, of which each rank sees its own part."""
        return make_scaler(self.config, self.scaler, init_scale=init_scale, growth_interval=growth_interval, **options)

    def gradients(self) -> dict[str, Piece | None]:
        """Return the local parts of the gradients, where the optimizer finds them.

        With ``use_orig_params=True`` a rank that holds no element of a parameter has no gradient of it either.
        """
        if self.config.flat_parameters:
            return super().gradients()
        return {
            place.name: None if (grad := self._held[place.name].grad) is None else Piece(grad, place.cut)
            for place in self._places()
        }

    def parameters(self) -> dict[str, Piece]:
        """Return the local parts of the parameters, where the optimizer updates them."""
        if self.config.flat_parameters:
            return super().parameters()
        return {place.name: Piece(self._held[place.name].detach(), place.cut) for place in self._places()}

    def held_parameters(self) -> dict[str, nn.Parameter]:
        return self._held

    def optimizer_state(self) -> dict[str, dict[str, Piece]] | None:
        return super().optimizer_state() if self.config.flat_parameters else Adapter.optimizer_state(self)

    def register_comm_hook(self, hook: Callable[..., None]) -> None:
        self.module.register_comm_hook(hook, _call if callable(hook) else hook)

    def checkpoint(self, *, form: StateForm = "sharded") -> dict[str, Any]:
        wrapper = self.api.FullyShardedDataParallel
        with self._models_are(form):
            state = {"model": self.module.state_dict()}
        with self._state_dicts_are(form):
            if self.optimizer is not None:
                state["optimizer"] = wrapper.optim_state_dict(self.module, self.optimizer)
        return state

    def restore(self, state: dict[str, Any], *, form: StateForm = "sharded", strict: bool = True) -> KeysLeftOver:
        """Load state dicts (collective).

        ``FullyShardedDataParallel`` takes the optimizer's from the first rank itself. The module's is sent here, as
        user code has to.
        """
        wrapper, model = self.api.FullyShardedDataParallel, [state["model"]]
        if form == "first-rank":
            dist.broadcast_object_list(model, src=0, device=_device(self.config.mesh.device_type))
        with self._models_are(form):
            keys = self.module.load_state_dict(model[0], strict=strict)
        with self._state_dicts_are(form):
            if "optimizer" in state:
                optimizer = self._checkpointed_optimizer()
                wrapper.optim_state_dict_to_load(self.module, optimizer, state["optimizer"], load_directly=True)
        return KeysLeftOver(tuple(keys.missing_keys), tuple(keys.unexpected_keys))

    def legacy_optim_state_dict(self, *, form: StateForm) -> dict[str, Any]:
        wrapper, optimizer = self.api.FullyShardedDataParallel, self._checkpointed_optimizer()
        if form == "sharded":
            return wrapper.sharded_optim_state_dict(self.module, optimizer)  # type: ignore[no-any-return]
        first = form == "first-rank"
        return cast(dict[str, Any], wrapper.full_optim_state_dict(self.module, optimizer, rank0_only=first))

    def load_legacy_optim_state_dict(self, state: dict[str, Any], *, form: StateForm) -> None:
        wrapper, optimizer = self.api.FullyShardedDataParallel, self._checkpointed_optimizer()
        if form == "sharded":
            found = wrapper.flatten_sharded_optim_state_dict(state, self.module, optimizer)
        elif form == "full":
            found = wrapper.shard_full_optim_state_dict(state, self.module, optim=optimizer)
        else:
            found = wrapper.scatter_full_optim_state_dict(state or None, self.module, optim=optimizer)
        optimizer.load_state_dict(found)

    def rekey_optim_state_dict(
        self, state: dict[str, Any], *, by: KeyKind, model: nn.Module, optimizer: Any
    ) -> dict[str, Any]:
        wrapper, kinds = self.api.FullyShardedDataParallel, self._key_kinds()
        kind = kinds.PARAM_NAME if by == "name" else kinds.PARAM_ID
        return cast(dict[str, Any], wrapper.rekey_optim_state_dict(state, kind, model, optim=optimizer))

    def _key_kinds(self) -> Any:
        """Return the enumeration of the kinds of keys."""
        return self.api.OptimStateKeyType

    def _models_are(self, form: StateForm) -> contextlib.AbstractContextManager[Any]:
        # A full state dict of a model is what user code gets that chooses nothing.
        return contextlib.nullcontext() if form == "full" else self._state_dicts_are(form)

    def _state_dicts_are(self, form: StateForm) -> contextlib.AbstractContextManager[Any]:
        api = self.api
        context = functools.partial(api.FullyShardedDataParallel.state_dict_type, self.module)
        if form == "sharded":
            return context(api.StateDictType.SHARDED_STATE_DICT)  # type: ignore[no-any-return]
        if form == "local":
            return context(api.StateDictType.LOCAL_STATE_DICT)  # type: ignore[no-any-return]
        first = form == "first-rank"
        # What is on the CPU already need not go there, and torch's would free it: findings/F041.py.
        options = {"offload_to_cpu": first and self.config.mesh.device_type != "cpu", "rank0_only": first}
        configs = api.FullStateDictConfig(**options), api.FullOptimStateDictConfig(**options)
        return context(api.StateDictType.FULL_STATE_DICT, *configs)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def summon_full_params(self, how: FullParams) -> Iterator[dict[str, nn.Parameter]]:
        with self.api.FullyShardedDataParallel.summon_full_params(
            self.module,
            writeback=how.writeback,
            rank0_only=how.rank0_only,
            offload_to_cpu=how.offload_to_cpu,
            with_grads=how.with_grads,
        ):
            # Flat parameters are gone inside: the original ones have their names.
            yield self.named_parameters()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {name.replace(_WRAPPED, ""): value for name, value in super().named_parameters().items()}

    def _places(self) -> Iterator[ParameterPart]:
        index, size = self.config.shard_index, self.config.shard_size
        for unit in self._units:
            if size > 1:
                yield from unit.places(index=index, size=size)
                continue
            # A group of one rank shards nothing, and the original parameters keep their shapes.
            for name, numel, cut in zip(unit.names, unit.numels, unit.cuts, strict=True):
                yield ParameterPart(name, 0, numel, cut)
        for name in self.config.ignored_params:
            yield ParameterPart(name, 0, self._held[name].numel(), uncut)


def _call(state: Callable[..., None], *tensors: torch.Tensor) -> None:
    """The function of a case is the hook's state, so that a hook without its state fails."""
    state(*tensors)


def _flat_parameter(module: nn.Module, unit: FlatLayout) -> nn.Parameter:
    wrapper: Any = module.get_submodule(unit.module)
    (parameter,) = wrapper.module.parameters(recurse=False)
    assert isinstance(parameter, nn.Parameter)
    return parameter


def _device(device_type: str) -> torch.device:
    # Always passed explicitly: without a device_id, FullyShardedDataParallel looks for an accelerator even on the CPU.
    index = None if device_type == "cpu" else torch.accelerator.current_device_index()
    return torch.device(device_type) if index is None else torch.device(device_type, index)


def _groups(mesh: DeviceMesh) -> Any:
    """Return the process group of a mesh; of (replicate, shard) the pair of (sharded over, replicated over)."""
    return mesh.get_group() if mesh.ndim == 1 else (mesh.get_group(1), mesh.get_group(0))


def names_of(units: Units) -> list[str]:
    """Return the module of each unit, nested modules before the modules that contain them: the order of wrapping."""
    for unit in units:
        assert len(unit) == 1, f"a wrapper takes one module, and the unit {unit} has {len(unit)}"
    return [name for (name,) in inner_first(units)]
