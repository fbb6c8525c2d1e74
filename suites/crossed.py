"""Features crossed: a training has one value of each axis, and rows of values have each pair or three of them together.

The rows are drawn once (``docs/make.py``) and stay in ``suites/crossed.toml``, so that an item means the same
for every implementation and in every run. What a value needs, and which values exclude each other, is written here.
"""

import itertools
import pathlib
from collections.abc import Iterable, Iterator, Mapping

from shardproof import door
from shardproof.testing import Capability

Needs = tuple[str, ...]
_ANY: Needs = ()
_WHOLE, _STATE = (Capability.SUMMON_FULL_PARAMS,), (Capability.DISTRIBUTED_CHECKPOINT,)

AXES: dict[str, dict[str, Needs]] = {
    "strategy": {"shards": _ANY, "replicas": (Capability.HYBRID,), "whole": (Capability.NO_SHARD,)},
    "parameters": {"originals": _ANY, "flat": ("flat_parameters",)},
    "precision": {
        "full": _ANY,
        "bf16": ("precision.param_dtype",),
        "bf16-fp32": ("precision.param_dtype", "precision.reduce_dtype"),
    },
    "reshards": {
        "default": _ANY,
        "yes": (Capability.RESHARD_AFTER_FORWARD,),
        "no": (Capability.RESHARD_AFTER_FORWARD,),
    },
    "offload": {"no": _ANY, "pageable": (Capability.OFFLOAD, Capability.PAGEABLE_OFFLOAD)},
    "ahead": {
        "default": _ANY,
        "never": (Capability.BACKWARD_PREFETCH,),
        "in-forward": (Capability.BACKWARD_PREFETCH,),
        "named": (Capability.EXPLICIT_PREFETCH,),
    },
    "microbatches": {
        "one": _ANY,
        # Where user code can choose it for each unit, not to defer is the default.
        "each-reduced": ("accumulation.units",),
        "deferred": (Capability.DEFERRED_REDUCTION,),
        "kept": (
            Capability.DEFERRED_REDUCTION,
            "accumulation.reshard_after_backward",
            Capability.RESHARD_AFTER_FORWARD,
        ),
    },
    "before": {"nothing": _ANY, "evaluation": _ANY, "read": _WHOLE, "unshard": (Capability.ASYNC_UNSHARD,)},
    "state": {"none": _ANY, "sharded": _STATE, "full": (*_STATE, Capability.FULL_STATE_DICT)},
    "recomputed": {
        "no": _ANY,
        "call": (Capability.RECOMPUTATION,),
        "reentrant-call": (Capability.RECOMPUTATION,),
        "wrapper": (Capability.RECOMPUTATION,),
    },
    "frozen": {"none": _ANY, "unit": _ANY, "part": _ANY},
    "tied": {"no": _ANY, "yes": (Capability.TIED_PARAMETERS,)},
    "clip": {"no": _ANY, "yes": (Capability.CLIP_BY_CALL, "clip.norm_type")},
    "compiled": {"no": _ANY, "yes": (Capability.COMPILED_MODULES,)},
}
"""The values of each axis, and what an implementation needs for them; the first value is the plain one."""

Row = Mapping[str, str]

#: Values that exclude each other, and why.
IMPOSSIBLE: list[tuple[Row, str]] = [
    ({"strategy": "whole", "reshards": "yes"}, "nothing is gathered that could be freed"),
    ({"strategy": "whole", "reshards": "no"}, "nothing is gathered that could be kept"),
    ({"strategy": "whole", "microbatches": "kept"}, "nothing is gathered that could be kept"),
    ({"reshards": "default", "microbatches": "kept"}, "what is freed after forward is freed after backward too"),
    ({"reshards": "yes", "microbatches": "kept"}, "what is freed after forward is freed after backward too"),
    ({"parameters": "flat", "frozen": "part"}, "one flat parameter is trained as a whole"),
    ({"parameters": "flat", "state": "sharded"}, "state dicts of flat parameters have a chapter of their own"),
    ({"parameters": "flat", "state": "full"}, "state dicts of flat parameters have a chapter of their own"),
]

#: What values need together beyond what each needs.
_TOGETHER: list[tuple[Row, Capability]] = [
    ({"precision": "bf16-fp32", "microbatches": "deferred"}, Capability.ACCUMULATION_DTYPES),
    ({"precision": "bf16-fp32", "microbatches": "kept"}, Capability.ACCUMULATION_DTYPES),
]


def needs_of(row: Row) -> frozenset[str]:
    """Return the capabilities without which an implementation cannot train a row, which may lack axes."""
    own = [need for axis, value in row.items() for need in AXES[axis][value]]
    return frozenset([*own, *(need for part, need in _TOGETHER if part.items() <= row.items())])


def why_not(row: Row) -> str | None:
    """Return why no implementation can train a row, or None."""
    return next((why for part, why in IMPOSSIBLE if part.items() <= row.items()), None)


def parts(row: Row, size: int) -> Iterator[frozenset[tuple[str, str]]]:
    """Return all choices of so many of a row's values."""
    yield from map(frozenset, itertools.combinations(row.items(), size))


def possible(capabilities: frozenset[str], size: int) -> Iterator[frozenset[tuple[str, str]]]:
    """Return all choices of so many values of different axes that somebody with these capabilities can train."""
    for axes in itertools.combinations(AXES, size):
        for values in itertools.product(*(AXES[axis] for axis in axes)):
            row = dict(zip(axes, values, strict=True))
            if needs_of(row) <= capabilities and why_not(row) is None:
                yield frozenset(row.items())


def rows_of(path: pathlib.Path) -> list[Row]:
    """Read a table: the values of all axes in their order, between spaces, in each row."""
    return [dict(zip(AXES, text.split(), strict=True)) for text in door.toml(path)["rows"]]


def name_of(row: Row) -> str:
    """Return what differs from the plain training, for an id."""
    found = [f"{axis}={value}" for axis, value in row.items() if value != next(iter(AXES[axis]))]
    return ",".join(found) or "plain"


def covered(rows: Iterable[Row], capabilities: frozenset[str], size: int) -> set[frozenset[tuple[str, str]]]:
    """Return the choices of so many values that the rows have which somebody with these capabilities can train."""
    return {part for row in rows if needs_of(row) <= capabilities for part in parts(row, size)}


def draw(
    capabilities: frozenset[str], size: int, *, known: Iterable[Row] = (), seldom: Iterable[str] = ()
) -> list[Row]:
    """Choose rows that, with those that are known, have all possible choices of ``size`` values.

    Each row begins with the choice that comes first among those that are not covered, and takes, axis by axis, the
    value that covers most; of ``seldom`` axes it takes another than the plain value for its first choice alone.
    """
    there = covered(known, capabilities, size)
    left = dict.fromkeys(part for part in possible(capabilities, size) if part not in there)
    rows: list[Row] = []
    while left:
        row = dict(next(iter(left)))
        for axis in [one for one in AXES if one not in row]:
            choices = [{**row, axis: value} for value in AXES[axis]]
            able = [one for one in choices if needs_of(one) <= capabilities and why_not(one) is None]
            if axis in seldom:
                able = able[:1]
            row = max(able, key=lambda one: sum(part in left for part in parts(one, size)))
        row = {axis: row[axis] for axis in AXES}
        for part in parts(row, size):
            left.pop(part, None)
        rows.append(row)
    return rows
