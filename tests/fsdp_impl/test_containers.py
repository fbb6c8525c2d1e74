"""What is left as it is where tensors are replaced in whatever a forward takes and returns.

That they are found and replaced, the cases of AUTOGRAD-3, AUTOGRAD-6 and AUTOGRAD-16 show.
"""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from fsdp_impl.common.containers import map_tensors


class Pair(NamedTuple):
    x: Any = None
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


ONES = torch.ones(2)
CONTAINERS: list[Any] = [
    ONES, [ONES], (ONES, 1), {"a": ONES}, collections.defaultdict(list, {"a": ONES}), Pair(ONES), Frozen(ONES),
    collections.OrderedDict(a=ONES), {"a": [Frozen((1, {"b": Pair(y=ONES)}))], "c": "text"},
]  # fmt: skip


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda value: type(value).__name__)
def test_what_holds_nothing_new_is_not_rebuilt(value: Any) -> None:
    assert map_tensors(lambda tensor: tensor, value) is value


def test_a_container_that_holds_itself_is_an_error_and_no_hang() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RuntimeError, match="a list is nested 100 containers deep"):
        map_tensors(lambda tensor: tensor, endless)


def test_a_dataclass_type_is_not_an_instance() -> None:
    assert map_tensors(lambda tensor: tensor, Frozen) is Frozen


def test_a_default_dict_keeps_its_factory() -> None:
    assert map_tensors(lambda tensor: tensor + 1, collections.defaultdict(list, {"a": ONES}))["b"] == []
