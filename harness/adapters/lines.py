"""Makes one line of limited length of whatever a user's class holds or raises. Imports no torch."""

from __future__ import annotations

_MOST_CHARACTERS = 200


def one_line(text: str) -> str:
    """Return ``text`` in one line, cut off where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."


def line_of(value: object) -> str:
    """Return a value's representation in one line, or its type where it has none."""
    try:
        return one_line(repr(value))
    except Exception:
        return f"an object of {type(value).__name__}"


def line_of_error(error: BaseException) -> str:
    """Return an error's type and text in one line."""
    try:
        text = one_line(str(error))
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
