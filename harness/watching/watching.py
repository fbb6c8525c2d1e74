"""The context manager that a doctor and a recording share."""

import contextlib
import os
import sys
import traceback
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.watching import calls, script
from shardproof.harness.watching.hooks import Compiled, outside_func
from shardproof.harness.watching.names import compiled_in_place, compiles, is_compiled, parameters_of, unwrapped
from shardproof.harness.watching.optimizers import parameters_of_optimizers
from shardproof.harness.watching.records import NotWatchable
from shardproof.harness.watching.watch import Watch

#: The classes of modules that a message names.
_MOST_KINDS = 5


class Watcher(contextlib.AbstractContextManager[Any]):
    """What a doctor and a recording share: they attach a watch to the model that the loop calls, and remove it.

    Attributes:
        name: begins its messages.
        activity: ends if it fails itself; the training goes on.
        passes: the errors of ours that the training gets.
    """

    name: ClassVar[str]
    activity: ClassVar[str]
    passes: ClassVar[tuple[type[Exception], ...]] = (NotWatchable,)
    _finds_more: ClassVar[bool] = False
    _watch: Watch

    def __init__(self, steps: Collection[int]) -> None:
        if not steps or min(steps) < 0:
            raise NotWatchable(f"{self.name}: steps={sorted(steps)}: expected steps counted from 0")
        self._steps = sorted(set(steps))
        self._first: Any = None
        self._finding = contextlib.ExitStack()
        #: The root whose first forward has begun.
        self._begun: tuple[Watch, nn.Module] | None = None
        #: The modules of the root, and those that are no part of it.
        self._inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._world: Any = None
        self._is_over = False

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
            return
        error.__traceback__ = script.without_own_frames(error.__traceback__)
        if self._watch.is_attached and self._watch.last:
            # The user's exception passes as it is, with what the step had reached.
            error.add_note(f"shardproof {self.name}: the step had reached: {self._watch.last}")
        if line := script.collective_of(error):
            error.add_note(
                f"shardproof {self.name}: this rank waited in a collective that it began at {line}: each rank of its "
                "group must begin it, and another one may be elsewhere"
            )
        if not self._is_over:
            self._abandon(error)
        self._detach()

    @abstractmethod
    def close(self) -> None:
        """End the last step, and remove all hooks."""

    def _abandon(self, error: BaseException) -> None:
        """Keep what there is of a loop that an exception has ended; asks no other rank, which may not come."""

    @abstractmethod
    def _attach_to(self, models: Sequence[nn.Module]) -> None:
        """Attach the watch to models, or raise NotWatchable."""

    def _attach(self, models: Sequence[nn.Module]) -> None:
        """Attach to models or, without any, to the first root module of which something trains."""
        if not models:
            self._first = nn.modules.module.register_module_forward_pre_hook(self._on_first_forward)
            self._finding.enter_context(calls.compilations(self))
            for one in compiled_in_place():
                self.on_compiled(one)
            self._watch.watch_optimizers()
            return
        if not _has_met():
            raise NotWatchable(
                f"{self.name}: torch.distributed is not initialized; call it after init_process_group "
                "(in one process: WORLD_SIZE=1 works)"
            )
        self._world = dist.group.WORLD if dist.is_initialized() else None
        try:
            self._attach_to(models)
        except Exception:
            self._detach()
            raise

    def _on_first_forward(self, module: nn.Module, args: Any) -> None:
        if not self._is_looked_for(module):
            return
        if self._watch.model.roots and any(is_compiled(one) for one in module.modules()):
            self._stop_finding()  # a hook of all modules would change what is compiled
        if not any(one.requires_grad for one in module.parameters()):
            return
        if self._watch.has_computed or not self._is_root(module):
            if self._finds_more and self._watch.model.roots:
                self._guarded(lambda: self._look_beside(module, args))
        elif not _is_being_built(module):
            self._take_root(module, args)

    def _is_looked_for(self, module: nn.Module) -> bool:
        """Whether a module that is called may be a root that is not known yet."""
        if torch.compiler.is_compiling() or module in self._inside or not torch.is_grad_enabled():
            return False
        if self._finds_more:
            return not self._watch.model.roots or not self._has_looked_at(module)
        if self._watch.has_computed:
            self._stop_finding()
            return False
        return True

    def _take_root(self, module: nn.Module, args: Any) -> None:
        """Watch the module whose forward begins as the first root."""
        self._inside = weakref.WeakSet(module.modules())
        # Until something is computed for a step it may be called for another reason, such as a parametrization when it
        # is registered. Hooks of all modules would change what is compiled.
        if any(is_compiled(one) for one in module.modules()):
            self._stop_finding()
        if self._watch.model.roots:
            self._forget_roots(module)
        self._guarded(lambda: self._attach([module]))
        # Hooks that are added while those of a forward run do not run in it.
        if self._watch.is_attached:
            self._begin_forward(self._watch, module, args)

    def _begin_forward(self, watch: Watch, module: nn.Module, args: Any) -> None:
        """Begin the forward of a root in which it was attached."""
        self._begun = watch, module
        watch.begin_forward(module, args)

    def _after_compiled(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """End the first forward of a root that is compiled in place: it has begun without hooks of its own."""
        if self._begun is not None and self._begun[1] is module:
            self._begun[0].end_forward(module, args, kwargs, output)
            self._begun = None

    def _is_root(self, module: nn.Module) -> bool:
        """Whether a module is what trains, rather than the root: it has the root in it, or optimizers have it alone."""
        inside = set(module.modules())
        if all(root in inside for root in self._watch.model.roots):
            return True
        held = parameters_of_optimizers()
        # After its forward a root of FSDP2 has gathered parameters, which no optimizer has.
        has_root = any(id(one) in held for _, one in self._watch.model.parameters())
        is_it = not has_root and any(id(one) in held for _, one in parameters_of(module))
        if held and not is_it and not self._finds_more:
            self._inside |= weakref.WeakSet(inside)
        return is_it

    def _has_looked_at(self, module: nn.Module) -> bool:
        """Whether a module was no root when it was called before in the step."""
        return False

    def _look_beside(self, module: nn.Module, args: Any) -> None:
        """Look whether a module that is called is a further root, and watch it then."""

    def _forget_roots(self, root: nn.Module) -> None:
        """Forget the roots: another module has them in it, or is what trains."""
        self._watch.forget_roots()

    def on_compiled(self, module: nn.Module) -> None:
        """See the calls of a module that is compiled in place."""
        found = Compiled(module, lambda one, args, _: self._on_first_forward(one, args), self._after_compiled)
        self._finding.callback(found.remove)

    def _stop_finding(self) -> None:
        if self._first is not None:
            self._first.remove()
        self._finding.close()

    def _guarded(self, call: Callable[[], None]) -> None:
        """Call something of ours; an error of ours ends the watching, and never the training."""
        try:
            with outside_func():
                call()
        except self.passes:
            raise
        except Exception as error:
            self._on_error(error)

    def _on_error(self, error: Exception) -> None:
        if self._world is not None and not (dist.is_initialized() and dist.group.WORLD is self._world):
            self._say_here(f"the loop destroyed its process groups, which ends the {self.activity}: {error}")
        else:
            self._say_here(f"internal error, which ends the {self.activity}; please report it:\n{text_of(error)}")
        self._detach()

    def _nothing_seen(self) -> str:
        forwards, steps = self._watch.counts
        counts = f"{forwards} forwards with gradients, {steps} optimizer steps"
        if self._watch.strangers and forwards:
            kinds, model = " and ".join(self._watch.strangers), type(unwrapped(self._watch.model.roots[0])).__name__
            return (
                f"nothing was watched ({counts} of its parameters): {kinds} stepped, and has none of the parameters of "
                f"{model}; where it has copies of them (master weights, flat shards) gradients and updates are not "
                "judged; else make it of the model's own, or name the model in doctor(model)"
            )
        if not forwards and self._watch.family.steps and compiles():
            kinds = " and ".join(self._watch.family.kinds[:_MOST_KINDS]) or "the model"
            return (
                f"nothing was watched: optimizers stepped, and no forward of {kinds} was seen, as inside of a compiled "
                "function: compile the module instead, by torch.compile(model) or model.compile()"
            )
        if self._watch.has_computed and not self._watch.family.steps:
            return (
                f"nothing was watched ({counts}): no optimizer of torch stepped; derive the class that updates the "
                f"parameters from torch.optim.Optimizer, of which the {self.name} sees each step"
            )
        return f"the loop ended before a step was complete ({counts}): was the wrapped module called?"

    def _say_here(self, text: str) -> None:
        # A progress bar that is being drawn is moved below the message.
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        with contextlib.nullcontext() if bars is None else bars.external_write_mode(file=sys.stderr):
            print(f"shardproof {self.name}: {text}", file=sys.stderr, flush=True)

    def _detach(self) -> None:
        self._is_over = True
        self._stop_finding()
        self._watch.detach()


def text_of(error: Exception) -> str:
    """Return the traceback of an error of ours."""
    return "".join(traceback.format_exception(error))


def _has_met() -> bool:
    """Whether there is one process alone, or torch.distributed is initialized."""
    return dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) <= 1


def _is_being_built(module: nn.Module) -> bool:
    """Whether a module is called while a model is built: before ranks meet, and before its optimizer is made."""
    if _has_met():
        return False
    held = parameters_of_optimizers()
    return not any(id(one) in held for one in module.parameters())
