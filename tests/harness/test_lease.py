"""Leases: whole sets or nothing, shared or alone, and gone with the process that held them."""

import os
import signal
import time

import pytest

from shardproof.harness.worlds.lease import DEVICE_SLOTS, Leases, device_of


@pytest.fixture
def holder(tmp_path, holding):
    """Start a process that asks for devices; (process, it has them, let it go)."""
    return lambda devices, *, alone=False: holding(lambda: Leases(tmp_path).devices(devices, alone=alone))


def test_correctness_cases_share_up_to_the_slots(holder):
    holders = [holder([0, 1]) for _ in range(DEVICE_SLOTS)]
    assert all(ready.wait(10) for _, ready, _ in holders)
    _, waits, _ = holder([1])
    assert not waits.wait(0.3)
    holders[0][2].set()
    assert waits.wait(10)


def test_alone_waits_for_all_and_keeps_all_out(holder):
    _, first, let_go = holder([0])
    assert first.wait(10)
    _, alone, let_alone_go = holder([0, 1], alone=True)
    assert not alone.wait(0.3)
    let_go.set()
    assert alone.wait(10)
    _, after, _ = holder([1])
    assert not after.wait(0.3)
    let_alone_go.set()
    assert after.wait(10)


def test_opposite_orders_do_not_deadlock(holder):
    for _ in range(5):
        pairs = [holder([0, 1], alone=True), holder([1, 0], alone=True)]
        for _, _, release in pairs:
            release.set()
        assert all(ready.wait(10) for _, ready, _ in pairs)


def test_dead_holder_loses_its_lease(holder):
    process, ready, _ = holder([0], alone=True)
    assert ready.wait(10)
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    _, after, _ = holder([0], alone=True)
    assert after.wait(10)


def test_world_larger_than_the_cores_takes_them_all(tmp_path):
    started = time.monotonic()
    with Leases(tmp_path).cores(10_000, alone=False):
        names = {path.name for path in tmp_path.glob("core-*")}
    assert len(names) == len(os.sched_getaffinity(0))
    assert time.monotonic() - started < 5


def test_directory_that_others_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="nobody else may write to"):
        Leases(tmp_path)


@pytest.mark.parametrize(
    ("worker", "size", "devices"),
    [(0, 2, [0, 1]), (1, 2, [2, 3]), (2, 2, [0, 1]), (1, 4, [0, 1, 2, 3]), (1, 3, [3, 0, 1])],
)
def test_workers_start_on_different_devices(worker, size, devices):
    assert device_of(worker, size=size, count=4) == devices
