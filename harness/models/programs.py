"""Programs of public calls as plain data: which there are, when each is legal, and which a finding says are wrong.

A program is a model, how it is sharded, and calls in an order that nobody wrote down; hypothesis draws it and a case
runs it (``shardproof/testing/calls.py``). A :class:`Situation` follows a program call by call, so that what is drawn is
legal from the first call to the last: no backward without its forward, no step between forward and backward.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import ClassVar

from packaging.version import Version

from shardproof.harness.adapters.base import Accumulation
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.models.drawn import Block, Described, DrawnModel, Part, Plan
from shardproof.harness.models.trainings import Optimizer, case_of


@dataclasses.dataclass(frozen=True, repr=False)
class Call(Described):
    """One public call.

    Attributes:
        kind: a key of :data:`KINDS`.
        how: one of the kind's choices.
        place: of a kind that is about one unit or one parameter, its number, counted round and round.
    """

    kind: str
    how: str = ""
    place: int = 0

    def __repr__(self) -> str:
        given = [repr(one) for one in (self.kind, self.how) if one] + [f"place={self.place}"] * bool(self.place)
        return f"Call({', '.join(given)})"


_PLAIN = Plan(Block((Part("linear"),), (Block((Part("linear"),), unit="own"),)), dim=2)


@dataclasses.dataclass(frozen=True, repr=False)
class Program(Described):
    """Calls in an order, on a model; what is not described here is as in ``Config``.

    Attributes:
        calls: what is called, in this order.
        rows: the rows of each batch.
        replicas: the number of replicas, on a mesh of (replicas, shards); 0 is a mesh of one dimension.
        keeps_unsharded: whether a backward whose reduction is deferred leaves parameters unsharded.
        seed: seeds the parameters and the batches.
    """

    #: How many are drawn by an item of a run without ``--fuzz``, by effort.
    EXAMPLES: ClassVar[dict[str, int]] = {"quick": 8, "standard": 20, "full": 100}

    plan: Plan = _PLAIN
    calls: tuple[Call, ...] = ()
    rows: int = 1
    replicas: int = 0
    reshard_after_forward: bool | None = None
    keeps_unsharded: bool = False
    optimizer: Optimizer = "momentum"
    seed: int = 0

    def as_case(self, *, world_size: int, requirements: Sequence[str], deadline: float | None = None) -> str:
        """Return a case that makes these calls, as the source of a file; without a deadline it has that of the run."""
        needed = needs_of_program(self, world_size=world_size)
        described = [name for name in ("Block", "Part", "Plan") if f"{name}(" in repr(self)]
        names = sorted([*described, "Call", "Program"])
        return case_of(
            self, "make_calls", module="calls", names=(*names, "make_calls"), needed=needed,
            world_size=world_size, requirements=requirements, deadline=deadline,
        )  # fmt: skip


@dataclasses.dataclass
class Situation:
    """What calls have led to, as far as it decides which others are legal.

    Attributes:
        waiting: how the gradients of the forward that waits for its backward are reduced; empty if none waits.
        defers: whether gradients wait for the reduction of a later backward.
        has_gradients: whether parameters have reduced gradients.
        has_states: whether the optimizer has states.
        saved: the call that saved what a load takes; None before.
        saved_states: whether the optimizer had states then.
        has_run: whether a forward has run.
        has_gathered: whether a call has gathered parameters, a state dict's excepted.
        left: whether a forward without a backward, or a backward that defers, may have left parameters gathered.
        dropped: whether the output of a forward with autograd has been dropped since the last backward.
        replaced: in which ways user code has replaced one gradient, since all were set to None; "none" if they were so
            since the last forward with a backward.
        asked: whether a call has begun to gather parameters, which no forward has used yet.
        frozen: the number of the unit that is frozen.
        is_double: whether the model has been cast to float64.
    """

    program: Program
    waiting: str = ""
    defers: bool = False
    has_gradients: bool = False
    has_states: bool = False
    saved: Call | None = None
    saved_states: bool = False
    has_run: bool = False
    has_gathered: bool = False
    left: bool = False
    dropped: bool = False
    replaced: frozenset[str] = frozenset()
    asked: bool = False
    frozen: int | None = None
    is_double: bool = False

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way: no forward waits for its backward, and no gradient for its reduction."""
        return not self.waiting and not self.defers

    def allows(self, call: Call) -> bool:
        """Whether a call is legal now."""
        return KINDS[call.kind].is_legal(self, call)

    def take(self, call: Call) -> None:
        """Note what a call leads to."""
        KINDS[call.kind].leads(self, call)


@dataclasses.dataclass(frozen=True)
class CallKind:
    """A kind of call.

    Attributes:
        needs: the capabilities without which no implementation has it.
        choices: in which ways it is called, each with what that needs beyond ``needs``.
        is_legal: whether it may be called in a situation.
        leads: changes the situation.
        has_places: whether it is about one unit or one parameter.
    """

    is_legal: Callable[[Situation, Call], bool]
    needs: str = ""
    choices: dict[str, str] = dataclasses.field(default_factory=lambda: {"": ""})
    leads: Callable[[Situation, Call], None] = lambda situation, call: None
    has_places: bool = False

    def needs_of(self, how: str) -> frozenset[str]:
        """Return the capabilities that a way to call it needs."""
        return Capability.of(f"{self.needs} {self.choices[how]}")


def _always(situation: Situation, call: Call) -> bool:
    return True


def _at_rest(situation: Situation, call: Call) -> bool:
    return situation.is_at_rest


def _not_waiting(situation: Situation, call: Call) -> bool:
    # What a plain model's backward needs must not be written before it.
    return not situation.waiting


def _has_gradients(situation: Situation, call: Call) -> bool:
    return situation.is_at_rest and situation.has_gradients


def _forward(situation: Situation, call: Call) -> None:
    situation.waiting, situation.has_run, situation.left, situation.asked = call.how, True, False, False


def _backward(situation: Situation, call: Call) -> None:
    situation.replaced -= {"none"}
    situation.defers = situation.waiting == "deferred"
    situation.has_gradients |= not situation.defers
    keeps = situation.program.keeps_unsharded or situation.program.reshard_after_forward is False
    situation.waiting, situation.left, situation.dropped = "", situation.defers and keeps, False


def _evaluated(situation: Situation, call: Call) -> None:
    situation.has_run, situation.left, situation.asked = True, True, False
    situation.dropped |= call.how == "dropped"


def _stepped(situation: Situation, call: Call) -> None:
    # torch's functions do not load whole states of an optimizer that has none: F-382 of findings/.
    situation.has_states |= situation.has_gradients and situation.program.optimizer != "sgd"


def _zeroed(situation: Situation, call: Call) -> None:
    situation.has_gradients &= call.how == "zeros"
    situation.replaced = situation.replaced if call.how == "zeros" else frozenset({"none"})


def _replaced(situation: Situation, call: Call) -> None:
    situation.replaced |= {call.how}


def _saved(situation: Situation, call: Call) -> None:
    situation.saved, situation.saved_states = call, situation.has_states


def _read(situation: Situation, call: Call) -> None:
    situation.has_gathered = True


def _loaded(situation: Situation, call: Call) -> None:
    assert situation.saved is not None
    if situation.saved.kind == "save":
        situation.has_states = situation.saved_states


def _resharded(situation: Situation, call: Call) -> None:
    situation.left = situation.asked = False


def _asked(situation: Situation, call: Call) -> None:
    situation.asked = situation.has_gathered = True


def _gathered_and_resharded(situation: Situation, call: Call) -> None:
    situation.has_gathered = True
    _resharded(situation, call)


def _froze(situation: Situation, call: Call) -> None:
    situation.frozen = call.place % places(situation.program)


def _thawed(situation: Situation, call: Call) -> None:
    situation.frozen = None


def _has_all_states(situation: Situation) -> bool:
    return situation.is_at_rest and situation.has_states and situation.frozen is None


def _is_sent(situation: Situation, call: Call) -> bool:
    """Whether the ranks of the mesh can have what the first one alone saves."""
    return call.how != "first-rank" or not situation.program.replicas


def _recovered(situation: Situation, call: Call) -> None:
    situation.waiting, situation.defers = "", False
    _resharded(situation, call)


def _cast(situation: Situation, call: Call) -> None:
    situation.is_double = True


def _dropped_states(situation: Situation, call: Call) -> None:
    situation.has_states = False


_UNITS, _WRAPPERS = "fsdp2-api async-unshard manual-reshard registered-state", "fsdp1-api summon-full-params"
_FORMS = {"sharded": "", "full": "full-state-dict", "first-rank": "full-state-dict"}

KINDS: dict[str, CallKind] = {
    # A step and its parts.
    "evaluate": CallKind(
        _always, choices={"no_grad": "", "inference_mode": "", "dropped": ""}, leads=_evaluated
    ),
    "forward": CallKind(_not_waiting, choices={"reduced": "", "deferred": "deferred-reduction"}, leads=_forward),
    "backward": CallKind(lambda situation, call: bool(situation.waiting), leads=_backward),
    "step": CallKind(_at_rest, leads=_stepped),
    "zero_grad": CallKind(
        lambda situation, call: not situation.defers, choices={"none": "", "zeros": ""}, leads=_zeroed
    ),
    "clip": CallKind(_has_gradients, "clip-by-call clip.norm_type clip-empty-shards", {"low": "", "high": ""}),
    # State dicts, out and in. Before the first step an optimizer has nothing to save.
    "save": CallKind(
        lambda situation, call: _is_sent(situation, call) and _has_all_states(situation),
        "distributed-checkpoint", _FORMS, _saved,
    ),
    "save_model": CallKind(
        lambda situation, call: _is_sent(situation, call) and not situation.waiting,
        "distributed-checkpoint", _FORMS, _saved,
    ),
    "load": CallKind(
        lambda situation, call: situation.is_at_rest and situation.saved is not None and situation.frozen is None,
        "distributed-checkpoint", leads=_loaded,
    ),
    # Full parameters.
    "unshard": CallKind(_at_rest, _UNITS, leads=_asked),
    "reshard": CallKind(_not_waiting, _UNITS, leads=_resharded),
    "read_units": CallKind(_at_rest, _UNITS, leads=_gathered_and_resharded),
    "read": CallKind(_at_rest, _WRAPPERS, {"": "", "first-rank": ""}, _read),
    "read_gradients": CallKind(_has_gradients, _WRAPPERS),
    "write": CallKind(_at_rest, _WRAPPERS, {"kept": "", "dropped": ""}, _read),
    # What user code does to parameters and gradients.
    "scale_parameters": CallKind(_not_waiting),
    "scale_gradients": CallKind(_has_gradients),
    "replace_gradient": CallKind(
        _has_gradients, choices={"drop": "", "set": "", "double": ""}, leads=_replaced, has_places=True
    ),
    "freeze": CallKind(
        lambda situation, call: situation.is_at_rest and situation.frozen is None and not situation.has_gradients,
        "unused-output", {"held": "", "shown": ""}, _froze, has_places=True,
    ),
    "thaw": CallKind(
        lambda situation, call: situation.is_at_rest and situation.frozen is not None,
        "unused-output", {"held": "", "shown": ""}, _thawed,
    ),
    "new_optimizer": CallKind(_at_rest, leads=_dropped_states),
    "rate": CallKind(_not_waiting, choices={"half": "", "double": ""}),
    # Modules.
    "mode": CallKind(_not_waiting, choices={"eval": "", "train": ""}),
    "convert": CallKind(_at_rest, choices={"dtype": "", "device": ""}),
    "cast": CallKind(
        lambda situation, call: not situation.has_run and not situation.is_double and not situation.asked,
        "cast-after-init", leads=_cast,
    ),
    "hook": CallKind(_not_waiting, choices={"set": "", "remove": ""}, has_places=True),
    # Settings of units.
    "prefetch": CallKind(_not_waiting, "explicit-prefetch", {"next": "", "previous": "", "none": ""}),
    "reshard_after_forward": CallKind(_at_rest, "unit-settings", {"yes": "", "no": ""}),
    "divide": CallKind(_at_rest, "unit-settings gradient_divide_factors", {"2": "", "4": ""}),
    "recover": CallKind(_always, "recovery fsdp2-api", leads=_recovered),
}  # fmt: skip


def places(program: Program) -> int:
    """Return how many units there are, the root's own included."""
    return len(program.plan.units()) + 1


def needs_of_program(program: Program, *, world_size: int) -> frozenset[str]:
    """Return the capabilities without which an implementation cannot make the calls of a program."""
    needed = {
        Capability.OWN_OPTIMIZER: True,
        Capability.TIED_PARAMETERS: any(part.kind == "tied" for part in program.plan.parts()),
        Capability.HYBRID: program.replicas,
        Capability.SINGLE_RANK: program.replicas == world_size,
        Capability.RESHARD_AFTER_FORWARD: program.reshard_after_forward is not None,
        Capability.DEFERRED_REDUCTION: program.keeps_unsharded,
        "accumulation.reshard_after_backward": program.keeps_unsharded,
        Capability.ADAM: program.optimizer == "adam",
    }
    own = frozenset(capability for capability, is_needed in needed.items() if is_needed)
    return own.union(*(KINDS[call.kind].needs_of(call.how) for call in program.calls))


def accumulation_of(program: Program, capabilities: frozenset[str]) -> Accumulation | None:
    """Return what backwards may defer, for an implementation with these capabilities."""
    if Capability.DEFERRED_REDUCTION not in capabilities:
        return None
    return Accumulation(reshard_after_backward=not program.keeps_unsharded)


# What findings say is wrong: left out by what it is.


@dataclasses.dataclass(frozen=True)
class Wrong:
    """Calls that implementations are known to get wrong, which name the finding (:attr:`Traits.wrong_calls`).

    Attributes:
        finding: its id.
        when: whether a call is wrong in a situation.
        mended_in: the release of torch that has no such error; empty if none is known.
    """

    finding: str
    when: Callable[[Situation, Call], bool]
    mended_in: str = ""

    def holds(self, torch_version: str) -> bool:
        """Whether the error is there with this torch."""
        return not self.mended_in or Version(torch_version).release < Version(self.mended_in).release


#: Calls that write to parameters.
_WRITES = frozenset({"step", "load", "write", "scale_parameters", "cast"})
#: Calls that change gradients.
_OF_GRADIENTS = frozenset({"zero_grad", "clip", "scale_gradients", "replace_gradient"})


@functools.cache
def _has_empty_shards(plan: Plan, shards: int) -> bool:
    """Whether a rank has no row of a parameter."""
    return any(parameter.shape[0] < shards for parameter in DrawnModel(plan).parameters())


WRONG: tuple[Wrong, ...] = (
    Wrong(
        "F-2",
        lambda situation, call: call.kind == "clip" and _has_empty_shards(situation.program.plan, 4),
    ),
    Wrong(
        "F-25",
        lambda situation, call: not situation.has_run and call == Call("evaluate", "inference_mode"),
    ),
    Wrong("F-29", lambda situation, call: situation.left and call.kind in _WRITES),
    Wrong("F-31", lambda situation, call: call.kind == "clip" and situation.is_double),
    Wrong("F-36", lambda situation, call: call.kind == "clip" and situation.frozen is not None),
    Wrong("F-39", lambda situation, call: call.kind == "divide"),
    Wrong("F-45", lambda situation, call: call == Call("write", "dropped") and situation.left),
    Wrong("F-46", lambda situation, call: situation.asked and call.kind in _WRITES),
    Wrong("F-70", lambda situation, call: call.kind == "recover" and situation.defers, "2.15"),
    Wrong("F-180", lambda situation, call: call.kind == "cast" and situation.has_gathered),
    Wrong("F-201", lambda situation, call: situation.left and call.kind in ("freeze", "thaw")),
    Wrong("F-243", lambda situation, call: call.kind == "recover" and not situation.has_run),
    Wrong("F-422", lambda situation, call: situation.dropped and call.kind in ("freeze", "thaw")),
    Wrong("F-423", lambda situation, call: "set" in situation.replaced and call.kind == "clip"),
    Wrong("F-424", lambda situation, call: "drop" in situation.replaced and call.kind == "read_gradients"),
    Wrong(
        "F-426",
        lambda situation, call: call.kind == "cast" and (situation.has_gathered or situation.saved is not None),
    ),
    Wrong("F-425", lambda situation, call: bool(situation.replaced) and call.kind == "convert"),
    Wrong(
        "F-396",
        lambda situation, call: call.kind in _OF_GRADIENTS and situation.program.reshard_after_forward is False
        and (situation.left or bool(situation.waiting)),
    ),
    Wrong("F-405", lambda situation, call: situation.asked and call.kind == "reshard"),
)  # fmt: skip


def playable(program: Program, wrong_calls: Collection[str], *, torch_version: str) -> Program:
    """Return the program without the calls that are not legal where they stand, or that these findings are about."""
    wrong = [one for one in WRONG if one.finding in wrong_calls and one.holds(torch_version)]

    def kept(situation: Situation) -> Iterator[Call]:
        for call in program.calls:
            if situation.allows(call) and not any(one.when(situation, call) for one in wrong):
                situation.take(call)
                yield call

    return dataclasses.replace(program, calls=tuple(kept(Situation(program))))
