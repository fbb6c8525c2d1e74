"""A script that uses torch.distributed.fsdp runs with fsdp_impl in its place: names and signatures are the same."""

import dataclasses
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs

import fsdp_impl as ours

# What this half of the reference stands for; the rest of torch.distributed.fsdp is the flat one.
NAMES = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
# Only what torch 2.13 has is promised.
IS_KNOWN_TORCH = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) <= (2, 13)


def public_methods(cls: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(cls, callable) if not name.startswith("_")}


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults of the parameters; defaults by their type and fields."""
    return [
        (parameter.name, parameter.kind, plain(parameter.default))
        for parameter in inspect.signature(function).parameters.values()
    ]


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, dataclasses.asdict(value))
    return value


@pytest.mark.parametrize("name", [name for name in NAMES if hasattr(theirs, name)])
def test_functions_and_classes(name: str) -> None:
    mine, other = getattr(ours, name), getattr(theirs, name)
    assert name in ours.__all__
    if inspect.isclass(other) and not dataclasses.is_dataclass(other):
        return  # users do not construct these
    assert shape(mine) == shape(other)


@pytest.mark.parametrize("name", sorted(public_methods(theirs.FSDPModule)))
def test_methods_of_modules(name: str) -> None:
    if not hasattr(ours.FSDPModule, name) and not IS_KNOWN_TORCH:
        pytest.skip(f"torch {torch.__version__} has {name}, which 2.13 has not")
    mine, other = getattr(ours.FSDPModule, name), getattr(theirs.FSDPModule, name)
    assert shape(mine) == shape(other)


def test_methods_of_handles() -> None:
    assert public_methods(theirs.UnshardHandle).keys() <= public_methods(ours.UnshardHandle).keys()


@pytest.mark.parametrize("name", ["MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "DataParallelMeshDims"])
def test_fields_of_policies(name: str) -> None:
    if hasattr(theirs, name):
        fields = [[field.name for field in dataclasses.fields(getattr(half, name))] for half in (ours, theirs)]
        assert fields[0] == fields[1]


def test_nothing_of_this_half_is_forgotten() -> None:
    flat = {name for name in theirs.__all__ if getattr(theirs, name).__module__.startswith("torch.distributed.fsdp.")}
    missing = set(theirs.__all__) - flat - set(NAMES)
    assert not missing or not IS_KNOWN_TORCH, missing


def test_the_state_of_a_module_can_be_asked_for() -> None:
    assert ours.fully_shard.state(torch.nn.Linear(1, 1)) is None  # type: ignore[attr-defined]
