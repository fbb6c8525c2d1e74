"""The marks with which a case says what it is about and what it needs.

They are ordinary pytest marks, so ``-m``, ``pytest.param(..., marks=...)`` and inheritance
from a module's ``pytestmark`` mean what they always mean.
"""

import pytest

from shardproof.harness.adapters.capability import EVERY, Hardware, why_not
from shardproof.harness.plugin.options import check_deadline

#: Registered with pytest by the plugin, so that ``--strict-markers`` knows them.
MARKER_LINES = (
    "nightly: too long for CI; deselected by this project's own configuration",
    "contract(*ids): the requirements of docs/contract.md that the case checks",
    "world(*sizes): the numbers of ranks that the case runs on, one pytest item each",
    "simulated(multiple_of): the case runs on single ranks of simulated worlds, with --simulate alone",
    "needs(*names): the capabilities and the hardware without which the case is skipped",
    "takes(option): the case is skipped unless this field of Config is in the adapter's option_names",
    "alone(): the case measures time or memory and shares its devices with no other case",
    "meaningful_from(size): on fewer ranks this value of a parameter tests nothing that other values do not",
    "drawn(name=kind): the controller draws this parameter, many times, and the ranks run each example",
    "each_value(*names): --effort quick keeps an item for each value of these parameters, not one in all",
    "reproduced_by(command): the command line that repeats the case, instead of pytest's",
    "deadline(seconds): how long the case may take before its verdict is hang",
)


_DEBUG_LEVELS = ("OFF", "INFO", "DETAIL")


def contract(*ids: str) -> pytest.MarkDecorator:
    """Name the requirements of ``docs/contract.md`` that the case checks."""
    return pytest.mark.contract(*ids)


def world(*sizes: int, debug_level: str = "OFF", own_hash_seeds: bool = False) -> pytest.MarkDecorator:
    """Run the case once for each of these numbers of ranks.

    Args:
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
    :func:`world`. On worlds that ``multiple_of``, a positive integer, does not divide, the case's meshes do not fit: it
    is unmet.
    """
    _check_size(multiple_of, f"simulated(multiple_of={multiple_of!r})")
    return pytest.mark.simulated(multiple_of=multiple_of)


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip the case, with the name of what is missing, unless all of these are there.

    A missing :class:`Capability` or option of the implementation gives the verdict ``unsupported``;
    missing :class:`Hardware` gives ``unmet``.

    Args:
        names: members of ``Capability`` and ``Hardware``, and options by the names of their fields: "clip.norm_type".

    Raises:
        ValueError: a name is none of these.
    """
    for name in names:
        if name not in EVERY and not isinstance(name, Hardware):
            raise ValueError(f"needs({name!r}): {why_not(str(name))}")
    return pytest.mark.needs(*names)


def takes(option: str) -> pytest.MarkDecorator:
    """Skip the case as ``unsupported`` unless the adapter's ``option_names`` has this field of ``Config``."""
    return pytest.mark.takes(option)


def meaningful_from(size: int) -> pytest.MarkDecorator:
    """Say of a parameter's value that on fewer ranks it means what another does; of a case, that it means less there.

    ``--effort standard`` keeps pairs with the value on the fewest ranks; with this mark, also on as many as these.
    """
    _check_size(size, f"meaningful_from({size!r})")
    return pytest.mark.meaningful_from(size)


def each_value(*names: str) -> pytest.MarkDecorator:
    """Say that the values of these parameters name different things that the case checks in the same way.

    They may be calls, errors, containers or rules. Of such a case ``--effort quick`` keeps an item of each, of others
    one item; of several parameters, each combination of values counts.
    """
    if not names:
        raise ValueError("each_value() takes the names of one or more parameters of the case, and got none")
    return pytest.mark.each_value(*names)


def alone() -> pytest.MarkDecorator:
    """Run the case while no other case of this host uses its devices or cores: it measures."""
    return pytest.mark.alone()


def drawn(**parameter: type) -> pytest.MarkDecorator:
    """Let the controller draw a parameter of the case, many times; the ranks run each example, and a failure shrinks.

    It takes the name of one parameter, and the class of what is drawn.
    """
    if len(parameter) != 1:
        raise ValueError(f"drawn() takes one parameter, name=kind, and got {len(parameter)}")
    return pytest.mark.drawn(**parameter)


def deadline(seconds: float) -> pytest.MarkDecorator:
    """Give the case its own deadline in seconds instead of the run's."""
    check_deadline(seconds, f"deadline({seconds!r})")
    return pytest.mark.deadline(seconds)


def _check_size(size: object, given: str) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{given}: a world's size is a positive integer")
