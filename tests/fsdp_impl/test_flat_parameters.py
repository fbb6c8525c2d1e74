"""What modules hold: one memory of original parameters, their hooks, and the devices that must agree."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_impl import CPUOffload, FullyShardedDataParallel
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.flat_replicas import FULL, NONE, ZERO2, wrap, wrap_children
from tests.fsdp_impl.replicas import batch, tower


@world(2)
@pytest.mark.parametrize("strategy", [FULL, ZERO2, NONE])
def test_original_parameters_and_gradients_live_in_one_memory(rank: Rank, strategy: Any) -> None:
    model = tower(5, 1)
    before = dict(model.named_parameters())
    sharded = wrap_children(model, sharding_strategy=strategy, use_orig_params=True, device_id=rank.device)

    def check() -> None:
        for name, param in sharded.named_parameters():
            assert param is before[name.replace("_fsdp_wrapped_module.", "")]
        for group in sharded._unit.iteration.groups if sharded._unit.is_root else ():
            pointer = group.shards.flat.untyped_storage().data_ptr()
            for param in group.shards.originals:
                assert param.numel() == 0 or param.untyped_storage().data_ptr() == pointer

    check()
    output = sharded(batch(rank, 0, (2, 5)))
    check()
    output.sum().backward()
    check()
    for group in sharded._unit.iteration.groups:
        grads = [p.grad for p in group.shards.originals if p.numel() and p.grad is not None]
        assert len({grad.untyped_storage().data_ptr() for grad in grads}) <= 1


@world(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_within_forward_modules_hold_plain_views(rank: Rank, use_orig_params: bool) -> None:
    seen: list[torch.Tensor] = []
    sharded = wrap(tower(5, 1), use_orig_params=use_orig_params, device_id=rank.device)
    for layer in (sharded[1].in_proj, sharded[1].out_proj):
        layer.register_forward_hook(lambda module, args, output: seen.append(module.weight))
    sharded(batch(rank, 0, (2, 5)))
    assert [weight.shape for weight in seen] == [(10, 5), (5, 10)]
    leaf = sharded._unit.group.leaf
    for weight in seen:
        assert type(weight) is torch.Tensor and weight.requires_grad and not weight.is_leaf
        assert weight.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr() != 0


@world(2)
@pytest.mark.parametrize("strategy", [FULL, NONE])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_hooks_see_the_reduced_gradient(rank: Rank, strategy: Any, use_orig_params: bool) -> None:
    """Those of torch's do not run on original parameters, and see the rank's own gradient on flat ones."""
    sharded = wrap(tower(5, 1), sharding_strategy=strategy, use_orig_params=use_orig_params, device_id=rank.device)
    calls: list[tuple[str, torch.Tensor]] = []
    for name, param in sharded.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: calls.append((name, p.grad.clone())))
    with sharded.no_sync():
        sharded(batch(rank, 0, (2, 5))).sum().backward()
    assert calls == []
    sharded(batch(rank, 0, (2, 5))).sum().backward()
    found = {name: param.grad for name, param in sharded.named_parameters() if param.grad is not None}
    assert sorted(name for name, _ in calls) == sorted(found)
    assert all(torch.equal(grad, found[name]) for name, grad in calls)


@world(2)
@pytest.mark.parametrize("strategy", [FULL, NONE])
def test_units_are_reduced_as_soon_as_they_have_their_gradients(rank: Rank, strategy: Any) -> None:
    """So the last unit is the first. At the end of backward, what is left is reduced in the order of the units."""
    model = wrap_children(tower(5, 1), sharding_strategy=strategy, device_id=rank.device)
    sizes: list[int] = []
    model.register_comm_hook(None, lambda _, grad, *shard: sizes.append(grad.numel()))
    model(batch(rank, 0, (3, 5))).sum().backward()
    assert sizes == [group.shards.layout.padded_numel for group in reversed(model._unit.iteration.groups)]


@world(2)
def test_a_wrapper_without_parameters_has_no_flat_one(rank: Rank) -> None:
    model = wrap(nn.Sequential(wrap(nn.Tanh(), device_id=rank.device), nn.Linear(4, 4)), device_id=rank.device)
    model(batch(rank, 0, (2, 4)).requires_grad_()).sum().backward()
    assert model[0]._flat_param is None and model[0].params == [] and model.params == [model._flat_param]


@world(2)
def test_on_accelerators_devices_must_agree(rank: Rank) -> None:
    if rank.device.type == "cpu":
        return
    with pytest.warns(UserWarning, match="passed-in `module` is on CPU"):
        FullyShardedDataParallel(nn.Linear(2, 2))
    cpu = wrap(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"unexpectedly has parameters on cpu. Make sure to move the module to"):
        cpu(torch.ones(1, 2))
    with pytest.warns(UserWarning, match="does not have an explicit index"):
        wrap(nn.Linear(2, 2), device_id=rank.device.type)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(rank.device))
    with pytest.raises(RuntimeError, match="please pass in device_id argument"):
        wrap(mixed)
    with pytest.raises(ValueError, match="Inconsistent compute device and `device_id`"):
        wrap(nn.Linear(2, 2).to(rank.device), device_id=torch.device(rank.device.type, rank.device.index + 1))
    with pytest.raises(ValueError, match="has CPU parameters or buffers when `sync_module_states=True`"):
        wrap(nn.Linear(2, 2), sync_module_states=True)
    offloaded = wrap(nn.Linear(2, 2), cpu_offload=CPUOffload(True), device_id=rank.device).to(rank.device)
    with pytest.raises(RuntimeError, match="with parameter CPU offloading enabled has parameters on"):
        offloaded(torch.ones(1, 2))
