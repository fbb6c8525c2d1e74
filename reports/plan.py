"""Plan files: the memory and the traffic of one rank of a sharded training, simulated at one or more world sizes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardproof.reports import files
from shardproof.reports.fields import Fields, RecordError, integer, text
from shardproof.reports.loading import load

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

    @classmethod
    def parse(cls, data: object, where: str) -> "Dimension":
        """Read a dimension; raises a RecordError where the data violate the schema."""
        fields = Fields(data, where)
        return cls(fields.required("name", str), fields.required("size", int))


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

    @classmethod
    def parse(cls, data: object, where: str) -> "Phase":
        """Read a phase; raises a RecordError where the data violate the schema."""
        fields = Fields(data, where)
        return cls(fields.required("name", str), fields.mapping("at_peak", integer), fields.mapping("most", integer))


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

    @classmethod
    def parse(cls, data: object, where: str) -> "Traffic":
        """Read a row of traffic; raises a RecordError where the data violate the schema."""
        fields = Fields(data, where)
        return cls(
            group=fields.required("group", str),
            ranks=fields.required("ranks", int),
            kind=fields.required("kind", str),
            dtype=fields.required("dtype", str),
            count=fields.required("count", int),
            nbytes=fields.required("nbytes", int),
            sent=fields.required("sent", float),
            across=fields.required("across", float),
        )


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

    @classmethod
    def parse(cls, data: object, where: str) -> "Formula":
        """Read a formula; raises a RecordError where the data violate the schema."""
        fields = Fields(data, where)
        return cls(
            quantity=fields.required("quantity", str),
            unit=fields.required("unit", str),
            text=fields.required("text", str),
            value=fields.required("value", float),
            simulated=fields.required("simulated", int),
        )


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

    mesh: tuple[Dimension, ...]
    hosts: int
    phases: tuple[Phase, ...]
    traffic: tuple[Traffic, ...]
    formulas: tuple[Formula, ...]

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

    @classmethod
    def parse(cls, data: object, where: str) -> "World":
        """Read a world; raises a RecordError where the data violate the schema, also without mesh or phases."""
        fields = Fields(data, where)
        world = cls(
            mesh=fields.items("mesh", Dimension.parse),
            hosts=fields.required("hosts", int),
            phases=fields.items("phases", Phase.parse),
            traffic=fields.items("traffic", Traffic.parse),
            formulas=fields.items("formulas", Formula.parse),
        )
        for name, found in (("mesh", world.mesh), ("phases", world.phases)):
            if not found:
                raise RecordError(f"{fields.path(name)}: it is empty")
        return world


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
    worlds: tuple[World, ...]
    kinds: Mapping[str, str]
    assumptions: tuple[str, ...]
    shardproof: str = ""
    torch: str = ""
    command: tuple[str, ...] = ()


def parse_plan(data: object) -> Plan:
    """Read a plan from JSON data.

    Args:
        data: the content of a plan file.

    Raises:
        RecordError: the data violate the schema or have an unknown version. The message is one line.
    """
    fields = Fields(data, "")
    version = fields.required(MARK, int)
    if version != VERSION:
        raise RecordError(f"{MARK}: {version} is not supported; supported: {VERSION}")
    plan = Plan(
        model=fields.required("model", str),
        about=fields.optional("about", ""),
        numel=fields.required("numel", int),
        units=fields.mapping("units", integer),
        implementation=fields.required("implementation", str),
        version=fields.optional("version", ""),
        settings=fields.mapping("settings", text),
        rank=fields.required("rank", int),
        node_size=fields.required("node_size", int),
        worlds=fields.items("worlds", World.parse),
        kinds=fields.mapping("kinds", text),
        assumptions=fields.items("assumptions", text),
        shardproof=fields.optional("shardproof", ""),
        torch=fields.optional("torch", ""),
        command=fields.items("command", text),
    )
    if not plan.worlds:
        raise RecordError("worlds: it is empty")
    return plan


def is_plan(path: str | Path) -> bool:
    """Whether a file is a plan file, of any version; a file that cannot be read is none."""
    try:
        data = json.loads(files.read(Path(path)))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and MARK in data


def load_plan(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanFileError: the file is missing or is no plan file. The message is one line that begins with the path.
    """
    return load(path, parse_plan, PlanFileError)
