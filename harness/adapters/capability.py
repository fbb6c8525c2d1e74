"""The features that an adapter can declare and the hardware that a host can have. Imports no torch.

A feature that is one option of the configuration has the name of its field, as "shard_dim" or "clip.norm_type"; the
others are members of :class:`Capability`. Adapters declare both in one set, and cases need both in one mark.
"""

import ast
import difflib
import enum
import inspect
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof import renamed

_OPTIONS = {
    "Meshes and process groups": "as_groups default_mesh dp_mesh_dims parameter_meshes shard_dim unit_meshes",
    "Units, and modules and parameters that they ignore": (
        "auto_wrap_policy flat_parameters ignored_modules ignored_params replicated"
    ),
    "All-gathers": "settings.keep_unsharded_storage",
    "Gradient accumulation": (
        "accumulation.reshard_after_backward accumulation.set_is_last_backward accumulation.skips accumulation.units"
    ),
    "Settings of reductions": (
        "gradient_divide_factors settings.reduce_scatter_max_input_buffers settings.separate_reduce_scatter_group "
        "settings.symm_mem_for_comm"
    ),
    "Dtypes": (
        "parameter_dtypes precision.buffer_dtype precision.full_precision_in_eval precision.keep_low_precision_grads "
        "precision.output_dtype precision.param_dtype precision.reduce_dtype"
    ),
    "Clipping": "clip.error_if_nonfinite clip.norm_type",
    "Parameters as user code finds them": "sync_module_states",
}

OPTIONS = frozenset(" ".join(_OPTIONS.values()).split())
"""The fields of ``Config`` that an adapter declares by their names: it honours values other than the default.

A field of a field has a dot, and "settings." begins the name of a field of ``Settings``.
"""


class _Names(enum.EnumType):
    """Names the nearest capability in the error for an unknown attribute."""

    if not TYPE_CHECKING:  # mypy would take every attribute for a capability

        def __getattr__(cls, name: str) -> Any:
            found = vars(cls).get("_member_map_", {}).get(name)  # Python 3.11 finds members so
            if found is None:
                raise AttributeError(why_not(name, cls) if name.isupper() else name)
            return found


def why_not(name: str, capabilities: Collection[Any] = ()) -> str:
    """Return a line about an unknown capability or option, by its value or as an attribute."""
    value = name.lower().replace("_", "-") if name.isupper() else name
    *others, last = renamed.capability(value)
    if others:
        parts = f"{', '.join(others)} and {last}; declare those that the implementation has"
        return f"the capability {value} was divided into {parts}"
    if last != value:
        new = f"the option {last!r}, by the name of its field" if last in OPTIONS else last
        return f"the capability {value} was renamed: it is {new}"
    near = difflib.get_close_matches(value, [*(capabilities or Capability), *sorted(OPTIONS)], n=2, cutoff=0.6)
    known = f"did you mean {' or '.join(near)}?" if near else "shardproof implementations --capabilities lists them"
    return f"there is no capability {name!r}: {known}"


class Capability(enum.StrEnum, metaclass=_Names):
    """A named feature of an implementation.

    A case that needs a capability which the adapter does not declare is skipped with the verdict ``unsupported``. The
    capabilities are in families, with the options of :data:`OPTIONS`. The comment above a family has its name and a
    recipe, which :func:`families` reads.
    """

    # Sharding and resharding.
    # Every implementation that shards parameters declares ``sharded``; ZeRO-1 and ZeRO-2 declare none of these. Add
    # ``reshard-after-forward`` if user code chooses whether units reshard after forward, and ``root-reshard`` if this
    # includes the root.

    SHARDED = "sharded"
    """At least the parameters are sharded."""
    RESHARD_AFTER_FORWARD = "reshard-after-forward"
    """``reshard_after_forward`` accepts ``True`` (reshard units after forward) and ``False`` (keep them unsharded)."""
    RESHARD_TO_SIZE = "reshard-to-size"
    """``reshard_after_forward`` accepts an int smaller than the shard group and reshards to groups of that size."""
    RESHARD_TO_SIZE_UNEVEN = "reshard-to-size-uneven"
    """``parameters()`` returns the right shards after resharding to a smaller size that does not divide a dimension."""
    RESHARD_A_PART = "reshard-a-part"
    """Resharding to a smaller size also works where several sub-meshes of the world train models of their own."""
    ROOT_RESHARD = "root-reshard"
    """``reshard_after_forward=True`` also reshards the root's own unit after forward."""
    GROUPED_UNIT = "grouped-unit"
    """One unit can consist of several modules."""

    # Meshes and process groups.
    # None for an implementation of one process group. ``hybrid`` for replicas of shards, ``single-rank`` if a shard
    # group may have one rank, ``default_mesh`` if no mesh is needed, ``as_groups`` if groups replace the mesh.

    HYBRID = "hybrid"
    """On a (replicate, shard) mesh, parameters are sharded over the second dimension, gradients averaged over both."""
    NO_SHARD = "no-shard"
    """User code can disable sharding: ranks hold full parameters, whose gradients are averaged."""
    SINGLE_RANK = "single-rank"
    """A shard group may consist of one rank, which then issues no collective except the reduction over replicas."""
    SPMD_TYPES = "spmd-types"
    """With ``dp_mesh_dims``, parameters may also be plain tensors with annotations of the package ``spmd_types``."""
    ORDERED_GROUPS = "ordered-groups"
    """The mesh may consist of process groups that keep an order of ranks other than the sorted one."""
    ORDERED_MESHES = "ordered-meshes"
    """A mesh may create process groups that keep an order of ranks other than the sorted one."""

    # Units, and modules and parameters that they ignore.
    # ``tied-parameters`` for almost every implementation. The others are options of user code: declare the existing
    # ones.

    TIED_PARAMETERS = "tied-parameters"
    """Modules of one unit may share a parameter."""

    # All-gathers.
    # ``counted-units`` if each unit has one all-gather and one reduction, so that cases can count collectives; then
    # ``all-gather-order`` if backward prefetches one unit. The others are options of user code.

    ALL_GATHER_EXTENSION = "all-gather-extension"
    """Shards may have ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, which choose the tensors to all-gather."""
    COUNTED_UNITS = "counted-units"
    """Each unit has one all-gather and one reduction, so the number of collectives follows a formula."""
    ALL_GATHER_ORDER = "all-gather-order"
    """All-gathers follow the contract's order: forward issues that of the running unit, backward that of the next."""
    BACKWARD_PREFETCH = "backward-prefetch"
    """User code chooses whether backward and forward prefetch the next unit, and whether all-gathers are limited."""
    EXPLICIT_PREFETCH = "explicit-prefetch"
    """User code can set the units that a unit prefetches, in forward and in backward."""
    ALL_GATHER_RELEASE = "all-gather-release"
    """A shard with all-gather hooks chooses whether the all-gather output is freed once its parameter has been made."""
    SHARE_COMM_CTX = "share-comm-ctx"
    """``share_comm_ctx`` makes several models, such as pipeline stages, share streams and buffers in flight."""

    # Outputs, hooks and calls.
    # Begin with ``unused-module``, ``container-output``, ``dataclass-output`` and ``multiple-forward``; then
    # ``unused-output`` and ``non-root-forward``, which hooks on outputs often get wrong.

    UNUSED_OUTPUT = "unused-output"
    """Gradients are right when the loss ignores one of the outputs of forward."""
    UNUSED_MODULE = "unused-module"
    """A module that did not run in forward gets no gradient, and the other gradients are right."""
    CONTAINER_OUTPUT = "container-output"
    """Units may return a tuple, list, dict or namedtuple of tensors."""
    DATACLASS_OUTPUT = "dataclass-output"
    """Units may return a dataclass of tensors."""
    POST_ACCUMULATE_GRAD_HOOK = "post-accumulate-grad-hook"
    """Hooks of ``register_post_accumulate_grad_hook`` run after the gradient has been reduced."""
    NON_ROOT_FORWARD = "non-root-forward"
    """A unit below the root can be trained by calling it directly."""
    MULTIPLE_FORWARD = "multiple-forward"
    """A unit may run several times in one forward."""
    FORWARD_METHOD = "forward-method"
    """A method other than ``forward`` can be registered to unshard and reshard its unit as ``forward`` does."""
    INPUTS_TO_DEVICE = "inputs-to-device"
    """The root's forward moves its input tensors to the device."""

    # Recomputation, compiled modules and user calls of autograd.
    # ``recomputation`` as soon as users train with activation checkpointing. Declare the others once the rest passes:
    # each is a promise about user code that few implementations make.

    RECOMPUTATION = "recomputation"
    """Units work under activation checkpointing, by a wrapper, by hooks or around the call."""
    RECOMPUTES_GATHERED = "recomputes-gathered"
    """A unit that is recomputed in backward has one all-gather, for the recomputation and the backward together."""
    COMPILED_MODULES = "compiled-modules"
    """The modules of a unit may be compiled with ``torch.compile`` before they are sharded."""
    RANKS_DIFFER = "ranks-differ"
    """Ranks may use different parameters of a unit in one step."""
    AUTOGRAD_CALLS = "autograd-calls"
    """User code may call ``backward`` and ``torch.autograd.grad`` itself, several times for one forward."""
    RECOVERY = "recovery"
    """After an exception in forward or backward on all ranks, and a recovery call if needed, the next step is right."""
    HOST_RUNS_AHEAD = "host-runs-ahead"
    """The host enqueues complete steps without waiting for the device, also while collectives are in flight."""

    # Gradient accumulation.
    # ``deferred-reduction`` for a ``no_sync()`` that defers reductions to the last microbatch. Without it every
    # backward reduces, and cases without a need still check that microbatches add up.

    DEFERRED_REDUCTION = "deferred-reduction"
    """The reduction of gradients can be deferred to the backward of the last microbatch."""
    UNREDUCED_GRADIENTS = "unreduced-gradients"
    """While reductions are deferred, modules register full parameters with this rank's unreduced gradients."""

    # Settings of reductions.
    # None unless user code can change how gradients are reduced.

    REDUCTION_HOOK = "reduction-hook"
    """A function of user code can replace the reduction of all units."""
    UNIT_SETTINGS = "unit-settings"
    """Between steps user code can change settings of single units: when they reshard, and their collectives."""
    MANUAL_BACKWARD_FINALIZATION = "manual-backward-finalization"
    """User code can choose to end backwards by ``finalize_backward`` of the root; cases call it themselves."""

    # Dtypes.
    # ``cast-after-init`` if ``module.to(dtype)`` works after sharding, ``model-precision`` if all units compute in one
    # lower dtype. ``precision.param_dtype``, ``precision.reduce_dtype`` and ``precision.buffer_dtype``, each by itself,
    # if user code chooses that dtype for each unit. The others are further options of mixed precision.

    CAST_AFTER_INIT = "cast-after-init"
    """The sharded module can be cast to another dtype before the first forward."""
    ACCUMULATION_DTYPES = "accumulation-dtypes"
    """Reduced gradients accumulate over microbatches in the parameters' dtype, deferred ones in the reduce dtype."""
    GRADIENT_DTYPE = "gradient-dtype"
    """A parameter keeps its ``grad_dtype``; its gradient accumulates in that dtype and has it."""
    MODEL_PRECISION = "model-precision"
    """All units can compute in one lower dtype, on uncast inputs; the optimizer updates float32 copies."""

    # Clipping.
    # ``clipping`` for the 2-norm; also ``clip-by-call`` if a call clips and not the step; ``clip.norm_type`` and
    # ``clip-empty-shards`` if the call takes other norms.

    CLIPPING = "clipping"
    """Gradients can be clipped by the 2-norm of all gradients together, with a call or inside the step."""
    CLIP_BY_CALL = "clip-by-call"
    """A call between backward and step can clip gradients by their 2-norm."""
    CLIP_SOME = "clip-some"
    """A call can clip the gradients of some parameters, or of one, by their own norm."""
    CLIP_EMPTY_SHARDS = "clip-empty-shards"
    """Clipping works for any norm when a rank's shard of some parameter is empty."""

    # The optimizer.
    # ``adam`` and ``own-optimizer`` where user code creates any torch optimizer on the shards and steps it; an engine
    # that steps declares only ``adam``.

    ADAM = "adam"
    """Optimizers may keep more state than momentum, as Adam does."""
    OWN_OPTIMIZER = "own-optimizer"
    """User code creates and steps the optimizer, and may change its groups, the parameters and their gradients."""
    STEP_IN_BACKWARD = "step-in-backward"
    """Optimizers that ``torch.distributed.optim`` attaches to parameters step in backward, once a gradient is reduced.

    A unit of one flat parameter refuses them.
    """
    LOSS_SCALING = "loss-scaling"
    """The loss can be scaled: if one rank has an infinite gradient, every rank skips the step and lowers the scale."""
    POST_OPTIM_EVENT = "post-optim-event"
    """The next step's all-gathers can wait for a given event instead of the optimizer's stream."""

    # Parameters as user code finds them.
    # ``dtensor-parameters`` for DTensors, and nothing for flat shards. ``offload`` with ``pageable-offload`` if shards
    # may be on the CPU, which needs no accelerator.

    DTENSOR_PARAMETERS = "dtensor-parameters"
    """Sharded parameters, their gradients and their optimizer state are DTensors."""
    REGISTERED_STATE = "registered-state"
    """``module.parameters()`` returns sharded parameters of sharded units and full ones of unsharded units."""
    MANUAL_RESHARD = "manual-reshard"
    """User code can call ``unshard()`` and ``reshard()`` on a unit."""
    ASYNC_UNSHARD = "async-unshard"
    """A call starts to unshard parameters in advance and returns at once, also before the first forward."""
    SUMMON_FULL_PARAMS = "summon-full-params"
    """A context unshards all parameters, which user code can read and change, with gradients too."""
    FULL_PARAMS_ON_CPU = "full-params-on-cpu"
    """The context of full parameters can put them on the CPU, also where the model computes there."""
    META_DEVICE = "meta-device"
    """A model may be on the meta device; it gets its values when it is sharded, or afterwards."""
    OFFLOAD = "offload"
    """Shards, their gradients and the optimizer state can be on the CPU."""
    PAGEABLE_OFFLOAD = "pageable-offload"
    """Offloaded shards can be in pageable memory, which needs no accelerator."""
    OFFLOAD_CHOICE = "offload-choice"
    """User code chooses whether offloaded shards are in pinned memory; impossible pinning raises an error."""

    # Checkpoints.
    # ``distributed-checkpoint`` if torch's state dicts work, ``own-checkpoint`` for the implementation's own calls.

    DISTRIBUTED_CHECKPOINT = "distributed-checkpoint"
    """``torch.distributed.checkpoint`` can save and load model and optimizer through their state dicts."""
    TENSOR_PARALLEL_CHECKPOINT = "tensor-parallel-checkpoint"
    """Checkpoints also work for DTensors of a tensor-parallel mesh, including sizes that the mesh does not divide."""
    FULL_STATE_DICT = "full-state-dict"
    """State dicts can also have full tensors, on every rank or only on the first, which sends them in a load."""
    OPTIMIZER_KEYS = "optimizer-keys"
    """The optimizer's state dict can have parameter numbers instead of names; older calls save and load it too."""
    OWN_CHECKPOINT = "own-checkpoint"
    """The implementation's own calls save and load model and optimizer; the result can be converted to full weights."""
    STATE_HELPERS = "state-helpers"
    """``torch.distributed.checkpoint.state_dict`` takes the module and its optimizers, with all options."""
    META_LOAD = "meta-load"
    """Ranks with a model on the meta device can load parameters and buffers from the first rank's state dict."""

    # Tensor parallelism, and the implementation as a whole.
    # ``tensor-parallel`` if parameters may be DTensors before sharding. ``any-combination`` last: a search then draws
    # cases from all declared capabilities.

    TENSOR_PARALLEL = "tensor-parallel"
    """Parameters may be DTensors of a tensor-parallel mesh; they are sharded over the data-parallel mesh as well."""
    TENSOR_PARALLEL_COUNTS = "tensor-parallel-counts"
    """The collectives of tensor parallelism are unchanged, and a data-parallel mesh of one rank adds none."""
    ANY_COMBINATION = "any-combination"
    """The declared capabilities work in any combination, so that cases may draw models, policies and schedules."""
    ORDER_VALIDATION = "order-validation"
    """With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` the implementation compares the order in which units run in forward.

    In the first iteration it compares ranks with each other. Later it compares each rank with its own first iteration.
    """
    FSDP1_API = "fsdp1-api"
    """The adapter's ``api`` is a module with ``FullyShardedDataParallel`` and the classes of its arguments.

    Names and arguments are those of ``torch.distributed.fsdp``. Cases call them themselves.
    """
    FSDP2_API = "fsdp2-api"
    """The adapter's ``fully_shard`` has the arguments of torch's; cases call it themselves."""
    ZERO_API = "zero-api"
    """The adapter's ``zero_optimizer`` has the arguments of ``ZeroRedundancyOptimizer``; cases call it themselves."""

    @classmethod
    def _missing_(cls, value: object) -> "Capability":
        raise ValueError(why_not(str(value)))

    @classmethod
    def of(cls, names: str) -> frozenset[str]:
        """Return the capabilities and options of these names, separated by spaces; ValueError names an unknown one."""
        return frozenset(one if one in OPTIONS else cls(one) for one in names.split())


EVERY: frozenset[str] = OPTIONS | frozenset(Capability)
"""All capabilities and options, which is what an adapter can declare and a case can need."""


COMMON = Capability.of("unused-module container-output dataclass-output multiple-forward tied-parameters adam")
"""The capabilities of almost every implementation."""

COMMON_AND_CLIPPING = COMMON | Capability.of("clipping clip-by-call clip.norm_type")
""":data:`COMMON`, with a call that clips gradients by any norm."""


PREREQUISITES = {
    name: Capability.of(others)
    for name, others in {
        # Seen in what modules register alone.
        "manual-reshard": "registered-state",
        "reshard-to-size-uneven": "reshard-to-size registered-state manual-reshard",
        "root-reshard": "reshard-after-forward registered-state",
        # Seen in which collectives there are alone.
        "accumulation.skips": "hybrid single-rank deferred-reduction counted-units",
        "accumulation.units": "deferred-reduction reshard-after-forward root-reshard counted-units",
        "deferred-reduction": "counted-units",
        "all-gather-order": "counted-units",
        "backward-prefetch": "reshard-after-forward counted-units",
        "accumulation.reshard_after_backward": "deferred-reduction reshard-after-forward counted-units",
        "accumulation.set_is_last_backward": (
            "accumulation.units reshard-after-forward root-reshard counted-units all-gather-order"
        ),
        "recomputes-gathered": "recomputation counted-units",
        "reshard-a-part": "root-reshard tensor-parallel counted-units",
        "reshard-to-size": "root-reshard counted-units",
        "auto_wrap_policy": "counted-units",
        # A part or a variant of another.
        "accumulation-dtypes": "precision.reduce_dtype deferred-reduction",
        "clip.norm_type": "clipping",
        "clip-empty-shards": "clipping",
        "clip.error_if_nonfinite": "clipping clip-by-call sharded",
        "clip-some": "clipping",
        "precision.full_precision_in_eval": "precision.param_dtype",
        "full-state-dict": "distributed-checkpoint",
        "all-gather-release": "all-gather-extension",
        "precision.keep_low_precision_grads": "precision.reduce_dtype",
        "offload-choice": "offload",
        "optimizer-keys": "distributed-checkpoint",
        "precision.output_dtype": "precision.param_dtype precision.reduce_dtype",
        "pageable-offload": "offload",
        "parameter_dtypes": "precision.param_dtype",
        "spmd-types": "dp_mesh_dims tensor-parallel",
        "tensor-parallel-checkpoint": "distributed-checkpoint tensor-parallel",
        "tensor-parallel-counts": "tensor-parallel",
        "full-params-on-cpu": "summon-full-params",
        # Called, or set, by what another stands for.
        "async-unshard": "registered-state",
        "dtensor-parameters": "sharded",
        "host-runs-ahead": "sharded",
        "settings.keep_unsharded_storage": "unit-settings reshard-after-forward sharded",
        "loss-scaling": "own-optimizer",
        "manual-backward-finalization": "autograd-calls own-optimizer",
        "dp_mesh_dims": "sharded tensor-parallel",
        "settings.separate_reduce_scatter_group": "unit-settings",
        "parameter_meshes": "tensor-parallel",
        "replicated": "ignored_params",
        "share-comm-ctx": "autograd-calls own-optimizer",
        "settings.symm_mem_for_comm": "unit-settings",
        "unit_meshes": "order-validation",
        "unit-settings": "reshard-after-forward",
        "unreduced-gradients": "deferred-reduction",
    }.items()
}
"""By capability or option, those without which no case can check it; one without a row needs only :data:`COMMON`."""


def families() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Read the families from the source of :class:`Capability`, in its order: name, recipe, descriptions.

    The description of an option is the first sentence of its field's.
    """
    fields = _fields()
    text = inspect.getsource(Capability).replace("``", "`")
    for comment, body in re.findall(r"\n((?:    # [^\n]*\n)+)(.*?)(?=\n    #|\Z)", text, re.S):
        name, _, recipe = re.sub(r"\n? +# ", " ", comment).strip().partition(". ")
        members = re.findall(r'= "([\w-]+)"\n    """(.*?)"""', body, re.S)
        options = _OPTIONS.get(name, "").split()
        yield (
            name,
            recipe,
            {Capability(one): " ".join(said.split()) for one, said in members}
            | {option: fields[option] for option in options},
        )


def _fields() -> dict[str, str]:
    """Read the first sentences of what ``config.py`` says of its fields, by the fields' names."""
    tree = ast.parse(Path(__file__).with_name("config.py").read_text(encoding="utf-8"))
    of_class = {"Config": "", "Clip": "clip.", "Accumulation": "accumulation.", "Precision": "precision."}
    found = {}
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        begins = (of_class | {"Settings": "settings."}).get(kind.name)
        for field, text in zip(kind.body, kind.body[1:], strict=False):
            said = text.value.value if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) else None
            if begins is not None and isinstance(field, ast.AnnAssign) and isinstance(said, str):
                sentence = re.split(r"(?<=\.)\s", " ".join(said.replace("``", "`").split()))[0]
                found[f"{begins}{ast.unparse(field.target)}"] = re.sub(r":attr:`(?:\w+\.)*(\w+)`", r"`\1`", sentence)
    return found


class Hardware(enum.StrEnum):
    """A feature of a host. A case that needs a feature that the host lacks is skipped with the verdict ``unmet``."""

    ACCELERATOR = "accelerator"
    """A device other than the CPU."""

    STREAMS = "streams"
    """Real device streams, which a case can occupy: a delay in one stream does not stop the others."""

    LATE_COPIES = "late-copies"
    """Streams that a case can occupy, though collectives may block the host: copies and computation can be late."""
