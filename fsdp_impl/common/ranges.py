"""Named ranges for profilers. Where none runs they cost a question: several ranges a unit would add up otherwise."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.profiler import record_function

from fsdp_impl.common.private import profiler_enabled

_NOTHING = nullcontext()


def named(what: str, unit: str) -> AbstractContextManager[Any]:
    """A range around ``what`` happens to ``unit``, if a profiler runs in this thread."""
    return record_function(f"FSDP::{what} ({unit})") if profiler_enabled() else _NOTHING
