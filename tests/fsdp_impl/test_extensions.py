"""Tensors that choose what is gathered."""

import functools
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

from fsdp_impl import MixedPrecisionPolicy, fully_shard
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import GATHER, assert_close, average_gradients, batch, counts, full, plain_copy


def half_before(self: torch.Tensor, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
    """Gathers two halves of the numbers apart: high bits in bfloat16, and the rest."""
    assert mesh.ndim == 1
    assert isinstance(module, nn.Linear)
    plain = self.data_ if isinstance(self, Wrapped) else self
    rows = -(-size[0] // mesh.size())
    padded = plain.new_zeros(rows, *size[1:])
    padded[: plain.size(0)].copy_(plain)
    high = padded.to(torch.bfloat16)
    return (high, padded - high.to(padded.dtype)), {"size": size}


def half_after(self: torch.Tensor, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    high, rest = outputs
    whole = (high.to(rest.dtype) + rest).to(dtype)[: metadata["size"][0]]
    if out is not None:
        out.copy_(whole)
        return None
    whole = whole.contiguous().clone()
    return whole, (whole,)


class Wrapped(torch.Tensor):
    """A tensor that holds another, as quantised tensors do."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            dtype=data.dtype,
            device=data.device,
            requires_grad=data.requires_grad,
        )

    def __init__(self, data: torch.Tensor) -> None:
        self.data_ = data

    def __tensor_flatten__(self) -> Any:
        return ["data_"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, metadata: Any, size: Any, stride: Any) -> "Wrapped":
        return Wrapped(inner["data_"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrap = functools.partial(pytree.tree_map_only, Wrapped, lambda tensor: tensor.data_)
        out = func(*unwrap(args), **unwrap(kwargs or {}))
        if func is torch.ops.aten.copy_.default or func._schema.name.endswith("_"):
            return args[0]
        return pytree.tree_map_only(torch.Tensor, Wrapped, out)

    fsdp_pre_all_gather = half_before
    fsdp_post_all_gather = half_after


def build(rank: Rank, kind: str, raf: bool, dim: int, **options: Any) -> tuple[nn.Sequential, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim))
    plain = plain_copy(model)
    if kind == "class":
        for layer in (model[0], model[2]):
            layer.weight = nn.Parameter(Wrapped(layer.weight.detach()))
    fully_shard(model[0], mesh=rank.mesh(), reshard_after_forward=raf, **options)
    fully_shard(model, mesh=rank.mesh(), reshard_after_forward=raf, **options)
    if kind == "object":
        for layer in (model[0], model[2]):
            local = layer.weight._local_tensor
            local.fsdp_pre_all_gather = half_before.__get__(local)
            local.fsdp_post_all_gather = half_after.__get__(local)
    return model, plain


@world(2, 4)
@pytest.mark.parametrize("dim", [4, 5])
@pytest.mark.parametrize("raf", [True, False])
@pytest.mark.parametrize("kind", ["class", "object"])
def test_trains_as_replicas_do(rank: Rank, kind: str, raf: bool, dim: int) -> None:
    model, plain = build(rank, kind, raf, dim)
    for step in range(3):
        inputs = batch(rank, step, (3, dim))
        found = counts(lambda inputs=inputs: model(inputs).square().sum().backward())
        assert found[GATHER] == (4 if raf else 2)
        plain(inputs).square().sum().backward()
        average_gradients(plain)
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_close(name, full(param.grad), expected.grad)
        with torch.no_grad():
            for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
                local = param._local_tensor
                (local.data_ if isinstance(local, Wrapped) else local).sub_(param.grad._local_tensor, alpha=0.1)
                expected.sub_(expected.grad, alpha=0.1)
        for which in (model, plain):
            which.zero_grad()


@world(2)
def test_the_dtype_of_compute_is_told(rank: Rank) -> None:
    model, _ = build(rank, "class", True, 5, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    output = model(batch(rank, 0, (3, 5)))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert all(param.grad.dtype == torch.float32 for param in model.parameters())


@world(2)
def test_what_is_unsharded_is_freed(rank: Rank) -> None:
    model, _ = build(rank, "class", True, 4)
    model(batch(rank, 0, (3, 4)))
    inner = model[0]._unit().group.shards.params[0]
    assert inner.unsharded.untyped_storage().size() == 0
    model.unshard()
    assert model[2].weight.untyped_storage().size() > 0


@world(2, 4)
@pytest.mark.parametrize("raf", [True, False])
def test_what_is_gathered_begins_its_storage(rank: Rank, raf: bool) -> None:
    """Also where every rank's piece is laid out as the plain parameter is (one dimension, uneven)."""
    found = set()

    def before(self: torch.Tensor, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        padded = self.new_zeros(-(-size[0] // mesh.size()), *size[1:])
        padded[: self.size(0)].copy_(self)
        return (padded,), None

    def after(self: torch.Tensor, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        (gathered,) = outputs
        found.add((gathered.storage_offset(), tuple(gathered.size()), gathered.untyped_storage().data_ptr()))
        # Without a copy: the parameter lives in what was gathered.
        return None if out is not None else (gathered, (gathered,))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    plain = plain_copy(model)
    fully_shard(model, mesh=rank.mesh(), reshard_after_forward=raf)
    for name, param in model.named_parameters():
        if name != "0.bias":
            local = param._local_tensor
            local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before.__get__(local), after.__get__(local)
    for step in range(2):
        inputs = batch(rank, step, (3, 5))
        model(inputs).square().sum().backward()
        plain(inputs).square().sum().backward()
    average_gradients(plain)
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(name, full(param.grad), expected.grad)
    rows = -(-5 // rank.world_size) * rank.world_size
    assert {offset for offset, _, _ in found} == {0}
    assert {size for _, size, _ in found} == {(rows, 5), (rows,)}
    assert len({pointer for _, _, pointer in found}) >= 3


@world(2)
def test_one_hook_alone_is_refused(rank: Rank) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=rank.mesh())
    local = model.weight._local_tensor
    local.fsdp_pre_all_gather = half_before.__get__(local)
    with pytest.raises(AssertionError, match="Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined"):
        model(batch(rank, 0, (3, 4)))


@world(2)
def test_inputs_without_padding_are_refused_before_a_gather(rank: Rank) -> None:
    model, _ = build(rank, "object", True, 5)
    for layer in (model[0], model[2]):
        local = layer.weight._local_tensor
        local.fsdp_pre_all_gather = (lambda own: lambda mesh, size, stride, module, policy: ((own,), None))(local)
    if rank.index == 1:
        with pytest.raises(
            AssertionError, match=r"must return all-gather inputs with the padded sharded size \(3, 5\)"
        ):
            model[0]._unit().group.shards.find_extensions()
            model[0]._unit().group.shards.gather_input(rank.device)
