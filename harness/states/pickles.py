"""An unpickler that makes data and nothing else: it imports nothing and calls only what a closed table has.

It is not a subclass of Python's unpickler, which hashes keys of any depth on the stack of C, reserves memory for
whichever place in its memo a file names, and sets attributes of any object on its stack, functions and classes too.
This one reads the opcodes that torch writes. A pickle has at most :data:`MOST_BYTES`, makes at most :data:`MOST_MADE`
objects and keeps as many in its memo, so that a hostile one takes less than 3 GB, and an honest one about 40 times its
bytes.
"""

import struct
from collections.abc import Callable
from typing import Any

MOST_BYTES = 1 << 26
"""Bytes of a pickle; the metadata of a checkpoint have about 100 for each part of a tensor that a rank has written."""

MOST_MADE = 1 << 22
"""Containers, records, strings and long numbers of a pickle, and objects in its memo."""

_MOST_SHOWN = 200


class PickleError(ValueError):
    """A pickle cannot be read or is not allowed. The message is one line, which does not name the file."""


class UnknownName(PickleError):
    """A pickle asks for a name that the table does not have, as that of a user's class."""


class Known:
    """A name of the table: the class or function of torch for which it stands is never imported.

    Attributes:
        full: module and name, joined by a dot.
        call: makes data of arguments; None of a name that can only be passed on.
    """

    __slots__ = ("call", "full")

    def __init__(self, full: str, call: Callable[..., Any] | None = None) -> None:
        self.full = full
        self.call = call


class Record:
    """An object of a class of the table, as inert data.

    Attributes:
        kind: the full name of its class.
        args: the arguments with which it was made.
        fields: its attributes, by name.
        state: its state, if it is something else than attributes.
    """

    __slots__ = ("args", "fields", "kind", "state")

    def __init__(self, kind: str, args: tuple[Any, ...] = ()) -> None:
        self.kind = kind
        self.args = args
        self.fields: dict[str, Any] = {}
        self.state: Any = None

    def get(self, name: str) -> Any:
        """Return an attribute, or None."""
        return self.fields.get(name)

    def build(self, state: object) -> None:
        """Set attributes, as a dictionary or as two for ``__dict__`` and ``__slots__``, or the state."""
        parts: tuple[Any, ...] = state if type(state) is tuple and len(state) == 2 else (state,)
        if all(part is None or isinstance(part, dict) for part in parts):
            for part in parts:
                self.fields |= {name: value for name, value in (part or {}).items() if isinstance(name, str)}
        else:
            self.state = state


class Ordered(dict[Any, Any]):
    """A dictionary whose class may have attributes, as OrderedDict; they are dropped."""


def loads(data: bytes | memoryview, find: Callable[[str], Any], persistent: Callable[[Any], Any]) -> Any:
    """Unpickle data.

    Args:
        data: the pickle; what follows its end is ignored.
        find: returns what stands for a full name: a :class:`Known` or a constant; raises a PickleError of others.
        persistent: returns what stands for a persistent id.

    Raises:
        PickleError: the pickle is cut off, damaged, beyond a bound, or has what is not allowed.
    """
    if len(data) > MOST_BYTES:
        raise PickleError(f"a pickle of more than {MOST_BYTES >> 20} MiB")
    try:
        return _Machine(bytes(data), find, persistent).run()
    except PickleError:
        raise
    except (IndexError, KeyError, struct.error, UnicodeError, OverflowError, TypeError, ValueError) as error:
        raise PickleError(f"its pickle is cut off or damaged ({type(error).__name__})") from error
    except RecursionError:
        raise PickleError("its pickle is nested too deeply") from None


_PLAIN_KEYS = (str, int, float, bool, type(None), bytes, Record)


class _Machine:
    """A machine with a stack and a memo; each opcode is a method."""

    def __init__(self, data: bytes, find: Callable[[str], Any], persistent: Callable[[Any], Any]) -> None:
        self._data = data
        self._at = 0
        self._find = find
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._made = 0

    def run(self) -> Any:
        data, stack, memo, steps = self._data, self._stack, self._memo, _STEPS
        while True:
            at = self._at
            code = data[at]
            if code == 0x6A:  # LONG_BINGET, GET and BININT1: half of all
                self._at = at + 5
                stack.append(memo[int.from_bytes(data[at + 1 : at + 5], "little")])
            elif code == 0x68:
                self._at = at + 2
                stack.append(memo[data[at + 1]])
            elif code == 0x4B:
                self._at = at + 2
                stack.append(data[at + 1])
            elif code == 0x2E:  # STOP
                break
            elif code in steps:
                self._at = at + 1
                steps[code](self)
            else:
                raise PickleError(f"its pickle has the opcode {code:#04x}, which torch does not write: refused")
        if len(self._stack) != 1 or self._marks:
            raise PickleError("its pickle is damaged")
        return self._stack.pop()

    # Reading

    def _take(self, size: int) -> bytes:
        start = self._at
        self._at = start + size
        if self._at > len(self._data):
            raise PickleError("its pickle is cut off")
        return self._data[start : self._at]

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        return self._take(end + 1 - self._at)[:-1].decode()

    def _new(self, value: Any) -> None:
        self._made += 1
        if self._made > MOST_MADE:
            raise PickleError(f"its pickle makes more than {MOST_MADE} objects")
        self._stack.append(value)

    def _popped(self) -> list[Any]:
        """Take what lies above the last mark."""
        mark = self._marks.pop()
        found = self._stack[mark:]
        del self._stack[mark:]
        return found

    # Values

    def skip(self, size: int) -> None:
        self._take(size)

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def unsigned(self) -> None:
        self._stack.append(self._number(2))

    def signed(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def long(self) -> None:
        self._new(int.from_bytes(self._take(self._number(1)), "little", signed=True))

    def float(self) -> None:
        self._new(struct.unpack(">d", self._take(8))[0])

    def text(self, size: int) -> None:
        self._new(self._take(self._number(size)).decode("utf-8", "surrogatepass"))

    def bytes(self, size: int) -> None:
        self._new(self._take(self._number(size)))

    def string(self, size: int) -> None:  # of Python 2
        self._new(self._take(self._number(size)).decode("latin1"))

    # Containers

    def empty(self, make: Callable[[], Any]) -> None:
        self._new(make())

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def tuple(self) -> None:
        self._new(tuple(self._popped()))

    def tuple_of(self, count: int) -> None:
        found = tuple(self._stack[-count:])
        if len(found) < count:
            raise PickleError("its pickle is damaged")
        del self._stack[-count:]
        self._new(found)

    def append(self) -> None:
        value = self._stack.pop()
        self._extend([value])

    def appends(self) -> None:
        self._extend(self._popped())

    def _extend(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise PickleError("its pickle appends to something that is no list: refused")
        self._stack[-1].extend(values)

    def item(self) -> None:
        value = self._stack.pop()
        key = self._stack.pop()
        self._update([key, value])

    def items(self) -> None:
        self._update(self._popped())

    def _update(self, pairs: list[Any]) -> None:
        owner = self._stack[-1]
        if not isinstance(owner, dict) or len(pairs) % 2:
            raise PickleError("its pickle sets an item of something that is no dictionary: refused")
        for key in pairs[::2]:
            hashable(key)
        owner.update(zip(pairs[::2], pairs[1::2], strict=True))

    def add(self) -> None:
        values = self._popped()
        for value in values:
            hashable(value)
        if type(self._stack[-1]) is not set:
            raise PickleError("its pickle adds to something that is no set: refused")
        self._stack[-1].update(values)

    def frozen(self) -> None:
        self._new(frozenset(map(hashable, self._popped())))

    # Memo

    def put(self, size: int) -> None:
        self._keep(self._number(size))

    def memoize(self) -> None:
        self._keep(len(self._memo))

    def _keep(self, place: int) -> None:
        self._memo[place] = self._stack[-1]
        if len(self._memo) > MOST_MADE:
            raise PickleError(f"its pickle keeps more than {MOST_MADE} objects")

    # Names and objects

    def name(self) -> None:
        self._named(self._line(), self._line())

    def stack_name(self) -> None:
        name = self._stack.pop()
        self._named(self._stack.pop(), name)

    def _named(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise PickleError("its pickle asks for a name that is no text: refused, nothing was executed")
        self._stack.append(self._find(f"{module}.{name}"))

    def reduce(self) -> None:
        args = self._stack.pop()
        function = self._stack.pop()
        self._call(function, args)

    def new_with_names(self) -> None:
        names, args, function = self._stack.pop(), self._stack.pop(), self._stack.pop()
        if names:
            raise PickleError("its pickle makes an object from named arguments: refused, nothing was executed")
        self._call(function, args)

    def _call(self, function: Any, args: Any) -> None:
        if type(function) is not Known or function.call is None or type(args) is not tuple:
            said = function.full if type(function) is Known else f"a {type(function).__name__}"
            raise PickleError(
                f"it calls {said[:_MOST_SHOWN]}, which makes no state of torch: refused, nothing was executed"
            )
        self._new(function.call(*args))

    def build(self) -> None:
        state = self._stack.pop()
        owner = self._stack[-1]
        if isinstance(owner, Record):
            owner.build(state)
        elif type(owner) is not Ordered:
            said = owner.full if type(owner) is Known else f"a {type(owner).__name__}"
            raise PickleError(f"it sets attributes of {said[:_MOST_SHOWN]}: refused, nothing was executed")

    def persistent(self) -> None:
        self._new(self._persistent(self._stack.pop()))

    def pop(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def pop_mark(self) -> None:
        self._popped()


def hashable(key: Any) -> Any:
    """Return a key if it is plain, or a tuple of plain values: others may be nested as deep as a file likes."""
    if isinstance(key, _PLAIN_KEYS) or (type(key) is tuple and all(isinstance(one, _PLAIN_KEYS) for one in key)):
        return key
    if isinstance(key, frozenset | Known):
        return key
    raise PickleError(f"its pickle has a {type(key).__name__} as a key: refused")


_M = _Machine
_STEPS: dict[int, Callable[[_Machine], None]] = {
    0x80: lambda m: m.skip(1),  # PROTO
    0x95: lambda m: m.skip(8),  # FRAME
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): _M.signed,
    ord("M"): _M.unsigned,
    0x8A: _M.long,
    ord("G"): _M.float,
    ord("X"): lambda m: m.text(4),
    0x8C: lambda m: m.text(1),
    0x8D: lambda m: m.text(8),
    ord("B"): lambda m: m.bytes(4),
    ord("C"): lambda m: m.bytes(1),
    0x8E: lambda m: m.bytes(8),
    0x96: lambda m: m.bytes(8),  # a bytearray
    ord("T"): lambda m: m.string(4),
    ord("U"): lambda m: m.string(1),
    ord("]"): lambda m: m.empty(list),
    ord("}"): lambda m: m.empty(dict),
    ord(")"): lambda m: m.push(()),
    0x8F: lambda m: m.empty(set),
    ord("("): _M.mark,
    ord("t"): _M.tuple,
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("a"): _M.append,
    ord("e"): _M.appends,
    ord("s"): _M.item,
    ord("u"): _M.items,
    0x90: _M.add,
    0x91: _M.frozen,
    ord("q"): lambda m: m.put(1),
    ord("r"): lambda m: m.put(4),
    0x94: _M.memoize,
    ord("c"): _M.name,
    0x93: _M.stack_name,
    ord("R"): _M.reduce,
    0x81: _M.reduce,  # NEWOBJ
    0x92: _M.new_with_names,
    ord("b"): _M.build,
    ord("Q"): _M.persistent,
    ord("0"): _M.pop,
    ord("1"): _M.pop_mark,
}
