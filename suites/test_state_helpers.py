"""Chapter STATE: torch's functions for state dicts, ``torch.distributed.checkpoint.state_dict``, with their options."""

import collections
import copy
import fractions
import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from shardproof.suites.state_twins import (
    DIM,
    LOADS,
    OPTIMIZERS,
    READS,
    WRAPPERS,
    Beside,
    Nested,
    Renaming,
    RenamingByDefault,
    Report,
    Showing,
    Twins,
    build,
    check_read,
    clone_of,
    differences,
    fill,
    flattened,
    given,
    has_numbers,
    load_by_number,
    loadable,
    made,
    model_entries,
    optimizer_entries,
    spread,
    step,
    tensors_in,
    whole,
    works,
)
from shardproof.testing import Capability, Rank, contract, needs, world
from shardproof.testing.compare import local_of, map_tensors
from shardproof.testing.make import sharded
from shardproof.testing.measure import Recorder, private
from shardproof.testing.refuse import Refusal
from shardproof.testing.train import parallel

pytestmark = [needs(Capability.STATE_HELPERS, Capability.TIED_PARAMETERS, Capability.ADAM), world(2)]

patch_model = private.take("torch.distributed.checkpoint.state_dict._patch_model_state_dict")
patch_optimizer = private.take("torch.distributed.checkpoint.state_dict._patch_optimizer_state_dict")
patched_ones: Any = private.find("torch.distributed.checkpoint.state_dict._patched_state_dict")

# Models.

#: A unit of modules, and one that has parameters itself.
UNITS = [["deep"], ["other"]]


@contract("STATE-14")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_models_are_read(rank: Rank, wrapper: str) -> None:
    """A model's state dict has the entries of the unsharded model that the options choose, in the form they choose."""
    twins, report = build(rank, Nested(), wrapper=wrapper, units=UNITS), Report(rank)
    for name, options in READS.items():
        if not works(rank, options):
            continue
        with report.of(name):
            expected = model_entries(twins.plain, frozen=not (options or {}).get("ignore_frozen_params"))
            check_read(rank, report, get_model_state_dict(twins.module, **made(options)), expected, options)
    with report.of("with no optimizer"):
        found, states = get_state_dict(twins.module, [])
        check_read(rank, report, found, model_entries(twins.plain), {})
        report.note([f"the optimizers' state dict is {states}"] if states else [])
    with report.of("objects of user code"):
        for model in (twins.plain.get_submodule("deep.1"), twins.modules["deep.1"]):
            model.runs = fractions.Fraction(1, 3)  # type: ignore[assignment]
        # Copies and full values are of the kinds that the documentation lists.
        check_read(rank, report, get_model_state_dict(twins.module), model_entries(twins.plain), {})
    report.end()


@contract("STATE-14")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_models_are_loaded(rank: Rank, wrapper: str) -> None:
    """A model has the values of the state dict that was loaded, whatever the options."""
    source = build(rank, Nested(), number=2, wrapper=wrapper, units=UNITS)
    twins, report = build(rank, Nested(), wrapper=wrapper, units=UNITS), Report(rank)
    of_both = {f"{name}, with no optimizer": LOADS[name] for name in ("no options", "full")}
    for number, (name, options) in enumerate([*LOADS.items(), *of_both.items()], start=3):
        source.fill(number)
        twins.fill(1)
        with report.of(name):
            state = loadable(rank, options, model_entries(source.plain), lambda: get_model_state_dict(source.module))
            if name in of_both:
                keys = set_state_dict(twins.module, [], model_state_dict=state, optim_state_dict={}, **made(options))
            else:
                keys = set_model_state_dict(twins.module, state, **made(options))
            report.note([f"it returned {keys}"] if any(keys) else [])
            twins.plain.load_state_dict(model_entries(source.plain))
            report.note(twins.wrong())
    report.end()


# Optimizers.

#: FSDP1 has states in flat parameters: tensors like the parameter, and numbers, of all parameters of a unit.
_OF_TENSORS = needs(Capability.DTENSOR_PARAMETERS)
KINDS = pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=_OF_TENSORS) if one in ("nested", "odd", "biases") else one for one in OPTIMIZERS]
)


@contract("STATE-14")
@KINDS
def test_optimizers_are_read(rank: Rank, kind: str) -> None:
    """The state dict of one optimizer or several has all of its states and options, in the form of the options."""
    twins, report = build(rank, Nested(), kind=kind, units=[["deep"]]), Report(rank)
    for name, options in READS.items():
        if kind in ("numbers", "odd") and "flattened" in name:
            continue  # which take no None and no lists
        with report.of(name):
            check_optimizers(rank, report, twins, options)
    report.note(twins.wrong())
    report.end()


def check_optimizers(rank: Rank, report: Report, twins: Twins, options: dict[str, Any] | None) -> None:
    """Note what is wrong with the state dict of optimizers that a read with these options returns."""
    is_flat = (options or {}).get("flatten_optimizer_state_dict")
    if not works(rank, options):
        return
    entries = optimizer_entries(twins.plain, twins.optimizers)
    found = get_optimizer_state_dict(twins.module, given(twins), **made(options))
    check_read(rank, report, found, flattened(entries) if is_flat else entries, options)


NEW = pytest.mark.parametrize(
    "kind", ["adamw", "sgd", "momentum", "adagrad", "several", "numbers", pytest.param("odd", marks=_OF_TENSORS)]
)


@contract("STATE-14")
@NEW
def test_new_optimizers_are_read(rank: Rank, kind: str) -> None:
    """Optimizers that have not stepped have the states of a first step with zeros, which changes nothing else."""
    report = Report(rank)
    for name in ["no options", "full", *([] if kind in ("numbers", "odd") else ["flattened"])]:
        twins = build(rank, Nested(), kind=kind, units=[["deep"]], steps=False)
        step(one for one in twins.optimizers if not one.state)
        with report.of(name):
            check_optimizers(rank, report, twins, READS[name])
            report.note(twins.wrong())
    report.end()


@contract("STATE-14")
@KINDS
def test_optimizers_are_loaded(rank: Rank, kind: str) -> None:
    """Optimizers have the states and options of the state dict that was loaded, as an unsharded model's have."""
    source, twins = (build(rank, Nested(), number=number, kind=kind, units=[["deep"]]) for number in (2, 1))
    report = Report(rank)
    for number, (name, options) in enumerate(LOADS.items(), start=3):
        source.fill(number)
        twins.fill(1)
        with report.of(name):
            check_loaded(rank, report, source, twins, options)
    report.end()


def check_loaded(rank: Rank, report: Report, source: Twins, twins: Twins, options: dict[str, Any] | None) -> None:
    """Load the optimizers' state dict of one pair of twins into another, and note what is wrong then."""
    is_full = options is not None and options.get("full_state_dict")
    has_none = not any(optimizer.state for optimizer in twins.optimizers + source.optimizers)
    if is_full and has_none and "flat_parameters" not in rank.implementation.capabilities():
        return  # raises, as of states there is no device: findings/F382.py
    is_flat = "flat_parameters" in rank.implementation.capabilities()
    if is_flat and options is not None and options.get("broadcast_from_rank0") and has_numbers(source):
        return  # raises on the first rank, and the others wait for it: findings/F383.py
    entries = optimizer_entries(source.plain, source.optimizers)
    state = loadable(rank, options, entries, lambda: get_optimizer_state_dict(source.module, given(source)))
    set_optimizer_state_dict(twins.module, given(twins), state, **made(options))
    load_by_number(twins.plain, twins.optimizers, entries)
    report.note(twins.wrong())


@contract("STATE-14")
@NEW
def test_new_optimizers_are_loaded(rank: Rank, kind: str) -> None:
    """Optimizers that have not stepped have the states and options of the state dict that was loaded."""
    source, report = build(rank, Nested(), number=2, kind=kind, units=[["deep"]]), Report(rank)
    for name in ("no options", "full", "sent"):
        twins = build(rank, Nested(), kind=kind, units=[["deep"]], steps=False)
        with report.of(name):
            check_loaded(rank, report, source, twins, LOADS[name])
    if kind not in ("numbers", "odd"):  # which no flattened state dict can have
        twins = build(rank, Nested(), kind=kind, units=[["deep"]], steps=False)
        with report.of("flattened"):
            check_flattened(report, source, twins)
    report.end()


@contract("STATE-14")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_in_optimizer_states(rank: Rank, wrapper: str) -> None:
    """States and groups have the names of the unsharded model, whatever is around its modules, and load by them."""
    options: Any = {"kind": "adamw", "wrapper": wrapper, "units": [["deep"]]}
    source, twins = (build(rank, Nested(), number=number, **options) for number in (2, 1))
    report = Report(rank)
    for name in ("no options", "full", "flattened"):
        with report.of(f"read, {name}"):
            check_optimizers(rank, report, source, READS[name])
    is_flat = "flat_parameters" in rank.implementation.capabilities()
    # Sent to a model with compiled modules, states of FSDP1 raise on all ranks but the first: findings/F384.py.
    sent = [] if is_flat and wrapper in ("compiled", "both", "compiled-root") else ["sent"]
    for number, name in enumerate(("no options", "full", *sent), start=3):
        source.fill(number)
        twins.fill(1)
        with report.of(f"loaded, {name}"):
            check_loaded(rank, report, source, twins, LOADS[name])
    report.end()


@contract("STATE-14")
def test_names_that_end_alike(rank: Rank) -> None:
    """States load by names also where the name of a parameter ends with that of one in a compiled module."""
    options: Any = {"kind": "adamw", "wrapper": "compiled", "units": [["deep"]]}
    source, twins = (build(rank, Nested(alike=True), number=number, **options) for number in (2, 1))
    report = Report(rank)
    for number, name in enumerate(("no options", "full"), start=3):
        source.fill(number)
        with report.of(name):
            check_loaded(rank, report, source, twins, LOADS[name])
    report.end()


def _numbers(entries: Any) -> None:
    for state in entries["state"].values():
        state["step"] = float(state["step"])


def _without_options(entries: Any) -> None:
    for group in entries["param_groups"]:
        for key in group.keys() & {"foreach", "maximize", "capturable", "differentiable", "fused", "amsgrad"}:
            del group[key]


def _more_options(entries: Any) -> None:
    for index, group in enumerate(entries["param_groups"]):
        group["initial_lr"] = 0.5 + index


def _reversed(entries: Any) -> None:
    entries["param_groups"].reverse()
    entries["state"] = dict(reversed(entries["state"].items()))


#: By name, changes of an optimizer's state dict, as other optimizers and older files have it. One group in place of two
#: is none of them: the first of two then loses its options, findings/F386.py.
OLDER: dict[str, Callable[[Any], None]] = {
    "steps-as-numbers": _numbers,
    "fewer-options": _without_options,
    "more-options": _more_options,
    "another-order": _reversed,
}


@contract("STATE-14")
@pytest.mark.parametrize("change", OLDER)
def test_states_of_other_files(rank: Rank, change: str) -> None:
    """States as older files and other optimizers have them load as into an unsharded model's optimizer."""
    source, twins = (build(rank, Nested(), number=number, kind="adamw", units=[["deep"]]) for number in (2, 1))
    report, is_flat = Report(rank), "flat_parameters" in rank.implementation.capabilities()
    for number, name in enumerate(("no options", "full", "sent"), start=3):
        if name == "sent" and is_flat and change == "steps-as-numbers":
            continue  # raises on the first rank, and the others wait for it: findings/F383.py
        if name != "no options" and not is_flat and change == "more-options":
            continue  # raises, or only the first rank has it: findings/F311.py, findings/F385.py
        source.fill(number)
        twins.fill(1)
        with report.of(name):
            entries = optimizer_entries(source.plain, source.optimizers)
            OLDER[change](entries)
            state = loadable(rank, LOADS[name], entries, lambda: get_optimizer_state_dict(source.module, given(source)))
            if name == "no options":
                OLDER[change](state)
            set_optimizer_state_dict(twins.module, given(twins), state, **made(LOADS[name]))
            load_by_number(twins.plain, twins.optimizers, entries)
            report.note(twins.wrong_states())
    report.end()


@contract("STATE-14")
@pytest.mark.parametrize(
    ("saved", "loaded"), [("amsgrad", "adamw"), ("adamw", "amsgrad"), ("momentum", "sgd"), ("sgd", "momentum")]
)
def test_states_of_other_optimizers(rank: Rank, saved: str, loaded: str) -> None:
    """Of an optimizer with more states, or fewer, those that were saved are loaded, each rank's part of them."""
    source = build(rank, Nested(), number=2, kind=saved, units=[["deep"]])
    report, names = Report(rank), ["lenient"]
    if Capability.DTENSOR_PARAMETERS not in rank.implementation.capabilities() and saved == "amsgrad":
        names.append("full lenient")  # of DTensors each rank has a full tensor then: findings/F385.py
    for name in names:
        twins = build(rank, Nested(), kind=loaded, units=[["deep"]])
        with report.of(name):
            check_loaded(rank, report, source, twins, LOADS[name])
    report.end()


@contract("STATE-14")
@pytest.mark.parametrize(
    "kind", ["adamw", "tensor-lr", "sgd", "momentum", "several", pytest.param("nested", marks=_OF_TENSORS)]
)
def test_flattened_states_are_loaded(rank: Rank, kind: str) -> None:
    """A flattened state dict loads the states and options that it has, also beside frozen parameters."""
    source, twins = (build(rank, Nested(), number=number, kind=kind, units=[["deep"]]) for number in (2, 1))
    report = Report(rank)
    with report.of("flattened"):
        check_flattened(report, source, twins)
    report.end()


def check_flattened(report: Report, source: Twins, twins: Twins) -> None:
    """Load the flattened state dict of one pair of twins' optimizers into another, and note what is wrong then."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = clone_of(get_optimizer_state_dict(source.module, given(source), options=options))
    set_optimizer_state_dict(twins.module, given(twins), state, options=options)
    load_by_number(twins.plain, twins.optimizers, optimizer_entries(source.plain, source.optimizers))
    report.note(twins.wrong())


# Calls.


def entries_of(twins: Twins, *inside: str, **options: Any) -> Any:
    """The state dict of some submodules of a model."""
    submodules = {twins.root.get_submodule(one) for one in inside}
    return get_model_state_dict(twins.module, submodules=submodules, options=StateDictOptions(**options))


@contract("STATE-14")
@pytest.mark.parametrize("wrapper", ["bare", "both"])
def test_submodules(rank: Rank, wrapper: str) -> None:
    """A state dict of some submodules has their entries, with the submodule's name or without, and loads by module."""
    source, twins = (
        build(rank, Nested(), number=number, wrapper=wrapper, units=[["deep"]], kind="momentum") for number in (2, 1)
    )
    report, plain = Report(rank), twins.plain
    forms: list[dict[str, Any]] = [{}, {"full_state_dict": True}, {"cpu_offload": True}]
    with pytest.warns(FutureWarning, match="deprecated"):
        for inside, keeps, form in itertools.product(("a", "module", "module.1", "deep.1"), (True, False), forms):
            with report.of(f"{inside}, {'whole' if keeps else 'own'} names, {form}"):
                found = entries_of(twins, inside, keep_submodule_prefixes=keeps, **form)
                check_read(rank, report, found, model_entries(plain, inside=inside, keeps=keeps), form)
        with report.of("all that are frozen, without these"):
            # Frozen parameters of other modules raise KeyError: findings/F378.py.
            found, expected = (
                entries_of(twins, "a", "deep", ignore_frozen_params=True),
                model_entries(plain, frozen=False),
            )
            check_read(rank, report, found, within(expected), {})
        states, deep = optimizer_entries(plain, twins.optimizers), {twins.root.get_submodule("deep")}
        with report.of("optimizer"):
            with pytest.warns(FutureWarning, match="submodules only"):
                found = get_optimizer_state_dict(twins.module, twins.own, submodules=deep)
            check_read(rank, report, found, states, {})
        with report.of("both"):
            found, of_all = get_state_dict(twins.module, twins.own, submodules=deep)
            check_read(rank, report, found, model_entries(plain, inside="deep"), {})
            check_read(rank, report, of_all, states, {})
        with report.of("loaded by module"):
            state: Any = {
                twins.root.get_submodule(one): clone_of(entries_of(source, one, keep_submodule_prefixes=False))
                for one in ("a", "deep")
            }
            set_model_state_dict(twins.module, state, options=StateDictOptions(strict=False))
            plain.load_state_dict(within(model_entries(source.plain)), strict=False)
            report.note(twins.wrong())
    with report.of("no submodule, which are all"):
        nothing: Any = {"submodules": set()}
        found, of_all = get_state_dict(twins.module, twins.own, **nothing)
        for one in (found, get_model_state_dict(twins.module, **nothing)):
            check_read(rank, report, one, model_entries(plain), {})
        for of_states in (of_all, get_optimizer_state_dict(twins.module, twins.own, **nothing)):
            check_read(rank, report, of_states, optimizer_entries(plain, twins.optimizers), {})
    report.end()


def within(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries of two modules, which have all frozen parameters."""
    return {name: value for name, value in entries.items() if name.startswith(("a.", "deep."))}


def _set_of(optimizers: list[Any]) -> set[Any]:
    """A set whose order is the same on every rank, as calls that communicate want it: not that of addresses."""
    for number, one in enumerate(optimizers):
        if "__hash__" not in vars(type(one)):
            one.__class__ = type(type(one).__name__, (type(one),), {"__hash__": lambda _, number=number: number})
    return set(optimizers)


#: By name, what holds several optimizers; "together" is an iterator.
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "together": iter,
    "list": list,
    "tuple": tuple,
    "set": _set_of,
    "generator": lambda optimizers: (one for one in optimizers),
}


@contract("STATE-14")
@pytest.mark.parametrize("call", [*CONTAINERS, "patched"])
def test_calls_for_both(rank: Rank, call: str) -> None:
    """Model and optimizers, several in any container, are read and loaded by one call and by patched methods.

    The results are those of two calls.
    """
    kind = "several" if call in CONTAINERS else "adamw"
    source, twins = (build(rank, Nested(), number=number, kind=kind, units=[["deep"]]) for number in (2, 1))
    report, collects = Report(rank), call != "patched"
    (gc.enable if collects else gc.disable)()
    try:
        for name in (
            "no options",
            "full",
            *(["sent"] if Capability.SHARDED in rank.implementation.capabilities() else []),
        ):
            options = LOADS[name]
            twins.fill(1)
            with report.of(name):
                entries = model_entries(source.plain), optimizer_entries(source.plain, source.optimizers)
                read = functools.partial(_read_both, source, call)
                model, states = read(READS.get(name, READS["full"]))
                check_read(rank, report, clone_of(model), entries[0], options)
                check_read(rank, report, clone_of(states), entries[1], options)
                given_model = loadable(rank, options, entries[0], functools.partial(clone_of, model))
                given_states = loadable(rank, options, entries[1], functools.partial(clone_of, states))
                if name == "sent" and call in CONTAINERS and rank.index:
                    # Without an entry a rank takes the call for one about optimizers alone: findings/F389.py.
                    given_model = model_entries(twins.plain)
                keys = _load_both(twins, call, options, given_model, given_states)
                report.note([f"it returned {keys}"] if keys is not None and any(keys) else [])
                twins.plain.load_state_dict(entries[0])
                load_by_number(twins.plain, twins.optimizers, entries[1])
                report.note(twins.wrong())
            if call in CONTAINERS and name != "sent":
                with report.of(f"{name}, optimizers alone"):
                    check_alone(rank, report, source, twins, CONTAINERS[call], options)
            assert gc.isenabled() == collects, "a call changes whether garbage is collected"
    finally:
        gc.enable()
    report.end()


def check_alone(
    rank: Rank, report: Report, source: Twins, twins: Twins, container: Callable[[list[Any]], Any], options: Any
) -> None:
    """Read and load several optimizers without the model, by the calls for them and by that for both."""
    entries = optimizer_entries(source.plain, source.optimizers)
    states = get_optimizer_state_dict(source.module, container(source.own), **made(options))
    check_read(rank, report, clone_of(states), entries, options)
    for for_both in (False, True):
        twins.fill(1)
        state: Any = loadable(rank, options, entries, functools.partial(clone_of, states))
        if for_both:
            nothing: Any = {"model_state_dict": {}}
            keys = set_state_dict(
                twins.module, container(twins.own), optim_state_dict=state, **nothing, **made(options)
            )
            report.note([f"without the model it returned {keys}"] if any(keys) else [])
        else:
            set_optimizer_state_dict(twins.module, container(twins.own), state, **made(options))
        load_by_number(twins.plain, twins.optimizers, entries)
        report.note(twins.wrong())


def _read_both(twins: Twins, call: str, options: dict[str, Any] | None) -> tuple[Any, Any]:
    if call in CONTAINERS:
        return get_state_dict(twins.module, CONTAINERS[call](twins.own), **made(options))
    patched = _patched(twins, options)
    model, states = twins.module.state_dict(), twins.own[0].state_dict()
    patched()
    return model, states


def _load_both(twins: Twins, call: str, options: dict[str, Any] | None, model: Any, states: Any) -> Any:
    if call in CONTAINERS:
        own = CONTAINERS[call](twins.own)
        return set_state_dict(twins.module, own, model_state_dict=model, optim_state_dict=states, **made(options))
    patched = _patched(twins, options)
    twins.module.load_state_dict(model)
    twins.own[0].load_state_dict(states)
    patched()
    return None


def _patched(twins: Twins, options: dict[str, Any] | None) -> Callable[[], None]:
    """Patch the methods for state dicts of a model and its optimizer; the result takes them back."""
    given_options: Any = made(options)
    patch_model(twins.module, **given_options)
    patch_optimizer(twins.module, optimizers=tuple(twins.own), **given_options)

    def take_back() -> None:
        for owner in (twins.module, twins.own[0]):
            for name in ("state_dict", "load_state_dict"):
                del owner.__dict__[name]
        patched_ones.clear()  # which keeps models for ever

    return take_back


@contract("STATE-14")
def test_refusals(rank: Rank) -> None:
    """Calls that cannot be meant are refused by every rank: values sent in no full form, nothing to load or to read."""
    twins = build(rank, Nested(), kind="momentum", units=[["deep"]])
    module, own = twins.module, twins.own[0]
    sent = StateDictOptions(broadcast_from_rank0=True)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    others = build(rank, Nested(), kind="numbers", units=[["deep"]])
    lacking, empty, twice, unlisted = (clone_of(get_optimizer_state_dict(module, own)) for _ in range(4))
    for one in (lacking, unlisted):
        del one["state"]["other.weight"]
    for group in unlisted["param_groups"]:
        group["params"] = [name for name in group["params"] if name != "other.weight"]
    flat = {**module.state_dict(), "deep._flat_param": torch.ones(3)}
    twice["state"]["other.weight"] |= {"of.two": torch.ones(1), "of": {"two": torch.ones(1)}}
    own.add_param_group({"params": []})
    attempts: dict[str, Callable[[], Any]] = {
        "only supports tensor, int, float, dict": lambda: get_optimizer_state_dict(
            others.module, others.own, options=options
        ),
        "Missing optimizer state for parameter": lambda: set_optimizer_state_dict(module, own, lacking),
        "Missing optimizer state for parameter 'other.weight'": lambda: set_optimizer_state_dict(module, own, unlisted),
        "exactly one param group": lambda: set_optimizer_state_dict(module, own, empty),
        "full_state_dict must be True": lambda: get_model_state_dict(module, options=sent),
        "Optimizers are not passed in": lambda: get_optimizer_state_dict(module, []),
        "not passed in but optim_only": lambda: set_optimizer_state_dict(module, [], lacking),
        "but optim state_dict is empty": lambda: set_state_dict(
            module, own, model_state_dict=dict(module.state_dict()), optim_state_dict={}
        ),
        "state_dict is empty": lambda: set_model_state_dict(module, {}),
        "the model is not the root module": lambda: set_model_state_dict(module, flat),
        "optim state_dict is empty": lambda: set_optimizer_state_dict(module, own, {}),
    }
    for words, attempt in attempts.items():
        Refusal(rank, attempt, may_send=True).check_names(words)
    keys = set_model_state_dict(module, {}, options=StateDictOptions(strict=False))
    assert not any(keys), f"of an empty state dict a load that is not strict returns {keys}"
    del own.param_groups[-1]
    if Capability.FSDP1_API not in rank.implementation.capabilities():  # which does not flatten
        full = StateDictOptions(full_state_dict=True)
        names_twice = Refusal(rank, lambda: set_optimizer_state_dict(module, own, twice, options=full), may_send=True)
        names_twice.check_names("duplicated flatten key")
    lines = [*twins.wrong()]
    assert not lines, f"what was refused has changed something: {lines[0]}"


@contract("STATE-14")
def test_models_that_are_refused(rank: Rank) -> None:
    """Names of which torch's functions cannot tell the unsharded one are refused by every rank."""
    extra = nn.Sequential(collections.OrderedDict(_extra_state=nn.Linear(DIM, DIM)))
    models = {"to be the last obj name": nn.Sequential(extra), "an unexpected key": nn.Sequential(Showing())}
    if Capability.DTENSOR_PARAMETERS not in rank.implementation.capabilities():
        del models["an unexpected key"]  # FSDP1 takes the name out
    for words, model in models.items():
        module = sharded(rank, model.to(rank.device), units=[]).module
        Refusal(rank, functools.partial(get_model_state_dict, module), may_send=True).check_names(words)


@contract("STATE-14")
def test_modules_with_two_names(rank: Rank) -> None:
    """Of a module in two places the optimizer has the first name, and its states are missing if they are under none."""
    linear, report = nn.Linear(DIM, DIM), Report(rank)
    model = nn.Sequential(nn.Sequential(linear), nn.Linear(DIM, 3), nn.Sequential(linear))
    source, twins = (build(rank, copy.deepcopy(model), number=number, kind="adamw", units=[["1"]]) for number in (2, 1))
    with report.of("read"):
        check_read(rank, report, get_model_state_dict(source.module), model_entries(source.plain), {})
    if Capability.SHARDED in rank.implementation.capabilities():  # DDP does not find the second name: findings/F114.py
        with report.of("loaded"):  # in full torch refuses them: findings/F427.py
            set_model_state_dict(twins.module, clone_of(get_model_state_dict(source.module)))
            twins.plain.load_state_dict(model_entries(source.plain))
    for name in ("no options", "full", "sent"):
        with report.of(name):
            check_optimizers(rank, report, source, READS.get(name, READS["full"]))
            check_loaded(rank, report, source, twins, LOADS[name])
    report.end()
    lacking = clone_of(get_optimizer_state_dict(twins.module, given(twins)))
    del lacking["state"]["0.0.bias"]
    for group in lacking["param_groups"]:
        group["params"] = [name for name in group["params"] if name != "0.0.bias"]
    refused = Refusal(rank, lambda: set_optimizer_state_dict(twins.module, given(twins), lacking), may_send=True)
    refused.check_names("Missing optimizer state for parameter '0.0.bias'")


@contract("STATE-14")
def test_models_with_replicas(rank: Rank) -> None:
    """Where DDP keeps copies of a part of a model, that has its unsharded names too, as any combination has them."""
    twins, report = build(rank, Nested(), units=UNITS), Report(rank)
    copies, plain = (nn.Linear(DIM, DIM).to(rank.device) for _ in range(2))
    model, right = Beside(twins.module, DistributedDataParallel(copies)), Beside(twins.plain, plain)
    for number, name in enumerate(("no options", "full", "sent"), start=3):
        with report.of(name):
            fill(plain, number)
            twins.fill(number)
            copies.load_state_dict(plain.state_dict())
            read = functools.partial(get_model_state_dict, model, **made(READS.get(name, READS["full"])))
            entries = model_entries(right)
            check_read(rank, report, read(), entries, LOADS[name])
            state = loadable(rank, LOADS[name], entries, read)
            twins.fill(1)
            fill(copies, 1)
            keys = set_model_state_dict(model, state, **made(LOADS[name]))
            report.note([f"it returned {keys}"] if any(keys) else [])
            right.load_state_dict(entries)
            report.note(twins.wrong())
            report.note(differences(dict(copies.state_dict()), dict(plain.state_dict()), "copies"))
    report.end()


@contract("STATE-14")
def test_values_sent_by_the_first_rank(rank: Rank) -> None:
    """The first rank sends each tensor of a full state dict, and sends it once."""
    twins = build(rank, Nested(), units=UNITS)
    entries, recorder = model_entries(twins.plain), Recorder(lambda *_: "", announcer=rank.announcer)
    with recorder.during("load"):
        set_model_state_dict(twins.module, loadable(rank, LOADS["sent"], entries, dict), **made(LOADS["sent"]))
    sent = sorted(one.nbytes for one in recorder.trace if (one.kind, one.dtype) == ("broadcast", "float32"))
    expected = sorted(one.nbytes for _, one in tensors_in(entries) if one.ndim)
    assert sent == expected, f"broadcasts have these bytes of floating-point numbers: {sent}, instead of {expected}"


@contract("STATE-14")
@needs(Capability.DTENSOR_PARAMETERS)  # FSDP1 looks for the inner names in state dicts
@pytest.mark.parametrize("which", ["default", "named"])
def test_names_that_a_module_changes(rank: Rank, which: str) -> None:
    """A module whose state dict has the entries of an inner one as its own loads by the names that it names."""
    named = {} if which == "default" else {"dsd_fqn_modifiers": "hidden_names"}
    model = nn.Sequential(nn.Linear(DIM, DIM), Renaming() if named else RenamingByDefault(), nn.Linear(DIM, 3))
    source, twins = (build(rank, copy.deepcopy(model), number=number, units=[["1"]]) for number in (2, 1))
    report = Report(rank)
    if not named:  # a read has no such option
        with report.of("read"):
            check_read(rank, report, get_model_state_dict(source.module), model_entries(source.plain), {})
    for name in ("full", "sent", *([] if named else ["no options"])):
        options = {**(LOADS[name] or {}), **named}
        twins.fill(1)
        with report.of(name):
            entries = model_entries(source.plain)
            keys = set_model_state_dict(
                twins.module,
                loadable(rank, options, entries, lambda: get_model_state_dict(source.module)),
                options=StateDictOptions(**options),
            )
            report.note([f"it returned {keys}"] if any(keys) else [])
            twins.plain.load_state_dict(copy.deepcopy(entries))
            report.note(twins.wrong())
    report.end()


#: Entries of the model of these cases, by what they are.
ENTRIES = {
    "parameter": "other.weight",
    "in-a-unit": "deep.1.first.bias",
    "tied": "base.weight",
    "buffer": "few.running_mean",
    "extra": "deep.1._extra_state",
}


@contract("STATE-14")
@pytest.mark.parametrize("entry", ENTRIES)
def test_missing_and_unknown_entries(rank: Rank, entry: str) -> None:
    """Full state dicts, of each rank or of the first one, load without an entry and with an unknown one, or raise."""
    source, twins = (build(rank, Nested(), number=number, units=[["deep"]]) for number in (2, 1))
    report = Report(rank)
    for name in ("full lenient", "sent lenient", "full", "sent"):
        for flaw in ("missing", "unknown"):
            if (name, flaw) == ("full", "missing") or ("sent" in name and flaw == "unknown"):
                continue  # loaded in silence, or known to the first rank alone: findings/F379.py, findings/F380.py
            if name == "sent" and Capability.SHARDED not in rank.implementation.capabilities():
                continue  # the first rank of a wrapper's raises before it sends, and the others wait: F-380
            if "lenient" in name and flaw == "missing" and entry == "extra":
                continue  # the module is given something of torch's own as its extra state: findings/F387.py
            options, lenient = LOADS[name] or {}, "lenient" in name
            twins.fill(1)
            with report.of(f"{name}, {flaw}"):
                entries = model_entries(source.plain)
                if flaw == "missing":
                    del entries[ENTRIES[entry]]
                else:
                    entries["deep.stray"] = torch.ones(2)
                state = loadable(rank, options, entries, dict)
                load = functools.partial(set_model_state_dict, twins.module, state, options=StateDictOptions(**options))
                if not lenient:
                    Refusal(rank, load, may_send=True).check_names(
                        ENTRIES[entry] if flaw == "missing" else "deep.stray"
                    )
                    continue
                keys = load()
                if flaw == "unknown":
                    report.note([f"it returned {keys}"] if keys.unexpected_keys != ["deep.stray"] else [])
                twins.plain.load_state_dict(entries, strict=False)
                report.note(twins.wrong())
    report.end()


@contract("STATE-14")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_values_of_another_dtype(rank: Rank, dtype: torch.dtype) -> None:
    """Full values of another dtype, of each rank or of the first one, load in the dtype of the parameter."""
    source, twins = (build(rank, Nested(), number=number, units=[["deep"]]) for number in (2, 1))
    report = Report(rank)
    for name in ("full", "sent", "sent, cpu"):
        twins.fill(1)
        with report.of(name):
            entries = model_entries(source.plain)
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    entries[key] = value.to(dtype)
            set_model_state_dict(twins.module, loadable(rank, LOADS[name], entries, dict), **made(LOADS[name]))
            twins.plain.load_state_dict(entries)
            report.note(twins.wrong())
    report.end()


@contract("STATE-14")
@pytest.mark.parametrize("form", ["full", "sent"])
def test_values_with_other_strides(rank: Rank, form: str) -> None:
    """Full values that are a transpose, as where a checkpoint has a layer's weights turned, load as what they are."""
    source, twins = (build(rank, Nested(), number=number, units=[["deep"]]) for number in (2, 1))
    entries = map_tensors(lambda one: one.mT.contiguous().mT if one.ndim == 2 else one, model_entries(source.plain))
    set_model_state_dict(twins.module, loadable(rank, LOADS[form], entries, dict), **made(LOADS[form]))
    twins.plain.load_state_dict(entries)
    lines = [*twins.wrong()]
    assert not lines, f"{form}: {lines[0]}"


# Meshes, and the meta device.


@contract("STATE-14")
@world(4)
@pytest.mark.parametrize(
    "mesh",
    [
        "ranks",
        pytest.param("replicas", marks=needs(Capability.HYBRID)),
        pytest.param("subgroup", marks=needs(Capability.SHARDED)),
        pytest.param("process-groups", marks=needs(Capability.SHARDED, "as_groups")),
        pytest.param(
            "tensor-parallel", marks=needs(Capability.TENSOR_PARALLEL_CHECKPOINT, Capability.DTENSOR_PARAMETERS)
        ),
    ],
)
def test_meshes(rank: Rank, mesh: str) -> None:
    """Model and optimizer are read and loaded on replicas, on a subgroup and beside tensor parallelism as elsewhere."""
    # Of sizes that two times two ranks divide: others do not load, findings/F323.py.
    model: Any = parallel.MLPStack(8) if mesh == "tensor-parallel" else Nested()
    if mesh == "process-groups":
        model = model.double()  # as a rank without a row is to make its part in the dtype of the others'
    options = spread(rank, mesh)
    source, twins = (build(rank, copy.deepcopy(model), number=number, kind="adamw", **options) for number in (2, 1))
    report, is_flat = Report(rank), "flat_parameters" in rank.implementation.capabilities()
    for name in ("no options", "cpu", "full", "first rank", "full trainable", "flattened"):
        if not works(rank, READS[name]):
            continue
        with report.of(f"read, {name}"):
            expected = model_entries(source.plain, frozen="trainable" not in name)
            check_read(rank, report, get_model_state_dict(source.module, **made(READS[name])), expected, READS[name])
            check_optimizers(rank, report, source, READS[name])
    for number, name in enumerate(("no options", "full", "sent", "sent, cpu"), start=3):
        source.fill(number)
        with report.of(f"loaded, {name}"):
            entries = model_entries(source.plain)
            state = loadable(rank, LOADS[name], entries, lambda: get_model_state_dict(source.module))
            set_model_state_dict(twins.module, state, **made(LOADS[name]))
            twins.plain.load_state_dict(entries)
            if is_flat and mesh in ("subgroup", "process-groups") and "sent" in name:
                load_by_number(twins.plain, twins.optimizers, optimizer_entries(twins.plain, twins.optimizers))
                continue  # sent by a rank of another group: findings/F312.py
            check_loaded(rank, report, source, twins, LOADS[name])
    report.end()


@contract("STATE-14")
@world(2, 4)
@needs(Capability.META_LOAD)
@pytest.mark.parametrize("which", ["", "deep"], ids=["whole-model", "one-unit"])
def test_models_on_the_meta_device(rank: Rank, which: str) -> None:
    """A model on the meta device, or of which a part is there, has the full values that were loaded, in its shards."""
    source, report = build(rank, Nested(ties=False), number=2, units=[["deep"]]), Report(rank)

    def on_meta(model: Any) -> Any:
        model.get_submodule(which).to("meta")
        return model

    for name in ("full", "sent"):
        with report.of(name):
            # Of tied parameters each module has one of its own then: findings/F388.py.
            model = Nested(ties=False).to(rank.device)
            adapter = sharded(rank, on_meta(model), units=[["deep"]], materialize=False)
            entries = model_entries(source.plain)
            keys = set_model_state_dict(adapter.module, loadable(rank, LOADS[name], entries, dict), **made(LOADS[name]))
            report.note([f"it returned {keys}"] if any(keys) else [])
            check_read(rank, report, get_model_state_dict(adapter.module), entries, {})
            mine, others = (dict(one.module.named_parameters()) for one in (adapter, source.adapter))
            for key, value in mine.items():
                if local_of(value).shape != local_of(others[key]).shape:
                    report.note([f"{key} has a shard of {tuple(local_of(value).shape)}"])
    report.end()


@contract("STATE-14")
@needs(Capability.META_LOAD)
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
def test_copies_of_meta_tensors(rank: Rank, full: bool) -> None:
    """Asked to put a model of the meta device on the CPU, a state dict is refused, or it has nothing elsewhere."""
    model = Nested(ties=False).to("meta")
    module = sharded(rank, model, units=[["deep"]], materialize=False).module
    options = StateDictOptions(full_state_dict=full, cpu_offload=True)
    refusal = Refusal(rank, lambda: get_model_state_dict(module, options=options), may_send=full)
    found = {path: value.device.type for path, value in tensors_in(refusal.result or {})}
    elsewhere = [path for path, device in found.items() if device != "cpu"]
    assert not elsewhere, f"a state dict on the CPU has these values elsewhere: {elsewhere}"


# Copies on the CPU.


def parts_of(value: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a rank has of a tensor of a state dict."""
    shards: Any = getattr(value, "local_shards", None)  # FSDP1 on process groups has them
    return [one.tensor for one in shards()] if shards else [local_of(value)]


def erase(state: Any) -> None:
    """Set all tensors of a state dict to zero, in place."""
    for _, value in tensors_in(state):
        for part in parts_of(value):
            part.zero_()


@contract("STATE-14")
@pytest.mark.parametrize("kind", ["adamw", pytest.param("odd", marks=_OF_TENSORS)])
@pytest.mark.parametrize("means", ["copied", "checked", "shared", pytest.param("groups", marks=needs("as_groups"))])
def test_copies_for_background_saves(rank: Rank, means: str, kind: str) -> None:
    """A stager's copy of model, optimizer and objects of user code has their values, types and containers, for good."""
    options: Any = {"as_groups": means == "groups"}  # FSDP1 then has ShardedTensors
    twins, report = build(rank, Nested(), kind=kind, units=[["deep"]], **options), Report(rank)
    makers: dict[str, Any] = {
        "copied": BlockingAsyncStager,
        "groups": BlockingAsyncStager,
        "checked": functools.partial(BlockingAsyncStager, type_check=True),
        "shared": functools.partial(DefaultStager, StagingOptions(False, True, False, False)),
    }
    stager = makers[means]()
    with report.of(means):
        state = dict(zip(("model", "optimizer"), get_state_dict(twins.module, given(twins)), strict=True))
        expected = {"model": model_entries(twins.plain), "optimizer": optimizer_entries(twins.plain, twins.optimizers)}
        if means == "checked":
            with pytest.raises(ValueError, match="Unexpected value type"):
                stager.stage({**state, "own": fractions.Fraction(1, 3)})
        elif means != "shared":
            state["own"] = expected["own"] = fractions.Fraction(1, 3)
        copied = stager.stage(state)
        erase(state)  # FSDP1 gives out copies, which the training that goes on would not change
        twins.fill(2)
        for path, value in tensors_in(copied):
            other = dict(tensors_in(state))[path]
            if type(value) is not type(other) or value.device.type != "cpu":
                report.note([f"{path} is a {type(value).__name__} on {value.device}, was a {type(other).__name__}"])
            is_shared = means == "shared"
            parts = [part for part in parts_of(value) if part.numel() or not is_shared]
            if any(part.is_shared() != is_shared for part in parts):
                report.note([f"{path} is {'not ' if is_shared else ''}in shared memory"])
        report.note(differences(whole(rank, copied), expected, ""))
    stager.close()
    report.end()
