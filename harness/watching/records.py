"""What one rank has seen of one step: plain values, which ranks exchange and judge."""

import dataclasses
from collections.abc import Mapping
from typing import Any

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
class Narrow:
    """The dtypes narrower than float32 of a parameter and its optimizer state."""

    unchanged: int = 0  # how many elements of the sample the step leaves as they are
    sampled: int = 0  # a sample of its elements that have a gradient; 0 of a parameter that is not narrow
    # The dtypes of narrow tensors of its state, by key, without their "torch." prefix.
    states: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of the model as a rank holds it."""

    box: Box | None  # which elements of the full parameter the rank holds; None where that cannot be told
    mesh: tuple[int, ...]  # the global ranks among which it is distributed; empty for a plain tensor
    trains: bool  # whether it requires a gradient
    dtype: str  # without its "torch." prefix
    optimizer: int | None = None  # the number of the optimizer that has it, or None
    lr: float | None = None  # the learning rate of its group, or None
    # The other numbers of its group that decide what an update is, such as "weight_decay", by name.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    before: Bits | None = None  # its bits before the optimizer's step; None if no optimizer that has it has stepped
    # Its bits after it; of one that no optimizer of the rank steps, when the step has ended.
    after: Bits | None = None
    is_frozen: bool = False  # whether it required no gradient when its optimizer stepped
    largest: float | None = None  # the largest absolute value that the rank holds, of one whose bits did not change
    narrow: Narrow | None = None  # what rounding does to it and its state; None where neither is narrow
    # The bits of the tensors of its optimizer state, by key.
    state: dict[str, Bits] = dataclasses.field(default_factory=dict)
    # How often its optimizer has stepped it, where that is a number of the host; None of a tensor.
    age: float | None = None
    # The class of an optimizer of the process that has it and has not stepped, of one that trains.
    resting: str = ""


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


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The tensors that a forward of the root was given, or else its first module."""

    batch: int  # stands for them; equal for equal inputs
    rows: int = 0  # the size of the first dimension of the first of them
    backwards: int = 0  # how many backward passes of the step there had been before
    tensors: tuple["Argument", ...] = ()


@dataclasses.dataclass(frozen=True)
class Argument:
    """A tensor that a forward was given."""

    bits: int  # stands for it
    kind: str  # its dtype and shape: "float32 [16, 8]"
    varies: bool  # whether it has many different values, as drawn numbers have
    rows: tuple[int, ...] = ()  # stand for its rows, of one that varies and has as many as the batch; of some if many
    columns: tuple[int, ...] = ()  # the same of its columns; odd of those that vary, and 0 of those of one value


@dataclasses.dataclass
class ForwardRecord:
    """The forwards of the root with gradients enabled."""

    count: int = 0
    inputs: list[Inputs] = dataclasses.field(default_factory=list)  # of those that were given tensors, in order
    # What stands for the first DTensor that a module of theirs is given: None for one that ranks divide. A forward
    # without one has no entry, so the numbers are not those of forwards.
    divided: list[int | None] = dataclasses.field(default_factory=list)
    # For each forward the calls that keep its backward from reducing gradients: "no_sync()".
    off: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    autocast: str = ""  # the dtype of autocast, where there is a sink

    @property
    def batches(self) -> tuple[int, ...]:
        """What stands for the inputs of each forward that was given some."""
        return tuple(one.batch for one in self.inputs)

    def since(self, backwards: int) -> "ForwardRecord":
        """Return the same without the forwards whose inputs were read before so many backward passes had been.

        ``off`` and ``divided`` are those of all.
        """
        kept = [
            dataclasses.replace(one, backwards=one.backwards - backwards)
            for one in self.inputs
            if one.backwards >= backwards
        ]
        return dataclasses.replace(self, count=self.count - len(self.inputs) + len(kept), inputs=kept)


_ByBackward = dict[str, list[tuple[int, Gradient]]]
"""By canonical name, the gradients of backward passes and their numbers, in the order of backward."""


@dataclasses.dataclass
class GradientRecord:
    """The gradients of a step, by canonical name."""

    own: _ByBackward = dataclasses.field(default_factory=dict)  # before their reduction
    given: _ByBackward = dataclasses.field(default_factory=dict)  # before hooks of user code, where there are some
    # Of these names, those whose gradients torch.autograd.grad() returned: user code makes of them what it will.
    returned: list[str] = dataclasses.field(default_factory=list)
    # ``.grad`` after the last backward.
    after_backward: dict[str, Gradient] = dataclasses.field(default_factory=dict)
    # ``.grad`` as the optimizer's step finds it.
    at_step: dict[str, Gradient] = dataclasses.field(default_factory=dict)
    # Parameters with a gradient of which nobody knows where its elements belong; the two above lack it.
    unplaced: list[str] = dataclasses.field(default_factory=list)
    # How many backward passes of the step had ended at each call of ``zero_grad()`` since the step before.
    zeroed: list[int] = dataclasses.field(default_factory=list)
    drops: list[Drop] = dataclasses.field(default_factory=list)
    leaks: bool = False  # whether gradients that were computed for another model's optimizer are in those of the step
    # Whether an optimizer has stepped in the middle of a backward pass: of what this computes later none is own.
    are_consumed: bool = False

    def every(self) -> list[Gradient]:
        """Return those at the optimizer's step, and all before their reduction."""
        return [*self.at_step.values(), *(one for parts in self.own.values() for _, one in parts)]

    def since(self, backwards: int) -> "GradientRecord":
        """Return the same without what the first ``backwards`` passes computed, and without drops."""
        own, given = _since(self.own, backwards), _since(self.given, backwards)
        return dataclasses.replace(self, own=own, given=given, drops=[])


def _since(gradients: _ByBackward, backwards: int) -> _ByBackward:
    kept = {
        name: [(number - backwards, one) for number, one in parts if number >= backwards]
        for name, parts in gradients.items()
    }
    return {name: parts for name, parts in kept.items() if parts}


@dataclasses.dataclass(frozen=True)
class Idle:
    """A scheduler that steps an optimizer which does not step, while another one steps its parameters."""

    scheduler: str  # the name of its class
    optimizer: str  # that of its optimizer's
    stepping: str  # that of the one that steps
    calls: int  # how often the scheduler was stepped since its optimizer was
    rates: tuple[float, float]  # the learning rate of its optimizer's first group after the first of them and the last
    rate: float  # that of the one that steps, at each step
    is_dropped: bool  # whether nothing but schedulers refers to its optimizer


@dataclasses.dataclass(frozen=True)
class Pace:
    """A scheduler that was stepped equally often, and more than once, between each two steps of its optimizer."""

    scheduler: str  # the name of its class
    optimizer: str  # that of its optimizer's
    calls: int  # how often for each step
    steps: int  # for how many steps


@dataclasses.dataclass(frozen=True)
class Levelled:
    """An optimizer whose groups were given different learning rates, and step by one."""

    optimizer: str  # the name of its class
    given: tuple[float, ...]  # the rates of its groups when they were made, or when watching began
    rate: float  # the one by which all of them have stepped last


@dataclasses.dataclass(frozen=True)
class Missed:
    """A load, into a module that an optimizer has stepped since, of a state whose keys are not all its names."""

    kind: str  # the name of the module's class
    keys: int  # how many the state has
    matched: int  # how many of them are names of the module
    explained: int  # how many are names of the module but for a prefix
    key: str  # one of those; of others the first key that is no name
    name: str  # its name in the module; the module's first name


@dataclasses.dataclass(frozen=True)
class Undone:
    """A load after which the step of an optimizer leaves values of before the load."""

    kind: str  # the name of the module's class
    names: tuple[str, ...]  # some of its parameters
    steps: int  # how many steps there were until then
    is_owned: bool  # whether the optimizers that have stepped since have one of these parameters


@dataclasses.dataclass(frozen=True)
class Windows:
    """Successive steps of an optimizer with equal numbers of backward passes."""

    passes: int  # the backward passes of each
    factor: float | None  # by which the loss of each of them is a mean, as far as its graph tells
    kind: str  # the nodes of their graphs next to the loss
    is_as_computed: bool  # whether nothing but clipping writes gradients between the last of them and the step
    steps: int  # how many


@dataclasses.dataclass
class ActRecord:
    """Calls of user code since the step before that concern the process: loss scalers, schedulers and state dicts."""

    # The classes of optimizers whose gradients a loss scaler has divided, and has divided again with those added since.
    divided: list[str] = dataclasses.field(default_factory=list)
    idle: list[Idle] = dataclasses.field(default_factory=list)
    # The classes of modules that were given their own tensors to load, which optimizers have written since they were
    # taken, and how many steps these have made.
    restored: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    paces: list[Pace] = dataclasses.field(default_factory=list)
    levelled: list[Levelled] = dataclasses.field(default_factory=list)
    loads: int = 0  # how many modules were given a state to load
    missed: list[Missed] = dataclasses.field(default_factory=list)
    undone: list[Undone] = dataclasses.field(default_factory=list)
    # Steps of the only optimizer that steps, since watching began; none where there are several, or too many changes.
    windows: list[Windows] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class StandingRecord:
    """The rest that stands from step to step, with parameters and optimizer states, when an optimizer's step begins."""

    # What stands for the states of random generators, by the type of the device.
    generators: dict[str, int] = dataclasses.field(default_factory=dict)
    # Whether nothing but seeds, as loaders draw them, was drawn from the CPU's since the last time.
    only_seeds: bool = True
    modes: dict[str, bool] = dataclasses.field(default_factory=dict)  # of modules that look at ``training``, what it is
    # The bits of buffers of user code's modules; those of ``ModuleRecord`` are of the first forward's begin.
    buffers: dict[str, Bits] = dataclasses.field(default_factory=dict)
    # Of parameters that require no gradient the bits, and how far a sample is from that of the first time: relative.
    frozen: dict[str, tuple[Bits, float]] = dataclasses.field(default_factory=dict)
    # What stands for the states of the generators of Python and numpy, by the modules that have them.
    others: dict[str, int] = dataclasses.field(default_factory=dict)
    attributes: dict[str, Bits] = dataclasses.field(default_factory=dict)  # the same of tensors that are no buffers
    model: int = 0  # how many models of the same class have replaced the first


@dataclasses.dataclass(frozen=True)
class Look:
    """A look at a follower and at the parameters that it follows, between the steps of optimizers."""

    own: int  # stands for its bits
    root: int  # stands for those of the parameters; of a full copy, for the ranks that have parts of these
    # The correlation of its elements with those of the parameter: the median of tensors whose elements vary, or None.
    likeness: float | None
    distance: float  # its relative distance to the parameters
    is_written: bool = False  # whether something has written it since the look before
    # The cosine between its movement since the look before and the way to the parameters; 0 of one that did not move.
    toward: float = 0.0
    # A sample of its elements that differ from those that they follow, and how many of them are as they were.
    sampled: int = 0
    unchanged: int = 0
    rate: float | None = None  # by which part of the way it has moved, where its movement is a part of the way


@dataclasses.dataclass(frozen=True)
class Follower:
    """A copy of parameters of the root, by their names or shapes, which no optimizer steps."""

    name: str  # how user code names it, if that is known
    kind: str  # the name of its class
    place: str  # the part of the root that it is like; empty for the root
    dtype: str  # the narrowest of its tensors'
    is_from_begin: bool  # whether it was there when watching began
    looks: tuple[Look, ...]
    # For each step that was seen from begin to end, the backward passes, and after how many of them it was written.
    writes: tuple[tuple[int, int], ...] = ()
    calls: int = 0  # of its forward
    dropouts: tuple[str, ...] = ()  # its modules that drop elements at random, which were called
    norms: tuple[str, ...] = ()  # its norms of running statistics that were called, and take those of their input
    gathers: int = 0  # how many of its tensors have a gradient to which backward passes of several steps have added
    sharers: tuple[int, ...] = ()  # of shards the global ranks that have those of one copy
    is_full: bool = False  # whether the rank looked at as many followers as it may

    @property
    def key(self) -> tuple[str, str, str]:
        """The same for the same one on other ranks."""
        return self.name, self.kind, self.place


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A backward of a function of user code in whose forward a collective is issued."""

    kind: str  # the name of the function's class
    collective: str  # the kind of the collective
    group: tuple[int, ...]  # its global ranks
    is_own: bool  # whether the gradient of the input is that of the rank's own part of the output, which is not zero
    uses_others: bool  # whether the parts of other ranks have a gradient that is not zero
    loss: float  # of which the backward pass is
    padding: int = 0  # of what is gathered the rows of padding that have a gradient which no other row has


@dataclasses.dataclass(frozen=True)
class Crossed:
    """An output of a root, or an input that requires a gradient, which may cross the boundary of pipeline stages."""

    is_output: bool
    bits: int  # stands for it
    gradients: tuple[Fingerprint, ...]  # those that autograd has had for it in the step


@dataclasses.dataclass(frozen=True)
class Mode:
    """A dropout or a norm of running statistics of the model in a step."""

    name: str
    is_norm: bool
    is_training: bool
    is_called: bool  # whether a forward of the step has called it
    trains: bool  # of a norm its parameters, else those of the module around it: whether one requires a gradient
    written: int = 0  # counts writes of its parameters
    moves_again: bool = False  # of a norm whether a recomputation in backward moves its running statistics once more


@dataclasses.dataclass
class Beside:
    """Copies of the root, collectives in autograd, modes of its modules, and its constants."""

    followers: list[Follower] = dataclasses.field(default_factory=list)  # what stands beside the root, by now
    modes: list[Mode] = dataclasses.field(default_factory=list)  # of modules that compute otherwise in training
    crossings: list[Crossing] = dataclasses.field(default_factory=list)  # of the first root alone
    narrow: list[str] = dataclasses.field(default_factory=list)  # constant buffers whose values a narrow dtype rounds
    crossed: list[Crossed] = dataclasses.field(default_factory=list)  # of all roots; those of the first have them


@dataclasses.dataclass
class ModuleRecord:
    """The modules of the model in a step, by the canonical names of their parameters."""

    idle: list[str] = dataclasses.field(default_factory=list)  # of those that no forward of the step has called
    detached: list[str] = dataclasses.field(default_factory=list)  # of those called, and never with gradients enabled
    # Parameters that are still gathered after the optimizer's step.
    gathered: list[str] = dataclasses.field(default_factory=list)
    # Parameters of which a forward found other values gathered than those of the shards, as before an earlier step.
    outdated: list[str] = dataclasses.field(default_factory=list)
    ties: list[tuple[str, ...]] = dataclasses.field(default_factory=list)  # sets of names of one parameter
    # Parameters that have replaced those which DistributedDataParallel was made with, and how many of these are gone.
    replaced: list[str] = dataclasses.field(default_factory=list)
    gone: int = 0
    # The modules whose recomputation in backward draws other random numbers than their forwards did, and whether each
    # is torch's own and recomputed by torch.
    redrawn: dict[str, bool] = dataclasses.field(default_factory=dict)
    has_dropout: bool = False  # whether one drops elements at random in this step
    # The bits of buffers of user code's modules when the first forward of the step begins, by their canonical names.
    buffers: dict[str, Bits] = dataclasses.field(default_factory=dict)
    compiled: list[str] = dataclasses.field(default_factory=list)  # the names of modules that are compiled
    # Where the process compiles, the names of modules whose parameters get gradients without a call that is seen.
    unhooked: list[str] = dataclasses.field(default_factory=list)
    beside: Beside = dataclasses.field(default_factory=Beside)
    # Calls of user code that concern the process; of the first root alone.
    acts: ActRecord = dataclasses.field(default_factory=ActRecord)
    standing: StandingRecord = dataclasses.field(default_factory=StandingRecord)


@dataclasses.dataclass
class NormRecord:
    """The calls of functions of norms."""

    calls: list[NormCall] = dataclasses.field(default_factory=list)
    clipped_scaled: bool = False  # whether gradients were clipped before a loss scaler unscaled them


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels of a cross-entropy."""

    count: int
    columns: int  # of the logits
    first: int | None  # of labels that count up by one the first; None of others
    rows: int  # of the integer inputs of the forward with as many elements; 0 without
    are_rolled: bool  # whether they are these inputs, each row rolled by one


@dataclasses.dataclass
class LossRecord:
    """The cross-entropies."""

    # Of each the labels that count, and the gradient of the loss with respect to that of one of them.
    tokens: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    are_means: bool = True  # whether each of them divides by its own labels that count
    labels: list[Labels] = dataclasses.field(default_factory=list)  # of those with two labels or more, in order
    # Of the loss of each backward pass the factor by which it is a mean; None where its graph does not tell.
    factors: list[float | None] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Usage:
    """The memory and the time of a step."""

    memory: int | None = None  # allocated bytes of the accelerator after the step, or None
    seconds: float = 0.0


@dataclasses.dataclass
class StepRecord:
    """What one rank has seen of one step."""

    rank: int  # the global rank
    step: int  # counted from 0 at the start of watching
    backwards: int = 0  # how many backward passes gave a parameter a gradient
    forwards: ForwardRecord = dataclasses.field(default_factory=ForwardRecord)
    gradients: GradientRecord = dataclasses.field(default_factory=GradientRecord)
    parameters: dict[str, Parameter] = dataclasses.field(default_factory=dict)  # by canonical name
    modules: ModuleRecord = dataclasses.field(default_factory=ModuleRecord)
    optimizers: list[Optimizer] = dataclasses.field(default_factory=list)  # those that have stepped, in order
    norms: NormRecord = dataclasses.field(default_factory=NormRecord)
    losses: LossRecord = dataclasses.field(default_factory=LossRecord)
    # The first tensors with a NaN or an infinity, in execution order.
    not_finite: list[NotFinite] = dataclasses.field(default_factory=list)
    collectives: Trace = dataclasses.field(default_factory=Trace)  # that Python issued, in order
    unseen: list[str] = dataclasses.field(default_factory=list)  # what cannot be seen, one line each
    usage: Usage = dataclasses.field(default_factory=Usage)
    family: Any = None  # of the first root that a loop trains: what the rank tells of the others

    def since(self, backwards: int) -> "StepRecord":
        """Return the same without the first ``backwards`` backward passes, whose gradients were dropped."""
        return dataclasses.replace(
            self, backwards=self.backwards - backwards, forwards=self.forwards.since(backwards),
            gradients=self.gradients.since(backwards),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Reducers:
    """The wrappers and units that reduce gradients in backward."""

    names: tuple[str, ...] = ()  # "DistributedDataParallel", "fully_shard"
    hooks: tuple[str, ...] = ()  # the names of functions that reduce gradients in the place of the wrapper's own
    bypassed: tuple[str, ...] = ()  # the names of wrappers around the model that the loop does not call
    ignored: frozenset[str] = frozenset()  # the names of plain parameters that user code has DDP ignore
    sends_buffers: bool = False  # whether DDP replaces the buffers of all ranks by those of one before each forward


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of ranks that one rank is in."""

    named: dict[str, tuple[int, ...]]  # by the name of a mesh dimension or group, its ranks in order, this one included
    source: str  # where they come from: "DTensors", "mesh", "groups", "DDP"
    data: tuple[str, ...]  # the names among them over which ranks have different data
