"""The messages between the controller and its ranks. Imports no torch, because the controller imports none."""

import dataclasses
import pickle
from collections.abc import Mapping
from typing import Any

from shardproof.harness.judging.explanation import Explanation
from shardproof.harness.judging.finding import Location
from shardproof.harness.judging.observations import Observations
from shardproof.harness.judging.texts import rank_count

#: The file name of the world's board, the memory shared with its ranks, in the world's directory.
BOARD = "board"

#: The ending of the file in which a rank counts its complete stack dumps, beside its output.
DUMPED = ".dumped"


@dataclasses.dataclass(frozen=True)
class WorldKey:
    """Identifies a world: cases with equal keys run on the same rank processes."""

    size: int
    device: str  # the device type, "cpu" or that of the accelerator
    debug_level: str = "OFF"  # the ranks' ``TORCH_DISTRIBUTED_DEBUG``
    # The name of the adapter or the id of the case for which the world is reserved; empty if any case may use it.
    isolation: str = ""
    backend: str = "gloo"  # the backend of the ranks' process groups, such as "gloo" or "nccl"
    own_hash_seeds: bool = False  # each rank hashes strings with a seed of its own, as under torchrun

    def __str__(self) -> str:
        debug = "" if self.debug_level == "OFF" else f", debug level {self.debug_level}"
        hashes = ", own hash seeds" if self.own_hash_seeds else ""
        isolation = f", reserved for {self.isolation}" if self.isolation else ""
        backend = ", over gloo" if self.device != "cpu" and self.backend == "gloo" else ""
        return f"{rank_count(self.size)} on {self.device}{backend}{debug}{hashes}{isolation}"


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Where the ranks of a world of several hosts meet: in the store of their torchrun job.

    Keys of the world have the prefix, and with the key ranks prove to each other that they belong to the job.
    """

    master: str
    port: int
    prefix: str
    key: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class RankSpec:
    """The parameters with which one rank process starts."""

    key: WorldKey
    index: int
    directory: str  # a directory private to the world, with the rendezvous file, the board and the ranks' outputs
    device_index: int  # the accelerator's device; ignored on the CPU
    nodes: tuple[int, ...] = ()  # the host of each rank, numbered from 0; empty if all are on one
    meeting: Meeting | None = None  # where the ranks of several hosts meet; None if all are on one
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The controller's ``sys.path``; None if the process was started by the controller.
    search_path: tuple[str, ...] | None = None
    hash_seed: int | None = None  # ``PYTHONHASHSEED`` of the process; None if it keeps that of the forkserver


@dataclasses.dataclass(frozen=True)
class Job:
    """One case, as the controller sends it to every rank of a world."""

    number: int  # identifies the job in results and on the board
    module: str  # the name under which the controller imported the case's module
    path: str
    function: str  # the qualified name of the case's function in the module
    implementation: str  # the name of the adapter, as in ``registry``
    # The case's parameters, pickled by :func:`dump_parameters`. A rank unpickles them after it has imported the case's
    # module under the controller's name, so that pickle finds classes of that module.
    parameters: bytes
    init_seed: int  # the seed of ``random`` and torch at the start of the case
    data_seed: int
    tmp_path: str  # a private directory of the case, shared by its ranks
    deadline: float
    check_collectives: bool = False  # ranks compare their announcements before they enter each collective
    captures: bool = False  # ranks copy what modules compute, and explain where the runs of the case first diverge
    item: str = ""  # the id of the case's item, for what is written down of it
    simulates: int = 0  # the number of ranks of the world that the one rank simulates; 0 simulates nothing


@dataclasses.dataclass(frozen=True)
class RollCall:
    """Asks each rank, after an exception at the same place on all of them, whether it is in step with the others.

    A rank answers with a ``Result`` once its device has finished and it has met the others in an exchange and in a
    barrier. One that cannot answer is stuck.
    """

    number: int


@dataclasses.dataclass
class Result:
    """The result of one job or roll call on one rank.

    Contains only built-in types and types of ``judging``, so that the controller can always unpickle it.
    """

    number: int
    rank: int
    verdict: str  # the value of a ``Verdict``
    text: str = ""  # the traceback or message of a failure; empty if the rank passed
    # Where the runs diverge, if the failure is a ``Divergence``, or the call of the training that raised.
    location: Location | None = None
    # Whether all ranks raised the same failure together, so that they are still in step and the world can run the next
    # case.
    agreed: bool = False
    # Whether the process holds too many of the objects that the implementation is allowed to leave behind, so that the
    # world must be replaced.
    is_worn_out: bool = False
    # One line for each kind of state that the case changed and did not restore.
    left_behind: list[str] = dataclasses.field(default_factory=list)
    # The same for state that an implementation may change when it is first used in a process. Whether it may keep what
    # is named here, or leaks it in each case, only a second run of the case in the process tells.
    excused: list[str] = dataclasses.field(default_factory=list)
    # The same for state that the implementation's traits allow. The process is then no place for others.
    kept: list[str] = dataclasses.field(default_factory=list)
    observations: Observations = dataclasses.field(default_factory=Observations)
    # Where the runs of the case first diverge; None without capture, or if the rank has not ended it.
    explanation: Explanation | None = None


def dump_parameters(parameters: dict[str, Any]) -> bytes:
    """Pickle a case's parameters; a ValueError names one that cannot be pickled."""
    for name, value in parameters.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise ValueError(
                f"parameter {name!r} = {value!r} cannot cross processes ({error}); use a plain value or a function "
                "or class at the top level of the case's module"
            ) from None
    return pickle.dumps(parameters)
