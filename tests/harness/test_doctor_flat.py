"""Loops whose ranks load values before FSDP1 puts them into flat parameters, of which each rank keeps a part.

All with ``use_orig_params=True``: without it torch keeps modules alive, which is a leak of a world.
"""

import contextlib
import copy
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardproof.harness.parity.rank import Rank
from shardproof.harness.watching.ties import Ties
from shardproof.testing import world
from tests.harness.test_doctor_loops import FLAT, adamw, titles, train

MIXED = "parameters are a mixture of ranks' values [D21, S9]"
EACH_LAYER = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}

#: FSDP1 refuses to send values of CPUs, and gloo sends them.
_REFUSAL = "torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states"


class Net(nn.Module):
    """Layers, of which a norm begins as ones, and loaded values do not."""

    def __init__(self, *, norm=True):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16), nn.LayerNorm(16) if norm else nn.Identity()
        self.middle, self.last = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, inputs):
        return self.last(self.middle(self.norm(self.first(inputs)).tanh()).tanh())


def empty(module):
    module.to_empty(device="cpu", recurse=False)
    for one in module.parameters(recurse=False):
        nn.init.normal_(one.data)


def loaded(data, wrap=FLAT, *, who=(0,), norm=True, seeds=(0, 1), meta=False, after=None, syncs=False, **options):
    """Ranks build a model by a seed each, and some of them load it before it is wrapped, or from the meta device."""
    torch.manual_seed(5)
    state = {name: torch.randn(one.shape) for name, one in Net(norm=norm).state_dict().items()}
    torch.manual_seed(seeds[data.rank])
    model = Net(norm=norm)
    if data.rank in who:
        model.load_state_dict(state)
    elif meta:
        model, options = model.to("meta"), {**options, "param_init_fn": empty}
    with mock.patch(_REFUSAL) if syncs else contextlib.nullcontext():
        wrapped = wrap(model, **options, **({"sync_module_states": True} if syncs else {}))
    if after is not None:
        after(wrapped, state)
    train(wrapped, adamw(wrapped), data)


def load_all(model, state):
    """All ranks load full values into what is sharded."""
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(copy.deepcopy(state))


def of_units(model, *, syncs, outer=None):
    """Wrap a unit within another one by hand."""
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    with mock.patch(_REFUSAL):
        model.middle = FSDP(model.middle, sync_module_states=syncs, **options)
        return FSDP(model, sync_module_states=syncs if outer is None else outer, **options)


def ignoring(model):
    """What is ignored stays on each rank, and user code sends the values of rank 0."""
    for one in model.first.parameters():
        dist.broadcast(one.data, 0)
    return FLAT(model, ignored_modules=[model.first])


def sent(model, **options):
    for one in model.state_dict().values():
        dist.broadcast(one, 0)
    return FLAT(model, **options)


#: Healthy loops, none of which is noted.
HEALTHY = {
    "loaded by all": lambda data: loaded(data, who=(0, 1)),
    "a seed for each rank": lambda data: loaded(data, who=()),
    "sent by hand": lambda data: loaded(data, sent, **EACH_LAYER),
    "sent by FSDP1": lambda data: loaded(data, syncs=True),
    "sent by FSDP1 in units": lambda data: loaded(data, syncs=True, **EACH_LAYER),
    "sent by FSDP1 in units by hand": lambda data: loaded(data, functools.partial(of_units, syncs=True)),
    "sent from the meta device": lambda data: loaded(data, syncs=True, meta=True),
    "loaded after it": lambda data: loaded(data, after=load_all),
    "loaded after it from the meta device": lambda data: loaded(data, meta=True, after=load_all),
}

#: Mistakes, each with its finding or its note.
BROKEN = {
    "loaded by one rank": (lambda data: loaded(data), MIXED),
    "loaded by one rank in units": (
        lambda data: loaded(data, **EACH_LAYER, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), MIXED),
    "loaded by the last rank": (lambda data: loaded(data, who=(1,), seeds=(0, 0)), MIXED),
    "loaded by one rank without a norm": (lambda data: loaded(data, norm=False), f"note: {MIXED}"),
    "loaded by one rank, one unit sent": (
        lambda data: loaded(data, functools.partial(of_units, syncs=True, outer=False)), MIXED),
    "loaded by one rank beside the meta device": (lambda data: loaded(data, meta=True), f"note: {MIXED}"),
    "loaded by one rank, a module ignored": (lambda data: loaded(data, ignoring), MIXED),
}  # fmt: skip


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", HEALTHY)
def test_one_model_in_flat_parameters_is_no_mixture(rank: Rank, name):
    assert titles(HEALTHY[name], rank, is_healthy=True, registered=Ties()) == (set(), set())


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", BROKEN)
def test_a_mixture_in_flat_parameters_is_found(rank: Rank, name):
    loop, told = BROKEN[name]
    findings, notes = titles(loop, rank, is_healthy=True, registered=Ties())
    assert findings | {f"note: {one}" for one in notes} == {told}


def test_the_class_is_as_it_was():
    before = FSDP.__init__
    registered = Ties()
    assert FSDP.__init__ is not before and FSDP.__init__.__wrapped__ is before
    registered.close()
    assert FSDP.__init__ is before
