"""``fsdp_impl.wrap`` stands for ``torch.distributed.fsdp.wrap``: the same names, the same choices."""

import functools
import inspect
from typing import Any

import pytest
import torch.distributed.fsdp.wrap as theirs
from torch import nn
from torch.distributed.fsdp.wrap import _recursive_wrap as recursive_wrap

import fsdp_impl.wrap as ours
from fsdp_impl import FullyShardedDataParallel
from fsdp_impl.flat import wrapping
from fsdp_impl.flat.options import Ignored
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import wrap


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8),
        nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 16)]),
        nn.TransformerEncoderLayer(8, 2, 16),
        nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(8, 8), nn.Linear(2, 2))),
    )


OTHER_CLASSES: dict[str, Any] = {"force_leaf_modules": {nn.Sequential}, "exclude_wrap_modules": {nn.Linear}}
POLICIES: dict[str, Any] = {
    "always": lambda half: half.always_wrap_policy,
    "lambda": lambda half: functools.partial(
        half.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm)
    ),
    "transformer": lambda half: functools.partial(
        half.transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
    ),
    **{
        f"size {size}": lambda half, size=size: functools.partial(half.size_based_auto_wrap_policy, min_num_params=size)
        for size in (1, 7, 70, 80, 150, 300, 1000, 10**6)
    },
    "size of other classes": lambda half: functools.partial(
        half.size_based_auto_wrap_policy, min_num_params=70, **OTHER_CLASSES
    ),
    "classes": lambda half: half.ModuleWrapPolicy([nn.Linear, nn.LayerNorm]),
    "custom": lambda half: half.CustomPolicy(
        lambda module: {"forward_prefetch": True} if isinstance(module, nn.Linear) else isinstance(module, nn.LayerNorm)
    ),
}


@world(2)
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_same_modules_are_wrapped(rank: Rank, name: str) -> None:
    found = []
    for half in (theirs, ours):
        sharded = wrap(model(), auto_wrap_policy=POLICIES[name](half), device_id=rank.device)
        wrappers = [one for one in sharded.named_modules() if isinstance(one[1], FullyShardedDataParallel)]
        found.append([(path, module.forward_prefetch) for path, module in wrappers])
    assert found[0] == found[1]


class Box(nn.Module):
    """A wrapper that does nothing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"classes", "custom"}))
def test_policies_are_asked_in_the_same_way(name: str, ignores: bool) -> None:
    """Which modules are looked into, and what of them is left, decides what a function makes of them."""
    plain, boxed, policy = model(), model(), POLICIES[name](ours)
    found = wrapping._run_callable(plain, policy, {}, ignored_in(plain, ignores))
    left = ignored_in(boxed, ignores)
    recursive_wrap(
        boxed, auto_wrap_policy=policy, wrapper_cls=Box, only_wrap_children=True,
        ignored_modules=set(left.modules), ignored_params=set(left.params),
    )  # fmt: skip
    expected = {path.replace("inner.", "") for path, module in boxed.named_modules() if isinstance(module, Box)}
    assert {path for path, module in plain.named_modules() if module in found} == expected


def ignored_in(whole: nn.Module, ignores: bool) -> Ignored:
    """Nothing, or a list of two linear layers and what is in it."""
    if not ignores:
        return Ignored(frozenset(), frozenset())
    part = whole.get_submodule("1")
    return Ignored(frozenset(part.modules()), frozenset(part.parameters()))


@pytest.mark.parametrize("name", theirs.__all__)
def test_names_and_signatures(name: str) -> None:
    assert name in ours.__all__
    signatures = [inspect.signature(getattr(half, name)).parameters.values() for half in (theirs, ours)]
    shapes = [[(one.name, one.kind, one.default) for one in parameters] for parameters in signatures]
    assert shapes[0] == shapes[1]


def test_a_script_adds_to_the_classes_of_the_size_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads them from the policy function, and may add its own there for all policies that follow."""
    found: list[list[bool]] = []
    for half in (theirs, ours):
        policy: Any = half.size_based_auto_wrap_policy
        answers = []
        for classes in (policy.FORCE_LEAF_MODULES, policy.FORCE_LEAF_MODULES | {nn.LSTM}):
            monkeypatch.setattr(policy, "FORCE_LEAF_MODULES", classes)
            monkeypatch.setattr(policy, "EXCLUDE_WRAP_MODULES", policy.EXCLUDE_WRAP_MODULES | classes)
            for module in (nn.LSTM(2, 2), nn.MultiheadAttention(2, 2), nn.ModuleList(), nn.Linear(2, 2)):
                answers += [policy(module, recurse, 10**9) for recurse in (False, True)]
        found.append(answers)
    assert found[0] == found[1]
    assert found[0][:2] == [True, True] and found[0][8:10] == [False, False]


def test_wrapping_while_a_model_is_made() -> None:
    class Box(nn.Module):
        def __init__(self, inner: nn.Module, size: int = 0, kind: str = "") -> None:
            super().__init__()
            self.inner, self.size, self.kind = inner, size, kind

    inner = nn.Linear(2, 2)
    with ours.enable_wrap(wrapper_cls=Box, size=1, kind="a"):
        box = ours.wrap(inner, size=2)
    assert isinstance(box, Box) and (box.inner, box.size, box.kind) == (inner, 2, "a")
