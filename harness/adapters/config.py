"""The configuration of a sharded model, in terms that are the same for every implementation."""

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from shardproof import renamed
from shardproof.harness.adapters.capability import OPTIONS, Capability
from shardproof.harness.adapters.traits import Traits
from shardproof.harness.tensors import private
from shardproof.harness.tensors.trees import local_of

Units = tuple[tuple[str, ...], ...]
"""The units of a model: each entry names the modules whose parameters are unsharded by one all-gather."""

EvaluationMode = Literal["no_grad", "inference_mode"]
"""The context in which a forward is evaluated."""

StateForm = Literal["sharded", "flattened", "full", "first-rank", "local"]
"""The contents of a state dict.

- "sharded": each rank has its shards, as ``torch.distributed.checkpoint`` saves and loads them.
- "flattened": as "sharded", and the optimizer's state dict has one level: an entry for each state and option of a
  parameter. Cases read it only with :attr:`Capability.DTENSOR_PARAMETERS`.
- "full": every rank has all tensors in full.
- "first-rank": the first rank of the world has all tensors in full, on the CPU, and the others have empty dicts. The
  others take the values from the first rank when they load.
- "local": each rank has its flat parameters, without the names of the model, so that no parameter can be read from it,
  and no optimizer state. Needs ``"flat_parameters"`` and process groups instead of a mesh.
"""


#: The orders of ranks that process groups can keep, as far as the installed torch has them.
ORDERED = frozenset(
    capability
    for capability, function, option in (
        (Capability.ORDERED_GROUPS, dist.new_group, "sort_ranks"),
        (Capability.ORDERED_MESHES, DeviceMesh.__init__, "preserve_rank_order"),
    )
    if option in inspect.signature(function).parameters
)


class _Renamed:
    """Raises a ValueError with the new name of a field that is read by its old name."""

    if not TYPE_CHECKING:  # mypy would take every name for a field

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            if new := renamed.member(kind, name):
                # No AttributeError, which getattr() with a default would hide.
                raise ValueError(f"{kind}.{name} was renamed: it is {kind}.{new}")
            raise AttributeError(f"{kind} has no {name!r}")


def options_in(value: Any, begins: str = "") -> frozenset[str]:
    """Return the options that a configuration, or a value of one of its fields, needs: those without their default.

    Args:
        value: a dataclass of this module.
        begins: what begins the options of its fields, as "precision."; empty for those of :class:`Config`.
    """
    names = {f"{begins}{field.name}": field for field in dataclasses.fields(value)}
    return frozenset(
        name for name, field in names.items() if name in OPTIONS and getattr(value, field.name) != _default(field)
    )


def default_of(option: str) -> Any:
    """Return the default of an option's field; a KeyError names an unknown one."""
    kinds = {"": Config, "clip": Clip, "accumulation": Accumulation, "precision": Precision, "settings": Settings}
    of, _, name = option.rpartition(".")
    return _default({field.name: field for field in dataclasses.fields(kinds[of])}[name])


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@dataclasses.dataclass(frozen=True)
class Clip(_Renamed):
    """Gradient clipping by the total norm of all gradients, the p-norm of ``norm_type``, positive or ``inf``."""

    max_norm: float
    """The norm above which gradients are scaled down; positive."""

    norm_type: float = 2.0
    """The p of the p-norm: 1, 2, ``inf``. Declared by name."""

    error_if_nonfinite: bool = False
    """Whether a norm that is infinite or NaN raises a RuntimeError on every rank, and scales nothing.

    Declared by name.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accumulation(_Renamed):
    """The work that every backward but the last of a step defers to the last one.

    Needs :attr:`Capability.DEFERRED_REDUCTION`. A value other than a field's default needs the option of its name.
    """

    units: Literal["all", "root-only"] | tuple[str, ...] = "all"
    """The units whose reduction is deferred: all, the root's own unit only, or the units of the named modules.

    Declared by name.
    """

    skips: Literal["reduction", "all-reduce"] = "reduction"
    """The deferred work: the entire reduction, or only the all-reduce over the replicas of a (replicate, shard) mesh.

    Declared by name.
    """

    ends_by_gradient_sync: bool = False
    """Whether ``set_requires_gradient_sync``, and not the call for the all-reduce, ends the deferral of the all-reduce.

    Needs ``"accumulation.skips"``.
    """

    reshard_after_backward: bool = True
    """Whether these backwards reshard parameters; False leaves them unsharded for the next microbatch.

    Declared by name.
    """

    set_is_last_backward: bool = False
    """Whether a call marks the last backward, for schedules that run several forwards before their backwards.

    Declared by name.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision(_Renamed):
    """The dtypes of a unit where they differ from those of its parameters.

    A value other than a field's default needs the option of its name, as "precision.param_dtype". If all units have the
    same dtypes and no inputs are cast, :attr:`Capability.MODEL_PRECISION` is enough.
    """

    param_dtype: torch.dtype | None = None
    """The dtype of unsharded parameters, in the all-gather and in compute; None is the dtype of the parameters.

    Declared by name.
    """

    reduce_dtype: torch.dtype | None = None
    """The dtype in which gradients are reduced, and accumulated before that; None is the implementation's default.

    :meth:`reduced_in` returns the resulting dtype. Declared by name.
    """

    output_dtype: torch.dtype | None = None
    """The dtype to which floating-point tensors in the unit's output are cast; None casts none.

    Declared by name.
    """

    buffer_dtype: torch.dtype | None = None
    """The dtype of floating-point buffers; None casts none. Declared by name."""

    cast_forward_inputs: bool = True
    """Whether floating-point tensors in the unit's inputs are cast to :attr:`param_dtype`."""

    full_precision_in_eval: bool = False
    """Whether nothing is cast while the module is in evaluation mode.

    Declared by name.
    """

    keep_low_precision_grads: bool = False
    """Whether the optimizer gets gradients in the reduce dtype; otherwise they have the dtype of the parameters.

    Declared by name.
    """

    def needs(self) -> frozenset[str]:
        """Return the options that a unit needs to have these dtypes."""
        return options_in(self, "precision.")

    def reduced_in(self, parameters: torch.dtype, traits: Traits) -> torch.dtype:
        """Return the dtype in which an implementation with these traits reduces the gradients of a unit.

        It may be the dtype of the unit's parameters.
        """
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        return parameters if traits.reduces_in == "parameters" else self.param_dtype or parameters


class OwnCollective(Protocol):
    """A collective of user code, which replaces an all-gather or a reduce-scatter."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor of ``size``, for an input or an output of the collective."""
        ...

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, **options: Any
    ) -> dist.Work | None:
        """Run the collective, with the options of the collective that it replaces: ``async_op``, ``op``."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(_Renamed):
    """Settings of single units that user code changes for the passes that follow; None changes nothing.

    Needs :attr:`Capability.UNIT_SETTINGS`, and the capability named at a field as well.
    """

    reshard_after_forward: bool | None = None
    """Whether the unit reshards after forward."""

    unshard_in_backward: bool | None = None
    """Whether backward unshards the unit; some units do not need parameters to compute their gradients."""

    keep_unsharded_storage: bool | None = None
    """Whether unsharded storages keep their memory. Declared by name."""

    reduce_scatter_unused_params: bool | None = None
    """Whether zeros are reduced for parameters without a gradient; see :attr:`Config.ranks_differ`.

    Needs :attr:`Capability.RANKS_DIFFER`.
    """

    gradient_divide_factor: float | None = None
    """The divisor of the sum of the gradients; see :attr:`Config.gradient_divide_factors`.

    Needs ``"gradient_divide_factors"``.
    """

    reduce_scatter_divide_factor: float | None = None
    """The divisor as set by the deprecated call of this name. Needs ``"gradient_divide_factors"``."""

    force_sum_reduction_for_comms: bool | None = None
    """Whether each reduction is a sum, followed by a separate division."""

    separate_reduce_scatter_group: bool | None = None
    """Whether reduce-scatters have a process group of their own.

    Declared by name.
    """

    reduce_scatter_max_input_buffers: int | None = None
    """The number of reduce-scatter inputs that may be in flight.

    Declared by name.
    """

    allocate_memory_from_process_group_for_comm: bool | None = None
    """Whether buffers come from the allocator of the process group, if it has one."""

    symm_mem_for_comm: str | None = None
    """The backend whose symmetric memory has the buffers. Declared by name."""

    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    """Called after a sum over replicas with the rank's share of the reduced gradients, 1-D, which it may change."""

    custom_all_gather: OwnCollective | None = None
    """Replaces the all-gather."""

    custom_reduce_scatter: OwnCollective | None = None
    """Replaces the reduce-scatter."""


@dataclasses.dataclass(frozen=True)
class WrapPolicy(_Renamed):
    """A rule by which an implementation finds the units inside the root itself, instead of by their names.

    Attributes:
        rule: ``"size"``: children first, each module with at least ``min_num_params`` elements that are in no unit
            inside it. ``"classes"``: modules of ``module_classes``. ``"function"``: modules for which ``lambda_fn``
            returns True. ``"objects"``: as "classes", by a policy object that returns all modules at once.
            ``"called-objects"``: as "objects", but the object is called for each module. ``"custom"``: as "function",
            by a policy object; ``lambda_fn`` may also return a dict with ``reshard_after_forward`` for the module's
            unit. ``"by-hand"``: as "custom", by a call for each module, inner ones first, in a context with the
            options.
        min_num_params: for "size"; the number of elements.
        module_classes: for "classes", "objects" and "called-objects".
        lambda_fn: for "function", "custom" and "by-hand".
        force_leaf_modules: for "size", classes that do not become units, nor any module inside; None is the default.
        exclude_wrap_modules: for "size", classes that do not become units themselves; None is the default.
    """

    rule: Literal["size", "classes", "function", "objects", "called-objects", "custom", "by-hand"]
    min_num_params: int = 0
    module_classes: tuple[type[nn.Module], ...] = ()
    lambda_fn: Callable[[nn.Module], bool | dict[str, object]] | None = None
    force_leaf_modules: tuple[type[nn.Module], ...] | None = None
    exclude_wrap_modules: tuple[type[nn.Module], ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullParams(_Renamed):
    """How user code reads and changes full parameters between two steps: the options of ``summon_full_params``.

    Attributes:
        writeback: whether changes of the full parameters are written to the shards; not together with ``rank0_only``.
        rank0_only: whether only the first rank has full parameters.
        offload_to_cpu: whether full parameters are on the CPU.
        with_grads: whether full parameters have full gradients, whose changes are written back too. Not together with
            ``offload_to_cpu`` or :attr:`Config.flat_parameters`.
    """

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False


@dataclasses.dataclass(frozen=True)
class NamedDimensions:
    """The mesh of all dimensions, on which every parameter is a DTensor, and the names of its data-parallel dimensions.

    Several dimensions in ``shard`` count as one, and so do several in ``replicate``.
    """

    mesh: DeviceMesh
    shard: tuple[str, ...] = ()
    replicate: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_Renamed):
    """The configuration of a sharded model, in terms that are the same for every implementation.

    An adapter raises for a value that its implementation cannot honour; it never approximates. A case that needs an
    undeclared capability is skipped before that.

    A field that is declared by name is an option: an adapter that honours values other than the default has the field's
    name among its capabilities. A field of a field has a dot, as "clip.norm_type"; "settings." begins those of
    :class:`Settings`. ``capability.OPTIONS`` has all options.
    """

    mesh: DeviceMesh
    """The data-parallel mesh: parameters are sharded and gradients averaged over it.

    It has one dimension, or the two dimensions (replicate, shard), which need :attr:`Capability.HYBRID`. It contains
    this rank, but may leave out other ranks of the world, as with tensor parallelism.
    """

    units: Units = ()
    """The units, as tuples of module names; each is unsharded by one all-gather.

    The root's own unit is implicit: it has all parameters that are in no entry. An implementation that chooses its own
    units may ignore this field; its adapter then declares neither :attr:`Capability.COUNTED_UNITS` nor
    :attr:`Capability.GROUPED_UNIT`.
    """

    plain_root: bool = False
    """Whether the model itself is not a unit, so that it contains several roots; :attr:`units` have all parameters.

    Needs :attr:`Capability.ORDER_VALIDATION`.
    """

    shards: bool = True
    """Whether parameters are sharded over the ranks of :attr:`mesh`; False keeps full parameters on each rank.

    False needs :attr:`Capability.NO_SHARD` and a mesh of one dimension.
    """

    reshard_after_forward: bool | int | None = None
    """Whether units reshard after forward; None is the implementation's default.

    True reshards them, False keeps them unsharded until backward; both need :attr:`Capability.RESHARD_AFTER_FORWARD`.
    An int reshards them to groups of that many ranks, which needs :attr:`Capability.RESHARD_TO_SIZE`.
    """

    microbatches: int = 1
    """The number of microbatches in one optimizer step."""

    accumulation: Accumulation | None = None
    """The work that is deferred to the last microbatch; None is the implementation's default."""

    offload: Literal["pageable", "pinned"] | None = None
    """The kind of CPU memory that holds the shards; None keeps them on the device.

    Needs :attr:`Capability.OFFLOAD`, and ``"pageable"`` needs :attr:`Capability.PAGEABLE_OFFLOAD` as well.
    """

    clip: Clip | None = None
    """The clipping of gradients; None does not clip."""

    find_unused_parameters: bool = False
    """Whether some parameters may get no gradient in a step, as in DDP's ``find_unused_parameters``."""

    ranks_differ: bool = False
    """Whether ranks may use different parameters of a unit in one step. Needs :attr:`Capability.RANKS_DIFFER`."""

    cast: torch.dtype | None = None
    """The dtype to which the module is cast after it is sharded and before the optimizer is made.

    Needs :attr:`Capability.CAST_AFTER_INIT`.
    """

    precision: Precision = Precision()
    """The dtypes of every unit that :attr:`unit_precision` does not name."""

    unit_precision: Mapping[str, Precision] = dataclasses.field(default_factory=dict)
    """The dtypes that replace :attr:`precision` for single units, by the name of the unit's first module."""

    ignored_params: tuple[str, ...] = ()
    """The parameters that are neither sharded nor reduced, by name. Declared by name."""

    ignored_modules: tuple[str, ...] = ()
    """Modules that user code passes instead of their parameters, which are all in :attr:`ignored_params`.

    Ignored parameters outside these modules are passed as parameters too; the implementation must raise.

    Declared by name.
    """

    ignored_inside: bool = False
    """Whether only nested units get the option, so that the root must infer which parameters are ignored.

    Needs ``"ignored_modules"``.
    """

    replicated: tuple[str, ...] = ()
    """Modules that torch's ``replicate`` manages, which averages their gradients.

    Their parameters are :attr:`ignored_params`.

    Declared by name.
    """

    gradient_divide_factors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The divisors of the summed gradients of single units, which replace the number of ranks.

    Keys are names of the units' first modules; "" is the root's own unit.

    Declared by name.
    """

    flat_parameters: bool = False
    """Whether the optimizer gets one flat parameter per unit instead of the model's own parameters.

    Declared by name.
    """

    sync_module_states: bool | Literal["root"] = False
    """Whether every rank starts from the parameters and buffers of the first rank of the mesh.

    ``"root"`` sets the option for the root only: the parameters of the root's own unit and all buffers come from the
    first rank, the parameters of the other units do not.

    Declared by name; ``"root"`` needs :attr:`Capability.COUNTED_UNITS` as well.
    """

    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "none"] | None = None
    """When backward issues the all-gather of the next unit: before the current unit's backward, after it, or not ahead.

    None is the implementation's default. Needs :attr:`Capability.BACKWARD_PREFETCH`.
    """

    forward_prefetch: bool | None = None
    """Whether each unit of a forward prefetches the unit that followed it in the first forward; None is the default.

    Needs :attr:`Capability.BACKWARD_PREFETCH`.
    """

    limit_all_gathers: bool | None = None
    """Whether all-gathers wait for compute, so that few units are unsharded at a time; None is the default.

    Needs :attr:`Capability.BACKWARD_PREFETCH`.
    """

    param_init_fn: Callable[[nn.Module], None] | None = None
    """Materializes and initializes the parameters and buffers of one module, without its children.

    For a model on the meta device, which needs :attr:`Capability.META_DEVICE`. None moves meta tensors to
    uninitialised memory and calls the module's ``reset_parameters``.
    """

    materialize: bool = True
    """Whether sharding materializes a model on the meta device; False leaves that to a load.

    Needs :attr:`Capability.META_LOAD`.
    """

    as_groups: bool = False
    """Whether the adapter passes the process groups of :attr:`mesh` instead of the mesh.

    Declared by name.
    """

    default_mesh: bool = False
    """Whether the adapter passes neither mesh nor groups; :attr:`mesh` then has all ranks, as the default mesh does.

    Declared by name.
    """

    shard_dim: Callable[[nn.Parameter], int | Placement | None] | None = None
    """Returns the dimension along which a parameter is sharded, which may be negative; None is the default.

    A placement, for cases about invalid ones, is passed on unchanged. Declared by name.
    """

    unit_meshes: Mapping[str, DeviceMesh] = dataclasses.field(default_factory=dict)
    """The data-parallel meshes of units with a mesh other than :attr:`mesh`, by the name of their first module.

    Declared by name.
    """

    parameter_meshes: Mapping[str, DeviceMesh] = dataclasses.field(default_factory=dict)
    """The data-parallel meshes of the parameters of some modules inside units, by the name of the module.

    Declared by name.
    """

    parameter_dtypes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The dtypes of single parameters in compute, by their names; the other parameters have that of their unit.

    A value that is not a dtype, for cases about invalid ones, is passed on unchanged. Declared by name.
    """

    dp_mesh_dims: NamedDimensions | None = None
    """The full mesh and the names of its data-parallel dimensions, passed instead of :attr:`mesh`.

    :attr:`mesh` is the sub-mesh of these dimensions. Without dimensions to shard over, :attr:`shards` is False.

    Declared by name.
    """

    auto_wrap_policy: WrapPolicy | None = None
    """The rule by which the implementation finds the units itself; :attr:`units` are the units that it should find.

    Declared by name.
    """

    def mesh_of(self, unit: str) -> DeviceMesh:
        """Return the mesh of a unit, by the name of its first module; "" is the root's own unit."""
        return self.unit_meshes.get(unit, self.mesh)

    def own_mesh(self, parameter: str) -> DeviceMesh | None:
        """Return the mesh of a parameter, by its name, if it is among :attr:`parameter_meshes`."""
        found = (mesh for name, mesh in self.parameter_meshes.items() if parameter.startswith(f"{name}."))
        return next(found, None)

    def precision_of(self, unit: str) -> Precision:
        """Return the dtypes of a unit, by the name of its first module; "" is the root's own unit."""
        return self.unit_precision.get(unit, self.precision)

    @property
    def shard_size(self) -> int:
        """The number of ranks over which a unit is sharded."""
        return self.mesh.size(self.mesh.ndim - 1) if self.shards else 1

    @property
    def shard_index(self) -> int:
        """The position of this rank among the ranks over which a unit is sharded."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1) if self.shards else 0

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The global ranks whose gradients are averaged, this rank included, in the order of the mesh."""
        return tuple(self.mesh.mesh.flatten().tolist())


# Scales losses on a device where gradients are on the CPU, which torch's scalers do not (findings/F074.py).


class OffloadedGradScaler(torch.amp.GradScaler):
    """Unscales gradients on the CPU, and reports infinite ones to all ranks through the device's collectives.

    torch's scalers read the inverse of the scale before it has arrived on the CPU. ``GradScaler`` also reports infinite
    gradients by a collective on the CPU, for which a world with only NCCL has no backend. The mesh has all ranks that
    share the parameters, on the device of the losses.
    """

    def __init__(self, mesh: DeviceMesh, **options: Any) -> None:
        super().__init__(mesh.device_type, **options)
        self._groups = mesh.get_all_groups()

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        inverse, infinite = inv_scale.cpu(), found_inf.cpu()
        gradients = defaultdict(list)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local = local_of(parameter.grad)
                    gradients[local.dtype].append(local)
        unscale = private.need("torch._amp_foreach_non_finite_check_and_unscale_")
        for same_dtype in gradients.values():
            unscale(same_dtype, infinite, inverse)
        found_inf.copy_(infinite)
        for one in self._groups:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=one)
        return {found_inf.device: found_inf}


def make_scaler(config: Config, kind: type[torch.amp.GradScaler], **options: Any) -> torch.amp.GradScaler:
    """Make a scaler of ``kind``, or an :class:`OffloadedGradScaler` if only the gradients are on the CPU."""
    if config.offload and config.mesh.device_type != "cpu":
        return OffloadedGradScaler(config.mesh, **options)
    return kind(config.mesh.device_type, **options)
