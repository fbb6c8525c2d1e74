"""The door for foreign files: how they are read, and how text from them is printed.

A run file, a plan, a recording, a summary or a file of TOML may come from anybody. Each is read here and nowhere else
(``tests/test_door.py`` walks the sources): from a regular file alone, with bounds that are checked before memory is
taken, and without executing or unpickling anything. Whatever is wrong with a file is a :class:`BadFile`, of which
``shardproof`` makes one line and the exit code 2.

Bounds are some times the size of the largest honest file that is known: a run of 14 MB with 620,000 values, 14 levels
deep, whose longest string has 20 kB; expectations of 31 kB. A hostile file of that size takes less than 1 GB.
"""

import contextlib
import itertools
import json
import mmap
import os
import re
import stat
import tomllib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from shardproof.jsonfiles import RecordError

T = TypeVar("T")

PARTIAL = ".partial"
"""Appended to the name of a run file while it is incomplete."""

MOST_BYTES = 1 << 26
"""Bytes of text in a file of JSON, unpacked; a quarter of it if some are not ASCII, which memory has in four bytes."""

MOST_VALUES = 1 << 21
"""Values and keys in a file of JSON."""

MOST_DEPTH = 64
"""Lists and objects inside each other."""

MOST_STRING = 1 << 20
"""Bytes of one string. A record of a case has at most a quarter of it."""

MOST_OF_TOML = 1 << 20
"""Bytes of a file of TOML, whose parser is slower and takes more memory."""

MOST_OF_A_LINE = 1 << 24
"""Bytes of one line of a file that is read line by line."""

MOST_LINES = 1 << 21
"""Lines of such a file, of which a kB each may be kept: a rank of a recording has one for each tensor of its steps."""

_MOST_OF_A_MESSAGE = 1000

# Printing ------------------------------------------------------------------------------------

#: A word that begins like a command for GitHub's runner, wherever a line may be wrapped; and what GitHub and Azure
#: take for one anywhere in a line, as in ``##vso[``. GitLab's sections need a control character.
_COMMAND = re.compile(r"(?<!\S)(?=::)|(?<=#)(?=#\w*\[)")

_UNPRINTABLE = re.compile(r"[^ -~]")


def printable(text: str) -> str:
    """Make foreign text a part of one line that no terminal and no CI takes for a command.

    Characters that are not printable are escaped, line breaks too, and a backslash parts what a CI would take for a
    command, such as ``::error::`` at the beginning of a line. Text that was made printable before stays as it is.
    """
    return _COMMAND.sub(r"\\", _UNPRINTABLE.sub(_escaped, text))


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def lines_of(text: str) -> str:
    """Make foreign text of several lines printable, each line by itself."""
    return "\n".join(map(printable, text.split("\n")))


class BadFile(ValueError):
    """A foreign file cannot be read or used. The message is one printable line, which begins with the file's path."""

    def __init__(self, message: str) -> None:
        text = printable(message)
        if len(text) > _MOST_OF_A_MESSAGE:
            half = _MOST_OF_A_MESSAGE // 2
            text = f"{text[:half]} ... {text[-half:]}"
        super().__init__(text)


@contextlib.contextmanager
def _of(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Turn what reading a file raises into a BadFile."""
    try:
        yield
    except BadFile:
        raise
    except RecordError as error:
        raise BadFile(f"{path}: {error}") from error
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not of the kind, not Unicode, a number of 5000 digits
        raise BadFile(f"{path}: not a {kind} file: {error}") from error


# Reading -------------------------------------------------------------------------------------


def _opened(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file; a named pipe would wait for a writer, and a device may have no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(21, "Is a directory")
        if not stat.S_ISREG(mode):
            raise RecordError("not a regular file")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _bytes(path: str | os.PathLike[str], most: int) -> bytes:
    with _opened(path) as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise RecordError(f"more than {_size(most)}")
    return found


def _size(count: int) -> str:
    return f"{count >> 20} MiB of text" if count >= 1 << 20 else f"{count} bytes of text"


_MAGIC = b"\x1f\x8b"
_CASES = re.compile(rb'^,"cases": \[$', re.MULTILINE)
_END = re.compile(rb"^\]$", re.MULTILINE)


def load(path: str | os.PathLike[str], parse: Callable[[object], T]) -> T:
    """Read and parse a file of JSON, which may be compressed or a journal.

    A file that is compressed by gzip is recognised by its content. ``parse`` makes the result of the JSON data and
    raises a RecordError where they violate the schema.

    Raises:
        BadFile: the file is missing, is no regular file, is beyond a bound, is not JSON, or violates the schema; or the
            journal of a newer, incomplete run is beside it.
    """
    path = Path(path)
    with _of(path, "JSON"):
        _refuse_if_a_newer_run_is_incomplete(path)
        found = parse(content(path, is_journal=path.name.endswith(PARTIAL)))
    return found


def content(path: Path, *, is_journal: bool) -> object:
    """Return the JSON data of a run file.

    A journal, which may end after any byte, as that of a process that was killed does, is read up to its last line.

    Raises:
        OSError: the file cannot be opened or read.
        ValueError: it is no regular file, is beyond a bound, is not compressed although its name ends in ``.gz``, or is
            not JSON.
        RecursionError: it is nested too deeply.
    """
    text = _bytes(path, MOST_BYTES)
    if text.startswith(_MAGIC):
        text = _decompress(text, allow_cut=is_journal)
    elif path.name.removesuffix(PARTIAL).endswith(".gz") and not (is_journal and not text):
        raise RecordError("not compressed by gzip: its name ends in .gz, its content is something else")
    if not is_journal:
        return parse_json(text)
    _check_size(text)
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(_closed(text))


def parse_json(text: bytes, *, once: bool = False) -> object:
    """Parse JSON within the bounds of a file of JSON.

    Args:
        text: the JSON.
        once: whether an object with two values of one name is refused.

    Raises:
        ValueError: it is beyond a bound, or is not JSON.
        RecursionError: it is nested too deeply.
    """
    _check_size(text)
    return json.loads(text, object_pairs_hook=_once if once else None)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise RecordError("an object has two values of one name")
    return found


def _refuse_if_a_newer_run_is_incomplete(path: Path) -> None:
    path = path.resolve()  # a link's journal is beside the file that it leads to
    partial = path.parent / (path.name + PARTIAL)
    try:
        started = partial.stat().st_mtime_ns
    except OSError:
        return
    try:
        is_newer = started >= path.stat().st_mtime_ns
    except FileNotFoundError:
        raise RecordError(f"there is no such file, but an incomplete run has left {partial.name}") from None
    if is_newer:
        raise RecordError(f"a newer run is incomplete; read {partial.name}, or delete it to read this older one")


def _decompress(text: bytes, *, allow_cut: bool) -> bytes:
    decompressor = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        plain = decompressor.decompress(text, MOST_BYTES + 1)
    except zlib.error as error:
        raise RecordError(f"not compressed by gzip: {error}") from None
    if len(plain) > MOST_BYTES:
        raise RecordError(f"more than {_size(MOST_BYTES)}")
    if not decompressor.eof and not allow_cut:
        raise RecordError("not compressed by gzip: the file is cut short")
    if decompressor.unused_data:
        raise RecordError("not compressed by gzip: there is something after the end")
    return plain


def _closed(text: bytes) -> bytes:
    """Close the brackets of a journal that ends after some line, and drop a line that is not complete."""
    text = text[: text.rfind(b"\n") + 1]
    began = _CASES.search(text)
    is_open = began is not None and not _END.search(text, began.end())
    return text + (b"]" if is_open else b"") + b"}"


#: A string of JSON; of one that does not end, all that is left, so that nothing is read twice.
_STRING = re.compile(rb'"[^"\\]*+(?:\\[\s\S][^"\\]*+)*+"?')
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DEEPER = {**dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", -1)}


def _check_size(text: bytes) -> None:
    """Refuse JSON of which the parser would make too much; its text need not be valid.

    Raises:
        RecordError: a bound is exceeded.
    """
    if not text.isascii() and len(text) > MOST_BYTES // 4:
        raise RecordError(f"more than {_size(MOST_BYTES // 4)} that is not ASCII")
    for count, found in enumerate(_STRING.finditer(text), 1):
        if found.end() - found.start() > MOST_STRING + 2:
            raise RecordError(f"a string of more than {_size(MOST_STRING)}")
        if count > MOST_VALUES:  # before the parts between them take 200 bytes each
            raise RecordError(f"more than {MOST_VALUES} values")
    bare = b"".join(_STRING.split(text))
    brackets = bare.translate(None, _NOT_BRACKETS)
    if bare.count(b",") + bare.count(b":") + len(brackets) // 2 > MOST_VALUES:
        raise RecordError(f"more than {MOST_VALUES} values")
    if max(itertools.accumulate(map(_DEEPER.__getitem__, brackets)), default=0) > MOST_DEPTH:
        raise RecordError(f"lists and objects more than {MOST_DEPTH} deep")


def lines(path: str | os.PathLike[str], parse: Callable[[object], T], *, may_be_cut: bool) -> Iterator[T]:
    """Read a file with a JSON value in each line, one line at a time.

    Args:
        path: its path.
        parse: makes the result of a value; raises a RecordError or ValueError where it is wrong.
        may_be_cut: whether a last line without an end is left out, as of a process that was killed.

    Raises:
        BadFile: a line cannot be read, with its number.
    """
    with _of(path, "text"):
        file = _opened(path)
    with file:
        for number in itertools.count(1):
            with _of(f"{path}: line {number}", "JSON"):
                text = file.readline(MOST_OF_A_LINE + 1)
                if not text:
                    return
                if len(text) > MOST_OF_A_LINE:
                    raise RecordError(f"more than {_size(MOST_OF_A_LINE)}")
                if not text.endswith(b"\n"):
                    if may_be_cut:
                        return
                    raise RecordError("it is cut off")
                if number > MOST_LINES:
                    raise RecordError(f"the file has more than {MOST_LINES} lines")
                if len(text) > 1 << 12:  # of less text the parser makes little, and refuses what is deep
                    _check_size(text)
                made = parse(json.loads(text))
            yield made


#: Parts of dotted keys, for each of whose beginnings tomllib makes an entry.
_DOTTED = re.compile(r"[\w\"' \t.-]+")
_MOST_PARTS = 64


def toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file of TOML.

    Raises:
        BadFile: it cannot be read, is beyond a bound or is not TOML.
    """
    with _of(path, "TOML"):
        found = parse_toml(_bytes(path, MOST_OF_TOML).decode())
    return found


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: it is not TOML, or is nested too deeply.
    """
    if any(found[0].count(".") > _MOST_PARTS for found in _DOTTED.finditer(text)):
        raise RecordError(f"a key of more than {_MOST_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise RecordError("lists and tables are nested too deeply") from None


def tensor(path: Path, name: str) -> Any:
    """Read one tensor of a file of safetensors, which has no code; no more of it is read than that tensor has.

    Raises:
        BadFile: the file cannot be read, or has no such tensor.
    """
    from safetensors import SafetensorError, safe_open  # late: an extra, which imports torch

    with _of(path, "safetensors"):
        _opened(path).close()
        try:
            with safe_open(path, "pt") as file:
                found = file.get_tensor(name)
        except (SafetensorError, RuntimeError, TypeError) as error:  # a dtype that torch lacks is a TypeError
            raise RecordError(str(error)) from error
    return found


_READ_AT_ONCE = 1 << 20
"""A piece of a file of at most so many bytes is read; a mapping holds a file descriptor until it is freed."""


def size_of(path: str | os.PathLike[str]) -> int:
    """Return the bytes of a file of any content.

    Raises:
        BadFile: it is missing, or is no regular file.
    """
    with _of(path, "binary"), _opened(path) as file:
        return os.fstat(file.fileno()).st_size


def piece(path: str | os.PathLike[str], start: int, size: int) -> memoryview:
    """Return a piece of a file of any content, in a buffer that may be written to without changing the file.

    A large piece is a private mapping: it takes memory only for pages that are read, which the system may drop again.

    Raises:
        BadFile: the file is missing, is no regular file, or ends before the piece does.
    """
    stop = start + size
    with _of(path, "binary"), _opened(path) as file:
        length = os.fstat(file.fileno()).st_size
        if not 0 <= start <= stop <= length:
            raise RecordError(f"it is cut off: bytes {start} to {stop} are needed, and it has {length}")
        if size > _READ_AT_ONCE:
            first = start - start % mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(file.fileno(), stop - first, access=mmap.ACCESS_COPY, offset=first)
            return memoryview(mapped)[start - first :]
        found = bytearray(size)
        file.seek(start)
        if file.readinto(found) != size:  # type: ignore[attr-defined]
            raise RecordError("it was cut off while it was read")
    return memoryview(found)
