"""The calls of a training that a case has made on one rank, which the text of an exception lists.

A comparison names the step, the microbatch and the phase in which a run diverges; an exception has a traceback, whose
frames are the same in each step. What a shape is wrong for may have happened calls before: a unit that was never
resharded fails in a forward, with an error of torch.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardproof.alike import CALLS
from shardproof.harness.adapters.base import Adapter
from shardproof.harness.judging.finding import Location, Stage

#: The methods of an adapter that change what it holds, or gather it.
_ACTS = (
    "forward", "backward", "clip", "clip_parameters", "step", "zero_grad", "reshard", "unshard", "summon_full_params",
    "prefetch", "register_forward_method", "after_step", "change", "register_comm_hook", "recover", "checkpoint",
    "restore", "save_own", "load_own", "legacy_optim_state_dict", "load_legacy_optim_state_dict",
)  # fmt: skip
#: Those that read it: they are listed only if they raise.
_READS = (
    "gradients", "parameters", "optimizer_state", "norm_value", "norm_after_step", "registered", "gathered",
    "own_gradients", "consolidated",
)  # fmt: skip

_MOST_STEPS = 4  # that are listed, the last ones
_MOST_CALLS = 12  # of a step that are listed, the last ones

#: The attribute of an exception that says in which call it was raised.
_MARK = "_shardproof_call"


@dataclasses.dataclass(frozen=True)
class AdapterCall:
    """One call: of an adapter's method, or a phase of a step, with what the case does in it, such as the loss.

    Attributes:
        name: the method, or the phase: "forward", "backward", "clip", "step" or "evaluation".
        step: the step, counted from 0.
        microbatch: its number in the step; None of calls that belong to none.
        given: the arguments that are no tensors, as in "(waits=True)".
    """

    name: str
    step: int
    microbatch: int | None = None
    given: str = ""

    def location(self, rank: int) -> Location:
        """Return where an exception of this call was raised."""
        name = None if self.microbatch is None else f"microbatch {self.microbatch}"
        return Location(stage=Stage.EXCEPTION, phase=self.name, step=self.step, rank=rank, name=name)


class Course:
    """The last calls of one model's training, in order: as many as are listed, however long it trains.

    A step begins with its first forward, evaluation included, and ends with the optimizer step, or where gradients are
    zeroed after a backward without one.

    Attributes:
        implementation: the name of the implementation that trains.
        look: says what a rank has gathered so far, for an exception in a forward; may return "".
    """

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self.look: Callable[[], str] = str
        # Those of the step under way; steps before it are lines already, with their first and last number.
        self._calls: collections.deque[AdapterCall] = collections.deque(maxlen=_MOST_CALLS + 1)
        self._microbatches: collections.Counter[str] = collections.Counter()
        self._steps: list[tuple[int, int, str]] = []
        self._has_more = False
        self._step = 0
        self._is_over = False
        self._is_within = False

    @contextlib.contextmanager
    def during(self, name: str, given: str = "") -> Iterator[None]:
        """Note a call for as long as the context lasts, unless it is made within another one."""
        if self._is_within:
            yield
            return
        call = self._begin(name, given)
        self._is_within = True
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(AttributeError):  # an exception with slots
                setattr(error, _MARK, (self, call, self.look() if name in ("forward", "evaluation") else ""))
            raise
        finally:
            self._is_within = False
        if name not in _READS:
            self._calls.append(call)
            self._microbatches[name] += call.microbatch is not None
        if name == "step" or (name == "zero_grad" and self._microbatches["backward"]):
            self._is_over = True

    def note(self, name: str, given: str = "") -> None:
        """Note a call that returns a context, in which further calls are made."""
        with self.during(name, given):
            pass

    def _begin(self, name: str, given: str) -> AdapterCall:
        trains = name == "forward" and torch.is_grad_enabled() and not given
        if name in ("forward", "evaluation") and self._is_over:
            self._steps, self._has_more = self._listed_steps()
            self._calls.clear()
            self._microbatches.clear()
            self._step, self._is_over = self._step + 1, False
        counts = trains or name == "backward"
        return AdapterCall(name, self._step, self._microbatches[name] if counts else None, given)

    def listed(self) -> str:
        """List the calls that have ended, in one line; nothing if there were none."""
        steps, has_more = self._listed_steps()
        lines = [f"{_numbered(first, last)}: {text}" for first, last, text in steps]
        return "; ".join([*(["..."] if has_more else []), *lines])

    def _listed_steps(self) -> tuple[list[tuple[int, int, str]], bool]:
        """Return the lines of the last steps, the one under way included, and whether there were others before."""
        steps, text = list(self._steps), _listed(list(self._calls))
        if steps and steps[-1][2] == text:
            steps[-1] = (steps[-1][0], self._step, text)
        elif self._calls:
            steps.append((self._step, self._step, text))
        return steps[-_MOST_STEPS:], self._has_more or len(steps) > _MOST_STEPS


def _listed(calls: Sequence[AdapterCall]) -> str:
    named = [f"{one.name}{one.given}" for one in calls]
    return ", ".join([*(["..."] if len(named) > _MOST_CALLS else []), *named[-_MOST_CALLS:]])


def _numbered(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}-{last}, each"


def follow(adapter: Adapter, course: Course) -> None:
    """Note the calls of an adapter's methods from here on, whoever makes them."""
    kind = _followed(type(adapter))
    # A class with slots of its own may refuse: then a run alone notes what it calls.
    with contextlib.suppress(TypeError):
        adapter.__class__ = kind
        vars(adapter)["course_of_calls"] = course


@functools.cache
def _followed(kind: type[Adapter]) -> type[Adapter]:
    """Return a class like an adapter's, whose methods note that they are called."""
    methods = {name: _noting(name, getattr(kind, name)) for name in (*_ACTS, *_READS) if hasattr(kind, name)}
    make: Any = type(kind)
    made: type[Adapter] = make(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})
    return made


def _noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if name == "summon_full_params":  # a context

        @functools.wraps(method)
        def noted(adapter: Any, *args: Any, **kwargs: Any) -> Any:
            adapter.course_of_calls.note(name)
            return method(adapter, *args, **kwargs)

    else:

        @functools.wraps(method)
        def noted(adapter: Any, *args: Any, **kwargs: Any) -> Any:
            with adapter.course_of_calls.during(name, _given(kwargs)):
                return method(adapter, *args, **kwargs)

    return noted


def _given(kwargs: dict[str, Any]) -> str:
    """The arguments that say what a call is about: names and flags that are set."""
    told = {name: value for name, value in kwargs.items() if isinstance(value, str | bool) and value}
    told.pop("set_to_none", None)
    return f"({', '.join(f'{name}={value!r}' for name, value in told.items())})" if told else ""


def told(error: BaseException, courses: Sequence[Course], *, rank: int) -> tuple[Location | None, str]:
    """Return where an exception was raised, if in a call, and what the case had called before, in lines.

    Args:
        error: the exception.
        courses: those of the case, in the order in which their models were made.
        rank: this rank.
    """
    found = _mark_of(error)
    if found is None:
        before = next((one for one in reversed(courses) if one.listed()), None)
        return None, f"\n{CALLS} of {before.implementation}: {before.listed()}" if before is not None else ""
    course, call, looked = found
    location = call.location(rank)
    whose = "" if course is courses[0] else f", of {course.implementation}"
    lines = [f"{dataclasses.replace(location, rank=None)}{whose}", *filter(None, [looked])]
    if listed := course.listed():
        lines.append(f"{CALLS} of {course.implementation}: {listed}")
    return location, "".join(f"\n{line}" for line in lines)


def _mark_of(error: BaseException | None) -> tuple[Course, AdapterCall, str] | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if (found := getattr(error, _MARK, None)) is not None:
            mark: tuple[Course, AdapterCall, str] = found
            return mark
        error = error.__cause__ or error.__context__
    return None
