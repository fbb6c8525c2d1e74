"""The marks with which a case says what it is about and what it needs.

They are ordinary pytest marks, so ``-m``, ``pytest.param(..., marks=...)`` and inheritance
from a module's ``pytestmark`` mean what they always mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shardproof.harness.adapters.base import WholeParameters
from shardproof.harness.adapters.capability import Capability, Hardware
from shardproof.harness.collectives.delays import Delay
from shardproof.harness.plugin.selection import check_deadline

#: Registered with pytest by the plugin, so that ``--strict-markers`` knows them.
MARKER_LINES = (
    "nightly: too long for CI; deselected by this project's own configuration",
    "contract(*ids): the requirements of docs/contract.md that the case checks",
    "world(*sizes): the numbers of ranks that the case runs on, one pytest item each",
    "simulated(multiple_of): the case runs on single ranks of simulated worlds, with --simulate alone",
    "needs(*names): the capabilities and the hardware without which the case is skipped",
    "alone(): the case measures time or memory and shares its devices with no other case",
    "meaningful_from(size): on fewer ranks this value of a parameter means what another one does, or the case less",
    "drawn(name=kind): the controller draws this parameter, many times, and the ranks run each example",
    "each_value(*names): the values of these parameters name different things; --effort quick keeps an item of each",
    "deadline(seconds): how long the case may take before its verdict is hang",
)


_DEBUG_LEVELS = ("OFF", "INFO", "DETAIL")


def contract(*ids: str) -> pytest.MarkDecorator:
    """Name the requirements of ``docs/contract.md`` that the case checks."""
    return pytest.mark.contract(*ids)


def world(*sizes: int, debug_level: str = "OFF", own_hash_seeds: bool = False) -> pytest.MarkDecorator:
    """Run the case once for each of these numbers of ranks.

    Args:
        sizes: numbers of ranks.
        debug_level: ``TORCH_DISTRIBUTED_DEBUG`` of the world, which torch reads before groups exist.
        own_hash_seeds: give each rank a ``PYTHONHASHSEED`` of its own, so that sets of strings have other orders on
            other ranks, as under torchrun. Such a rank imports torch anew.

    Raises:
        ValueError: a size is not a positive integer, or is given twice; an unknown level.
    """
    if debug_level not in _DEBUG_LEVELS:
        raise ValueError(f"world(debug_level={debug_level!r}): expected one of {', '.join(_DEBUG_LEVELS)}")
    for size in sizes:
        _check_size(size, f"world({size!r})")
    if len(set(sizes)) != len(sizes):
        raise ValueError(f"world{sizes}: each size may be given once")
    return pytest.mark.world(*sizes, debug_level=debug_level, own_hash_seeds=own_hash_seeds)


def simulated(*, multiple_of: int = 1) -> pytest.MarkDecorator:
    """Run the case in one process, which makes itself single ranks of a world of as many as ``--simulate`` says.

    Without ``--simulate`` the case is deselected, and with it every case without this mark. It takes the place of
    :func:`world`.

    Args:
        multiple_of: a number that divides those worlds into which the case's meshes fit; on others the case is unmet.

    Raises:
        ValueError: the number is not a positive integer.
    """
    _check_size(multiple_of, f"simulated(multiple_of={multiple_of!r})")
    return pytest.mark.simulated(multiple_of=multiple_of)


def needs(*names: Capability | Hardware) -> pytest.MarkDecorator:
    """Skip the case, with the name of what is missing, unless all of these are there.

    A missing :class:`Capability` of the implementation gives the verdict ``unsupported``;
    missing :class:`Hardware` gives ``unmet``.
    """
    for name in names:
        if not isinstance(name, (Capability, Hardware)):
            raise ValueError(f"needs({name!r}): expected a member of Capability or Hardware")
    return pytest.mark.needs(*names)


def meaningful_from(size: int) -> pytest.MarkDecorator:
    """Say of one value of a parameter that on fewer ranks it means what another value does; of a case, that it means
    less there.

    ``--effort standard`` keeps pairs with the value on the fewest ranks; with this mark, also on as many as these. So
    does ``pairs``, of a case as well.

    Raises:
        ValueError: the size is not a positive integer.
    """
    _check_size(size, f"meaningful_from({size!r})")
    return pytest.mark.meaningful_from(size)


def each_value(*names: str) -> pytest.MarkDecorator:
    """Say that the values of these parameters name different things that the case checks in the same way.

    They may be calls, errors, containers or rules. Of such a case ``--effort quick`` keeps an item of each, of others
    one item.

    Args:
        names: of the case's parameters; of several, each combination of values counts.

    Raises:
        ValueError: no name.
    """
    if not names:
        raise ValueError("each_value() takes the names of one or more parameters of the case, and got none")
    return pytest.mark.each_value(*names)


def alone() -> pytest.MarkDecorator:
    """Run the case while no other case of this host uses its devices or cores: it measures."""
    return pytest.mark.alone()


def drawn(**parameter: type) -> pytest.MarkDecorator:
    """Let the controller draw a parameter of the case, many times; the ranks run each example, and a failure shrinks.

    Args:
        **parameter: the name of the parameter, and the class of what is drawn.

    Raises:
        ValueError: not one parameter.
    """
    if len(parameter) != 1:
        raise ValueError(f"drawn() takes one parameter, name=kind, and got {len(parameter)}")
    return pytest.mark.drawn(**parameter)


def deadline(seconds: float) -> pytest.MarkDecorator:
    """Give the case its own deadline in seconds instead of the run's.

    Raises:
        ValueError: not a positive number of seconds, or more than a case may have.
    """
    check_deadline(seconds, f"deadline({seconds!r})")
    return pytest.mark.deadline(seconds)


def _check_size(size: object, given: str) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{given}: a world's size is a positive integer")


# Parameter sets for ``pytest.mark.parametrize`` that several chapters share.


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
    "shards", [True, pytest.param(False, marks=needs(Capability.REPLICAS_ALONE))], ids=["shards", "replicas-alone"]
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

#: The optimizer has the parameters of the model, or one flat parameter for each unit.
FLAT = pytest.mark.parametrize(
    "flat", [False, pytest.param(True, marks=needs(Capability.FLAT_PARAMETERS))], ids=["originals", "flat"]
)
_ON_CPU = needs(Capability.WHOLE_ON_CPU)
#: What user code may ask for together of whole parameters.
WHOLE = [
    pytest.param(WholeParameters(keeps_changes=False), id="read"),
    pytest.param(WholeParameters(keeps_changes=False, on_cpu=True), id="read-on-cpu", marks=_ON_CPU),
    pytest.param(WholeParameters(keeps_changes=False, first_rank_only=True), id="first-rank"),
    pytest.param(
        WholeParameters(keeps_changes=False, first_rank_only=True, on_cpu=True), id="first-rank-on-cpu", marks=_ON_CPU
    ),
    pytest.param(WholeParameters(), id="written"),
    pytest.param(WholeParameters(on_cpu=True), id="written-on-cpu", marks=_ON_CPU),
]


def with_first(value: Any, axis: Sequence[Any]) -> list[Any]:
    """Return the parameter sets with ``value``, for another parameter, in front of the values of each.

    Args:
        value: the value of the other parameter.
        axis: parameter sets made by ``pytest.param``; their marks are kept.
    """
    return [pytest.param(value, *item.values, marks=item.marks) for item in axis]
