"""Typed reading of JSON objects: each getter returns what the schema asks for or names the field and value at fault."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_KINDS: dict[type, str] = {str: "a string", int: "an integer", float: "a number", list: "a list", dict: "an object"}
_NOT_FINITE = ("nan", "inf", "-inf")
_WHOLE = "the run file"  # where a message points that is about no field of it
_SHOWN = 80  # characters of an offending value that a one-line message shows


class RecordError(ValueError):
    """A run file does not follow the schema. The message is one line that names the field and its value."""


def shown(value: object) -> str:
    """The value as one short line, for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def kind_of(value: object, kind: type[T], where: str) -> T:
    """Return `value` if it is of the JSON kind `kind`. A bool is no integer.

    A number may be an integer, or one of the names "nan", "inf" and "-inf": JSON has no numbers for them, and a
    run that diverges has them for losses.

    Raises RecordError, naming `where`, if it is not.
    """
    if kind is float and (type(value) is int or value in _NOT_FINITE):
        with suppress(OverflowError):  # an integer of 400 digits fits no float, and so is no number here
            value = float(value)
    if isinstance(value, kind) and not isinstance(value, bool):
        return value
    raise RecordError(f"{where}: {shown(value)} is not {_KINDS[kind]}")


class Fields:
    """One JSON object of a run file and the path that leads to it, for the messages.

    Fields that the schema does not name are left alone: a newer writer may add some without a new schema version.
    Raises RecordError if `data` is not an object.
    """

    def __init__(self, data: object, where: str) -> None:
        self.data: Mapping[str, Any] = kind_of(data, dict, where or _WHOLE)
        self.where = where

    def path(self, name: str) -> str:
        """Where the field `name` stands in the file."""
        return f"{self.where}.{name}" if self.where else name

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.data.get(name) is not None

    def required(self, name: str, kind: type[T]) -> T:
        """The field's value. Raises RecordError if it is missing or of another kind."""
        if name not in self.data:
            raise RecordError(f"{self.where or _WHOLE}: the field {name!r} is missing")
        return kind_of(self.data[name], kind, self.path(name))

    def optional(self, name: str, default: T) -> T:
        """The field's value, or `default` where it is missing or null. Raises RecordError for a kind other than the
        default's.
        """
        return kind_of(self.data[name], type(default), self.path(name)) if self.has(name) else default

    def maybe(self, name: str, kind: type[T]) -> T | None:
        """The field's value, or None where it is missing or null. Raises RecordError for another kind."""
        return kind_of(self.data[name], kind, self.path(name)) if self.has(name) else None

    def items(self, name: str, read: Callable[[object, str], T]) -> tuple[T, ...]:
        """The field's list, each element read by `read(element, where)`; empty where the field is missing or null.

        Raises RecordError if it is no list or an element does not read.
        """
        where = self.path(name)
        elements: list[object] = self.optional(name, [])
        return tuple(read(element, f"{where}[{i}]") for i, element in enumerate(elements))

    def mapping(self, name: str, read: Callable[[object, str], T]) -> dict[str, T]:
        """The field's object, each value read by `read(value, where)`; empty where the field is missing or null.

        Raises RecordError if it is no object or a value does not read.
        """
        where = self.path(name)
        values: dict[str, object] = self.optional(name, {})
        return {key: read(value, f"{where}.{key}") for key, value in values.items()}


def text(value: object, where: str) -> str:
    """Read a string. Raises RecordError for anything else."""
    return kind_of(value, str, where)


def integer(value: object, where: str) -> int:
    """Read an integer. Raises RecordError for anything else, booleans included."""
    return kind_of(value, int, where)


def number(value: object, where: str) -> float:
    """Read a number, which may be the name of one that is not finite. Raises RecordError for anything else."""
    return kind_of(value, float, where)
