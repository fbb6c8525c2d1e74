"""Chapter STATE: torch's functions for state dicts, ``torch.distributed.checkpoint.state_dict``, with their options."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from shardproof.suites.state_twins import (
    DIM,
    OPTIMIZERS,
    WRAPPERS,
    Nested,
    Report,
    Twins,
    build,
    clone_of,
    differences,
    flattened,
    load_by_number,
    model_entries,
    optimizer_entries,
    step,
    tensors_in,
    whole,
)
from shardproof.testing import Capability, Rank, contract, needs, world

pytestmark = [needs(Capability.STATE_HELPERS, Capability.TIED_PARAMETERS, Capability.ADAM), world(2)]

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


# Models.


@contract("STATE-14")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_models_are_read(rank: Rank, wrapper: str) -> None:
    """A model's state dict has the entries of the unsharded model that the options choose, in the form they choose."""
    twins, report = build(rank, Nested(), wrapper=wrapper, units=[["deep"]]), Report(rank)
    for name, options in READS.items():
        if not works(rank, options):
            continue
        with report.of(name):
            expected = model_entries(twins.plain, frozen=not (options or {}).get("ignore_frozen_params"))
            check_read(rank, report, get_model_state_dict(twins.module, **made(options)), expected, options)
    report.end()


def works(rank: Rank, options: dict[str, Any] | None) -> bool:
    """Whether full values can go to the CPU: FSDP1 frees or mixes up what is there already (F-41, F-171)."""
    moves = bool(options and options.get("full_state_dict") and options.get("cpu_offload"))
    flat = Capability.FLAT_PARAMETERS in rank.implementation.capabilities()
    return not (moves and flat and rank.device.type == "cpu")


@contract("STATE-14")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_models_are_loaded(rank: Rank, wrapper: str) -> None:
    """A model has the values of the state dict that was loaded, whatever the options."""
    source = build(rank, Nested(), number=2, wrapper=wrapper, units=[["deep"]])
    twins, report = build(rank, Nested(), wrapper=wrapper, units=[["deep"]]), Report(rank)
    for number, (name, options) in enumerate(LOADS.items(), start=3):
        source.fill(number)
        twins.fill(1)
        with report.of(name):
            state = loadable(rank, options, model_entries(source.plain), lambda: get_model_state_dict(source.module))
            keys = set_model_state_dict(twins.module, state, **made(options))
            report.note([f"it returned {keys}"] if any(keys) else [])
            twins.plain.load_state_dict(model_entries(source.plain))
            report.note(twins.wrong())
    report.end()


def loadable(rank: Rank, options: dict[str, Any] | None, entries: Any, shards: Callable[[], Any]) -> Any:
    """A state dict of the form that the options of a load want."""
    given = options or {}
    if given.get("broadcast_from_rank0"):
        return copy.deepcopy(entries) if rank.index == 0 else {}
    return copy.deepcopy(entries) if given.get("full_state_dict") else clone_of(shards())


# Optimizers.

#: FSDP1 has states in flat parameters: tensors like the parameter, and numbers.
_OF_TENSORS = needs(Capability.DTENSOR_PARAMETERS)
KINDS = pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=_OF_TENSORS) if one in ("nested", "odd") else one for one in OPTIMIZERS]
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


def given(twins: Twins) -> Any:
    """The optimizers as a call takes them: one by itself, several as an iterator."""
    return twins.own[0] if len(twins.own) == 1 else iter(twins.own)


@contract("STATE-14")
@KINDS
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
    if is_full and has_none and Capability.FLAT_PARAMETERS not in rank.implementation.capabilities():
        return  # raises, as of states there is no device: findings/F382.py
    is_flat = Capability.FLAT_PARAMETERS in rank.implementation.capabilities()
    if is_flat and options is not None and options.get("broadcast_from_rank0") and has_numbers(source):
        return  # raises on the first rank, and the others wait for it: findings/F383.py
    entries = optimizer_entries(source.plain, source.optimizers)
    state = loadable(rank, options, entries, lambda: get_optimizer_state_dict(source.module, given(source)))
    set_optimizer_state_dict(twins.module, given(twins), state, **made(options))
    load_by_number(twins.plain, twins.optimizers, entries)
    report.note(twins.wrong())


@contract("STATE-14")
@KINDS
def test_new_optimizers_are_loaded(rank: Rank, kind: str) -> None:
    """Optimizers that have not stepped have the states and options of the state dict that was loaded."""
    source, report = build(rank, Nested(), number=2, kind=kind, units=[["deep"]]), Report(rank)
    for name in ("no options", "full", "sent"):
        twins = build(rank, Nested(), kind=kind, units=[["deep"]], steps=False)
        with report.of(name):
            check_loaded(rank, report, source, twins, LOADS[name])
    report.end()


def has_numbers(twins: Twins) -> bool:
    """Whether optimizers have states that are no tensors."""
    states = [state for optimizer in twins.optimizers for state in optimizer.state.values()]
    return any(not isinstance(value, torch.Tensor) for state in states for value in state.values())


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
    is_flat = Capability.FLAT_PARAMETERS in rank.implementation.capabilities()
    # Sent to a model with compiled modules, states of FSDP1 raise on all ranks but the first: findings/F384.py.
    sent = [] if is_flat and wrapper in ("compiled", "both") else ["sent"]
    for number, name in enumerate(("no options", "full", *sent), start=3):
        source.fill(number)
        twins.fill(1)
        with report.of(f"loaded, {name}"):
            check_loaded(rank, report, source, twins, LOADS[name])
    report.end()
