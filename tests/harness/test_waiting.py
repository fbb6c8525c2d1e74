"""Waiting for what other processes have: visible after some seconds, and bounded; for the forkserver to start alone."""

import multiprocessing
import os
import signal
import threading
import time
import types

import pytest

from shardproof.harness.worlds import forkserver, lease, rank_process, waiting, world
from shardproof.harness.worlds.jobs import WorldKey
from shardproof.harness.worlds.lease import Leases
from shardproof.harness.worlds.waiting import Blockers, Wait, WaitedTooLong
from tests.errors import error_of
from tests.harness.inner import until

PROCESSES = multiprocessing.get_context("fork")


@pytest.fixture
def told(monkeypatch):
    """The lines that were shown; the first is due at once."""
    lines = []
    monkeypatch.setattr(waiting, "tell", lines.append)
    monkeypatch.setattr(waiting, "NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(waiting, "STOPPED_SECONDS", 0.6)
    return lines


@pytest.fixture
def holder(tmp_path, holding):
    """Start a process that holds all cores, or the head of the queue."""

    def lease(name):
        leases = Leases(tmp_path)
        return leases._head_of_queue("a test") if name == "queue" else leases.cores(10_000, alone=True)

    def start(name="cores"):
        process, ready, process.release = holding(lambda: lease(name))
        assert ready.wait(10)
        return process

    return start


def take(leases):
    with leases.cores(1, alone=False):
        pass


# Leases


@pytest.mark.parametrize("name", ["cores", "queue"])
def test_a_stopped_holder_is_named_and_given_up(holder, tmp_path, told, name):
    process = holder(name)
    os.kill(process.pid, signal.SIGSTOP)
    leases = Leases(tmp_path)
    text = error_of(take, leases, kind=WaitedTooLong)
    line = told[0]
    assert f"held up by pid {process.pid} (" in line and ", stopped); timeout in " in line
    assert "waiting for " in line and "a lease on 1 core (lock files in" in line
    assert "), which another run of shardproof on this machine, or another worker of this run, uses: " in line
    assert f"pid {process.pid} (" in text and text.endswith(f"continue it (kill -CONT {process.pid}) or end it")
    # The next case does not wait as long for the same process, and one that continues is no obstacle.
    started = time.monotonic()
    error_of(take, leases, kind=WaitedTooLong)
    assert time.monotonic() - started < 0.3
    assert not [again for again in told[1:] if "which another run" in again], "the reason is said once"
    os.kill(process.pid, signal.SIGCONT)
    process.release.set()
    take(leases)


@pytest.mark.parametrize("name", ["cores", "queue"])
def test_a_running_holder_has_longer_but_not_for_ever(holder, tmp_path, told, monkeypatch, name):
    monkeypatch.setattr(lease, "LEASE_SECONDS", 1.5)
    process = holder(name)
    started = time.monotonic()
    with pytest.raises(WaitedTooLong, match=f"pid {process.pid} .*, sleeping.*: if it hangs, end it"):
        take(Leases(tmp_path))
    assert 1.4 < time.monotonic() - started < 4
    assert len(told) >= 2
    # What was given up is not taken when it comes.
    process.release.set()
    process.join(10)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 10)
    take(Leases(tmp_path))


def test_a_holder_that_continues_in_time_costs_no_case(holder, tmp_path, told, monkeypatch):
    monkeypatch.setattr(waiting, "STOPPED_SECONDS", 30)
    process = holder()
    os.kill(process.pid, signal.SIGSTOP)

    def tell(line):
        told.append(line)
        os.kill(process.pid, signal.SIGCONT)
        process.release.set()

    monkeypatch.setattr(waiting, "tell", tell)
    take(Leases(tmp_path))
    assert told


def test_one_stopped_holder_of_many_slots_is_no_reason_to_give_up(tmp_path, told, monkeypatch):
    """The others will release theirs."""
    stopped = waiting.Process(1, "python", "T", "0")
    monkeypatch.setattr(Leases, "_try", lambda *_: None)
    monkeypatch.setattr(Leases, "_holder", lambda self, name: stopped if name == "slot.0" else None)
    found = [Leases(tmp_path)._holders([(["slot.0", "slot.1"], count)]).need_sigcont for count in (1, 2)]
    assert found == [False, True]


def test_an_id_in_a_lock_file_that_is_not_the_holders_is_not_believed(holder, tmp_path):
    process = holder("queue")
    leases = Leases(tmp_path)
    assert leases._holder("queue").pid == process.pid
    (tmp_path / "queue").write_text(f"{os.getpid()}\n")
    assert leases._holder("queue") is None
    assert str(leases._holders([(["queue"], 1)])) == "a process that is not visible here"


# The wait itself


@pytest.fixture
def clock(monkeypatch):
    now = types.SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now.seconds)
    return now


def test_lines_come_at_growing_intervals(clock, monkeypatch):
    lines = []
    monkeypatch.setattr(waiting, "tell", lines.append)
    wait = Wait("a thing", bound=100, blockers=Blockers)
    with pytest.raises(WaitedTooLong, match=r"^gave up after 100 s of waiting for a thing, held up by a process that"):
        while True:
            clock.seconds += 0.5
            wait.check()
    assert [line.partition("thing: ")[2].partition(" s")[0] for line in lines] == ["5", "10", "20", "40", "80"]
    assert lines[0] == (
        "shardproof: waiting for a thing: 5 s so far, held up by a process that is not visible here; timeout in 95 s"
    )


def test_while_this_process_is_stopped_it_does_not_wait(clock, monkeypatch):
    """Ctrl-Z stops a run for an hour."""
    monkeypatch.setattr(waiting, "tell", lambda line: None)
    wait = Wait("a thing", bound=100, blockers=Blockers)
    for _ in range(10):
        clock.seconds += 3600
        wait.check()


def test_the_state_and_the_name_of_a_process_are_read_from_proc():
    process = PROCESSES.Process(target=time.sleep, args=(60,))
    process.start()
    os.kill(process.pid, signal.SIGSTOP)
    assert until(10, lambda: waiting.look_at(process.pid).is_stopped)
    process.kill()
    process.join()
    assert waiting.look_at(process.pid) is None


# Worlds


class Endless:
    """The process of a rank that no signal ends."""

    pid, name = os.getpid(), "rank 0"

    def join(self, timeout=None):
        assert timeout is not None

    def is_alive(self):
        return True


def test_a_rank_that_no_signal_ends_is_named_and_left(told, monkeypatch, tmp_path):
    monkeypatch.setattr(rank_process, "END_SECONDS", 0.1)
    monkeypatch.setattr(rank_process, "_kill_tree", lambda pid: None)
    lone = object.__new__(world.World)
    lone.key, lone._directory = WorldKey(1, "cpu"), tmp_path / "world"
    lone._board = types.SimpleNamespace(close=lambda: None)
    lone.ranks = [world.RankProcess(Endless(), types.SimpleNamespace(close=lambda: None), tmp_path / "output")]
    lone.kill()
    (line,) = told
    assert line.startswith(f"shardproof: rank 0, pid {os.getpid()} (")
    assert "did not end within 0.1 s of SIGKILL; it may keep its device and its memory" in line


def test_a_rank_that_is_stopped_while_it_starts_is_named(told, monkeypatch):
    monkeypatch.setattr(world, "START_SECONDS", 2.0)
    spawn, pids = forkserver.spawn, []

    def spawn_and_stop(process, what):
        spawn(process, what)
        pids.append(process.pid)
        os.kill(process.pid, signal.SIGSTOP)

    monkeypatch.setattr(forkserver, "spawn", spawn_and_stop)
    with pytest.raises(world.WorldDied) as caught:
        world.World(WorldKey(1, "cpu"), [0])
    (pid,) = pids
    assert f"rank 0: no answer within 2 s; it is pid {pid} (" in str(caught.value)
    assert ", stopped)" in str(caught.value)
    waits = f"waiting for the ranks of a world of 1 rank on cpu to start: 0 s so far, held up by pid {pid}"
    assert any(waits in line for line in told)
    assert waiting.look_at(pid) is None or waiting.look_at(pid).has_ended


# The forkserver


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def test_threads_that_start_it_together_restore_the_environment(monkeypatch):
    """Before, the second saw the variables of the first, which the first had removed when the second did."""
    monkeypatch.delenv(WORKSPACE, raising=False)
    inside, most, errors = [], [], []
    entered = threading.Event()

    def running():
        inside.append(os.environ[WORKSPACE])
        most.append(len(inside))
        # Time for the other thread, which is inside too unless it waits.
        entered.wait(0.3)
        inside.pop()

    def start():
        try:
            forkserver.start()
        except KeyError as error:
            errors.append(error)

    monkeypatch.setattr(forkserver.forkserver, "ensure_running", running)
    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, errors, WORKSPACE in os.environ) == ([1, 1], [], False)
