"""The features that an adapter can declare and the hardware that a host can have. Imports no torch."""

import difflib
import enum
import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardproof import renamed


class _Names(enum.EnumType):
    """Says of an attribute that is no capability which one may be meant."""

    if not TYPE_CHECKING:  # mypy would take every attribute for a capability

        def __getattr__(cls, name: str) -> Any:
            found = vars(cls).get("_member_map_", {}).get(name)  # Python 3.11 finds members so
            if found is None:
                raise AttributeError(_why_not(cls, name) if name.isupper() else name)
            return found


def _why_not(capabilities: enum.EnumType, name: str) -> str:
    """Return a line about what is no capability, by its value or as an attribute."""
    value = name.lower().replace("_", "-") if name.isupper() else name
    *others, last = renamed.capability(value)
    if others:
        parts = f"{', '.join(others)} and {last}; declare those that the implementation has"
        return f"the capability {value} was divided into {parts}"
    if last != value:
        return f"the capability {value} was renamed: it is {last}"
    near = difflib.get_close_matches(value, capabilities, n=2, cutoff=0.6)
    known = f"did you mean {' or '.join(near)}?" if near else "shardproof implementations --capabilities lists them"
    return f"there is no capability {name!r}: {known}"


class Capability(enum.StrEnum, metaclass=_Names):
    """A named feature of an implementation.

    A case that needs a capability which the adapter does not declare is skipped with the verdict ``unsupported``. The
    capabilities are in families: a comment has the name of each and, as :func:`families` reads it, what to declare.
    """

    # Sharding and resharding.
    # Every implementation that shards parameters declares ``sharded``, ZeRO-1 and ZeRO-2 none of these. One whose
    # user chooses what forward frees adds ``reshard-after-forward``, and ``root-reshard`` where that includes the
    # root.

    SHARDED = "sharded"
    """At least the parameters are sharded."""
    RESHARD_AFTER_FORWARD = "reshard-after-forward"
    """``reshard_after_forward`` accepts ``True`` (free gathered parameters after forward) and ``False`` (keep them)."""
    RESHARD_TO_SIZE = "reshard-to-size"
    """``reshard_after_forward`` accepts an int smaller than the shard group and reshards to groups of that size."""
    RESHARD_TO_SIZE_UNEVEN = "reshard-to-size-uneven"
    """After resharding to a smaller size that does not divide a dimension, ``parameters()`` shows the right shards."""
    RESHARD_A_PART = "reshard-a-part"
    """Resharding to a smaller size works too where several parts of the world train models of their own."""
    ROOT_RESHARD = "root-reshard"
    """``reshard_after_forward=True`` also frees the root's own unit after forward."""
    GROUPED_UNIT = "grouped-unit"
    """One unit can consist of several modules."""

    # Meshes and process groups.
    # None for an implementation of one process group. ``hybrid`` for replicas of shards, ``single-rank`` if that
    # group may have one rank, ``default-mesh`` and ``process-groups`` for what it takes in place of a mesh.

    HYBRID = "hybrid"
    """On a (replicate, shard) mesh, parameters are sharded over the second dimension, gradients averaged over both."""
    NO_SHARD = "no-shard"
    """User code can choose that nothing is sharded: ranks hold whole parameters, whose gradients are averaged."""
    SINGLE_RANK = "single-rank"
    """A shard group may consist of one rank, which then issues no collective except the reduction over replicas."""
    SHARD_DIMENSION = "shard-dimension"
    """User code can choose along which dimension a parameter is cut."""
    UNIT_MESHES = "unit-meshes"
    """Units may be sharded over other ranks than the root, as experts are."""
    PARAMETER_MESHES = "parameter-meshes"
    """Parameters of one unit may be sharded over different ranks, as experts next to the router of their layer."""
    DP_MESH_DIMS = "dp-mesh-dims"
    """User code can name the data-parallel dimensions of the one mesh on which all parameters are DTensors."""
    SPMD_TYPES = "spmd-types"
    """Parameters on that mesh may also be plain tensors, if they are annotated with the package ``spmd_types``."""
    ORDERED_GROUPS = "ordered-groups"
    """The mesh may be of process groups that keep an order of ranks other than the sorted one."""
    ORDERED_MESHES = "ordered-meshes"
    """The mesh may be one that makes such process groups."""
    PROCESS_GROUPS = "process-groups"
    """The ranks may be given as process groups instead of a mesh."""
    DEFAULT_MESH = "default-mesh"
    """Without a mesh or process groups, a model is sharded over all ranks."""

    # Units, and what they leave alone.
    # ``tied-parameters`` for almost every implementation. The others are options of user code: declare those that
    # there are.

    AUTO_WRAP_POLICY = "auto-wrap-policy"
    """The implementation can find its units itself, by a rule: by size, by class or by a function of the module."""
    IGNORED_PARAMS = "ignored-params"
    """Some parameters can be left alone: neither sharded nor reduced."""
    IGNORED_MODULES = "ignored-modules"
    """Modules can be left alone, with all parameters in them."""
    REPLICATED_MODULES = "replicated-modules"
    """Modules inside that torch's ``replicate`` manages are left to it, and it refuses sharded ones."""
    FLAT_PARAMETERS = "flat-parameters"
    """The optimizer can get one flat parameter per unit instead of the model's own parameters."""
    TIED_PARAMETERS = "tied-parameters"
    """Modules of one unit may share a parameter."""

    # Gathers.
    # ``counted-units`` if each unit is gathered by one collective and reduced by one, which lets cases count; then
    # ``all-gather-order`` if backward gathers one unit ahead. The others are options of user code.

    ALL_GATHER_EXTENSION = "all-gather-extension"
    """A shard with the methods ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` chooses what is gathered for it."""
    COUNTED_UNITS = "counted-units"
    """Each unit is gathered by one collective and reduced by one, so the number of collectives follows a formula."""
    ALL_GATHER_ORDER = "all-gather-order"
    """Collectives follow the contract's order: forward gathers a unit when it runs, backward gathers one unit ahead."""
    BACKWARD_PREFETCH = "backward-prefetch"
    """User code chooses whether backward and forward gather the next unit ahead, and whether gathers are bounded."""
    EXPLICIT_PREFETCH = "explicit-prefetch"
    """User code can set which other units a unit gathers ahead, in forward and in backward."""
    KEEP_UNSHARDED_STORAGE = "keep-unsharded-storage"
    """User code can let gathered storages keep their memory when a unit reshards, so that their addresses stay."""
    ALL_GATHER_RELEASE = "all-gather-release"
    """A shard with such methods chooses whether what was gathered is freed once its parameter has been made of it."""
    SHARE_COMM_CTX = "share-comm-ctx"
    """``share_comm_ctx`` lets several models, such as stages of a pipeline, share streams and buffers in flight."""

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
    """A method other than ``forward`` can be registered to gather and free parameters as ``forward`` does."""
    INPUTS_TO_DEVICE = "inputs-to-device"
    """The root's forward moves its input tensors to the device."""

    # Recomputation, compiled modules and user calls of autograd.
    # ``recomputation`` as soon as users train with activation checkpointing. The others after the rest passes: each
    # is a promise about user code that few implementations make.

    RECOMPUTATION = "recomputation"
    """Units work under activation checkpointing, whether by a wrapper, by hooks or around the call."""
    RECOMPUTES_GATHERED = "recomputes-gathered"
    """A unit that is recomputed in backward is gathered once, for the recomputation and the backward together."""
    COMPILED_MODULES = "compiled-modules"
    """The modules of a unit may be compiled with ``torch.compile`` before they are sharded."""
    RANKS_DIFFER = "ranks-differ"
    """Ranks may use different parameters of a unit in one step."""
    AUTOGRAD_CALLS = "autograd-calls"
    """User code may call ``backward`` and ``torch.autograd.grad`` itself, several times for one forward."""
    RECOVERY = "recovery"
    """After an exception in forward or backward on all ranks, and a call if one is needed, the next step is right."""
    HOST_RUNS_AHEAD = "host-runs-ahead"
    """The host enqueues whole steps without waiting for the device, also where gathers and reductions are in flight."""

    # Gradient accumulation.
    # ``deferred-reduction`` for a ``no_sync()`` that holds back reductions until the last microbatch. Without it
    # every backward reduces, and cases without a need still check that microbatches add up.

    DEFERRED_REDUCTION = "deferred-reduction"
    """The reduction of gradients can be deferred to the backward of the last microbatch."""
    DEFERRED_PER_UNIT = "deferred-per-unit"
    """The reduction can be deferred for some units only, while the others reduce in every backward."""
    DEFERRED_ALL_REDUCE = "deferred-all-reduce"
    """On a (replicate, shard) mesh, only the all-reduce over the replicas can be deferred to the last backward."""
    UNREDUCED_GRADIENTS = "unreduced-gradients"
    """While reductions are deferred, modules register full parameters, which show this rank's unreduced gradients."""
    RESHARD_AFTER_BACKWARD = "reshard-after-backward"
    """Parameters can stay gathered after backward, for the next microbatch."""
    IS_LAST_BACKWARD = "is-last-backward"
    """Several forwards may run before their backwards, and a call marks the last backward."""

    # Settings of reductions.
    # None unless user code can change how gradients are reduced.

    GRADIENT_DIVIDE_FACTOR = "gradient-divide-factor"
    """User code can set by what the sum of a unit's gradients is divided."""
    SEPARATE_REDUCE_SCATTER_GROUP = "separate-reduce-scatter-group"
    """Reductions can have a process group other than that of the gathers."""
    REDUCE_SCATTER_MAX_INPUT_BUFFERS = "reduce-scatter-max-input-buffers"
    """User code can choose how many inputs of reductions may be in flight."""
    REDUCTION_HOOK = "reduction-hook"
    """A function of the script can take the place of the reduction of all units."""
    UNIT_SETTINGS = "unit-settings"
    """Between steps user code can change single units: when they reshard, and with what they gather and reduce."""
    SYMMETRIC_MEMORY = "symmetric-memory"
    """The buffers of gathers, and of reductions by sums, can live in symmetric memory of NCCL."""
    MANUAL_BACKWARD_FINALIZATION = "manual-backward-finalization"
    """``finalize_backward`` of the root ends backwards, if user code has chosen that; cases call it themselves."""

    # Dtypes.
    # ``cast-after-init`` if ``module.to(dtype)`` works after sharding, ``model-precision`` if the whole model
    # computes in one lower dtype. ``param-dtype``, ``reduce-dtype`` and ``buffer-dtype``, each by itself, for what user
    # code chooses for each unit. The others are further options of that choice, or of a parameter.

    CAST_AFTER_INIT = "cast-after-init"
    """The sharded module can be cast to another dtype before the first forward."""
    PARAM_DTYPE = "param-dtype"
    """Parameters can be gathered, and computed with, in a dtype other than their own, in each unit in another one."""
    REDUCE_DTYPE = "reduce-dtype"
    """Gradients can be reduced in a dtype other than the one they are computed in, in each unit in another one."""
    BUFFER_DTYPE = "buffer-dtype"
    """Buffers can have a dtype other than their own while the model is sharded, and are saved in their own."""
    ACCUMULATION_DTYPES = "accumulation-dtypes"
    """Reduced gradients of several microbatches add up in the parameters' dtype, deferred ones in the reduction's."""
    OUTPUT_DTYPE = "output-dtype"
    """A unit can cast its outputs to a dtype."""
    FULL_PRECISION_IN_EVAL = "full-precision-in-eval"
    """With a compute dtype, forwards in evaluation mode can do without any cast."""
    LOW_PRECISION_GRADIENTS = "low-precision-gradients"
    """The optimizer can get gradients in the dtype in which they are reduced."""
    GRADIENT_DTYPE = "gradient-dtype"
    """A parameter keeps its ``grad_dtype``, in which its gradient adds up and is shown."""
    PARAMETER_DTYPES = "parameter-dtypes"
    """With a compute dtype, single parameters of a unit can keep their own dtype in compute."""
    MODEL_PRECISION = "model-precision"
    """The whole model can compute in one lower dtype, on inputs as they are; the optimizer updates float32 copies."""

    # Clipping.
    # ``clipping`` for the 2-norm, with ``clip-by-call`` where a call clips and without it where the step does;
    # ``clip-any-norm`` and ``clip-empty-shards`` if the call takes other norms.

    CLIPPING = "clipping"
    """Gradients can be clipped by the 2-norm of all gradients together, by a call or inside the step."""
    CLIP_BY_CALL = "clip-by-call"
    """Gradients can be clipped by a call between backward and step, by their 2-norm."""
    CLIP_ANY_NORM = "clip-any-norm"
    """Clipping works for any norm: 1, 2, inf."""
    CLIP_SOME = "clip-some"
    """Some parameters, or one, can be clipped by a call, by their own norm."""
    CLIP_RAISES = "clip-raises"
    """Clipping can raise where the norm is infinite or NaN."""
    CLIP_EMPTY_SHARDS = "clip-empty-shards"
    """Clipping works for any norm when a rank's shard of some parameter is empty."""

    # The optimizer.
    # ``adam`` and ``own-optimizer`` where user code makes any torch optimizer of the shards and steps it; an engine
    # that steps declares ``adam`` alone.

    ADAM = "adam"
    """Optimizers may keep more state than momentum, as Adam does."""
    OWN_OPTIMIZER = "own-optimizer"
    """The script makes the optimizer and steps it, and may change its groups, the parameters and their gradients."""
    STEP_IN_BACKWARD = "step-in-backward"
    """Optimizers that ``torch.distributed.optim`` attaches to parameters step in backward, once a gradient is reduced.

    A unit of one flat parameter refuses them.
    """
    LOSS_SCALING = "loss-scaling"
    """The loss can be scaled: an infinite gradient on one rank makes every rank skip the step and lower the scale."""
    POST_OPTIM_EVENT = "post-optim-event"
    """The next step's gathers can wait for a given event instead of the optimizer's stream."""

    # Parameters as user code finds them.
    # ``dtensor-parameters`` for DTensors, and nothing for flat shards. ``offload`` with ``pageable-offload`` if the CPU
    # may hold the shards, which needs no accelerator.

    DTENSOR_PARAMETERS = "dtensor-parameters"
    """Sharded parameters, their gradients and their state are DTensors, which know the full tensor."""
    REGISTERED_STATE = "registered-state"
    """``module.parameters()`` shows which parameters are sharded and which are gathered."""
    MANUAL_RESHARD = "manual-reshard"
    """Scripts can call ``unshard()`` and ``reshard()`` on a unit."""
    ASYNC_UNSHARD = "async-unshard"
    """A call starts to gather parameters in advance and returns at once, also before the first forward."""
    SUMMON_FULL_PARAMS = "summon-full-params"
    """A context gathers all parameters, which user code can read and change, with gradients too."""
    FULL_PARAMS_ON_CPU = "full-params-on-cpu"
    """It can put them on the CPU, also where the model computes there."""
    META_DEVICE = "meta-device"
    """A model may come on the meta device; its values are made when it is sharded, or once it is."""
    SYNC_MODULE_STATES = "sync-module-states"
    """Sharding can start from the first data-parallel rank's parameters and buffers on every rank."""
    OFFLOAD = "offload"
    """Shards, their gradients and the optimizer can live on the CPU."""
    PAGEABLE_OFFLOAD = "pageable-offload"
    """Offloaded shards can live in memory that is not pinned, which needs no accelerator."""
    OFFLOAD_CHOICE = "offload-choice"
    """User code chooses whether offloaded shards live in pinned memory; pinning raises where it cannot be done."""

    # Checkpoints.
    # ``distributed-checkpoint`` if torch's state dicts work, ``own-checkpoint`` for calls of the implementation.

    DISTRIBUTED_CHECKPOINT = "distributed-checkpoint"
    """``torch.distributed.checkpoint`` can save and load model and optimizer through their state dicts."""
    TENSOR_PARALLEL_CHECKPOINT = "tensor-parallel-checkpoint"
    """Checkpoints also work for DTensors of a tensor-parallel mesh, including sizes that the mesh does not divide."""
    FULL_STATE_DICT = "full-state-dict"
    """State dicts can also hold whole tensors, on every rank, or on the first alone, which then also sends them."""
    OPTIMIZER_KEYS = "optimizer-keys"
    """The optimizer's state dict can have numbers instead of names, and older calls save and load it too."""
    OWN_CHECKPOINT = "own-checkpoint"
    """The implementation's own calls save and load model and optimizer; user code makes full weights of the result."""
    STATE_HELPERS = "state-helpers"
    """``torch.distributed.checkpoint.state_dict`` takes the module and its optimizers, with all options."""
    META_LOAD = "meta-load"
    """Ranks whose model is on the meta device can take parameters and buffers from the first rank's state dict."""

    # Tensor parallelism, and the implementation as a whole.
    # ``tensor-parallel`` if parameters may be DTensors before sharding. ``any-combination`` last: a search then draws
    # cases from all that is declared.

    TENSOR_PARALLEL = "tensor-parallel"
    """Parameters may be DTensors of a tensor-parallel mesh; they are sharded over the data-parallel mesh as well."""
    TENSOR_PARALLEL_COUNTS = "tensor-parallel-counts"
    """The collectives of tensor parallelism are unchanged, and a data-parallel mesh of one rank adds none."""
    ANY_COMBINATION = "any-combination"
    """What is declared works in any combination, so that cases may draw models, policies and schedules from it."""
    ORDER_VALIDATION = "order-validation"
    """With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` the implementation compares the order in which units run in forward.

    It compares the ranks with each other in the first iteration, and each rank with its own first iteration later.
    """
    FSDP1_API = "fsdp1-api"
    """The adapter's ``api`` is a module with ``FullyShardedDataParallel`` and what its arguments are made of.

    Names and arguments are those of ``torch.distributed.fsdp``. Cases call them themselves.
    """
    FSDP2_API = "fsdp2-api"
    """The adapter's ``fully_shard`` has the arguments of torch's; cases call it themselves."""
    ZERO_API = "zero-api"
    """The adapter's ``zero_optimizer`` has the arguments of ``ZeroRedundancyOptimizer``; cases call it themselves."""

    @classmethod
    def _missing_(cls, value: object) -> "Capability":
        raise ValueError(_why_not(cls, str(value)))

    @classmethod
    def of(cls, names: str) -> "frozenset[Capability]":
        """Return the capabilities of these names, separated by spaces; a ``ValueError`` names one that there is not."""
        return frozenset(map(cls, names.split()))


COMMON = Capability.of("unused-module container-output dataclass-output multiple-forward tied-parameters adam")
"""What almost every implementation has."""

COMMON_AND_CLIPPING = COMMON | {Capability.CLIPPING, Capability.CLIP_BY_CALL, Capability.CLIP_ANY_NORM}
"""The same, with a call that clips gradients by any norm."""


PREREQUISITES = {
    Capability(one): Capability.of(others)
    for one, others in {
        # Seen in what modules register alone.
        "manual-reshard": "registered-state",
        "reshard-to-size-uneven": "reshard-to-size registered-state manual-reshard",
        "root-reshard": "reshard-after-forward registered-state",
        # Seen in which collectives there are alone.
        "deferred-all-reduce": "hybrid single-rank deferred-reduction counted-units",
        "deferred-per-unit": "deferred-reduction reshard-after-forward root-reshard counted-units",
        "deferred-reduction": "counted-units",
        "all-gather-order": "counted-units",
        "backward-prefetch": "reshard-after-forward counted-units",
        "reshard-after-backward": "deferred-reduction reshard-after-forward counted-units",
        "is-last-backward": "deferred-per-unit reshard-after-forward root-reshard counted-units all-gather-order",
        "recomputes-gathered": "recomputation counted-units",
        "reshard-a-part": "root-reshard tensor-parallel counted-units",
        "reshard-to-size": "root-reshard counted-units",
        "auto-wrap-policy": "counted-units",
        # A part or a variant of another.
        "accumulation-dtypes": "reduce-dtype deferred-reduction",
        "clip-any-norm": "clipping",
        "clip-empty-shards": "clipping",
        "clip-raises": "clipping clip-by-call sharded",
        "clip-some": "clipping",
        "full-precision-in-eval": "param-dtype",
        "full-state-dict": "distributed-checkpoint",
        "all-gather-release": "all-gather-extension",
        "low-precision-gradients": "reduce-dtype",
        "offload-choice": "offload",
        "optimizer-keys": "distributed-checkpoint",
        "output-dtype": "param-dtype reduce-dtype",
        "pageable-offload": "offload",
        "parameter-dtypes": "param-dtype",
        "spmd-types": "dp-mesh-dims tensor-parallel",
        "tensor-parallel-checkpoint": "distributed-checkpoint tensor-parallel",
        "tensor-parallel-counts": "tensor-parallel",
        "full-params-on-cpu": "summon-full-params",
        # Called, or set, by what another stands for.
        "async-unshard": "registered-state",
        "dtensor-parameters": "sharded",
        "host-runs-ahead": "sharded",
        "keep-unsharded-storage": "unit-settings reshard-after-forward sharded",
        "loss-scaling": "own-optimizer",
        "manual-backward-finalization": "autograd-calls own-optimizer",
        "dp-mesh-dims": "sharded tensor-parallel",
        "separate-reduce-scatter-group": "unit-settings",
        "parameter-meshes": "tensor-parallel",
        "replicated-modules": "ignored-params",
        "share-comm-ctx": "autograd-calls own-optimizer",
        "symmetric-memory": "unit-settings",
        "unit-meshes": "order-validation",
        "unit-settings": "reshard-after-forward",
        "unreduced-gradients": "deferred-reduction",
    }.items()
}
"""By capability, the others without which no case can check it; each other one is checked with :data:`COMMON` alone."""


def families() -> Iterator[tuple[str, str, dict[Capability, str]]]:
    """Read the families from the source of :class:`Capability`, in its order: name, recipe, descriptions."""
    text = inspect.getsource(Capability).replace("``", "`")
    for comment, body in re.findall(r"\n((?:    # [^\n]*\n)+)(.*?)(?=\n    #|\Z)", text, re.S):
        name, _, recipe = re.sub(r"\n? +# ", " ", comment).strip().partition(". ")
        members = re.findall(r'= "([\w-]+)"\n    """(.*?)"""', body, re.S)
        yield name, recipe, {Capability(one): " ".join(said.split()) for one, said in members}


class Hardware(enum.StrEnum):
    """A feature of a host. A case that needs one which the host lacks is skipped with the verdict ``unmet``."""

    ACCELERATOR = "accelerator"
    """A device other than the CPU."""

    STREAMS = "streams"
    """Real device streams, which a case can occupy: a delay in one does not stop the others."""

    LATE_COPIES = "late-copies"
    """Streams that a case can occupy, below collectives that may stop the host: copies and computation can be late."""
