"""Entries of a state: tensors, whose values lie in files, and plain values, by dotted names."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardproof import door
from shardproof.harness.states import boxes, names
from shardproof.harness.states.archives import Archive
from shardproof.harness.states.names import View, Wrapper
from shardproof.harness.states.pickles import Known, Ordered, PickleError, Record
from shardproof.harness.tensors.fingerprints import Box

MOST_ENTRIES = 1 << 20
"""Entries of a state."""

ROOT = "state"
"""The name of the one entry of a file that has no container."""

_MOST_OF_A_TUPLE = 1 << 14


class StoredPart(NamedTuple):
    """A piece of an entry that lies in a file.

    Attributes:
        box: which elements of the full tensor it has.
        load: reads the values now, and raises a BadFile if they cannot be; nothing is kept, and what a large tensor
            has is read from the file when it is used, so that the file must stay as it is until the tensor is freed.
        source: the name of the file within the folder, printable.
    """

    box: Box
    load: Callable[[], torch.Tensor]
    source: str


@dataclass(frozen=True)
class Entry:
    """An entry of a state.

    Attributes:
        name: keys, joined by dots, and list positions as numbers; text of a file, not made printable.
        shape: that of the full tensor; None of an entry that is no tensor.
        dtype: that of the tensor.
        parts: the pieces of a tensor in files, which need not be all of it; several of one box are replicas.
        value: that of an entry that is no tensor, if it is plain; complex numbers are tuples of two, sets are sorted
            tuples, dtypes, devices and paths are text.
        tied: the name of an earlier entry of the same storage, offset, shape and stride.
        unread: why the value of an entry that is no tensor was not read; empty if it was.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    parts: tuple[StoredPart, ...] = ()
    value: Any = None
    tied: str = ""
    unread: str = ""


def entries_of(state: Any, archive: Archive, source: str, prefix: str = "") -> Iterator[Entry]:
    """Yield the entries of what an archive has, in its order.

    Args:
        state: what :meth:`Archive.state` has returned.
        archive: from which the values are read.
        source: the name of its file.
        prefix: precedes all names.

    Raises:
        BadFile: the state is beyond a bound, or a tensor is described wrongly.
    """
    tied: dict[Any, str] = {}
    count = 0
    try:
        for name, leaf in _leaves(state, prefix):
            count += 1
            if count > MOST_ENTRIES:
                raise PickleError(f"it has more than {MOST_ENTRIES} entries")
            yield _entry(name, leaf, archive, source, tied)
    except PickleError as error:
        raise archive.fail(str(error)) from error


def _leaves(state: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield what a state has that is no container, with names, each once: a second of one name has a number."""
    seen: dict[str, int] = {}
    stack = [iter([(prefix, state)])]
    steps = 0
    while stack:
        steps += 1
        if steps > 4 * MOST_ENTRIES:
            raise PickleError(f"it has more than {4 * MOST_ENTRIES} containers and entries")
        name, value = next(stack[-1], (None, None))
        if name is None:
            stack.pop()
        elif (inside := _inside(value)) is not None:
            if len(stack) >= door.MOST_DEPTH:
                raise PickleError(f"lists and dictionaries more than {door.MOST_DEPTH} deep")
            stack.append(_named(name, inside))
        else:
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name} ({seen[name]})") or ROOT, value


def _named(prefix: str, pairs: Any) -> Iterator[tuple[str, Any]]:
    for key, value in pairs:
        text = str(key) if not isinstance(key, (bytes, Record, Known, frozenset)) else repr(plain(key))
        if len(prefix) + len(text) > door.MOST_STRING >> 8:
            raise PickleError("a name of more than 4096 characters")
        yield f"{prefix}.{text}" if prefix else text, value


def _inside(value: Any) -> Any:
    """Return the pairs of a container; None of what is none."""
    if isinstance(value, (dict, Ordered)):
        return value.items()
    if isinstance(value, list) or (type(value) is tuple and not _is_plain(value)):
        return enumerate(value)
    if isinstance(value, Record) and value.kind == "argparse.Namespace":
        return value.fields.items()
    return None


def _is_plain(value: Any) -> bool:
    """Whether a tuple has only plain values and tuples of them, of which there are not many."""
    left, level, depth = _MOST_OF_A_TUPLE, [value], 0
    while level:
        left -= len(level)
        depth += 1
        if left < 0 or depth > door.MOST_DEPTH:
            return False
        if any(isinstance(one, (View, Wrapper, dict, list, Record, bytes)) for one in level):
            return False
        level = [inner for one in level if type(one) is tuple for inner in itertools.islice(one, left + 1)]
    return True


def _entry(name: str, leaf: Any, archive: Archive, source: str, tied: dict[Any, str]) -> Entry:
    if isinstance(leaf, Record) and leaf.kind == "numpy.ndarray":
        leaf = names.array(leaf)
    if isinstance(leaf, bytes):
        leaf = View(leaf, torch.uint8, 0, (len(leaf),), (1,))
    if isinstance(leaf, View):
        box = Box(leaf.shape)
        held, shape, dtype = ([] if leaf.storage is None else [(box, leaf)]), leaf.shape, leaf.dtype
    elif isinstance(leaf, Wrapper):
        held, shape, dtype = boxes.held_by(name, leaf), leaf.shape, leaf.dtype
    else:
        return _value(name, leaf)
    parts = tuple(StoredPart(box, _Load(archive, view), source) for box, view in held)
    key = tuple((box, view) for box, view in held if isinstance(view.storage, names.Storage))
    first = tied.setdefault(key, name) if key else name
    return Entry(name, shape, dtype, parts, tied="" if first == name else first)


@dataclass(frozen=True)
class _Load:
    """What reads the values of a view."""

    archive: Archive
    view: View

    def __call__(self) -> torch.Tensor:
        return self.archive.load(self.view)


def _value(name: str, leaf: Any) -> Entry:
    try:
        return Entry(name, None, None, value=plain(leaf))
    except PickleError as error:
        return Entry(name, None, None, unread=str(error))


def plain(value: Any) -> Any:
    """Return what is shown and compared of a value that is no tensor.

    Raises:
        PickleError: it is not plain.
    """
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        if len(value) > door.MOST_STRING:
            raise PickleError(f"a text of more than {door.MOST_STRING} characters")
        return value
    if isinstance(value, complex):
        return value.real, value.imag
    if isinstance(value, (set, frozenset)):
        return tuple(sorted((plain(one) for one in value), key=repr))
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Known):
        return value.full
    if isinstance(value, Record):
        return _text_of(value)
    raise PickleError(f"a {type(value).__name__}, which is not plain")


def _text_of(record: Record) -> str:
    if all(isinstance(one, (str, int)) or one is None for one in record.args) and record.args:
        texts = [str(one) for one in record.args]
        return "/".join(texts) if record.kind.startswith("pathlib.") else f"{record.kind}({', '.join(texts)})"
    raise PickleError(f"an object of {record.kind}, which is not plain")
