"""Reads the text of a run file: plain or compressed, complete or the journal of a run that ended early."""

import json
import re
import stat
import zlib
from pathlib import Path

#: Bytes of text that a run file may have; the largest published one has 9 MB. Without a bound, a small compressed file
#: could fill the memory.
MOST_BYTES = 1 << 28

PARTIAL = ".partial"
_MAGIC = b"\x1f\x8b"
_CASES = re.compile(rb'^,"cases": \[$', re.MULTILINE)
_END = re.compile(rb"^\]$", re.MULTILINE)


class FileError(ValueError):
    """A file is no run file, whatever its content means. The message is one line without the path."""


def read(path: Path) -> bytes:
    """Return the JSON text of a run file.

    The journal of a process that was killed ends after some line. Its text is closed, so that it is JSON.

    Args:
        path: the path of the file.

    Raises:
        OSError: the file cannot be opened or read.
        FileError: the file is no regular file, is too large, or is not compressed although its name ends in ``.gz``; or
            a newer journal exists next to it.
    """
    _refuse_if_a_newer_run_is_incomplete(path)
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(21, "Is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise FileError("not a regular file")
    is_partial = path.name.endswith(PARTIAL)
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if content.startswith(_MAGIC):
        content = _decompress(content, allow_cut=is_partial)
    elif path.name.removesuffix(PARTIAL).endswith(".gz") and not (is_partial and not content):
        raise FileError("not compressed by gzip: its name ends in .gz, its content is something else")
    if len(content) > MOST_BYTES:
        raise FileError(f"more than {MOST_BYTES >> 20} MiB of text")
    return _closed(content) if is_partial and not _is_json(content) else content


def _refuse_if_a_newer_run_is_incomplete(path: Path) -> None:
    path = path.resolve()  # the journal of a link is next to its target
    partial = path.parent / (path.name + PARTIAL)
    try:
        started = partial.stat().st_mtime_ns
    except OSError:
        return
    try:
        is_newer = started >= path.stat().st_mtime_ns
    except FileNotFoundError:
        raise FileError(f"there is no such file, but an incomplete run has left {partial.name}") from None
    if is_newer:
        raise FileError(f"a newer run is incomplete; read {partial.name}, or delete it to read this older one")


def _decompress(content: bytes, *, allow_cut: bool) -> bytes:
    decompressor = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        text = decompressor.decompress(content, MOST_BYTES + 1)
    except zlib.error as error:
        raise FileError(f"not compressed by gzip: {error}") from None
    if not decompressor.eof and not allow_cut and len(text) <= MOST_BYTES:
        raise FileError("not compressed by gzip: the file is cut short")
    if decompressor.unused_data:
        raise FileError("not compressed by gzip: there is something after the end")
    return text


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def _closed(content: bytes) -> bytes:
    """Close the brackets of a journal that ends after some line, and drop a line that is not complete."""
    content = content[: content.rfind(b"\n") + 1]
    began = _CASES.search(content)
    is_open = began is not None and not _END.search(content, began.end())
    return content + (b"]" if is_open else b"") + b"}"
