"""Chapter CALLS: each call of the API of ``FullyShardedDataParallel`` on each kind of model, at each moment of a step.

A run makes the calls, and its twin trains without them. The calls return what the twin's shards are cut from, and
afterwards both train the same bits: the same kernels on the same shards.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.testing import Capability, Rank, Run, contract, models, needs, world
from shardproof.testing.make import Adapter, cut_over
from shardproof.testing.states import whole_on_cpu
from shardproof.testing.train import mixed, optim, recompute, ties

pytestmark = [needs(Capability.FSDP1_API, Capability.WHOLE_PARAMETERS), world(2)]

MOMENTS = ("first", "before-forward", "before-backward", "before-step", "after-step", "no-sync")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        make: makes the model.
        units: its units.
        shape: of a batch.
        options: of the run, from the rank.
        evaluates: whether modules are in evaluation.
        without: the calls that are not made.
    """

    make: Callable[[], nn.Module] = lambda: models.Tower(dim=9)
    units: tuple[str, ...] = ("layers.0", "layers.1")
    shape: tuple[int, int] = (4, 9)
    options: Callable[[Rank], dict[str, Any]] = lambda rank: {}
    evaluates: bool = False
    without: tuple[str, ...] = ()


def _frozen() -> nn.Module:
    model = models.Tower(dim=9)
    model.layers[0].requires_grad_(False)
    return model


#: Kinds of models on two ranks.
KINDS = {
    "plain": Kind(),
    "flat": Kind(options=lambda rank: {"flat_parameters": True}),
    "evaluation": Kind(evaluates=True),
    "tied": Kind(make=functools.partial(ties.TiedMLP, 9), units=()),
    "frozen": Kind(make=_frozen),
    "empty-shards": Kind(make=lambda: models.two_linear((9, 1), (1, 1)), units=("2",)),
    "recomputed": Kind(options=lambda rank: {"prepare": functools.partial(recompute, means="wrapper")}),
    "kept": Kind(options=lambda rank: {"reshard_after_forward": False}),
    "replicated": Kind(options=lambda rank: {"shards": False}),
    "buffers": Kind(make=mixed.Mixed, units=("low", "high"), shape=(6, 4)),
}
_CUT = Kind(
    make=mixed.Mixed,
    units=("low", "high"),
    shape=(6, 4),
    options=lambda rank: cut_over(rank.mesh((2, 2), ("dp", "tp")), mixed.split_columns),
    without=("load of its full optimizer state", "load of its sharded optimizer state", "older optimizer state"),
)
#: Kinds of models on four.
KINDS_OF_FOUR = {
    "subgroup": Kind(options=lambda rank: {"mesh": rank.mesh((2, 2), ("copy", "shard"))["shard"]}),
    "replicas": Kind(options=lambda rank: {"mesh": rank.mesh((2, 2), ("replicate", "shard"))}),
    "tensor-parallel": _CUT,
    "tensor-parallel-loads": dataclasses.replace(_CUT, without=()),
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a call is made: in a run, whose twin shows what is right, of a model that is like ``plain``."""

    rank: Rank
    run: Run
    twin: Run
    plain: nn.Module

    @property
    def kind(self) -> Any:
        """``FullyShardedDataParallel``."""
        return self.api.FullyShardedDataParallel

    @property
    def api(self) -> Any:
        """The module with the wrapper and the classes of its arguments."""
        adapter: Any = self.run.adapter
        return adapter.api

    @property
    def model(self) -> Any:
        """The wrapper."""
        return self.run.adapter.module

    @property
    def optimizer(self) -> Any:
        return self.run.adapter.optimizer

    def form(self, name: str) -> Any:
        """The context of a form of state dicts, without a move to the CPU."""
        api = self.api
        if name == "sharded":
            return self.kind.state_dict_type(self.model, api.StateDictType.SHARDED_STATE_DICT)
        # What is on the CPU already need not go there, and torch's would free it: findings/F041.py.
        options = {"offload_to_cpu": False, "rank0_only": False}
        configs = api.FullStateDictConfig(**options), api.FullOptimStateDictConfig(**options)
        return self.kind.state_dict_type(self.model, api.StateDictType.FULL_STATE_DICT, *configs)

    def check_parameters(self, found: dict[str, Any]) -> None:
        """Check values by name against the twin's shards (collective)."""
        pieces, first = self.twin.adapter.parameters(), dict[int, str]()
        for name, one in self.plain.named_parameters(remove_duplicate=False):
            # A tied parameter has its piece under the first of its names.
            piece = pieces[first.setdefault(id(one), name)]
            if name in found or name in pieces:
                whole = whole_on_cpu(self.rank, found[name])
                assert whole.shape == one.shape, f"{name} has the shape {tuple(whole.shape)}, not {tuple(one.shape)}"
                assert torch.equal(piece.cut(whole), piece.tensor.cpu()), f"{name} has other values"

    def check_states(self, found: dict[str, Any]) -> None:
        """Check the states in a state dict of the optimizer against the twin's (collective)."""
        expected = {name: one for name, one in (self.twin.adapter.optimizer_state() or {}).items() if one}
        states = {
            name: {key: whole_on_cpu(self.rank, one) for key, one in state.items() if isinstance(one, torch.Tensor)}
            for name, state in found["state"].items()
        }
        for name, pieces in expected.items():
            for key, piece in pieces.items():
                assert key in states.get(name, {}), f"the {key} of {name} is not among {sorted(states)}"
                assert torch.equal(piece.cut(states[name][key]), piece.tensor.cpu()), f"the {key} of {name} is another"


def _state_dict(place: Place, form: str) -> None:
    with place.form(form):
        found = place.model.state_dict()
        names = place.plain.state_dict().keys()
        assert found.keys() == names, f"the state dict has {sorted(found)}, not {sorted(names)}"
        place.check_parameters(found)


def _load_own(place: Place, form: str) -> None:
    with place.form(form):
        state = place.model.state_dict()
        found = place.model.load_state_dict(state)
    assert not found.missing_keys and not found.unexpected_keys, f"a load of its own state dict finds {found}"


def _summon(place: Place, **options: Any) -> None:
    with place.kind.summon_full_params(place.model, **options):
        place.check_parameters(dict(place.run.adapter.named_parameters()))


def _optim(place: Place, form: str) -> None:
    with place.form(form):
        place.check_states(place.kind.optim_state_dict(place.model, place.optimizer))


def _optim_load(place: Place, form: str) -> None:
    with place.form(form):
        saved = place.kind.optim_state_dict(place.model, place.optimizer)
        place.kind.optim_state_dict_to_load(place.model, place.optimizer, saved, load_directly=True)


def _older(place: Place) -> None:
    kind, model, optimizer = place.kind, place.model, place.optimizer
    full = kind.full_optim_state_dict(model, optimizer, rank0_only=False)
    place.check_states(full)
    optimizer.load_state_dict(kind.shard_full_optim_state_dict(full, model, optim=optimizer))
    sharded = kind.sharded_optim_state_dict(model, optimizer)
    optimizer.load_state_dict(kind.flatten_sharded_optim_state_dict(sharded, model, optimizer))


def _names(place: Place) -> None:
    found = {name.replace("_fsdp_wrapped_module.", "") for name, _ in place.model.named_buffers()}
    expected = {name for name, _ in place.twin.adapter.module.named_buffers()}
    assert found == {name.replace("_fsdp_wrapped_module.", "") for name in expected}, f"the buffers are {sorted(found)}"
    same = place.run.adapter.named_parameters().keys(), place.twin.adapter.named_parameters().keys()
    assert same[0] == same[1], f"the parameters are {sorted(same[0])}, not {sorted(same[1])}"


def _modules(place: Place) -> None:
    units, roots = (place.kind.fsdp_modules(place.model, root_only=only) for only in (False, True))
    assert roots == [place.model] and place.model in units, f"of {len(units)} wrappers {len(roots)} are roots"
    seen: list[nn.Module] = []
    assert place.model.apply(seen.append) is place.model, "apply returns another module"
    assert len(seen) == len([*place.model.modules()]), f"apply calls its function for {len(seen)} modules"
    assert place.model.check_is_root(), "the root says that it is none"


def _clip(place: Place) -> None:
    norm = place.model.clip_grad_norm_(torch.inf)
    twin: Any = place.twin.adapter.module
    expected = twin.clip_grad_norm_(torch.inf)
    assert torch.equal(norm, expected), f"clipping to infinity returns the norm {norm}, not {expected}"


def _forms(place: Place) -> None:
    types, kind = place.api.StateDictType, place.kind
    before = kind.get_state_dict_type(place.model).state_dict_type
    kind.set_state_dict_type(place.model, types.SHARDED_STATE_DICT)
    found = kind.get_state_dict_type(place.model).state_dict_type
    kind.set_state_dict_type(place.model, before)
    assert (before.name, found.name) == ("FULL_STATE_DICT", "SHARDED_STATE_DICT"), f"the forms are {before}, {found}"


#: The calls, and the moments at which they are not made.
CALLS: dict[str, tuple[Callable[[Place], None], tuple[str, ...]]] = {
    "full state dict": (functools.partial(_state_dict, form="full"), ()),
    "sharded state dict": (functools.partial(_state_dict, form="sharded"), ()),
    # A load between forward and backward changes values that backward needs.
    "load of its full state dict": (functools.partial(_load_own, form="full"), ("before-backward",)),
    "load of its sharded state dict": (functools.partial(_load_own, form="sharded"), ("before-backward",)),
    "full parameters": (_summon, ()),
    "full parameters without writeback": (functools.partial(_summon, writeback=False), ()),
    "full optimizer state": (functools.partial(_optim, form="full"), ()),
    "sharded optimizer state": (functools.partial(_optim, form="sharded"), ()),
    "load of its full optimizer state": (functools.partial(_optim_load, form="full"), ()),
    "load of its sharded optimizer state": (functools.partial(_optim_load, form="sharded"), ()),
    "older optimizer state": (_older, ()),
    "names": (_names, ()),
    "modules": (_modules, ()),
    # Between forward and backward some implementations refuse it.
    "clipping": (_clip, ("before-backward",)),
    "forms": (_forms, ()),
}


def _in_turn(moments: Sequence[str], first: int) -> tuple[str, ...]:
    """For each call the next moment, from the one with this number on."""
    return tuple(moments[(first + number) % len(moments)] for number in range(len(CALLS)))


@contract("CALLS-14")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("model", ["plain", "flat"])
def test_calls_at_any_moment(rank: Rank, model: str, moment: str) -> None:
    """Each call at each moment of a step is right, and changes nothing of the training."""
    _check(rank, KINDS[model], [moment] * len(CALLS))


@contract("CALLS-14")
@pytest.mark.parametrize("model", [one for one in KINDS if one not in ("plain", "flat")])
def test_calls_on_any_model(rank: Rank, model: str) -> None:
    """Each call on each kind of model, at moments in turn, is right, and changes nothing of the training."""
    _check(rank, KINDS[model], _in_turn(MOMENTS, [*KINDS].index(model) + 1))


@contract("CALLS-14")
@world(4)
@needs(Capability.HYBRID, Capability.TENSOR_PARALLEL)
@pytest.mark.parametrize(
    ("model", "moments"),
    [
        *(("subgroup", MOMENTS), ("replicas", MOMENTS)),
        *(("tensor-parallel", MOMENTS[:-1]), ("tensor-parallel", MOMENTS[-1:])),
        pytest.param("tensor-parallel-loads", MOMENTS, marks=needs(Capability.TENSOR_PARALLEL_CHECKPOINT)),
    ],
    ids=["subgroup", "replicas", "tensor-parallel", "tensor-parallel-no-sync", "tensor-parallel-loads"],
)
def test_calls_on_any_mesh(rank: Rank, model: str, moments: tuple[str, ...]) -> None:
    """Each call on a part of the ranks, on replicas and next to tensor parallelism, is right, as on other models."""
    _check(rank, KINDS_OF_FOUR[model], _in_turn(moments, 0))


def _check(rank: Rank, kind: Kind, moments: Sequence[str]) -> None:
    """Make each call at its moment, in a step of its own, and compare with a twin (collective)."""
    wrong, plain = list[str](), kind.make()
    pair: tuple[Run, Run] | None = None
    for step, ((name, (call, without)), moment) in enumerate(zip(CALLS.items(), moments, strict=True)):
        if moment in without or name in kind.without:
            continue
        if pair is None or moment == "first":
            pair = _pair(rank, kind)
        batch, error, what = rank.batch(step, kind.shape, mesh=pair[0].adapter.config.mesh), "", f"{name}, {moment}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about older calls
                _step(Place(rank, *pair, plain), batch, moment, call)
            error = _differs(*pair)
        except Exception as raised:
            error = f"{raised!r}"
        if any(errors := rank.exchange(error)):
            wrong += [f"{what}, on rank {index}: {text[:300]}" for index, text in enumerate(errors) if text]
            pair = None
    assert not wrong, f"{len(wrong)} calls go wrong:\n" + "\n".join(wrong)


def _pair(rank: Rank, kind: Kind) -> tuple[Run, Run]:
    """Make two runs of copies of a model (collective)."""
    model = kind.make()
    first, second = (
        rank.run(
            models.copy_of(model),
            units=[[name] for name in kind.units],
            optimizer=optim.sgd(momentum=0.5),
            **kind.options(rank),
        )
        for _ in range(2)
    )
    for run in (first, second):
        run.adapter.module.train(not kind.evaluates)
    return first, second


def _step(place: Place, batch: torch.Tensor, moment: str, call: Callable[[Place], None]) -> None:
    """Make a step of the run and of its twin together, with the call at a moment."""
    both: list[Adapter] = [place.run.adapter, place.twin.adapter]

    def at(one: str) -> None:
        if moment == one:
            call(place)

    at("first")
    at("before-forward")
    for waits in (True, False) if moment == "no-sync" else (False,):
        with contextlib.ExitStack() as stack:
            for adapter in both if waits else ():
                stack.enter_context(adapter.microbatch(is_last=False))
            outputs = [adapter.forward(batch) for adapter in both]
            at("before-backward")
            for adapter, output in zip(both, outputs, strict=True):
                adapter.backward(models.mean_square(output))
            if waits:
                at("no-sync")
    at("before-step")
    for adapter in both:
        adapter.step()
    at("after-step")
    for adapter in both:
        adapter.zero_grad(set_to_none=True)


def _differs(run: Run, twin: Run) -> str:
    """What a run trains otherwise than its twin, on this rank; or nothing."""
    expected = twin.adapter.parameters()
    wrong = [
        name for name, one in run.adapter.parameters().items() if not torch.equal(one.tensor, expected[name].tensor)
    ]
    states = twin.adapter.optimizer_state() or {}
    wrong += [
        f"the {key} of {name}"
        for name, state in (run.adapter.optimizer_state() or {}).items()
        for key, piece in state.items()
        if not torch.equal(piece.tensor, states[name][key].tensor)
    ]
    return f"afterwards the training differs in {', '.join(wrong)}" if wrong else ""
