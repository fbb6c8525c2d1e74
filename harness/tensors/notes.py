"""What functions of the harness tell of a case, where somebody listens: what was drawn, counted, trained and checked.

A recorder of the case (``reproducing``) sees calls of torch by itself; here it hears what they are made for. It is in
:data:`LISTENERS` for as long as it records. Outside of a recording the list is empty, nothing is kept, and a note is a
look at the list; the values are those that the function has anyway.
"""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

Listener = Callable[[str, dict[str, Any]], None]

#: Called with the word and the values of each note. A listener reads them, and lets go of what is large.
LISTENERS: list[Listener] = []
_NOTHING = contextlib.nullcontext()


def tell(what: str, /, **values: Any) -> None:
    """Tell what has just happened, or is about to."""
    for listener in LISTENERS:
        listener(what, values)


def during(what: str, /, **values: Any) -> contextlib.AbstractContextManager[None]:
    """Tell that a block begins and, with the word "end", that it has ended, also if it raises an error."""
    return _Block(what, values) if LISTENERS else _NOTHING


class _Block(contextlib.AbstractContextManager[None]):
    def __init__(self, what: str, values: dict[str, Any]) -> None:
        self._what, self._values = what, values

    def __enter__(self) -> None:
        tell(self._what, **self._values)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tell("end", what=self._what)
