"""Chapter CALLS: states of optimizers of any content, by each of the calls that save and load them.

An optimizer that moves nothing writes what it keeps of a parameter, a function of each element. Hence an unsharded
optimizer has the full states, and each rank's own parameters say what is to be loaded into it, bit for bit.
"""

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.suites.apis import Fsdp1, fsdp1
from shardproof.testing import Capability, Rank, contract, needs, world
from shardproof.testing.states import whole_on_cpu

pytestmark = [needs(Capability.FSDP1_API), world(2)]

State = dict[str, Any]
#: float32 has no number between this one and the next even one.
MANY = 2**24 + 1

#: What an optimizer keeps of a parameter. Padding of flat parameters is zero, and so is what is kept of it.
CONTENTS: dict[str, Callable[[torch.Tensor], State]] = {
    "moments": lambda value: {"exp_avg": value * 2, "exp_avg_sq": value * value, "step": torch.tensor(3.0)},
    "none": lambda value: {"momentum_buffer": None},
    "none-beside-a-moment": lambda value: {"exp_avg": value * 2, "max_exp_avg_sq": None},
    "words": lambda value: {"step": MANY, "rate": 0.1, "kind": "momentum", "nesterov": True, "betas": (0.9, 0.99)},
    "lists": lambda value: {"betas": [0.9, 0.99], "options": {"nesterov": True}},
    "counters": lambda value: {"step": torch.tensor(MANY), "total": torch.tensor(MANY, dtype=torch.float64)},
    "counter-beside-a-moment": lambda value: {"exp_avg": value * 2, "step": torch.tensor(MANY)},
    "int64": lambda value: {"seen": (value * 2**40).to(torch.int64)},
    "bool": lambda value: {"moved": value > 0},
    "bfloat16": lambda value: {"exp_avg": value.bfloat16()},
    "float64": lambda value: {"exp_avg": value.double() / 3},
    "nothing": lambda value: {},
}


class Keeps(torch.optim.Optimizer):
    """Keeps of each parameter with a gradient what a function makes of its elements, and moves nothing."""

    def __init__(self, groups: Any, kept: Callable[[torch.Tensor], State]) -> None:
        super().__init__(groups, {"lr": 0.25})
        self._kept = kept

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in _parameters(self):
            if parameter.grad is not None:
                self.state[parameter] = self._kept(parameter.detach())

    def to_load(self) -> dict[int, State]:
        """By numbers, what is to be loaded of the parameters of which this rank has elements."""
        numbered = enumerate(_parameters(self))
        return {number: self._kept(one.detach()) for number, one in numbered if one.numel() and one.requires_grad}


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


@dataclasses.dataclass(frozen=True)
class Saving:
    """Two models with the same values on wrappers, the first one's optimizer after a step, and an unsharded model's."""

    fsdp: Fsdp1
    model: nn.Module
    optimizer: Keeps
    taking: nn.Module
    loaded: Keeps
    plain: nn.Module
    full: Keeps

    @property
    def kind(self) -> Any:
        """``FullyShardedDataParallel``."""
        return self.fsdp.kind

    @property
    def expected(self) -> dict[str, State]:
        """By names, the states of the unsharded model's optimizer."""
        return {name: self.full.state[one] for name, one in self.plain.named_parameters() if one in self.full.state}


def _saving(fsdp: Fsdp1, content: str, *, flat: bool, shards: bool, frozen: bool = False) -> Saving:
    """Make the models: two units in a wrapper, next to a layer without one."""
    plain: Any = nn.Sequential(fsdp.layers(), nn.Linear(4, 4).to(fsdp.device))
    if frozen:
        plain[0][0].requires_grad_(False)

    def wrapped() -> Any:
        model: Any = copy.deepcopy(plain)
        wrap: Any = fsdp.wrap if shards else fsdp.without_shards
        model[0][0] = wrap(model[0][0], use_orig_params=not flat)
        model[0] = wrap(model[0], use_orig_params=not flat)
        return model

    models = (wrapped(), wrapped(), plain)
    optimizers = [Keeps(_groups(model), CONTENTS[content]) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        fsdp.train(model, optimizer=optimizer)
    return Saving(fsdp, models[0], optimizers[0], models[1], optimizers[1], plain, optimizers[2])


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with learning rates of their own, of which the second has the layer without a wrapper first."""
    parameters = [*model.parameters()]
    return [{"params": parameters[:1], "lr": 0.5}, {"params": [*reversed(parameters[1:])], "lr": 0.125}]


class Way(NamedTuple):
    """How states are saved, and how what was saved becomes what an optimizer loads."""

    save: Callable[[Saving], State]
    load: Callable[[Saving, State], State]


def _in_form(form: str) -> Way:
    """The calls of today in a form that is set: "full", "first-rank" or "sharded"."""

    def states(one: Saving, model: nn.Module) -> Any:
        fsdp = one.fsdp
        return fsdp.sharded_states(model) if form == "sharded" else fsdp.full_states(model, first_rank=form != "full")

    def save(one: Saving) -> State:
        with states(one, one.model):
            found: State = one.kind.optim_state_dict(one.model, one.optimizer)
            return found

    def load(one: Saving, saved: State) -> State:
        with states(one, one.taking):
            found: State = one.kind.optim_state_dict_to_load(one.taking, one.loaded, saved)
            return found

    return Way(save, load)


def _of_numbers(one: Saving, saved: State, kind: str, **options: Any) -> State:
    """A full state dict for the unsharded model's optimizer: by numbers, as its files are, or by names."""
    to = one.fsdp.api.OptimStateKeyType[kind]
    found: State = one.kind.rekey_optim_state_dict(saved, to, one.plain, **(options or {"optim": one.full}))
    return found


def _full(one: Saving, **options: Any) -> State:
    found: State = one.kind.full_optim_state_dict(one.model, one.optimizer, **options)
    return found


#: How states are saved and loaded: now, by older calls, and by the first rank alone.
WAYS: dict[str, dict[str, Way]] = {
    "now": {"full": _in_form("full"), "sharded": _in_form("sharded")},
    "older": {
        "older-full": Way(
            lambda one: _full(one, rank0_only=False),
            lambda one, saved: one.kind.shard_full_optim_state_dict(saved, one.taking, optim=one.loaded),
        ),
        "older-full of parameters": Way(
            lambda one: _full(one, optim_input=_groups(one.model), rank0_only=False),
            lambda one, saved: one.kind.shard_full_optim_state_dict(
                saved, one.taking, optim_input=iter(_groups(one.taking))
            ),
        ),
        "older-sharded": Way(
            lambda one: one.kind.sharded_optim_state_dict(one.model, one.optimizer, one.fsdp.mesh.get_group()),
            lambda one, saved: one.kind.flatten_sharded_optim_state_dict(saved, one.taking, one.loaded),
        ),
        "by numbers of parameters": Way(
            lambda one: _of_numbers(one, _full(one, rank0_only=False), "PARAM_ID", optim_input=_groups(one.plain)),
            lambda one, saved: one.kind.shard_full_optim_state_dict(
                _of_numbers(one, saved, "PARAM_NAME", optim_input=iter(_groups(one.plain))),
                one.taking,
                optim=one.loaded,
            ),
        ),
        "by numbers": Way(
            lambda one: _of_numbers(one, _full(one, rank0_only=False), "PARAM_ID"),
            lambda one, saved: one.kind.shard_full_optim_state_dict(
                _of_numbers(one, saved, "PARAM_NAME"), one.taking, optim=one.loaded
            ),
        ),
    },
    "first-rank": {
        "full": _in_form("first-rank"),
        "older-scatter": Way(
            _full,
            lambda one, saved: one.kind.scatter_full_optim_state_dict(saved or None, one.taking, optim=one.loaded),
        ),
        "older-scatter to parameters": Way(
            _full,
            lambda one, saved: one.kind.scatter_full_optim_state_dict(
                saved or None, one.taking, optim_input=iter(_groups(one.taking))
            ),
        ),
    },
}


@contract("CALLS-13")
@pytest.mark.parametrize("flat", [False, True], ids=["original", "flat"])
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("ways", WAYS)
def test_any_content_is_saved(rank: Rank, ways: str, content: str, flat: bool) -> None:
    """Each call saves states of any content as an unsharded optimizer has them, in their dtypes."""
    _check(rank, ways, content, flat, loads=False)


@contract("CALLS-13")
@pytest.mark.parametrize("flat", [False, True], ids=["original", "flat"])
@pytest.mark.parametrize(
    ("ways", "content"),
    # The first rank of torch's raises at None once it has sent a tensor, and leaves the others waiting: that is the
    # finding of None alone, and a hang costs its deadline.
    [(ways, one) for ways in WAYS for one in CONTENTS if (ways, one) != ("first-rank", "none-beside-a-moment")],
)
def test_any_content_is_loaded(rank: Rank, ways: str, content: str, flat: bool) -> None:
    """What each call saved of states of any content is loaded as each rank's part of them, in their dtypes."""
    _check(rank, ways, content, flat, loads=True)


def _check(rank: Rank, ways: str, content: str, flat: bool, *, loads: bool) -> None:
    """Save with and without shards in each way, and load if so wanted (collective)."""
    wrong = list[str]()
    for shards in (True, False):
        one = _saving(fsdp1(rank), content, flat=flat, shards=shards)
        for name, way in WAYS[ways].items():
            what = f"{name}, {'sharded' if shards else 'replicated'}:"
            wrong += [f"{what} {text}" for text in _wrong(rank, one, way, loads=loads)]
    assert not wrong, f"{len(wrong)} things are wrong:\n" + "\n".join(wrong[:12])


#: What one of the parameters of a flat one has otherwise than the others, and what the error says.
UNLIKE: dict[str, tuple[Callable[[State], Any], str]] = {
    "another-name": (lambda state: state.update(other=1), "state names"),
    "another-number": (lambda state: state.update(step=torch.tensor(4.0)), "same value and dtype"),
    "another-dtype": (lambda state: state.update(step=torch.tensor(3.0, dtype=torch.float64)), "same value and dtype"),
    "a-number-for-a-tensor": (lambda state: state.update(exp_avg=0.5), "state types"),
    "a-tensor-of-another-dtype": (lambda state: state.update(exp_avg=state["exp_avg"].double()), "exp_avg"),
    "another-shape": (lambda state: state.update(exp_avg=state["exp_avg"].flatten()[:3]), "ptimizer state"),
    "no-state": (lambda state: state.clear(), "state"),
}


@contract("CALLS-13")
@pytest.mark.parametrize("unlike", UNLIKE)
def test_states_that_one_flat_parameter_cannot_have(rank: Rank, unlike: str) -> None:
    """States of a flat parameter that differ between its parameters are refused on all ranks, with what differs."""
    fsdp = fsdp1(rank)
    one = _saving(fsdp, "moments", flat=True, shards=True)
    change, words = UNLIKE[unlike]
    with fsdp.full_states(one.model):
        saved = one.kind.optim_state_dict(one.model, one.optimizer)
    change(saved["state"]["0.1.bias"])
    with fsdp.full_states(one.taking):
        fsdp.check_refused(words, lambda: one.kind.optim_state_dict_to_load(one.taking, one.loaded, saved))


@contract("CALLS-13")
def test_optimizer_that_lacks_a_flat_parameter_on_one_rank(rank: Rank) -> None:
    """The optimizer's state is refused on all ranks, and the parameters named, if a rank's optimizer lacks some."""
    fsdp = fsdp1(rank)
    layers: Any = fsdp.layers()
    layers[0] = fsdp.wrap(layers[0], use_orig_params=False)
    model = fsdp.wrap(layers, use_orig_params=False)
    parameters = [*model.parameters()]
    optimizer = fsdp.train(model, optimizer=torch.optim.Adam(parameters[:1] if rank.index else parameters))
    with fsdp.full_states(model):
        fsdp.check_refused("missing states", lambda: fsdp.kind.optim_state_dict(model, optimizer))


@contract("CALLS-13")
def test_keys_that_stay_or_cannot_change(rank: Rank) -> None:
    """A state dict that has the wanted keys already is returned with them; one with keys of both kinds is refused."""
    fsdp = fsdp1(rank)
    one = _saving(fsdp, "moments", flat=False, shards=True)
    named = _full(one, rank0_only=False)
    numbered = _of_numbers(one, named, "PARAM_ID")
    for kind, given in (("PARAM_NAME", named), ("PARAM_ID", numbered)):
        found = _of_numbers(one, given, kind)
        wrong = _differences(found["state"], given["state"])
        assert not wrong, f"by {kind} of a state dict that has these keys are {wrong}"
    mixed = {**numbered, "state": {**numbered["state"], "0.0.weight": named["state"]["0.0.weight"]}}
    for kind in ("PARAM_NAME", "PARAM_ID"):
        fsdp.check_refused("key", functools.partial(_of_numbers, one, mixed, kind))


def _wrong(rank: Rank, one: Saving, way: Way, *, loads: bool) -> list[str]:
    """What is wrong about what is saved, or about what is to be loaded (collective)."""
    error, found = "", dict[str, Any]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about older calls
        saved = way.save(one)
        if loads:
            try:
                found = way.load(one, copy.deepcopy(saved))
            except Exception as raised:
                error = f"{raised!r}"
    if any(errors := rank.exchange(error)):
        return [f"a load raises on rank {index} {text}" for index, text in enumerate(errors) if text]
    if loads:
        wrong = [f"to load are {text}" for text in _differences(found["state"], one.loaded.to_load())]
        rates = [group["lr"] for group in found["param_groups"]]
        return wrong if rates == [0.5, 0.125] else [*wrong, f"the groups to load have the learning rates {rates}"]
    full = _in_full(rank, saved)
    if not saved:
        return [] if rank.index else ["the first rank saves nothing"]
    by_numbers = any(isinstance(key, int) for key in full)
    expected = one.full.state_dict()["state"] if by_numbers else one.expected
    return [f"saved are {text}" for text in _differences(full, expected)]


def _in_full(rank: Rank, saved: State) -> dict[str, State]:
    """The states that this rank has saved, in full (collective)."""
    states = saved.get("state", {})
    tensors = [
        (name, key)
        for name, state in states.items()
        for key, value in state.items()
        if isinstance(value, DTensor) or hasattr(value, "local_shards")
    ]
    everyone = rank.exchange(tensors)
    assert all(one == everyone[0] for one in everyone), f"the ranks have saved these sharded states: {everyone}"
    return {name: {key: _whole(rank, value) for key, value in state.items()} for name, state in states.items()}


def _whole(rank: Rank, value: Any) -> Any:
    return whole_on_cpu(rank, value) if isinstance(value, torch.Tensor) else value


def _differences(found: dict[Any, State], expected: dict[Any, State]) -> list[str]:
    """What differs between states, with the names and values."""
    kept = {key: state for key, state in found.items() if state}
    needed = {key: state for key, state in expected.items() if state}
    if kept.keys() != needed.keys():
        return [f"states of {sorted(kept)}, not of {sorted(needed)}"]
    wrong = list[str]()
    for key, state in needed.items():
        if kept[key].keys() != state.keys():
            wrong.append(f"of {key} {sorted(kept[key])}, not {sorted(state)}")
            continue
        pairs = [(name, kept[key][name], value) for name, value in state.items()]
        wrong += [
            f"{name} of {key} as {one!r}, not {value!r}" for name, one, value in pairs if not _is_same(one, value)
        ]
    return wrong


def _is_same(found: Any, expected: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        return type(found) is type(expected) and bool(found == expected)
    if not isinstance(found, torch.Tensor):
        return False
    return found.dtype is expected.dtype and torch.equal(found.cpu(), expected.cpu())
