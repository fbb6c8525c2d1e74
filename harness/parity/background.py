"""Saves a run in the background through ``torch.distributed.checkpoint.async_save``, as a training script does.

When it copies and when it writes is up to the case, and not to the threads, so that a case sees what training does in
between.
"""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

from shardproof.harness.parity.rank import Rank
from shardproof.harness.parity.run import Run


class BackgroundSave:
    """A save that has been asked for and is not done yet.

    Args:
        run: what is saved.
        directory: where it is written.
        group: for the collectives of the save alone, which another thread issues; with a backend for the CPU.
        copies_at_once: whether the values are copied before the constructor returns, as is torch's default; otherwise
            by :meth:`copy`, before the optimizer steps, as where a thread copies while the next forward runs.
    """

    def __init__(self, run: Run, directory: pathlib.Path, group: dist.ProcessGroup, *, copies_at_once: bool) -> None:
        self._may_write = threading.Event()
        self._late = None if copies_at_once else _LateStager()
        # What torch takes where a script names no writer of its own, which would copy too.
        self._stager = self._late or _default_stager()
        found: Any = state_dict_saver.async_save(
            run.adapter.checkpoint(),
            storage_writer=_HeldWriter(directory, self._may_write),
            process_group=group,
            async_stager=self._stager,
        )
        # Where the values are copied later, torch 2.9 and newer return a response with two futures.
        self._done: Future[Any] = getattr(found, "upload_completion", found)

    def copy(self) -> None:
        """Copy the values, unless they are copied."""
        if self._late is not None:
            self._late.copy()

    def finish(self) -> None:
        """Write what was copied, and wait until it is written.

        Raises:
            Exception: what the other thread has raised.
        """
        self._may_write.set()
        self._done.result()
        self._stager.close()

    def abandon(self) -> None:
        """Let the other thread end, after an error."""
        self._may_write.set()
        if self._late is not None:
            self._late.abandon()


@contextlib.contextmanager
def saving(rank: Rank, run: Run, directory: pathlib.Path, *, copies_at_once: bool) -> Iterator[BackgroundSave]:
    """Save a run in the background of the context, and wait for that when it ends (collective).

    The world's own groups must have a backend for the CPU.

    Args:
        rank: this rank.
        run: what is saved.
        directory: where it is written.
        copies_at_once: as of :class:`BackgroundSave`.
    """
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    with rank.announcer.passing_over(group):
        save = BackgroundSave(run, directory, group, copies_at_once=copies_at_once)
        try:
            yield save
        except BaseException:
            save.abandon()
            raise
        save.finish()
    dist.destroy_process_group(group)


class _HeldWriter(FileSystemWriter):
    """Writes when it may."""

    def __init__(self, directory: pathlib.Path, may_write: threading.Event) -> None:
        super().__init__(directory)
        self._may_write = may_write

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Wait until the values may be written, and write them."""
        self._may_write.wait()
        return super().write_data(*args, **kwargs)


class _LateStager(AsyncStager):
    """Copies when it is called."""

    def __init__(self) -> None:
        self._copied: Future[Any] = Future()
        self._state: dict[str, Any] | None = None

    def stage(self, state_dict: dict[str, Any]) -> Future[Any]:
        """Return the copies, once they are made."""
        self._state = state_dict
        return self._copied

    def copy(self) -> None:
        """Copy the values of now, as torch's own stager does."""
        if self._state is not None:
            stager = _default_stager()
            self._copied.set_result(stager.stage(self._state))
            stager.close()
            self._state = None

    def synchronize_staging(self) -> None:
        """Wait for nothing: the case copies."""
        return None

    def close(self) -> None:
        """Give nothing back: nothing is kept."""
        return None

    def abandon(self) -> None:
        """Let who waits for the copies fail."""
        if not self._copied.done():
            self._copied.set_exception(RuntimeError("the case failed before the values were copied"))


def _default_stager() -> DefaultStager:
    """What copies where nothing is asked for: at once, into memory that is neither pinned nor shared."""
    return DefaultStager(StagingOptions(False, False, False, False))
