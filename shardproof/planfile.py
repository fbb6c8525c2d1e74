"""Plan files: the memory and the traffic of one rank of a sharded training, simulated at one or more world sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from shardproof import door
from shardproof.jsonfiles import check_version, decode

VERSION = 1
MARK = "plan_version"
"""The field by which a plan file differs from a run file."""


@dataclass(frozen=True)
class Dimension:
    """A dimension of the mesh, with its number of ranks."""

    name: str
    size: int


@dataclass(frozen=True)
class Phase:
    """The memory of the rank in one phase of a step."""

    name: str  # "between steps", "forward", "backward" or "step"
    at_peak: Mapping[str, int]  # bytes by kind, at the moment of the most bytes
    most: Mapping[str, int]  # the most bytes of each kind, each at its own moment

    @property
    def total(self) -> int:
        """All bytes at that moment."""
        return sum(self.at_peak.values())


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind, dtype and group in a step."""

    group: str  # the dimension of the mesh, or the ranks
    ranks: int  # the number of ranks in the group
    kind: str
    dtype: str  # the dtype without its "torch." prefix
    count: int  # how many there are
    nbytes: int  # the bytes that the group gathers or reduces
    sent: float  # the bytes that the rank sends, by the ring algorithm
    across: float  # those of them that leave a host, as the mean over the group's ranks


@dataclass(frozen=True)
class Formula:
    """A closed formula, and the simulated number to compare with its value."""

    quantity: str
    unit: str  # "B" or "collectives"
    text: str
    value: float
    simulated: int


@dataclass(frozen=True)
class World:
    """One world size."""

    mesh: Annotated[Sequence[Dimension], ("minItems", 1)]  # its dimensions, in order
    hosts: int  # how many hosts its ranks take
    phases: Annotated[Sequence[Phase], ("minItems", 1)]  # memory in each phase, in the order of a step
    traffic: Sequence[Traffic]  # the collectives of a step
    formulas: Sequence[Formula]  # closed formulas, with the simulated numbers

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        count = 1
        for dimension in self.mesh:
            count *= dimension.size
        return count

    @property
    def peak(self) -> Phase:
        """The phase in which the rank holds the most bytes."""
        return max(self.phases, key=lambda phase: phase.total)


@dataclass(frozen=True)
class Plan:
    """A plan: one model under one implementation, at one or more world sizes."""

    model: str  # its name on the command line
    about: str  # a description of the model; may be empty
    numel: int  # elements of its parameters
    units: Mapping[str, int]  # the number of units by the class of their module; the root's own is "root"
    implementation: str
    version: str
    # The settings of a step, in the order in which they are printed: batch, dtypes and others.
    settings: Mapping[str, str]
    rank: int  # the rank that was simulated
    node_size: int  # the ranks of a host
    worlds: Annotated[Sequence[World], ("minItems", 1)]  # the given mesh, and other numbers of ranks
    kinds: Mapping[str, str]  # descriptions of the kinds of memory, by kind, in the order of the tables
    assumptions: Sequence[str]  # the conditions under which the numbers hold, in sentences
    shardproof: str = ""
    torch: str = ""
    command: Sequence[str] = ()


def parse_plan(data: object) -> Plan:
    """Read a plan from the content of a plan file.

    Raises:
        RecordError: the data violate the schema or have an unknown version. The message is one line.
    """
    check_version(data, MARK, VERSION)
    return decode(Plan, data)


def is_plan(path: str | Path) -> bool:
    """Whether a file is a plan file, of any version; a file that cannot be read is none."""
    try:
        return door.load(path, lambda data: isinstance(data, dict) and MARK in data)
    except door.BadFile:
        return False


def load_plan(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        BadFile: the file is missing or is no plan file. The message is one line that begins with the path.
    """
    return door.load(path, parse_plan)
