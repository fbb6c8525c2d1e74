"""Plan files: the memory and the traffic of one rank of a sharded training, simulated at one or more world sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from shardproof.jsonfiles import check_version, decode, load

VERSION = 1
MARK = "plan_version"
"""The field by which a plan file differs from a run file."""


class PlanFileError(ValueError):
    """A plan file cannot be read. The message is one line that begins with the path of the file."""


@dataclass(frozen=True)
class Dimension:
    """A dimension of the mesh, with its number of ranks."""

    name: str
    size: int


@dataclass(frozen=True)
class Phase:
    """The memory of the rank in one phase of a step.

    Attributes:
        name: "between steps", "forward", "backward" or "step".
        at_peak: bytes by kind, at the moment of the most bytes.
        most: the most bytes of each kind, each at its own moment.
    """

    name: str
    at_peak: Mapping[str, int]
    most: Mapping[str, int]

    @property
    def total(self) -> int:
        """All bytes at that moment."""
        return sum(self.at_peak.values())


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind, dtype and group in a step.

    Attributes:
        group: the dimension of the mesh, or the ranks.
        ranks: the number of ranks in the group.
        kind: of the collectives, as in a trace.
        dtype: the dtype without its "torch." prefix.
        count: how many there are.
        nbytes: the bytes that the group gathers or reduces.
        sent: the bytes that the rank sends, by the ring algorithm.
        across: those of them that leave a host, as the mean over the group's ranks.
    """

    group: str
    ranks: int
    kind: str
    dtype: str
    count: int
    nbytes: int
    sent: float
    across: float


@dataclass(frozen=True)
class Formula:
    """A closed formula, and the simulated number to compare with its value.

    Attributes:
        quantity: the quantity that it computes.
        unit: "B" or "collectives".
        text: the formula.
        value: its value.
        simulated: the simulated number.
    """

    quantity: str
    unit: str
    text: str
    value: float
    simulated: int


@dataclass(frozen=True)
class World:
    """One world size.

    Attributes:
        mesh: its dimensions, in order.
        hosts: how many hosts its ranks take.
        phases: memory in each phase, in the order of a step.
        traffic: the collectives of a step.
        formulas: closed formulas, with the simulated numbers.
    """

    mesh: Annotated[Sequence[Dimension], ("minItems", 1)]
    hosts: int
    phases: Annotated[Sequence[Phase], ("minItems", 1)]
    traffic: Sequence[Traffic]
    formulas: Sequence[Formula]

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
    """A plan: one model under one implementation, at one or more world sizes.

    Attributes:
        model: its name on the command line.
        about: a description of the model; may be empty.
        numel: elements of its parameters.
        units: the number of units by the class of their module; the root's own is "root".
        implementation: the name.
        version: the implementation's version.
        settings: the settings of a step, in the order in which they are printed: batch, dtypes and others.
        rank: the rank that was simulated.
        node_size: the ranks of a host.
        worlds: the given mesh, and other numbers of ranks.
        kinds: descriptions of the kinds of memory, by kind, in the order of the tables.
        assumptions: the conditions under which the numbers hold, in sentences.
        shardproof: the version of shardproof.
        torch: the version of torch.
        command: the command line.
    """

    model: str
    about: str
    numel: int
    units: Mapping[str, int]
    implementation: str
    version: str
    settings: Mapping[str, str]
    rank: int
    node_size: int
    worlds: Annotated[Sequence[World], ("minItems", 1)]
    kinds: Mapping[str, str]
    assumptions: Sequence[str]
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
        return load(path, lambda data: isinstance(data, dict) and MARK in data, PlanFileError)
    except PlanFileError:
        return False


def load_plan(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanFileError: the file is missing or is no plan file. The message is one line that begins with the path.
    """
    return load(path, parse_plan, PlanFileError)
