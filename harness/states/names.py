"""The closed table of names for which a pickle of torch's state may ask, and the data that stand for their objects.

No class or function of the file is imported: a tensor becomes a :class:`View` of a storage, an object of torch a
:class:`Record`. Sparse, nested and quantized tensors become dictionaries of the tensors and numbers that they have.
"""

import functools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

from shardproof.harness.states.pickles import Known, Ordered, PickleError, Record, UnknownName

_MOST_DIMS = 64
_MOST_POSITION = 1 << 62
_MOST_SHOWN = 200

#: A tensor with more elements than its storage, as one that was expanded, has at most so many.
_MOST_EXPANDED = 1 << 24

DTYPES: Mapping[str, torch.dtype] = {
    name: value for name, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)
}
"""All dtypes by their names in torch, old names too."""

#: Quantized tensors are read as the integers that they have; a reader of bits does not take other dtypes.
_READ_AS = {
    "qint8": torch.int8, "quint8": torch.uint8, "qint32": torch.int32, "quint4x2": torch.uint8, "quint2x4": torch.uint8,
}  # fmt: skip

_STORAGES: Mapping[str, str] = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexDouble": "complex128",
    "ComplexFloat": "complex64", "QInt8": "qint8", "QUInt8": "quint8", "QInt32": "qint32", "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4",
}  # fmt: skip


class Storage(NamedTuple):
    """A storage in a file.

    Attributes:
        key: its name within the file.
        dtype: that of its elements; uint8 if it has bytes.
        size: its bytes.
        start: where its member of the archive begins, counted from the beginning of the archive.
    """

    key: str
    dtype: torch.dtype
    size: int
    start: int


class View(NamedTuple):
    """A tensor of a storage. It is checked that all elements lie within the storage.

    Attributes:
        storage: where its elements lie; the elements, if they lie in the pickle; None of a tensor on ``meta``.
        offset: elements before its first.
        bits: whether its conjugate (``conj``) or its negative (``neg``) is meant, as ``torch.conj`` leaves it.
    """

    storage: Storage | bytes | None
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    bits: frozenset[str] = frozenset()


class StorageKind(NamedTuple):
    """A class of storages, by the dtype of their elements."""

    dtype: torch.dtype


class Wrapper(NamedTuple):
    """A tensor of a subclass that has others in it, as DTensor or ShardedTensor."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    state: Any


def find(full: str) -> Any:
    """Return what stands for a name in a pickle.

    Raises:
        PickleError: the table does not have it.
    """
    module, _, name = full.rpartition(".")
    if module == "__builtin__":
        full = f"builtins.{name}"
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    found = _table().get(full)
    if found is None:
        raise UnknownName(
            f"it asks for {full[:_MOST_SHOWN]}, which is not a name of torch's state: refused, nothing was executed"
        )
    return found


def positions(values: Any, said: str) -> tuple[int, ...]:
    """Check sizes, strides or offsets of a few dimensions.

    Raises:
        PickleError: they are something else than numbers from 0.
    """
    if not isinstance(values, (tuple, list)) or len(values) > _MOST_DIMS:
        raise PickleError(f"the {said} of a tensor is not a few numbers")
    for value in values:
        if type(value) is not int or not 0 <= value < _MOST_POSITION:
            raise PickleError(f"the {said} of a tensor has {str(value)[:20]}, which is not possible")
    if said == "shape" and math.prod(max(value, 1) for value in values) > _MOST_POSITION:
        raise PickleError(f"a tensor of shape {tuple(values)} is not possible")
    return tuple(values)


def check_within(view: View, size: int) -> None:
    """Check that all elements of a tensor lie within so many bytes.

    Raises:
        PickleError: one does not, or elements are so many times in it that a copy would take all memory.
    """
    numel = math.prod(view.shape)
    if not numel:
        return
    last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride, strict=True))
    there = size // view.dtype.itemsize
    if last >= there:
        raise PickleError(f"a tensor of shape {view.shape} has elements up to {last + 1}, and its storage {there}")
    if numel > max(there, _MOST_EXPANDED):
        raise PickleError(f"a tensor of shape {view.shape} has more elements than its storage, {there}, many times")


# Functions of the table ----------------------------------------------------------------------------------------


def _tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, dtype: torch.dtype | None = None, metadata: Any = None
) -> View:
    if not isinstance(storage, Storage):
        raise PickleError("a tensor has no storage")
    sizes, strides = positions(shape, "shape"), positions(stride, "stride")
    if len(sizes) != len(strides):
        raise PickleError(f"a tensor of shape {sizes} has the stride {strides}")
    kind = storage.dtype if dtype is None else _dtype(dtype)
    marks = frozenset(one for one in ("conj", "neg") if isinstance(metadata, dict) and metadata.get(one))
    view = View(storage, kind, positions([offset], "offset")[0], sizes, strides, marks)
    check_within(view, storage.size)
    return view


def _tensor_v2(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any = None, hooks: Any = None, metadata: Any = None
) -> View:
    return _tensor(storage, offset, shape, stride, None, metadata)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> View:
    return _tensor(storage, offset, shape, stride, dtype, metadata)


def _quantized(storage: Any, offset: Any, shape: Any, stride: Any, params: Any, grad: Any, hooks: Any) -> Any:
    found = {"int_repr": _tensor(storage, offset, shape, stride)}
    names = ("scheme", "scale", "zero_point", "axis")
    return found | dict(zip(names, params if isinstance(params, tuple) else (), strict=False))


def _sparse(layout: Any, data: Any) -> Any:
    names = ("indices", "values", "size") if layout == "torch.sparse_coo" else ("compressed", "plain", "values", "size")
    return dict(zip(names, data, strict=False))


def _nested(buffer: Any, sizes: Any, strides: Any, offsets: Any) -> Any:
    return {"buffer": buffer, "sizes": sizes, "strides": strides, "offsets": offsets}


def _meta(dtype: Any, shape: Any, stride: Any, grad: Any = None) -> View:
    return View(None, _dtype(dtype), 0, positions(shape, "shape"), positions(stride, "stride"))


def _dtype(dtype: Any) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise PickleError("a tensor has no dtype")
    return dtype


def _first(value: Any, *_: Any) -> Any:
    return value


def _of_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Make the tensor of ``_rebuild_from_type_v2``; of a subclass with tensors in it the state has them."""
    if type(function) is not Known or type(kind) is not Known or type(args) is not tuple or function.call is None:
        raise PickleError("a tensor of a subclass is damaged")
    found = function.call(*args)
    return Wrapper(found.kind, found.shape, found.dtype, state) if isinstance(found, Wrapper) else found


def _wrapper(kind: Any, dtype: Any, shape: Any, *_: Any) -> Wrapper:
    if type(kind) is not Known:
        raise PickleError("a tensor of a subclass is damaged")
    return Wrapper(kind.full, positions(shape, "shape"), _dtype(dtype), None)


def _size(values: Any = ()) -> Any:
    return positions(values, "shape")


def _ordered(pairs: Any = ()) -> Ordered:
    return Ordered(_pairs(pairs))


def _dictionary(*args: Any) -> Any:
    return _pairs(args[-1]) if args and isinstance(args[-1], (dict, list, tuple)) else {}


def _pairs(pairs: Any) -> dict[Any, Any]:
    found = list(pairs.items()) if isinstance(pairs, dict) else pairs
    if not isinstance(found, (list, tuple)) or any(type(one) not in (list, tuple) or len(one) != 2 for one in found):
        raise PickleError("a dictionary is damaged")
    return {_plain_key(key): value for key, value in found}


def _plain_key(key: Any) -> Any:
    if isinstance(key, (str, int, float, bytes)) or key is None:
        return key
    raise PickleError(f"a dictionary has a {type(key).__name__} as a key")


def _set(values: Any = ()) -> Any:
    if not isinstance(values, (list, tuple, set, frozenset)):
        raise PickleError("a set is damaged")
    return {_plain_key(value) for value in values}


def _list(values: Any = ()) -> list[Any]:
    return list(sequence(values))


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise PickleError("a name of torch is no text")
    return name


def _complex(real: Any, imaginary: Any = 0.0) -> Any:
    if not isinstance(real, (int, float)) or not isinstance(imaginary, (int, float)):
        raise PickleError("a complex number is damaged")
    return complex(real, imaginary)


def _encoded(text: Any, coding: Any = "utf-8") -> bytes:
    if not isinstance(text, str) or coding not in ("latin1", "latin-1", "utf-8", "utf8", "ascii"):
        raise PickleError("it encodes something that is no text")
    return text.encode(coding)


def _bytes(value: Any = b"", *_: Any) -> bytes:
    if not isinstance(value, bytes):
        raise PickleError("bytes are damaged")
    return value


def _nested_class(owner: Any, name: Any) -> Any:
    """Return a class of a class, which pickles before protocol 4 get from it; the table has it by its full name."""
    if (
        type(owner) is not Known
        or not isinstance(name, str)
        or not isinstance(found := find(f"{owner.full}.{name}"), Known)
    ):
        raise PickleError("it asks for an attribute of something that is no class of torch's state: refused")
    return found


#: Kinds of numpy's numbers that torch has, by kind and bytes.
_OF_NUMPY = {
    "f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "i1": torch.int8, "i2": torch.int16,
    "i4": torch.int32, "i8": torch.int64, "u1": torch.uint8, "u2": torch.uint16,
    "u4": torch.uint32, "u8": torch.uint64, "b1": torch.bool,
    "c8": torch.complex64, "c16": torch.complex128,
}  # fmt: skip
_NUMBERS = {
    "f2": "<e", "f4": "<f", "f8": "<d", "i1": "<b", "i2": "<h", "i4": "<i", "i8": "<q", "u1": "<B", "u2": "<H",
    "u4": "<I", "u8": "<Q", "b1": "<?",
}  # fmt: skip


def _code(dtype: Any) -> str:
    """Return the kind and bytes of a dtype of numpy, in the order of this machine's bytes."""
    if not isinstance(dtype, Record) or dtype.kind != "numpy.dtype" or not dtype.args:
        raise PickleError("an array of numpy has no dtype")
    if type(dtype.state) is tuple and ">" in dtype.state[1:2]:
        raise PickleError("an array of numpy has the bytes of its numbers in the other order")
    return str(dtype.args[0]).lstrip("<=|")


def _scalar(dtype: Any, data: Any = None) -> Any:
    code = _code(dtype)
    if code in _NUMBERS and isinstance(data, bytes):
        return struct.unpack(_NUMBERS[code], data)[0]
    return Record("numpy.scalar", (code,))


def array(record: Record) -> View | Record:
    """Return an array of numpy as a tensor whose elements lie in the pickle; itself if torch has no such dtype."""
    state = record.state
    if type(state) is not tuple or len(state) != 5:
        raise PickleError("an array of numpy is damaged")
    _, shape, dtype, is_fortran, data = state
    kind, sizes = _OF_NUMPY.get(_code(dtype)), positions(shape, "shape")
    if kind is None or not isinstance(data, bytes):
        return record
    strides, step = [0] * len(sizes), 1
    for dim in range(len(sizes)) if is_fortran else reversed(range(len(sizes))):
        strides[dim] = step
        step *= sizes[dim]
    view = View(data, kind, 0, sizes, tuple(strides))
    check_within(view, len(data))
    return view


_SHARDED = "torch.distributed._shard"
_PLACES = "torch.distributed.tensor.placement_types"
_SPECS = "torch.distributed.tensor._dtensor_spec"
SHARDED_TENSOR = f"{_SHARDED}.sharded_tensor.api.ShardedTensor"
DTENSORS = (
    "torch.distributed.tensor.DTensor",
    "torch.distributed._tensor.api.DTensor",
    "torch.distributed.tensor._api.DTensor",
)

#: Classes whose objects become records.
_RECORDS = (
    "torch.device", "builtins.slice", "argparse.Namespace", "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._mesh_layout._MeshLayout", "torch.distributed._mesh_layout._FlatLayout",
    *(f"{_SPECS}.{name}" for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
    *(f"{_PLACES}.{name}" for name in ("Shard", "_StridedShard", "Replicate", "Partial")),
    *(
        f"torch.distributed._tensor.placement_types.{name}"  # before torch 2.5
        for name in ("Shard", "_StridedShard", "Replicate", "Partial", "_Partial", "DTensorSpec", "TensorMeta")
    ),
    f"{_SHARDED}.metadata.ShardMetadata", f"{_SHARDED}.sharded_tensor.shard.Shard",
    *(
        f"{_SHARDED}.sharded_tensor.metadata.{name}"
        for name in ("ShardedTensorMetadata", "TensorProperties", "MEM_FORMAT_ENCODING")
    ),
    f"{SHARDED_TENSOR}.ProcessGroupState", f"{_SHARDED}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    f"{_SHARDED}.sharding_spec.api.EnumerableShardingSpec", "torch.distributed.remote_device._remote_device",
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (
            "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo", "numpy.dtype",
    "pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib.Path", "pathlib.WindowsPath", "pathlib._local.PosixPath",
)  # fmt: skip

#: Names that are passed on and not called.
_PASSED = (
    *DTENSORS, SHARDED_TENSOR, "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer",
    "torch.nn.Parameter", "numpy.ndarray", "torch.storage._LegacyStorage",
    *(f"builtins.{name}" for name in ("int", "long", "float", "str", "bool", "tuple")),
    *(f"torch.per_{name}" for name in ("tensor_affine", "tensor_symmetric", "channel_affine", "channel_symmetric",
                                       "channel_affine_float_qparams")),
)  # fmt: skip

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered, "collections.defaultdict": _dictionary, "collections.Counter": _dictionary,
    "builtins.dict": _dictionary, "builtins.list": _list, "builtins.set": _set,
    "builtins.frozenset": _set, "builtins.complex": _complex, "builtins.bytearray": _bytes, "builtins.bytes": _bytes,
    "builtins.getattr": _nested_class, "_codecs.encode": _encoded,
    "torch.Size": _size, "torch.serialization._get_layout": _text,
    "torch._utils._rebuild_tensor": _tensor_v2, "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3, "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first, "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse, "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta, "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _first,
    "torch._utils._rebuild_device_tensor_from_numpy": _first,
    "torch._tensor._rebuild_from_type_v2": _of_type, "torch._tensor._rebuild_from_type": _of_type,
    **{
        f"numpy.{core}.multiarray.{name}": call
        for core in ("core", "_core")
        for name, call in {"scalar": _scalar, "_reconstruct": lambda *_: Record("numpy.ndarray")}.items()
    },
}  # fmt: skip


@functools.cache
def _table() -> Mapping[str, Any]:
    kinds = {
        f"torch.{name}Storage": StorageKind(_READ_AS.get(dtype) or DTYPES[dtype]) for name, dtype in _STORAGES.items()
    }
    for name in ("UntypedStorage", "TypedStorage", "_UntypedStorage", "_TypedStorage"):
        kinds[f"torch.storage.{name}"] = StorageKind(torch.uint8)
    records = {full: Known(full, functools.partial(_recorded, full)) for full in _RECORDS}
    functions = {full: Known(full, call) for full, call in _FUNCTIONS.items()}
    return {**{full: Known(full) for full in _PASSED}, **kinds, **records, **functions}


def _recorded(full: str, *args: Any) -> Record:
    return Record(full, args)


def is_kind(value: object, *names: str) -> TypeGuard[Record]:
    """Whether a value is a record of a class with one of these names, in any module."""
    return isinstance(value, Record) and value.kind.rpartition(".")[2] in names


def sequence(value: object) -> Sequence[Any]:
    """Return a list or a tuple.

    Raises:
        PickleError: it is something else.
    """
    if not isinstance(value, (list, tuple)):
        raise PickleError("a list is missing in what describes a tensor")
    return value
