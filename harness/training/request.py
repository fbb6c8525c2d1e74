"""What a check is asked for: the user's functions by their names, the mesh, the dtypes, and the data."""

import dataclasses
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardproof.harness.adapters import registry
from shardproof.harness.adapters.base import Adapter
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.planning.request import DTYPES, names_of, parse
from shardproof.harness.planning.subject import ModelError, Subject, subject_of
from shardproof.harness.watching.groups import DATA

#: The name of the implementation that is the user's own ``parallelize``.
OWN = "own"

#: Where the command leaves its request for the packaged case, and its own words for the line that repeats it.
VARIABLE, COMMAND = "SHARDPROOF_OWN", "SHARDPROOF_OWN_COMMAND"


class NotCheckable(ValueError):
    """What was asked for cannot be checked. The text is one line that begins with "check: "."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOnMesh:
    """The model that trains, and the ranks on which it does.

    Attributes:
        model: a known shape, or ``module:function``.
        mesh: the names and the sizes of its dimensions.
        layers: to which a known shape is cut down, as to ``dim``.
    """

    model: str
    mesh: tuple[tuple[str, int], ...]
    layers: int | None = None
    dim: int | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.mesh)

    @property
    def mesh_text(self) -> str:
        """The mesh as an option takes it: "dp=2,tp=2"."""
        return ",".join(f"{name}={size}" for name, size in self.mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserCode:
    """The names of the user's functions, ``module:function`` each, and of what stands for them.

    Attributes:
        implementation: the name of an adapter, or "own" for ``parallelize``.
        parallelize: shards the model; empty for none, as are ``data``, ``step`` and ``plain``.
        optimizer: makes the optimizer; or "adamw" or "sgd".
        plain: gives the model of the reference methods that its wrapper would have.
    """

    implementation: str = OWN
    parallelize: str = ""
    optimizer: str = "adamw"
    data: str = ""
    step: str = ""
    plain: str = ""

    @property
    def is_own(self) -> bool:
        """Whether the user's function parallelizes the model."""
        return self.implementation == OWN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps, and the data of each.

    Attributes:
        data_dims: the dimensions of the mesh over which ranks read different data.
        microbatches: of a step on a rank, of the default data.
        batch: sequences of a microbatch of the default data, of ``sequence`` tokens.
    """

    data_dims: tuple[str, ...] = ()
    steps: int = 3
    microbatches: int = 2
    batch: int = 2
    sequence: int = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dtypes:
    """The dtypes of the run and of the reference, by the names that options take.

    Attributes:
        dtype: of parameters.
        param_dtype: of gathered parameters and activations; empty for that of the parameters.
        reduce_dtype: in which gradients are reduced; empty for the default.
        oracle: of the reference without sharding; "none" for no such reference.
    """

    dtype: str = "float32"
    param_dtype: str = ""
    reduce_dtype: str = ""
    oracle: str = "float64"

    @property
    def given_dtypes(self) -> dict[str, torch.dtype]:
        """Those besides that of the parameters which are not left to the default, by their names."""
        names = ("param_dtype", "reduce_dtype")
        return {name: DTYPES[value] for name in names if (value := getattr(self, name))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resuming:
    """Whether the training is saved and resumed, and how.

    Attributes:
        save_and_resume: after how many steps it is saved; 0 for a check against one process.
        resume_mesh: the mesh of the resumed training; empty for that of the run.
        objects: makes what the training has besides model and optimizer; empty for nothing.
        save: writes a checkpoint; empty for torch.distributed.checkpoint, as is ``load``.
        readers: in the resumed training, the number of ranks of the run that read different data.
        shared: the folder of both trainings, in the rank processes; empty before.
    """

    save_and_resume: int = 0
    resume_mesh: str = ""
    objects: str = ""
    save: str = ""
    load: str = ""
    readers: int = 0
    shared: str = ""


# Options are listed in the order of the fields, those of the last base first.
@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(Resuming, Dtypes, Steps, UserCode, ModelOnMesh):
    """A training that is to be checked, in plain values.

    Attributes:
        max_norm: to which the default step clips; 0 for no clipping.
        axes: keyword arguments of ``parallelize``.
        off: what of the training is turned off, by its names in :data:`axes.OWN`.
        bisect: whether it is noted which of them the training uses.
        keep: a folder in which all that was compared stays; empty for none.
    """

    max_norm: float = 1.0
    axes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    off: tuple[str, ...] = ()
    bisect: bool = False
    seed: int = 0
    keep: str = ""

    @property
    def data_size(self) -> int:
        """The number of ranks that read different data."""
        return math.prod(size for name, size in self.mesh if name in self.data_dims)

    def data_rank(self, rank: int) -> int:
        """Return which data a global rank reads; the mesh has the ranks in order, the last dimension first."""
        position, found = rank, []
        for name, size in reversed(self.mesh):
            position, at = divmod(position, size)
            found += [(at, size)] if name in self.data_dims else []
        number = 0
        for at, size in reversed(found):
            number = number * size + at
        return number

    def resumed(self) -> "Request":
        """Return the request of the resumed training; a mesh without data dimensions is NotCheckable."""
        mesh = parse_mesh(self.resume_mesh) if self.resume_mesh else self.mesh
        wanted = tuple(name for name in self.data_dims if name in dict(mesh))
        return dataclasses.replace(
            self, mesh=mesh, data_dims=data_dims_of(mesh, wanted), readers=self.data_size
        )  # fmt: skip

    def dumps(self) -> str:
        """Return the request as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> "Request":
        """Read a request from JSON."""
        fields = json.loads(text)
        fields["mesh"] = tuple((name, size) for name, size in fields["mesh"])
        return cls(**fields | {name: tuple(fields[name]) for name in ("data_dims", "off")})


def asked() -> Request | None:
    """Return the request that the command has left in the environment, or None."""
    text = os.environ.get(VARIABLE)
    return Request.loads(text) if text else None


def parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """Read a mesh: ``8``, ``2x4`` for replicas x shards, or ``dp=2,tp=2``; anything else is NotCheckable."""
    if "=" not in text:
        try:
            sizes = parse(text)
        except ValueError as error:
            raise NotCheckable(f"check: {error}, or names (dp=2,tp=2)") from None
        return tuple(zip(("dp",) if len(sizes) == 1 else names_of(sizes), sizes, strict=True))
    found = re.findall(r"(?:^|,)([A-Za-z_]\w*)=(0*[1-9]\d{0,4})(?=,|$)", text)
    if ",".join(f"{name}={size}" for name, size in found) != text:
        raise NotCheckable(f"check: --mesh {text!r} is not a mesh: give ranks (8), replicas x shards (2x4), or "
                           "names (dp=2,tp=2)")  # fmt: skip
    if len({name for name, _ in found}) < len(found):
        raise NotCheckable(f"check: --mesh {text!r} has two dimensions of one name")
    return tuple((name, int(size)) for name, size in found)


def data_dims_of(mesh: tuple[tuple[str, int], ...], wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Return the dimensions over which ranks read different data: those wanted, or those with a known name."""
    names = [name for name, _ in mesh]
    if unknown := [name for name in wanted if name not in names]:
        raise NotCheckable(
            f"check: --data-dims {unknown[0]}: no mesh dimension of this name; known: {', '.join(names)}"
        )
    found = wanted or tuple(name for name in names if name in DATA and name != "cp")
    if not found:
        text = ",".join(f"{name}={size}" for name, size in mesh)
        raise NotCheckable(f"check: --data-dims: name the dimensions of {', '.join(names)} over which data differ; if "
                           f"they differ over none, give one of size 1: --mesh dp=1,{text}")  # fmt: skip
    return found


# The user's functions.


def importable(name: str) -> str:
    """Return ``module:function`` for it, or for ``path.py:function``, whose file is imported under its stem."""
    path, _, function = name.rpartition(":")
    if not path.endswith(".py"):
        return name
    path = os.path.abspath(path)
    stem = os.path.splitext(os.path.basename(path))[0]
    known = sys.modules.get(stem)
    if known is not None and os.path.abspath(getattr(known, "__file__", None) or "") == path:
        return f"{stem}:{function}"
    if not os.path.isfile(path):
        raise NotCheckable(f"check: {name}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[stem]
        raise NotCheckable(f"check: {name}: the file does not import: {registry.line_of_error(error)}") from error
    return f"{stem}:{function}"


def function_of(
    option: str, name: str, arguments: tuple[str, ...], *, may_have_more: bool = False
) -> Callable[..., Any]:
    """Import a function of the user that can be called with as many arguments; anything else is NotCheckable.

    Args:
        may_have_more: whether it may need further arguments, which are given by their names.
    """
    module_name, colon, function_name = importable(name).partition(":")
    given = f"check: --{option} {name}"
    if not colon or not function_name:
        raise NotCheckable(f"{given}: give module:function or file.py:function")
    try:
        function: Any = getattr(importlib.import_module(module_name), function_name, None)
    except BaseException as error:
        raise NotCheckable(f"{given}: {module_name!r} does not import: {registry.line_of_error(error)}") from error
    if not callable(function):
        raise NotCheckable(f"{given}: {module_name!r} has no function {function_name!r}")
    try:
        signature = inspect.signature(function)
        (signature.bind_partial if may_have_more else signature.bind)(*arguments)
    except TypeError as error:
        raise NotCheckable(f"{given}: it is called as {function_name}({', '.join(arguments)}): {error}") from None
    except ValueError:  # written in C
        pass
    return function  # type: ignore[no-any-return]


ARGUMENTS = {
    "parallelize": ("model", "mesh"),
    "optimizer": ("model",),
    "data": ("step", "rank"),
    "step": ("model", "optimizer", "microbatches", "mesh"),
    "plain": ("model",),
}
"""With what the user's functions are called, by the option that names them."""

BY_NAME = ("model", "optimizer", "mesh", "folder", "step")
"""The arguments that ``save`` and ``load`` may have, by their names; further ones are those of ``objects``."""

_RESUMING = {"objects": ("model", "optimizer"), "save": (), "load": ()}

_BY_NAME = ("adamw", "sgd")


@dataclasses.dataclass(frozen=True)
class Functions:
    """The user's functions of a request; None for those that are left to the defaults."""

    subject: Subject
    adapter: type[Adapter] | None
    parallelize: Callable[..., Any] | None
    optimizer: Callable[..., Any] | None
    data: Callable[..., Any] | None
    step: Callable[..., Any] | None
    plain: Callable[..., Any] | None
    objects: Callable[..., Any] | None = None
    save: Callable[..., Any] | None = None
    load: Callable[..., Any] | None = None


def _refuse_resuming(request: Request) -> None:
    """Refuse options of a resumption that do not go together."""
    given = [f"--{one.replace('_', '-')}" for one in (*_RESUMING, "resume_mesh") if getattr(request, one)]
    if given and not request.save_and_resume:
        raise NotCheckable(f"check: {given[0]} is of --save-and-resume N, which is not given")
    if bool(request.save) != bool(request.load):
        raise NotCheckable(
            "check: --save and --load belong together: give both, or none for torch.distributed.checkpoint"
        )


def _named(request: Request) -> dict[str, Callable[..., Any] | None]:
    """Import the functions that a request names, by their options."""
    found: dict[str, Callable[..., Any] | None] = {}
    for option, arguments in (ARGUMENTS | _RESUMING).items():
        name = getattr(request, option)
        is_named = name and name not in _BY_NAME
        has_more = bool(request.save_and_resume) and option in ("data", "step", *_RESUMING)
        found[option] = function_of(option, name, arguments, may_have_more=has_more) if is_named else None
    return found


def functions_of(request: Request) -> Functions:
    """Import what a request names, and refuse what cannot be as NotCheckable."""
    _refuse_resuming(request)
    found = _named(request)
    try:
        subject = subject_of(importable(request.model), layers=request.layers, dim=request.dim)
        adapter = None if request.is_own else _adapter(request)
    except NotCheckable:
        raise
    except (ModelError, ValueError) as error:
        raise NotCheckable(f"check: {error}") from error
    if request.is_own:
        if found["parallelize"] is None:
            raise NotCheckable("check: --impl own needs --parallelize module:function")
        takes = _keywords(found["parallelize"])
        given = request.axes.keys() | request.given_dtypes.keys()
        if takes is not None and (unknown := sorted(given - takes)):
            known = f"it has {', '.join(sorted(takes))}" if takes else "it has none"
            raise NotCheckable(f"check: parallelize() has no keyword argument {unknown[0]!r}; {known}")
    return Functions(subject, adapter, **found)


def by_name(function: Callable[..., Any] | None, given: Mapping[str, Any], first: int = 0) -> dict[str, Any]:
    """Return those of the given values that a function has arguments for, by their names.

    Args:
        first: the number of its arguments that have their values by position.

    Raises:
        NotCheckable: it needs an argument that is not given; in one line.
    """
    if function is None:
        return {}
    parameters = list(inspect.signature(function).parameters.values())
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(given)
    own = [one for one in parameters[first:] if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    if lacking := [one.name for one in own if one.name not in given and one.default is one.empty]:
        known = ", ".join(given) or "no objects"
        raise NotCheckable(f"check: {function.__name__}() needs {lacking[0]!r}; there are {known}: objects() returns "
                           "others by their names")  # fmt: skip
    return {one.name: given[one.name] for one in own if one.name in given}


def axes_of(request: Request) -> dict[str, Any]:
    """Return the keyword arguments with which ``parallelize`` is called."""
    return dict(request.axes) | request.given_dtypes


def _keywords(function: Callable[..., Any]) -> set[str] | None:
    """The names of the keyword-only arguments of a function; None if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}


def _adapter(request: Request) -> type[Adapter]:
    adapter = registry.load(request.implementation)
    needs = [
        (len(request.data_dims) > 1, Capability.HYBRID, "a mesh of replicas and shards"),
        (request.param_dtype, "precision.param_dtype", "--param-dtype"),
        (request.reduce_dtype, "precision.reduce_dtype", "--reduce-dtype"),
        (request.optimizer == "adamw", Capability.ADAM, "--optimizer adamw"),
    ]
    for is_needed, capability, what in needs:
        if is_needed and capability not in adapter.capabilities() and not registry.is_control(adapter):
            raise ValueError(f"{request.implementation} lacks the capability {capability}, for {what}")
    if request.param_dtype and "precision.param_dtype" not in adapter.capabilities():
        raise ValueError(
            f"{request.implementation} has no --param-dtype; --dtype {request.param_dtype} sets the dtype of all"
        )
    others = [name for name, _ in request.mesh if name not in request.data_dims]
    if len(others) > 1 or (others and Capability.TENSOR_PARALLEL not in adapter.capabilities()):
        raise ValueError(f"{request.implementation} does not shard over {others[-1]!r}: give --parallelize")
    return adapter


def products(sizes: Mapping[str, int]) -> dict[str, float]:
    """Name the products of the sizes of several dimensions: "the size of dp x the size of tp"."""
    found = {f"the size of {name}": float(size) for name, size in sizes.items()}
    for one, other in itertools.combinations(sizes, 2):
        found[f"the size of {one} x the size of {other}"] = float(sizes[one] * sizes[other])
    return found
