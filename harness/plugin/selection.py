"""The checked options of a run."""

from __future__ import annotations

import dataclasses
import enum
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardproof import contract as contracts
from shardproof.harness.adapters import registry
from shardproof.harness.adapters.capability import Hardware
from shardproof.harness.verdicts.texts import rank_count
from shardproof.harness.worlds.torchrun.meeting import Place

if TYPE_CHECKING:
    from shardproof.harness.adapters.base import Adapter

DEFAULT_IMPLEMENTATIONS = ("reference",)
"""The implementations of a run without ``--impl``."""

DEFAULT_DEADLINE, DEFAULT_DEADLINE_ON_CPU = 30.0, 60.0
"""The deadline of a case in seconds, on accelerators and on the CPU, for a run without ``--deadline``."""

#: The longest deadline of a case in seconds. The process groups of the ranks time out after 30 minutes; the deadline
#: must come first, because only then the ranks' stacks and collectives are collected.
MOST_DEADLINE_SECONDS = 1500.0


class Effort(enum.StrEnum):
    """How much of the selected cases a run runs."""

    QUICK = "quick"
    """One item of each test function and implementation."""

    STANDARD = "standard"
    """Every pair of values of each case's parameters, and every number of ranks."""

    FULL = "full"
    """Everything."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """The checked options of a run.

    Attributes:
        implementations: the adapters under test, by name.
        device_count: the number of the accelerator's devices, in a torchrun job those of all its ranks. It limits
            worlds on them only, because ranks on the CPU share cores.
        worlds: the world sizes that ``--world`` selects; None selects all.
        deadline: the seconds that a case may take unless it has a deadline of its own.
        check_collectives: whether ranks compare each collective with their peers before they enter it.
        isolate: whether each case gets new rank processes, which run nothing else.
        contract: whether the items are those of the newest version of the contract, instead of those of an effort.
        profile: the profile of the contract whose items run, instead of those of an effort; empty for none.
        fuzz: how many seconds cases that draw their parameter search together; None for a fixed number of examples.
        expectations: files of known failures besides those that are beside the cases.
        explains: whether a case that fails runs once more with capture on.
        job_size: the number of ranks that torchrun started; None without torchrun.
        simulates: the sizes of the simulated worlds on which the cases marked for them run, and no others; empty runs
            the others.
        not_imported: why an implementation does not import, by name: it uses a name that the installed torch lacks. A
            class without capabilities takes its adapter's place, and its cases are unmet.
    """

    implementations: dict[str, type[Adapter]]
    device: str
    device_count: int
    worlds: tuple[int, ...] | None
    deadline: float
    check_collectives: bool = False
    isolate: bool = False
    effort: Effort = Effort.FULL
    contract: bool = False
    profile: str = ""
    fuzz: float | None = None
    expectations: tuple[pathlib.Path, ...] = ()
    explains: bool = False
    job_size: int | None = None
    simulates: tuple[int, ...] = ()
    ranks_per_gpu: int = 1
    not_imported: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def asked(self) -> str:
        """What says which of the selected cases run, as the header names it."""
        return f"profile: {self.profile}" if self.profile else f"effort: {self.effort}"

    @property
    def hardware_class(self) -> str:
        """The hardware class of the run's ranks (``shardproof.contract.CLASSES``); empty if it is of none."""
        return contracts.class_of(self.device, has_nccl=self.backend == "nccl")

    @property
    def shares_gpus(self) -> bool:
        """Whether several ranks may use one GPU; their process groups then have gloo, because NCCL refuses it."""
        return self.device != "cpu" and self.ranks_per_gpu > 1

    @property
    def backend(self) -> str:
        """The backend of the ranks' process groups."""
        from torch.distributed import get_default_backend_for_device  # late: it imports torch

        return get_default_backend_for_device("cpu" if self.shares_gpus else self.device)

    @property
    def hardware(self) -> frozenset[Hardware]:
        """What the host has for the run's ranks."""
        if self.device == "cpu":
            return frozenset()
        from shardproof.harness.tensors import devices  # late: it imports torch

        # gloo makes the host wait for each collective, so what should wait for another stream need not.
        return frozenset({Hardware.ACCELERATOR} if self.shares_gpus or not devices.occupies(self.device) else Hardware)

    def allows(self, size: int) -> bool:
        """Return whether ``--world`` selects cases on worlds of this size."""
        return self.worlds is None or size in self.worlds

    def lacking_for(self, size: int) -> str:
        """Return what a world of this size lacks, or "": ranks of the torchrun job, or devices."""
        if self.job_size is not None and size > self.job_size:
            return f"{rank_count(size)} (torchrun started {self.job_size})"
        if self.device != "cpu" and size > self.device_count * self.ranks_per_gpu:
            return f"{size} {self.device} devices ({_there_are(self.device_count, self.ranks_per_gpu)})"
        return ""


def resolve(
    *,
    impl: str | None,
    device: str,
    world: str | None = None,
    deadline: float | None = None,
    check_collectives: bool = False,
    isolate: bool = False,
    effort: str = Effort.FULL,
    contract: str | None = None,
    profile: str | None = None,
    fuzz: float | None = None,
    expectations: Sequence[str] | None = None,
    explain: bool = False,
    place: Place | None = None,
    simulate: str | None = None,
    ranks_per_gpu: int | None = None,
) -> Selection:
    """Parse and check the values of the command line options; names and sizes are separated by commas.

    None selects the default of an option. ``place`` is that of this process in a torchrun job, if it is the controller
    of one.

    Raises:
        ValueError: an implementation or the device is not available here, or a value is not valid. The message is one
            line.
    """
    check_names(impl)
    simulates = _simulated(simulate, device=device, worlds=world)
    if simulates and place is not None:
        raise ValueError(
            "--simulate: torchrun started ranks, which simulated worlds do not need; run pytest without it"
        )
    if simulates and ranks_per_gpu is not None:
        raise ValueError(f"--simulate: a simulated world uses no GPU; leave out --ranks-per-gpu {ranks_per_gpu}")
    shared = _ranks_per_gpu(ranks_per_gpu, device, place)
    chosen, count = _device("cpu" if simulates else device, place, shared)
    sizes = None if world is None else _sizes("--world", world, example="2,4")
    for size in sizes or ():
        if place is not None and size > place.size:
            raise ValueError(f"--world {size}: torchrun started {rank_count(place.size)}; start {size} or leave it out")
        if chosen != "cpu" and size > count * shared:
            alone = "; a rank needs one of its own" if shared == 1 else ""
            raise ValueError(f"--world {size}: {_there_are(count, shared, chosen)}{alone}")
    if check_collectives and place is not None and place.nodes > 1:
        started = f"torchrun started ranks on {place.nodes} hosts"
        raise ValueError(f"--check-collectives: {started}, which cannot read each other's boards; leave it out")
    if effort not in list(Effort):
        raise ValueError(f"--effort {effort}: expected {', '.join(Effort)}")
    if contract is not None:
        if effort != Effort.FULL or simulates:
            other = "--simulate" if simulates else f"--effort {effort}"
            raise ValueError(f"--contract {contract}: a version says which items run; leave out {other}")
        newest, *_ = known = contracts.versions()
        if contract != newest:
            where = f"commit {known[contract]} has it" if contract in known else f"known are {', '.join(known)}"
            raise ValueError(f"--contract {contract}: this is version {newest}; {where}")
        effort = Effort.STANDARD
    if profile is not None:
        others = ["--simulate"] if simulates else []
        others += [f"--contract {contract}"] if contract is not None else []
        others += [f"--effort {effort}"] if contract is None and effort != Effort.FULL else []
        _check_profile(profile, chosen, shared, others=others)
        effort = Effort.STANDARD
    adapters, not_imported = _adapters(impl, chosen)
    if fuzz is not None and not 0 < fuzz < math.inf:
        raise ValueError(f"--fuzz {fuzz:g}: expected a positive number of seconds")
    if deadline is not None:
        check_deadline(deadline, f"--deadline {deadline:g}")
    return Selection(
        adapters,
        chosen,
        count,
        sizes,
        deadline or (DEFAULT_DEADLINE_ON_CPU if chosen == "cpu" else DEFAULT_DEADLINE),
        check_collectives,
        isolate,
        Effort(effort),
        contract is not None,
        profile or "",
        fuzz,
        tuple(map(pathlib.Path, expectations or ())),
        explain,
        None if place is None else place.size,
        simulates,
        shared,
        not_imported,
    )


def _check_profile(name: str, device: str, ranks_per_gpu: int, *, others: Sequence[str]) -> None:
    """Check that there is a profile, that this hardware can have it, and that nothing else says which items run."""
    from shardproof.harness.tensors import devices  # late: it imports torch

    if others:
        raise ValueError(f"--profile {name}: a profile says which items run; leave out {others[0]}")
    if name not in contracts.profiles():
        raise ValueError(f"--profile {name}: expected {', '.join(contracts.profiles())}")
    hardware = contracts.class_of(device, has_nccl=devices.BACKENDS.get(device) == "nccl" and ranks_per_gpu == 1)
    if hardware not in (can := sorted(contracts.profiles()[name].classes)):
        where = f"--device {device} is {hardware}" if hardware else f"--device {device} has no NCCL"
        raise ValueError(f"--profile {name}: it is of {', '.join(can)}, and {where}")


def check_names(text: str | None) -> None:
    """Refuse names that no implementation has; a typo ends the run before it has imported torch.

    Raises:
        ValueError: a name is neither built-in nor registered nor of the form ``module:Class``.
    """
    for name in filter(None, map(str.strip, (text or "").split(","))):
        registry.target_of(name)


def check_deadline(seconds: float, given: str) -> None:
    """Refuse a deadline, ``given`` so by the user, that is not a positive number up to ``MOST_DEADLINE_SECONDS``."""
    if not 0 < seconds <= MOST_DEADLINE_SECONDS:
        raise ValueError(f"{given}: expected a positive number of seconds, at most {MOST_DEADLINE_SECONDS:g}")


def _ranks_per_gpu(asked: int | None, device: str, place: Place | None) -> int:
    """Check how many ranks may share a GPU."""
    if asked is None:
        return 1
    given = f"--ranks-per-gpu {asked}"
    if asked < 1:
        raise ValueError(f"{given}: expected a positive number of ranks")
    if device == "cpu":
        raise ValueError(f"{given}: --device cpu uses no GPU; leave one of them out")
    if place is not None:
        raise ValueError(f"{given}: torchrun started the ranks, each for a GPU of its own; run pytest without it")
    return asked


def _there_are(devices: int, ranks_per_gpu: int, named: str = "") -> str:
    """Say how many devices there are, and for how many ranks each."""
    each = f", {ranks_per_gpu} ranks on each" if ranks_per_gpu > 1 else ""
    return f"there are {devices}{f' {named} devices' if named else ''}{each}"


def _device(asked: str, place: Place | None, ranks_per_gpu: int) -> tuple[str, int]:
    from torch.distributed import Backend  # late, as everything that imports torch

    from shardproof.harness.tensors import devices

    devices.check(asked)
    here, count = devices.accelerator(), devices.count()
    if place is not None:
        if asked == here and count < place.local_size:
            started = f"torchrun started {rank_count(place.local_size)} on this host, which has {count} {here} devices"
            raise ValueError(f"--device {here}: {started}; start one rank for each device, or use --device cpu")
        # Every rank of the job has the device of its local rank.
        count = place.size if count >= place.local_size else 0
    if ranks_per_gpu > 1 and not (count and here in Backend.backend_capability["gloo"]):
        why = f"gloo does not support tensors on {here}" if count else "torch finds no accelerator here"
        raise ValueError(f"--ranks-per-gpu {ranks_per_gpu}: {why}; leave it out")
    # A world of one rank shards nothing, so "auto" takes the accelerator only where two ranks have a device.
    return (here if asked == here or (asked == "auto" and count * ranks_per_gpu > 1) else "cpu"), count


def _sizes(option: str, text: str, *, example: str) -> tuple[int, ...]:
    sizes = []
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise ValueError(f"{option} {text}: expected positive numbers of ranks such as {example}, not {part!r}")
        sizes.append(int(part))
    return tuple(dict.fromkeys(sizes))


def _simulated(text: str | None, *, device: str, worlds: str | None) -> tuple[int, ...]:
    """Parse the sizes of simulated worlds, and refuse options of real ones beside them."""
    if text is None:
        return ()
    # Imported late: it imports torch.
    from shardproof.harness.simulation.world import check_world

    sizes = _sizes("--simulate", text, example="1024,16384")
    if device not in ("auto", "cpu"):
        raise ValueError(f"--simulate: the tensors of a simulated world are on no device; leave out --device {device}")
    if worlds is not None:
        raise ValueError(f"--world {worlds} cannot be combined with --simulate, which has no real ranks")
    for size in sizes:
        try:
            check_world(size)
        except ValueError as error:
            raise ValueError(f"--simulate {text}: {error}") from None
    return sizes


def _adapters(text: str | None, device: str) -> tuple[dict[str, type[Adapter]], dict[str, str]]:
    names: Sequence[str] = DEFAULT_IMPLEMENTATIONS if text is None else [part.strip() for part in text.split(",")]
    adapters: dict[str, type[Adapter]] = {}
    not_imported = {}
    for name in names:
        if not name:
            raise ValueError(f"--impl {text}: expected names such as reference,torch.fully_shard")
        # Imported late, as registry imports the adapters: they import torch.
        from shardproof.harness.adapters import base, declarations

        try:
            adapters[name] = registry.load(name)
        except registry.NotImported as error:
            adapters[name], not_imported[name] = base.NoAdapter, str(error)  # type: ignore[type-abstract]
        else:
            if name not in registry.OWN_TRAINING:
                declarations.check(name, adapters[name], device)
    return adapters, not_imported
