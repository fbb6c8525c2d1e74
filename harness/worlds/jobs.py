"""What the controller and its ranks say to each other. Light: imports no torch."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

from shardproof.harness.findings.finding import Location
from shardproof.harness.findings.observations import Observations

#: The name of the shared memory in a world's directory.
BOARD = "board"


@dataclasses.dataclass(frozen=True)
class WorldKey:
    """What makes two cases share ranks; ``isolation`` is empty for those that share with all."""

    size: int
    device: str
    debug_level: str = "OFF"
    isolation: str = ""

    def __str__(self) -> str:
        debug = "" if self.debug_level == "OFF" else f", debug level {self.debug_level}"
        isolation = f", for {self.isolation} alone" if self.isolation else ""
        return f"{self.size} ranks on {self.device}{debug}{isolation}"


@dataclasses.dataclass(frozen=True)
class RankSpec:
    """How one rank process starts."""

    key: WorldKey
    index: int
    directory: str
    """Private to the world: the rendezvous file, the board and the ranks' outputs."""
    device_index: int
    """The CUDA device; without meaning on the CPU."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One case, as every rank of a world receives it.

    ``parameters`` is pickled by the controller and unpickled after the case's module was imported
    under the controller's name for it, so that classes of that module are found.
    """

    number: int
    module: str
    path: str
    function: str
    implementation: str
    parameters: bytes
    init_seed: int
    data_seed: int
    tmp_path: str
    deadline: float
    check_collectives: bool = False


@dataclasses.dataclass
class Result:
    """What one rank says of one job; only built-in types inside, so that it always unpickles."""

    number: int
    rank: int
    verdict: str
    text: str = ""
    location: Location | None = None
    agreed: bool = False
    """All ranks failed alike and are still in step."""
    is_worn_out: bool = False
    """Too much has gathered in the process that an implementation may keep; the world is replaced."""
    left_behind: list[str] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)
    observations: Observations = dataclasses.field(default_factory=Observations)


def dump_parameters(parameters: dict[str, Any]) -> bytes:
    """Pickle a case's parameters.

    Raises:
        ValueError: one cannot cross processes; names it.
    """
    for name, value in parameters.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise ValueError(
                f"parameter {name!r} = {value!r} cannot cross processes ({error}); use a plain value or a function "
                "or class at the top level of the case's module"
            ) from None
    return pickle.dumps(parameters)
