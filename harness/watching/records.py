"""What one rank has seen of one step: plain values, which ranks exchange and judge."""

import dataclasses

from shardproof.harness.collectives.trace import Trace
from shardproof.harness.tensors.fingerprints import Box, Fingerprint


class NotWatchable(ValueError):
    """An argument, or what the ranks are, makes watching impossible. The text is one line."""


Bits = tuple[int, ...]
"""Equal for tensors of equal elements."""


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient, or this rank's part of it.

    Attributes:
        box: which elements of the parameter it is for.
        pending: the global ranks over which the values are a sum that is still to be made.
        fingerprint: of the elements that this rank holds.
        dtype: without its "torch." prefix.
    """

    box: Box
    pending: tuple[int, ...]
    fingerprint: Fingerprint
    dtype: str


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of the model as a rank holds it.

    Attributes:
        box: which elements of the full parameter the rank holds; None where that cannot be told.
        mesh: the global ranks among which it is distributed; empty for a plain tensor.
        trains: whether it requires a gradient.
        dtype: without its "torch." prefix.
        optimizer: the number of the optimizer that has it, or None.
        lr: the learning rate of its group, or None.
        before: its bits before the optimizer's step; None if no optimizer that has it has stepped.
        after: its bits after it.
        state: the bits of the tensors of its optimizer state, by key.
    """

    box: Box | None
    mesh: tuple[int, ...]
    trains: bool
    dtype: str
    optimizer: int | None = None
    lr: float | None = None
    before: Bits | None = None
    after: Bits | None = None
    state: dict[str, Bits] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer that has stepped.

    Attributes:
        kind: the name of its class.
        size: how many parameters it has.
        live: how many of them are the model's.
        shapes_agree: whether those that are not have the shapes of full or local parameters of the model.
        outside: how many of those that are not have a gradient: they are of modules that are not watched.
    """

    kind: str
    size: int
    live: int
    shapes_agree: bool
    outside: int = 0


@dataclasses.dataclass(frozen=True)
class NormCall:
    """A call of a function that computes or applies a total norm.

    Attributes:
        function: its name.
        value: the total norm; of a DTensor what this rank's local part says.
        max_norm: what it clips to, or None.
        norm_type: 2.0 by default.
    """

    function: str
    value: float | None
    max_norm: float | None
    norm_type: float


@dataclasses.dataclass(frozen=True)
class NotFinite:
    """A tensor with a NaN or an infinity, the ``order``-th that a rank saw in the step."""

    order: int
    what: str  # "output of 'layers.0'", "gradient before its reduction of 'layers.0.weight'"


@dataclasses.dataclass
class StepRecord:
    """What one rank has seen of one step.

    Attributes:
        rank: the global rank.
        step: counted from 0 at the start of watching.
        forwards: how many forwards of the root had gradients enabled.
        backwards: how many backward passes gave a parameter a gradient.
        batches: for each of these forwards what stands for its inputs; equal for equal inputs.
        rows: the number of rows (the size of the first dimension of the first tensor) of each.
        parameters: by canonical name.
        own: by canonical name, for each backward the gradient before its reduction, in the order of backward.
        after_backward: by canonical name, ``.grad`` after the last backward.
        at_step: by canonical name, ``.grad`` as the optimizer's step finds it.
        unplaced: parameters with a gradient of which nobody knows where its elements belong; the two above lack it.
        optimizers: those that have stepped, in order.
        norms: calls of functions of norms.
        clipped_scaled: whether gradients were clipped before a loss scaler unscaled them.
        not_finite: the first tensors with a NaN or an infinity, in execution order.
        gathered: parameters that are still gathered after the optimizer's step.
        memory: allocated bytes of the accelerator after the step, or None.
        collectives: that Python issued, in order.
        ties: sets of names of one parameter.
        unseen: what cannot be seen, one line each.
        last: the last event.
        autocast: the dtype of autocast in forwards, where there is a sink.
    """

    rank: int
    step: int
    forwards: int = 0
    backwards: int = 0
    batches: list[int] = dataclasses.field(default_factory=list)
    rows: list[int] = dataclasses.field(default_factory=list)
    parameters: dict[str, Parameter] = dataclasses.field(default_factory=dict)
    own: dict[str, list[tuple[int, Gradient]]] = dataclasses.field(default_factory=dict)
    after_backward: dict[str, Gradient] = dataclasses.field(default_factory=dict)
    at_step: dict[str, Gradient] = dataclasses.field(default_factory=dict)
    unplaced: list[str] = dataclasses.field(default_factory=list)
    optimizers: list[Optimizer] = dataclasses.field(default_factory=list)
    norms: list[NormCall] = dataclasses.field(default_factory=list)
    clipped_scaled: bool = False
    not_finite: list[NotFinite] = dataclasses.field(default_factory=list)
    gathered: list[str] = dataclasses.field(default_factory=list)
    memory: int | None = None
    collectives: Trace = dataclasses.field(default_factory=Trace)
    ties: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    unseen: list[str] = dataclasses.field(default_factory=list)
    last: str = ""
    autocast: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of ranks that one rank is in.

    Attributes:
        named: by the name of a mesh dimension or group, its ranks in order, this one included.
        source: where they come from: "DTensors", "mesh", "groups", "DDP".
        data: the names among them over which ranks have different data.
    """

    named: dict[str, tuple[int, ...]]
    source: str
    data: tuple[str, ...]
