"""What an adapter can declare, and what a machine can have. Light: imports no torch."""

from __future__ import annotations

import enum


class Capability(enum.StrEnum):
    """A named feature of an implementation; a case that needs one the adapter lacks is ``unsupported``."""

    SHARDED = "sharded"
    """At least the parameters are divided among the ranks."""

    RESHARD_AFTER_FORWARD = "reshard-after-forward"
    """``True`` and ``False`` can be chosen for whether parameters are freed after forward."""

    RESHARD_TO_SIZE = "reshard-to-size"
    """An int smaller than the shard group reshards after forward to groups of that size."""

    RESHARD_TO_SIZE_UNEVEN = "reshard-to-size-uneven"
    """What ``parameters()`` shows after resharding to a smaller size is right where that size does not divide."""

    ROOT_RESHARD = "root-reshard"
    """``True`` frees the root's own unit after forward as well."""

    GROUPED_UNIT = "grouped-unit"
    """Several modules can form one unit."""

    UNUSED_OUTPUT = "unused-output"
    """A forward output that the loss ignores keeps the other gradients right."""

    UNUSED_MODULE = "unused-module"
    """A module that never ran gets no gradient and does not disturb the rest."""

    CONTAINER_OUTPUT = "container-output"
    """Units may return a tuple, list, dict or namedtuple of tensors."""

    DATACLASS_OUTPUT = "dataclass-output"
    """Units may return a dataclass of tensors."""

    POST_ACCUMULATE_GRAD_HOOK = "post-accumulate-grad-hook"
    """Hooks of ``register_post_accumulate_grad_hook`` run once the reduced gradient is there."""

    NON_ROOT_FORWARD = "non-root-forward"
    """A unit below the root can be trained by calling it directly."""

    MULTIPLE_FORWARD = "multiple-forward"
    """A unit may run several times in one forward."""

    CLIP_EMPTY_SHARDS = "clip-empty-shards"
    """Clipping takes any norm where a rank's part of some parameter is empty."""

    CAST_AFTER_INIT = "cast-after-init"
    """The sharded module can be cast to another dtype before the first forward."""

    REGISTERED_STATE = "registered-state"
    """``module.parameters()`` shows which parameters are sharded and which are gathered."""

    MANUAL_RESHARD = "manual-reshard"
    """``unshard()`` and ``reshard()`` can be called on a unit."""

    CLIP_BY_CALL = "clip-by-call"
    """Gradients are clipped by a call between backward and step, for the 2-norm."""

    CLIP_ANY_NORM = "clip-any-norm"
    """Clipping takes any norm: 1, 2, inf."""

    COUNTED_UNITS = "counted-units"
    """Each unit is gathered by one collective and reduced by one, so that counts follow a formula."""

    GATHER_ORDER = "gather-order"
    """Collectives come in the documented order: a unit is gathered when it runs, in backward one ahead."""

    SINGLE_RANK = "single-rank"
    """Parameters may be sharded over one rank, which issues no collective but the reduction over replicas."""

    ADAM = "adam"
    """Works with optimizers that keep more state than momentum."""

    HYBRID = "hybrid"
    """A (replicate, shard) mesh: parameters are sharded over its second dimension, gradients averaged over both."""

    DEFERRED_REDUCTION = "deferred-reduction"
    """Backward can leave the reduction of gradients to that of the last microbatch."""

    DEFERRED_PER_UNIT = "deferred-per-unit"
    """The same for some units only, while the others reduce in every backward."""

    DEFERRED_ALL_REDUCE = "deferred-all-reduce"
    """On a (replicate, shard) mesh backward can reduce within the shard group and leave the rest to the last one."""

    KEEP_AFTER_BACKWARD = "keep-after-backward"
    """Backward can leave parameters gathered for the next microbatch."""

    MARKED_LAST_BACKWARD = "marked-last-backward"
    """Several forwards may precede their backwards, and the last backward be marked as such."""

    ASYNC_UNSHARD = "async-unshard"
    """Parameters can be gathered in advance by a call that returns at once, also before the first forward."""

    EXPLICIT_PREFETCH = "explicit-prefetch"
    """A unit can be told which others to gather ahead, in forward and in backward."""

    RECOMPUTATION = "recomputation"
    """Activation checkpointing of units, by a wrapper, by hooks or around the call."""

    RECOMPUTES_GATHERED = "recomputes-gathered"
    """What backward recomputes is gathered once, for the recomputation and for the backward itself."""

    COMPILED_MODULES = "compiled-modules"
    """Modules of units may be compiled with ``torch.compile`` before they are sharded."""

    TIED_PARAMETERS = "tied-parameters"
    """Modules of one unit may share a parameter."""

    TENSOR_PARALLEL = "tensor-parallel"
    """Parameters may be DTensors of a tensor-parallel mesh, and are sharded over the data-parallel one besides."""

    TENSOR_PARALLEL_COUNTS = "tensor-parallel-counts"
    """Tensor parallelism keeps its collectives, and a data-parallel mesh of one rank adds none."""

    OFFLOAD = "offload"
    """Shards, their gradients and the optimizer can live on the CPU."""

    PAGEABLE_OFFLOAD = "pageable-offload"
    """The same in memory that is not pinned, so that no accelerator is needed."""

    DISTRIBUTED_CHECKPOINT = "distributed-checkpoint"
    """``torch.distributed.checkpoint`` saves and loads model and optimizer through their state dicts."""

    TENSOR_PARALLEL_CHECKPOINT = "tensor-parallel-checkpoint"
    """The same where parameters are DTensors of a tensor-parallel mesh, also of sizes that do not divide."""

    FORWARD_METHOD = "forward-method"
    """A method other than ``forward`` can be registered to gather and free as ``forward`` does."""

    INPUTS_TO_DEVICE = "inputs-to-device"
    """The root's forward moves its input tensors to the device."""

    POST_OPTIM_EVENT = "post-optim-event"
    """The next step's gathers can be told to wait for an event instead of the optimizer's stream."""

    FLAT_PARAMETERS = "flat-parameters"
    """The optimizer can be given one flat parameter a unit instead of the model's own."""

    SYNC_STATES = "sync-states"
    """Parameters and buffers can be taken from the first data-parallel rank when the model is sharded."""

    ORDER_VALIDATION = "order-validation"
    """With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` the order of the units in forward is compared: in the first iteration
    between the ranks, later on each rank with its first iteration."""


class Hardware(enum.StrEnum):
    """What a host may lack; a case that needs it is ``unmet`` there."""

    ACCELERATOR = "accelerator"
    """A device other than the CPU."""

    STREAMS = "streams"
    """Real device streams: delays in one must not stop the others."""
