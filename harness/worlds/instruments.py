"""What looks at the case that a rank runs, and writes down what it saw: the tape of a case, the branches that it takes.

An instrument is a function ``(folder, rank, job) -> context manager``. A rank enters the context around the function of
each case; without an instrument, nothing is imported and nothing runs. The environment chooses it, because ranks are
forked by a server that has the environment of the controller and of nobody else.
"""

import contextlib
import importlib
import os
import pathlib
from collections.abc import Callable, Iterator

from shardproof.harness.worlds.jobs import Job

Instrument = Callable[[pathlib.Path, int, Job], contextlib.AbstractContextManager[None]]

#: The environment variable with the instruments of a run, as "module:function" separated by commas.
VARIABLE = "SHARDPROOF_INSTRUMENTS"
#: The environment variable with the folder in which instruments leave their files.
FOLDER = "SHARDPROOF_INSTRUMENTS_FOLDER"


def environment(folder: str | os.PathLike[str], *instruments: str) -> dict[str, str]:
    """The variables by which a run has instruments.

    Args:
        folder: an existing folder, in which each rank writes files of its own.
        instruments: "module:function" each; ranks import them.
    """
    return {VARIABLE: ",".join(instruments), FOLDER: str(pathlib.Path(folder).absolute())}


@contextlib.contextmanager
def attached(rank: int, job: Job) -> Iterator[None]:
    """Run the block with the instruments that the environment names."""
    with contextlib.ExitStack() as stack:
        for name in filter(None, os.environ.get(VARIABLE, "").split(",")):
            stack.enter_context(_load(name)(pathlib.Path(os.environ[FOLDER]), rank, job))
        yield


def _load(name: str) -> Instrument:
    module, _, function = name.partition(":")
    instrument: Instrument = getattr(importlib.import_module(module), function)
    return instrument
