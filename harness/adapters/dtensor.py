"""The base class of adapters whose implementation keeps each parameter as a DTensor."""

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Shard

from shardproof.harness.adapters.base import ByParameter, KeysLeftOver, OptimizerFactory, inner_first
from shardproof.harness.adapters.capability import EVERY, Capability
from shardproof.harness.adapters.config import (
    ORDERED,
    Accumulation,
    Config,
    Precision,
    Settings,
    StateForm,
    make_scaler,
)
from shardproof.harness.tensors import private
from shardproof.harness.tensors.pieces import Cut, Piece, chunk_of, cut_before_sharding, original_name, uncut
from shardproof.harness.tensors.pieces import piece_of as piece_of
from shardproof.harness.tensors.trees import local_of

#: The fields of ``Settings`` whose setters take ``recurse``.
_RECURSIVE = frozenset(
    {
        *("reshard_after_forward", "keep_unsharded_storage", "reduce_scatter_unused_params"),
        *("separate_reduce_scatter_group", "reduce_scatter_max_input_buffers"),
    }
)


def cut_of_share(full: torch.Tensor, *, cut: Cut, mesh: DeviceMesh, dim: int = 0) -> torch.Tensor:
    """Cut a full tensor to this rank's share under per-parameter sharding.

    The share is the rank's chunk, by ``torch.chunk`` along one dimension, of what tensor parallelism has left, to which
    ``cut`` cuts. Chunks are divided over the last dimension of the data-parallel mesh. This follows from the
    documentation of ``fully_shard`` and not from the placements of any tensor, so that a parameter that is replicated
    by mistake does not count as sharded.
    """
    return chunk_of(cut(full), mesh, mesh.ndim - 1, dim)


def mesh_of(config: Config, unit: str = "") -> DeviceMesh:
    """Return the mesh to shard a unit over, made of its process groups if the case wants that."""
    mesh = config.mesh_of(unit)
    if not config.as_groups:
        return mesh
    if mesh.ndim == 1:
        return DeviceMesh.from_group(mesh.get_group(), mesh.device_type)
    groups = mesh.get_all_groups()
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def materialize(model: nn.Module, config: Config, *, device: str) -> None:
    """Make what is on the meta device real, module by module, as user code does once the model is sharded."""
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        if config.param_init_fn is not None:
            config.param_init_fn(module)
        else:
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()  # type: ignore[operator]


class DTensorAdapter(ByParameter):
    """Drives a ``fully_shard`` function with the signature of that of ``torch.distributed.fsdp``.

    Attributes:
        offload_policy: the class of its policy that keeps shards on the CPU; takes ``pin_memory``.
        precision_policy: the class of its ``mp_policy``.
        register: its ``register_fsdp_forward_method``, as a staticmethod.
    """

    option_names: ClassVar[dict[str, str]] = {
        "reshard_after_forward": "reshard_after_forward",
        "precision.param_dtype": "param_dtype",
        "precision.reduce_dtype": "reduce_dtype",
        "ignored_params": "ignored_params",
        "shard_dim": "shard_placement_fn",
        "gradient_divide_factors": "set_gradient_divide_factor",
        "accumulation": "set_requires_gradient_sync",
        "clip.max_norm": "max_norm",
        "clip.norm_type": "norm_type",
        "clip.error_if_nonfinite": "error_if_nonfinite",
    }
    offload_policy: ClassVar[Callable[..., Any]]
    precision_policy: ClassVar[Callable[..., Any]]
    register: ClassVar[Callable[..., None]]

    @staticmethod
    def mesh_class(name: str) -> Any:
        """Return ``ShardPlacementResult`` or a class of its meshes, which torch documents and does not export."""
        return private.need(f"torch.distributed.fsdp._fully_shard._fsdp_common.{name}")

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        return None

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        # These implementations have no flat parameters and no policies that find units. Sharding sends no values, user
        # code's functions follow reductions, and what is gathered ahead is set by name.
        # What unshard() gathers is read by registered(); what is written to it is lost: whole parameters are others.
        # Optimizers that step in backward go by hooks of the parameters, which AUTOGRAD-5 is about.
        missing = {
            *Capability.of(
                "flat_parameters fsdp1-api sync_module_states precision.buffer_dtype no-shard reduction-hook "
                "backward-prefetch"
            ),
            *Capability.of(
                "ignored_modules auto_wrap_policy summon-full-params full-params-on-cpu "
                "precision.full_precision_in_eval"
            ),
            *Capability.of(
                "precision.keep_low_precision_grads step-in-backward optimizer-keys own-checkpoint "
                "unreduced-gradients zero-api"
            ),
        }
        if not hasattr(cls, "mesh_dims"):
            missing |= {"dp_mesh_dims", Capability.SPMD_TYPES}
        if not hasattr(cls, "share_comm_ctx"):
            missing.add(Capability.SHARE_COMM_CTX)
        if importlib.util.find_spec("spmd_types") is None:
            missing.add(Capability.SPMD_TYPES)
        return EVERY - missing - {Capability.ORDERED_GROUPS, Capability.ORDERED_MESHES} | ORDERED

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        other = (config.flat_parameters, config.sync_module_states, config.ignored_modules, config.auto_wrap_policy)
        assert not any(other), "fully_shard has no such option"
        assert config.shards or config.dp_mesh_dims or not self.traits.shards, "fully_shard shards"
        ahead = (config.backward_prefetch, config.forward_prefetch, config.limit_all_gathers)
        assert ahead == (None, None, None), "fully_shard gathers ahead what user code names"
        # Looked up before anything is sharded: sharding changes the class of a module, although not its name.
        cuts = {original_name(name): cut_before_sharding(value) for name, value in model.named_parameters()}
        self._cuts: dict[str, Cut] = {
            name: self._cut_of(name, cut, dim) for (name, cut), dim in zip(cuts.items(), self._dims(model), strict=True)
        }
        self._cuts |= dict.fromkeys(config.ignored_params, uncut)
        model = self.set_up(model)
        if config.materialize:
            self._materialize(model)
        for name, factor in config.gradient_divide_factors.items():
            sharded: Any = model.get_submodule(name)
            sharded.set_gradient_divide_factor(factor)
        if config.ranks_differ:
            root: Any = model
            root.set_reduce_scatter_unused_params(True)
        self.module = model if config.cast is None else model.to(config.cast)
        self._held = self.named_parameters()
        self.optimizer = optimizer(model.parameters()) if optimizer else None

    def set_up(self, model: nn.Module) -> nn.Module:
        """Shard a model and return it. A library that calls :meth:`parallelize` by itself is called here."""
        return self.parallelize(model)

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Call ``fully_shard`` for each unit and for the root, and return what it returns for the root."""
        config = self.config
        dtypes = {model.get_parameter(name): dtype for name, dtype in config.parameter_dtypes.items()}
        options: dict[str, Any] = {"reshard_after_forward": config.reshard_after_forward}
        if config.shard_dim is not None or config.parameter_meshes:
            options["shard_placement_fn"] = functools.partial(self._placement, own=self._own_placements(model))
        for name in config.replicated:
            private.need("torch.distributed._composable.replicate.replicate")(
                model.get_submodule(name), process_group=config.mesh.get_group()
            )
        if config.ignored_params and not config.replicated:
            options["ignored_params"] = {model.get_parameter(name) for name in config.ignored_params}
        if config.offload:
            options["offload_policy"] = type(self).offload_policy(pin_memory=config.offload == "pinned")
        for unit in inner_first(config.units):
            modules = [model.get_submodule(name) for name in unit]
            its = self._its_mesh(unit[0]) | self._mixed_precision(unit[0], dtypes)
            given = modules if len(modules) > 1 else modules[0]
            made = type(self).fully_shard(given, **options, **its)
            assert made is given, f"fully_shard was given a {type(given)} and returned another object, a {type(made)}"
        if config.plain_root:
            return model
        # As in scripts, which go on with what is returned.
        its = self._its_mesh("") | self._mixed_precision("", dtypes)
        model = type(self).fully_shard(model, **options, **its)
        assert isinstance(model, nn.Module), f"fully_shard returned {type(model)}"
        return model

    def _cut_of(self, name: str, cut: Cut, dim: int) -> Cut:
        """Return the cut of a parameter to this rank's share, from its cut before sharding."""
        if not self.config.shards:
            return cut
        mesh = self.config.own_mesh(name) or self.config.mesh_of(self._unit_of(name))
        return functools.partial(cut_of_share, cut=cut, mesh=mesh, dim=dim)

    def _unit_of(self, parameter: str) -> str:
        """Return the first module of the innermost unit of a parameter; "" is the root's own."""
        first = {name: unit[0] for unit in self.config.units for name in unit}
        while parameter and parameter not in first:
            parameter = parameter.rpartition(".")[0]
        return first.get(parameter, "")

    def _dims(self, model: nn.Module) -> list[int]:
        """Return the dimension along which each parameter is to be cut."""
        chosen = self.config.shard_dim
        found = [None if chosen is None else chosen(parameter) for parameter in model.parameters()]
        # A placement is refused once it is passed on.
        dims = [dim if isinstance(dim, int) else 0 for dim in found]
        return [dim % max(value.ndim, 1) for dim, value in zip(dims, model.parameters(), strict=True)]

    def _placement(self, parameter: nn.Parameter, own: Mapping[nn.Parameter, Callable[..., Any]]) -> Any:
        dim = self.config.shard_dim(parameter) if self.config.shard_dim else None
        placement = Shard(dim) if isinstance(dim, int) else dim
        return own[parameter](placement) if parameter in own else placement

    def _own_placements(self, model: nn.Module) -> dict[nn.Parameter, Callable[..., Any]]:
        """Return, for each parameter with a mesh of its own, what makes a placement on it."""
        # torch wants one object for each mesh.
        on = {mesh: self.placing_on(mesh) for mesh in self.config.parameter_meshes.values()}
        named = ((parameter, self.config.own_mesh(original_name(name))) for name, parameter in model.named_parameters())
        return {parameter: on[mesh] for parameter, mesh in named if mesh is not None}

    @classmethod
    def placing_on(cls, mesh: DeviceMesh) -> Callable[..., Any]:
        """Return a function from a placement to what ``shard_placement_fn`` returns for a parameter on this mesh."""
        kind = "FSDPMeshInfo" if mesh.ndim == 1 else "HSDPMeshInfo"
        dims = {"shard_mesh_dim": 0} if mesh.ndim == 1 else {"shard_mesh_dim": 1, "replicate_mesh_dim": 0}
        return functools.partial(cls.mesh_class("ShardPlacementResult"), mesh_info=cls.mesh_class(kind)(mesh, **dims))

    def _its_mesh(self, unit: str) -> dict[str, Any]:
        """Return the options for the mesh of a unit."""
        named = self.config.dp_mesh_dims
        if named is not None:
            # One name comes alone, as most scripts give it.
            kinds = {"shard": named.shard, "replicate": named.replicate}
            chosen = {kind: names[0] if len(names) == 1 else names for kind, names in kinds.items() if names}
            return {"mesh": named.mesh, "dp_mesh_dims": type(self).mesh_dims(**chosen)}
        return {} if self.config.default_mesh else {"mesh": mesh_of(self.config, unit)}

    def _materialize(self, model: nn.Module) -> None:
        materialize(model, self.config, device="cpu" if self.config.offload else self.config.mesh.device_type)

    def _mixed_precision(self, unit: str, dtypes: Mapping[nn.Parameter, Any]) -> dict[str, Any]:
        precision = self.config.precision_of(unit)
        assert precision.buffer_dtype is None, "fully_shard leaves buffers alone"
        assert not (precision.full_precision_in_eval or precision.keep_low_precision_grads), (
            "fully_shard has no such option"
        )
        # Without single parameters as in scripts for a torch whose policy has no such field.
        own = {"param_dtype_override_fn": dtypes.get} if dtypes else {}
        if precision == Precision() and not own:
            return {}
        policy = type(self).precision_policy(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            output_dtype=precision.output_dtype,
            cast_forward_inputs=precision.cast_forward_inputs,
            **own,
        )
        return {"mp_policy": policy}

    def grad_scaler(self, *, init_scale: float, growth_interval: int, **options: Any) -> torch.amp.GradScaler:
        """Make torch's scaler, which asks the other ranks of a DTensor; for several meshes that of FSDP1."""
        # GradScaler asks the ranks of the first gradient's mesh alone: findings/F374.py.
        several = self.config.unit_meshes or self.config.parameter_meshes
        kind = ShardedGradScaler if several else torch.amp.GradScaler
        return make_scaler(self.config, kind, init_scale=init_scale, growth_interval=growth_interval, **options)

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        if self.config.accumulation is not None:
            self._accumulate(self.config.accumulation, is_last=is_last)
        yield

    def _accumulate(self, how: Accumulation, *, is_last: bool) -> None:
        root: Any = self.module
        recurse = how.units != "root-only"
        targets = [root] if isinstance(how.units, str) else [root.get_submodule(name) for name in how.units]
        for target in targets:
            is_whole = how.skips == "reduction" or (is_last and how.ends_by_gradient_sync)
            reduces = target.set_requires_gradient_sync if is_whole else target.set_requires_all_reduce
            reduces(is_last, recurse=recurse)
            if not how.reshard_after_backward:
                target.set_reshard_after_backward(is_last, recurse=recurse)
        if how.set_is_last_backward:
            root.set_is_last_backward(is_last)

    def held_parameters(self) -> dict[str, nn.Parameter]:
        """Return the sharded parameters as they were registered when the optimizer was made.

        They are these objects for as long as the model lives: forward and backward register others in their place.
        """
        return self._held

    def piece(self, name: str, tensor: torch.Tensor) -> Piece:
        # Sharding may have untied a parameter, which then has a second name: the harness says so.
        return Piece(local_of(tensor), self._cuts.get(name, uncut))

    def own_gradients(self, names: Sequence[str]) -> list[torch.Tensor]:
        return [local_of(gradient) for name in names if (gradient := self._held[name].grad) is not None]

    def registered(self) -> dict[str, Piece]:
        return {name: piece_of(parameter.detach()) for name, parameter in self.named_parameters().items()}

    def gathered(self) -> dict[str, bool]:
        """Return for each parameter whether it is registered as a plain tensor, not as a DTensor."""
        return {name: not isinstance(value, DTensor) for name, value in self.named_parameters().items()}

    def reshard(self) -> None:
        """Call ``reshard`` on every sharded module."""
        for module in self._sharded_modules():
            module.reshard()

    def unshard(self, *, waits: bool = False) -> None:
        """Call ``unshard(async_op=True)`` on every sharded module; if that shall wait, the root's own without it."""
        for module in self._sharded_modules():
            begins = not waits or module is not self.module
            handle = module.unshard(async_op=begins)
            assert (handle is not None) == begins, f"unshard(async_op={begins}) returned {handle}"
            # What has been waited for may be waited for again.
            for _ in range(2 if waits and handle is not None else 0):
                handle.wait()

    def restore(self, state: dict[str, Any], *, form: StateForm = "sharded", strict: bool = True) -> KeysLeftOver:
        if form != "sharded":
            # Parameters that are gathered are plain tensors, which torch's function does not load: findings/F042.py.
            self.reshard()
        return super().restore(state, form=form, strict=strict)

    def prefetch(self, *, forward: Mapping[str, Sequence[str]], backward: Mapping[str, Sequence[str]]) -> None:
        for name, ahead in forward.items():
            self._unit(name).set_modules_to_forward_prefetch([self._unit(other) for other in ahead])
        for name, ahead in backward.items():
            self._unit(name).set_modules_to_backward_prefetch([self._unit(other) for other in ahead])

    def register_forward_method(self, submodule: str, method: str) -> None:
        type(self).register(self._unit(submodule), method)

    def after_step(self, event: torch.Event) -> None:
        self._unit("").set_post_optim_event(event)

    def change(self, settings: Settings, *, unit: str = "", recurse: bool = False) -> None:
        """Call the setter of each setting on the unit, or on all units in it."""
        target = self._unit(unit)
        targets = [one for one in target.modules() if hasattr(one, "set_is_last_backward")] if recurse else [target]
        for one in dataclasses.fields(settings):
            value = getattr(settings, one.name)
            if value is None:
                continue
            setter = f"set_{one.name}"
            if one.name in _RECURSIVE:
                # A call without `recurse` is for all units inside too, and trainers make it so.
                getattr(target, setter)(value, **({} if recurse else {"recurse": False}))
            else:
                for each in targets:
                    getattr(each, setter)(value)

    def recover(self) -> None:
        """Call ``reset_iter_state`` on the root."""
        self._unit("").reset_iter_state()

    def _unit(self, name: str) -> Any:
        return self.module.get_submodule(name)

    def _sharded_modules(self) -> list[Any]:
        return [module for module in self.module.modules() if callable(getattr(module, "reshard", None))]
