"""The temporary directory of one pytest process, which the next run removes if the process was killed.

Everything that a run writes for itself is in it: the directories of worlds and cases, and the forkserver's socket. The
process holds a lock on a file in it for as long as it lives. A directory whose lock is free has no owner any more.
"""

import atexit
import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing import process

_PREFIX = "shardproof-run-"
_LOCK = "owner"

#: Characters of a directory in which multiprocessing can bind its sockets, which it names "listener-" and 8 more; the
#: path of a socket has at most 107.
_MOST_FOR_SOCKETS = 107 - len("/listener-12345678")

#: Free bytes below which the temporary directory counts as full: less than the output and the board of a small world.
_LEAST_FREE_BYTES = 1 << 16


def directory(prefix: str) -> pathlib.Path:
    """Make a new directory in that of this process; OSError if there is no space, or no permission."""
    return pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=_own(os.getpid())))


def place(name: str) -> pathlib.Path:
    """Return the path of this name in the directory of this process, whether there is anything or not."""
    return _own(os.getpid()) / name


@contextlib.contextmanager
def temporary(prefix: str) -> Iterator[str]:
    """Make a directory as :func:`directory` does, and remove it at the end of the block."""
    path = directory(prefix)
    try:
        yield str(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def is_full() -> bool:
    """Whether the temporary directory has no space left for what a case writes."""
    status = os.statvfs(_own(os.getpid()))
    # Some file systems count no files: they have neither files nor free ones.
    return status.f_bavail * status.f_frsize < _LEAST_FREE_BYTES or (status.f_files > 0 and status.f_favail == 0)


def where() -> str:
    """Return the path of the directory in which temporary directories are made, for messages."""
    return tempfile.gettempdir()


def use_for_multiprocessing() -> None:
    """Let multiprocessing keep the forkserver's socket in the temporary directory of this process.

    The directory that it would make itself stays if the process is killed.
    """
    own = str(_own(os.getpid()))
    if len(own) <= _MOST_FOR_SOCKETS:
        # The name is private, and multiprocessing has no public one. Without effect, its directory is elsewhere.
        vars(process.current_process())["_config"].setdefault("tempdir", own)


def remove_abandoned() -> None:
    """Remove the directories of processes that were killed, such as xdist workers of this run."""
    for path in pathlib.Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Of another user, or removed meanwhile; a lock that is held raises BlockingIOError.
        with contextlib.suppress(OSError):
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _discard(path)
            finally:
                os.close(descriptor)


def remove_own() -> None:
    """Remove the directory of this process, which is about to end, if it has made one."""
    if path := _OWN.get(os.getpid()):
        _discard(path)


def remove_at_once() -> None:
    """Remove all directories of this process, which a signal is about to end, without what it would do at its exit."""
    remove_own()
    # Where the path is too long for sockets, multiprocessing has made one of its own.
    if elsewhere := vars(process.current_process())["_config"].get("tempdir"):
        shutil.rmtree(elsewhere, ignore_errors=True)


#: The directory of a process, by its id: a process that was forked inherits that of another.
_OWN: dict[int, pathlib.Path] = {}


def _own(pid: int) -> pathlib.Path:
    """Make and lock the directory of the process ``pid``, which is this one, after removing those without an owner."""
    if pid in _OWN:
        return _OWN[pid]
    remove_abandoned()
    # Under another name until it is locked: a process that starts now would remove it.
    unlocked = pathlib.Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    descriptor = os.open(unlocked / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    path = _OWN[pid] = unlocked.with_name(unlocked.name.removeprefix("."))
    unlocked.rename(path)
    atexit.register(remove_own)
    return path


def _discard(path: pathlib.Path) -> None:
    """Remove the directory of a process, whose ranks may still be dying and write into it by its path."""
    gone = path.with_name(f"{path.name}.gone")
    # With its lock, so that a process that is killed here leaves what the next one removes.
    with contextlib.suppress(OSError):
        path.rename(gone)
        for one in [*gone.iterdir()]:
            if one.name != _LOCK:
                shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()
        shutil.rmtree(gone)
