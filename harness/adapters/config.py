"""How a case wants its model sharded, in terms that are the same for every implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

Units = tuple[tuple[str, ...], ...]
"""The units of a model: each entry names the modules whose parameters are gathered by one collective."""


@dataclasses.dataclass(frozen=True)
class Clip:
    """Gradient clipping by the total norm of all gradients.

    Attributes:
        max_norm: the norm above which gradients are scaled down; positive.
        norm_type: the p of the p-norm; positive, or ``inf``.
    """

    max_norm: float
    norm_type: float = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accumulation:
    """What every backward but the last of a step defers to the last one.

    Needs :attr:`Capability.DEFERRED_REDUCTION`. A value other than a field's default needs the capability named there.
    """

    units: Literal["all", "root-only"] | tuple[str, ...] = "all"
    """The units whose reduction is deferred: all, the root's own unit only, or the units of the named modules.

    Needs :attr:`Capability.DEFERRED_PER_UNIT`.
    """

    skips: Literal["reduction", "all-reduce"] = "reduction"
    """What is deferred: the whole reduction, or only the all-reduce over the replicas of a (replicate, shard) mesh.

    Needs :attr:`Capability.DEFERRED_ALL_REDUCE`.
    """

    keeps_gathered: bool = False
    """Whether parameters stay gathered after these backwards, for the next microbatch.

    Needs :attr:`Capability.KEEP_AFTER_BACKWARD`.
    """

    marks_last: bool = False
    """Whether a call marks the last backward, for schedules that run several forwards before their backwards.

    Needs :attr:`Capability.MARKED_LAST_BACKWARD`.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a unit where they differ from those of its parameters.

    Needs :attr:`Capability.MIXED_PRECISION`. Values other than a field's default may need what is named there.
    """

    compute: torch.dtype | None = None
    """The dtype in which parameters are gathered and computed with; None is that of the parameters."""

    reduce: torch.dtype | None = None
    """The dtype in which gradients are reduced, and added up before they are; None is that of compute."""

    output: torch.dtype | None = None
    """The dtype to which floating-point tensors in the unit's output are cast; None leaves them.

    Needs :attr:`Capability.OUTPUT_DTYPE`.
    """

    buffers: torch.dtype | None = None
    """The dtype of floating-point buffers; None leaves them. Needs :attr:`Capability.BUFFER_DTYPE`."""

    casts_inputs: bool = True
    """Whether floating-point tensors in the unit's inputs are cast to the dtype of compute."""

    full_in_evaluation: bool = False
    """Whether nothing is cast while the module is in evaluation mode.

    Needs :attr:`Capability.FULL_PRECISION_EVALUATION`.
    """

    keeps_gradients: bool = False
    """Whether the optimizer gets gradients of the dtype of the reduction; otherwise they have that of the parameters.

    Needs :attr:`Capability.LOW_PRECISION_GRADIENTS`.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a case wants its model sharded, in terms that are the same for every implementation.

    An adapter raises for a value that its implementation cannot honour; it never approximates. Cases that need a
    capability are skipped beforehand where the adapter does not declare it.
    """

    mesh: DeviceMesh
    """The data-parallel mesh: parameters are sharded and gradients averaged over it.

    It has one dimension, or the two dimensions (replicate, shard), which need :attr:`Capability.HYBRID`. It contains
    this rank, but it may leave out other ranks of the world, as beside tensor parallelism.
    """

    units: Units = ()
    """The units, as tuples of module names; each is gathered by one collective.

    The root's own unit is implicit: it has all parameters that no entry covers. An implementation that chooses its own
    units may ignore this field; its adapter then declares neither :attr:`Capability.COUNTED_UNITS` nor
    :attr:`Capability.GROUPED_UNIT`.
    """

    reshard_after_forward: bool | int | None = None
    """What happens to gathered parameters after forward; None is the implementation's default.

    True frees them, which needs :attr:`Capability.RESHARD_AFTER_FORWARD`, as does False, which keeps them until
    backward. An int reshards them to groups of that many ranks, which needs :attr:`Capability.RESHARD_TO_SIZE`.
    """

    microbatches: int = 1
    """The number of microbatches in one optimizer step."""

    accumulation: Accumulation | None = None
    """What is deferred to the last microbatch; None is the implementation's default."""

    offload: Literal["pageable", "pinned"] | None = None
    """The kind of CPU memory that holds the shards; None keeps them on the device.

    Needs :attr:`Capability.OFFLOAD`, and ``"pageable"`` needs :attr:`Capability.PAGEABLE_OFFLOAD` as well.
    """

    clip: Clip | None = None
    """How gradients are clipped; None does not clip."""

    find_unused: bool = False
    """Whether some parameters may get no gradient in a step, as in DDP's ``find_unused_parameters``."""

    cast: torch.dtype | None = None
    """The dtype to which the module is cast after it is sharded and before the optimizer is made.

    Needs :attr:`Capability.CAST_AFTER_INIT`.
    """

    precision: Precision = Precision()
    """The dtypes of every unit that :attr:`unit_precision` does not name."""

    unit_precision: Mapping[str, Precision] = dataclasses.field(default_factory=dict)
    """The dtypes of the units of some modules, by the name of the unit's first module.

    Needs :attr:`Capability.MIXED_PRECISION`.
    """

    ignored: tuple[str, ...] = ()
    """The parameters that are neither sharded nor reduced, by name. Needs :attr:`Capability.IGNORED_PARAMETERS`."""

    divide_factors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By what the sum of the gradients of some units is divided, instead of the number of ranks.

    By the name of the unit's first module; "" is the root's own. Needs :attr:`Capability.DIVIDE_FACTOR`.
    """

    flat_parameters: bool = False
    """Whether the optimizer gets one flat parameter per unit instead of the model's own parameters.

    Needs :attr:`Capability.FLAT_PARAMETERS`.
    """

    sync_states: bool = False
    """Whether every rank starts from the parameters and buffers of the first rank of the mesh.

    Needs :attr:`Capability.SYNC_STATES`.
    """

    def precision_of(self, unit: str) -> Precision:
        """Return the dtypes of a unit, by the name of its first module; "" is the root's own."""
        return self.unit_precision.get(unit, self.precision)

    @property
    def shard_size(self) -> int:
        """The number of ranks among which a unit is divided."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The global ranks whose gradients are averaged, this rank included, in the order of the mesh."""
        return tuple(self.mesh.mesh.flatten().tolist())
