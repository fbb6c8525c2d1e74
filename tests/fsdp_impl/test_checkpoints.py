"""State dicts, and torch.distributed.checkpoint, on one, two and three dimensions."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_impl import fully_shard
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import batch, full, plain_copy, tower

MESHES = {"1d": ((4,), ("dp",)), "hybrid": ((2, 2), ("replicate", "shard")), "tensor parallel": ((2, 2), ("dp", "tp"))}


def build(rank: Rank, kind: str, *, seed: int, dim: int = 5) -> tuple[Any, torch.optim.Optimizer]:
    shape, names = MESHES[kind]
    mesh = rank.mesh(shape, names)
    model = tower(dim, 2)
    torch.manual_seed(seed)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    dp = mesh["dp"] if "dp" in names else mesh
    for layer in model[1:]:
        if "tp" in names:
            parallelize_module(layer, mesh["tp"], {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()})
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def step(rank: Rank, kind: str, model: Any, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    index = rank.index // 2 if kind == "tensor parallel" else rank.index
    loss = model(batch(rank, number, (3, 5), index=index)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@world(4)
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("kind", MESHES)
def test_resumes_bit_for_bit(rank: Rank, kind: str, reuse: bool) -> None:
    """Into a new model, or into the old one after it was spoilt."""
    model, optimizer = build(rank, kind, seed=1)
    step(rank, kind, model, optimizer, 0)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=rank.tmp_path / "checkpoint")
    expected = [step(rank, kind, model, optimizer, number) for number in (1, 2)]
    if not reuse:
        model, optimizer = build(rank, kind, seed=2)
    assert not torch.equal(step(rank, kind, model, optimizer, 1), expected[0])
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=rank.tmp_path / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    for number, loss in zip((1, 2), expected, strict=True):
        assert torch.equal(step(rank, kind, model, optimizer, number), loss)


@world(4)
@pytest.mark.parametrize("dim", [2, 3, 5, 8])
@pytest.mark.parametrize("kind", MESHES)
def test_state_dicts_are_the_shards(rank: Rank, kind: str, dim: int) -> None:
    model, _ = build(rank, kind, seed=1, dim=dim)
    state = model.state_dict()
    assert list(state) == [name for name, _ in model.named_parameters()]
    for name, param in model.named_parameters():
        assert isinstance(state[name], DTensor)
        assert state[name].to_local().data_ptr() == param.to_local().data_ptr()
    pointers = {name: param.to_local().data_ptr() for name, param in model.named_parameters()}
    other, _ = build(rank, kind, seed=2, dim=dim)
    model.load_state_dict(other.state_dict())
    for (name, param), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(full(param.detach()), full(theirs.detach())), name
        assert param.to_local().data_ptr() == pointers[name]


@world(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_state_dict_after_forward_is_of_shards_and_what_is_loaded_then_is_used(
    rank: Rank, reshard_after_forward: bool
) -> None:
    model = tower(3, 1)
    plain = plain_copy(model)
    fully_shard(model, mesh=rank.mesh(), reshard_after_forward=reshard_after_forward)
    inputs = batch(rank, 0, (2, 3))
    with torch.no_grad():
        model(inputs)
        assert all(isinstance(value, DTensor) for value in model.state_dict().values())
        model(inputs)
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
        for param in plain.parameters():
            param.mul_(2)
        torch.testing.assert_close(model(inputs), plain(inputs))


@world(4)
@pytest.mark.parametrize("kind", MESHES)
def test_state_dicts_can_be_copied(rank: Rank, kind: str) -> None:
    """What a script copies is of shards, wherever in the unit's buffer these lie; the state dict itself stays live."""
    model, optimizer = build(rank, kind, seed=1)
    step(rank, kind, model, optimizer, 0)
    state = get_model_state_dict(model)
    offsets = {name: value.to_local().storage_offset() for name, value in state.items()}
    assert any(offsets.values()), f"all shards begin their storage: {offsets}"
    copies = copy.deepcopy(state)
    held = dict(model.named_parameters())
    for name, value in state.items():
        assert value.to_local().data_ptr() == held[name].to_local().data_ptr()
        assert not value.to_local().numel() or copies[name].to_local().data_ptr() != value.to_local().data_ptr()
        assert torch.equal(copies[name].full_tensor(), held[name].full_tensor())
    assert all(value is held[name] for name, value in model.state_dict(keep_vars=True).items())


@world(2)
def test_full_state_dicts_go_out_and_come_in(rank: Rank) -> None:
    """From rank 0, into a model on the meta device."""
    model = tower(5, 1)
    plain = plain_copy(model)
    fully_shard(model, mesh=rank.mesh())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    assert bool(state) == (rank.index == 0)
    for name, value in state.items():
        assert torch.equal(value, plain.state_dict()[name].cpu())
    with torch.device("meta"):
        empty = tower(5, 1)
    fully_shard(empty, mesh=rank.mesh())
    empty.to_empty(device=rank.device)
    set_model_state_dict(empty, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    inputs = batch(rank, 0, (2, 5))
    torch.testing.assert_close(empty(inputs), plain(inputs))


@world(2)
def test_assigning_a_state_dict_to_a_model_on_meta(rank: Rank) -> None:
    model = fully_shard(tower(5, 1), mesh=rank.mesh())
    with torch.device("meta"):
        empty = tower(5, 1)
    fully_shard(empty, mesh=rank.mesh())
    empty.load_state_dict(model.state_dict(), assign=True)
    inputs = batch(rank, 0, (2, 5))
    torch.testing.assert_close(empty(inputs), model(inputs))
