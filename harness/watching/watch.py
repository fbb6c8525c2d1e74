"""Attaches to a model, sees its steps by hooks alone, and makes a record of each.

Own gradients: what a module finds under the name of a parameter when its forward begins is where autograd puts the
gradient of this rank alone, before anything is reduced; a hook of that tensor digests it. Reduced gradients are read
from ``.grad`` when a backward pass has ended, and again when the optimizer's step begins: what lies between is clipping
and scaling. Digests are computed on the stream and on the device where a gradient appears, and are copied to the host
when the step has ended, so that nothing is waited for; but where user code clears gradients without a step, whether
they are gone is read at once (``left``).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardproof.harness.collectives.trace import Collective, Trace
from shardproof.harness.tensors import fingerprints, private
from shardproof.harness.tensors.fingerprints import Box, bits_of_all, host_rows, on_host
from shardproof.harness.tensors.layouts import Layout, layout_of
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.verdicts.finding import Stage
from shardproof.harness.watching import calls
from shardproof.harness.watching.engines import Engine, is_engine
from shardproof.harness.watching.events import Event, Sink
from shardproof.harness.watching.gathered import Gathered
from shardproof.harness.watching.hooks import Hook, before_others, guarded
from shardproof.harness.watching.left import Left, Seen
from shardproof.harness.watching.names import (
    device_of,
    inner_of,
    is_compiled,
    is_its_own,
    is_view,
    modules_of,
    name_of,
    number_of,
    parameters_of,
    readable_of,
    switched_off,
    tied_in,
    untransformed,
    without_turn,
)
from shardproof.harness.watching.optimizers import resting_of, seen_of, state_of
from shardproof.harness.watching.pending import OwnGradients, Pending, digest, last_number, ordered, readable
from shardproof.harness.watching.records import (
    Drop,
    Gradient,
    NormCall,
    NotFinite,
    Optimizer,
    Parameter,
    StepRecord,
)

LayoutOf = Callable[[str, torch.Tensor], Layout | None]
"""Tells where the elements of a parameter or a gradient belong, from its name and the tensor, or returns None."""

#: Tensors with a NaN that a record lists; the first is what matters.
_MOST_NOT_FINITE = 8


class Watch:
    """Watches one model, which may be several roots, on one rank.

    Args:
        on_end: is called with the record of each step when the step has ended: when the next one begins, or by
            :meth:`end_step`.
        steps: the steps to watch, counted from 0; of the others nothing is seen. After the last of them the watch
            detaches by itself.
        optimizers: those whose steps count; empty for each that steps.
        layout: where a tensor does not say it itself.
        on_error: takes an error of ours in a hook; nothing of it reaches the training.
        passes: exceptions of ``on_end`` that do.
        sink: takes each tensor of a watched step; see ``events``.
        modules: whether it takes the outputs of modules and their gradients as well.
        digests: whether records have digests of gradients and bits of parameters and states, which cost time.
        on_drop: is called where a rank goes on without the gradients of backward passes, of which no optimizer has
            stepped, with their number: before a forward or a backward, or where a scaler skips the optimizer's step.
    """

    def __init__(
        self,
        on_end: Callable[[StepRecord], None],
        *,
        steps: Collection[int],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        layout: LayoutOf | None = None,
        on_error: Callable[[Exception], None],
        passes: tuple[type[Exception], ...] = (),
        sink: Sink | None = None,
        modules: bool = False,
        digests: bool = True,
        on_drop: Callable[[int], None] | None = None,
    ) -> None:
        self._on_drop = on_drop
        self._on_error, self._passes = on_error, passes
        self._sink, self._sees_modules, self._makes_digests = sink, modules and sink is not None, digests
        self._on_end, self._steps, self._layout = on_end, frozenset(steps), layout
        self._optimizers = [weakref.ref(one) for one in optimizers]
        self.step = 0
        self.roots: list[nn.Module] = []
        self.flat_places: dict[str, tuple[int, int]] = {}
        self._names: dict[int, str] = {}  # canonical names of modules
        self._uncertain: set[int] = set()  # modules whose forward is compiled, and so is not seen
        self._handles: list[Any] = []
        self._on_tensors: list[Any] = []
        self._hooked: dict[int, weakref.ref[torch.Tensor]] = {}
        self._gathered = Gathered()
        self._shapes: dict[str, torch.Size] = {}
        self._ties: dict[int, set[str]] = {}
        self._engine: Engine | None = None
        self._depth = 0
        #: The optimizers in whose step we are, and how many had stepped when it began.
        self._stepping: list[tuple[int, int]] = []
        #: How often the closure was called that the step of an optimizer was given.
        self._evaluations = 0
        self._is_in_closure = self._is_training = False
        #: Those that have ended inside of another's step.
        self._ended: list[torch.optim.Optimizer] = []
        self._late = False
        #: The optimizers that have stepped and have none of the parameters of the roots: the names of their classes,
        #: with the last step in which each did, and whether the process groups were destroyed by then.
        self.strangers: dict[str, tuple[int, bool]] = {}
        self._are_destroyed = False
        self._patches = contextlib.ExitStack()
        self._unseen: set[str] = set()
        self._last = ""
        self._zeroed, self._zeroed_since = list[int](), list[int]()
        self._begin()

    # Attaching ------------------------------------------------------------------------------

    def watch_optimizers(self) -> None:
        """See the steps of optimizers, also before there is a root: the first forward may be in a closure of one."""
        if not self._handles:
            self._handles += [
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
            ]

    def attach(self, root: nn.Module) -> None:
        """Add a root: hooks on all its modules; the first root's also begin steps."""
        if not self.roots:
            self.watch_optimizers()
            self._patches.enter_context(calls.observed(self))
        self.roots.append(root)
        if is_engine(root):
            self._engine = Engine(root)
            self._unseen.add(f"what {type(root).__name__} does to gradients in its step, where it clips them")
        for name, module in modules_of(root):
            if is_compiled(module):
                self._unseen.add(f"inside of {name or 'the model'}: it is compiled")
        compiled = {id(inner) for _, module in modules_of(root) if is_compiled(module) for inner in module.modules()}
        once: set[int] = set()
        for name, module in modules_of(root):
            self._names.setdefault(id(module), name)
            if id(module) in compiled:
                self._uncertain.add(id(module))
            if id(module) in compiled - {id(root)} or id(module) in once:
                continue
            once.add(id(module))
            # Last of all hooks: the implementation has gathered by then, and has not freed yet what it will.
            before = Hook(functools.partial(self._before_module, name, module is root))
            after = Hook(functools.partial(self._after_module, name, module is root))
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def detach(self) -> None:
        """Remove all hooks and forget everything."""
        for handle in [*self._handles, *self._on_tensors]:
            handle.remove()
        self._patches.close()
        for seen in (self._handles, self._on_tensors, self._hooked, self._gathered):
            seen.clear()
        fingerprints.forget()

    def forget_roots(self) -> None:
        """Forget the roots, and what was seen of them; others take their place."""
        self.detach()
        self.roots.clear()
        for seen in (self._names, self._uncertain, self._shapes, self._unseen):
            seen.clear()
        self._engine, self._depth, self._late = None, 0, False
        self._begin()

    @property
    def has_computed(self) -> bool:
        """Whether there was a backward pass of a root, or a step."""
        return bool(self._own or self._is_backward or self._backwards or self._stepped or self.step)

    @property
    def is_attached(self) -> bool:
        """Whether there are hooks of a root."""
        return bool(self._handles and self.roots)

    @property
    def is_watching(self) -> bool:
        """Whether the current step is one of those to watch."""
        return self.step in self._steps

    @property
    def last(self) -> str:
        """The last event that was watched; empty if there is none."""
        return self._last

    @property
    def counts(self) -> tuple[int, int]:
        """How many forwards and steps of optimizers there were in the current step."""
        return self._forwards, len(self._stepped)

    def know(self, shapes: Mapping[str, torch.Size], flat_places: dict[str, tuple[int, int]]) -> None:
        """Take the full shapes of parameters, and where the rank's parts of those in flat ones begin."""
        self._shapes |= shapes
        self.flat_places = flat_places

    def note_norm(self, value: Any, max_norm: float | None) -> None:
        """Note a total norm that user code has computed."""
        self.on_norm("clip_grads_with_norm_", value, max_norm, 2.0)

    def begin_forward(self, root: nn.Module, args: Any) -> None:
        """Begin the forward of a root in which it was attached; its arguments by keyword are not known."""
        # What the root has itself is gathered by hooks that have not run yet.
        self._late = True
        self._before_module("", True, root, args, {})

    # A step ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._own = OwnGradients()
        self._after_backward: dict[str, Pending] = {}
        self._at_step: dict[str, Pending] = {}
        self._unplaced: set[str] = set()
        self._held: dict[str, dict[str, Any]] = {}
        self._stepped: list[Optimizer] = []
        self._norms: list[tuple[str, Any, float | None, float]] = []
        self._tokens: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._are_means: list[bool] = []
        self._norm: Any = None
        self._norm_calls = 0
        self._calls: collections.Counter[str] = collections.Counter()
        self._batches: list[list[torch.Tensor]] = []
        self._read: list[int] = []
        self._rows: list[int] = []
        self._drops: list[Drop] = []
        self._left, self._dropped = Left(), Seen()
        #: By module that was called, whether it was with gradients enabled.
        self._called: dict[int, bool] = {}
        self._asks: list[bool] = []
        #: How many backward passes there had been when another model's optimizer stepped, and when one began after it.
        self._for_others = self._leaks = 0
        self._divided: list[torch.Tensor | None] = []
        self._off: list[tuple[str, ...]] = []
        self._collectives = Trace()
        self._clipped_scaled = False
        self._finite: list[tuple[str, torch.Tensor | Pending]] = []
        self._output: tuple[Callable[[], torch.Tensor | None], int] = (lambda: None, 0)
        self._forwards = self._backwards = 0
        self._is_backward = self._is_late = self._wants_batch = self._is_engine_step = False
        self._ends_in_step = self._engine is not None
        self._autocast = ""
        self._started = time.monotonic()

    def end_step(self) -> None:
        """End the step, if an optimizer has stepped in it, and hand its record on."""
        if not self._stepped:
            return
        record = None
        if self.is_watching:
            self._take_drops(is_last=True)
            record = self._record() if self.is_attached else None  # another rank has stepped where this one has not
        self.step += 1
        self._zeroed, self._zeroed_since = self._zeroed_since, []
        self._begin()
        self._stepping = [(one, 0) for one, _ in self._stepping]  # the closure of an optimizer has begun the next step
        if record is not None:
            self._on_end(record)
        if self.step > max(self._steps):
            self.detach()

    def forget(self) -> None:
        """Begin the step anew: what was seen of it counts for nothing, as when a scaler skips the optimizer's step."""
        if self._stepped:
            return
        count = self._backwards if self.is_watching else 0
        self._begin()
        if count and self._on_drop is not None:
            self._on_drop(count)

    # Hooks ----------------------------------------------------------------------------------

    @guarded
    def _before_module(self, name: str, is_root: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_root:
            self._depth += 1
            if self._depth == 1:
                self._is_training = torch.is_grad_enabled()
            if self._depth == 1 and self._is_training:
                if self._stepped:
                    self.end_step()
                if not self.is_attached:
                    return
                if self.is_watching:
                    if not self._forwards:
                        # Before the step computes anything, because what is copied to a device is waited for.
                        for _, parameter in self.parameters():
                            fingerprints.prepare(parameter.shape, local_of(parameter).device)
                    self._note_drop()
                    if not self.is_attached:  # another rank has stepped where this one has not
                        return
                    self._forwards += 1
                    self._calls.clear()
                    self._take_batch((args, kwargs))
                    self._off.append(tuple(name for root in self.roots for name in switched_off(root)))
        if self._is_training and self.is_watching:
            self._called[id(module)] = torch.is_grad_enabled() or self._called.get(id(module), False)
        if not self.is_watching or not torch.is_grad_enabled():
            return
        if is_root and self._late:
            return
        if self._late:
            self._late = False
            for root in self.roots:
                self._watch_parameters("", root)
        if self._wants_batch and not is_root:
            self._take_batch((args, kwargs))
        if len(self._divided) < self._forwards:
            self._take_divided((args, kwargs))
        if self._sink is not None and torch.is_autocast_enabled(device := device_of(args)):
            self._autocast = name_of(torch.get_autocast_dtype(device))
        self._last = f"forward of {name or 'the model'!r}"
        self._watch_parameters(name, module)
        # Lists of parameters have no forward, and attention uses its projection without calling it.
        for last, child in module._modules.items():
            if child is not None and not child._modules and not isinstance(child, FSDPModule):
                self._watch_parameters(f"{name}.{last}" if name else last, child)

    @guarded
    def _after_module(self, name: str, is_root: bool, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_root:
            self._depth -= 1
            if self._late and self.is_watching and torch.is_grad_enabled():  # it has no module that began after it
                self._late = False
                self._watch_parameters(name, module)
        if self.is_watching and torch.is_grad_enabled():
            for tensor in readable_of(output):
                self._note_output(f"output of {name or 'the model'!r}", tensor)
            # A wrapper returns what its module returns; outside of a forward of the root modules compute once more.
            if self._sees_modules and (is_root or self._depth) and inner_of(module) is None:
                self._emit_outputs(name, output)

    @torch.no_grad()
    def _note_drop(self) -> None:
        """Before a forward or a backward: note whether the gradients of earlier ones are gone, and what they were for.

        Of a loop that clears them between the two, the second sees it.
        """
        if not self._makes_digests or self._engine is not None:
            return
        is_of_input = any(asks for asks, read in zip(self._asks, self._read, strict=True) if read < self._backwards)
        drop = Drop(self._backwards, is_of_input or self._for_others > 0 or self._evaluations > 1)
        seen = Seen(len(self._finite), len(self._norms), len(self._tokens))
        is_cleared = self._backwards in self._zeroed
        self._left.begin(self.parameters(), drop, seen, after=self._after_backward.values(), is_cleared=is_cleared)
        self._take_drops()

    @torch.no_grad()
    def _take_drops(self, *, is_last: bool = False) -> None:
        for drop, seen in self._left.gone(is_last=is_last):
            self._drops.append(drop)
            self._dropped = seen
            self._for_others *= self._for_others > drop.backwards
            self._leaks *= self._leaks > drop.backwards
            if self._backwards == drop.backwards:
                self._after_backward.clear()
            if not drop.is_meant and self._on_drop is not None:
                self._on_drop(drop.backwards)

    def _emit_outputs(self, name: str, output: Any) -> None:
        number, self._calls[name] = self._calls[name], self._calls[name] + 1
        floating = [tensor for tensor in readable_of(output) if tensor.is_floating_point()]
        for index, tensor in enumerate(floating):
            place = layout_of(tensor) if isinstance(tensor, DTensor) else None
            event = Event(Stage.MODULE_OUTPUT, name, "", self._forwards - 1, number, index, place)
            self._emit(event, tensor)
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._on_output_gradient, event))

    @guarded
    def _on_output_gradient(self, output: Event, gradient: torch.Tensor) -> None:
        if self.is_watching and not self._stepped:
            place = layout_of(gradient) if isinstance(gradient, DTensor) else None
            self._emit(dataclasses.replace(output, stage=Stage.OUTPUT_GRADIENT, layout=place), gradient)

    @torch.no_grad()
    def _emit(self, event: Event, tensor: torch.Tensor) -> None:
        if self._sink is not None:
            self._sink(event, fingerprints.strided(local_of(tensor).detach()))

    def _watch_parameters(self, name: str, module: nn.Module) -> None:
        found: dict[str, torch.Tensor | None] = {
            last: value for last, one in module._parameters.items() if is_its_own(value := untransformed(one))
        }
        # Flat parameters put plain views where the parameters were.
        found |= {
            last: value
            for last, value in vars(module).items()
            if isinstance(value, torch.Tensor) and value.requires_grad and is_view(value)
        }
        for last, value in found.items():
            if value is None or not value.requires_grad:
                continue
            full = f"{name}.{last}" if name else last
            if value.is_leaf:  # a view may be invalid, even to ask, once what it is a view of has changed
                self._gathered.find(full, value)
            known = self._hooked.get(id(value))
            if known is not None and known() is value:
                continue
            self._hooked[id(value)] = weakref.ref(value)
            self._shapes.setdefault(full, value.shape)
            # Before hooks of user code, which may change it, and after them.
            hook = functools.partial(self._on_gradient, full, value.is_leaf)
            self._on_tensors += before_others(value, functools.partial(hook, True))
            self._on_tensors.append(value.register_hook(functools.partial(hook, False)))
            if value.is_leaf:
                hook = functools.partial(self._on_accumulated, full)
                self._on_tensors.append(value.register_post_accumulate_grad_hook(hook))

    @guarded
    @torch.no_grad()
    def _on_gradient(self, name: str, is_leaf: bool, is_given: bool, gradient: torch.Tensor) -> None:
        if not self.is_watching or self._stepped or untransformed(gradient) is not gradient:
            return
        if not self._is_backward:
            self._is_backward = True
            # Runs when this backward pass has ended, after the implementation's own callbacks.
            private.need("torch.autograd.Variable._execution_engine").queue_callback(self._on_backward_end)
        layout = (self._layout and self._layout(name, gradient)) or layout_of(gradient)
        self._last = f"backward of {name!r}"
        if (local := self._readable(name, gradient, layout)) is None:
            return
        if not is_given:
            self._emit(Event.of(Stage.OWN_GRADIENT, name, layout, self._backwards), local)
        if not self._makes_digests:
            return
        pending = self._own.add(name, self._backwards, local, layout, is_given=is_given, is_returned=is_leaf)
        if not is_given:
            self._finite.append((f"gradient of {name!r} before its reduction", pending))

    @guarded
    def _on_accumulated(self, name: str, _: torch.Tensor) -> None:
        if self.is_watching and not self._stepped:
            self._own.accumulate(name)

    @guarded
    @torch.no_grad()
    def _on_backward_end(self) -> None:
        if not self._is_late:
            # Once more: DDP queues what ends its reductions after this, when its last gradient is there.
            self._is_late = True
            private.need("torch.autograd.Variable._execution_engine").queue_callback(self._on_backward_end)
            return
        self._is_backward = self._is_late = False
        self._backwards += 1
        self._own.digest()
        if self._stepped:  # in this backward pass; its units reshard when it ends
            self._gathered.end(dict(self.parameters()))
        if self._engine is None:  # else they are read when it steps
            self._after_backward = self._gradients(Stage.GRADIENT)
            self._left.end_backward(self.parameters())

    @guarded
    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not self._counts(optimizer) or not (self.roots or callable(closure)):
            return None
        if not callable(closure) and self._is_of_others(optimizer):
            return None
        # One in another's step is what steps: torchtitan, for one, has a container of optimizers that is an Optimizer
        # itself. One that is here already has raised in its last step.
        self._stepping = [one for one in self._stepping if one[0] != id(optimizer)]
        is_nested = bool(self._stepping)
        self._stepping.append((id(optimizer), len(self._stepped)))
        if not self.is_watching:
            return None
        if not callable(closure):
            self._take_step(optimizer, is_nested)
            return None

        # As Lightning calls it: forward, backward and clipping are in the closure, and end with it.
        self._evaluations = 0

        @functools.wraps(closure)
        def watched(*inputs: Any) -> Any:
            self._evaluations += 1
            self._is_in_closure = True
            try:
                value = closure(*inputs)
            finally:
                self._is_in_closure = False
            if self.roots and not self._is_of_others(optimizer):
                self._take_step(optimizer, is_nested)
            return value

        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched}

    @guarded
    @torch.no_grad()
    def _take_step(self, optimizer: torch.optim.Optimizer, is_nested: bool) -> None:
        self._last = f"step of {type(optimizer).__name__}"
        if not is_nested:
            self._at_step |= self._gradients(Stage.CLIPPED_GRADIENT, of=optimizer)
        rates = {id(one): group.get("lr") for group in optimizer.param_groups for one in group["params"]}
        self._hold(rates, len(self._stepped))

    @guarded
    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._counts(optimizer):
            return
        stepped_before, is_with_closure = dict(self._stepping).get(id(optimizer)), self._evaluations > 0
        self._stepping = [one for one in self._stepping if one[0] != id(optimizer)]
        self._evaluations = 0
        if stepped_before is None or not self.roots or (is_with_closure and self._is_of_others(optimizer)):
            return
        with torch.no_grad():
            if len(self._stepped) == stepped_before:  # else others have stepped for it
                seen, outside = seen_of(optimizer, dict(self.parameters()), self.roots)
                self._stepped.append(seen)
                self._unseen |= outside
            self._ended.append(optimizer)
            if self._stepping:
                return  # what the outer one does after it belongs to the step, as ZeroRedundancyOptimizer broadcasts
            ended, self._ended = self._ended, []
            if self.is_watching:
                self._release_all(ended)
                if not self._is_backward:
                    self._gathered.end(dict(self.parameters()))
                if self._is_complete():
                    self._ends_in_step = True
                    self.end_step()

    def _release_all(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Read what a step has left: an inner optimizer's parameters and states, and the outer one's that are left."""
        done: set[int] = set()
        for optimizer in optimizers:
            mine = {id(one) for group in optimizer.param_groups for one in group["params"]} - done
            self._release(mine, functools.partial(state_of, optimizer))
            done |= mine

    @guarded
    def on_engine_step(self, engine: nn.Module) -> None:
        self._is_engine_step = self._engine is not None and self._engine.module is engine and self._engine.is_at_step
        if self._engine is not None and self._is_engine_step and self.is_watching:
            with torch.no_grad():
                self._last = f"step of {type(engine).__name__}"
                self._after_backward = self._gradients(Stage.GRADIENT)
                self._at_step = dict(self._after_backward)
                self._hold(dict.fromkeys((id(one) for _, one in self.parameters()), self._engine.rate), 0)

    @guarded
    def on_engine_stepped(self, engine: nn.Module) -> None:
        if self._engine is None or not self._is_engine_step:
            return
        if not self._engine.has_stepped:
            self.forget()
            return
        with torch.no_grad():
            if self.is_watching:
                self.on_norm("clip_grads_with_norm_", *self._engine.norm, 2.0)
                self._release({id(one) for _, one in self.parameters()}, self._engine.state)
            held = len(self._held)
            self._stepped.append(Optimizer(type(self._engine.base).__name__, held, held, shapes_agree=False))
        self.end_step()

    def _is_complete(self) -> bool:
        """Whether no other optimizer can belong to the step: each parameter that has or had a gradient is stepped."""
        if self._is_backward:  # those that follow may have none yet
            return False
        own = self._own.names  # one whose gradient is dropped may be stepped by another rank, and be sent after that
        names = {name for name, parameter in self.parameters() if parameter.grad is not None or name in own}
        return bool(names) and names <= self._held.keys()

    def _is_of_others(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer steps parameters of another model alone, as a generator's does; note that it has."""
        mine = [one for group in optimizer.param_groups for one in group["params"]]
        live = {id(one) for _, one in self.parameters()}
        is_it = not any(id(one) in live for one in mine) and any(one.grad is not None for one in mine)
        self._for_others = self._backwards if is_it else self._for_others
        self.strangers |= {type(optimizer).__name__: (self.step, self._are_destroyed)} if is_it else {}
        return is_it

    def _counts(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._engine is not None:
            return False
        return not self._optimizers or bool(self._stepping) or any(one() is optimizer for one in self._optimizers)

    @guarded
    def on_norm(self, function: str, value: Any, max_norm: float | None, norm_type: float) -> None:
        if self.is_watching and not self._stepped:
            if value is not self._norm:  # what was computed is clipped by
                self._emit_norm(value)
            self._norm = value
            value = value.detach().clone() if isinstance(value, torch.Tensor) else value
            self._norms.append((function, value, max_norm, norm_type))

    def _emit_norm(self, value: Any) -> None:
        place = layout_of(value) if isinstance(value, DTensor) else Layout(Box(()))
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        self._emit(Event(Stage.TOTAL_NORM, "", "", 0, self._norm_calls, 0, place), tensor)
        self._norm_calls += 1

    @guarded
    def on_backward(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.is_watching and not self._stepped:
            scalars = [one for one in tensors if isinstance(one, torch.Tensor) and one.numel() == 1]
            if self._forwards or self._finite:  # else it is of another model, and nothing of it is kept
                self._note_drop()
            self._leaks = self._leaks or (self._backwards if self._for_others else 0)
            for index, tensor in enumerate(scalars):
                place = layout_of(tensor) if isinstance(tensor, DTensor) else Layout(Box(()))
                self._emit(Event(Stage.LOSS, "", "", self._backwards, 0, index, place), tensor)

    @guarded
    def on_cross_entropy(self, value: torch.Tensor, target: torch.Tensor, options: dict[str, Any]) -> None:
        is_plain = all(type(one) is torch.Tensor and untransformed(one) is one for one in (value, target))
        is_number = value.ndim == 0 and value.requires_grad and not target.is_floating_point()
        if self.is_watching and not self._stepped and is_plain and is_number:
            count, tokens = (target != options.get("ignore_index", -100)).sum(), self._tokens
            self._are_means.append(options.get("reduction", "mean") == "mean")
            divisor = count if self._are_means[-1] else 1
            value.register_hook(lambda gradient: tokens.append((count, gradient.detach() / divisor)))

    @guarded
    def on_collective(self, collective: Collective) -> None:
        if self.is_watching and (self._stepping or not self._stepped):
            is_in_step = self._stepping and not self._is_in_closure
            phase = "backward" if self._is_backward else "forward" if self._depth else "between"
            phase = "step" if is_in_step else phase
            self._collectives.append(dataclasses.replace(collective, phase=phase))

    @guarded
    def on_zero_grad(self) -> None:
        if self._stepped:
            self._zeroed_since.append(0)  # of the next step, which has no backward pass yet
        else:
            self._zeroed.append(self._backwards)

    @guarded
    def on_unscale(self) -> None:
        self._clipped_scaled = self._clipped_scaled or any(
            limit is not None for _, _, limit, _ in self._norms[self._dropped.norms :]
        )

    @guarded
    def on_scaler_update(self) -> None:
        self.forget()

    @guarded
    def on_destroy(self) -> None:
        # Layouts and the exchange need the process groups.
        self.end_step()
        self._are_destroyed = True

    # Parts of a record ----------------------------------------------------------------------

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all roots by canonical name, each once, by its first name."""
        once: set[int] = set()
        for root in self.roots:
            for name, parameter in parameters_of(root):
                if id(parameter) not in once:
                    once.add(id(parameter))
                    yield name, parameter

    def place(self, name: str, tensor: torch.Tensor) -> Layout | None:
        """Return where the elements of a parameter or its gradient belong, or None where that is not known."""
        if self._layout is not None and (found := self._layout(name, tensor)) is not None:
            return found
        if name in self.flat_places:
            shape = self._shapes.get(name)
            start, full = self.flat_places[name]
            if shape is None or shape.numel() != full:
                return None
            if tensor.numel() == full:  # also what no_sync() has left: this rank's own gradient, which is not divided
                return Layout(Box(tuple(shape)))
            return Layout(Box(tuple(shape), flat=(start, start + tensor.numel())))
        return layout_of(tensor)

    def _gradients(self, stage: Stage, *, of: torch.optim.Optimizer | None = None) -> dict[str, Pending]:
        """Return the gradients; those of an optimizer's parameters are emitted, if one is given."""
        found = {}
        steps = None if of is None else {id(one) for group in of.param_groups for one in group["params"]}
        for name, parameter in self.parameters():
            gradient = parameter.grad if self._engine is None else self._engine.gradient(parameter)
            if gradient is None:
                continue
            layout = self.place(name, gradient)
            if steps is None or id(parameter) in steps:
                # What an engine does to it is not seen: its step finds what backward has left.
                for one in (stage,) if self._engine is None else (stage, Stage.CLIPPED_GRADIENT):
                    self._emit(Event.of(one, name, layout, max(self._backwards - 1, 0)), gradient)
            if not self._makes_digests:
                continue
            if layout is None:
                self._unplaced.add(name)
            elif (local := self._readable(name, gradient, layout)) is not None:
                found[name] = Pending(local, layout)
                if self._engine is not None:  # one whole gradient at a time
                    digest([found[name]])
        digest([one for one in found.values() if one.digest is None])
        return found

    def _hold(self, rates: Mapping[int, Any], number: int) -> None:
        mine = [(name, parameter) for name, parameter in self.parameters() if id(parameter) in rates]
        new = [(name, parameter) for name, parameter in mine if name not in self._held]
        for name, before in self._weights(new, Stage.INITIAL):
            self._held[name] = {"before": before, "state": {}}
        for name, parameter in mine:
            if name in self._held:
                rate = rates[id(parameter)]
                is_number = rate is not None and not isinstance(rate, torch.Tensor)
                self._held[name] |= {"optimizer": number, "lr": float(rate) if is_number else rate}

    def _release(self, mine: Collection[int], states: Callable[[nn.Parameter], dict[str, torch.Tensor]]) -> None:
        places: list[tuple[dict[str, Any], str]] = []
        tensors: list[torch.Tensor] = []
        stepped = {name: one for name, one in self.parameters() if name in self._held and id(one) in mine}
        for name, after in self._weights(list(stepped.items()), Stage.PARAMETER):
            self._held[name]["after"] = after
            own = states(stepped[name])
            for key, value in own.items() if self._sink is not None else ():
                place = self.place(name, value) if value.ndim else layout_of(value)
                self._emit(Event.of(Stage.OPTIMIZER_STATE, name, place, key=key), value)
            if self._makes_digests:
                places += [(self._held[name]["state"], key) for key in own]
                tensors += map(local_of, own.values())
        for (where, key), bits in zip(places, bits_of_all(tensors), strict=True):
            where[key] = bits

    def _weights(
        self, mine: Sequence[tuple[str, nn.Parameter]], stage: Stage
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Emit what the optimizer updates of parameters, and yield its bits, if there are digests."""
        if self._engine is None:
            bits: Sequence[torch.Tensor | None] = [None] * len(mine)
            if self._makes_digests:
                bits = bits_of_all([local_of(parameter) for _, parameter in mine])
            for (name, parameter), one in zip(mine, bits, strict=True):
                self._emit(Event.of(stage, name, self.place(name, parameter)), parameter)
                yield name, one
            return
        for name, parameter in mine:
            weights = self._engine.weights(parameter)
            if weights is None:
                continue
            self._emit(Event.of(stage, name, layout_of(weights)), weights)
            # Of both in one: what the model computes with, and what is moved, perhaps by less than the other shows.
            own, whole = bits_of_all([local_of(parameter), weights])
            yield name, own + 31 * whole

    def _readable(self, name: str, gradient: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        """Return the elements of a gradient, or None and note it."""
        if isinstance(found := readable(gradient, layout), str):
            self._unseen.add(f"the gradient of {name!r}, which is {found}")
            self._unplaced.add(name)
            return None
        return found

    def _note_output(self, what: str, tensor: torch.Tensor) -> None:
        if not self._makes_digests or not tensor.is_floating_point() or not tensor.numel():
            return
        last, version = self._output
        if last() is tensor and version == tensor._version:
            return  # what a container returns is what its last module has returned
        self._output = weakref.ref(tensor), tensor._version
        self._finite += [(what, one) for one in torch.aminmax(ordered(tensor))]

    def _take_batch(self, inputs: Any) -> None:
        found = list(readable_of(inputs))
        self._wants_batch = not found
        if not found:
            return
        self._batches.append([fingerprints.position_hash(local_of(tensor.detach())) for tensor in found])
        self._read.append(self._backwards)
        self._asks.append(any(tensor.requires_grad for tensor in found))
        self._rows.append(found[0].size(0) if found and found[0].ndim else 0)
        for index, tensor in enumerate(found):
            place = layout_of(tensor) if isinstance(tensor, DTensor) else None
            self._emit(Event(Stage.INPUT, "", "", self._forwards - 1, 0, index, place), tensor)

    def _take_divided(self, inputs: Any) -> None:
        """Take the first DTensor that a module of the forward is given, by which ranks compute parts of one model."""
        if (first := next((one for one in readable_of(inputs) if isinstance(one, DTensor)), None)) is not None:
            is_copy = all(placement.is_replicate() for placement in first.placements)
            self._divided.append(fingerprints.position_hash(local_of(first.detach())) if is_copy else None)

    def _record(self) -> StepRecord:
        self._own.digest()  # an optimizer may step in the middle of a backward
        record = StepRecord(
            0, self.step, forwards=self._forwards, backwards=self._backwards, rows=self._rows, off=self._off,
            zeroed=self._zeroed,
            optimizers=self._stepped, unseen=sorted(self._unseen), last=self._last,
            seconds=time.monotonic() - self._started,
        )  # fmt: skip
        hashes = iter(host_rows([one for batch in self._batches for one in batch]))
        record.batches = [sum((number + 1) * next(hashes) for number in range(len(one))) for one in self._batches]
        of_parts = iter(host_rows([one for one in self._divided if one is not None]))
        record.divided = [None if one is None else next(of_parts) for one in self._divided]
        pending = [(record.own, *one) for one in self._own.counted()]
        record.returned = sorted({name for _, name, _, one in pending if one.is_returned})
        pending += [(record.given, *one) for one in self._own.counted(is_given=True)]
        every = [one for *_, one in pending] + [*self._after_backward.values(), *self._at_step.values()]
        seen = [
            Gradient(one.layout.box, one.layout.pending, mark, one.dtype)
            for one, mark in zip(every, on_host([one.digest for one in every if one.digest is not None]), strict=True)
        ]
        for (to, name, number, _), gradient in zip(pending, seen, strict=False):
            to.setdefault(name, []).append((number, gradient))
        rest = seen[len(pending) :]
        record.after_backward = dict(zip(self._after_backward, rest, strict=False))
        record.at_step = dict(zip(self._at_step, rest[len(self._after_backward) :], strict=False))
        record.unplaced = sorted(self._unplaced)
        record.idle, record.detached = without_turn(self.roots, self._names.keys() - self._uncertain, self._called)
        dropped = [one for root in self.roots for one in root.modules() if isinstance(one, nn.Dropout)]
        record.has_dropout = any(one.training and one.p > 0 for one in dropped)
        record.parameters = self._parameters_held()
        finite, norms, tokens = self._dropped
        record.are_means = all(self._are_means)
        record.tokens = [(int(count), float(weight)) for count, weight in self._tokens[tokens:]]
        record.norms = [NormCall(name, number_of(one), limit, kind) for name, one, limit, kind in self._norms[norms:]]
        values = host_rows([last_number(one) for _, one in self._finite])
        is_wrong = [not math.isfinite(value) for value in values]
        # What is not finite is dropped for that reason, and is no gradient of this step.
        is_skipped = any(is_wrong[:finite])
        record.read, record.leaks = self._read, self._leaks > 0
        record.drops = [dataclasses.replace(one, is_meant=one.is_meant or is_skipped) for one in self._drops]
        found = [what for (what, _), bad in zip(self._finite, is_wrong, strict=True) if bad]
        wrong = list(dict.fromkeys(found[sum(is_wrong[:finite]) :]))[:_MOST_NOT_FINITE]
        record.not_finite = [NotFinite(order, what) for order, what in enumerate(wrong)]
        live = dict(self.parameters())
        record.resting = resting_of(live, self._held) if self._makes_digests and self._engine is None else {}
        record.gathered, record.outdated = self._gathered.names, self._gathered.take_outdated()
        if torch.accelerator.is_available():
            record.memory = torch.accelerator.memory_allocated()
        record.ties, record.clipped_scaled = self.tied(), self._clipped_scaled
        record.collectives, record.autocast = self._collectives, self._autocast
        return record

    def _parameters_held(self) -> dict[str, Parameter]:
        live = dict(self.parameters())
        names, tensors = [], []
        for name, held in self._held.items():
            for key, value in {"before": held["before"], "after": held.get("after"), **held.get("state", {})}.items():
                if value is not None:
                    names.append((name, key))
                    tensors.append(value)
        # What other ranks step, and send, has come when the step does not end with this rank's own optimizer.
        others = [
            (name, one)
            for name, one in live.items()
            if self._makes_digests and not self._ends_in_step and one.requires_grad and name not in self._held
        ]
        names += [(name, "after") for name, _ in others]
        tensors += bits_of_all([local_of(one) for _, one in others])
        bits = {key: tuple(row) for key, row in zip(names, host_rows(tensors), strict=True)}
        found = {}
        for name, parameter in live.items():
            place = self.place(name, parameter)
            held = self._held.get(name, {})
            rate = held.get("lr")
            before, after = bits.get((name, "before")), bits.get((name, "after"))
            own = fingerprints.strided(local_of(parameter))
            is_still = before is not None and before == after and own.is_floating_point() and own.numel() > 0
            found[name] = Parameter(
                box=None if place is None else place.box, mesh=() if place is None else place.mesh,
                trains=parameter.requires_grad, dtype=name_of(parameter.dtype), optimizer=held.get("optimizer"),
                lr=float(rate) if rate is not None else None, before=before, after=after,
                largest=float(ordered(own).abs().max()) if is_still else None,
                state={key: bits[name, key] for key in held.get("state", {})},
            )  # fmt: skip
        return found

    def tied(self) -> list[tuple[str, ...]]:
        """Return the sets of names that are one parameter."""
        return tied_in(self.roots)
