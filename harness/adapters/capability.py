"""The features that an adapter can declare and the hardware that a host can have. Imports no torch."""

from __future__ import annotations

import enum


class Capability(enum.StrEnum):
    """A named feature of an implementation.

    A case that needs a capability which the adapter does not declare is skipped with the verdict ``unsupported``.
    """

    SHARDED = "sharded"
    """At least the parameters are sharded."""

    RESHARD_AFTER_FORWARD = "reshard-after-forward"
    """``reshard_after_forward`` accepts ``True`` (free gathered parameters after forward) and ``False`` (keep them)."""

    RESHARD_TO_SIZE = "reshard-to-size"
    """``reshard_after_forward`` accepts an int smaller than the shard group and reshards to groups of that size."""

    RESHARD_TO_SIZE_UNEVEN = "reshard-to-size-uneven"
    """After resharding to a smaller size that does not divide a dimension, ``parameters()`` shows the right shards."""

    ROOT_RESHARD = "root-reshard"
    """``reshard_after_forward=True`` also frees the root's own unit after forward."""

    GROUPED_UNIT = "grouped-unit"
    """One unit can consist of several modules."""

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

    CLIP_EMPTY_SHARDS = "clip-empty-shards"
    """Clipping works for any norm when a rank's shard of some parameter is empty."""

    CAST_AFTER_INIT = "cast-after-init"
    """The sharded module can be cast to another dtype before the first forward."""

    MIXED_PRECISION = "mixed-precision"
    """Compute and reductions may have dtypes other than the parameters', in each unit its own."""

    ACCUMULATION_DTYPES = "accumulation-dtypes"
    """Reduced gradients of several microbatches add up in the parameters' dtype, deferred ones in the reduction's."""

    OUTPUT_DTYPE = "output-dtype"
    """A unit can cast its outputs to a dtype."""

    BUFFER_DTYPE = "buffer-dtype"
    """Buffers can have a dtype other than their own while the model is sharded, and are saved in their own."""

    FULL_PRECISION_EVALUATION = "full-precision-evaluation"
    """With mixed precision, forwards in evaluation mode can do without any cast."""

    LOW_PRECISION_GRADIENTS = "low-precision-gradients"
    """With mixed precision, gradients can stay in the dtype in which they are reduced."""

    IGNORED_PARAMETERS = "ignored-parameters"
    """Some parameters can be left alone: neither sharded nor reduced."""

    DIVIDE_FACTOR = "divide-factor"
    """A script can set by what the sum of a unit's gradients is divided."""

    DTENSOR_PARAMETERS = "dtensor-parameters"
    """Sharded parameters, their gradients and their state are DTensors, which know the full tensor."""

    REGISTERED_STATE = "registered-state"
    """``module.parameters()`` shows which parameters are sharded and which are gathered."""

    MANUAL_RESHARD = "manual-reshard"
    """Scripts can call ``unshard()`` and ``reshard()`` on a unit."""

    CLIPPING = "clipping"
    """Gradients can be clipped by the 2-norm of all gradients together, by a call or inside the step."""

    CLIP_BY_CALL = "clip-by-call"
    """Gradients can be clipped by a call between backward and step, by their 2-norm."""

    CLIP_ANY_NORM = "clip-any-norm"
    """Clipping works for any norm: 1, 2, inf."""

    COUNTED_UNITS = "counted-units"
    """Each unit is gathered by one collective and reduced by one, so the number of collectives follows a formula."""

    GATHER_ORDER = "gather-order"
    """Collectives follow the contract's order: forward gathers a unit when it runs, backward gathers one unit ahead."""

    SINGLE_RANK = "single-rank"
    """A shard group may consist of one rank, which then issues no collective except the reduction over replicas."""

    ADAM = "adam"
    """Optimizers may keep more state than momentum, as Adam does."""

    OWN_OPTIMIZER = "own-optimizer"
    """The script makes the optimizer and steps it, and may change its groups, the parameters and their gradients."""

    LOSS_SCALING = "loss-scaling"
    """The loss can be scaled: an infinite gradient on one rank makes every rank skip the step and lower the scale."""

    HYBRID = "hybrid"
    """On a (replicate, shard) mesh, parameters are sharded over the second dimension, gradients averaged over both."""

    DEFERRED_REDUCTION = "deferred-reduction"
    """The reduction of gradients can be deferred to the backward of the last microbatch."""

    DEFERRED_PER_UNIT = "deferred-per-unit"
    """The reduction can be deferred for some units only, while the others reduce in every backward."""

    DEFERRED_ALL_REDUCE = "deferred-all-reduce"
    """On a (replicate, shard) mesh, only the all-reduce over the replicas can be deferred to the last backward."""

    KEEP_AFTER_BACKWARD = "keep-after-backward"
    """Parameters can stay gathered after backward, for the next microbatch."""

    MARKED_LAST_BACKWARD = "marked-last-backward"
    """Several forwards may run before their backwards, and a call marks the last backward."""

    ASYNC_UNSHARD = "async-unshard"
    """A call starts to gather parameters in advance and returns at once, also before the first forward."""

    EXPLICIT_PREFETCH = "explicit-prefetch"
    """A script can set which other units a unit gathers ahead, in forward and in backward."""

    RECOMPUTATION = "recomputation"
    """Units work under activation checkpointing, whether by a wrapper, by hooks or around the call."""

    RECOMPUTES_GATHERED = "recomputes-gathered"
    """A unit that is recomputed in backward is gathered once, for the recomputation and the backward together."""

    COMPILED_MODULES = "compiled-modules"
    """The modules of a unit may be compiled with ``torch.compile`` before they are sharded."""

    TIED_PARAMETERS = "tied-parameters"
    """Modules of one unit may share a parameter."""

    TENSOR_PARALLEL = "tensor-parallel"
    """Parameters may be DTensors of a tensor-parallel mesh; they are sharded over the data-parallel mesh as well."""

    TENSOR_PARALLEL_COUNTS = "tensor-parallel-counts"
    """The collectives of tensor parallelism are unchanged, and a data-parallel mesh of one rank adds none."""

    OFFLOAD = "offload"
    """Shards, their gradients and the optimizer can live on the CPU."""

    PAGEABLE_OFFLOAD = "pageable-offload"
    """Offloaded shards can live in memory that is not pinned, which needs no accelerator."""

    OFFLOAD_CHOICE = "offload-choice"
    """A script chooses whether offloaded shards live in pinned memory; pinning raises where memory cannot be pinned."""

    DISTRIBUTED_CHECKPOINT = "distributed-checkpoint"
    """``torch.distributed.checkpoint`` can save and load model and optimizer through their state dicts."""

    TENSOR_PARALLEL_CHECKPOINT = "tensor-parallel-checkpoint"
    """Checkpoints also work for DTensors of a tensor-parallel mesh, including sizes that the mesh does not divide."""

    FORWARD_METHOD = "forward-method"
    """A method other than ``forward`` can be registered to gather and free parameters as ``forward`` does."""

    INPUTS_TO_DEVICE = "inputs-to-device"
    """The root's forward moves its input tensors to the device."""

    POST_OPTIM_EVENT = "post-optim-event"
    """The next step's gathers can wait for a given event instead of the optimizer's stream."""

    FLAT_PARAMETERS = "flat-parameters"
    """The optimizer can get one flat parameter per unit instead of the model's own parameters."""

    SYNC_STATES = "sync-states"
    """Sharding can start from the first data-parallel rank's parameters and buffers on every rank."""

    ORDER_VALIDATION = "order-validation"
    """With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` the implementation compares the order in which units run in forward.

    It compares the ranks with each other in the first iteration, and each rank with its own first iteration later.
    """


class Hardware(enum.StrEnum):
    """A feature of a host. A case that needs one which the host lacks is skipped with the verdict ``unmet``."""

    ACCELERATOR = "accelerator"
    """A device other than the CPU."""

    STREAMS = "streams"
    """Real device streams: a delay in one does not stop the others."""
