"""A backend whose collectives move no data is refused before any case runs."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardproof.harness.parity.rank import Rank
from shardproof.harness.tensors import devices
from shardproof.harness.worlds import probe
from shardproof.harness.worlds.jobs import WorldKey
from shardproof.harness.worlds.world import World, WorldDied
from shardproof.testing import world


def test_a_world_over_groups_that_move_nothing_does_not_start():
    """torch's own backend ``fake`` returns at once and writes nothing."""
    with pytest.raises(WorldDied) as refused:
        World(WorldKey(2, "cpu", backend="fake"), [0, 0])
    why = "process groups of the backend fake move no data on cpu: all_reduce of [1.0, 2.0] gave [1.0] on rank 0"
    assert str(refused.value).splitlines()[0].endswith(f"rank 0: {why}, not [3.0]")
    assert "Traceback" not in str(refused.value)


@world(2)
def test_a_gather_that_writes_nothing_is_noticed(rank: Rank):
    probe.check(rank.device)
    rank.monkeypatch.setattr(dist, "all_gather", lambda parts, mine: None)
    with pytest.raises(probe.MovesNoData, match=r"all_gather of \[1.0, 2.0\] gave \[0.0, 0.0\]"):
        probe.check(rank.device)


def test_a_device_without_properties_has_its_type_as_a_name(monkeypatch):
    module = type("Module", (), {})
    monkeypatch.setattr(devices, "accelerator", lambda: "openreg")
    monkeypatch.setattr(devices, "count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert devices.properties() == [("openreg", 0), ("openreg", 0)]
    found = [SimpleNamespace(name="n0", total_memory=8), SimpleNamespace(name="n1")]
    module.get_device_properties = staticmethod(found.__getitem__)
    assert devices.properties() == [("n0", 8), ("n1", 0)]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "Could not run 'aten::_thnn_fused_gru_cell' with arguments from the 'CPU' backend.",
            "aten::_thnn_fused_gru_cell",
        ),
        ("convolution_overrideable not implemented. You are likely", "convolution_overrideable"),
        ("the second order is not implemented", ""),
    ],
)
def test_a_kernel_that_a_device_of_the_open_key_lacks(monkeypatch, text, name):
    """It is no fault of an implementation there; on the CPU it is one."""
    error, device = NotImplementedError(text), torch.device("privateuseone", 0)
    expected = f"the device privateuseone has no kernel of {name}" if name else ""
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "privateuseone")
    assert devices.missing_kernel(error, device) == expected
    assert devices.missing_kernel(RuntimeError(text), device) == ""
    assert devices.missing_kernel(error, torch.device("cpu")) == ""
