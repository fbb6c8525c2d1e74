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
    """A gradient, or this rank's part of it."""

    box: Box  # which elements of the parameter it is for
    pending: tuple[int, ...]  # the global ranks over which the values are a sum that is still to be made
    fingerprint: Fingerprint  # of the elements that this rank holds
    dtype: str  # without its "torch." prefix


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of the model as a rank holds it."""

    box: Box | None  # which elements of the full parameter the rank holds; None where that cannot be told
    mesh: tuple[int, ...]  # the global ranks among which it is distributed; empty for a plain tensor
    trains: bool  # whether it requires a gradient
    dtype: str  # without its "torch." prefix
    optimizer: int | None = None  # the number of the optimizer that has it, or None
    lr: float | None = None  # the learning rate of its group, or None
    before: Bits | None = None  # its bits before the optimizer's step; None if no optimizer that has it has stepped
    # Its bits after it; of one that no optimizer of the rank steps, when the step has ended.
    after: Bits | None = None
    largest: float | None = None  # the largest absolute value that the rank holds, of one whose bits did not change
    # The bits of the tensors of its optimizer state, by key.
    state: dict[str, Bits] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer that has stepped."""

    kind: str  # the name of its class
    size: int  # how many parameters it has
    live: int  # how many of them are the model's
    shapes_agree: bool  # whether those that are not have the shapes of full or local parameters of the model
    outside: int = 0  # how many of those that are not have a gradient: they are of modules that are not watched
    gathered: int = 0  # how many of those that are not are what units of FSDP2 have while they are gathered


@dataclasses.dataclass(frozen=True)
class NormCall:
    """A call of a function that computes or applies a total norm."""

    function: str  # its name
    value: float | None  # the total norm; of a DTensor what this rank's local part says
    max_norm: float | None  # what it clips to, or None
    norm_type: float  # 2.0 by default


@dataclasses.dataclass(frozen=True)
class NotFinite:
    """A tensor with a NaN or an infinity, the ``order``-th that a rank saw in the step."""

    order: int
    what: str  # "output of 'layers.0'", "gradient before its reduction of 'layers.0.weight'"


@dataclasses.dataclass(frozen=True)
class Drop:
    """Gradients that were gone when a forward began, and that no optimizer had stepped by."""

    backwards: int  # how many backward passes of the step they are of: the first ones
    # Whether these were no microbatches: parameters were written in between (SAM), it was for the gradient of the
    # input, for the step of another model's optimizer, or for one of several evaluations of a closure; or something of
    # it was not finite.
    is_meant: bool


@dataclasses.dataclass
class StepRecord:
    """What one rank has seen of one step."""

    rank: int  # the global rank
    step: int  # counted from 0 at the start of watching
    forwards: int = 0  # how many forwards of the root had gradients enabled
    backwards: int = 0  # how many backward passes gave a parameter a gradient
    # For each of these forwards what stands for its inputs; equal for equal inputs.
    batches: list[int] = dataclasses.field(default_factory=list)
    # Of each, how many backward passes there had been before.
    read: list[int] = dataclasses.field(default_factory=list)
    drops: list[Drop] = dataclasses.field(default_factory=list)
    leaks: bool = False  # whether gradients that were computed for another model's optimizer are in those of the step
    # For each of them what stands for the first DTensor that a module is given: None for one that ranks divide. Empty
    # where there is none.
    divided: list[int | None] = dataclasses.field(default_factory=list)
    # The number of rows (the size of the first dimension of the first tensor) of each.
    rows: list[int] = dataclasses.field(default_factory=list)
    parameters: dict[str, Parameter] = dataclasses.field(default_factory=dict)  # by canonical name
    # By canonical name, for each backward the gradient before its reduction, in the order of backward.
    own: dict[str, list[tuple[int, Gradient]]] = dataclasses.field(default_factory=dict)
    # The same before hooks of user code on the parameter, where it has some.
    given: dict[str, list[tuple[int, Gradient]]] = dataclasses.field(default_factory=dict)
    # Of these names, those whose gradients torch.autograd.grad() returned: user code makes of them what it will.
    returned: list[str] = dataclasses.field(default_factory=list)
    # For each forward the calls that keep its backward from reducing gradients: "no_sync()".
    off: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    # How many backward passes of the step had ended at each call of ``zero_grad()`` since the step before.
    zeroed: list[int] = dataclasses.field(default_factory=list)
    # By canonical name, ``.grad`` after the last backward.
    after_backward: dict[str, Gradient] = dataclasses.field(default_factory=dict)
    # By canonical name, ``.grad`` as the optimizer's step finds it.
    at_step: dict[str, Gradient] = dataclasses.field(default_factory=dict)
    # Parameters of modules that no forward of the step has called.
    idle: list[str] = dataclasses.field(default_factory=list)
    # Parameters of modules that were called, and never with gradients enabled.
    detached: list[str] = dataclasses.field(default_factory=list)
    # Parameters with a gradient of which nobody knows where its elements belong; the two above lack it.
    unplaced: list[str] = dataclasses.field(default_factory=list)
    optimizers: list[Optimizer] = dataclasses.field(default_factory=list)  # those that have stepped, in order
    # Parameters that train and are in an optimizer of the process that has not stepped: the name of its class.
    resting: dict[str, str] = dataclasses.field(default_factory=dict)
    norms: list[NormCall] = dataclasses.field(default_factory=list)  # calls of functions of norms
    # Of each cross-entropy the labels that count, and the gradient of the loss with respect to that of one of them.
    tokens: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    are_means: bool = True  # whether each of them divides by its own labels that count
    has_dropout: bool = False  # whether a module of the model drops elements at random in this step
    clipped_scaled: bool = False  # whether gradients were clipped before a loss scaler unscaled them
    # The first tensors with a NaN or an infinity, in execution order.
    not_finite: list[NotFinite] = dataclasses.field(default_factory=list)
    # Parameters that are still gathered after the optimizer's step.
    gathered: list[str] = dataclasses.field(default_factory=list)
    # Parameters of which a forward found other values gathered than those of the shards, as before an earlier step.
    outdated: list[str] = dataclasses.field(default_factory=list)
    memory: int | None = None  # allocated bytes of the accelerator after the step, or None
    collectives: Trace = dataclasses.field(default_factory=Trace)  # that Python issued, in order
    ties: list[tuple[str, ...]] = dataclasses.field(default_factory=list)  # sets of names of one parameter
    unseen: list[str] = dataclasses.field(default_factory=list)  # what cannot be seen, one line each
    last: str = ""  # the last event
    autocast: str = ""  # the dtype of autocast in forwards, where there is a sink
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of ranks that one rank is in."""

    named: dict[str, tuple[int, ...]]  # by the name of a mesh dimension or group, its ranks in order, this one included
    source: str  # where they come from: "DTensors", "mesh", "groups", "DDP"
    data: tuple[str, ...]  # the names among them over which ranks have different data
