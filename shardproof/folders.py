"""Writes the files that a command leaves in a user's folder: never through a link, all of them or none.

A folder may come from other people, as that of a pull request does: a name in it may be a symbolic link to any place.
So each part of a path below the folder is opened by its own descriptor and without following links, and nothing but a
regular file is replaced. Files are written next to their places, under a name of their own, and renamed when all of
them are complete. What fails before the last rename leaves everything as it was; what kills the process between two of
them leaves each file as it was or complete, and the next command removes what was left beside them.

The folder itself, and a file that a command line names by its whole path, are the user's own words: links in them lead
where the user wants.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

#: The beginning of the name of the directory in which files are complete before they are renamed.
_STAGE = ".shardproof-"

#: Bytes that a name in a folder may have, on all common file systems.
MOST_OF_A_NAME = 255

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


Content = bytes | str | Callable[[BinaryIO], object]
"""Of a file: a str is written as UTF-8; a function writes it itself, into a file that is open."""


class NotWritten(ValueError):
    """Files could not be written, and nothing has changed. The text is one line that begins with the path."""


def make(folder: Path) -> str:
    """Make a folder, with those above it that are missing: a misspelt path makes one too, so a command says it.

    Args:
        folder: its path.

    Returns:
        The end of the line that tells of the file, as in " (made the folder out/runs)"; empty if it was there.

    Raises:
        OSError: it cannot be made.
    """
    is_new = not folder.exists()
    if not is_new and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    folder.mkdir(parents=True, exist_ok=True)
    return f" (made the folder {folder})" if is_new else ""


def make_new(folder: Path) -> None:
    """Make a folder that nothing may be in yet, with those above it that are missing.

    Raises:
        OSError: something has its name, such as a link, or it cannot be made.
    """
    folder.mkdir(parents=True)


def write_file(path: Path, content: Content) -> str:
    """Write one file whose whole path the user has named, and through links in it; until it is complete, it stays.

    Args:
        path: of the file.
        content: of the file.

    Returns:
        What :func:`make` returns of its folder.

    Raises:
        NotWritten: it cannot be written, or something other than a regular file has the name.
    """
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise NotWritten(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return write(target.parent, {target.name: content}, named=path)


def write(
    folder: Path, files: Mapping[str, Content], *, deletes: Collection[str] = (), named: Path | None = None
) -> str:
    """Write files into a folder, and delete others there: all of it or, where any of it fails, nothing.

    They are renamed in their order, the last one when the others are there and what is to be deleted is not: an index,
    which says what the folder has.

    Args:
        folder: the folder, which is made if it is missing. Links in this path are followed.
        files: the content by the path in the folder, with "/" between its parts. No link is followed.
        deletes: paths of files in the folder that are deleted; those that are missing, or no regular files, stay.
        named: what messages call the file, if it is one, instead of its path.

    Returns:
        What :func:`make` returns of the folder.

    Raises:
        NotWritten: nothing has changed.
    """
    changes = _Changes(folder, named)
    try:
        made = changes.open()
        changes.stage(files)
        changes.apply(files, deletes)
    except BaseException as error:
        changes.undo()
        if isinstance(error, OSError):
            raise NotWritten(f"{changes.at}: {error.strerror or error}") from None
        raise
    finally:
        changes.close()
    return made


def append(path: Path, text: str) -> None:
    """Write to the end of a file in a folder that :func:`make_new` has made; it is no link.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        _write_all(descriptor, text.encode())
    finally:
        os.close(descriptor)


def name_of(text: str, *, ending: str) -> str:
    """Return a name of a file for a text that may hold anything: printable ASCII, bounded, and not hidden.

    Args:
        text: what the file is of; equal texts have equal names, and other texts others.
        ending: of the name, which is kept, as in "-cpu-8.svg".
    """
    from hashlib import sha256
    from urllib.parse import quote

    name = quote(text, safe="", errors="backslashreplace")
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    room = MOST_OF_A_NAME - len(ending)
    if len(name) > room:
        mark = f"-{sha256(text.encode(errors='backslashreplace')).hexdigest()[:16]}"
        name = name[: room - len(mark)].rstrip("%") + mark
    return name + ending


#: What a file system that has no hard links answers, or has as many of a file as it can.
_WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class _Changes:
    """The changes of one command in one folder, and how they are undone; ``at`` is the path that an error is about."""

    def __init__(self, folder: Path, named: Path | None) -> None:
        self.at = named or folder
        self._folder, self._named = folder, named
        self._missing: list[Path] = []
        self._stack = contextlib.ExitStack()
        self._parents: dict[PurePosixPath, int] = {}
        self._made: list[tuple[int, str]] = []
        self._home = self._stage = -1
        self._name = ""
        self._undo: list[tuple[str, int, str]] = []  # the name of the old file beside, "" if there was none

    def open(self) -> str:
        """Open the folder, and return what :func:`make` returns of it."""
        self._missing = [one for one in (self._folder, *self._folder.parents) if not one.exists()]
        made = make(self._folder)
        self._home = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._stack.callback(os.close, self._home)
        self._parents[PurePosixPath(".")] = self._home
        _remove_left_over(self._home)
        return made

    def stage(self, files: Mapping[str, Content]) -> None:
        """Write all files next to their places."""
        while not _is_at(self._home, self._name, self._stage):
            self._name = f"{_STAGE}{os.urandom(6).hex()}"
            os.mkdir(self._name, 0o700, dir_fd=self._home)
            # Until it is locked, another command in this folder may take it for left over.
            with contextlib.suppress(FileNotFoundError):
                self._stage = os.open(self._name, _DIRECTORY, dir_fd=self._home)
                self._stack.callback(os.close, self._stage)
                _lock(self._stage)
        for number, (path, content) in enumerate(files.items()):
            self._look(path)
            parent, name = self._place(path, makes=True)
            mode = _mode_of(parent, name)
            descriptor = os.open(str(number), _NEW, 0o666, dir_fd=self._stage)
            try:
                if callable(content):
                    with open(descriptor, "wb", closefd=False) as file:
                        content(file)
                else:
                    text = content.encode(errors="backslashreplace") if isinstance(content, str) else content
                    _write_all(descriptor, text)
                if mode is not None:
                    os.fchmod(descriptor, mode)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def apply(self, files: Mapping[str, Content], deletes: Collection[str]) -> None:
        """Rename the files to their places; the last one after the deletions."""
        paths = list(files)
        for number, path in enumerate(paths[:-1]):
            self._replace(number, path)
        for path in deletes:
            if path not in files:
                self._delete(path)
        if paths:
            self._replace(len(paths) - 1, paths[-1])

    def undo(self) -> None:
        """Put back what was there, in the opposite order."""
        for old, parent, name in reversed(self._undo):
            with contextlib.suppress(OSError):
                if old:
                    os.replace(old, name, src_dir_fd=self._stage, dst_dir_fd=parent)
                else:
                    os.unlink(name, dir_fd=parent)
        for parent, name in reversed(self._made):
            with contextlib.suppress(OSError):  # it may have got another file meanwhile
                os.rmdir(name, dir_fd=parent)
        self._remove_stage()
        for folder in self._missing:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def close(self) -> None:
        """Remove what is beside the files."""
        self._remove_stage()
        self._stack.close()

    def _remove_stage(self) -> None:
        if self._name:
            with contextlib.suppress(OSError):
                _remove(self._home, self._name)

    def _look(self, path: str) -> None:
        self.at = self._named or self._folder / path

    def _place(self, path: str, *, makes: bool) -> tuple[int, str]:
        """Return the descriptor of the directory of a file, and its name there; no part of the path may be a link."""
        pure = PurePosixPath(path)
        if pure.is_absolute() or not pure.name or ".." in pure.parts or "\0" in path:
            raise NotWritten(f"{self.at}: it is not in the folder {self._folder}")
        for one in reversed(pure.parents):
            if one in self._parents:
                continue
            above = self._parents[one.parent]
            if makes:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(one.name, dir_fd=above)
                    self._made.append((above, one.name))
            try:
                self._parents[one] = os.open(one.name, _DIRECTORY, dir_fd=above)
            except OSError:
                if stat.S_ISLNK(os.stat(one.name, dir_fd=above, follow_symlinks=False).st_mode):
                    text = "it is a symbolic link, and nothing is written through one: delete it"
                    raise NotWritten(f"{self._folder / one}: {text}") from None
                raise
            self._stack.callback(os.close, self._parents[one])
        parent = self._parents[pure.parent]
        kind = _kind_of(parent, pure.name)
        if makes and kind and not stat.S_ISREG(kind):
            what = "a symbolic link, and nothing is written through one: delete it"
            raise NotWritten(f"{self.at}: it is {what if stat.S_ISLNK(kind) else 'not a regular file'}")
        return parent, pure.name

    def _replace(self, number: int, path: str) -> None:
        self._look(path)
        parent, name = self._place(path, makes=True)
        old = f"{number}.old" if _kind_of(parent, name) else ""
        if old:
            try:
                os.link(name, old, src_dir_fd=parent, dst_dir_fd=self._stage, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _WITHOUT_LINKS:
                    raise
                _copy(parent, name, self._stage, old)
        self._undo.append((old, parent, name))
        os.replace(str(number), name, src_dir_fd=self._stage, dst_dir_fd=parent)

    def _delete(self, path: str) -> None:
        self._look(path)
        try:
            parent, name = self._place(path, makes=False)
        except (FileNotFoundError, NotADirectoryError, NotWritten):
            return
        if stat.S_ISREG(_kind_of(parent, name)):
            old = f"deleted{len(self._undo)}"
            os.rename(name, old, src_dir_fd=parent, dst_dir_fd=self._stage)
            self._undo.append((old, parent, name))


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _kind_of(parent: int, name: str) -> int:
    """Return the mode of what has a name in a directory, not of what a link leads to; 0 if there is nothing."""
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


def _mode_of(parent: int, name: str) -> int | None:
    """Return the permissions of a file that is to be replaced; None if there is none."""
    return stat.S_IMODE(found) if (found := _kind_of(parent, name)) else None


def _copy(source: int, name: str, target: int, copy: str) -> None:
    with (
        open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=source), "rb") as old,
        open(os.open(copy, _NEW, 0o600, dir_fd=target), "wb") as new,
    ):
        shutil.copyfileobj(old, new)


def _lock(descriptor: int) -> bool:
    """Lock a directory for as long as it is open; some network file systems cannot."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _is_at(parent: int, name: str, descriptor: int) -> bool:
    """Return whether an open directory still has its name."""
    with contextlib.suppress(FileNotFoundError):
        return descriptor >= 0 and os.path.samestat(os.stat(name, dir_fd=parent), os.fstat(descriptor))
    return False


def _remove_left_over(home: int) -> None:
    """Remove what commands that were killed have left beside the files of a folder."""
    for name in os.listdir(home):
        if name.startswith(_STAGE):
            with contextlib.suppress(OSError):
                _remove(home, name, if_free=True)


def _remove(home: int, name: str, *, if_free: bool = False) -> None:
    """Remove a directory of files, none of which is followed if it is a link; with ``if_free`` not a locked one."""
    descriptor = os.open(name, _DIRECTORY, dir_fd=home)
    try:
        if if_free and not _lock(descriptor):
            return
        for one in os.listdir(descriptor):
            os.unlink(one, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    os.rmdir(name, dir_fd=home)
