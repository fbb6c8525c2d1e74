"""The processes of a torchrun job: the ranks of each, how they find each other, and their authenticated messages.

Imports no torch at module level.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import errno
import hmac
import os
import pathlib
import pickle
import re
import secrets
import selectors
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from shardproof.harness.parity.exchange import Exchange, HostExchange, Seal
from shardproof.harness.worlds import waiting
from shardproof.harness.worlds.jobs import Meeting, RankSpec

if TYPE_CHECKING:
    from torch.distributed import Store

# A process of a job, from the variables that torch elastic sets.

#: Set by torch elastic in the processes that it starts, and by nothing else.
_MARKS = ("TORCHELASTIC_RUN_ID", "RANK")

#: Variables of the job that would make libraries in a rank process believe that torchrun started it: its place in the
#: world of its case is another one.
_FOREIGN = "TORCHELASTIC_"


@dataclasses.dataclass(frozen=True)
class JobProcess:
    """One process of a job."""

    rank: int  # the number of the process in the job; 0 is the controller
    size: int
    local_rank: int  # the number of the process on its host, and of its device
    node: int  # the number of the process's host, from 0: of its torchrun
    nodes: int
    master: str  # the address of the host of rank 0
    port: int  # the port of the job's store there
    run_id: str  # the id of the job, as ``--rdzv-id``
    attempt: int  # how often torchrun has restarted the processes
    most_attempts: int  # how often it may, as ``--max-restarts``
    host: str
    local_size: int  # the number of processes of the job on this host
    agent: str  # identifies the process of torchrun on this host, which outlives those that it restarts

    @property
    def is_controller(self) -> bool:
        """Whether this process collects, decides and reports."""
        return self.rank == 0

    @property
    def may_restart(self) -> bool:
        """Whether torchrun starts the processes again if one of them fails."""
        return self.attempt < self.most_attempts


def this_process(environment: Mapping[str, str] = os.environ) -> JobProcess | None:
    """Return this process, or None if torchrun did not start it."""
    if not all(name in environment for name in _MARKS):
        return None
    return JobProcess(
        rank=int(environment["RANK"]), size=int(environment["WORLD_SIZE"]), local_rank=int(environment["LOCAL_RANK"]),
        node=int(environment["GROUP_RANK"]), nodes=int(environment["GROUP_WORLD_SIZE"]),
        master=environment["MASTER_ADDR"], port=int(environment["MASTER_PORT"]),
        run_id=environment["TORCHELASTIC_RUN_ID"], attempt=int(environment["TORCHELASTIC_RESTART_COUNT"]),
        most_attempts=int(environment["TORCHELASTIC_MAX_RESTARTS"]), host=socket.gethostname(),
        local_size=int(environment["LOCAL_WORLD_SIZE"]), agent=_identity(os.getppid()),
    )  # fmt: skip


def _identity(pid: int) -> str:
    process = waiting.look_at(pid)
    return "" if process is None else f"{pid} {process.started}"


def foreign(environment: Mapping[str, str]) -> list[str]:
    """Return the variables of a job that a rank process must not have."""
    return [name for name in environment if name.startswith(_FOREIGN)]


# Connections between the processes of a job of torchrun: messages over TCP, from who knows the job's key alone.
#
# Messages are pickles, so none is read of anybody else: both sides prove their key before the first one, in frames of
# fixed lengths, and each message has a code of its own, so that one who stands between them can add none.
#
# The kernel looks after each connection: it ends one whose other host has been silent for ``SILENT_SECONDS``, however
# busy the processes are.

#: Seconds of silence after which a connection ends. A host that is there answers the kernel's probes at once, even if
#: all of its processes are stopped.
SILENT_SECONDS = 15

#: Seconds between two probes.
_PROBE_SECONDS = 3

#: Seconds that the other side may take to prove that it knows the key.
_PROOF_SECONDS = 10

#: Strangers who have proved nothing yet. The oldest one leaves for the next: a process of the job answers at once.
_MOST_STRANGERS = 256

#: Bytes of a random number, and of a proof.
_NONCE = _PROOF = 32

#: Bytes of a message: a length comes before the code of the message, and who stands between may write any.
_MOST_OF_A_MESSAGE = 1 << 30

#: What `accept` may say of the connection that it would return, and not of the socket that listens (man 2 accept).
_OF_A_STRANGER = {
    errno.ECONNABORTED, errno.EPERM, errno.EPROTO, errno.ENOPROTOOPT, errno.ENETDOWN, errno.EHOSTDOWN, errno.ENONET,
    errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EOPNOTSUPP, errno.ETIMEDOUT, errno.ECONNRESET,
}  # fmt: skip


class Channel:
    """A connection with a process of the job; used like one of multiprocessing, and passed to a process like one."""

    def __init__(self, connection: Connection, seal: Seal) -> None:
        self._connection = connection
        self.seal = seal

    def send(self, value: Any) -> None:
        """Send a value."""
        self._connection.send_bytes(self.seal.close(pickle.dumps(value)))

    def recv(self) -> Any:
        """Receive a value; EOFError if the other side has closed the connection, OSError if it is not of its."""
        return pickle.loads(self.seal.open(self._connection.recv_bytes(_MOST_OF_A_MESSAGE)))

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Return whether something can be received, or the end has come, within so many seconds."""
        return self._connection.poll(timeout)

    def fileno(self) -> int:
        """Return the descriptor, by which several connections are waited for."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Listener:
    """Listens on a free port, and tells the processes of a job from strangers without waiting for any of them."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._strangers: dict[socket.socket, tuple[float, bytes, bytearray]] = {}
        listening.setblocking(False)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        self._dismiss_all()

    def getsockname(self) -> Any:
        """Return the address, as a socket does."""
        return self._listening.getsockname()

    def accept(self, key: bytes) -> Channel:
        """Wait for a process that proves the key, and return the connection with it; OSError once this is closed."""
        try:
            while True:
                for raw in self._ready():
                    if raw is self._listening:
                        self._let_in()
                    elif (channel := self._hear(raw, key)) is not None:
                        return channel
        except OSError:
            self._dismiss_all()
            raise

    def _ready(self) -> list[socket.socket]:
        """Wait for the next socket with something to read, and dismiss the strangers whose time is over."""
        with selectors.PollSelector() as selector:
            try:
                for raw in (self._listening, *self._strangers):
                    selector.register(raw, selectors.EVENT_READ, raw)
            except ValueError:  # another thread has closed it
                raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None
            first = min((until for until, _, _ in self._strangers.values()), default=None)
            ready = selector.select(None if first is None else max(0.0, first - time.monotonic()))
        now = time.monotonic()
        for raw in [raw for raw, (until, _, _) in self._strangers.items() if now >= until]:
            self._dismiss(raw)
        return [found.data for found, _ in ready]

    def close(self) -> None:
        """Stop to listen; who waits in :meth:`accept` gets an OSError."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _let_in(self) -> None:
        try:
            raw, _ = self._listening.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in _OF_A_STRANGER:
                return
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._strangers:
                raise
            self._dismiss(next(iter(self._strangers)))
            return
        if len(self._strangers) >= _MOST_STRANGERS:
            self._dismiss(next(iter(self._strangers)))
        nonce = secrets.token_bytes(_NONCE)
        raw.setblocking(False)
        self._strangers[raw] = (time.monotonic() + _PROOF_SECONDS, nonce, bytearray())
        try:
            raw.send(nonce)  # what is so short fits into the buffer of a new connection
        except OSError:
            self._dismiss(raw)

    def _hear(self, raw: socket.socket, key: bytes) -> Channel | None:
        """Take what a stranger has sent; return the connection if that is the whole proof."""
        if raw not in self._strangers:
            return None
        _, nonce, heard = self._strangers[raw]
        try:
            part = raw.recv(_NONCE + _PROOF - len(heard))
            heard += part
            if part and len(heard) < _NONCE + _PROOF:
                return None
            theirs, proof = bytes(heard[:_NONCE]), bytes(heard[_NONCE:])
            if part and hmac.compare_digest(proof, _proof(key, b"connects", nonce, theirs)):
                raw.send(_proof(key, b"accepts", nonce, theirs))
                del self._strangers[raw]
                return _channel(raw, key, nonce, theirs, accepts=True)
        except BlockingIOError:
            return None
        except OSError:
            pass
        self._dismiss(raw)
        return None

    def _dismiss_all(self) -> None:
        for raw in [*self._strangers]:
            self._dismiss(raw)

    def _dismiss(self, raw: socket.socket) -> None:
        self._strangers.pop(raw, None)
        raw.close()


def listener(*, everywhere: bool) -> Listener:
    """Listen on a free port: of all interfaces for a job of several hosts, otherwise of the loopback interface."""
    if not everywhere:
        return Listener(socket.create_server(("127.0.0.1", 0), backlog=1024))
    if socket.has_dualstack_ipv6():
        return Listener(socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024))
    return Listener(socket.create_server(("", 0), backlog=1024))


def connect(address: tuple[str, int], key: bytes) -> Channel:
    """Connect to a process of the job; OSError if there is no connection, or the other side does not know the key."""
    until = time.monotonic() + _PROOF_SECONDS
    raw = socket.create_connection(address, timeout=_PROOF_SECONDS)
    try:
        nonce, mine = _exactly(raw, _NONCE, until), secrets.token_bytes(_NONCE)
        raw.sendall(mine + _proof(key, b"connects", nonce, mine))
        if not hmac.compare_digest(_exactly(raw, _PROOF, until), _proof(key, b"accepts", nonce, mine)):
            raise EOFError
        return _channel(raw, key, nonce, mine, accepts=False)
    except EOFError:
        raw.close()
        raise ConnectionError(f"{address[0]}:{address[1]} is no process of this job") from None
    except BaseException:
        raw.close()
        raise


def _exactly(raw: socket.socket, count: int, until: float) -> bytes:
    found = b""
    while len(found) < count:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError("no proof of the job's key came in time")
        raw.settimeout(left)
        try:
            part = raw.recv(count - len(found))
        except ConnectionResetError:  # by who does not believe us
            part = b""
        if not part:
            raise EOFError
        found += part
    return found


def _proof(key: bytes, what: bytes, nonce: bytes, theirs: bytes) -> bytes:
    return hmac.digest(key, what + nonce + theirs, "sha256")


def _channel(raw: socket.socket, key: bytes, nonce: bytes, theirs: bytes, *, accepts: bool) -> Channel:
    watch(raw)
    raw.settimeout(None)
    sides = (b"accepts", b"connects") if accepts else (b"connects", b"accepts")
    own = _proof(key, b"messages", nonce, theirs)
    return Channel(Connection(raw.detach()), Seal(own, mine=sides[0], theirs=sides[1]))


def watch(raw: socket.socket) -> None:
    """Let the kernel end a connection whose other host is silent, and send what is written at once."""
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_SECONDS // _PROBE_SECONDS)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000)


# The store of a torchrun job, through which its processes find each other; imports torch when it is used.

#: Time in which the controller announces itself: it reads its options first, which imports an implementation's package.
_TIMEOUT = datetime.timedelta(seconds=300)

_CONTROLLER = "controller"
_POLL_SECONDS = 0.2

_KEEP: list[object] = []


#: The variable with the secret of a job whose hosts share no home directory.
SECRET = "SHARDPROOF_SECRET"

#: Characters that a secret must have: it can be guessed by who listens.
_LEAST_OF_A_SECRET = 16

#: Seconds in which a file of one host is seen on another one, whose file system may remember that it was not there.
_SEEN_SECONDS = 90.0


class NoKey(ConnectionError):
    """This process has no key of the job; the message is one line that says how it gets one."""


class Keys:
    """Where the processes of one user find the key of their job: not in its store, which others can read and write.

    It is the secret of the environment or, without one, a file that this user alone can read: in the temporary
    directory of a single host, otherwise in the home directory that the hosts share.
    """

    def __init__(self, process: JobProcess, environment: Mapping[str, str] = os.environ) -> None:
        self._secret = environment.get(SECRET, "")
        if self._secret and len(self._secret) < _LEAST_OF_A_SECRET:
            raise NoKey(f"{SECRET} has {len(self._secret)} characters; it needs {_LEAST_OF_A_SECRET} or more")
        shared = pathlib.Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        alone = pathlib.Path(tempfile.gettempdir())
        self._folder = (alone if process.nodes == 1 else shared) / f"shardproof-keys-{os.getuid()}"

    def make(self) -> tuple[str, bytes]:
        """Make a key, and return its name, which may be known, and the key; OSError if its file cannot be written."""
        name, key = secrets.token_hex(16), secrets.token_bytes(32)
        if self._secret:
            return name, self._key_of(name, self._secret.encode())
        while True:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._check(self._folder, stat.S_ISDIR)
                descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                break
            except FileNotFoundError:  # another job has removed its key and the folder, which was empty
                continue
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
        atexit.register(self.remove, name, os.getpid())
        return name, self._key_of(name, key)

    def find(self, name: str) -> bytes | None:
        """Return the key of a name, or None if its file is not there."""
        if not re.fullmatch("[0-9a-f]{32}", name):
            raise NoKey(f"the job's store names no key of shardproof: {name[:40]!r}")
        if self._secret:
            return self._key_of(name, self._secret.encode())
        path = self._folder / name
        try:
            self._check(self._folder, stat.S_ISDIR)
            self._check(path, stat.S_ISREG)
            return self._key_of(name, path.read_bytes())
        except FileNotFoundError:
            return None

    def missing(self) -> NoKey:
        """Return the error of a process that does not see the file of the key."""
        return NoKey(
            f"the key of the job is not in {self._folder}, which the hosts of a job share; where they do not, set "
            f"{SECRET} to the same secret on each of them"
        )

    def remove(self, name: str, pid: int) -> None:
        """Remove the file of a key, in the process that made it."""
        if os.getpid() == pid:
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()
                self._folder.rmdir()  # which has the keys of other jobs too

    @staticmethod
    def _key_of(name: str, secret: bytes) -> bytes:
        return hmac.digest(secret, f"shardproof {name}".encode(), "sha256")

    @staticmethod
    def _check(path: pathlib.Path, is_kind: Callable[[int], bool]) -> None:
        status = path.lstat()
        if status.st_uid != os.getuid() or not is_kind(status.st_mode) or status.st_mode & 0o077:
            raise NoKey(f"{path} must be yours, and nobody else may read it or write to it")


def announce(process: JobProcess, port: int, name: str) -> None:
    """Write where the controller listens and the name of the job's key: what everybody who can read it may know."""
    _job(process).set(_CONTROLLER, f"{port} {name}")


def join(process: JobProcess) -> tuple[tuple[str, int], bytes, Channel]:
    """Wait for the controller's address, and connect with it by the job's key.

    Where the job's store outlives a restart, as with a static rendezvous, what the last controller announced is there
    until this one does.

    Raises:
        OSError: there is no controller, or this process has no key of the job.
    """
    keys, store = Keys(process), _job(process)
    store.wait([_CONTROLLER], _TIMEOUT)
    master = process.master if process.nodes > 1 else "127.0.0.1"
    until, unseen = time.monotonic() + _TIMEOUT.total_seconds(), time.monotonic() + _SEEN_SECONDS
    while True:
        port, _, name = store.get(_CONTROLLER).decode(errors="replace").partition(" ")
        key = keys.find(name)
        if key is None and time.monotonic() > unseen:
            raise keys.missing()
        try:
            if key is not None:
                address = (master, int(port))
                return address, key, connect(address, key)
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(_POLL_SECONDS)


def _job(process: JobProcess) -> Store:
    """Join the job's store as torch itself does, which also starts it where no torchrun has."""
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("env://", timeout=_TIMEOUT)))
    # Where this process holds the store, it lives as long as the process.
    _KEEP.append(store)
    return PrefixStore(f"shardproof/{process.run_id}", store)


def store_of(meeting: Meeting) -> Store:
    """Return the world's part of the job's store."""
    from torch.distributed import PrefixStore, TCPStore

    return PrefixStore(meeting.prefix, TCPStore(meeting.master, meeting.port, is_master=False, timeout=_TIMEOUT))


def across(spec: RankSpec, within: Exchange, shared: Store) -> HostExchange:
    """Connect this rank with those of other hosts (collective); OSError if another host cannot be reached.

    Of two hosts the one with the smaller number connects: the host of rank 0 may know itself by an address that only
    it can use, and the others know the addresses by which they reach it.
    """
    assert spec.meeting is not None, "only ranks of several hosts meet"
    node, key = spec.nodes[spec.index], spec.meeting.key
    others = [rank for rank, other in enumerate(spec.nodes) if other != node]
    awaited = [rank for rank in others if spec.nodes[rank] < node]
    peers: dict[int, Channel] = {}
    with listener(everywhere=True) as listening:
        # The address from which this host reaches the job's store is the one by which others reach this host.
        with socket.create_connection((spec.meeting.master, spec.meeting.port), timeout=60) as probe:
            address = probe.getsockname()[0]
        shared.set(f"exchange{spec.index}", f"{address} {listening.getsockname()[1]}")
        for rank in others:
            if rank not in awaited:
                host, port = shared.get(f"exchange{rank}").decode().split()
                peers[rank] = connect((host, int(port)), key)
                peers[rank].send(spec.index)
        while not set(awaited) <= set(peers):
            connection = listening.accept(key)
            peers[connection.recv()] = connection
    here = [rank for rank, other in enumerate(spec.nodes) if other == node]
    seals = {rank: peer.seal for rank, peer in peers.items()}
    raw = {rank: _raw(peer) for rank, peer in sorted(peers.items())}
    return HostExchange(within, here=here, peers=raw, seals=seals)


def _raw(connection: Channel) -> socket.socket:
    """Return the socket of a connection, which is closed."""
    raw = socket.socket(fileno=socket.dup(connection.fileno()))
    connection.close()
    return raw
