"""A script that uses torch.distributed.fsdp runs with fsdp_impl in its place: names and signatures are the same."""

import dataclasses
import enum
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
import torch.distributed.fsdp.wrap
from torch import nn

import fsdp_impl as ours
import fsdp_impl.wrap

# What torch has too.
NAMES = [name for name in ours.__all__ if hasattr(theirs, name)]
# Of a newer torch nothing is promised.
IS_KNOWN_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 15)
# Parameters that torch 2.11 has not yet, and the class that came with each.
CAME_WITH = {"dp_mesh_dims": "DataParallelMeshDims", "param_dtype_override_fn": "GradientReductionHandle"}


def public_methods(cls: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(cls, callable) if not name.startswith("_")}


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults of the parameters; defaults by their type and fields."""
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, plain(one.default)) for one in parameters]


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        have = [{field.name for field in dataclasses.fields(getattr(half, name))} for half in (ours, theirs)]
        return (name, {field: getattr(value, field) for field in sorted(set.intersection(*have))})
    return str(value) if isinstance(value, enum.Enum) else value


def names_of(half: Any) -> set[str]:
    """Names that users may write: exported ones, members of the two kinds of modules, and fields of policies."""
    found = set(half.__all__) | {f"FSDPModule.{name}" for name in public_methods(half.FSDPModule)}
    found |= {f"FullyShardedDataParallel.{name}" for name in members_of_the_wrapper(half)}
    policies = {name: getattr(half, name) for name in half.__all__ if dataclasses.is_dataclass(getattr(half, name))}
    return found | {f"{name}.{field.name}" for name, policy in policies.items() for field in dataclasses.fields(policy)}


def skip_if_not_offered(names: set[str]) -> None:
    """Skip a test of ``names`` of a torch that is newer than what is tested, which the reference lacks."""
    if names and not IS_KNOWN_TORCH:
        pytest.skip(f"{min(names)} is of torch {torch.__version__}, newer than what is tested")


@pytest.mark.parametrize("name", NAMES)
def test_functions_and_classes(name: str) -> None:
    mine, other = getattr(ours, name), getattr(theirs, name)
    if inspect.isclass(other) and issubclass(other, enum.Enum):
        assert [(member.name, member.value) for member in mine] == [(member.name, member.value) for member in other]
    elif inspect.isclass(other) and not dataclasses.is_dataclass(other) and name != "FullyShardedDataParallel":
        return  # users do not construct these
    else:
        known = [entry for entry in shape(mine) if hasattr(theirs, CAME_WITH.get(entry[0], name))]
        new = {entry[0] for entry in shape(other)} - {entry[0] for entry in shape(mine)}
        assert known == [entry for entry in shape(other) if entry[0] not in new]
        skip_if_not_offered({f"{name}.{parameter}" for parameter in new})
        assert not new


@pytest.mark.parametrize("name", sorted(public_methods(theirs.FSDPModule)))
def test_methods_of_modules(name: str) -> None:
    if not hasattr(ours.FSDPModule, name):
        skip_if_not_offered({f"FSDPModule.{name}"})
    mine, other = getattr(ours.FSDPModule, name), getattr(theirs.FSDPModule, name)
    assert shape(mine) == shape(other)


def test_methods_of_handles() -> None:
    assert public_methods(theirs.UnshardHandle).keys() <= public_methods(ours.UnshardHandle).keys()


def members_of_the_wrapper(half: Any) -> list[str]:
    """What a wrapper adds to ``nn.Module`` or changes in it, for users."""
    added = [kind for kind in half.FullyShardedDataParallel.__mro__ if kind not in nn.Module.__mro__]
    return sorted({name for kind in added for name in vars(kind) if not name.startswith("_")})


@pytest.mark.parametrize("name", members_of_the_wrapper(theirs))
def test_members_of_the_wrapper(name: str) -> None:
    if not hasattr(ours.FullyShardedDataParallel, name):
        skip_if_not_offered({f"FullyShardedDataParallel.{name}"})
    mine, other = (inspect.getattr_static(half.FullyShardedDataParallel, name) for half in (ours, theirs))
    assert isinstance(mine, (staticmethod, property)) == isinstance(other, (staticmethod, property))
    if name in ("named_parameters", "named_buffers"):  # there they take whatever nn.Module takes
        other = getattr(nn.Module, name)
    if not isinstance(other, property):
        assert shape(getattr(ours.FullyShardedDataParallel, name)) == shape(
            other if inspect.isfunction(other) else getattr(theirs.FullyShardedDataParallel, name)
        )


def test_every_public_name_of_a_tested_torch_is_offered() -> None:
    lacking = names_of(theirs) - names_of(ours)
    skip_if_not_offered(lacking)
    assert not lacking


def test_all_public_names_are_exported_and_our_own() -> None:
    public = {name for name, value in vars(ours).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(ours.__all__)
    modules = {name: getattr(ours, name).__module__ for name in ours.__all__}
    assert not {name: module for name, module in modules.items() if not module.startswith("fsdp_impl.")}


def test_the_state_of_a_module_can_be_asked_for() -> None:
    assert ours.fully_shard.state(nn.Linear(1, 1)) is None  # type: ignore[attr-defined]


# Policies of wrapping; what they choose, the cases of WRAPPING show


@pytest.mark.parametrize("name", theirs.wrap.__all__)
def test_names_of_policies(name: str) -> None:
    assert name in ours.wrap.__all__
    assert shape(getattr(ours.wrap, name)) == shape(getattr(theirs.wrap, name))


def test_a_script_adds_to_the_classes_of_the_size_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads them from the policy function, and may add its own there for all policies that follow."""
    found: list[list[bool]] = []
    for half in (theirs.wrap, ours.wrap):
        policy: Any = half.size_based_auto_wrap_policy
        monkeypatch.setattr(policy, "FORCE_LEAF_MODULES", policy.FORCE_LEAF_MODULES | {nn.LSTM})
        monkeypatch.setattr(policy, "EXCLUDE_WRAP_MODULES", policy.EXCLUDE_WRAP_MODULES | {nn.GRU})
        modules = (nn.LSTM(2, 2), nn.GRU(2, 2), nn.MultiheadAttention(2, 2), nn.ModuleList(), nn.Linear(2, 2))
        found.append([policy(module, recurse, 10**9) for module in modules for recurse in (False, True)])
    assert found[0] == found[1] == [True, False, False, True, True, False, False, True, True, True]
