"""Sees calls of torch's functions: norms and clipping, backward, loss scalers, collectives, and the end.

Of DeepSpeed, where it is imported, it sees the engine's step.

``clip_grad_norm_`` calls two functions of its module by their private names. They are observed under these, because
user code has often imported the public ones before anything can be observed. Of collectives those are seen that the
methods of ``ProcessGroup`` issue, and none that are issued below Python.
"""

import contextlib
import functools
import importlib
import inspect
import pkgutil
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.optim.lr_scheduler import LRScheduler

from shardproof.harness.collectives.announce import METHODS, collective_of
from shardproof.harness.collectives.trace import Collective
from shardproof.harness.tensors import private
from shardproof.harness.watching import engines


class Ender(Protocol):
    """Is told of the end; may not raise."""

    def on_destroy(self) -> None:
        """Before all process groups are destroyed."""


class Observer(Ender, Protocol):
    """Is told of calls. None of its methods may raise."""

    def on_norm(
        self, function: str, value: Any, max_norm: float | None, norm_type: float, parameters: Any = None
    ) -> None:
        """After a total norm was computed, or before gradients of parameters are clipped to ``max_norm`` by it."""

    def on_backward(self, tensors: Sequence[torch.Tensor]) -> None:
        """Before a backward pass begins on these tensors; not before one within another, as of recomputation."""

    def on_zero_grad(self) -> None:
        """Before gradients are zeroed by an optimizer or a module."""

    def on_wrapper_forward(self, wrapper: nn.Module) -> None:
        """Before the forward of DistributedDataParallel, also where user code calls ``forward()`` past its hooks."""

    def on_unscale(self) -> None:
        """Before a loss scaler unscales the gradients of an optimizer."""

    def on_scaler_update(self) -> None:
        """After a loss scaler was updated that has stepped an optimizer, or skipped its step, since the last time."""

    def on_engine_step(self, engine: nn.Module) -> None:
        """Before a call of DeepSpeed's ``engine.step()``."""

    def on_engine_stepped(self, engine: nn.Module) -> None:
        """After it."""

    def on_cross_entropy(
        self, value: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, options: dict[str, Any]
    ) -> None:
        """After a cross-entropy was computed, without weights of classes."""

    def on_collective(self, collective: Collective) -> None:
        """Before a collective is issued."""


class Reader(Ender, Protocol):
    """Hears which rows a process is about to read. None of its methods may raise."""

    def on_drawn(self, iterator: Any, indices: Any) -> None:
        """After what iterates over a loader has drawn the indices of a batch, or the index of a row."""

    def on_all_drawn(self, iterator: Any) -> None:
        """After there was no more index."""

    def on_given(self, iterator: Any, batch: Any) -> None:
        """After it has given a batch."""

    def on_permutation(self, values: Any) -> None:
        """After a permutation was drawn, or a list was shuffled; not by a sampler of a loader."""


class Finder(Protocol):
    """Sees where a module is compiled in place, whose graph has no hooks of all modules."""

    def on_compiled(self, module: nn.Module) -> None:
        """After ``module.compile()``."""


class Joiner(Protocol):
    """Is told where ``join()`` begins and ends, in which ranks have different numbers of batches."""

    def on_join(self) -> None:
        """Before it begins."""

    def on_joined(self) -> None:
        """After it has ended, on all ranks together; one that an exception leaves is none that has ended."""


class Witness(Protocol):
    """Hears of calls that concern the process, and of the first one while a model is observed. None may raise."""

    def on_unscaling(self, scaler: Any, optimizer: Any) -> None:
        """Before a loss scaler unscales the gradients of an optimizer."""

    def on_backward(self, tensors: Sequence[torch.Tensor]) -> None:
        """Before a backward pass begins; see :class:`Observer`."""

    def on_gradients(self) -> None:
        """After it has ended."""

    def on_zero_grad(self) -> None:
        """Before gradients are zeroed by an optimizer or a module."""

    def on_clip(self) -> None:
        """Before gradients are clipped by a total norm."""

    def on_clipped(self) -> None:
        """After that."""

    def on_group(self, optimizer: Any, group: Any) -> None:
        """After an optimizer was given a group of parameters, as while it is made."""

    def on_schedule(self, scheduler: Any) -> None:
        """After a scheduler was stepped; not while it is made."""

    def on_state_dict(self, state: Any) -> None:
        """After a module has returned its state dict."""

    def on_load(self, module: nn.Module, state: Any) -> None:
        """Before values of a state dict are copied into a module."""

    def on_loaded(self, module: nn.Module, state: Any, result: Any) -> None:
        """After a module has loaded a state dict, also one whose tensors it takes itself; with what it returns."""


class Listener:
    """An observer and a witness that does nothing, for classes that hear of few calls."""

    def on_nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing about a call."""

    on_norm = on_backward = on_zero_grad = on_wrapper_forward = on_unscale = on_scaler_update = on_engine_step = (
        on_nothing
    )
    on_engine_stepped = on_cross_entropy = on_collective = on_destroy = on_nothing
    on_unscaling = on_group = on_schedule = on_state_dict = on_load = on_loaded = on_nothing
    on_gradients = on_clip = on_clipped = on_nothing


_TOTAL, _CLIP = (f"torch.nn.utils.clip_grad.{name}" for name in ("_get_total_norm", "_clip_grads_with_norm_"))

_ITERATOR = "torch.utils.data.dataloader._BaseDataLoaderIter"

#: Kinds of collectives whose two sides differ, or that have no tensors.
_NOT_NOTED = frozenset({"send", "recv", "barrier"})

_T = TypeVar("_T")


class _Observers(Generic[_T]):
    """Whoever is told of the calls of some functions.

    The functions are replaced once for all of them: of two replacements, one inside of the other, the outer one alone
    could be taken back.

    Args:
        functions: yields them, each under all its names, with what takes its place.
    """

    def __init__(self, functions: Callable[[], Iterable[tuple[str, Callable[..., Any]]]]) -> None:
        self._functions = functions
        self._all: list[_T] = []
        self._replacements = contextlib.ExitStack()

    def __iter__(self) -> Iterator[_T]:
        return iter(list(self._all))  # one may leave when it is told

    @contextlib.contextmanager
    def including(self, observer: _T) -> Iterator[None]:
        """Tell an observer of the calls in this context."""
        if not self._all:
            for path, value in self._functions():
                self._replacements.enter_context(replaced(path, value))
        self._all.append(observer)
        try:
            yield
        finally:
            self._all.remove(observer)
            if not self._all:
                self._replacements.close()


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Tell an observer of the calls in this context."""
    with _observers.including(observer), _of_gradients.including(observer), ends(observer):
        yield


@contextlib.contextmanager
def read(reader: Reader) -> Iterator[None]:
    """Tell a reader of the calls in this context."""
    with _readers.including(reader), ends(reader):
        yield


def ends(ender: Ender) -> contextlib.AbstractContextManager[None]:
    """Tell of the end of the process groups in this context."""
    return _enders.including(ender)


def joins(joiner: Joiner) -> contextlib.AbstractContextManager[None]:
    """Tell of each ``join()`` in this context, which may begin before a model is observed, and end after it."""
    return _joiners.including(joiner)


def compilations(finder: Finder) -> contextlib.AbstractContextManager[None]:
    """Tell of each ``module.compile()`` in this context."""
    return _finders.including(finder)


@contextlib.contextmanager
def witnessed(witness: Witness) -> Iterator[None]:
    """Tell a witness of the calls in this context."""
    with _witnesses.including(witness), _of_gradients.including(witness):
        yield


def _of_witnesses() -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "torch.optim.Optimizer.add_param_group", _after_group(torch.optim.Optimizer.add_param_group)
    yield f"{LRScheduler.__module__}.LRScheduler.step", _after_schedule(LRScheduler.step)
    yield "torch.nn.Module.state_dict", _after_state_dict(nn.Module.state_dict)
    yield "torch.nn.Module.load_state_dict", _around_load(nn.Module.load_state_dict)


def _after_group(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def add_param_group(self: Any, param_group: Any) -> Any:
        value = function(self, param_group)
        for one in _witnesses:
            one.on_group(self, param_group)
        return value

    return add_param_group


def _after_schedule(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = function(self, *args, **kwargs)
        for one in _witnesses if not getattr(self, "_is_initial", False) else ():
            one.on_schedule(self)
        return value

    return step


def _after_state_dict(function: Callable[..., Any]) -> Callable[..., Any]:
    depth = [0]  # it calls itself for each child

    @functools.wraps(function)
    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        depth[0] += 1
        try:
            value = function(self, *args, **kwargs)
        finally:
            depth[0] -= 1
        for one in _witnesses if depth[0] == 0 else ():
            one.on_state_dict(value)
        return value

    return state_dict


def _around_load(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def load_state_dict(self: Any, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        for one in _witnesses if not assign else ():
            one.on_load(self, state_dict)
        value = function(self, state_dict, strict, assign)
        for one in _witnesses:
            one.on_loaded(self, state_dict, value)
        return value

    return load_state_dict


def _of_readers() -> Iterator[tuple[str, Callable[..., Any]]]:
    iterator = private.find(_ITERATOR)
    depth = [0]  # of loaders that draw
    if (draw := private.find(f"{_ITERATOR}._next_index")) is not None and iterator is not None:
        yield f"{_ITERATOR}._next_index", _after_draw(draw, depth)
        yield f"{_ITERATOR}.__next__", _after_next(iterator.__next__)
    yield "torch.randperm", _after_permutation(torch.randperm, depth)
    for path in ("random.shuffle", "random.Random.shuffle"):
        yield path, _after_shuffle(pkgutil.resolve_name(path), depth)
    if (numpy := sys.modules.get("numpy")) is not None:
        yield "numpy.random.permutation", _after_permutation(numpy.random.permutation, depth)
        yield "numpy.random.shuffle", _after_shuffle(numpy.random.shuffle, depth)


def _after_draw(function: Callable[..., Any], depth: list[int]) -> Callable[..., Any]:
    @functools.wraps(function)
    def _next_index(self: Any) -> Any:
        depth[0] += 1
        try:
            indices = function(self)
        except StopIteration:
            for one in _readers:
                one.on_all_drawn(self)
            raise
        finally:
            depth[0] -= 1
        for one in _readers:
            one.on_drawn(self, indices)
        return indices

    return _next_index


def _after_next(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def __next__(self: Any) -> Any:
        value = function(self)
        for one in _readers:
            one.on_given(self, value)
        return value

    return __next__


def _after_permutation(function: Callable[..., Any], depth: list[int]) -> Callable[..., Any]:
    @functools.wraps(function)
    def permutation(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        for one in _readers if not (depth[0] or torch.compiler.is_compiling()) else ():
            one.on_permutation(value)
        return value

    return permutation


def _after_shuffle(function: Callable[..., Any], depth: list[int]) -> Callable[..., Any]:
    @functools.wraps(function)
    def shuffle(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        for one in _readers if not depth[0] else ():
            one.on_permutation(args[-1] if args else kwargs.get("x"))
        return value

    return shuffle


def _of_compilations() -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "torch.nn.Module.compile", _after_compile(nn.Module.compile)


def _after_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = function(self, *args, **kwargs)
        for one in _finders:
            one.on_compiled(self)
        return value

    return compile


def _of_joins() -> Iterator[tuple[str, Callable[..., Any]]]:
    path = f"{Join.__module__}.{Join.__name__}"
    yield f"{path}.__enter__", _before_join(Join.__enter__)
    yield f"{path}.__exit__", _after_join(Join.__exit__)


def _before_join(enter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(enter)
    def __enter__(self: Any) -> Any:
        for one in _joiners:
            one.on_join()
        return enter(self)

    return __enter__


def _after_join(leave: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(leave)
    def __exit__(self: Any, kind: Any, error: Any, trace: Any) -> Any:
        value = leave(self, kind, error, trace)
        for one in _joiners if error is None else ():
            one.on_joined()
        return value

    return __exit__


def _of_ends() -> Iterator[tuple[str, Callable[..., Any]]]:
    destroy = dist.destroy_process_group
    for path in ("torch.distributed.destroy_process_group", f"{destroy.__module__}.destroy_process_group"):
        yield path, _before_destroy(destroy)


def _functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    if (total := private.find(_TOTAL)) is not None:
        for path in (_TOTAL, "torch.nn.utils.clip_grad.get_total_norm", "torch.nn.utils.get_total_norm"):
            yield path, _after_total(total)
    yield "torch.nn.functional.cross_entropy", _after_cross_entropy(nn.functional.cross_entropy)
    wrapper = nn.parallel.DistributedDataParallel
    yield "torch.nn.parallel.DistributedDataParallel.forward", _before_wrapper_forward(wrapper.forward)
    stepped: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
    yield "torch.amp.GradScaler.step", _noting(torch.amp.GradScaler.step, stepped)
    yield "torch.amp.GradScaler.update", _after_update(torch.amp.GradScaler.update, stepped)
    yield "torch.amp.GradScaler.unscale_", _before_unscale(torch.amp.GradScaler.unscale_)
    if (engine := sys.modules.get(engines.MODULE)) is not None:
        yield engines.STEP, _around_step(engine.DeepSpeedEngine.step)
    # torch implements old names of methods with new ones: of nested calls the outermost is a collective of its own.
    depth = [0]
    for kind, names in METHODS.items():
        for name in names:
            method = getattr(dist.ProcessGroup, name, None)
            if method is not None and kind not in _NOT_NOTED:
                yield f"torch.distributed.ProcessGroup.{name}", _before_collective(method, kind, depth)


def _functions_of_gradients() -> Iterator[tuple[str, Callable[..., Any]]]:
    if (clip := private.find(_CLIP)) is not None:
        for path in (_CLIP, "torch.nn.utils.clip_grad.clip_grads_with_norm_", "torch.nn.utils.clip_grads_with_norm_"):
            yield path, _around_clip(clip)
    yield "torch.autograd.backward", _around_backward(torch.autograd.backward)
    yield "torch.optim.Optimizer.zero_grad", _before_zero_grad(torch.optim.Optimizer.zero_grad)
    yield "torch.nn.Module.zero_grad", _before_zero_grad(nn.Module.zero_grad)


def _after_total(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        value = function(tensors, norm_type, *args, **kwargs)
        for one in _observers:
            one.on_norm("get_total_norm", value, None, float(norm_type))
        return value

    return get_total_norm


def _around_clip(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        for one in _observers:
            one.on_norm("clip_grads_with_norm_", total_norm, float(max_norm), 2.0, parameters)
        for witness in _witnesses:
            witness.on_clip()
        value = function(parameters, max_norm, total_norm, *args, **kwargs)
        for witness in _witnesses:
            witness.on_clipped()
        return value

    return clip_grads_with_norm_


def _after_cross_entropy(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def cross_entropy(input: Any, target: Any, weight: Any = None, *args: Any, **kwargs: Any) -> Any:
        value = function(input, target, weight, *args, **kwargs)
        if weight is None and not args and not torch.compiler.is_compiling():
            for one in _observers:
                one.on_cross_entropy(value, input, target, kwargs)
        return value

    return cross_entropy


def _around_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    depth = [0]

    @functools.wraps(function)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if depth[0] == 0:
            for one in (*_observers, *_witnesses):
                one.on_backward([tensors] if isinstance(tensors, torch.Tensor) else list(tensors))
        depth[0] += 1
        try:
            value = function(tensors, *args, **kwargs)
        finally:
            depth[0] -= 1
        for witness in _witnesses if depth[0] == 0 else ():
            witness.on_gradients()
        return value

    return backward


def _noting(function: Callable[..., Any], stepped: "weakref.WeakSet[torch.amp.GradScaler]") -> Callable[..., Any]:
    @functools.wraps(function)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        stepped.add(self)
        return function(self, *args, **kwargs)

    return step


def _after_update(function: Callable[..., Any], stepped: "weakref.WeakSet[torch.amp.GradScaler]") -> Callable[..., Any]:
    @functools.wraps(function)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        # One that is updated for each microbatch has skipped no step by that.
        for one in _observers if self in stepped else ():
            one.on_scaler_update()
        stepped.discard(self)
        return result

    return update


def _before_wrapper_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for one in _observers:
                one.on_wrapper_forward(self)
        return function(self, *args, **kwargs)

    return forward


def _before_zero_grad(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        for one in (*_observers, *_witnesses):
            one.on_zero_grad()
        return function(self, *args, **kwargs)

    return zero_grad


def _before_unscale(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def unscale_(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        for one in _observers if self.is_enabled() else ():
            one.on_unscale()
        for witness in _witnesses if self.is_enabled() else ():
            witness.on_unscaling(self, optimizer)
        return function(self, optimizer, *args, **kwargs)

    return unscale_


def _around_step(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        for one in _observers:
            one.on_engine_step(self)
        result = function(self, *args, **kwargs)
        for one in _observers:
            one.on_engine_stepped(self)
        return result

    return step


def _before_destroy(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def destroy_process_group(group: Any = None) -> None:
        for one in _enders if group in (None, dist.group.WORLD) else ():
            one.on_destroy()
        function(group)

    return destroy_process_group


def _before_collective(method: Callable[..., Any], kind: str, depth: list[int]) -> Callable[..., Any]:
    @functools.wraps(method)
    def issue(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if depth[0] == 0:
            # Of a group that the loop has destroyed nobody knows the ranks; a model may go on with it.
            with contextlib.suppress(KeyError):
                collective = collective_of(group, kind, args, kwargs)
                for one in _observers:
                    one.on_collective(collective)
        depth[0] += 1
        try:
            return method(group, *args, **kwargs)
        finally:
            depth[0] -= 1

    return issue


@contextlib.contextmanager
def replaced(path: str, value: Callable[..., Any]) -> Iterator[None]:
    """Let a name of torch stand for another function in this context."""
    place, _, name = path.rpartition(".")
    try:
        owner: Any = importlib.import_module(place)
    except ImportError:
        module, _, kind = place.rpartition(".")
        owner = getattr(importlib.import_module(module), kind)
    # As it is stored: what ``getattr`` returns of a method that is not of Python takes no ``self`` when it is put back.
    before = inspect.getattr_static(owner, name, None)
    if before is not None:
        setattr(owner, name, value)
    try:
        yield
    finally:
        # Whoever has replaced it since then keeps it.
        if before is not None and vars(owner).get(name) is value:
            setattr(owner, name, before)


_observers: _Observers[Observer] = _Observers(_functions)
#: Of both, for what tells them of gradients.
_of_gradients: _Observers[Observer | Witness] = _Observers(_functions_of_gradients)
_enders: _Observers[Ender] = _Observers(_of_ends)
_readers: _Observers[Reader] = _Observers(_of_readers)
_finders: _Observers[Finder] = _Observers(_of_compilations)
_witnesses: _Observers[Witness] = _Observers(_of_witnesses)
_joiners: _Observers[Joiner] = _Observers(_of_joins)
