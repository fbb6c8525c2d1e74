"""Tensors are found and replaced in whatever a forward takes and returns."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from fsdp_impl.common.containers import map_tensors, tensors_requiring_grad


class Pair(NamedTuple):
    x: Any = None
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    hidden: Any = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", "set once")


class Output(collections.OrderedDict[str, Any]):
    """Keys and attributes in step, as the output classes of model libraries keep them."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


def contain(kind: str, tensor: torch.Tensor) -> Any:
    containers: dict[str, Any] = {
        "tensor": tensor,
        "list": [tensor],
        "tuple": (tensor, 1),
        "dict": {"a": tensor},
        "defaultdict": collections.defaultdict(list, {"a": tensor}),
        "namedtuple": Pair(tensor),
        "dataclass": Frozen(tensor),
        "mapping class": Output(a=tensor),
        "nested": {"a": [Frozen((1, {"b": Pair(y=tensor)}))], "c": "text"},
    }
    return containers[kind]


KINDS = ["tensor", "list", "tuple", "dict", "defaultdict", "namedtuple", "dataclass", "mapping class", "nested"]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_found(kind: str) -> None:
    tensor = torch.ones(2, requires_grad=True)
    (found,) = tensors_requiring_grad(contain(kind, tensor))
    assert found is tensor
    assert tensors_requiring_grad(contain(kind, torch.ones(2))) == []


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_replaced_in_a_container_of_the_same_type(kind: str) -> None:
    old, new = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    before = contain(kind, old)
    after = map_tensors(lambda _: new, before)
    assert type(after) is type(before)
    assert tensors_requiring_grad(after)[0] is new
    assert tensors_requiring_grad(before)[0] is old, "the caller's container was changed"


@pytest.mark.parametrize("kind", KINDS)
def test_what_holds_nothing_new_is_not_rebuilt(kind: str) -> None:
    value = contain(kind, torch.ones(2))
    assert map_tensors(lambda tensor: tensor, value) is value


def test_rebuilding_runs_no_constructor() -> None:
    rebuilt = map_tensors(lambda tensor: tensor + 1, Frozen(torch.ones(1)))
    assert rebuilt.hidden == "set once"


def test_a_class_with_keys_and_attributes_keeps_them_in_step() -> None:
    rebuilt = map_tensors(lambda tensor: tensor + 1, Output(a=torch.ones(1)))
    assert rebuilt["a"] is rebuilt.a


def test_a_container_that_holds_itself_is_an_error_and_no_hang() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RuntimeError, match="a list is nested 100 containers deep"):
        map_tensors(lambda tensor: tensor, endless)


def test_a_dataclass_type_is_not_an_instance() -> None:
    assert map_tensors(lambda tensor: tensor, Frozen) is Frozen
