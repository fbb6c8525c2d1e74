"""What the controller of a torchrun job does with its processes: where worlds live, whom it trusts, what it reads."""

import contextlib
import dataclasses
import errno
import json
import multiprocessing.connection
import os
import pathlib
import pickle
import socket
import stat
import struct
import tempfile
import threading
import time
from types import SimpleNamespace

import pytest

from shardproof.harness.parity.exchange import Exchange
from shardproof.harness.parity.rank import Rank
from shardproof.harness.plugin import ahead, resuming
from shardproof.harness.worlds import loop
from shardproof.harness.worlds.forkserver import ForkserverEnded
from shardproof.harness.worlds.jobs import Meeting, RankSpec, Result, WorldKey
from shardproof.harness.worlds.torchrun import meeting
from shardproof.harness.worlds.torchrun.fleet import Fleet, Link, Lost, Seat, TooFewRanks, gathered, nodes_of
from shardproof.runfile import Verdict
from tests.errors import error_of

VARIABLES = {
    "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3", "RANK": "5",
    "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "first", "MASTER_PORT": "29400",
}  # fmt: skip


def process(**changes):
    return dataclasses.replace(meeting.this_process(VARIABLES), **changes)


def test_the_place_of_a_process_is_that_of_torchrun():
    here = process()
    assert (here.rank, here.size, here.local_rank, here.local_size, here.node, here.nodes) == (5, 8, 1, 4, 1, 2)
    assert (here.run_id, here.attempt, here.may_restart, here.is_controller) == ("job", 1, True, False)
    assert not process(attempt=3).may_restart and process(rank=0).is_controller


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "RANK"])
def test_without_the_marks_of_torch_elastic_there_is_no_job(name):
    assert meeting.this_process({key: value for key, value in VARIABLES.items() if key != name}) is None


def fleet(nodes, lost=()):
    """The controller's view of a job with a rank on each of these hosts."""
    made = object.__new__(Fleet)
    made.process = process(rank=0, size=len(nodes), node=nodes[0])
    made._links, made._busy, made._is_alone, made._changed = {}, set(), False, threading.Condition()
    for rank, node in list(enumerate(nodes))[1:]:
        ours, _ = multiprocessing.connection.Pipe()
        made._links[rank] = Link(ours, process(rank=rank, node=node, host=f"host{node}"))
        if rank in lost:
            made._links[rank]._lose(None)
    return made


ROOM = [
    ((0, 0, 1, 1), (), 2, (0, 1)), ((0, 0, 1, 1), (), 4, (0, 1, 2, 3)), ((0, 1, 1), (), 2, (1, 2)),
    ((0, 1, 2), (), 2, (0, 1)), ((0, 0, 1, 1), (1,), 2, (2, 3)), ((0, 0, 1, 1), (2,), 3, (0, 1, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "lost", "size", "expected"), ROOM, ids=str)
def test_a_world_lives_on_one_host_if_it_fits(nodes, lost, size, expected):
    assert fleet(nodes, lost).reserve(size) == expected


def test_too_few_ranks_name_the_host_that_is_lost():
    job = fleet((0, 0, 1, 1), lost=(2, 3))
    why = "host host1 does not answer: it is cut off, or its processes are stopped"
    assert error_of(job.reserve, 3, kind=TooFewRanks) == f"3 ranks are needed, and 2 of 4 are left: {why}"


def test_hosts_of_a_world_are_numbered_from_0():
    seats = [Seat(process(rank=rank, node=node)) for rank, node in enumerate((3, 1, 3))]
    assert nodes_of(seats) == (0, 1, 0)


def test_the_variables_of_a_rank_are_those_of_its_place_in_the_world():
    job = fleet((0, 0, 1, 1))
    seats = [Seat(process(rank=rank, node=1, local_rank=rank - 2)) for rank in (2, 3)]
    assert job.environment(1, seats) == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }  # fmt: skip


def test_worlds_share_no_rank_and_what_is_alone_waits():
    job = fleet((0, 0, 1, 1))
    assert job.reserve(2) == (0, 1) and job.reserve(2) == (2, 3)
    job.release((0, 1))
    assert job._free(3, (), alone=False) is None and job._free(2, (), alone=True) is None
    job.release((2, 3))
    assert job.reserve(2, known=[(1, 3)], alone=True) == (1, 3)
    assert job._free(1, (), alone=False) is None
    job.release((1, 3))
    assert [job.reserve(1) for _ in range(3)] == [(0,), (1,), (2,)]
    job.release((0,))
    assert job._free(2, (), alone=False) is None, "a world that fits on one host waits until one has room"


# Links


def test_answers_come_to_those_who_asked():
    ours, theirs = multiprocessing.connection.Pipe()
    link = Link(ours, process())
    first, second = link.ask("one"), link.ask("two", 2)
    assert theirs.recv() == (1, "one", ()) and theirs.recv() == (2, "two", (2,))
    theirs.send((1, "first"))
    theirs.send((2, "second"))
    assert second(time.monotonic() + 60) == "second" and first(time.monotonic() + 60) == "first"


def test_a_closed_connection_and_a_silent_one_are_told_apart():
    (one, other), (two, _kept) = multiprocessing.connection.Pipe(), multiprocessing.connection.Pipe()
    closed, silent = Link(one, process(host="one")), Link(two, process(host="two"))
    other.close()
    for link, is_silent in ((closed, False), (silent, True)):
        with pytest.raises(Lost) as caught:
            link.call("one", within=0.01)
        assert caught.value.is_silent is is_silent and f"host {link.process.host} " in str(caught.value)
        with pytest.raises(Lost):
            link.call("two")


def test_the_answers_of_those_that_are_there_are_gathered():
    (ours, theirs), (others, _kept) = multiprocessing.connection.Pipe(), multiprocessing.connection.Pipe()
    here, gone = Link(ours, process()), Link(others, process())
    theirs.send((1, "answer"))
    assert gathered({0: gone.ask("one"), 1: here.ask("one")}, within=0.1) == {1: "answer"}


def test_a_directory_that_this_host_does_not_see_is_no_fault_of_the_implementation(tmp_path):
    rank = object.__new__(Rank)
    rank._tmp_path = tmp_path
    assert rank.tmp_path == tmp_path
    rank._tmp_path = tmp_path / "elsewhere"
    result = Result(1, 0, Verdict.PASS)
    with loop._outcome(result):
        rank.tmp_path  # noqa: B018
    assert result.verdict == Verdict.HARNESS_ERROR and "set TMPDIR to one" in result.text
    assert result.text.startswith(f"{tmp_path}/elsewhere is not on host {socket.gethostname()}")


# Connections


@pytest.fixture
def listening():
    with meeting.listener(everywhere=False) as one:
        yield one


def accepting(listening, key):
    found = []

    def accept():
        with contextlib.suppress(OSError):  # at the end of a test in which nobody comes
            found.append(listening.accept(key))

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    return thread, found


@pytest.mark.parametrize("everywhere", [False, True])
def test_who_knows_the_key_is_connected(everywhere):
    with meeting.listener(everywhere=everywhere) as one:
        thread, found = accepting(one, b"key")
        connection = meeting.connect(("127.0.0.1", one.getsockname()[1]), b"key")
        thread.join()
        for sender, receiver in ((connection, found[0]), (found[0], connection)):
            sender.send("hello")
            sender.send("again")
            assert (receiver.recv(), receiver.recv()) == ("hello", "again")
        found[0].close()
        with pytest.raises(EOFError):
            connection.recv()


class Touches:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


RUBBISH = b"GET / HTTP/1.0\r\n\r\n" * 20


@pytest.mark.parametrize("count", [1, meeting._MOST_STRANGERS + 5])
@pytest.mark.parametrize("says", ["nothing", "a part", "rubbish", "a pickle", "a pickle with its length", "goodbye"])
def test_strangers_keep_nobody_waiting_and_are_not_believed(listening, tmp_path, says, count):
    pickled = pickle.dumps(Touches(tmp_path / "touched"))
    framed = struct.pack("!i", len(pickled)) + pickled
    said = {"a part": b"x" * 63, "rubbish": RUBBISH, "a pickle": pickled, "a pickle with its length": framed}
    thread, found = accepting(listening, b"key")
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stranger = stack.enter_context(socket.create_connection(listening.getsockname()))
            with contextlib.suppress(OSError):  # it has been dismissed
                stranger.sendall(said.get(says, b""))
            if says == "goodbye":
                stranger.close()
        connection = meeting.connect(listening.getsockname(), b"key")
        thread.join(meeting._PROOF_SECONDS / 2)
        assert not thread.is_alive(), "strangers have kept a process of the job waiting"
        connection.send("hello")
        assert found[0].recv() == "hello"
        assert len(listening._strangers) <= meeting._MOST_STRANGERS
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", ["ECONNABORTED", "EHOSTUNREACH", "EPROTO", "EPERM"])
def test_an_error_of_a_strangers_connection_ends_no_listener(listening, monkeypatch, name):
    """`accept` passes on what the network says of the connection that it would return."""
    number, errors = getattr(errno, name), iter([True, True, False])
    own = socket.socket.accept

    def accept(self):
        found = own(self)
        if next(errors, False):
            found[0].close()
            raise OSError(number, os.strerror(number))
        return found

    monkeypatch.setattr(socket.socket, "accept", accept)
    thread, found = accepting(listening, b"key")
    for _ in range(2):
        with socket.create_connection(listening.getsockname(), timeout=5) as stranger:
            assert stranger.recv(1) == b""
    meeting.connect(listening.getsockname(), b"key").close()
    thread.join(5)
    assert found, "an error of a stranger's connection has ended who accepts"


def test_who_passes_on_a_proof_and_keeps_back_the_rest_keeps_nobody_else_waiting(monkeypatch):
    """As who can write into the job's store, and announces a port of his own there, may do."""
    monkeypatch.setenv("SHARDPROOF_SECRET", "a secret of the job")
    monkeypatch.setattr(meeting, "announce", lambda *_: None)
    job = Fleet(process(rank=0, size=3, node=0, nodes=1))
    with contextlib.closing(job._listening):
        silent = meeting.connect(job._listening.getsockname(), job._key)
        other = meeting.connect(job._listening.getsockname(), job._key)
        other.send(process(rank=2, size=3))
        until = time.monotonic() + 20
        while 2 not in job._links and time.monotonic() < until:
            time.sleep(0.01)
        assert job._missing() == [1], "the silent one has kept the other waiting"
        silent.send(process(rank=1, size=3))
        job.await_all()
        job._links[2].close(), job._links[1].close(), silent.close(), other.close()


def test_a_rank_that_does_not_connect_is_one_that_did_not_start(monkeypatch):
    monkeypatch.setattr("shardproof.harness.worlds.torchrun.fleet.FORK_SECONDS", 0.1)
    job, link = fleet((0, 0)), SimpleNamespace(call=lambda *_, **__: "")
    job._connections = {}
    spec = RankSpec(WorldKey(1, "cpu"), 0, "", device_index=0)
    told = error_of(job.spawn, Seat(process(host="one"), link), 7, spec, kind=ForkserverEnded)
    assert told == "host one: rank 0 did not connect within 0 s"


def test_a_stranger_who_answers_slowly_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(meeting, "_PROOF_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip():
            raw, _ = server.accept()
            with raw, contextlib.suppress(OSError):
                while True:
                    raw.sendall(b"x")
                    time.sleep(0.1)

        threading.Thread(target=drip, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            meeting.connect(server.getsockname(), b"key")
        assert time.monotonic() - began < 3, "32 bytes that come one by one take 3.2 s"


def test_a_length_that_nobody_has_proved_takes_no_memory(listening):
    thread, found = accepting(listening, b"key")
    connection = meeting.connect(listening.getsockname(), b"key")
    thread.join()
    raw = socket.socket(fileno=os.dup(connection.fileno()))
    raw.sendall(struct.pack("!iQ", -1, 1 << 60))
    with pytest.raises(OSError, match="bad message length"):
        found[0].recv()
    raw.close()
    connection.close()


def test_the_key_is_in_no_text_of_a_world():
    assert "secret" not in f"{Meeting('first', 1, 'p', b'secret')!r}"


def test_who_does_not_know_the_key_is_refused(listening):
    thread, found = accepting(listening, b"key")
    with pytest.raises(ConnectionError, match="is no process of this job"):
        meeting.connect(listening.getsockname(), b"other")
    assert not found
    listening.close()
    thread.join(5)
    assert not thread.is_alive(), "who accepts has to end with the listener"


def test_a_stranger_who_says_nothing_is_dismissed(listening, monkeypatch):
    monkeypatch.setattr(meeting, "_PROOF_SECONDS", 0.1)
    accepting(listening, b"key")
    with socket.create_connection(listening.getsockname()) as stranger:
        stranger.settimeout(20)
        assert len(stranger.recv(100)) == 32
        assert stranger.recv(100) == b""


def test_a_process_that_connects_to_a_stranger_unpickles_nothing(tmp_path):
    """Who can write into the job's store can announce a port of his own."""
    said = pickle.dumps(Touches(tmp_path / "touched"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(said + b"x" * 64), daemon=True).start()
        with pytest.raises(ConnectionError, match="is no process of this job"):
            meeting.connect(server.getsockname(), b"key")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("what", ["added", "changed", "repeated", "returned"])
def test_who_stands_between_two_processes_can_add_nothing(listening, tmp_path, what):
    """He passes on their proofs, which he could not make."""
    thread, found = accepting(listening, b"key")
    with socket.create_server(("127.0.0.1", 0)) as between:
        connecting = []
        caller = threading.Thread(target=lambda: connecting.append(meeting.connect(between.getsockname(), b"key")))
        caller.start()
        inner, _ = between.accept()
        outer = socket.create_connection(listening.getsockname())
        inner.sendall(outer.recv(32))
        outer.sendall(inner.recv(64, socket.MSG_WAITALL))
        inner.sendall(outer.recv(32, socket.MSG_WAITALL))
        caller.join()
        thread.join()
        connecting[0].send("hello")
        message = inner.recv(1000)
        outer.sendall(message)
        assert found[0].recv() == "hello"
        connecting[0].send("again")
        again = bytearray(inner.recv(1000))
        pickled = pickle.dumps(Touches(tmp_path / "touched"))
        again[-3] ^= 1
        sent = {"added": struct.pack("!i", 32 + len(pickled)) + bytes(32) + pickled, "changed": again,
                "repeated": message, "returned": message}[what]  # fmt: skip
        target, reader = (inner, connecting[0]) if what == "returned" else (outer, found[0])
        target.sendall(sent)
        with pytest.raises(ConnectionError, match="a message is not of a process of this job"):
            reader.recv()
        inner.close()
        outer.close()
    assert not (tmp_path / "touched").exists()


class Store(dict):
    """The job's store: a value is waited for."""

    set = dict.__setitem__

    def get(self, name):
        while name not in self:
            time.sleep(0.001)
        return self[name].encode()


def test_ranks_of_two_hosts_meet_and_exchange_values(tmp_path):
    """Of several ranks on each; a stranger is among those who connect."""
    nodes, store, found = (0, 1, 0, 1), Store(), {}
    with socket.create_server(("127.0.0.1", 0)) as master:
        where = Meeting("127.0.0.1", master.getsockname()[1], "", b"key")

        def meet(index):
            here = [rank for rank, node in enumerate(nodes) if node == nodes[index]]
            within = Exchange(tmp_path / f"host{nodes[index]}", index=here.index(index), size=len(here))
            made.wait()
            within.connect()
            key = WorldKey(len(nodes), "cpu")
            spec = RankSpec(key, index, str(tmp_path), device_index=0, nodes=nodes, meeting=where)
            exchange = meeting.across(spec, within, store)
            found[index] = [exchange.gather(bytes([index, turn]) * 1000) for turn in range(3)]

        for node in {*nodes}:
            (tmp_path / f"host{node}").mkdir()
        made = threading.Barrier(len(nodes))
        ranks = [threading.Thread(target=meet, args=(index,), daemon=True) for index in range(len(nodes))]
        for rank in ranks:
            rank.start()
        port = store.get("exchange1").decode().split()[1]
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port))) as stranger:
            stranger.sendall(RUBBISH)
        for rank in ranks:
            rank.join(30)
    expected = [[bytes([index, turn]) * 1000 for index in range(len(nodes))] for turn in range(3)]
    assert found == dict.fromkeys(range(len(nodes)), expected)


# The key of a job


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_key_is_in_a_file_of_the_user_and_not_in_the_store(tmp_path, monkeypatch, nodes):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    environment = {"XDG_CACHE_HOME": str(tmp_path / "home")}
    stored = {}
    store = SimpleNamespace(set=stored.__setitem__)
    monkeypatch.setattr(meeting, "_job", lambda process: store)
    made = meeting.Keys(process(nodes=nodes), environment)
    name, key = made.make()
    meeting.announce(process(nodes=nodes), 29500, name)
    assert key.hex() not in str(stored) and key not in str(stored).encode()
    folder = tmp_path / ("tmp" if nodes == 1 else "home") / f"shardproof-keys-{os.getuid()}"
    assert [stat.S_IMODE(one.stat().st_mode) for one in (folder, folder / name)] == [0o700, 0o600]
    assert meeting.Keys(process(nodes=nodes, rank=1), environment).find(name) == key
    made.remove(name, os.getpid())
    assert not folder.exists(), "nothing stays behind"
    assert meeting.Keys(process(nodes=nodes), environment).find(name) is None


def test_a_job_that_ends_takes_no_folder_from_one_that_begins(tmp_path, monkeypatch):
    """The folder is removed with the last key in it, perhaps between its making and the next key."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    keys, check, removed = meeting.Keys(process(nodes=1), {}), meeting.Keys._check, []

    def checked(path, is_kind):
        check(path, is_kind)
        if not removed:
            removed.append(path.rmdir())

    monkeypatch.setattr(meeting.Keys, "_check", staticmethod(checked))
    name, key = keys.make()
    assert removed and keys.find(name) == key


def test_the_secret_of_the_environment_needs_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    environment = {"SHARDPROOF_SECRET": "a secret of the job", "XDG_CACHE_HOME": str(tmp_path)}
    name, key = meeting.Keys(process(), environment).make()
    assert meeting.Keys(process(), environment).find(name) == key and not [*tmp_path.iterdir()]
    assert meeting.Keys(process(), environment | {"SHARDPROOF_SECRET": "another secret of it"}).find(name) != key
    short = error_of(meeting.Keys, process(), {"SHARDPROOF_SECRET": "short"}, kind=meeting.NoKey)
    assert short == "SHARDPROOF_SECRET has 5 characters; it needs 16 or more"


@pytest.mark.parametrize(
    "change",
    [
        lambda folder, name: folder.chmod(0o755),
        lambda folder, name: (folder / name).chmod(0o644),
        lambda folder, name: (folder / name).rename(folder / "it") and (folder / name).symlink_to("it"),
    ],
    ids=["folder", "file", "link"],
)
def test_a_key_that_others_could_have_is_refused(tmp_path, monkeypatch, change):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    keys = meeting.Keys(process(nodes=1), {})
    name, _ = keys.make()
    change(tmp_path / f"shardproof-keys-{os.getuid()}", name)
    assert "must be yours, and nobody else may read it" in error_of(keys.find, name, kind=meeting.NoKey)
    assert "names no key of shardproof" in error_of(keys.find, f"../{name}", kind=meeting.NoKey)


def test_a_host_without_the_file_says_how_it_gets_the_key(tmp_path, monkeypatch):
    monkeypatch.setattr(meeting, "_SEEN_SECONDS", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = SimpleNamespace(wait=lambda *_: None, get=lambda _: b"29500 " + b"0" * 32)
    monkeypatch.setattr(meeting, "_job", lambda process: store)
    told = error_of(meeting.join, process(nodes=2), kind=meeting.NoKey)
    assert "set SHARDPROOF_SECRET to the same secret on each of them" in told


def test_the_kernel_watches_connections(listening):
    thread, found = accepting(listening, b"key")
    connection = meeting.connect(listening.getsockname(), b"key")
    thread.join()
    for one in (connection, found[0]):
        raw = socket.socket(fileno=os.dup(one.fileno()))
        probes = [raw.getsockopt(socket.IPPROTO_TCP, name) for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPCNT)]
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1 and probes == [3, 5]
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == meeting.SILENT_SECONDS * 1000
        raw.close()
        one.close()


# The journal of an earlier attempt


RECORD = {"id": "test_a.py::test_one[w2]", "implementation": "reference", "verdict": "pass"}


@pytest.mark.parametrize(
    ("changes", "is_ours"),
    [
        ({}, True),
        ({"agent": "another"}, True),  # a later attempt, perhaps on another host
        ({"agent": "another", "attempt": 0}, False),  # an earlier job of the same id
        ({"attempt": 0}, True),  # a restart that torch elastic does not count
        ({"run_id": "another"}, False),
    ],
    ids=str,
)
def test_only_the_journal_of_this_job_is_taken(tmp_path, changes, is_ours):
    here = process()
    job = {"run_id": "job", "attempt": 0, "agent": here.agent}
    content = {"environment": {"torchrun": job}, "cases": [RECORD]}
    (tmp_path / "run.json.partial").write_text(json.dumps(content) + "\n")
    (tmp_path / "run.json.running").write_text(json.dumps([["reference", "test_a.py::test_two[w2]"]]))
    found = resuming.Resuming(tmp_path / "run.json", dataclasses.replace(here, **changes))
    assert found.records == ({("reference", RECORD["id"]): RECORD} if is_ours else {})
    assert found.interrupted == ({("reference", "test_a.py::test_two[w2]")} if is_ours else set())
    assert (tmp_path / "run.json.earlier").exists() is is_ours, "kept until the new journal has the records"


def test_a_run_that_an_earlier_attempt_completed_is_not_repeated(tmp_path):
    job = {"run_id": "job", "attempt": 0, "agent": "another"}
    run = {"environment": {"torchrun": job}, "cases": [RECORD], "end": {"complete": True, "exit_code": 1}}
    (tmp_path / "run.json").write_text(json.dumps(run) + "\n")
    assert resuming.Resuming(tmp_path / "run.json", process()).exit_code == 1
    assert resuming.Resuming(tmp_path / "run.json", process(attempt=0)).exit_code is None


def test_a_case_that_was_about_to_start_its_ranks_is_ended_too(monkeypatch):
    ended, aborted = threading.Event(), []

    class Pool:
        def abort(self):
            aborted.append(None)
            if len(aborted) == 2:  # the ranks have started since the first time
                ended.set()

    monkeypatch.setattr(ahead.cases, "launch_of", lambda item: SimpleNamespace(size=1))
    item = SimpleNamespace(nodeid="one")
    calls = {"run": lambda _: ended.wait(), "may_run": lambda _: True}
    running = ahead.Ahead([item], SimpleNamespace(size=2), Pool(), **calls)
    running._start(item)
    closing = threading.Thread(target=running.close, daemon=True)
    closing.start()
    closing.join(timeout=20)
    is_stuck = closing.is_alive()
    ended.set()
    closing.join()
    assert not is_stuck and len(aborted) == 2
