"""Over which values a case is parametrized: parameter sets that several chapters share."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from shardproof.harness.adapters.capability import Capability, Hardware
from shardproof.harness.collectives.delays import Delay
from shardproof.harness.plugin.marks import each_value, meaningful_from, needs

_CHOOSES = needs(Capability.RESHARD_AFTER_FORWARD)


def _to_size(size: int, *also: Capability) -> Any:
    """Resharding to groups of this size, which on as many ranks is the same as ``True``."""
    return pytest.param(size, marks=[needs(Capability.RESHARD_TO_SIZE, *also), meaningful_from(2 * size)])


#: What happens to gathered parameters after forward, as chosen: freed, or kept.
RESHARD_CHOICES = [pytest.param(True, marks=_CHOOSES), pytest.param(False, marks=_CHOOSES)]

#: What frees parameters after forward, wholly or to groups of two.
RESHARD_FREES = [RESHARD_CHOICES[0], _to_size(2)]

#: The choices, and resharding to groups of two.
RESHARD_EXPLICIT = [*RESHARD_CHOICES, _to_size(2)]

#: The same with the implementation's own default, so that a case runs for implementations without a choice.
RESHARD = [pytest.param(None), *RESHARD_EXPLICIT]

#: The default and the choice that keeps gathered values for longest, for cases about something else.
KEEPS = pytest.mark.parametrize("reshard_after_forward", [pytest.param(None), RESHARD_CHOICES[1]])

#: The same for worlds of more than four ranks, in which groups of four are possible as well.
RESHARD_TO_PARTS = [*RESHARD, _to_size(4)]

#: The same for cases that observe whether the root's own unit is freed.
RESHARD_ROOT = [
    pytest.param(None),
    pytest.param(True, marks=needs(Capability.RESHARD_AFTER_FORWARD, Capability.ROOT_RESHARD)),
    RESHARD_CHOICES[1],
    _to_size(2, Capability.ROOT_RESHARD),
]

#: The choices for cases with sizes that the groups do not divide, where ``parameters()`` is checked after forward.
RESHARD_UNEVEN = [*RESHARD_CHOICES, _to_size(2, Capability.RESHARD_TO_SIZE_UNEVEN)]

#: Whether anything is sharded; for cases that also hold of whole parameters on every rank.
SHARDS = pytest.mark.parametrize(
    "shards", [True, pytest.param(False, marks=needs(Capability.NO_SHARD))], ids=["shards", "replicas-alone"]
)

#: (replicate, shard) sizes on four ranks. The second shards nothing: such a group has nothing to gather, and averages
#: over its replicas alone.
REPLICAS = pytest.mark.parametrize(
    "shape", [(2, 2), pytest.param((4, 1), marks=needs(Capability.SINGLE_RANK))], ids=["2x2", "4x1"]
)


DELAY_MS = 50.0
"""Far longer than any kernel or collective of the cases' models, so that a missing wait always reads too early."""

DELAYS = {
    "after-forward": Delay(milliseconds=DELAY_MS, at="loss"),
    "before-all-gather": Delay(milliseconds=DELAY_MS, collective="all_gather"),
    "before-reduce-scatter": Delay(milliseconds=DELAY_MS, collective="reduce_scatter"),
    "before-step": Delay(milliseconds=DELAY_MS, at="step"),
    "after-reduce-scatter": Delay(milliseconds=DELAY_MS, collective="reduce_scatter", when="after"),
    "gathers-late-on-rank-0": Delay(milliseconds=DELAY_MS, collective="all_gather", ranks=(0,)),
}
"""The delays of the cases about device streams, by name."""


_BEFORE = tuple(name for name in DELAYS if not name.startswith("after-reduce"))


def _delayed(*names: str) -> pytest.MarkDecorator:
    """What delays need: streams and, where a gather or a reduction is delayed, an implementation that issues them."""
    issued = any(DELAYS[name].at == "collective" for name in names)
    return needs(Hardware.STREAMS, Capability.SHARDED) if issued else needs(Hardware.STREAMS)


#: Tuples of names in DELAYS: none, each delay alone, all together.
DELAYED = [
    pytest.param((), id="undelayed"),
    *(pytest.param((name,), id=name, marks=_delayed(name)) for name in DELAYS),
    pytest.param(tuple(DELAYS), id="all-delayed", marks=_delayed(*DELAYS)),
]
#: The same without what follows a collective, for runs that see nothing but its beginning.
DELAYED_BEFORE = [
    *(one for one in DELAYED[:-1] if one.id != "after-reduce-scatter"),
    pytest.param(_BEFORE, id="all-delayed", marks=_delayed(*_BEFORE)),
]

#: The optimizer has the parameters of the model, or one flat parameter for each unit.
FLAT = pytest.mark.parametrize(
    "flat", [False, pytest.param(True, marks=needs("flat_parameters"))], ids=["originals", "flat"]
)


def with_first(value: Any, axis: Sequence[Any]) -> list[Any]:
    """Return the parameter sets with ``value``, for another parameter, in front of the values of each."""
    return [pytest.param(value, *item.values, marks=item.marks) for item in axis]


def subjects(names: Any, values: Iterable[Any], **options: Any) -> Callable[[Any], Any]:
    """``parametrize`` by separate subjects of a case, such as calls or errors: ``quick`` keeps an item of each."""

    def mark(case: Any) -> Any:
        each = each_value(*([names] if isinstance(names, str) else names))
        return each(pytest.mark.parametrize(names, values, **options)(case))

    return mark
