"""Dataclasses as files of JSON: how they are written, read and described, whatever they have.

:func:`encode` makes JSON values of dataclasses, :func:`decode` reads them back or says in one line which field is
wrong, and :func:`describe` makes their JSON Schema.

A field without a default must be in a file. ``says`` with a default makes an optional field, which is left out where
it has its default; so is every field that is added to a version that has files already. ``written`` makes one that
every writer writes and that the schema requires, and without which a file is still read. Fields that are not known are
ignored: a later writer may add some. The decoder checks types, bounds and the members of enums. What else the schema
demands, such as names of device types, concerns writers alone.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, TypeVar

T = TypeVar("T")

Number = Annotated[float, ("type", ("number", "string")), ("pattern", "^(nan|-?inf)$")]
"""A number, or one of the strings "nan", "inf" and "-inf": JSON has no such numbers, and diverging runs have them."""


ASIDE = {"is_aside": True}
"""The metadata of a field that is in no file."""


def says(text: str, *, default: Any = dataclasses.MISSING, **metadata: bool) -> Any:
    """Make a field of a dataclass: its description in the schema, and its value where it is missing or null.

    A field without a default must be there, and null is a value of it. One is written even with its default if
    ``is_written`` is set, and the schema requires it as well if ``is_required`` is.
    """
    kind = {"default_factory": dict} if default == {} else {"default": default}
    return field(**kind, metadata={"says": text, **metadata})


def written(text: str, *, default: Any) -> Any:
    """Make a field with a default that is always written, and that the schema requires."""
    return says(text, default=default, is_written=True, is_required=True)


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(says, written))
def described(*, frozen: bool = True) -> Callable[[type[T]], type[T]]:
    """Make a dataclass of fields that :func:`says` and :func:`written` make; they are given by name."""
    return dataclass(kw_only=True, frozen=frozen)


# Encoding: dataclasses to JSON values.

_PLAIN = frozenset({str, int, bool, type(None)})


def encode(value: Any) -> Any:
    """Return a dataclass, or data that contain some, as plain JSON values.

    Numbers that JSON lacks become the strings "nan", "inf" and "-inf"; any other object becomes its name or its
    representation.
    """
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {}
        for one in _fields_of(type(value)):  # fast: a training waits while many lines are encoded
            its = getattr(value, one.name)
            if its is one.default or (told := encode(its)) == one.default:
                continue
            found[one.name] = told
        return found
    if isinstance(value, Mapping):
        return {str(key): encode(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    return getattr(value, "__qualname__", None) or repr(value)


def mapped(value: Any, change: Callable[[str, str], str], where: str = "") -> Any:
    """Return JSON values with each string, keys too, as ``change`` makes it of the string and its path in the file."""
    if isinstance(value, str):
        return change(value, where)
    if isinstance(value, Mapping):
        places = {key: _inside(where, key) for key in value}
        return {change(key, f"a key of {where}"): mapped(value[key], change, places[key]) for key in value}
    return [mapped(one, change, f"{where}[{i}]") for i, one in enumerate(value)] if isinstance(value, list) else value


# Decoding: JSON values to dataclasses.

_KINDS: dict[type, str] = {
    str: "a string", int: "an integer", float: "a number", bool: "true or false", list: "a list", dict: "an object",
}  # fmt: skip
_NOT_FINITE = ("nan", "inf", "-inf")
_MOST_INTEGER = 1 << 64
_WHOLE = "the file"  # the place that a message names if the error is in no field
_SHOWN = 80  # the most characters of a wrong value in a message, which must stay one line

_ALWAYS = object()  # the default of a field that is always written
_UNIONS = (types.UnionType, typing.Union)  # all of them with None

_Read = Callable[[object, str], Any]


class RecordError(ValueError):
    """A file violates the schema or is no such file. The message is one line, with the field and its value."""


def missing(name: str, where: str = "") -> RecordError:
    """Make the error of an object, at a path in the file, without a field that must be there."""
    return RecordError(f"{where or _WHOLE}: the field {name!r} is missing")


@dataclass(frozen=True)
class _Field:
    """A field of a dataclass that is in the file."""

    name: str
    hint: Any
    says: str  # the description
    default: Any  # the default as JSON, with which it is left out; a field that is always written has none
    is_demanded: bool  # whether it must be there when it is read
    is_required: bool  # whether the schema requires it
    read: _Read  # converts its JSON value, given the value and its path in the file


@functools.cache
def _fields_of(cls: Any) -> list[_Field]:
    hints = typing.get_type_hints(cls, include_extras=True)
    found = []
    for one in dataclasses.fields(cls):
        if ASIDE.keys() <= one.metadata.keys():
            continue
        default = {} if one.default_factory is dict else one.default
        is_demanded = default is dataclasses.MISSING
        is_required = is_demanded or "is_required" in one.metadata
        default = _ALWAYS if is_demanded or "is_written" in one.metadata else encode(default)
        hint, text = hints[one.name], one.metadata.get("says", "")
        found.append(_Field(one.name, hint, text, default, is_demanded, is_required, _reader(hint)))
    return found


def decode(cls: Callable[..., T], data: object, where: str = "") -> T:
    """Read a dataclass from a JSON object, whose path in the file, for messages, is empty for the whole file.

    Raises:
        RecordError: the data violate the schema.
    """
    values: Mapping[str, Any] = kind_of(data, dict, where or _WHOLE)
    prefix = f"{where}." if where else ""
    found = {}
    for one in _fields_of(cls):
        value = values.get(one.name)
        if value is not None or (one.is_demanded and one.name in values):
            found[one.name] = one.read(value, prefix + one.name)
        elif one.is_demanded:
            raise missing(one.name, where)
    return cls(**found)


def _reader(hint: Any) -> _Read:
    """Return what reads values of a type: it takes a value and its path, and raises a RecordError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint == Number:
        return lambda value, where: kind_of(value, float, where)
    if origin is Annotated:
        return _bounded(_reader(arguments[0]), dict(hint.__metadata__))
    if origin in _UNIONS:
        return _reader(arguments[0])
    if origin is Sequence:
        return functools.partial(_sequence, _reader(arguments[0]))
    if origin is Mapping:
        return functools.partial(_mapping, _reader(arguments[1]))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return functools.partial(decode, hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return functools.partial(_member, hint)
    if hint is float:
        return _finite
    return lambda value, where: value if hint is Any else kind_of(value, hint, where)


def _finite(value: object, where: str) -> float:
    found = kind_of(value, float, where)
    if not math.isfinite(found):
        raise RecordError(f"{where}: {shown(value)} is not a finite number")
    return found


def _sequence(read: _Read, value: object, where: str) -> tuple[Any, ...]:
    elements: list[object] = kind_of(value, list, where)
    return tuple([read(element, f"{where}[{i}]") for i, element in enumerate(elements)])


def _mapping(read: _Read, value: object, where: str) -> dict[str, Any]:
    values: dict[str, object] = kind_of(value, dict, where)
    return {key: read(part, _inside(where, key)) for key, part in values.items()}


def _inside(where: str, key: str) -> str:
    """Return the path of a value in an object; it is made for each value, and must stay short."""
    short = key if len(key) <= _SHOWN else f"{key[:_SHOWN]}..."
    return f"{where}.{short}" if where else short


def _member(kind: type[Enum], value: object, where: str) -> Enum:
    try:
        return kind(kind_of(value, str, where))
    except RecordError:
        raise
    except ValueError:
        raise RecordError(f"{where}: {shown(value)} is not one of {', '.join(one.value for one in kind)}") from None


#: The bounds of a value, or of how long it is: whether one is kept, and what is said of one that is not.
_RULES: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (lambda value, bound: value >= bound, "{value} is less than {bound}"),
    "maximum": (lambda value, bound: value <= bound, "{value} is more than {bound}"),
    "minItems": (lambda value, bound: len(value) >= bound, "it is empty"),
    "maxItems": (lambda value, bound: len(value) <= bound, "it has more than {bound} elements"),
    "enum": (lambda value, bound: value in bound, "{value} is not one of {bound}"),
    "maxLength": (lambda value, bound: len(value) <= bound, "it has more than {bound} characters"),
}


def _bounded(read: _Read, rule: Mapping[str, Any]) -> _Read:
    bounds = [(*_RULES[name], bound) for name, bound in rule.items() if name in _RULES]

    def read_bounded(value: object, where: str) -> Any:
        found = read(value, where)
        for is_kept, text, bound in bounds:
            if not is_kept(found, bound):
                raise RecordError(f"{where}: {text.format(value=shown(found), bound=shown(bound))}")
        return found

    return read_bounded if bounds else read


def shown(value: object) -> str:
    """Format a value as one short line, for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def kind_of(value: object, kind: type[T], where: str) -> T:
    """Check that a JSON value is a str, int, float, bool, list or dict, and return it; ``where`` is for the message.

    A bool is not an integer, and an integer has at most 64 bits. A float, which is returned as one, may be written as
    an integer, or as one of the strings of :data:`Number`.

    Raises:
        RecordError: the value has another type.
    """
    if kind is float and (type(value) is int or value in _NOT_FINITE):
        try:
            return float(value)  # type: ignore[return-value]
        except OverflowError:  # an integer of 400 digits fits no float and is rejected below
            pass
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        if kind is int and not -_MOST_INTEGER <= value < _MOST_INTEGER:  # type: ignore[operator]
            raise RecordError(f"{where}: {shown(value)} has more than 64 bits")
        return value
    raise RecordError(f"{where}: {shown(value)} is not {_KINDS[kind]}")


def check_version(data: object, name: str, version: int) -> None:
    """Check the field with the version of a file's format.

    Raises:
        RecordError: there is none, or it is another version.
    """
    if name not in kind_of(data, dict, _WHOLE):
        raise missing(name)
    if (found := kind_of(data[name], int, name)) != version:  # type: ignore[index]
        raise RecordError(f"{name}: {found} is not supported; supported: {version}")


# Describing: dataclasses to JSON Schema.

_SCHEMA_TYPES: dict[Any, dict[str, Any]] = {
    str: {"type": "string"}, int: {"type": "integer"}, float: {"type": "number"}, bool: {"type": "boolean"}, Any: {},
}  # fmt: skip


def describe(cls: type, classes: dict[type, dict[str, Any]]) -> dict[str, Any]:
    """Describe a dataclass, and add those of its fields to ``classes``."""
    properties = {}
    for one in _fields_of(cls):
        # What is left out where it is None is never null.
        is_left_out = not one.is_required and typing.get_origin(one.hint) in _UNIONS
        hint = typing.get_args(one.hint)[0] if is_left_out else one.hint
        properties[one.name] = _type_of(hint, classes) | {"description": one.says}
    required = [one.name for one in _fields_of(cls) if one.is_required]
    summary = (cls.__doc__ or "").partition("\n")[0]
    return {"description": summary, "type": "object", "required": required, "properties": properties}


def _type_of(hint: Any, classes: dict[type, dict[str, Any]]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _type_of(arguments[0], classes) | dict(hint.__metadata__)
    if origin in _UNIONS:
        found = _type_of(arguments[0], classes)
        return found | {"type": [found["type"], "null"]} if "type" in found else {"anyOf": [found, {"type": "null"}]}
    if origin is Sequence:
        return {"type": "array", "items": _type_of(arguments[0], classes)}
    if origin is Mapping:
        values = _type_of(arguments[1], classes)
        return {"type": "object"} | ({"additionalProperties": values} if values else {})
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if hint not in classes:
            classes[hint] = {}
            classes[hint] = describe(hint, classes)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [one.value for one in hint]}
    return dict(_SCHEMA_TYPES[hint])
