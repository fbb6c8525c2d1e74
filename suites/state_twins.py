"""A sharded model beside an unsharded twin with equal values, and what state dicts of the twin have, put down by hand.

What torch's functions for state dicts return and load is compared with these, and not with what the same functions make
of the twin: a mistake that both have is found too.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from shardproof.testing import Rank, states
from shardproof.testing.compare import local_of, map_leaves, map_tensors
from shardproof.testing.make import Adapter, sharded
from shardproof.testing.measure import private
from shardproof.testing.train import parallel, shapes

checkpoint_wrapper = private.take("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper")

DIM = 5
Named = list[tuple[str, nn.Parameter]]
_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def canonical(name: str) -> str:
    """The name of a parameter or module in the model without wrappers."""
    for prefix in _PREFIXES:
        name = name.replace(prefix, "").removesuffix(f".{prefix[:-1]}")
        name = "" if name == prefix[:-1] else name
    return name


# Contents: models, and wrappers of their submodules.


class Nested(nn.Module):
    """Frozen and tied parameters, of few rows too, buffers, extra state, and a module that is named ``module``.

    ``base`` shares the weight of ``a``, unless nothing ``ties``. The name of one module can end with that of another.
    """

    def __init__(self, *, alike: bool = False, ties: bool = True) -> None:
        super().__init__()
        self.a = nn.Linear(DIM, DIM)
        self.add_module("ba" if alike else "other", nn.Linear(DIM, DIM))
        self.base = nn.Linear(DIM, DIM, bias=False)
        if ties:
            self.base.weight = self.a.weight
        self.module = nn.Sequential(nn.Linear(DIM, 3), nn.Linear(3, 1))
        recorder = shapes.ExtraRecorder(DIM, freezes=True)
        if not ties:
            recorder.second.weight = nn.Parameter(recorder.second.weight.detach().clone())
        self.deep = nn.Sequential(nn.Linear(DIM, 8), recorder)
        self.few = nn.BatchNorm1d(3)
        self.a.bias.requires_grad_(False)
        self.deep[0].weight.requires_grad_(False)


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def _wrapped(*, by: Sequence[Callable[[nn.Module], Any]]) -> Callable[[Any], Any]:
    """Wrap ``a``, the first part of ``deep``, and ``module`` with its second part, each by all of these in turn."""

    def wrap(model: Any) -> Any:
        for make in by:
            model.a, model.deep[0] = make(model.a), make(model.deep[0])
            model.module[1] = make(model.module[1])
        for make in by:
            model.module = make(model.module)
        return model

    return wrap


#: What is put around submodules before a model is sharded.
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda model: model,
    "compiled": _wrapped(by=[_compiled]),
    "checkpointed": _wrapped(by=[checkpoint_wrapper]),
    "both": _wrapped(by=[checkpoint_wrapper, _compiled]),
    "compiled-root": lambda model: model,  # which is compiled once it is sharded
}


class Beside(nn.Module):
    """A sharded model, and a module of which each rank has all."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.shards, self.copies = one, other


class Renaming(nn.Module):
    """A module whose state dict has the entries of ``inner`` as its own, as a wrapper that hides itself does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.register_state_dict_post_hook(self._hide)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._show)  # type: ignore[no-untyped-call]

    def hidden_names(self) -> dict[str, str]:
        """By name of an entry, the module that is not in its name."""
        return {"weight": "inner", "bias": "inner"}

    @staticmethod
    def _hide(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in ("weight", "bias"):
            state[prefix + name] = state.pop(f"{prefix}inner.{name}")

    @staticmethod
    def _show(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in ("weight", "bias"):
            if prefix + name in state:
                state[f"{prefix}inner.{name}"] = state.pop(prefix + name)


class RenamingByDefault(Renaming):
    """Says so where torch's functions look by default."""

    def _fqn_modifiers(self) -> dict[str, str]:
        return self.hidden_names()


class Showing(nn.Module):
    """A wrapper of user code that shows what it wraps, as torch's for recomputation does, with the same name of it.

    Unlike that one it leaves the name in its state dict.
    """

    def __init__(self) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = nn.Linear(DIM, DIM)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_checkpoint_wrapped_module"), name)


# Optimizers.


class Odd(torch.optim.Optimizer):
    """Has states of other kinds than torch's optimizers, and no learning rate under the usual name.

    Its methods are those of an older optimizer: a step wants the closure, and gradients become zeros by default.

    Args:
        kinds: "numbers" for tensors like the parameter, numbers and None; "nested" for tensors of other shapes and
            dtypes and for dicts; "odd" for these and for what no flattened state dict can have.
    """

    def __init__(self, parameters: Any, *, rate: float, kinds: str) -> None:
        super().__init__(parameters, {"rate": rate, "kinds": kinds})

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = self._state(parameter, group["kinds"])

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)

    def _state(self, parameter: torch.Tensor, kinds: str) -> dict[str, Any]:
        average = torch.zeros_like(parameter)
        state = {"average": average, "steps": 1, "scale": 0.5, "count": torch.zeros((), dtype=torch.int64)}
        if kinds == "numbers":
            return state | {"nothing": None, "flag": True}
        zeros = functools.partial(torch.zeros, device=parameter.device)  # a load in full refuses a second device
        state["rows"], state["wide"] = zeros(7), average.double()
        state["inner"] = {"left": average.clone(), "depth": {"ratio": 0.25, "sums": zeros(2)}}
        if kinds == "odd":
            state |= {"nothing": None, "flag": True, "pair": (1, zeros(2)), "list": [2.0]}
        return state


def _in_groups(kind: Callable[..., torch.optim.Optimizer], **second: Any) -> Callable[[Named], list[Any]]:
    """One optimizer of two groups, of which the second has options of its own."""

    def make(named: Named) -> list[Any]:
        parameters, half = [value for _, value in named], len(named) // 2
        return [kind([{"params": parameters[:half]}, {"params": parameters[half:], **second}])]

    return make


def _several(named: Named) -> list[Any]:
    """One optimizer for the parameters of the unit, three groups of one for the others: in turn, and the last alone."""
    unit, others = ([value for name, value in named if ("deep" in name) == inside] for inside in (True, False))
    rest, last = others[:-1], others[-1:]
    groups: list[Any] = [{"params": rest[::2]}, {"params": rest[1::2], "lr": 0.125}, {"params": last, "lr": 0.0625}]
    return [_sgd(unit, momentum=0.5), _adam(groups, lr=0.25)]


def _of(kind: Callable[..., torch.optim.Optimizer], *, frozen: bool = True) -> Callable[[Named], list[Any]]:
    """One optimizer of one group, of all parameters or of the trainable ones."""
    return lambda named: [kind([value for _, value in named if frozen or value.requires_grad])]


def _of_biases(named: Named) -> list[Any]:
    """One optimizer that trains biases alone, of which no state has two dimensions."""
    return [_adam([value for name, value in named if name.endswith("bias") and value.requires_grad])]


_adam = functools.partial(torch.optim.AdamW, lr=0.5, foreach=False)
_sgd = functools.partial(torch.optim.SGD, lr=0.5, foreach=False)

#: Functions from the parameters to the optimizers of a model.
OPTIMIZERS: dict[str, Callable[[Named], list[Any]]] = {
    "adamw": _in_groups(_adam, lr=0.25, weight_decay=0.125),
    "amsgrad": _in_groups(functools.partial(_adam, amsgrad=True), lr=0.25),
    "tensor-lr": _of(functools.partial(_adam, lr=torch.tensor(0.5))),
    "sgd": _in_groups(_sgd, lr=0.25),
    "momentum": _in_groups(functools.partial(_sgd, momentum=0.5), lr=0.25, dampening=0.5),
    "adagrad": _of(functools.partial(torch.optim.Adagrad, lr=0.5, foreach=False), frozen=False),
    "biases": _of_biases,
    "several": _several,
    **{kind: _of(functools.partial(Odd, rate=0.5, kinds=kind)) for kind in ("numbers", "nested", "odd")},
}


def step(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Make a step with gradients of zeros and no rate, for which optimizers make the states that they keep."""
    for optimizer in optimizers:
        rates = [group.get("lr") for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * 0
        parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(None)
        optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


# Values.


@torch.no_grad()
def fill(model: nn.Module, number: int) -> None:
    """Give all that a state dict of a model has values that depend on a number."""
    generator = torch.Generator().manual_seed(number)
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            _fill(tensor, generator, number)
    for module in model.modules():
        if hasattr(module, "runs"):
            module.runs = 10 + number  # type: ignore[assignment]
        if hasattr(module, "scratch"):
            module.scratch.fill_(1.0)  # type: ignore[operator]


def _fill(tensor: torch.Tensor, generator: torch.Generator, number: int) -> None:
    if tensor.ndim and tensor.is_floating_point():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    else:
        tensor.fill_(3 + number)


def fill_states(optimizers: Iterable[torch.optim.Optimizer], number: int) -> None:
    """Give the states and the groups' options of an unsharded model's optimizers values that depend on a number."""
    generator = torch.Generator().manual_seed(100 + number)
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    optimizer.state[parameter] = _refilled(optimizer.state[parameter], generator, number)
            key = "rate" if "rate" in group else "lr"
            rate = 2.0**-number / (1 + index)
            group[key] = torch.tensor(rate) if isinstance(group[key], torch.Tensor) else rate


def _refilled(value: Any, generator: torch.Generator, number: int) -> Any:
    if isinstance(value, torch.Tensor):
        found = torch.empty_like(value)
        _fill(found, generator, number)
        return found
    if isinstance(value, dict):
        return {key: _refilled(one, generator, number) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_refilled(one, generator, number) for one in value)
    if isinstance(value, bool) or value is None:
        return value
    return f"{value}{number}" if isinstance(value, str) else value + number


# What state dicts have.


def model_entries(model: nn.Module, *, inside: str | None = None, keeps: bool = True, frozen: bool = True) -> Any:
    """The entries of an unsharded model's state dict.

    Args:
        inside: a module, whose entries alone there are.
        keeps: whether these have the name of that module.
        frozen: whether frozen parameters are entries.
    """
    state = copy.deepcopy(dict(model.state_dict()))
    if not frozen:
        named = model.named_parameters(remove_duplicate=False)
        # Of a tied parameter torch drops the first name alone, under which named_parameters() has it.
        for name in {name for name, value in named if not value.requires_grad}:
            del state[name]
    if inside is None:
        return state
    found = {name: value for name, value in state.items() if name.startswith(f"{inside}.")}
    return found if keeps else {name[len(inside) + 1 :]: value for name, value in found.items()}


def optimizer_entries(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Any:
    """The state dict of an unsharded model's optimizers by the names of the parameters."""
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    state: dict[str, Any] = {}
    groups: list[Any] = []
    for optimizer in optimizers:
        state |= {names[parameter]: copy.deepcopy(dict(one)) for parameter, one in optimizer.state.items()}
        groups += [{**group, "params": [names[one] for one in group["params"]]} for group in optimizer.param_groups]
    return {"state": state, "param_groups": copy.deepcopy(groups)}


def flattened(entries: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict as the documentation of ``flatten_optimizer_state_dict`` describes it."""

    def leaves(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {path: value}
        return {name: leaf for key, one in value.items() for name, leaf in leaves(one, f"{path}.{key}").items()}

    found = leaves(entries["state"], "state")
    for group in entries["param_groups"]:
        for name in group["params"]:
            found |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return found


def load_by_number(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], entries: Mapping[str, Any]) -> None:
    """Load a state dict by names into the optimizers of an unsharded model, by their own function."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        state, groups, count = {}, [], 0
        for group in optimizer.param_groups:
            own = [names[one] for one in group["params"]]
            (saved, *_) = [one for one in entries["param_groups"] if set(one["params"]) & set(own)]
            groups.append({**saved, "params": [*range(count, count + len(own))]})
            for number, name in enumerate(own, start=count):
                if name in entries["state"]:
                    state[number] = entries["state"][name]
            count += len(own)
        optimizer.load_state_dict(copy.deepcopy({"state": state, "param_groups": groups}))


# The sharded model.


@dataclasses.dataclass
class Twins:
    """A sharded model and an unsharded one, each with its optimizers.

    Attributes:
        plain: the unsharded one.
        adapter: of the sharded one.
        module: the sharded one, as it is passed to torch's functions.
        modules: its modules with buffers or extra state by their names in the unsharded one, inside of any wrapper.
        root: its root as it was before sharding.
        own: the optimizers of the sharded one.
        optimizers: those of the unsharded one.
    """

    plain: nn.Module
    adapter: Adapter
    module: nn.Module
    modules: dict[str, nn.Module]
    root: nn.Module
    own: list[torch.optim.Optimizer]
    optimizers: list[torch.optim.Optimizer]

    def fill(self, number: int) -> None:
        """Give both values that depend on a number, where they lie."""
        fill(self.plain, number)
        fill_states(self.optimizers, number)
        self.put()

    @torch.no_grad()
    def put(self) -> None:
        """Give the sharded model and its optimizers the values of the unsharded one, without torch's functions."""
        full = dict(self.plain.named_parameters())
        for name, piece in self.adapter.parameters().items():
            piece.tensor.copy_(piece.cut(full[canonical(name)].detach()))
        for name, module in self.modules.items():
            other: Any = self.plain.get_submodule(name)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    buffer.copy_(other._buffers[key])
            if hasattr(other, "runs"):
                module.runs = other.runs
        cuts = self.cuts()
        for mine, theirs in zip(self.own, self.optimizers, strict=True):
            for group, other in zip(mine.param_groups, theirs.param_groups, strict=True):
                group.update(copy.deepcopy({key: value for key, value in other.items() if key != "params"}))
            for name, state, expected in self._states(mine, theirs):
                _put(state, expected, cuts[name], full[name].shape)

    def cuts(self) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        """The cuts of parameters to this rank's pieces."""
        return {canonical(name): piece.cut for name, piece in self.adapter.parameters().items()}

    def _states(self, mine: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
        """The states of one optimizer: the parameter's name, this rank's and the unsharded one's."""
        held = {canonical(name): parameter for name, parameter in self.adapter.held_parameters().items()}
        names = {parameter: name for name, parameter in self.plain.named_parameters()}
        for parameter, expected in theirs.state.items():
            name = names[parameter]
            yield name, mine.state.get(held[name], {}), expected

    def wrong(self) -> Iterator[str]:
        """What this rank holds otherwise than the unsharded model: values, states, options of groups."""
        full = dict(self.plain.named_parameters())
        pieces = self.adapter.parameters()
        for name, piece in pieces.items():
            right = piece.cut(full[canonical(name)].detach())
            if not _equal(piece.tensor, right):
                yield f"{canonical(name)} has other values"
        for name, parameter in self.adapter.held_parameters().items():
            if parameter.grad is not None:
                yield f"{canonical(name)} has a gradient, which no call may leave"
        for name, module in self.modules.items():
            other: Any = self.plain.get_submodule(name)
            for key, buffer in module._buffers.items():
                if buffer is not None and not _equal(buffer, other._buffers[key]):
                    yield f"buffer {name}.{key} has other values"
            if getattr(other, "runs", None) != getattr(module, "runs", None):
                yield f"{name} has the extra state {module.runs} instead of {other.runs}"
        yield from self.wrong_states()

    def wrong_states(self) -> Iterator[str]:
        """What this rank's optimizers have otherwise than those of the unsharded model."""
        full, cuts = dict(self.plain.named_parameters()), self.cuts()
        empty = {canonical(name) for name, one in self.adapter.parameters().items() if not one.tensor.numel()}
        for mine, theirs in zip(self.own, self.optimizers, strict=True):
            for group, other in zip(mine.param_groups, theirs.param_groups, strict=True):
                one, two = ({key: value for key, value in each.items() if key != "params"} for each in (group, other))
                yield from differences(one, two, "the group's options")
            for name, state, expected in self._states(mine, theirs):
                if not state and (name in empty or not expected):
                    continue  # a rank that holds no element of a parameter may have no state of it
                yield from _state_differences(state, expected, cuts[name], full[name].shape, f"state of {name}")


def build(
    rank: Rank, model: nn.Module, *, number: int = 1, kind: str | None = None, wrapper: Any = "bare",
    units: Any = (), steps: bool = True, **options: Any,
) -> Twins:  # fmt: skip
    """Shard a copy of a model, with optimizers, and give it and the model the values of a number (collective).

    Args:
        kind: of the optimizers, as in :data:`OPTIMIZERS`.
        wrapper: what is around submodules, as in :data:`WRAPPERS`, or a function that changes the model.
        steps: whether the optimizers have made a step.
    """
    plain = model.to(rank.device)
    copied = copy.deepcopy(plain)
    named = copied.named_modules()
    modules = {name: module for name, module in named if module._buffers or hasattr(module, "runs")}
    adapter = sharded(
        rank, wrapper(copied) if callable(wrapper) else WRAPPERS[wrapper](copied), units=[*units], **options
    )
    module = _compiled(adapter.module) if wrapper == "compiled-root" else adapter.module
    make = OPTIMIZERS[kind] if kind is not None else None
    own, others = ([] if make is None else make([*one.named_parameters()]) for one in (adapter.module, plain))
    twins = Twins(plain, adapter, module, modules, copied, own, others)
    if steps:
        step(own)
        step(others)
    twins.fill(number)
    return twins


@torch.no_grad()
def _put(mine: Any, expected: Any, cut: Callable[[torch.Tensor], torch.Tensor], shape: Any) -> None:
    for key in [*mine] if isinstance(mine, dict) else range(len(mine)):
        value, other = mine[key], expected[key]
        if isinstance(value, torch.Tensor):
            local_of(value).copy_(_part(value, other, cut, shape))
        elif isinstance(value, (dict, list)):
            _put(value, other, cut, shape)
        else:
            mine[key] = other


def _part(value: torch.Tensor, other: torch.Tensor, cut: Callable[[torch.Tensor], torch.Tensor], shape: Any) -> Any:
    """This rank's part of a tensor of state: its piece, if it lies as the parameter does."""
    return cut(other) if other.shape == shape and other.ndim else other


def _state_differences(mine: Any, expected: Any, cut: Any, shape: Any, path: str) -> Iterator[str]:
    if isinstance(expected, torch.Tensor) and isinstance(mine, torch.Tensor):
        part = _part(mine, expected, cut, shape)
        if not _equal(local_of(mine), part):
            yield f"{path} is {_said(local_of(mine))} instead of {_said(part)}"
    elif isinstance(expected, dict) and isinstance(mine, dict):
        if mine.keys() != expected.keys():
            yield f"{path} has {sorted(map(str, mine))} instead of {sorted(map(str, expected))}"
        for key in [key for key in expected if key in mine]:
            yield from _state_differences(mine[key], expected[key], cut, shape, f"{path}: {key}")
    else:
        yield from differences(mine, expected, path)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Of the same kind of number and shape, bit for bit: both were copied, and nothing was computed.
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        values = ", ".join(f"{one:.4g}" for one in value.flatten()[:2].tolist())
        return f"{value.dtype} {tuple(value.shape)} {values}"
    return repr(value)


def differences(found: Any, expected: Any, path: str) -> Iterator[str]:
    """How nested containers of full tensors differ; a list may be a tuple, the order of parameters is no matter."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        if isinstance(found, DTensor) or not _equal(found, expected):
            yield f"{path} is {type(found).__name__} {_said(local_of(found))} instead of {_said(expected)}"
    elif isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in sorted(map(str, expected.keys() - found.keys())):
            yield f"{path} lacks {key!r}"
        for key in sorted(map(str, found.keys() - expected.keys())):
            yield f"{path} has {key!r} besides"
        for key in [key for key in expected if key in found]:
            one, two = found[key], expected[key]
            if key == "params":
                one, two = sorted(one), sorted(two)
            yield from differences(one, two, f"{path}: {key}" if path else str(key))
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(found) != len(expected):
            yield f"{path} has {len(found)} entries instead of {len(expected)}"
        for index, (one, two) in enumerate(zip(found, expected, strict=False)):
            yield from differences(one, two, f"{path} {index}")
    elif type(found) is not type(expected) or found != expected:
        yield f"{path} is {_said(found)} instead of {_said(expected)}"


def clone_of(value: Any) -> Any:
    """A container with copies of all tensors: what is loaded may be used as it is."""
    return map_tensors(torch.Tensor.clone, value)


def whole(rank: Rank, value: Any) -> Any:
    """A container with all tensors full and on the CPU (collective)."""
    return map_leaves(functools.partial(_whole_one, rank), value, kind=torch.Tensor)


def _whole_one(rank: Rank, value: Any) -> torch.Tensor:
    if not hasattr(value, "local_shards"):
        return states.whole_on_cpu(rank, value)
    # FSDP1 on process groups, of which others may have the same rows.
    group = {one.placement.rank() for one in value.metadata().shards_metadata}
    everyone = rank.exchange([one.tensor.cpu() for one in value.local_shards()])
    return torch.cat([part for index, parts in enumerate(everyone) if index in group for part in parts])


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a container by their paths."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(one, f"{path}.{key}" if path else str(key))


class Report:
    """Collects what is wrong with each of many calls, so that the failure of one item names all of them."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._lines: list[str] = []

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator["Report"]:
        """Collect what the block notes of one call. An error ends the case: other ranks may wait in the call."""
        before, self._lines = self._lines, []
        try:
            yield self
        except Exception as error:
            said = f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise AssertionError("\n  ".join([*before[:4], *self._lines[:4], said])) from error
        self._lines = [*before, *(f"{name}: {line}" for line in self._lines)]

    def note(self, lines: Iterable[str]) -> None:
        """Note what is wrong, a line each."""
        self._lines += lines

    def end(self) -> None:
        """Fail on every rank if anything is wrong on any (collective)."""
        everyone = self._rank.exchange(self._lines)
        found = [f"rank {index}: {line}" for index, lines in enumerate(everyone) for line in lines]
        more = f"\n  and {len(found) - 12} more" if len(found) > 12 else ""
        assert not found, "\n  ".join(["torch's functions for state dicts:", *found[:12]]) + more


# Calls with options.

#: By name, the options with which state dicts are read; None leaves the argument out.
READS: dict[str, dict[str, Any] | None] = {
    "no options": None,
    "defaults": {},
    "cpu": {"cpu_offload": True},
    "full": {"full_state_dict": True},
    "first rank": {"full_state_dict": True, "cpu_offload": True},
    "trainable": {"ignore_frozen_params": True},
    "full trainable": {"full_state_dict": True, "ignore_frozen_params": True},
    "first rank, trainable": {"full_state_dict": True, "cpu_offload": True, "ignore_frozen_params": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "cpu flattened": {"flatten_optimizer_state_dict": True, "cpu_offload": True},
    "full flattened": {"flatten_optimizer_state_dict": True, "full_state_dict": True},
}

#: By name, the options with which state dicts are loaded.
LOADS: dict[str, dict[str, Any] | None] = {
    "no options": None,
    "cpu": {"cpu_offload": True},
    "lenient": {"strict": False},
    "full": {"full_state_dict": True},
    "full lenient": {"full_state_dict": True, "strict": False},
    "sent": {"full_state_dict": True, "broadcast_from_rank0": True},
    "sent lenient": {"full_state_dict": True, "broadcast_from_rank0": True, "strict": False},
    "sent, cpu": {"full_state_dict": True, "broadcast_from_rank0": True, "cpu_offload": True},
}


def made(options: dict[str, Any] | None) -> Any:
    """The arguments of a call with these options."""
    return {} if options is None else {"options": StateDictOptions(**options)}


def check_read(rank: Rank, report: Report, found: Any, expected: Any, options: dict[str, Any] | None) -> None:
    """Note how a state dict that was read differs from the right one, or does not have the form of its options."""
    given = options or {}
    of_first = given.get("full_state_dict") and given.get("cpu_offload")
    if of_first and rank.index:
        report.note([f"this rank has {sorted(found)}, although it is not the first"] if found else [])
        return
    for path, value in tensors_in(found):
        if given.get("full_state_dict") and (isinstance(value, DTensor) or hasattr(value, "local_shards")):
            report.note([f"{path} is a {type(value).__name__}"])
        if given.get("cpu_offload") and value.device.type != "cpu":
            report.note([f"{path} is on {value.device}"])
    if not of_first:
        found = whole(rank, found)
    report.note(differences(found, expected, ""))


def works(rank: Rank, options: dict[str, Any] | None) -> bool:
    """Whether full values can go to the CPU: FSDP1 frees or mixes up what is there already (F-41, F-171)."""
    moves = bool(options and options.get("full_state_dict") and options.get("cpu_offload"))
    flat = "flat_parameters" in rank.implementation.capabilities()
    return not (moves and flat and rank.device.type == "cpu")


def loadable(rank: Rank, options: dict[str, Any] | None, entries: Any, shards: Callable[[], Any]) -> Any:
    """A state dict of the form that the options of a load want."""
    given = options or {}
    if given.get("broadcast_from_rank0"):
        return copy.deepcopy(entries) if rank.index == 0 else {}
    return copy.deepcopy(entries) if given.get("full_state_dict") else clone_of(shards())


def given(twins: Twins) -> Any:
    """The optimizers as a call takes them: one by itself, several as an iterator."""
    return twins.own[0] if len(twins.own) == 1 else iter(twins.own)


def has_numbers(twins: Twins) -> bool:
    """Whether optimizers have states that are no tensors."""
    states = [state for optimizer in twins.optimizers for state in optimizer.state.values()]
    return any(not isinstance(value, torch.Tensor) for state in states for value in state.values())


def spread(rank: Rank, mesh: str) -> Any:
    """The options of a model on a mesh of four ranks."""
    if mesh == "ranks":  # of five rows the last rank has none
        return {"units": [["deep"]]}
    if mesh == "replicas":
        return {"units": [["deep"]], "mesh": rank.mesh((2, 2), ("replicate", "shard"))}
    if mesh in ("subgroup", "process-groups"):  # FSDP1 has ShardedTensors on process groups
        mine = rank.mesh((2, 2), ("copy", "dp"))["dp"]
        return {"units": [["deep"]], "mesh": mine, "as_groups": mesh == "process-groups"}
    both = rank.mesh((2, 2), ("dp", "tp"))
    plan = functools.partial(parallel.parallelize_mlps, mesh=both["tp"])
    return {"units": [["layers.0"], ["layers.1"]], "mesh": both["dp"], "wrapper": plan}
