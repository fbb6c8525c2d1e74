"""Reads the state dicts of a run whole, and compares them with what ranks hold, with a plain model and with others."""

import functools
import hashlib
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.tensor import DTensor

from shardproof.harness.adapters.base import FullParams, StateForm
from shardproof.harness.judging.finding import Finding, Location, Stage
from shardproof.harness.models import optim
from shardproof.harness.models.plain import mean_square
from shardproof.harness.models.shapes import Stateful
from shardproof.harness.parity.rank import Rank
from shardproof.harness.parity.rank_state import Member
from shardproof.harness.parity.run import Run, StepPicture
from shardproof.harness.tensors import notes
from shardproof.harness.tensors.trees import full_of, local_of, map_leaves
from shardproof.testing.compare import each_once

State = dict[str, Any]
"""The state dicts of a model, under "model", and of its optimizer, under "optimizer"; as ``Adapter.checkpoint``."""

_Problem = tuple[Stage, str, str]
"""A stage, a name and what is wrong with it."""


def read(member: Member, run: Run, *, form: StateForm = "sharded") -> State:
    """Return a run's state dicts whole on every rank, on the CPU (collective).

    Raises:
        Divergence: on every rank, if the state dicts of a rank do not have this form, or whole values are not those of
            the first rank.
    """
    notes.tell("check", kind="form", form=form)
    state = run.adapter.checkpoint(form=form)
    _agree(member, _of_other_form(member, run, state, form), title=f"a state dict is not of the form {form!r}")
    if form == "first-rank":
        gathered = cast(State, member.exchange(state if member.index == 0 else None)[0])
    else:
        gathered = map_leaves(functools.partial(whole_on_cpu, member), state, kind=torch.Tensor)
    if form == "full":
        _agree(member, _other_than_first(member, run, gathered), title="whole state dicts differ between ranks")
    notes.tell("read", state=gathered)
    return gathered


def check_names(member: Member, state: State, plain: nn.Module) -> None:
    """Check that a state dict has the names, shapes and dtypes of the model without sharding (collective).

    The state is what :func:`read` returned; ``plain`` is not sharded, recomputed or compiled.
    """
    _agree(member, _misnamed(state, plain), title="a state dict is not that of the unsharded model")


def check_held(member: Member, run: Run, state: State) -> None:
    """Check that every rank holds its part of the values of a state that :func:`read` returned (collective).

    The parts are read where they lie, by the adapter, and not from another state dict of the run.
    """
    _agree(member, _not_held(run, state), title="what ranks hold differs from a state dict")


def check_same(member: Member, found: State, expected: State) -> None:
    """Check that two states have the same names, values and options of the optimizer's groups (collective)."""
    notes.tell("check", kind="same", found=found, expected=expected)
    _agree(member, _differences(found, expected), title="two state dicts that should be equal differ")


def _agree(member: Member, problems: Iterator[_Problem], *, title: str) -> None:
    found = next(problems, None)
    finding = None
    if found is not None:
        stage, name, text = found
        finding = Finding(Location(stage=stage, rank=member.index, name=name), text)
    member.agree(finding, title=title)


def _of_other_form(member: Member, run: Run, state: State, form: StateForm) -> Iterator[_Problem]:
    if form == "sharded":
        yield from _more_than_a_share(run, state)
        return
    for kind, entries in _by_kind(state):
        if form == "first-rank" and member.index:
            if entries:
                text = f"this rank's dict of the {kind} has {len(entries)} entries, although it is not the first"
                yield _STAGES[kind], next(iter(entries)), text
            continue
        for name, value in _tensors(entries):
            if isinstance(value, DTensor) or _shards(value) is not None:
                yield _STAGES[kind], name, f"is a {type(value).__name__}, not a whole tensor"
            elif form == "first-rank" and value.device.type != "cpu":
                yield _STAGES[kind], name, f"is on {value.device}, not on the CPU"


def _other_than_first(member: Member, run: Run, state: State) -> Iterator[_Problem]:
    """Each rank's whole values hold its own part, and those of others only if all have gathered in one order."""
    divided = _divided(run)
    mine = {
        (_STAGES[kind], name): _digest(value)
        for kind, entries in _by_kind(state)
        for name, value in _tensors(entries)
        if name.partition(": ")[0] in divided
    }
    first = member.exchange(mine)[0]
    for (stage, name), digest in mine.items():
        if first.get((stage, name)) != digest:
            yield stage, name, "has other values than on the first rank"


def _divided(run: Run) -> Set[str]:
    """The names of the parameters that ranks share; buffers, and parameters that are ignored, are each rank's own."""
    return run.coverage.shapes.keys() - set(run.adapter.config.ignored_params)


def _digest(value: torch.Tensor) -> bytes:
    return hashlib.blake2b(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).digest()


def _more_than_a_share(run: Run, state: State) -> Iterator[_Problem]:
    """A rank has its share of what is divided, and the state dict keeps no more alive."""
    size = run.adapter.config.shard_size
    if "parameters" not in run.adapter.traits.shards or size == 1:
        return
    parameters = _divided(run)
    for kind, entries in _by_kind(state):
        held, allowed = {}, 0
        for name, value in _tensors(entries):
            if not value.ndim or name.partition(": ")[0] not in parameters:
                continue
            share = math.ceil(value.shape[0] / size) * math.prod(value.shape[1:])
            shards = _shards(value)
            local = local_of(value) if shards is None else next((one.tensor for one in shards), torch.empty(0))
            if local.numel() > share:
                yield _STAGES[kind], name, f"has {local.numel()} elements on this rank, whose share is {share}"
            held[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
            allowed += share * value.dtype.itemsize
        if sum(held.values()) > allowed:
            text = f"its tensors keep {sum(held.values())} bytes alive on this rank, whose share is {allowed}"
            yield _STAGES[kind], f"the {kind}'s state dict", text


def _tensors(entries: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, value) for name, value in entries.items() if isinstance(value, torch.Tensor))


_STAGES = {"model": Stage.PARAMETER, "optimizer": Stage.OPTIMIZER_STATE}


def _by_kind(state: State) -> Iterator[tuple[str, dict[str, Any]]]:
    """The entries of the model, and those of the optimizer by name and key."""
    yield "model", dict(state["model"])
    if "optimizer" in state:
        yield "optimizer", _entries(state["optimizer"])


def _entries(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{name}: {key}": value for name, values in optimizer.get("state", {}).items() for key, value in values.items()
    }


def _shards(value: torch.Tensor) -> Sequence[Any] | None:
    """This rank's shards of a ShardedTensor, in which FSDP1 saves without a mesh; None of another tensor."""
    return value.local_shards() if hasattr(value, "local_shards") else None


def whole_on_cpu(member: Member, value: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in full, sharded in whichever form (collective)."""
    shards = _shards(value)
    if shards is not None:
        # Shards are rows, in the order of the ranks. They may be on the CPU, for which their group has no backend.
        return torch.cat([*itertools.chain(*member.exchange([one.tensor.cpu() for one in shards]))])
    return full_of(value).detach().cpu().clone()


def _misnamed(state: State, plain: nn.Module) -> Iterator[_Problem]:
    expected = plain.state_dict()
    yield from _other_names(Stage.PARAMETER, state["model"], expected, "the unsharded model")
    for name, value in expected.items():
        found = state["model"][name]
        if not isinstance(value, torch.Tensor):
            if type(found) is not type(value):
                yield Stage.PARAMETER, name, f"is {found!r}; in the unsharded model it is {value!r}"
        elif (found.shape, found.dtype) != (value.shape, value.dtype):
            mine, its = (f"the shape {tuple(one.shape)} and the dtype {one.dtype}" for one in (found, value))
            yield Stage.PARAMETER, name, f"has {mine}; in the unsharded model it has {its}"
    if "optimizer" not in state:
        return
    names = [name for name, _ in plain.named_parameters()]
    grouped = [name for group in state["optimizer"]["param_groups"] for name in group["params"]]
    if sorted(grouped) != sorted(names):
        yield Stage.OPTIMIZER_STATE, "param_groups", f"the groups have {sorted(grouped)} instead of {sorted(names)}"
    trained = {name: value for name, value in plain.named_parameters() if value.requires_grad}
    yield from _other_names(Stage.OPTIMIZER_STATE, state["optimizer"]["state"], trained, "the unsharded model")


def _other_names(stage: Stage, found: Mapping[str, Any], expected: Mapping[str, Any], whose: str) -> Iterator[_Problem]:
    for name in sorted(expected.keys() - found.keys()):
        yield stage, name, f"is missing; {whose} has it"
    for name in sorted(found.keys() - expected.keys()):
        yield stage, name, f"is unknown; {whose} has no such name"


def _not_held(run: Run, state: State) -> Iterator[_Problem]:
    for name, piece in run.adapter.parameters().items():
        yield from _difference(Stage.PARAMETER, name, piece.tensor.cpu(), piece.cut(state["model"][name]))
    for name, value in state["model"].items():
        module, _, last = name.rpartition(".")
        # The buffers of the module as it was before sharding: implementations leave them there.
        owner = run.original_module(module)
        owner = getattr(owner, "_checkpoint_wrapped_module", owner)
        buffer = owner._buffers.get(last)
        if buffer is not None:
            yield from _difference(Stage.PARAMETER, name, buffer.cpu(), value)
        if last == "_extra_state" and value != owner.get_extra_state():
            yield Stage.PARAMETER, name, f"is {value!r} in the state dict; the module has {owner.get_extra_state()!r}"
    if "optimizer" not in state:
        return
    saved = state["optimizer"]["state"]
    held = {name for name, piece in run.adapter.parameters().items() if piece.tensor.numel()}
    for name, pieces in (run.adapter.optimizer_state() or {}).items():
        # A rank that holds no element of a parameter may have no state of it.
        if name in held and (lacking := saved.get(name, {}).keys() - pieces.keys()):
            yield Stage.OPTIMIZER_STATE, name, f"this rank has no {sorted(lacking)[0]!r} of it; the state dict has"
        for key, piece in pieces.items():
            if key not in saved.get(name, {}):
                yield Stage.OPTIMIZER_STATE, name, f"the state dict has no {key!r} of it; this rank has"
            else:
                yield from _difference(
                    Stage.OPTIMIZER_STATE, f"{name}: {key}", piece.tensor.cpu(), piece.cut(saved[name][key])
                )


def _differences(found: State, expected: State) -> Iterator[_Problem]:
    for (kind, mine), (_, others) in zip(_by_kind(found), _by_kind(expected), strict=True):
        stage = _STAGES[kind]
        yield from _other_names(stage, mine, others, "the other")
        for name, value in others.items():
            if isinstance(value, torch.Tensor):
                yield from _difference(stage, name, mine[name], value)
            elif mine[name] != value:
                yield stage, name, f"is {mine[name]!r}, and {value!r} in the other"
    if "optimizer" in expected:
        groups, others = found["optimizer"]["param_groups"], expected["optimizer"]["param_groups"]
        if len(groups) != len(others):
            text = f"there are {len(groups)} groups, and {len(others)} in the other"
            yield Stage.OPTIMIZER_STATE, "param_groups", text
        for number, (group, other) in enumerate(zip(groups, others, strict=False)):
            for key in sorted(group.keys() | other.keys()):
                one, two = (_option(options, key) for options in (group, other))
                if one != two:
                    yield Stage.OPTIMIZER_STATE, f"group {number}: {key}", f"is {one!r}, and {two!r} in the other"


def _option(options: Mapping[str, Any], key: str) -> Any:
    """An option of a group; torch may have made a list of a tuple, and the order of the parameters is no matter."""
    value = options.get(key)
    if key == "params":
        return sorted(options[key])
    return tuple(value) if isinstance(value, list) else value


def _difference(stage: Stage, name: str, mine: torch.Tensor, other: torch.Tensor) -> Iterator[_Problem]:
    if (mine.shape, mine.dtype) != (other.shape, other.dtype):
        first, second = (f"the shape {tuple(value.shape)} and the dtype {value.dtype}" for value in (mine, other))
        yield stage, name, f"has {first}, and {second} in the other"
    elif not torch.equal(mine, other):
        index = (mine != other).nonzero()[0]
        element = tuple(int(part) for part in index)
        ours, theirs = (float(value[element]) for value in (mine, other))
        yield stage, name, f"element {list(element)} is {ours!r}, and {theirs!r} in the other"


def read_and_check(member: Member, run: Run, form: StateForm, unsharded: nn.Module) -> State:
    """Read the state dicts, which must have the unsharded names and the values that ranks hold."""
    state = read(member, run, form=form)
    check_names(member, state, unsharded)
    check_held(member, run, state)
    return state


def check_left(state: Any, call: Callable[[], Any]) -> None:
    """Check that a call leaves a state dict as it was: its entries, their order, and the same tensors and values."""
    before = _leaves(state)
    copies = {
        name: [one.clone() for one in _parts(value)]
        for name, value in before.items()
        if isinstance(value, torch.Tensor)
    }
    call()
    after = _leaves(state)
    assert [*after] == [*before], f"the state dict that user code passed has the entries {[*after]}, not {[*before]}"
    replaced = [name for name in copies if after[name] is not before[name]]
    assert not replaced, f"the state dict that user code passed has other tensors under {', '.join(replaced)}"
    written = [name for name, parts in copies.items() if not all(map(torch.equal, _parts(after[name]), parts))]
    assert not written, f"the tensors that user code passed have other values under {', '.join(written)}"
    others = [name for name in before.keys() - copies if after[name] != before[name]]
    assert not others, f"the state dict that user code passed has other values under {', '.join(sorted(others))}"


def _parts(value: Any) -> list[torch.Tensor]:
    """Return this rank's part of a tensor; of a ShardedTensor there may be several, or none."""
    shards = _shards(value)
    return [local_of(value)] if shards is None else [one.tensor for one in shards]


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """All leaves of nested dicts and lists, by their paths."""
    if not isinstance(value, (Mapping, list)):
        return {name: value}
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    found = (_leaves(part, f"{name}.{key}" if name else str(key)) for key, part in parts)
    return {path: leaf for one in found for path, leaf in one.items()}


# Whole parameters in a context of user code, beside those of an unsharded model.


def check_whole(rank: Rank, how: FullParams, found: dict[str, nn.Parameter], plain: nn.Module) -> bool:
    """Check what a context gives this rank, and return whether it has whole parameters."""
    expected = dict(plain.named_parameters())
    if how.rank0_only and rank.index:
        count = sum(parameter.numel() for parameter in found.values())
        numel = sum(parameter.numel() for parameter in expected.values())
        assert count < numel, f"this rank has {count} of {numel} elements, although the first rank alone should"
        return False
    assert found.keys() == expected.keys(), f"the names differ in {sorted(found.keys() ^ expected.keys())}"
    for name, parameter in found.items():
        device = "cpu" if how.offload_to_cpu else rank.device.type
        assert parameter.device.type == device, f"{name} is on {parameter.device} instead of {device}"
        right = expected[name].detach().to(parameter.device)
        assert parameter.shape == right.shape, f"{name} has the shape {tuple(parameter.shape)}"
        assert torch.equal(parameter.detach(), right), f"{name} has other values than the unsharded model"
    return True


@torch.no_grad()
def write(parameters: dict[str, nn.Parameter]) -> None:
    """Change each element of each parameter in another way."""
    for parameter in parameters.values():
        parameter.mul_(torch.arange(1.0, parameter.numel() + 1, device=parameter.device).view_as(parameter) / 64)


def check_values(run: Run, plain: nn.Module) -> None:
    """Check that this rank holds its part of the parameters of an unsharded model."""
    full = dict(plain.named_parameters())
    for name, piece in run.adapter.parameters().items():
        assert torch.equal(piece.tensor, piece.cut(full[name].detach())), f"{name} has other values after the context"


def halve(run: Run, plain: nn.Module) -> None:
    """Halve the parameters where the optimizer updates them, and those of plain copies."""
    with torch.no_grad():
        for parameter in (*each_once(run.adapter.held_parameters()).values(), *plain.parameters()):
            parameter.mul_(0.5)


# Saves and loads a run through ``torch.distributed.checkpoint``, as a training script does.


def save(run: Run, directory: pathlib.Path) -> None:
    """Write the model's and the optimizer's state into ``directory`` (collective)."""
    state_dict_saver.save(run.adapter.checkpoint(), checkpoint_id=directory)


def load(run: Run, directory: pathlib.Path) -> None:
    """Load a checkpoint into a run with the sizes and the layout of the one that was saved (collective).

    Raises:
        AssertionError: the optimizer has no state to load into.
    """
    state = run.adapter.checkpoint()
    assert state["optimizer"]["state"], "the optimizer has no state: a resume that restored none of it would pass"
    state_dict_loader.load(state, checkpoint_id=directory)
    run.adapter.restore(state)


# Runs of a :class:`Stateful` model, which cases save and load.

DIM = 5
LR = 1e-2
#: The entries of the model whose values a forward does not change.
SAVED = [name for name, value in Stateful(DIM).state_dict().items() if not name.endswith("calls")]
TRAINED = [name for name, value in Stateful(DIM).named_parameters() if value.requires_grad]


def plain(rank: Rank, *, number: int = 0, for_flat: bool = False, has_extra: bool = False) -> Stateful:
    """The model of :func:`make`, not sharded."""
    torch.manual_seed(rank.seeds.init + number)
    return Stateful(DIM, freezes=not for_flat, has_extra=has_extra)


def make(rank: Rank, number: int, *, for_flat: bool = False, has_extra: bool = False, **options: Any) -> Run:
    """A run whose values, learning rates and decay depend on a number.

    Args:
        for_flat: whether all parameters are trainable and of one group, as those of a flat parameter are.
        has_extra: whether modules have extra state.
    """
    model, lr = plain(rank, number=number, for_flat=for_flat, has_extra=has_extra), LR * (1 + 2 * number)
    optimizer = optim.adamw(lr=lr) if for_flat else optim.in_two_groups("adamw", lr=lr)
    chosen: Any = {"units": model.units(), "optimizer": optimizer} | options
    return rank.run(model, **chosen)


def train(rank: Rank, run: Run, step: int) -> StepPicture:
    """Train one step."""
    batch = rank.batch(step, (3, DIM), mesh=run.adapter.config.mesh)
    return run.step([(batch,)], loss=mean_square)


def check_loads(rank: Rank, saved: Run, loaded: Run, form: StateForm, *, steps_first: bool = True) -> None:
    """Save after two steps and a change of the groups' options, load, and compare with the saved state."""
    for step in range(2):
        train(rank, saved, step)
    if steps_first:
        train(rank, loaded, 3)
    assert saved.adapter.optimizer is not None
    for group in saved.adapter.optimizer.param_groups:
        group["lr"], group["weight_decay"] = group["lr"] / 2, group["weight_decay"] / 4
        if "eps" in group:
            group["eps"] = 1e-7
    expected = read(rank, saved, form=form)
    check_held(rank, saved, expected)
    if form == "sharded":
        save(saved, rank.tmp_path / "checkpoint")
        load(loaded, rank.tmp_path / "checkpoint")
    else:
        loaded.adapter.restore(saved.adapter.checkpoint(form=form), form=form)
    check_held(rank, loaded, expected)
    check_same(rank, read(rank, loaded, form=form), expected)
