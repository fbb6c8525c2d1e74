"""State dicts of FullyShardedDataParallel: whole, sharded and local, from any wrapping into any."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_impl import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import FULL, NONE, ZERO2, wrap, wrap_children
from tests.fsdp_impl.replicas import plain_copy, tower

WHOLE, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
ORIGINALS = pytest.mark.parametrize("use_orig_params", [False, True])
STRATEGIES = pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])


class Rich(nn.Module):
    """Tied parameters, a buffer, one that is not saved, and a parameter whose layout is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.body = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5))
        self.turned = nn.Parameter(torch.randn(4, 5).t())
        self.output = nn.Linear(5, 7, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("scale", torch.randn(2))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.embedding(tokens)) @ self.turned
        out: torch.Tensor = self.output(hidden @ self.turned.t())
        return out


def rich(seed: int = 0) -> Rich:
    torch.manual_seed(seed)
    return Rich()


def wrap_rich(model: Rich, **options: Any) -> FullyShardedDataParallel:
    model.body = wrap(model.body, **options)
    return wrap(model, **options)


def assert_same_values(found: Any, expected: Any) -> None:
    assert list(found) == list(expected) or sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name].cpu(), value.cpu()), name


@world(2)
@ORIGINALS
@STRATEGIES
def test_full_state_dict_is_that_of_the_plain_model(
    rank: Rank, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    model = rich().to(rank.device)
    plain = plain_copy(model)
    sharded = wrap_rich(model, sharding_strategy=strategy, use_orig_params=use_orig_params, device_id=rank.device)
    for _ in range(2):
        found = sharded.state_dict()
        assert_same_values(found, plain.state_dict())
        assert not any(isinstance(value, DTensor) for value in found.values())
        tokens = torch.tensor([[1, 2]], device=rank.device)
        # Also after a forward that leaves the root gathered, and after a backward.
        for one in (plain, sharded):
            one.eval()
            one(tokens[0]).sum().backward()
    found["turned"].zero_()
    assert_same_values(sharded.state_dict(), plain.state_dict())
    plain.load_state_dict(sharded.state_dict())


@world(2)
@ORIGINALS
@STRATEGIES
@pytest.mark.parametrize("kind", [WHOLE, SHARDED])
def test_what_is_saved_is_loaded_into_other_wrappings(
    rank: Rank, kind: StateDictType, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    source = rich(1).to(rank.device)
    expected = plain_copy(source).state_dict()
    saved = wrap_rich(source, device_id=rank.device, use_orig_params=not use_orig_params)
    target = wrap(rich(2).to(rank.device), sharding_strategy=strategy, use_orig_params=use_orig_params,
                  device_id=rank.device)  # fmt: skip
    with FullyShardedDataParallel.state_dict_type(saved, kind):
        given = saved.state_dict()
    if kind is SHARDED:
        names = {name for name, _ in saved.module.named_buffers()}
        assert all(isinstance(value, DTensor) for name, value in given.items() if "scale" not in name and
                   "running" not in name and "tracked" not in name), names  # fmt: skip
        assert given["embedding.weight"].to_local().shape == (4 - rank.index, 5)
    else:
        given = {name: value.contiguous() for name, value in given.items()}  # as another program may have saved it
    target(torch.tensor([1, 2], device=rank.device))  # the root stays gathered: what is loaded must replace it
    with FullyShardedDataParallel.state_dict_type(target, kind):
        target.load_state_dict(given)
    assert_same_values(target.state_dict(), expected)
    target.eval()
    plain = plain_copy(rich(3))
    plain.load_state_dict(expected)
    plain.eval()
    tokens = torch.tensor([3, 4], device=rank.device)
    torch.testing.assert_close(target(tokens), plain(tokens))


@world(2)
def test_only_the_first_rank_gets_anything(rank: Rank) -> None:
    model = rich().to(rank.device)
    expected = plain_copy(model).state_dict()
    sharded = wrap_rich(model, device_id=rank.device)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(sharded, WHOLE, config):
        found = sharded.state_dict()
    if rank.index:
        assert not found
    else:
        assert_same_values(found, expected)
        assert {value.device.type for value in found.values()} == {"cpu"}
    assert FullyShardedDataParallel.get_state_dict_type(sharded).state_dict_config == FullStateDictConfig()


@world(2)
@ORIGINALS
def test_local_state_dict_has_flat_shards(rank: Rank, use_orig_params: bool) -> None:
    model = wrap_rich(rich(1).to(rank.device), device_id=rank.device, use_orig_params=use_orig_params)
    other = wrap_rich(rich(2).to(rank.device), device_id=rank.device, use_orig_params=use_orig_params)
    for one in (model, other):
        FullyShardedDataParallel.set_state_dict_type(one, LOCAL)
    found = model.state_dict()
    shards = {name for name in found if name.endswith("_flat_param")}
    assert shards == {"_flat_param", "body._flat_param"}
    assert not {"turned", "body.0.weight"} & found.keys()
    other.load_state_dict(found)
    for one in (model, other):
        FullyShardedDataParallel.set_state_dict_type(one, WHOLE)
    assert_same_values(other.state_dict(), model.state_dict())


@world(2)
def test_wrappers_inside_plain_modules_and_checkpointing(rank: Rank) -> None:
    model = tower(5).to(rank.device)
    expected = plain_copy(model).state_dict()
    model[1] = checkpoint_wrapper(wrap(model[1], device_id=rank.device))
    model[2] = wrap(checkpoint_wrapper(model[2]), device_id=rank.device)
    found = model.state_dict()
    assert_same_values(found, expected)
    model.load_state_dict({name: value + 1 for name, value in found.items()})
    assert_same_values(model.state_dict(), {name: value + 1 for name, value in expected.items()})


@world(2)
def test_ignored_modules_keep_their_memory(rank: Rank) -> None:
    model = tower(5).to(rank.device)
    expected = plain_copy(model).state_dict()
    ignored = model[2]
    sharded = wrap(model, ignored_modules=[ignored], device_id=rank.device)
    found = sharded.state_dict()
    assert_same_values(found, expected)
    assert found["2.in_proj.weight"].data_ptr() == ignored.in_proj.weight.data_ptr()


@world(2)
def test_mixed_precision_stays_outside(rank: Rank) -> None:
    model = rich().to(rank.device)
    expected = plain_copy(model).state_dict()
    precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    sharded = wrap(model, mixed_precision=precision, device_id=rank.device).eval()
    sharded(torch.tensor([1, 2], device=rank.device))
    assert sharded.module.scale.dtype == torch.bfloat16
    found = sharded.state_dict()
    assert {name: value.dtype for name, value in found.items()} == {n: v.dtype for n, v in expected.items()}
    assert torch.equal(found["turned"], expected["turned"])


@world(4)
@ORIGINALS
@pytest.mark.parametrize("kind", [WHOLE, SHARDED])
def test_beside_tensor_parallelism(rank: Rank, kind: StateDictType, use_orig_params: bool) -> None:
    """Whole tensors are whole over both dimensions; sharded ones lie over both."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))

    def make(seed: int) -> FullyShardedDataParallel:
        model = tower(6, 1).to(rank.device)
        torch.manual_seed(seed)
        for param in model.parameters():
            nn.init.normal_(param)
        plain.append(plain_copy(model).state_dict())
        parallelize_module(model[1], mesh["tp"], {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()})
        return wrap_children(model, device_mesh=mesh["dp"], use_orig_params=use_orig_params, device_id=rank.device)

    plain: list[Any] = []
    source, target = make(1), make(2)
    for one in (source, target):
        FullyShardedDataParallel.set_state_dict_type(one, kind)
    found = source.state_dict()
    if kind is SHARDED:
        assert found["1.in_proj.weight"].device_mesh.ndim == 2
        assert_same_values({name: value.full_tensor() for name, value in found.items()}, plain[0])
    else:
        assert_same_values(found, plain[0])
    target.load_state_dict(found)
    FullyShardedDataParallel.set_state_dict_type(target, WHOLE)
    assert_same_values(target.state_dict(), plain[0])


@world(4)
@pytest.mark.parametrize("hybrid", [False, True])
def test_sharded_state_dict_goes_to_another_number_of_ranks(rank: Rank, hybrid: bool) -> None:
    """Written by four ranks (or two groups of two), read by groups of two."""
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    model = rich(1).to(rank.device)
    expected = plain_copy(model).state_dict()
    options: dict[str, Any] = {"device_mesh": rank.mesh()}
    if hybrid:
        options = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    source = wrap_rich(model, device_id=rank.device, **options)
    FullyShardedDataParallel.set_state_dict_type(source, SHARDED)
    dcp.save(source.state_dict(), checkpoint_id=rank.tmp_path / "checkpoint")
    target = wrap_rich(rich(2).to(rank.device), device_id=rank.device, device_mesh=mesh["shard"])
    FullyShardedDataParallel.set_state_dict_type(target, SHARDED)
    state = target.state_dict()
    dcp.load(state, checkpoint_id=rank.tmp_path / "checkpoint")
    target.load_state_dict(state)
    FullyShardedDataParallel.set_state_dict_type(target, WHOLE)
    assert_same_values(target.state_dict(), expected)
    dist.barrier()


@world(2)
@ORIGINALS
def test_missing_unexpected_and_misfit_values_are_told(rank: Rank, use_orig_params: bool) -> None:
    sharded = wrap_rich(rich().to(rank.device), device_id=rank.device, use_orig_params=use_orig_params)
    given = sharded.state_dict()
    del given["body.0.weight"]
    missing, unexpected = sharded.load_state_dict(given, strict=False)
    assert missing == ["body.0.weight"] and not unexpected
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "body.0.weight"'):
        sharded.load_state_dict(given)
    with pytest.raises(RuntimeError, match=r"size mismatch for body.0.weight: .*\[2, 2\].*\[3, 5\]"):
        sharded.load_state_dict({**given, "body.0.weight": torch.zeros(2, 2)})
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*nowhere"):
        sharded.load_state_dict({**given, "body.0.weight": torch.zeros(3, 5), "nowhere": torch.zeros(1)})


@world(2)
@ORIGINALS
@pytest.mark.parametrize("around", [False, True])
def test_missing_and_unexpected_keys_are_named_as_in_the_state_dict(
    rank: Rank, around: bool, use_orig_params: bool
) -> None:
    """At every depth, in wrappers and in the modules inside them, loaded by a wrapper or by a module around it."""
    options: dict[str, Any] = {"device_id": rank.device, "use_orig_params": use_orig_params}
    inner = wrap(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), **options)
    model: nn.Module = wrap(nn.Sequential(inner, nn.Linear(3, 3)), **options)
    prefix = ""
    if around:
        model, prefix = nn.Sequential(model), "0."
    given = model.state_dict()
    lacking = {f"{prefix}{name}" for name in ("0.1.running_mean", "0.1.weight", "1.weight")}
    stray = {f"{prefix}{name}" for name in ("stray", "0.stray", "0.0.stray")}
    given = {name: value for name, value in given.items() if name not in lacking} | dict.fromkeys(stray, torch.ones(1))
    missing, unexpected = model.load_state_dict(given, strict=False)
    assert (set(missing), set(unexpected)) == (lacking, stray)
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(given)
    assert "_fsdp_wrapped_module" not in str(caught.value)


@world(2)
def test_what_a_user_can_get_wrong(rank: Rank) -> None:
    model = wrap_children(tower(5).to(rank.device), device_id=rank.device)
    with pytest.raises(RuntimeError, match=r"^Expected state_dict_config of type .*FullStateDictConfig.* but got"):
        FullyShardedDataParallel.set_state_dict_type(model, WHOLE, LocalStateDictConfig())
    with (
        pytest.raises(RuntimeError, match=r"^Expected state_dict_config of type"),
        FullyShardedDataParallel.state_dict_type(model, LOCAL, ShardedStateDictConfig()),
    ):
        pass
    FullyShardedDataParallel.set_state_dict_type(model[1], SHARDED)
    with pytest.raises(AssertionError, match="All FSDP modules must have the same state dict settings"):
        FullyShardedDataParallel.get_state_dict_type(model)
    with pytest.raises(ValueError, match="Expects a module with FSDP modules"):
        FullyShardedDataParallel.get_state_dict_type(nn.Linear(2, 2))
    FullyShardedDataParallel.set_state_dict_type(model[1], WHOLE)
    with (
        FullyShardedDataParallel.summon_full_params(model),
        pytest.raises(AssertionError, match="when already unsharding"),
    ):
        model.state_dict()
    whole = wrap(tower(3), sharding_strategy=NONE, device_id=rank.device)
    FullyShardedDataParallel.set_state_dict_type(whole, LOCAL)
    with pytest.raises(RuntimeError, match="``local_state_dict`` can only be used when parameters are flatten"):
        whole.state_dict()
