"""A script that uses torch.distributed.fsdp runs with fsdp_impl in its place: names and signatures are the same."""

import dataclasses
import enum
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs

import fsdp_impl as ours

NAMES = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
# Only what torch 2.13 has is promised.
IS_KNOWN_TORCH = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) <= (2, 13)
# Parameters that torch 2.11 has not yet, and the class that came with each.
CAME_WITH = {"dp_mesh_dims": "DataParallelMeshDims"}


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
    return str(value) if isinstance(value, enum.Enum) else value


@pytest.mark.parametrize("name", [name for name in NAMES if hasattr(theirs, name)])
def test_functions_and_classes(name: str) -> None:
    mine, other = getattr(ours, name), getattr(theirs, name)
    assert name in ours.__all__
    if inspect.isclass(other) and issubclass(other, enum.Enum):
        assert [(member.name, member.value) for member in mine] == [(member.name, member.value) for member in other]
    elif inspect.isclass(other) and not dataclasses.is_dataclass(other) and name != "FullyShardedDataParallel":
        return  # users do not construct these
    else:
        known = [entry for entry in shape(mine) if hasattr(theirs, CAME_WITH.get(entry[0], name))]
        assert known == shape(other)


@pytest.mark.parametrize("name", sorted(public_methods(theirs.FSDPModule)))
def test_methods_of_modules(name: str) -> None:
    if not hasattr(ours.FSDPModule, name) and not IS_KNOWN_TORCH:
        pytest.skip(f"torch {torch.__version__} has {name}, which 2.13 has not")
    mine, other = getattr(ours.FSDPModule, name), getattr(theirs.FSDPModule, name)
    assert shape(mine) == shape(other)


def test_methods_of_handles() -> None:
    assert public_methods(theirs.UnshardHandle).keys() <= public_methods(ours.UnshardHandle).keys()


@pytest.mark.parametrize("name", [name for name in NAMES if dataclasses.is_dataclass(getattr(ours, name))])
def test_fields_of_policies(name: str) -> None:
    if hasattr(theirs, name):
        fields = [[field.name for field in dataclasses.fields(getattr(half, name))] for half in (ours, theirs)]
        assert fields[0] == fields[1]


def of_the_wrapper() -> list[str]:
    """What torch's wrapper adds to ``nn.Module`` or changes in it, for users."""
    theirs_alone = vars(theirs.FullyShardedDataParallel)
    return sorted(name for name in theirs_alone if not name.startswith("_"))


@pytest.mark.parametrize("name", of_the_wrapper())
def test_members_of_the_wrapper(name: str) -> None:
    if not hasattr(ours.FullyShardedDataParallel, name) and not IS_KNOWN_TORCH:
        pytest.skip(f"torch {torch.__version__} has {name}, which 2.13 has not")
    mine, other = (inspect.getattr_static(half.FullyShardedDataParallel, name) for half in (ours, theirs))
    assert isinstance(mine, (staticmethod, property)) == isinstance(other, (staticmethod, property))
    if name in ("named_parameters", "named_buffers"):  # there they take whatever nn.Module takes
        other = getattr(torch.nn.Module, name)
    if not isinstance(other, property):
        assert shape(getattr(ours.FullyShardedDataParallel, name)) == shape(
            other if inspect.isfunction(other) else getattr(theirs.FullyShardedDataParallel, name)
        )


def test_nothing_is_forgotten() -> None:
    missing = set(theirs.__all__) - set(NAMES)
    assert not missing or not IS_KNOWN_TORCH, missing


def test_all_public_names_are_exported_and_our_own() -> None:
    public = {name for name, value in vars(ours).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(ours.__all__)
    modules = {name: getattr(ours, name).__module__ for name in ours.__all__}
    assert not {name: module for name, module in modules.items() if not module.startswith("fsdp_impl.")}


def test_the_state_of_a_module_can_be_asked_for() -> None:
    assert ours.fully_shard.state(torch.nn.Linear(1, 1)) is None  # type: ignore[attr-defined]
