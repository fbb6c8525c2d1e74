"""The options of a run: a row each, with its check.

A row of :class:`Options` is all that there is of an option: pytest's parser and ``--help``, the checked value in
``selection.Selection``, the command that repeats a case and the option's line in docs/options.md are made of the rows.
"""

import dataclasses
import enum
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

from shardproof import contract as contracts
from shardproof.harness.adapters import registry
from shardproof.harness.judging.texts import rank_count
from shardproof.harness.worlds.torchrun.meeting import JobProcess

DEFAULT_IMPLEMENTATIONS = ("reference",)
"""The implementations of a run without ``--impl``."""

#: The deadline of a case in seconds, on accelerators and on the CPU, for a run without ``--deadline``.
_DEFAULT_DEADLINE, _DEFAULT_DEADLINE_ON_CPU = 30.0, 60.0

#: How long the cases that call what was changed may run, in seconds, for a run without ``--seconds``.
_DEFAULT_SECONDS = 60.0

#: How long cases of profiles may begin, in seconds after the start of the run, for a run without ``--seconds``. With
#: the deadline of the last case and the end of the run, that is ten minutes.
_SECONDS_OF_PROFILES = 530.0

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


class Asked:
    """The command line's values, and the checked value of each option, which is made when it is first needed.

    Attributes:
        given: the values of the command line, or their defaults, by the names of the options.
        process: this process in a torchrun job, if it is the controller of one.
    """

    def __init__(self, given: Mapping[str, Any], process: JobProcess | None) -> None:
        self.given = {name: given.get(name, option.absent) for name, option in OPTIONS.items()}
        self.process = process
        self._checked: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._checked:
            self._checked[name] = OPTIONS[name].check(self.given[name], self)
        return self._checked[name]

    @functools.cached_property
    def device_count(self) -> int:
        """The number of the accelerator's devices: in a torchrun job one for each rank, or none."""
        from shardproof.harness.tensors import devices  # late: it imports torch

        count = devices.count()
        if self.process is None:
            return count
        # Every rank of the job has the device of its local rank.
        return self.process.size if count >= self.process.local_size else 0


# The checks of the options. Each takes the value of the command line and returns the checked one, or raises ValueError
# with one line that names the option and the value. What imports torch is imported late, after ``--impl`` is checked.


def _as_given(value: Any, asked: Asked) -> Any:
    return value


def _impl(text: str | None, asked: Asked) -> tuple[str, ...]:
    check_names(text)
    names = DEFAULT_IMPLEMENTATIONS if text is None else tuple(map(str.strip, text.split(",")))
    if not all(names):
        raise ValueError(f"--impl {text}: expected names such as reference,torch.fully_shard")
    return names


def check_names(text: str | None) -> None:
    """Refuse names that no implementation has; a typo ends the run before it has imported torch.

    Raises:
        ValueError: a name is neither built-in nor registered nor of the form ``module:Class``.
    """
    for name in filter(None, map(str.strip, (text or "").split(","))):
        registry.target_of(name)


def _device(given: str, asked: Asked) -> str:
    from torch.distributed import Backend

    from shardproof.harness.tensors import devices

    device = "cpu" if asked["simulate"] else given
    shared = asked["ranks_per_gpu"]
    devices.check(device)
    here, process = devices.accelerator(), asked.process
    if process is not None and device == here and devices.count() < process.local_size:
        started, has = rank_count(process.local_size), f"{devices.count()} {here} devices"
        raise ValueError(
            f"--device {here}: torchrun started {started} on this host, which has {has}; start one rank for each "
            "device, or use --device cpu"
        )
    count = asked.device_count
    if shared > 1 and not (count and here in Backend.backend_capability["gloo"]):
        why = f"gloo does not support tensors on {here}" if count else "torch finds no accelerator here"
        raise ValueError(f"--ranks-per-gpu {shared}: {why}; leave it out")
    # A world of one rank shards nothing, so "auto" takes the accelerator only where two ranks have a device.
    return str(here) if device == here or (device == "auto" and count * shared > 1) else "cpu"


def _world(text: str | None, asked: Asked) -> tuple[int, ...] | None:
    if text is None:
        return None
    sizes, process = _sizes("--world", text, example="2,4"), asked.process
    device, count, shared = asked["device"], asked.device_count, asked["ranks_per_gpu"]
    for size in sizes:
        if process is not None and size > process.size:
            raise ValueError(
                f"--world {size}: torchrun started {rank_count(process.size)}; start {size} or leave it out"
            )
        if device != "cpu" and size > count * shared:
            alone = "; a rank needs one of its own" if shared == 1 else ""
            raise ValueError(f"--world {size}: {there_are(count, shared, device)}{alone}")
    return sizes


def _effort(name: str, asked: Asked) -> Effort:
    if name not in list(Effort):
        raise ValueError(f"--effort {name}: expected {', '.join(Effort)}")
    is_listed = asked.given["contract"] is not None or asked.given["profile"] is not None
    return Effort.STANDARD if is_listed else Effort(name)


def _contract(version: str | None, asked: Asked) -> str | None:
    if version is None:
        return None
    if others := _choosing(asked):
        raise ValueError(f"--contract {version}: a version says which items run; leave out {others[0]}")
    newest, *_ = known = contracts.versions()
    if version != newest:
        where = f"commit {known[version]} has it" if version in known else f"known are {', '.join(known)}"
        raise ValueError(f"--contract {version}: this is version {newest}; {where}")
    return version


def _profile(text: str | None, asked: Asked) -> tuple[str, ...]:
    """Check that there are such profiles, that this hardware can have them, and that nothing else chooses items."""
    if text is None:
        return ()
    from shardproof.harness.tensors import devices

    if others := _choosing(asked, "contract"):
        raise ValueError(f"--profile {text}: a profile says which items run; leave out {others[0]}")
    device, known = asked["device"], contracts.profiles()
    has_nccl = devices.BACKENDS.get(device) == "nccl" and asked["ranks_per_gpu"] == 1
    hardware = contracts.class_of(device, has_nccl=has_nccl)
    names = tuple(dict.fromkeys(contracts.named(text)))
    if not names or any(name not in known for name in names):
        raise ValueError(f"--profile {text}: expected {', '.join(known)}, or several of them, separated by commas")
    for name in names:
        if hardware not in (can := known[name].classes):
            classes = ", ".join(one for one in contracts.CLASSES if one in can)
            raise ValueError(f"--profile {name}: it is of {classes}, and --device {device} is {hardware}")
    return names


def _choosing(asked: Asked, *others: str) -> list[str]:
    """The options that say, as a version and a profile do, which items run."""
    given = asked.given
    found = ["--simulate"] if asked["simulate"] else []
    found += [f"--{other} {given[other]}" for other in others if given[other] is not None]
    return found + ([f"--effort {given['effort']}"] if given["effort"] != Effort.FULL else [])


def _deadline(seconds: float | None, asked: Asked) -> float:
    if seconds is None:
        return _DEFAULT_DEADLINE_ON_CPU if asked["device"] == "cpu" else _DEFAULT_DEADLINE
    check_deadline(seconds, f"--deadline {seconds:g}")
    return seconds


def check_deadline(seconds: float, given: str) -> None:
    """Refuse a deadline, ``given`` so by the user, that is not a positive number up to ``MOST_DEADLINE_SECONDS``."""
    if not 0 < seconds <= MOST_DEADLINE_SECONDS:
        raise ValueError(f"{given}: expected a positive number of seconds, at most {MOST_DEADLINE_SECONDS:g}")


def _changed(texts: Sequence[str] | None, asked: Asked) -> tuple[str, ...]:
    if texts:
        _check_change(f"--changed {texts[0]}", asked)
    return tuple(texts or ())


def _changed_since(revision: str | None, asked: Asked) -> str:
    if revision is not None:
        _check_change(f"--changed-since {revision}", asked)
    return revision or ""


def _check_change(given: str, asked: Asked) -> None:
    for name in ("contract", "profile", "simulate"):
        if (other := asked.given[name]) is not None:
            raise ValueError(f"{given}: the change says which items run; leave out --{name} {other}")


def _seconds(seconds: float | None, asked: Asked) -> float:
    if seconds is None:
        return _SECONDS_OF_PROFILES if asked.given["profile"] is not None else _DEFAULT_SECONDS
    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds {seconds:g}: expected a positive number of seconds")
    if asked.given["profile"] is None and not _has_change(asked):
        raise ValueError("--seconds: it is for --profile, --changed or --changed-since, and none is given")
    return seconds


def _map(file: str | None, asked: Asked) -> pathlib.Path | None:
    if file is None:
        return None
    if not _has_change(asked):
        raise ValueError("--map: it is for --changed or --changed-since, and neither is given")
    return pathlib.Path(file)


def _has_change(asked: Asked) -> bool:
    return bool(asked.given["changed"] or asked.given["changed_since"])


def _fuzz(seconds: float | None, asked: Asked) -> float | None:
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"--fuzz {seconds:g}: expected a positive number of seconds")
    return seconds


def _expectations(files: Sequence[str] | None, asked: Asked) -> tuple[pathlib.Path, ...]:
    return tuple(map(pathlib.Path, files or ()))


def _ranks_per_gpu(ranks: int | None, asked: Asked) -> int:
    if ranks is None:
        return 1
    given = f"--ranks-per-gpu {ranks}"
    if ranks < 1:
        raise ValueError(f"{given}: expected a positive number of ranks")
    if asked.given["device"] == "cpu":
        raise ValueError(f"{given}: --device cpu uses no GPU; leave one of them out")
    if asked.process is not None:
        raise ValueError(f"{given}: torchrun started the ranks, each for a GPU of its own; run pytest without it")
    return ranks


def _check_collectives(checks: bool, asked: Asked) -> bool:
    if checks and asked.process is not None and asked.process.nodes > 1:
        started = f"torchrun started ranks on {asked.process.nodes} hosts"
        raise ValueError(f"--check-collectives: {started}, which cannot read each other's boards; leave it out")
    return checks


def _simulate(text: str | None, asked: Asked) -> tuple[int, ...]:
    """Parse the sizes of simulated worlds, and refuse options of real ones beside them."""
    if text is None:
        return ()
    from shardproof.harness.simulation.world import check_world

    sizes = _sizes("--simulate", text, example="1024,16384")
    device, world, ranks = (asked.given[name] for name in ("device", "world", "ranks_per_gpu"))
    if device not in ("auto", "cpu"):
        raise ValueError(f"--simulate: the tensors of a simulated world are on no device; leave out --device {device}")
    if world is not None:
        raise ValueError(f"--world {world} cannot be combined with --simulate, which has no real ranks")
    for size in sizes:
        try:
            check_world(size)
        except ValueError as error:
            raise ValueError(f"--simulate {text}: {error}") from None
    if asked.process is not None:
        raise ValueError(
            "--simulate: torchrun started ranks, which simulated worlds do not need; run pytest without it"
        )
    if ranks is not None:
        raise ValueError(f"--simulate: a simulated world uses no GPU; leave out --ranks-per-gpu {ranks}")
    return sizes


def _sizes(option: str, text: str, *, example: str) -> tuple[int, ...]:
    sizes = []
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise ValueError(f"{option} {text}: expected positive numbers of ranks such as {example}, not {part!r}")
        sizes.append(int(part))
    return tuple(dict.fromkeys(sizes))


def there_are(devices: int, ranks_per_gpu: int, named: str = "") -> str:
    """Say how many devices there are, and for how many ranks each."""
    each = f", {ranks_per_gpu} ranks on each" if ranks_per_gpu > 1 else ""
    return f"there are {devices}{f' {named} devices' if named else ''}{each}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a run, apart from its name, which is that of its field in :class:`Options`.

    Attributes:
        help: its text in ``--help``.
        page: its text in docs/options.md; empty for that of ``--help``.
        metavar: its value in ``--help``; empty for a flag, which has none.
        values: its values in docs/options.md; empty for ``metavar``.
        type: makes the value of a word of the command line.
        default: the value without the option; False for a flag. Any other value makes a pytest run one of shardproof.
        several: whether it may be given several times, and has a list of values.
        check: checks a value and returns what the field has; raises ValueError with one line.
        repeats: whether the command that repeats a case has it: ``impl``, ``device``, ``simulate`` and ``isolate`` as
            the case ran, the others as the run was given them.
    """

    help: str
    page: str = ""
    metavar: str = ""
    values: str = ""
    type: Callable[[str], Any] = str
    default: Any = None
    several: bool = False
    check: Callable[[Any, "Asked"], Any] = _as_given
    repeats: bool = False

    @property
    def absent(self) -> Any:
        """The value of a command line without the option."""
        return self.default if self.metavar else False


_OPTION = "option"
_P = ParamSpec("_P")


def _field(make: Callable[_P, Option]) -> Callable[_P, Any]:
    def field(*arguments: _P.args, **keywords: _P.kwargs) -> Any:
        return dataclasses.field(metadata={_OPTION: make(*arguments, **keywords)})

    return field


_option = _field(Option)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The checked options of a run, in the order of ``--help`` and of docs/options.md.

    None of the options affects tests that are no cases.
    """

    impl: tuple[str, ...] = _option(
        metavar="NAMES",
        check=_impl,
        repeats=True,
        help="comma-separated implementations: names that `shardproof implementations` lists, or module:Class "
        f"(default: {','.join(DEFAULT_IMPLEMENTATIONS)})",
        page="the implementations, separated by commas: `reference` (default), others that `shardproof "
        "implementations` lists, such as `torch.fully_shard` ([what each lacks](implementations.md)), or "
        "`module:Class`",
    )
    device: str = _option(
        metavar="TYPE",
        values="auto|cpu|TYPE",
        default="auto",
        check=_device,
        repeats=True,
        help="cpu, or the accelerator's type, as in torch; auto: the accelerator if it has two devices, else cpu",
        page="the device type of all ranks: `cpu`, or the type that `torch.accelerator` reports here, such as `cuda` "
        "or `xpu` ([other vendors](adapter-reference.md#devices-of-other-vendors)). Default `auto`: the accelerator "
        "with two devices or more",
    )
    world: tuple[int, ...] | None = _option(
        metavar="SIZES",
        values="2,4",
        check=_world,
        help="run only cases with these numbers of ranks, such as 2,4",
        page="only cases with these numbers of ranks (default: all)",
    )
    report: str | None = _option(
        metavar="FILE",
        help="write the run file to this path, as JSON",
        page="write a [run file](run-files.md): the environment, and a record for each case and implementation",
    )
    effort: Effort = _option(  # noqa: RUF009  (a field)
        metavar="NAME",
        values="quick|standard|full",
        default="full",
        check=_effort,
        help="how much of the selected cases runs: full (default), standard (every pair of values of parameters, and "
        "every number of ranks) or quick (one item of each test function)",
        page="how much of the selected cases runs: `full` (default); `standard`, every pair of parameter values of "
        "each case and every number of ranks; `quick`, one item of each test function, or of each of its values that "
        "are separate subjects ([below](#shorter-runs))",
    )
    contract: str | None = _option(
        metavar="VERSION",
        check=_contract,
        help="run the items of this version of the contract, such as 2026.12, and no others; instead of --effort",
        page="only the items of this [version of the contract](contract.md#versions), such as `2026.12`; an older "
        "version is refused with the commit that has it",
    )
    profile: tuple[str, ...] = _option(
        metavar="NAMES",
        check=_profile,
        help="run the items of these profiles of the contract, such as core,zero3, and no others, until --seconds are "
        "over; instead of --effort",
        page="only the items of these [profiles of the contract](contract.md#profiles), such as `core,zero3`, that the "
        "hardware can have, until `--seconds` are over ([below](#a-profile))",
    )
    changed: tuple[str, ...] = _option(
        metavar="FILE[:FUNCTION]",
        several=True,
        check=_changed,
        help="run the cases that call this function, or any of this file of torch, the likeliest finders first, until "
        "--seconds are over; may be repeated",
        page="only the cases that call a function of torch, or any of a file, the likeliest finders first, until "
        "`--seconds` are over ([a verdict in a minute](torch-from-source.md#a-verdict-in-a-minute)); may be given "
        "several times",
    )
    changed_since: str = _option(
        metavar="REV",
        check=_changed_since,
        help="the same for all functions that the git checkout from which torch is imported has changed since REV",
        page="the same for all functions that the git checkout from which torch is imported has changed since a "
        "revision",
    )
    seconds: float = _option(
        metavar="SECONDS",
        type=float,
        check=_seconds,
        help=f"how long cases may begin, with --changed or --changed-since (default: {_DEFAULT_SECONDS:g}) or "
        f"--profile (default: {_SECONDS_OF_PROFILES:g})",
        page="how long cases may begin: with `--changed` or `--changed-since` counted from the first case of each "
        f"worker (default {_DEFAULT_SECONDS:g}), with `--profile` from the start of the run (default "
        f"{_SECONDS_OF_PROFILES:g}, so that it ends within ten minutes); the other cases are left out of the run file, "
        "with that reason",
    )
    map: pathlib.Path | None = _option(  # noqa: RUF009  (a field)
        metavar="FILE",
        check=_map,
        help="the map of items to functions for --changed, instead of the packed one",
        page="the map of items to functions for `--changed`, instead of the packed one ([how it is made](coverage.md))",
    )
    deadline: float = _option(
        metavar="SECONDS",
        type=float,
        check=_deadline,
        repeats=True,
        help=f"seconds that a case may take (default: {_DEFAULT_DEADLINE_ON_CPU:g} on the CPU, {_DEFAULT_DEADLINE:g} "
        "on accelerators)",
        page="the time that a case may take before its verdict is `hang` (default "
        f"{_DEFAULT_DEADLINE_ON_CPU:g} on the CPU, {_DEFAULT_DEADLINE:g} on accelerators; at most "
        f"{MOST_DEADLINE_SECONDS:g})",
    )
    fuzz: float | None = _option(
        metavar="SECONDS",
        type=float,
        check=_fuzz,
        help="seconds for which the cases that draw models and schedules, in total, search for a failing example "
        "(default: 10 examples each, always the same)",
        page="spend this long in total on searching, over all drawn cases, for a model and a schedule that fail "
        "([drawn cases](cases.md#drawn-cases)); needs the extra `fuzz`",
    )
    expectations: tuple[pathlib.Path, ...] = _option(
        metavar="FILE",
        several=True,
        check=_expectations,
        repeats=True,
        help="another file of known failures, in addition to those next to the cases; may be repeated",
        page="read another file of [known failures](#known-failures), in addition to those next to the cases; may be "
        "given several times",
    )
    explain: bool = _option(
        help="run each failing case again with capture on, and name the first tensor that diverges",
        page="run each failing case a second time, record what every module computes, and name the first tensor that "
        "diverges ([below](#explaining-a-failure))",
    )
    ranks_per_gpu: int = _option(
        metavar="N",
        type=int,
        check=_ranks_per_gpu,
        repeats=True,
        help="how many ranks may share a GPU; more than one use gloo, because NCCL refuses them (default: 1)",
        page="with `--device cuda`, up to N ranks share a GPU (default 1). More than one use gloo, because NCCL "
        "refuses them: `--ranks-per-gpu 2` runs cases with two ranks on a single GPU, on real device memory; cases "
        "that need NCCL's streams are `unmet`, and with torch 2.11 cases that gather DTensors `crash` (F-250)",
    )
    check_collectives: bool = _option(
        check=_check_collectives,
        repeats=True,
        help="compare the collectives of the ranks before they start, and fail instead of blocking",
        page="before each collective, ranks compare what they are about to issue (kind, dtype, bytes, operator, root), "
        "and fail instead of blocking",
    )
    simulate: tuple[int, ...] = _option(
        metavar="SIZES",
        values="1024,16384",
        check=_simulate,
        repeats=True,
        help="run only the cases with the mark simulated, in one process, as single ranks of simulated worlds of "
        "these sizes, such as 1024,16384",
        page="run the cases of [simulated worlds](simulation.md) of these sizes, and no others, in one process without "
        "devices: counts, bytes, groups, layouts and memory of single ranks",
    )
    isolate: bool = _option(repeats=True, help="run each case in new rank processes, which run nothing else")


OPTIONS: Mapping[str, Option] = {field.name: field.metadata[_OPTION] for field in dataclasses.fields(Options)}
"""The options by their names as fields."""


def options_table() -> str:
    """Return the table of docs/options.md, and which options the command that repeats a case has."""
    lines = ["| option | meaning |", "|---|---|"]
    for name, option in OPTIONS.items():
        values = (option.values or option.metavar).replace("|", r"\|")
        lines.append(f"| `{' '.join(filter(None, [flag(name), values]))}` | {option.page or option.help} |")
    repeated = [f"`{flag(name)}`" for name, option in OPTIONS.items() if option.repeats]
    which = f"{', '.join(repeated[:-1])} and {repeated[-1]}"
    return "\n".join([*lines, "", f"The command that repeats a failed case has its {which}."])


def flag(name: str, prefix: str = "--") -> str:
    """Return the name of an option on the command line."""
    return f"{prefix}{name.replace('_', '-')}"
