"""What is turned off from outside: an axis is noted where it is used, is off where it should be, and on again after."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from shardproof.harness.models.ties import TiedMLP
from shardproof.harness.simulation.world import simulated_world
from shardproof.harness.training.switches import OWN, Switches, of_keywords
from shardproof.harness.worlds import leftovers


def recomputation():
    calls = []
    x = torch.ones(2, requires_grad=True)
    checkpoint(lambda y: calls.append(1) or y.exp(), x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    return len(calls) == 2


def mixed_precision():
    with torch.autocast("cpu", torch.bfloat16):
        return nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.bfloat16


def clipping():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 9.0)
    assert clip_grad_norm_([parameter], 1.0) > 9
    return bool(parameter.grad[0] < 9)


def foreach():
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), foreach=True)
    return optimizer.param_groups[0]["foreach"]


def ties():
    return len(list(built(TiedMLP(2)).parameters())) == 3


def compiled():
    graphs = []
    torch.compile(lambda x: x + 1, backend=lambda graph, _: graphs.append(1) or graph.forward)(torch.ones(1))
    return bool(graphs)


def of_fully_shard(look: Callable[[Any], Any], **options):
    with simulated_world(2) as fake:
        model = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=fake.mesh(), **options)
        return look(model._get_fsdp_state()._fsdp_param_group)


def mp_policy():
    return of_fully_shard(lambda group: group.mp_policy.param_dtype, mp_policy=MixedPrecisionPolicy(torch.bfloat16))


def reshard():
    return of_fully_shard(lambda group: group._reshard_after_forward, reshard_after_forward=True)


def offload():
    policy = CPUOffloadPolicy(pin_memory=False)
    return of_fully_shard(lambda group: isinstance(group.offload_policy, CPUOffloadPolicy), offload_policy=policy)


def prefetch():
    with simulated_world(2) as fake:
        model = fully_shard(nn.Linear(2, 2), mesh=fake.mesh())
        model.set_modules_to_forward_prefetch([fully_shard(nn.Linear(2, 2), mesh=fake.mesh())])
        return model._get_fsdp_state()._states_to_forward_prefetch


def built(model):
    """Replaced by what gives ties up."""
    return model


USES = [
    ("recomputation", recomputation), ("mixed-precision", mixed_precision), ("clipping", clipping),
    ("foreach", foreach), ("ties", ties), ("compile", compiled), ("mixed-precision", mp_policy),
    ("reshard-after-forward", reshard), ("offload", offload), ("prefetch", prefetch),
]  # fmt: skip


@pytest.mark.parametrize("axis, uses", USES, ids=[use.__name__ for _, use in USES])
def test_an_axis(axis, uses, monkeypatch):
    def run(*off):
        with Switches(off, notes=True) as switches:
            monkeypatch.setitem(globals(), "built", lambda model: switches.untie(model) or model)
            return bool(uses()), axis in switches.used

    patches, names = leftovers.Patches(), {name: globals()[name] for name in ("checkpoint", "fully_shard")}
    start = torch.optim.Optimizer.__init__
    assert run() == (True, True)
    assert run(axis) == (False, True)
    assert run(*OWN.keys() - {axis}) == (True, True)
    assert patches.found() == [] and names == {name: globals()[name] for name in names}
    assert torch.optim.Optimizer.__init__ is start


def test_what_is_not_used_is_not_noted():
    with Switches(notes=True) as switches:
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        with torch.autocast("cpu", enabled=False):
            pass
        switches.untie(nn.Linear(2, 2))
    assert switches.used == set()
    start = torch.optim.Optimizer.__init__
    with Switches(["clipping"]):
        assert torch.optim.Optimizer.__init__ is start and checkpoint is torch.utils.checkpoint.checkpoint


def parallelize(
    model, mesh, *, compiled=True, tp: int = 2, offload: str | None = "cpu", kept=False, style="fsdp", level: int = 0
):
    """Has axes that are on: compiled, tp and offload."""


def test_keywords_that_are_on():
    assert of_keywords(parallelize, {}) == {"compiled": False, "tp": 0, "offload": None}
    assert of_keywords(parallelize, {"style": "ddp", "tp": "1"}).items() >= {"style": "ddp", "tp": 1}.items()
    assert of_keywords(None, {}) == {}
    line = r"^--off-as stile=ddp: parallelize has no keyword-only argument of this name; it has compiled, tp, offload, "
    with pytest.raises(ValueError, match=line):
        of_keywords(parallelize, {"stile": "ddp"})
