"""Typed access to JSON objects: each getter returns a value of the expected type or raises an error with the field."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_KINDS: dict[type, str] = {
    str: "a string", int: "an integer", float: "a number", bool: "true or false", list: "a list", dict: "an object",
}  # fmt: skip
_NOT_FINITE = ("nan", "inf", "-inf")
_WHOLE = "the run file"  # the place that a message names if the error is in no field
_SHOWN = 80  # the most characters of a wrong value in a message, which must stay one line


class RecordError(ValueError):
    """A run file violates the schema. The message is one line with the field and its value."""


def shown(value: object) -> str:
    """Format a value as one short line, for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def kind_of(value: object, kind: type[T], where: str) -> T:
    """Check the type of a JSON value.

    Args:
        value: the value.
        kind: the expected type, one of str, int, float, bool, list and dict. A bool is not an integer. A float may be
            written as an integer, or as one of the strings "nan", "inf" and "-inf": JSON has no such numbers, and the
            losses of a diverging run have these values.
        where: the path of the value in the file, for the message.

    Returns:
        The value; a float if `kind` is float.

    Raises:
        RecordError: the value has another type.
    """
    if kind is float and (type(value) is int or value in _NOT_FINITE):
        with suppress(OverflowError):  # an integer of 400 digits fits no float and is rejected below
            value = float(value)
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise RecordError(f"{where}: {shown(value)} is not {_KINDS[kind]}")


class Fields:
    """One JSON object of a run file, with its path in the file for messages.

    Unknown fields are ignored: a newer writer may add fields without a new schema version.

    Args:
        data: the object.
        where: the path of the object in the file; empty for the whole file.

    Raises:
        RecordError: `data` is not an object.
    """

    def __init__(self, data: object, where: str) -> None:
        self.data: Mapping[str, Any] = kind_of(data, dict, where or _WHOLE)
        self.where = where

    def path(self, name: str) -> str:
        """The path of the field `name` in the file."""
        return f"{self.where}.{name}" if self.where else name

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self.data.get(name) is not None

    def required(self, name: str, kind: type[T]) -> T:
        """Read a field that must be present.

        Args:
            name: the name of the field.
            kind: the expected type, as for :func:`kind_of`.

        Returns:
            The value.

        Raises:
            RecordError: the field is missing or has another type.
        """
        if name not in self.data:
            raise RecordError(f"{self.where or _WHOLE}: the field {name!r} is missing")
        return kind_of(self.data[name], kind, self.path(name))

    def optional(self, name: str, default: T) -> T:
        """Read a field that has a default.

        Args:
            name: the name of the field.
            default: the value of a missing or null field; the field must have the same type.

        Returns:
            The value, or the default.

        Raises:
            RecordError: the field has another type.
        """
        return kind_of(self.data[name], type(default), self.path(name)) if self.has(name) else default

    def maybe(self, name: str, kind: type[T]) -> T | None:
        """Read an optional field.

        Args:
            name: the name of the field.
            kind: the expected type, as for :func:`kind_of`.

        Returns:
            The value, or None if the field is missing or null.

        Raises:
            RecordError: the field has another type.
        """
        return kind_of(self.data[name], kind, self.path(name)) if self.has(name) else None

    def items(self, name: str, read: Callable[[object, str], T]) -> tuple[T, ...]:
        """Read an optional list.

        Args:
            name: the name of the field.
            read: converts one element, given the element and its path.

        Returns:
            The converted elements; empty if the field is missing or null.

        Raises:
            RecordError: the field is not a list, or `read` rejects an element.
        """
        where = self.path(name)
        elements: list[object] = self.optional(name, [])
        return tuple(read(element, f"{where}[{i}]") for i, element in enumerate(elements))

    def mapping(self, name: str, read: Callable[[object, str], T]) -> dict[str, T]:
        """Read an optional object.

        Args:
            name: the name of the field.
            read: converts one value, given the value and its path.

        Returns:
            The converted values by key; empty if the field is missing or null.

        Raises:
            RecordError: the field is not an object, or `read` rejects a value.
        """
        where = self.path(name)
        values: dict[str, object] = self.optional(name, {})
        return {key: read(value, f"{where}.{key}") for key, value in values.items()}


def text(value: object, where: str) -> str:
    """Read a string.

    Raises:
        RecordError: the value is not a string.
    """
    return kind_of(value, str, where)


def integer(value: object, where: str) -> int:
    """Read an integer.

    Raises:
        RecordError: the value is not an integer; a boolean is not one.
    """
    return kind_of(value, int, where)


def number(value: object, where: str) -> float:
    """Read a number, finite or not.

    Raises:
        RecordError: the value is neither a number nor one of "nan", "inf" and "-inf".
    """
    return kind_of(value, float, where)
