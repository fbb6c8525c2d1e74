"""Chapter STATE: state dicts and checkpoints."""

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardproof.testing import Capability, Rank, Run, contract, each_value, models, needs, states, world
from shardproof.testing.axes import FLAT, REPLICAS, RESHARD, SHARDS, subjects
from shardproof.testing.compare import Piece, check_exact, each_once, full_of, original_name, step_label
from shardproof.testing.make import Adapter, OptimizerFactory, StateForm, as_fsdp1, built_in_with
from shardproof.testing.measure import Census
from shardproof.testing.refuse import Refusal
from shardproof.testing.states import check_left
from shardproof.testing.train import compiler, optim, recompute, shapes

#: Flaws of the state dict of a ``Stateful``, each with the entry that is missing, unknown or of another size.
FLAWED = {
    "missing": "out.weight",
    "missing-buffer": "layers.0.offset",
    "missing-in-a-unit": "layers.1.first.bias",
    "unknown": "stray",
    "unknown-in-a-unit": "layers.0.stray",
    "misfit": "out.bias",
    "misfit-in-a-unit": "layers.0.base",
}


def spoil(state: dict[str, Any], flaw: str) -> None:
    """Give the state dict of a model one flaw."""
    if flaw.startswith("missing"):
        del state[FLAWED[flaw]]
    elif flaw.startswith("unknown"):
        state[FLAWED[flaw]] = torch.ones(2)
    else:
        value = state[FLAWED[flaw]]
        larger = torch.zeros((value.shape[0] + 1, *value.shape[1:]), device=value.device)
        if isinstance(value, DTensor):
            larger = distribute_tensor(larger, value.device_mesh, value.placements)
        state[FLAWED[flaw]] = larger


def spoilt_load(model: nn.Module, flaw: str, *, strict: bool) -> Any:
    """Load a state dict with a flaw into an unsharded model."""
    state = dict(model.state_dict())
    spoil(state, flaw)
    return model.load_state_dict(state, strict=strict)


def report_of(load: Callable[[], Any]) -> dict[str, list[str]]:
    """The names that loading reports, by returning them or by an error."""
    try:
        missing, unexpected = load()
        return {"missing": sorted(missing), "unexpected": sorted(unexpected)}
    except RuntimeError as error:
        lines = str(error).splitlines()
    found = {"error": ["RuntimeError"]}
    for kind in ("Missing", "Unexpected"):
        found[kind] = sorted(name for line in lines if kind in line for name in re.findall(r'"([^"]+)"', line))
    found["misfit"] = sorted(re.findall(r"size mismatch for (\S+):", "\n".join(lines)))
    return found


def choice(name: str, piece: Piece, before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Whether a rank has the old or the new values of a parameter; None if it has none."""
    if not piece.tensor.numel():
        return None
    mine = piece.tensor.cpu()
    found = [which for which, state in (("old", before), ("new", after)) if torch.equal(mine, piece.cut(state[name]))]
    return found[0] if found else "neither"


pytestmark = [needs(Capability.DISTRIBUTED_CHECKPOINT, Capability.TIED_PARAMETERS, Capability.ADAM), world(2)]

FULL = needs(Capability.FULL_STATE_DICT)
FORMS = pytest.mark.parametrize("form", ["sharded", *(pytest.param(one, marks=FULL) for one in ("full", "first-rank"))])
WHOLE_FORMS = pytest.mark.parametrize(
    ("form", "shards"),
    [("full", True), ("first-rank", True), pytest.param("full", False, marks=needs(Capability.NO_SHARD))],
    ids=["full", "first-rank", "full-replicas-alone"],
)
WHY = "a state dict is read, or loaded with the values that are there"

Means = Literal["plain", "hooks", "wrapper", "compiled"]


def check_outputs(run: Run, twin: Run, batch: tuple[torch.Tensor, ...], message: str) -> None:
    """Check that evaluations of two runs have the same bits."""
    assert torch.equal(run.evaluate(batch)[0], twin.evaluate(batch)[0]), message


def trained(rank: Rank, **options: Any) -> Run:
    """A run after one step (collective)."""
    run = states.make(rank, 0, **options)
    states.train(rank, run, 0)
    return run


@contract("STATE-1", "STATE-4", "STATE-8")
@FORMS
@pytest.mark.parametrize(
    "means",
    [
        "plain",
        *(pytest.param(one, marks=needs(Capability.RECOMPUTATION)) for one in ("hooks", "wrapper")),
        pytest.param("compiled", marks=needs(Capability.COMPILED_MODULES)),
    ],
)
def test_names_and_values(rank: Rank, means: Means, form: StateForm) -> None:
    """State dicts of model and optimizer have the unsharded names, shapes and dtypes, and the ranks' values."""
    with compiler("eager") as backend:

        def prepare(model: nn.Module) -> nn.Module:
            if means == "plain":
                return model
            return backend.compile_layers(model) if means == "compiled" else recompute(model, means)

        run = trained(rank, has_extra=True, prepare=prepare, is_traced=means != "compiled")
        states.read_and_check(rank, run, form, states.plain(rank, has_extra=True))


@contract("STATE-1", "STATE-4", "STATE-8")
@FORMS
@FLAT
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_between_passes(rank: Rank, reshard_after_forward: bool | int | None, flat: bool, form: StateForm) -> None:
    """State dicts have the ranks' values, whatever is gathered: after an evaluation, a backward and a step."""
    run = states.make(rank, 0, for_flat=flat, flat_parameters=flat, reshard_after_forward=reshard_after_forward)
    unsharded = states.plain(rank, for_flat=flat)
    states.train(rank, run, 0)
    run.evaluate((rank.batch(1, (3, states.DIM)),))
    states.read_and_check(rank, run, form, unsharded)
    run.forward_backward((rank.batch(1, (3, states.DIM)),), loss=models.mean_square)
    states.read_and_check(rank, run, form, unsharded)
    run.adapter.step()
    states.read_and_check(rank, run, form, unsharded)


@contract("STATE-1")
@FORMS
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_before_training(rank: Rank, reshard_after_forward: bool | int | None, form: StateForm) -> None:
    """Before its first step, evaluated or not, a model has the values with which it was sharded."""
    run = states.make(rank, 0, optimizer=None, reshard_after_forward=reshard_after_forward)
    unsharded = states.plain(rank)
    expected = {"model": {name: value for name, value in unsharded.state_dict().items() if name in states.SAVED}}
    for evaluates in (False, True):
        if evaluates:
            run.evaluate((rank.batch(0, (3, states.DIM)),))
        state = states.read_and_check(rank, run, form, unsharded)
        states.check_same(rank, {"model": {name: state["model"][name] for name in expected["model"]}}, expected)


@contract("STATE-1", "STATE-5")
@needs(Capability.DTENSOR_PARAMETERS)
@pytest.mark.parametrize("how", ["copied", "assigned", pytest.param("pending", marks=needs(Capability.ASYNC_UNSHARD))])
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_of_a_module_inside_a_unit(rank: Rank, reshard_after_forward: bool | int | None, how: str) -> None:
    """The state dict of a part of a unit, whatever is gathered, has sharded values, and a load replaces these."""
    run = states.make(rank, 0, optimizer=None, reshard_after_forward=reshard_after_forward)
    unsharded, batch = states.plain(rank).to(rank.device), (rank.batch(0, (3, states.DIM)),)
    name = "layers.1.first"
    for _ in range(2):
        run.evaluate(batch)
        state, expected = run.original_module(name).state_dict(), unsharded.get_submodule(name).state_dict()
        whole = [key for key, value in state.items() if not isinstance(value, DTensor)]
        assert not whole, f"the state dict of {name} has unsharded values of {', '.join(whole)}"
        wrong = [key for key, value in state.items() if not torch.equal(value.full_tensor(), expected[key])]
        assert not wrong, f"the state dict of {name} has other values of {', '.join(wrong)}"
        run.evaluate(batch)
        handle: Any = None
        if how == "pending":
            run.adapter.unshard()  # with the old values
            unit: Any = run.adapter.module.get_submodule("layers.1")
            handle = unit.unshard(async_op=True)
            # Behind the gathers on their group: these have read the old values, and not what is loaded meanwhile.
            torch.distributed.all_reduce(torch.zeros(1, device=rank.device), group=run.adapter.config.mesh.get_group())
        doubled = {key: value * 2 for key, value in state.items()}
        # Copied into what is there: an assignment is noticed by itself.
        run.original_module(name).load_state_dict(doubled, assign=how == "assigned")
        unsharded.get_submodule(name).load_state_dict({key: value * 2 for key, value in expected.items()})
        if handle is not None:
            handle.wait()
            shown = {key: full_of(value.detach()) for key, value in run.original_module(name).named_parameters()}
            wrong = [key for key, value in shown.items() if not torch.equal(value, expected[key])]
            assert not wrong, f"a gather that was in flight has undone the load of {', '.join(wrong)} of {name}"
        twin = rank.run(models.copy_of(unsharded), units=unsharded.units())
        check_outputs(run, twin, batch, f"the forward after loading {name} has other values")


@contract("STATE-1", "STATE-5")
@needs("flat_parameters")
@pytest.mark.parametrize("form", ["sharded", "full"])
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_new_data(rank: Rank, reshard_after_forward: bool | int | None, form: StateForm) -> None:
    """New data that user code has assigned to the parameters are saved, and loading replaces them."""
    run = trained(rank, reshard_after_forward=reshard_after_forward)
    first = states.read_and_check(rank, run, form, states.plain(rank))
    saved = run.adapter.checkpoint(form=form)
    for halves in (1, 2):
        halve(run)
        found = states.read(rank, run, form=form)["model"]
        wrong = [name for name in states.TRAINED if not torch.equal(found[name], first["model"][name] * 0.5**halves)]
        assert not wrong, f"saved with other values than user code gave them: {', '.join(wrong)}"
    halve(run)
    run.adapter.restore(saved, form=form)
    states.check_held(rank, run, first)
    states.check_same(rank, states.read(rank, run, form=form), first)


def halve(run: Run) -> None:
    """Assign new data to all parameters, half of the old, as user code may."""
    for parameter in each_once(run.adapter.named_parameters()).values():
        parameter.data = parameter.data * 0.5


@contract("STATE-2")
@needs("flat_parameters")  # other implementations refuse such parameters
@FORMS
@SHARDS
def test_other_strides(rank: Rank, shards: bool, form: StateForm) -> None:
    """Column-major parameters are saved and loaded by index, from and into row-major ones."""
    forms = enumerate((None, shapes.by_columns))
    runs = [states.make(rank, number, prepare=one, shards=shards) for number, one in forms]
    for saved, loaded in (runs, runs[::-1]):
        states.check_loads(rank, saved, loaded, form)


@contract("STATE-2", "STATE-3")
@world(4)
@needs(Capability.HYBRID, Capability.FULL_STATE_DICT)
@pytest.mark.parametrize("replicated", ["before", "after"])
@REPLICAS
def test_full_states_of_replicas(rank: Rank, shape: tuple[int, int], replicated: str) -> None:
    """Replicas save full values that one mesh loads, and load the values that it has saved."""
    meshes = rank.mesh(shape, ("replicate", "shard")), rank.mesh()
    first, second = meshes if replicated == "before" else meshes[::-1]
    states.check_loads(rank, states.make(rank, 0, mesh=first), states.make(rank, 1, mesh=second), "full")


@contract("STATE-1", "STATE-2")
@world(4)
@needs(Capability.HYBRID, "as_groups")
def test_sharded_states_of_groups_of_replicas(rank: Rank) -> None:
    """Each replica saves its own shards of the values, also with process groups instead of the mesh."""
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    run = trained(rank, mesh=mesh, as_groups=True)
    states.read_and_check(rank, run, "sharded", states.plain(rank))


@contract("STATE-2", "STATE-3")
@pytest.mark.parametrize("form", ["sharded", pytest.param("full", marks=FULL)])
@pytest.mark.parametrize("saver", built_in_with(Capability.DISTRIBUTED_CHECKPOINT))
def test_from_another_implementation(rank: Rank, saver: str, form: StateForm) -> None:
    """A state dict of one implementation loads into another, or the same: values, states and options of groups."""
    saved, loaded = (states.make(rank, 0, implementation=saver, has_extra=True), states.make(rank, 1, has_extra=True))
    states.check_loads(rank, saved, loaded, form)


@contract("STATE-2", "STATE-3")
@FORMS
@FLAT
@pytest.mark.parametrize("units", ["other-units", "one-unit"])
def test_onto_other_units(rank: Rank, units: str, flat: bool, form: StateForm) -> None:
    """A state dict depends neither on the units nor on which parameters the optimizer has."""
    onto = [["layers.1"]] if units == "other-units" else []
    saved = states.make(rank, 0, for_flat=flat)
    loaded = states.make(rank, 1, for_flat=flat, units=onto, flat_parameters=flat)
    states.check_loads(rank, saved, loaded, form)


@contract("STATE-2", "STATE-3")
@world(4)
@pytest.mark.parametrize("fewer", ["before", "after"])
def test_onto_another_number_of_ranks(rank: Rank, fewer: str) -> None:
    """A checkpoint of four ranks loads on two, and one of two on four."""
    meshes = rank.mesh((2, 2), ("copy", "dp"))["dp"], rank.mesh()
    first, second = meshes if fewer == "before" else meshes[::-1]
    states.check_loads(rank, states.make(rank, 0, mesh=first), states.make(rank, 1, mesh=second), "sharded")


@contract("STATE-2", "STATE-8")
@FORMS
def test_module_with_two_names(rank: Rank, form: StateForm) -> None:
    """A module that is registered in two places has its values under both names."""

    def register(model: nn.Module) -> nn.Module:
        first = model.get_submodule("layers.0")
        first.again = first.first
        return model

    saved, loaded = states.make(rank, 0, prepare=register), states.make(rank, 1, prepare=register)
    states.train(rank, saved, 0)
    state = states.read_and_check(rank, saved, form, register(states.plain(rank)))
    for kind in ("weight", "bias"):
        names = [f"layers.0.{name}.{kind}" for name in ("first", "again")]
        assert torch.equal(*(state["model"][name] for name in names)), f"{names} have different values"
    if form == "sharded":  # torch's functions for full ones shard what they load under one name only
        states.check_loads(rank, saved, loaded, form)
        if Capability.DTENSOR_PARAMETERS in rank.implementation.capabilities():
            states.train(rank, saved, 2)
            loaded.adapter.restore(saved.adapter.checkpoint(form="flattened"), form="flattened")
            states.check_same(rank, states.read(rank, loaded), states.read(rank, saved))


@contract("STATE-3")
@FULL
@each_value("shards", "flat")
@FLAT
@WHOLE_FORMS
def test_into_a_new_optimizer(rank: Rank, form: StateForm, shards: bool, flat: bool) -> None:
    """An optimizer that has not stepped yet can load a full state, and options that a schedule has added."""
    saved, options = states.make(rank, 0, for_flat=flat), {"flat_parameters": flat, "shards": shards}
    if form == "first-rank" or rank.implementation.checkpoint is not Adapter.checkpoint:
        # torch's own functions raise for such an option where all ranks have the full state: findings/F311.py.
        assert saved.adapter.optimizer is not None
        torch.optim.lr_scheduler.ExponentialLR(saved.adapter.optimizer, 0.5)  # adds the initial rate
    states.check_loads(rank, saved, states.make(rank, 1, for_flat=flat, **options), form, steps_first=False)


@contract("STATE-3")
@subjects("strict", [True, False], ids=["strict", "lenient"])
@FORMS
def test_into_an_optimizer_of_fewer_parameters(rank: Rank, form: StateForm, strict: bool) -> None:
    """An optimizer of the trainable parameters loads the options and states that one of all parameters has saved.

    Both have a second group without parameters. If not strict, the state of one parameter may be missing.
    """
    saved = states.make(rank, 0, optimizer=beside_none(optim.adamw(lr=states.LR)))
    loaded = states.make(rank, 1, optimizer=optim.of_trainable(beside_none(optim.adamw(lr=3 * states.LR))))
    for run in (saved, loaded):
        states.train(rank, run, 0)
    state, expected, before = saved.adapter.checkpoint(form=form), states.read(rank, saved), states.read(rank, loaded)
    if not strict:
        state["optimizer"].get("state", {}).pop("layers.1.first.bias", None)
    loaded.adapter.restore(state, form=form, strict=strict)
    if not strict:  # the optimizer keeps the state that it had, or has none
        keeps = "layers.1.first.bias" in states.read(rank, loaded)["optimizer"]["state"]
        kept = before["optimizer"]["state"]["layers.1.first.bias"] if keeps else {}
        expected["optimizer"]["state"]["layers.1.first.bias"] = kept
    assert loaded.adapter.optimizer is not None
    rates = [group.get("lr") for group in loaded.adapter.optimizer.param_groups]
    assert rates == [states.LR] * 2, f"learning rates {rates} instead of {states.LR} in both groups"
    states.check_held(rank, loaded, expected)


def beside_none(factory: OptimizerFactory) -> OptimizerFactory:
    """A factory of optimizers with a second group, to which user code may add parameters later."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        groups: list[Any] = [{"params": [*parameters]}, {"params": []}]
        return factory(groups)

    return make


@contract("STATE-3")
@FORMS
@pytest.mark.parametrize("place", ["first", "between"])
def test_a_group_without_parameters(rank: Rank, place: str, form: StateForm) -> None:
    """Each group of an optimizer gets its own options, also where one without parameters is not the last."""
    index = ["first", "between"].index(place)
    if rank.implementation.checkpoint is Adapter.checkpoint:
        index = 2  # torch's own functions take the last group for an empty one before it: findings/F369.py

    def grouped(lr: float) -> OptimizerFactory:
        def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            given = [*parameters]
            groups: list[Any] = [{"params": given[:2], "lr": lr}, {"params": given[2:], "lr": 2 * lr}]
            groups.insert(index, {"params": [], "lr": 4 * lr})
            return torch.optim.AdamW(groups)

        return make

    saved, loaded = (states.make(rank, number, optimizer=grouped(2.0**-number)) for number in range(2))
    states.check_loads(rank, saved, loaded, form)
    assert loaded.adapter.optimizer is not None
    rates = [group["lr"] for group in loaded.adapter.optimizer.param_groups]
    expected = [0.5, 1.0]  # check_loads halves those of the saved run
    expected.insert(index, 2.0)
    assert rates == expected, f"the groups have the learning rates {rates} instead of {expected}"


@contract("STATE-3")
@FORMS
@FLAT
def test_states_of_two_dtypes(rank: Rank, flat: bool, form: StateForm) -> None:
    """An optimizer's state of a parameter is saved with each tensor in its own dtype, and loaded with its values."""
    saved, loaded = (states.make(rank, number, for_flat=flat, flat_parameters=flat) for number in range(2))
    for run in (saved, loaded):
        states.train(rank, run, 0)
    assert saved.adapter.optimizer is not None
    for state in saved.adapter.optimizer.state.values():
        if "exp_avg" in state:
            state["exp_avg"] = state["exp_avg"].bfloat16()
    expected = states.read_and_check(rank, saved, form, states.plain(rank, for_flat=flat))
    loaded.adapter.restore(saved.adapter.checkpoint(form=form), form=form)
    for state in expected["optimizer"]["state"].values():
        if "exp_avg" in state:
            # torch's optimizers cast what they load to the parameter's dtype.
            state["exp_avg"] = state["exp_avg"].float()
    states.check_held(rank, loaded, expected)


@contract("STATE-13")
@FORMS
@FLAT
def test_a_load_leaves_the_state_dict(rank: Rank, flat: bool, form: StateForm) -> None:
    """A state dict has the same entries, in the same order, and the same tensors after it was loaded as before."""
    saved, loaded = (states.make(rank, number, for_flat=flat, flat_parameters=flat) for number in range(2))
    for run in (saved, loaded):
        states.train(rank, run, 0)
    state = saved.adapter.checkpoint(form=form)
    # torch's own function for models works in the dict that it is given: findings/F372.py.
    is_torchs = form != "sharded" and rank.implementation.checkpoint is Adapter.checkpoint
    check_left(state["optimizer"] if is_torchs else state, lambda: loaded.adapter.restore(state, form=form))


@contract("STATE-3")
@needs("ignored_params")
@FORMS
def test_states_of_ignored_parameters(rank: Rank, form: StateForm) -> None:
    """The optimizer's state of an ignored parameter, equal on all ranks, is saved and loaded with the others."""
    options: Any = {"ignored_params": (IGNORED,), "prepare": same_gradient}
    saved, loaded = (states.make(rank, number, **options) for number in range(2))
    states.check_loads(rank, saved, loaded, form)
    state = states.read(rank, loaded, form=form)["optimizer"]["state"][IGNORED]
    assert "exp_avg" in state, f"the state of the ignored parameter has {sorted(state)} alone"


@contract("STATE-5", "STATE-8")
@FORMS
@pytest.mark.parametrize(
    "after",
    ["sharding", "evaluation", "backward", "step", pytest.param("unshard", marks=needs(Capability.ASYNC_UNSHARD))],
)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_loading_between_passes(
    rank: Rank, reshard_after_forward: bool | int | None, after: str, form: StateForm
) -> None:
    """The next forward uses loaded values, whatever is gathered, and training goes on from them."""
    source, twin, run = (states.make(rank, number, reshard_after_forward=reshard_after_forward) for number in (0, 0, 1))
    for one in (source, twin):
        states.train(rank, one, 0)
    if after != "sharding":
        states.train(rank, run, 3)
    batch = (rank.batch(4, (3, states.DIM)),)
    if after == "evaluation":
        run.evaluate(batch)
    elif after == "backward":
        run.forward_backward(batch, loss=models.mean_square)
    elif after == "unshard":
        run.adapter.unshard()
    state = source.adapter.checkpoint(form=form)
    run.adapter.restore(state if after != "sharding" else {"model": state["model"]}, form=form)
    check_outputs(run, twin, batch, "the forward after loading does not use what was loaded")
    if after == "sharding":
        return
    run.adapter.zero_grad(set_to_none=True)
    for step in (1, 2):
        pictures = (states.train(rank, one, step) for one in (run, twin))
        check_exact(rank, *pictures, step=step, why="the same values and states")


@contract("STATE-5")
@world(2, 4)
@pytest.mark.parametrize("name", ["layers.0.gain", "out.bias"])
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_loading_a_part(rank: Rank, reshard_after_forward: bool | int | None, name: str) -> None:
    """After a load of an entry of which some ranks hold no element, all ranks gather again, or none does."""
    source, run = (
        states.make(rank, number, optimizer=None, reshard_after_forward=reshard_after_forward) for number in (0, 1)
    )
    value, batch = source.adapter.checkpoint()["model"][name], rank.batch(0, (3, states.DIM))
    run.evaluate((batch,))
    run.adapter.restore({"model": {name: value}}, strict=False)
    unsharded = states.plain(rank, number=1).to(rank.device)
    unsharded.load_state_dict({name: states.plain(rank).state_dict()[name]}, strict=False)
    twin = rank.run(unsharded, units=unsharded.units(), reshard_after_forward=reshard_after_forward)
    check_outputs(run, twin, (batch,), f"the forward after loading {name} has other values")


@contract("STATE-6")
@FORMS
@FLAT
@pytest.mark.parametrize("loads", [False, True], ids=["saves", "saves-and-loads"])
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_saving_changes_nothing(
    rank: Rank, reshard_after_forward: bool | int | None, loads: bool, flat: bool, form: StateForm
) -> None:
    """A run that saves after each backward and each evaluation trains the same bits as one that does not.

    Loading a state dict just after it was saved changes nothing either.
    """
    options: Any = {"for_flat": flat, "flat_parameters": flat, "reshard_after_forward": reshard_after_forward}

    def save(adapter: Adapter) -> None:
        # There is nothing to save before the optimizer's first step.
        if adapter.optimizer is not None and adapter.optimizer.state:
            state = adapter.checkpoint(form=form)
            if loads:
                adapter.restore(state, form=form)

    twin, run = states.make(rank, 0, **options), states.make(rank, 0, after_backward=save, **options)
    census = Census(run)
    for step in range(3):
        check_exact(rank, states.train(rank, run, step), states.train(rank, twin, step), step=step, why=WHY)
        batch = (rank.batch(step, (3, states.DIM), microbatch=1),)
        check_outputs(run, twin, batch, f"the evaluation after {step_label(step)} differs")
        held = census.held()
        save(run.adapter)
        more = {unit: count for unit, count in census.held().items() if count > held.get(unit, 0)}
        assert not more, f"after saving, more bytes are gathered of {', '.join(more)}"


@contract("STATE-6")
@FORMS
@FLAT
def test_saving_before_a_step_without_state(rank: Rank, flat: bool, form: StateForm) -> None:
    """Saves before the first step of an optimizer without any state change neither its learning rate nor a gradient.

    The rate is a tensor, as which some optimizers read it in every step, also in one that a save runs.
    """

    def with_rate_in_a_tensor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=torch.tensor(0.05), foreach=False)
        optimizer.register_step_pre_hook(check_rates)
        return optimizer

    def check_rates(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        wrong = [rate for rate in rates if not isinstance(rate, torch.Tensor)]
        assert not wrong, f"the optimizer steps with the learning rates {wrong}, which were tensors before the save"

    options: Any = {"for_flat": flat, "flat_parameters": flat, "optimizer": with_rate_in_a_tensor}

    def save(adapter: Adapter) -> None:
        adapter.checkpoint(form=form)

    twin, run = states.make(rank, 0, **options), states.make(rank, 0, after_backward=save, **options)
    save(run.adapter)  # before any gradient
    for step in range(2):
        check_exact(rank, states.train(rank, run, step), states.train(rank, twin, step), step=step, why=WHY)


@contract("STATE-7")
@needs(Capability.SHARDED)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@subjects("flaw", FLAWED)
def test_entries_that_do_not_fit(rank: Rank, flaw: str, strict: bool) -> None:
    """Missing, unknown and misfit entries are reported by name on every rank as unsharded, and keep their values."""
    run, source = states.make(rank, 0, optimizer=None), states.make(rank, 1, optimizer=None)
    before, after = (states.read(rank, one)["model"] for one in (run, source))
    state = source.adapter.checkpoint()["model"]
    spoil(state, flaw)
    expected = report_of(lambda: spoilt_load(states.plain(rank), flaw, strict=strict))
    found = report_of(lambda: run.adapter.restore({"model": state}, strict=strict))
    assert found == expected, f"loading reports {found}; the unsharded model {expected}"
    is_new = {name: choice(name, piece, before, after) for name, piece in run.adapter.parameters().items()}
    everyone = rank.exchange({name: new for name, new in is_new.items() if new is not None})
    if Capability.FULL_STATE_DICT in rank.implementation.capabilities():
        # Read in another form than the loaded one: an error does not leave the adapter's choice of form behind.
        states.check_held(rank, run, states.read(rank, run, form="full"))
    assert "neither" not in is_new.values(), f"neither the old values nor those of the state dict: {is_new}"
    for name in is_new:
        choices = {one[name] for one in everyone if name in one}
        assert len(choices) == 1, f"{name} is loaded on some ranks only"
        if found.get("error") and name != FLAWED[flaw]:
            continue  # as unsharded, entries before the error may be loaded
        wanted = "old" if name == FLAWED[flaw] else "new"
        assert choices == {wanted}, f"{name} has the {choices.pop()} values instead of the {wanted}"


@contract("STATE-10")
@needs(Capability.SHARDED, Capability.FULL_STATE_DICT)
@each_value("form", "shards")
@FLAT
@WHOLE_FORMS
def test_full_state_dicts_are_copies(rank: Rank, form: StateForm, shards: bool, flat: bool) -> None:
    """Full values do not follow the training, and user code's writes to them change nothing."""
    # torch's own functions share tensors that need no gather with the optimizer: findings/F170.py.
    copies_all = rank.implementation.checkpoint is not Adapter.checkpoint
    options: Any = {"ignored_params": (IGNORED,), "prepare": same_gradient} if copies_all and not flat else {}
    twin, run = (states.make(rank, 0, for_flat=flat, flat_parameters=flat, shards=shards, **options) for _ in range(2))
    for one in (twin, run):
        states.train(rank, one, 0)
    state = run.adapter.checkpoint(form=form)
    # Ignored parameters are saved as in the unsharded model: the module's own tensors.
    shown = states.TRAINED if not options else [name for name in states.TRAINED if name != IGNORED]
    named = {name: value for name, value in state["model"].items() if name in shown}
    for name, values in state.get("optimizer", {}).get("state", {}).items():
        named |= {f"{key} of {name}": value for key, value in values.items() if value.ndim or copies_all}
    copies = {name: value.clone() for name, value in named.items()}
    check_exact(rank, states.train(rank, run, 1), states.train(rank, twin, 1), step=1, why=WHY)
    changed = [name for name, value in named.items() if not torch.equal(value, copies[name])]
    assert not changed, f"the step changed what was saved before of {', '.join(changed)}"
    for value in named.values():
        value.fill_(7.0)
    check_exact(rank, states.train(rank, run, 2), states.train(rank, twin, 2), step=2, why="the state dict is a copy")
    run.adapter.restore(state, form=form)
    states.train(rank, run, 3)
    changed = [name for name, value in named.items() if not torch.all(value == 7.0)]
    assert not changed, f"the step changed what was loaded before it of {', '.join(changed)}"


@contract("STATE-4")
@FORMS
def test_parameters_of_one_element(rank: Rank, form: StateForm) -> None:
    """A scalar of an optimizer's state is saved once per parameter, also where a parameter has one element itself."""
    model = nn.Sequential(nn.Linear(states.DIM, 1), nn.Linear(1, states.DIM))
    run = rank.run(model, units=[["0"]], optimizer=optim.adamw(lr=states.LR))
    states.train(rank, run, 0)
    found = run.adapter.checkpoint(form=form)["optimizer"].get("state", {})
    wrong = {name: state["step"].shape for name, state in found.items() if torch.as_tensor(state["step"]).ndim}
    assert not wrong, f"numbers of steps have shapes: {wrong}"


@contract("STATE-7")
@needs(Capability.DTENSOR_PARAMETERS, Capability.COMPILED_MODULES)
def test_missing_entry_of_a_compiled_model(rank: Rank) -> None:
    """Not strict, a model that user code has compiled after sharding loads entries by unsharded names, but for one."""
    run, source = (states.make(rank, number, optimizer=None) for number in (0, 1))
    name, state, expected = "layers.1.first.bias", source.adapter.checkpoint(), states.read(rank, source)
    expected["model"][name] = states.read(rank, run)["model"][name]
    del state["model"][name]
    with rank.monkeypatch.context() as patched:
        patched.setattr(run.adapter, "module", torch.compile(run.adapter.module, backend="eager"))
        run.adapter.restore(state, strict=False)
    states.check_held(rank, run, expected)


@contract("STATE-1")
@needs(Capability.SHARDED)
@FORMS
def test_versions_of_modules(rank: Rank, form: StateForm) -> None:
    """Module versions in a state dict's metadata, which tell old state dicts from new, are under unsharded names."""
    run = states.make(rank, 0, optimizer=None)
    found = getattr(run.adapter.checkpoint(form=form)["model"], "_metadata", None)
    expected: Any = states.plain(rank).state_dict()
    assert found is None or dict(found) == dict(expected._metadata), f"the versions are those of {sorted(found)}"


@contract("STATE-7")
@needs("flat_parameters", Capability.FULL_STATE_DICT)
def test_numbers_of_steps_that_differ(rank: Rank) -> None:
    """Numbers of steps that differ between parameters are refused where the optimizer has one parameter for them."""
    run = trained(rank, for_flat=True, flat_parameters=True)
    state = run.adapter.checkpoint(form="full")
    one = state["optimizer"]["state"]["layers.0.first.bias"]
    one["step"] = one["step"] + 1
    Refusal(rank, lambda: run.adapter.restore(state, form="full"), may_send=True).check_names("step")


@contract("STATE-7")
@needs(Capability.OPTIMIZER_KEYS, Capability.FULL_STATE_DICT)
def test_an_optimizer_without_a_parameter_on_one_rank(rank: Rank) -> None:
    """Ranks whose optimizers have different parameters all raise, with the name of a parameter and the right rank."""

    def of_some(parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        return torch.optim.AdamW(given[: len(given) - rank.index], lr=states.LR)

    run = trained(rank, for_flat=True, optimizer=of_some)
    refusal = Refusal(rank, lambda: run.adapter.checkpoint(form="full"), may_send=True)
    refusal.check_names("out.bias")
    is_right = "rank 0 is missing" not in str(refusal.text).lower()
    assert is_right, f"the optimizer of rank 0 has all parameters, and the error blames it: {refusal.text}"


@contract("STATE-12")
@needs(Capability.OPTIMIZER_KEYS)
@each_value("form")
@FLAT
@FORMS
def test_older_calls(rank: Rank, form: StateForm, flat: bool) -> None:
    """The older calls save and load the same optimizer states and options as the newer ones."""
    saved, loaded = (states.make(rank, number, for_flat=flat, flat_parameters=flat) for number in range(2))
    states.train(rank, saved, 0)
    states.train(rank, loaded, 3)
    expected, state = states.read(rank, saved, form=form), as_fsdp1(saved.adapter).legacy_optim_state_dict(form=form)
    assert form != "first-rank" or bool(state) == (rank.index == 0), f"rank {rank.index} has {sorted(state)}"
    loaded.adapter.restore({"model": saved.adapter.checkpoint(form="full")["model"]}, form="full")
    as_fsdp1(loaded.adapter).load_legacy_optim_state_dict(state, form=form)
    states.check_held(rank, loaded, expected)
    states.check_same(rank, states.read(rank, loaded, form=form), expected)


@contract("STATE-12")
@needs(Capability.OPTIMIZER_KEYS)
@FLAT
def test_by_numbers(rank: Rank, flat: bool) -> None:
    """An unsharded model's optimizer loads states by numbers, of two groups too, and its state dict loads back."""
    run = states.make(rank, 0, for_flat=flat, flat_parameters=flat)
    # Other names, but not in a state dict.
    model = recompute(states.plain(rank, for_flat=flat).to(rank.device), "wrapper")
    optimizer = (optim.adamw(lr=states.LR) if flat else optim.in_two_groups("adamw", lr=states.LR))(model.parameters())
    states.train(rank, run, 0)
    state = run.adapter.checkpoint(form="full")
    numbered = as_fsdp1(run.adapter).rekey_optim_state_dict(
        state["optimizer"], by="number", model=model, optimizer=optimizer
    )
    keys = [key for group in numbered["param_groups"] for key in group["params"]]
    assert sorted(keys) == list(range(len(keys))), f"the numbers of the parameters are {keys}"
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(numbered)
    names = {id(parameter): original_name(name) for name, parameter in model.named_parameters()}
    held = {names[id(parameter)]: state for parameter, state in optimizer.state.items()}
    for name, expected in state["optimizer"]["state"].items():
        wrong = [key for key, value in expected.items() if not torch.equal(held[name][key].cpu(), value.cpu())]
        assert not wrong, f"the unsharded model's optimizer has other values of {', '.join(wrong)} of {name}"
    named, before = optimizer.state_dict(), states.read(rank, run, form="full")
    named = as_fsdp1(run.adapter).rekey_optim_state_dict(named, by="name", model=model, optimizer=optimizer)
    states.train(rank, run, 3)
    run.adapter.restore({"model": before["model"]}, form="full")  # not `state`, whose buffers are the model's own
    as_fsdp1(run.adapter).load_legacy_optim_state_dict(named, form="full")
    states.check_held(rank, run, before)
    states.check_same(rank, states.read(rank, run, form="full"), before)


@contract("STATE-12")
@needs(Capability.OPTIMIZER_KEYS)
@FLAT
def test_an_optimizer_that_names_parameters(rank: Rank, flat: bool) -> None:
    """The states of an optimizer whose own state dict has names instead of numbers are saved as others are."""
    run = trained(rank, for_flat=flat, flat_parameters=flat)
    expected, optimizer = states.read(rank, run, form="full"), run.adapter.optimizer
    assert optimizer is not None
    names = {id(parameter): name for name, parameter in run.adapter.module.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    state = optimizer.state_dict()
    groups = [{**group, "params": [order[number] for number in group["params"]]} for group in state["param_groups"]]
    named = {"state": {order[number]: one for number, one in state["state"].items()}, "param_groups": groups}
    rank.monkeypatch.setattr(optimizer, "state_dict", lambda: named)
    states.check_same(rank, states.read(rank, run, form="full"), expected)


@contract("STATE-50")
@needs("flat_parameters", "as_groups")
@FLAT
def test_local_states(rank: Rank, flat: bool) -> None:
    """A local state dict of a model has this rank's own shards, which another model of the same units loads."""
    options: Any = {"for_flat": True, "flat_parameters": flat, "as_groups": True, "optimizer": None}
    options["units"] = [["layers.0"], ["layers.1"], ["out"]]  # which leaves none to the root
    saved, loaded = (states.make(rank, number, **options) for number in range(2))
    loaded.adapter.restore(saved.adapter.checkpoint(form="local"), form="local")
    right = {name: piece.tensor for name, piece in saved.adapter.parameters().items()}
    other = [name for name, piece in loaded.adapter.parameters().items() if not torch.equal(piece.tensor, right[name])]
    assert not other, f"what has taken a local state dict has other values of {', '.join(other)}"


@contract("STATE-50")
@needs("flat_parameters")
@subjects(
    "flaw",
    ["another-shape", "shapes", "another-dtype", "another-step", "another-dtype-of-steps", "no-average", "no-state"],
)
def test_states_that_cannot_be_joined(rank: Rank, flaw: str) -> None:
    """States of parameters that together are not the state of a flat parameter are refused on every rank."""
    run = trained(rank, for_flat=True, flat_parameters=True)
    state = run.adapter.checkpoint(form="full")
    one = state["optimizer"]["state"]["layers.1.first.bias"]
    changed = {
        "another-shape": {"exp_avg": torch.ones(states.DIM + 1)},
        "another-dtype": {"exp_avg": one["exp_avg"].double()},
        "another-step": {"step": one["step"] + 1},
        "another-dtype-of-steps": {"step": one["step"].double()},
    }
    if flaw == "shapes":
        state["optimizer"]["state"] = {name: {"sums": torch.ones(2, 3)} for name in state["optimizer"]["state"]}
    elif flaw == "no-average":
        del one["exp_avg"]
    elif flaw == "no-state":
        del state["optimizer"]["state"]["layers.1.first.bias"]
    else:
        one.update(changed[flaw])
    refusal = Refusal(rank, lambda: run.adapter.restore(state, form="full"), may_send=True)
    refusal.check_names("unflattened parameter", "its parameter", "first.bias")


#: A parameter that comes before others, in the first of the units.
IGNORED = "layers.0.second.bias"


def same_gradient(model: nn.Module) -> nn.Module:
    """Give the ignored parameter the same gradient on all ranks, although no rank averages it."""
    model.get_parameter(IGNORED).register_hook(torch.ones_like)
    return model
