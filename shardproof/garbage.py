"""The garbage collector of a process that imports torch, kept from walking over what the imports make.

Without it, a process that collects one file of the suites takes two thirds of the processor's time.
"""

import atexit
import contextlib
import functools
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def resting() -> Iterator[None]:
    """Stop the collector until the context ends: while modules are imported, objects are made and stay.

    Each collection then walks over more of them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@functools.cache
def retire_at_exit() -> None:
    """Let the collections at the end of the process, of all that modules hold, find nothing; the system frees it.

    Not for a process with a user's script, whose objects may count on them.
    """
    atexit.register(gc.freeze)
