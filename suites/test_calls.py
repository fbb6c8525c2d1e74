"""Chapter CALLS: what a sharded model answers to the calls of a script, and what it warns of."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.harness import models
from shardproof.harness.adapters.base import WholeParameters
from shardproof.harness.models import mixed, optim
from shardproof.harness.models.stateful import by_columns
from shardproof.harness.parity import Rank
from shardproof.harness.parity.refusals import sharded
from shardproof.harness.plugin.axes import FLAT, RESHARD, SHARDS
from shardproof.testing import Capability, contract, each_value, needs, world

pytestmark = needs(Capability.FLAT_PARAMETERS, Capability.WHOLE_PARAMETERS)

NAMES = ["0.bias", "0.weight", "1.bias", "1.weight"]
_IN_PARTS = [f"{part}.{name}" for part in ("one", "two") for name in NAMES]
#: What is asked, and the answer.
ANSWERS: dict[str, Any] = {
    "strategies": ["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"],
    "offloading": False,
    "items": [True, True, True],
    "attributes": 3,
    "a-module-that-is-recomputed": True,
    "forms": ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "FULL_STATE_DICT", True],
    "saved-by-position": [True, [f"model.{name}" for name in NAMES]],
    "version-of-what-is-wrapped": nn.BatchNorm1d._version,
    "ignored-as-variables": [True, False],
    "states-of-a-script": [["param_groups", "state"], [3.0]],
    "states-without-groups": [["state"], [3.0]],
    "states-in-another-dtype": ["torch.float64"],
    "flat-states-in-another-dtype": ["torch.float64"],
    "loaded-directly": [["param_groups", "state"], [5.0]],
    "states-by-parameters": [True, True, True],
    "dtypes-of-a-norm": ["torch.bfloat16", "torch.float32"],
    "casts-by-default": [["torch.bfloat16"], ["torch.float32"]],
    "casts-of-the-root": ["torch.bfloat16", "torch.bfloat16", "torch.bfloat16", "torch.float32"],
    "mesh-of-shards": True,
    "a-transposed-part": True,
    "every-other-column": True,
    "loaded-where-whole": True,
    "loaded-after-new-data": True,
    "states-by-default": NAMES,
    "bytes-past-alignment": [0],
    "first-rank-of-a-bare-root": True,
    "casts-of-a-bare-root": "torch.bfloat16",
    "places-after-a-cast": ["weight", "bias"],
    "buffers-of-what-is-recomputed": ["torch.float64", "torch.float32"],
    "names-of-what-is-recomputed": NAMES,
    "loaded-into-what-is-recomputed": [[], []],
    "keys-that-do-not-fit": [NAMES[:2], ["2.bias", "2.weight"]],
    "states-for-a-named-optimizer": True,
    "buffers-on-the-meta-device": 0,
    "beside-a-plain-module": ["0.bias", "0.weight"],
    "buffers-that-are-saved": ["torch.bfloat16", "torch.float64", "torch.float64"],
    "norm-of-low-gradients": "torch.bfloat16",
    "gradients-of-a-cast-model": ["torch.float64"],
    "names-of-a-bare-root": ["0.weight", "0.bias"],
    "states-of-a-small-unit": ["0.bias", "0.weight", "1.weight"],
    "dtype-for-a-function": ["torch.float32"],
    "refused-again": [True, True],
    "nested-by-size": ["", "0.0", "0.0.0"],
    "in-two-places-by-size": ["", "0.0"],
    "wrapped-everywhere": [["", "0", "0.0", "0.1", "1"], True],
    "text-of-a-rule": True,
    "options-of-a-script": [7.0],
    "groups-in-another-order": [[20.0, 2.0], [10.0, 1.0]],
    "numbers-in-another-order": [[10.0, 1.0], [20.0, 2.0]],
    "names-of-local-states": ["0._flat_param", "_flat_param"],
    "tied-after-whole-ones": [True, True],
    "norm-with-options": ["SHARD_GRAD_OP", "FULL_SHARD"],
    "in-a-plain-module": [_IN_PARTS, _IN_PARTS, True, [(4,), (4, 4)], ["one", "two"]],
}
#: What is allowed, with the class of a warning, words in it, and whether it is to be given.
WARNINGS: dict[str, tuple[type[Warning], str, bool]] = {
    "a-list": (UserWarning, "containers", True),
    "a-dict": (UserWarning, "containers", True),
    "nothing-sharded": (FutureWarning, "NO_SHARD", True),
    "ignored-whole": (UserWarning, "top-level module", True),
    "a-norm-by-a-rule": (UserWarning, "mixed precision disabled", True),
    "frozen-in-a-unit": (UserWarning, "requires_grad", True),
    "frozen-apart": (UserWarning, "requires_grad", False),
    "whole-on-every-cpu": (UserWarning, "rank0_only", True),
    "whole-on-one-cpu": (UserWarning, "rank0_only", False),
    "older-parameters": (FutureWarning, "optim_input", True),
}


@contract("CALLS-1")
@world(2)
@each_value("what")
@pytest.mark.parametrize("what", ANSWERS)
def test_answers(rank: Rank, what: str) -> None:
    """What a script asks the wrapper, and what it gives to it, is answered and used as documented."""
    answer = sharded(rank, models.MLP(5).to(rank.device)).call(what)
    assert answer == ANSWERS[what], f"{what}: {answer} instead of {ANSWERS[what]}"


@contract("CALLS-1")
@world(4)
@needs(Capability.HYBRID)
def test_answers_of_replicas(rank: Rank) -> None:
    """Shards with replicas answer for the mesh of sharded values, and for the rank that saves."""
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    adapter = sharded(rank, models.MLP(5).to(rank.device), mesh=mesh)
    assert adapter.call("mesh-of-shards"), "sharded values do not lie on the mesh that was given"
    saved = adapter.call("states-of-a-group")
    of_all, of_each = NAMES if rank.index == 0 else [], NAMES if rank.index % 2 == 0 else []
    expected = [of_all, of_each, of_all]
    assert saved == expected, f"the first rank of all, of its replica, or of all again, saves {saved}, not {expected}"
    is_first = rank.index % 2 == 0
    found = adapter.call("first-of-each-replica")
    assert found == [NAMES if is_first else [], is_first], f"of whole values this rank, {rank.index}, has {found}"


@contract("CALLS-1")
@world(4)
@needs(Capability.HYBRID)
def test_states_of_a_part_of_the_ranks(rank: Rank) -> None:
    """Where a model is on a part of the ranks, the first of these saves the optimizer's state, and all load it."""
    adapter = sharded(rank, models.MLP(5).to(rank.device), mesh=rank.mesh((2, 2), ("replicate", "shard")))
    saved, loaded = adapter.call("states-of-a-part")
    assert saved, "the first rank of a part saves nothing, or another one does"
    assert loaded, "a rank has nothing of what the first of its part has saved"


@contract("CALLS-2")
@world(2)
@each_value("what")
@pytest.mark.parametrize("what", WARNINGS)
def test_warnings(rank: Rank, what: str) -> None:
    """A script is warned of what is allowed and rarely meant, and not of what is meant."""
    check_warned(rank, what, *WARNINGS[what])


@contract("CALLS-2")
@world(1)
@needs(Capability.SINGLE_RANK)
def test_warning_of_one_rank(rank: Rank) -> None:
    """Sharding over a single rank warns, where the wrapper says that it does not shard."""
    check_warned(rank, "one-rank", UserWarning, "world size is 1", True)
    named = sharded(rank, models.MLP(5).to(rank.device)).call("strategies")
    assert named == ["NO_SHARD"] * 4, f"wrappers of one rank name their strategies {named}"


def check_warned(rank: Rank, what: str, kind: type[Warning], words: str, is_expected: bool) -> None:
    """Check whether a warning of a class with some words is given on this rank."""
    adapter = sharded(rank, models.MLP(5).to(rank.device))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        adapter.call(what)
    texts = [str(one.message) for one in told if issubclass(one.category, kind)]
    found = [text for text in texts if words in text]
    assert bool(found) == is_expected, (
        f"{what}: {'no' if is_expected else 'a'} {kind.__name__} names {words!r} among {texts}"
    )


@contract("CALLS-3")
@world(2)
@SHARDS
@pytest.mark.parametrize("keeps_changes", [False, True])
def test_whole_parameters_are_the_models_own(rank: Rank, keeps_changes: bool, shards: bool) -> None:
    """Where a model holds its original parameters, the whole ones are these, so that the optimizer's are known."""
    model = models.Tower(dim=9)
    run = rank.run(model, units=model.units(), shards=shards)
    for _ in range(2):
        run.evaluate((rank.batch(0, (2, 9)),))
        held = dict(run.adapter.held_parameters())
        with run.adapter.whole_parameters(WholeParameters(keeps_changes=keeps_changes)) as found:
            others = [name for name, parameter in found.items() if parameter is not held[name]]
        assert not others, f"whole parameters that are other objects than the model's: {', '.join(others)}"


@contract("CALLS-3")
@world(2)
@FLAT
@SHARDS
def test_attributes_after_whole_parameters(rank: Rank, shards: bool, flat: bool) -> None:
    """When whole parameters were read, modules have attributes of the dtypes that they had, and no whole values."""
    model = models.Tower(dim=9)
    shape = model.get_parameter("layers.1.in_proj.weight").shape
    run = rank.run(model, units=model.units(), shards=shards, flat_parameters=flat)
    layer: Any = run.original_module("layers.1.in_proj")
    before = (type(layer.weight), layer.weight.shape, layer.weight.dtype)
    with run.adapter.whole_parameters(WholeParameters()):
        assert layer.weight.shape == shape, f"the whole weight has the shape {tuple(layer.weight.shape)}"
    after = (type(layer.weight), layer.weight.shape, layer.weight.dtype)
    assert after == before, f"the weight was {before} and is {after}"


@contract("CALLS-3")
@world(2)
@SHARDS
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
@pytest.mark.parametrize("keeps_changes", [False, True])
def test_whole_parameters_before_backward(
    rank: Rank, keeps_changes: bool, reshard_after_forward: bool | None, shards: bool
) -> None:
    """Whole parameters that are read between forward and backward change no gradient, written back or not."""
    model = models.Tower(dim=9)
    options: dict[str, Any] = {"units": model.units(), "reshard_after_forward": reshard_after_forward, "shards": shards}
    run, twin = (rank.run(models.copy_of(model), optimizer=None, **options) for _ in range(2))
    for step in range(2):
        for one in (run, twin):
            output = one.adapter.forward(rank.batch(step, (4, 9)))
            if one is run:
                with run.adapter.whole_parameters(WholeParameters(keeps_changes=keeps_changes)):
                    pass
            one.adapter.backward(models.mean_square(output))
        expected = twin.adapter.gradients()
        for name, piece in run.adapter.gradients().items():
            other = expected[name]
            assert (piece is None) == (other is None), f"{name} has a gradient in one of the runs"
            if piece is not None and other is not None:
                assert torch.equal(piece.tensor, other.tensor), f"{name} has another gradient"


@contract("CALLS-3")
@world(2)
@SHARDS
def test_whole_gradients_of_columns(rank: Rank, shards: bool) -> None:
    """What a script writes to whole gradients reaches the same elements of the shards, in any order of memory."""
    model = models.Tower(dim=9)
    by_columns(model)
    run = rank.run(model, units=model.units(), shards=shards, optimizer=None)
    run.forward_backward((rank.batch(0, (4, 9)),), loss=models.mean_square)
    how, expected = WholeParameters(with_gradients=True), {}
    with run.adapter.whole_parameters(how) as found:
        for name, parameter in found.items():
            assert parameter.grad is not None, f"{name} has no whole gradient"
            numbers = torch.arange(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
            expected[name] = numbers.view(parameter.shape)
            parameter.grad.copy_(expected[name])
    for name, piece in run.adapter.gradients().items():
        if piece is not None:
            assert torch.equal(piece.tensor, piece.cut(expected[name])), f"{name} has another gradient than was written"


@contract("CALLS-3")
@world(4)
@needs(Capability.TENSOR_PARALLEL)
def test_whole_parameters_beside_tensor_parallelism(rank: Rank) -> None:
    """What is written to whole parameters that tensor parallelism has cut, and to gradients, reaches the shards."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    prepare = functools.partial(mixed.split_columns, mesh=mesh["tp"])
    run = rank.run(mixed.Mixed(), units=[["low"]], mesh=mesh["dp"], prepare=prepare, optimizer=None)
    run.forward_backward((rank.batch(0, (6, 4), mesh=mesh["dp"]),), loss=torch.sum)

    def values() -> dict[str, torch.Tensor]:
        found = {name: piece.tensor.clone() for name, piece in run.adapter.parameters().items()}
        gradients = {f"gradient of {name}": piece for name, piece in run.adapter.gradients().items()}
        return found | {name: piece.tensor.clone() for name, piece in gradients.items() if piece is not None}

    before = values()
    with run.adapter.whole_parameters(WholeParameters(with_gradients=True)) as whole, torch.no_grad():
        for parameter in whole.values():
            parameter.mul_(2)
            if parameter.grad is not None:
                parameter.grad.mul_(2)
    for name, value in values().items():
        assert torch.equal(value, 2 * before[name]), f"{name} was doubled where it was whole, and the shard was not"


@contract("CALLS-3")
@world(4)
@needs(Capability.TENSOR_PARALLEL, Capability.FULL_STATE_DICT)
def test_whole_states_beside_tensor_parallelism(rank: Rank) -> None:
    """A whole state dict has the whole of what tensor parallelism has cut, and of the optimizer's states of it."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    model = mixed.Mixed()
    prepare = functools.partial(mixed.split_columns, mesh=mesh["tp"])
    run = rank.run(model, units=[["low"]], mesh=mesh["dp"], prepare=prepare, optimizer=optim.sgd(momentum=0.9))
    run.step([(rank.batch(0, (6, 4), mesh=mesh["dp"]),)], loss=torch.sum)
    saved = run.adapter.checkpoint(form="full")
    pairs = [(name, piece, saved["model"][name]) for name, piece in run.adapter.parameters().items()]
    for name, pieces in (run.adapter.optimizer_state() or {}).items():
        pairs += [(f"{key} of {name}", piece, saved["optimizer"]["state"][name][key]) for key, piece in pieces.items()]
    assert len(pairs) > 5, "this rank holds no momentum"
    for name, piece, value in pairs:
        # Some leave it to the script to put together what tensor parallelism has cut.
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(piece.cut(full), piece.tensor), f"{name} is another one in the state dict than on this rank"


@contract("CALLS-3")
@world(4)
@needs(Capability.TENSOR_PARALLEL)
def test_whole_frozen_parameters_beside_tensor_parallelism(rank: Rank) -> None:
    """Of whole parameters that tensor parallelism has cut, those are frozen that the script has frozen."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    prepare = functools.partial(mixed.split_columns, mesh=mesh["tp"])
    run = rank.run(mixed.Mixed(), units=[["low"]], mesh=mesh["dp"], prepare=prepare)
    run.adapter.held_parameters()["low.weight"].requires_grad_(False)
    with run.adapter.whole_parameters(WholeParameters()) as whole:
        frozen = [name for name, parameter in whole.items() if not parameter.requires_grad]
    assert frozen == ["low.weight"], f"of the whole parameters are frozen: {frozen}"
