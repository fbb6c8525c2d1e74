"""Attaches to a model, sees its steps by hooks alone, and makes a record of each.

Own gradients: what a module finds under the name of a parameter when its forward begins is where autograd puts the
gradient of this rank alone, before anything is reduced; a hook of that tensor digests it. Reduced gradients are read
from ``.grad`` when a backward pass has ended, and again when the optimizer's step begins: what lies between is clipping
and scaling. Digests are computed on the stream and on the device where a gradient appears, and are copied to the host
when the step has ended, so that nothing is waited for; but where user code clears gradients without a step, whether
they are gone is read at once (``left``).

The hooks are here, and in which order they do what; what they see is kept in ``step``, one object for each step, and
``updates``; what is the model's, and stays from step to step, in ``model``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.harness.collectives.trace import Collective
from shardproof.harness.judging.finding import Stage
from shardproof.harness.tensors import fingerprints, private
from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.tensors.layouts import Layout, layout_of
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching import calls
from shardproof.harness.watching.hooks import Compiled, Hook, guarded
from shardproof.harness.watching.labels import compared
from shardproof.harness.watching.model import LayoutOf, Model
from shardproof.harness.watching.names import (
    device_of,
    inner_of,
    name_of,
    readable_of,
    switched_off,
    untransformed,
    unwrapped,
)
from shardproof.harness.watching.observation import Sink, Takes
from shardproof.harness.watching.optimizers import STEPS, parameters_in, parameters_of_optimizers, seen_of
from shardproof.harness.watching.records import Optimizer, StepRecord
from shardproof.harness.watching.roots import Family
from shardproof.harness.watching.step import WatchedStep
from shardproof.harness.watching.tensors import TensorHooks
from shardproof.harness.watching.updates import Nesting, Strangers, closure_of, with_closure


class _Forward:
    """Where the process is in the forward of a root.

    Attributes:
        depth: how many forwards of roots it is in.
        is_training: whether the outermost began with gradients enabled.
        is_late: whether the root was attached in it, so that what the root has itself is still to be found.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.is_training = self.is_late = False


class _Hooks:
    """All hooks of a watch.

    Attributes:
        tensors: those of tensors, where autograd puts gradients.
        handles: those of modules and optimizers.
        patches: replacements of torch's functions.
    """

    def __init__(self, tensors: TensorHooks) -> None:
        self.tensors = tensors
        self.handles: list[Any] = []
        self.patches = contextlib.ExitStack()

    def remove(self) -> None:
        """Remove them, and forget what was found with them."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.tensors.clear()
        self.patches.close()


class _Callbacks(NamedTuple):
    """The functions that a watch calls, of its arguments of these names."""

    on_end: Callable[[StepRecord], None]
    on_drop: Callable[[int], None]
    on_destroy: Callable[[], None]


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
        family: all watches of a loop; this one alone where it is left out.
        on_destroy: is called before all process groups are destroyed.

    Attributes:
        model: what is watched.
        family: all watches of the loop.
        step: the number of the current step.
        last: the last event that was watched; empty if there is none.
        is_stepped: whether an optimizer that has a parameter of it has stepped.
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
        family: Family | None = None,
        on_destroy: Callable[[], None] | None = None,
    ) -> None:
        self._calls = _Callbacks(on_end, on_drop or _nothing, on_destroy or _nothing)
        self.family = Family() if family is None else family
        self.family.add(self)
        self._on_error, self._passes = on_error, passes
        self._steps = frozenset(steps)
        self._takes = Takes(sink, modules and sink is not None, digests)
        self.model = Model(layout)
        self.step = 0
        self.last = ""
        self.is_stepped = False
        self._now = WatchedStep(self.model, self._takes, [])
        self._forward = _Forward()
        self._nesting = Nesting(optimizers)
        self._strangers = Strangers()
        self._hooks = _Hooks(TensorHooks(self._on_gradient, self._on_accumulated))

    # Attaching ------------------------------------------------------------------------------

    def watch_optimizers(self) -> None:
        """See the steps of optimizers, also before there is a root: the first forward may be in a closure of one."""
        if not self._hooks.handles:
            self._hooks.handles.append(STEPS.add(self._before_optimizer, self._after_optimizer))

    def attach(self, root: nn.Module) -> None:
        """Add a root: hooks on all its modules; the first root's also begin steps."""
        if not self.model.roots:
            self.watch_optimizers()
            self._hooks.patches.enter_context(calls.observed(self))
            if self.family.is_first(self):
                self.model.crossed = self.family.boundary.take
        for name, module in self.model.add(root, self.family.parameters(but=self)):
            # Last of all hooks: the implementation has gathered by then, and has not freed yet what it will.
            before = Hook(functools.partial(self._before_module, name, module is root))
            after = Hook(functools.partial(self._after_module, name, module is root))
            if module._compiled_call_impl is not None:
                self._hooks.handles.append(Compiled(module, before, after))
                continue
            self._hooks.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def detach(self) -> None:
        """Remove all hooks and forget everything."""
        self._hooks.remove()
        fingerprints.forget()

    def forget_roots(self) -> None:
        """Forget the roots, and what was seen of them; others take their place."""
        self.detach()
        self.model.forget()
        self._forward.depth, self._forward.is_late = 0, False
        self._begin(self._now.zeroed)

    def extend(self) -> None:
        """Watch one step more."""
        self._steps |= {self.step}

    def forget_strangers(self) -> None:
        """Forget which optimizers were none of a root: another root has come, whose some may be."""
        self._strangers.forget(self.model)

    @property
    def has_computed(self) -> bool:
        """Whether there was a backward pass of a root, or a step."""
        return self._now.has_computed or self.step > 0

    @property
    def is_attached(self) -> bool:
        """Whether there are hooks of a root."""
        return bool(self._hooks.handles and self.model.roots)

    @property
    def is_watching(self) -> bool:
        """Whether the current step is one of those to watch."""
        return self.step in self._steps

    @property
    def only(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose steps count; empty for each that steps."""
        return self._nesting.only

    @property
    def strangers(self) -> dict[str, tuple[int, bool]]:
        """The optimizers that have stepped without a parameter of the roots; see :class:`updates.Strangers`."""
        return self._strangers.steps

    @property
    def counts(self) -> tuple[int, int]:
        """How many forwards and steps of optimizers there were in the current step."""
        return self._now.forwards.count, len(self._nesting)

    def note_norm(self, value: Any, max_norm: float | None) -> None:
        """Note a total norm that user code has computed."""
        self.on_norm("clip_grads_with_norm_", value, max_norm, 2.0)

    def begin_forward(self, root: nn.Module, args: Any) -> None:
        """Begin the forward of a root in which it was attached; its arguments by keyword are not known."""
        # What the root has itself is gathered by hooks that have not run yet.
        self._forward.is_late = True
        self._before_module("", True, root, args, {})

    def end_forward(self, root: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """End the forward of a root in which it was attached, where no hook of it runs."""
        self._after_module("", True, root, args, kwargs, output)

    # A step ---------------------------------------------------------------------------------

    def _begin(self, zeroed: list[int]) -> None:
        self._now = WatchedStep(self.model, self._takes, zeroed)

    @property
    def _sees(self) -> bool:
        """Whether what happens belongs to a step to watch, of which no optimizer has stepped."""
        return self.is_watching and not self._now.has_stepped

    def end_step(self) -> None:
        """End the step, if an optimizer has stepped in it, and hand its record on."""
        if not self._now.has_stepped:
            return
        record = None
        if self.is_watching:
            self._take_drops(is_last=True)
            if self.is_attached:  # else another rank has stepped where this one has not
                record = self._now.record(self.step, self._hooks.tensors.gathered)
        self.step += 1
        self._begin(self._now.zeroed_since)
        self._nesting.begin_anew()
        if record is not None:
            self._calls.on_end(record)
        if self.step > max(self._steps):
            self.detach()

    def forget(self) -> None:
        """Begin the step anew: what was seen of it counts for nothing, as when a scaler skips the optimizer's step."""
        if self._now.has_stepped:
            return
        count = self._now.backwards.count if self.is_watching else 0
        self._begin(self._now.zeroed)
        if count:
            self._calls.on_drop(count)

    # Forward --------------------------------------------------------------------------------

    @guarded
    def _before_module(self, name: str, is_root: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_root and not self._begin_root((args, kwargs)):
            return
        if not self.is_watching:
            return
        if self._takes.digests:
            self._now.draws.begin(name, module, is_forward=self._forward.depth > 0 and self._forward.is_training)
        is_enabled, called = torch.is_grad_enabled(), self._now.forwards.called
        if self._forward.is_training:
            called[id(module)] = is_enabled or called.get(id(module), False)
        if is_enabled and not (is_root and self._forward.is_late):
            self._look_at(name, is_root, module, args, kwargs)

    def _begin_root(self, inputs: Any) -> bool:
        """Begin the forward of a root; whether it is still attached, is returned."""
        forward = self._forward
        forward.depth += 1
        if forward.depth > 1:
            return True
        forward.is_training = torch.is_grad_enabled()
        if not forward.is_training:
            return True
        self.end_step()
        if not self.is_attached or not self.is_watching:
            return self.is_attached
        if not self._now.forwards.count:
            # Before the step computes anything, because what is copied to a device is waited for.
            for _, parameter in self.model.parameters():
                fingerprints.prepare(parameter.shape, local_of(parameter).device)
            self._now.read_buffers()
        self._note_left()
        if not self.is_attached:  # another rank has stepped where this one has not
            return False
        self._now.forwards.begin()
        self._take_batch(inputs)
        self._now.forwards.off.append(tuple(name for root in self.model.roots for name in switched_off(root)))
        return True

    def _look_at(self, name: str, is_root: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        forwards = self._now.forwards
        if self._forward.is_late:
            self._forward.is_late = False
            for root in self.model.roots:
                self._hooks.tensors.find("", root, self.model)
        if forwards.wants_batch and not is_root:
            self._take_batch((args, kwargs))
        forwards.take_divided((args, kwargs))
        if self._takes.sink is not None and torch.is_autocast_enabled(device := device_of(args)):
            forwards.autocast = name_of(torch.get_autocast_dtype(device))
        self.last = f"forward of {name or 'the model'!r}"
        self._hooks.tensors.find_with_children(name, module, self.model)

    @guarded
    def _after_module(self, name: str, is_root: bool, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._now.draws.end(name, module)
        is_seen = self.is_watching and torch.is_grad_enabled()
        if is_root:
            self._forward.depth -= 1
            if self._forward.is_late and is_seen:  # it has no module that began after it
                self._forward.is_late = False
                self._hooks.tensors.find(name, module, self.model)
        if not is_seen:
            return
        if self._takes.digests:
            self._take_outputs(name, list(readable_of(output)), is_outermost=is_root and not self._forward.depth)
        # A wrapper returns what its module returns; outside of a forward of the root modules compute once more.
        if self._takes.modules and (is_root or self._forward.depth) and inner_of(module) is None:
            self._emit_outputs(name, output)

    def _take_outputs(self, name: str, tensors: Sequence[torch.Tensor], *, is_outermost: bool) -> None:
        for tensor in tensors:
            self._now.finite.add_output(f"output of {name or 'the model'!r}", tensor)
        if is_outermost and self._sees:
            self.family.boundary.take_outputs(tensors)

    def _take_batch(self, inputs: Any) -> None:
        forwards = self._now.forwards
        tensors = forwards.take_batch(inputs, self._now.backwards.count)
        if self._takes.digests:
            self.family.boundary.take_inputs(tensors)
        for index, tensor in enumerate(tensors):
            self._takes.emit(Stage.INPUT, tensor, _place(tensor), microbatch=forwards.count - 1, index=index)

    def _emit_outputs(self, name: str, output: Any) -> None:
        number, microbatch = self._now.forwards.call_of(name), self._now.forwards.count - 1
        floating = [tensor for tensor in readable_of(output) if tensor.is_floating_point()]
        for index, tensor in enumerate(floating):
            of: dict[str, Any] = {"module": name, "microbatch": microbatch, "call": number, "index": index}
            self._takes.emit(Stage.MODULE_OUTPUT, tensor, _place(tensor), **of)
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._on_output_gradient, of))

    # Backward -------------------------------------------------------------------------------

    @guarded
    def on_backward(self, tensors: Sequence[torch.Tensor]) -> None:
        if not self._sees:
            return
        now = self._now
        scalars = [one for one in tensors if isinstance(one, torch.Tensor) and one.numel() == 1]
        if now.forwards.count or now.finite:  # else it is of another model, and nothing of it is kept
            self._note_left()
        self.family.boundary.begin_backward(tensors)
        self._now.drops.begin_backward(self._now.backwards.count)
        self._now.losses.begin_backward(scalars)
        for index, tensor in enumerate(scalars):
            place, number = _place(tensor, Layout(Box(()))), self._now.backwards.count
            self._takes.emit(Stage.LOSS, tensor, place, microbatch=number, index=index)

    @torch.no_grad()
    def _note_left(self) -> None:
        if self._takes.digests and self.model.engine is None:
            self._now.note_left(is_again=self._nesting.evaluations > 1)
            self._take_drops()

    @torch.no_grad()
    def _take_drops(self, *, is_last: bool = False) -> None:
        for drop in self._now.drops.take(is_last=is_last):
            if self._now.backwards.count == drop.backwards:
                self._now.backwards.after.clear()
            if not drop.is_meant:
                self._calls.on_drop(drop.backwards)

    @guarded
    def _on_output_gradient(self, of: dict[str, Any], gradient: torch.Tensor) -> None:
        if self._sees:
            self._takes.emit(Stage.OUTPUT_GRADIENT, gradient, _place(gradient), **of)

    @guarded
    @torch.no_grad()
    def _on_gradient(self, name: str, is_leaf: bool, is_given: bool, gradient: torch.Tensor) -> None:
        if not self._sees or untransformed(gradient) is not gradient:
            return
        now, backwards = self._now, self._now.backwards
        if not backwards.is_running:
            backwards.is_running = True
            # Runs when this backward pass has ended, after the implementation's own callbacks.
            private.need("torch.autograd.Variable._execution_engine").queue_callback(self._on_backward_end)
        layout = self.model.place_unreduced(name, gradient)
        self.last = f"backward of {name!r}"
        if (local := self.model.read(name, gradient, layout)) is None:
            backwards.unplaced.add(name)
            return
        if not is_given:
            self._takes.emit(Stage.OWN_GRADIENT, local, layout, parameter=name, microbatch=backwards.count)
        if not self._takes.digests:
            return
        pending = backwards.own.add(name, backwards.count, local, layout, is_given=is_given, is_returned=is_leaf)
        if not is_given:
            now.finite.add(f"gradient of {name!r} before its reduction", pending)

    @guarded
    def _on_accumulated(self, name: str, _: torch.Tensor) -> None:
        if self._sees:
            self._now.backwards.own.accumulate(name)

    @guarded
    @torch.no_grad()
    def _on_backward_end(self) -> None:
        now, backwards = self._now, self._now.backwards
        if not backwards.is_ending:
            # Once more: DDP queues what ends its reductions after this, when its last gradient is there.
            backwards.is_ending = True
            private.need("torch.autograd.Variable._execution_engine").queue_callback(self._on_backward_end)
            return
        backwards.is_running = backwards.is_ending = False
        backwards.count += 1
        backwards.own.digest()
        if now.has_stepped:  # in this backward pass; its units reshard when it ends
            self._hooks.tensors.gathered.end(dict(self.model.parameters()))
        if self.model.engine is None:  # else they are read when it steps
            backwards.after = now.gradients(Stage.GRADIENT)
            now.drops.end_backward(self.model)

    # The optimizer's step -------------------------------------------------------------------

    @guarded
    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        closure = closure_of(args, kwargs)
        self.family.note_step(self)
        if not self._counts(optimizer) or not (self.model.roots or callable(closure)):
            return None
        if not callable(closure) and self._is_of_others(optimizer):
            return None
        is_nested = self._nesting.begin(optimizer, len(self._now.updates.stepped))
        if not self.is_watching:
            return None
        if not callable(closure):
            self._take_step(optimizer, is_nested)
            return None

        def ended() -> None:
            if self.model.roots and not self._is_of_others(optimizer):
                self._take_step(optimizer, is_nested)

        # As Lightning calls it: forward, backward and clipping are in the closure, and end with it.
        return with_closure(args, kwargs, self._nesting.watched(closure, ended))

    @guarded
    @torch.no_grad()
    def _take_step(self, optimizer: torch.optim.Optimizer, is_nested: bool) -> None:
        self.last = f"step of {type(optimizer).__name__}"
        updates = self._now.updates
        if not is_nested:
            updates.at_step |= self._now.gradients(Stage.CLIPPED_GRADIENT, of=optimizer)
        updates.hold({id(one): group for group in optimizer.param_groups for one in group["params"]})

    @guarded
    @torch.no_grad()
    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._counts(optimizer):
            return
        stepped_before, is_with_closure = self._nesting.end(optimizer)
        if stepped_before is None or not self.model.roots or (is_with_closure and self._is_of_others(optimizer)):
            return
        now = self._now
        if len(now.updates.stepped) == stepped_before:  # else others have stepped for it
            others = self.family.parameters(but=self)
            seen, outside = seen_of(optimizer, dict(self.model.parameters()), self.model.roots, others)
            now.updates.stepped.append(seen)
            self._strangers.say(outside, self.model)
        ended = self._nesting.take_ended(optimizer)
        if ended and self.is_watching:
            now.updates.release_all(ended)
            if now.backwards.is_running:  # the optimizers of parameters that follow may have no gradient yet
                return
            self._hooks.tensors.gathered.end(dict(self.model.parameters()))
            if now.updates.has_all(now.backwards.own.names):
                now.updates.end_it = True
                self.end_step()

    @guarded
    def on_engine_step(self, engine: nn.Module) -> None:
        own = self.model.engine
        if own is None or own.module is not engine:
            return
        own.is_stepping = own.is_at_step
        if own.is_stepping and self.is_watching:
            with torch.no_grad():
                self.last = f"step of {type(engine).__name__}"
                self._now.backwards.after = self._now.gradients(Stage.GRADIENT)
                self._now.updates.at_step = dict(self._now.backwards.after)
                self._now.updates.hold({id(one): {"lr": own.rate} for _, one in self.model.parameters()})

    @guarded
    def on_engine_stepped(self, engine: nn.Module) -> None:
        own = self.model.engine
        if own is None or own.module is not engine or not own.is_stepping:
            return
        if not own.has_stepped:
            self.forget()
            return
        with torch.no_grad():
            updates = self._now.updates
            if self.is_watching:
                self.on_norm("clip_grads_with_norm_", *own.norm, 2.0)
                updates.release({id(one) for _, one in self.model.parameters()}, own.state)
            held = len(updates.held)
            updates.stepped.append(Optimizer(type(own.base).__name__, held, held, shapes_agree=False))
        self.end_step()

    def _is_of_others(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer steps parameters of another model alone, as a generator's does; note that it has."""
        mine = parameters_in(optimizer)
        live = {id(one) for _, one in self.model.parameters()}
        if any(id(one) in live for one in mine):
            self.is_stepped = True
            return False
        owner, has_gradient = self.family.owner(optimizer), any(one.grad is not None for one in mine)
        # One of dead parameters is taken for the first root's, where no other has these, and it was made for no root.
        if owner is self or (owner is None and not has_gradient and self.family.is_first(self) and not self._is_held()):
            return False
        if has_gradient:
            self._now.drops.for_others = self._now.backwards.count
        if owner is None and has_gradient:
            self._note_stranger(type(optimizer).__name__)
        return True

    def _is_held(self) -> bool:
        """Whether an optimizer of the process has parameters of the roots."""
        held = parameters_of_optimizers()
        return any(id(one) in held for _, one in self.model.parameters())

    def _note_stranger(self, kind: str) -> None:
        self._strangers.note(kind, self.step)
        if self.model.roots:
            watched = type(unwrapped(self.model.roots[0])).__name__
            text = f"the model that another {kind} steps, which has no parameter of the watched {watched}"
            self._strangers.say([f"{text}: give each model a doctor(model, optimizer)"], self.model)

    def _counts(self, optimizer: torch.optim.Optimizer) -> bool:
        return self.model.engine is None and self._nesting.counts(optimizer)

    # Calls of torch's functions -------------------------------------------------------------

    @guarded
    def on_norm(
        self, function: str, value: Any, max_norm: float | None, norm_type: float, parameters: Any = None
    ) -> None:
        if not self._sees or self.family.has_some(parameters, but=self):
            return
        number = self._now.norms.add(function, value, max_norm, norm_type)
        if number is not None:
            tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
            self._takes.emit(Stage.TOTAL_NORM, tensor, _place(tensor, Layout(Box(()))), call=number)

    @guarded
    def on_cross_entropy(
        self, value: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, options: dict[str, Any]
    ) -> None:
        is_plain = all(type(one) is torch.Tensor and untransformed(one) is one for one in (value, target))
        is_number = value.ndim == 0 and value.requires_grad and not target.is_floating_point()
        if self._sees and is_plain and is_number:
            columns = logits.shape[1] if logits.ndim > 1 else 0
            labels = compared(target, columns, self._now.forwards.tokens) if self._takes.digests else None
            self._now.losses.add(value, target, options, labels)

    @guarded
    def on_collective(self, collective: Collective) -> None:
        if not self.is_watching or (self._now.has_stepped and not self._nesting):
            return
        if self._nesting and not self._nesting.is_in_closure:
            phase = "step"
        elif self._now.backwards.is_running:
            phase = "backward"
        else:
            phase = "forward" if self._forward.depth else "between"
        self._now.collectives.append(dataclasses.replace(collective, phase=phase))

    @guarded
    def on_zero_grad(self) -> None:
        self._now.note_zeroed()

    @guarded
    def on_wrapper_forward(self, wrapper: nn.Module) -> None:
        # It broadcasts buffers before the module inside of it begins, and so waits for ranks that wait for this one.
        if not self._forward.depth and torch.is_grad_enabled() and inner_of(wrapper) in self.model.roots:
            self.end_step()
            if self.is_attached and self.is_watching:
                self._note_left()

    @guarded
    def on_unscale(self) -> None:
        self._now.norms.unscale(self._now.drops.seen.norms)

    @guarded
    def on_scaler_update(self) -> None:
        self.forget()

    @guarded
    def on_destroy(self) -> None:
        # Layouts and the exchange need the process groups.
        self._calls.on_destroy()
        self.end_step()
        self._strangers.are_destroyed = True


def _nothing(*_: Any) -> None:
    """The callback of a watch that was given none."""


def _place(tensor: torch.Tensor, plain: Layout | None = None) -> Layout | None:
    """Where the elements of a DTensor belong; of others ``plain``."""
    return layout_of(tensor) if isinstance(tensor, DTensor) else plain
