"""The run file, written as a journal: each case's record is on the disk as soon as the case has ended.

While a run is under way, its journal is ``FILE.partial``. A complete run renames it to ``FILE``, atomically. A run that
ends early leaves ``FILE`` as it was, and the journal says why it is incomplete.

The journal is one JSON document, written line by line: each line ends one field or one record, and begins with the
comma that separates it from the last. The text up to any line, with the open brackets closed, is valid JSON, so that
the journal of a process that was killed can still be read. docs/run-files.md describes the format.
"""

import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import re
import stat
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from shardproof import folders
from shardproof.door import PARTIAL
from shardproof.jsonfiles import encode, mapped
from shardproof.runfile import VERSION, Effort, End, Environment, digest_of, fingerprint

_GZIP = 16 + zlib.MAX_WBITS


class Journal:
    """Writes one run file.

    A write that fails, as on a full disk, does not raise: :attr:`error` names it, and everything that could not be
    written is kept and written with the next record.

    Args:
        path: the run file. Missing directories are made, a link is followed, and a name that ends in ``.gz`` gives a
            compressed file.

    Attributes:
        path: the run file, with links resolved.
        made: that its folder was made, for the line that tells of the run file; empty if it was there.
        partial: the file that is written until the run is complete.
        error: why the journal could not be written; empty if everything so far was.
        started: the time at which the journal was opened, in UTC.

    Raises:
        ValueError: the file cannot be written there. The message is one line.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self.made = _target(path)
        self.partial = self.path.with_name(self.path.name + PARTIAL)
        self.started = datetime.datetime.now(datetime.UTC)
        self.error = ""
        self._clock = time.monotonic()
        self._descriptor = _open(self.partial, path)
        self._written = 0
        self._pending = b""
        self._compressor = zlib.compressobj(wbits=_GZIP) if self.path.suffix == ".gz" else None
        self._fields = 0
        self._cases = -1
        self._fingerprints: list[str] = []
        home = os.path.expanduser("~")
        self._home = re.compile(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])" if len(home) > 1 else "(?!)")
        self._field("schema_version", VERSION)
        self._field("run_id", uuid.uuid4().hex)
        if self.error:
            os.close(self._descriptor)
            raise ValueError(f"--report {path}: {self.error}")

    @property
    def is_open(self) -> bool:
        """Whether :meth:`finish` has not been called."""
        return self._descriptor >= 0

    def describe(self, environment: Environment) -> None:
        """Write the environment of the run."""
        self._field("environment", environment)

    def select(
        self,
        selected: Mapping[str, Sequence[str]],
        *,
        effort: Effort | None = None,
        unasked: Mapping[str, Mapping[str, str]] | None = None,
        suites: str | None = None,
    ) -> None:
        """Write which cases were selected, and begin the list of records.

        Args:
            selected: the ids of the selected cases, by implementation.
            effort: the effort of the run, if it is known.
            unasked: by implementation, the requirements of every implementation that no case asks, and what each needs.
            suites: the hash of the suites, if it is known.
        """
        if suites is not None:
            self._field("suites", suites)
        if effort is not None:
            self._field("effort", effort)
        if unasked:
            self._field("unasked", unasked)
        self._field("selected", selected)
        self._append(',"cases": [\n')
        self._cases = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Write the record of a case.

        Args:
            record: the record as JSON values.
        """
        if self._cases < 0:  # nobody has told which cases were selected
            self.select({})
        if "reproduce" in record:  # a shell expands no ~ within quotes
            command = re.sub("'[^']*'", lambda found: self._home.sub("'\"$HOME\"'", found[0]), record["reproduce"])
            record = {**record, "reproduce": command}
        record = self._without_home(record)
        self._append(f"{',' * (self._cases > 0)}{_json(record)}\n")
        self._cases += 1
        self._fingerprints.append(fingerprint(record))

    def finish(
        self, *, reason: str, exit_code: int, left_out: Sequence[Mapping[str, str]] = (), problems: Sequence[str] = ()
    ) -> bool:
        """Write the end of the journal and, if the run is complete, rename it to the run file.

        Args:
            reason: why the run is incomplete; empty if it is complete.
            exit_code: the exit code of the run.
            left_out: the selected cases that pytest skipped: their ids, implementations and reasons.
            problems: what fails the run beside its cases, such as known failures without a case; one line each.

        Returns:
            Whether the run file is complete. If it should be and is not, :attr:`error` says why.
        """
        if self._cases >= 0:
            self._append("]\n")
        self._field("left_out", list(left_out))
        if not reason:
            self._field("digest", digest_of(self._fingerprints))
        before_the_end = self._written
        seconds = round(time.monotonic() - self._clock, 3)
        end = End(complete=not reason, reason=reason, exit_code=exit_code, seconds=seconds, problems=problems)
        self._field("end", end)
        self._append("}\n", last=True)
        try:
            if reason or self.error:
                return False
            os.fsync(self._descriptor)
            _check_replaceable(self.path, self.path)
            os.replace(self.partial, self.path)
        except (OSError, ValueError) as error:
            self.error = str(error)
            # Without its end: it must not call itself complete.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, before_the_end)
            return False
        finally:
            os.close(self._descriptor)
            self._descriptor = -1
        return True

    def _field(self, name: str, value: Any) -> None:
        self._append(f"{',' if self._fields else '{'}{_json(name)}: {_json(self._without_home(encode(value)))}\n")
        self._fields += 1

    def _without_home(self, value: Any) -> Any:
        """Return JSON values with ~ for the home directory, which often has the name of the user."""
        return mapped(value, lambda text, _: self._home.sub("~", text))

    def _append(self, text: str, *, last: bool = False) -> None:
        """Write a line after everything that is pending; a failure leaves the file as it was."""
        content = text.encode()
        if self._compressor is not None:
            # A flush for each line costs some compression; without it, up to 32 KiB of records would be in memory only.
            content = self._compressor.compress(content)
            content += self._compressor.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)
        self._pending += content
        try:
            _write_at(self._descriptor, self._pending, self._written)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._written)
            self.error = error.strerror or str(error)
        else:
            self._written += len(self._pending)
            self._pending, self.error = b"", ""


def _json(value: Any) -> str:
    """Return a value as JSON on one line, in ASCII."""
    return json.dumps(value, allow_nan=False)


def _write_at(descriptor: int, content: bytes, offset: int) -> None:
    rest = memoryview(content)
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count


def _target(given: pathlib.Path) -> tuple[pathlib.Path, str]:
    """Return the path of the run file with links resolved, and whether its directory was made, in words.

    Raises:
        ValueError: there is no such directory and none can be made, or something other than a regular file is there.
    """
    try:
        path = given.resolve()
        made = folders.make(path.parent)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise ValueError(f"--report {given}: {_reason(error)}") from None
    _check_replaceable(path, given)
    return path, made


def _check_replaceable(path: pathlib.Path, given: pathlib.Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"--report {given}: {_reason(error)}") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"--report {given}: this is {_kind(mode)}; a run file must be a regular file")
    if not os.access(path, os.W_OK):
        raise ValueError(f"--report {given}: the file exists and is not writable")


def _kind(mode: int) -> str:
    kinds = [
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISLNK, "a link"),
    ]
    return next((name for test, name in kinds if test(mode)), "a device")


def _open(partial: pathlib.Path, given: pathlib.Path) -> int:
    """Open and lock the journal's file, and empty it.

    Raises:
        ValueError: it cannot be created, is no regular file, or another run writes it.
    """
    # Without O_NONBLOCK, opening a named pipe would wait for its reader.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(partial, flags, 0o666)
    except OSError as error:
        raise ValueError(f"--report {given}: cannot write {partial}: {_reason(error)}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"--report {given}: {partial} is {_kind(status.st_mode)}, not a regular file")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(partial, status):
            # Between open and flock the other run completed its journal: what is locked is its run file.
            raise BlockingIOError
        os.ftruncate(descriptor, 0)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"--report {given}: another run is writing {partial}; use another file") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(path: pathlib.Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.lstat(), status)
    except FileNotFoundError:
        return False


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
