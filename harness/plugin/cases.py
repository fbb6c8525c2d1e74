"""One collected case: its parameters, the capabilities and hardware that it needs, and how it runs."""

import dataclasses
import inspect
import pathlib
import random
import re
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import pytest

from shardproof import folders
from shardproof.harness.adapters.capability import EVERY, Hardware
from shardproof.harness.judging.texts import bounded
from shardproof.harness.plugin import drawing, expected
from shardproof.harness.plugin.options import MOST_DEADLINE_SECONDS
from shardproof.harness.plugin.packaged import SuiteModule
from shardproof.harness.plugin.records import MadeRecord
from shardproof.harness.plugin.selection import Selection
from shardproof.harness.worlds import scratch
from shardproof.harness.worlds.jobs import Job, WorldKey, dump_parameters
from shardproof.harness.worlds.pool import Pool
from shardproof.harness.worlds.torchrun.fleet import TooFewRanks
from shardproof.harness.worlds.waiting import WaitedTooLong
from shardproof.harness.worlds.world import WorldDied
from shardproof.runfile import Verdict

_REPLACEMENTS = {
    "tmp_path": "rank.tmp_path",
    "tmpdir": "rank.tmp_path",
    "tmp_path_factory": "rank.tmp_path",
    "monkeypatch": "rank.monkeypatch",
    "capsys": "nothing: the output of the ranks is attached to the report",
    "capfd": "nothing: the output of the ranks is attached to the report",
    "request": "parametrize",
}

#: What an adapter lacks whose trait ``reads`` is "gathering".
_READS = "pictures that only read"


@dataclasses.dataclass(frozen=True)
class Launch:
    """The value of the parameter ``rank`` in the pytest process; in a rank, a ``Rank`` takes its place.

    Attributes:
        implementation: the name of the implementation under test.
        size: the number of ranks of the world.
        simulates: the number of ranks of the simulated world, of which the one rank makes itself single ones; 0 where
            nothing is simulated.
    """

    implementation: str
    size: int
    simulates: int = 0

    def __str__(self) -> str:
        return f"{self.implementation}-{self.label}"

    @property
    def label(self) -> str:
        """The part of an id that is the same for all implementations: "w4", and "s4096" for a simulated world."""
        return f"s{self.simulates}" if self.simulates else f"w{self.size}"


def is_case(item: pytest.Item) -> TypeGuard[pytest.Function]:
    """Return whether the item is a case, which runs on ranks."""
    return isinstance(item, pytest.Function) and isinstance(_parameters(item).get("rank"), Launch)


def launch_of(item: pytest.Function) -> Launch:
    """Return the implementation and the world size of a case."""
    launch = _parameters(item)["rank"]
    assert isinstance(launch, Launch), "only a case has a launch"
    return launch


def case_id(item: pytest.Function) -> str:
    """Return the id of a case in run files and files of known failures, which is the same for all implementations."""
    launch = launch_of(item)
    # The node id depends on the root directory of the run; the id of a case of shardproof's own suites must not.
    if isinstance(item.parent, SuiteModule):
        path = f"suites/{item.path.name}"
    else:
        # Outside of the root directory a file that is named on the command line has an empty path in its node id.
        path = item.nodeid.partition("::")[0] or item.path.name
    return f"{path}::{item.name.replace(f'[{launch}', f'[{launch.label}', 1)}"


def requirements(item: pytest.Item) -> tuple[str, ...]:
    """Return the ids of the requirements that a case checks."""
    return tuple(name for mark in item.iter_markers("contract") for name in mark.args)


def usage_error(item: pytest.Function) -> str | None:
    """Return why the item cannot run on ranks, in one line that names an alternative, or None if it can."""
    if item.cls is not None:
        return f"{item.nodeid}: a case is a plain function, not a method: classes do not cross processes"
    parameters = _parameters(item)
    indirect = {
        name for mark in item.iter_markers("parametrize") if mark.kwargs.get("indirect") for name in _names(mark)
    }
    for name in inspect.signature(item.function).parameters:
        if name not in parameters or name in indirect:
            instead = _REPLACEMENTS.get(name, "a parameter, or a helper function called in the case")
            return f"{item.nodeid}: fixture {name!r} cannot cross processes; use {instead}"
    if used := [name for mark in item.iter_markers("usefixtures") for name in mark.args]:
        return f"{item.nodeid}: usefixtures({used[0]!r}) acts in the controller, not in ranks; use rank.monkeypatch"
    try:
        dump_parameters(_own_parameters(item))
    except ValueError as error:
        return f"{item.nodeid}: {error}"
    return None


def missing(item: pytest.Function, selection: Selection) -> tuple[Verdict, list[str]] | None:
    """Return why a case must be skipped: the verdict and the names of what is missing, or None if it can run.

    A missing capability gives ``unsupported``; too few devices or missing hardware alone give ``unmet``. Everything
    that is missing is named, capabilities first, so that a reader knows what one more capability would make run.
    """
    launch = launch_of(item)
    if why := selection.not_imported.get(launch.implementation):
        return Verdict.UNMET, [why]
    if drawing.drawn_parameter(item) is not None and (lacking := drawing.missing()):
        return Verdict.UNMET, lacking
    if launch.simulates and (many := _indivisible(item, launch.simulates)):
        return Verdict.UNMET, [many]
    needed = {name for mark in item.iter_markers("needs") for name in mark.args}
    adapter = selection.implementations[launch.implementation]
    lacks = needed - selection.capabilities[launch.implementation]
    unsupported = sorted(str(name) for name in lacks if not isinstance(name, Hardware))
    options = [mark.args[0] for mark in item.iter_markers("takes")]
    unsupported += [f"a name for {one}" for one in options if one not in adapter.option_names]
    hardware = {name for name in needed if isinstance(name, Hardware)}
    unmet = []
    if too_few := selection.lacking_for(launch.size):
        unmet.append(too_few)
    elif hardware & {Hardware.STREAMS, Hardware.LATE_COPIES} and adapter.traits.reads == "gathering":
        # What gathers in order to read may wait for what the case wants to see missing.
        unsupported.append(_READS)
    else:
        unmet += sorted(str(name) for name in hardware - selection.hardware)
    if not unsupported and not unmet:
        return None
    return Verdict.UNSUPPORTED if unsupported else Verdict.UNMET, [*unsupported, *unmet]


def _indivisible(item: pytest.Function, size: int) -> str:
    """Return what is missing where the meshes of a case do not fit into a simulated world; empty if they do."""
    mark = item.get_closest_marker("simulated")
    multiple = mark.kwargs.get("multiple_of", 1) if mark is not None else 1
    return f"a simulated world whose size is a multiple of {multiple} (not {size})" if size % multiple else ""


def skip_reason(made: MadeRecord) -> str:
    """Return pytest's reason for a skip: the verdict, what is missing, and whose it would have to be."""
    names = EVERY | {_READS}
    declared = [name for name in made.missing if name in names]
    others = [name for name in made.missing if name not in names]
    if not declared:
        return f"{made.verdict}: {', '.join(others)}"
    alone = " alone" if len(made.missing) == 1 else ""
    beside = f"; this host lacks {', '.join(others)}" if others else ""
    return f"{made.verdict}: {', '.join(declared)}{alone}, which {made.implementation} does not declare{beside}"


def draws(item: pytest.Function, selection: Selection) -> bool:
    """Return whether a case draws its parameter and can run."""
    return drawing.drawn_parameter(item) is not None and missing(item, selection) is None


def run(
    item: pytest.Function, pool: Pool, selection: Selection, *, numbers: Iterator[int], seconds: float | None = None
) -> MadeRecord:
    """Run or skip a case and return its record.

    A failure in a rank, or of a world, becomes a verdict in the record and does not raise.

    Args:
        numbers: gives each job of this process a number of its own.
        seconds: how long a case that draws its parameter draws; None for a fixed number of examples.
    """
    made = _new_record(item, selection)
    skip = missing(item, selection)
    if skip is not None:
        made.verdict, made.missing = skip
        return made
    if (parameter := drawing.drawn_parameter(item)) is not None:
        return _search(item, pool, selection, *parameter, numbers=numbers, seconds=seconds)
    _run_one(item, pool, selection, made, number=next(numbers))
    return made


def run_again(item: pytest.Function, pool: Pool, selection: Selection, made: MadeRecord, *, number: int) -> MadeRecord:
    """Run a case that has run once more with capture on, with the parameters of its record, and return a new record."""
    again = dataclasses.replace(_new_record(item, selection), parameters=made.parameters)
    # Copies take time, and nothing is taken from a cache; what hung needs no more to hang again.
    longer = 1 if made.verdict == Verdict.HANG else 2
    deadline = min(MOST_DEADLINE_SECONDS, longer * _deadline(item, selection))
    _run_one(item, pool, selection, again, number=number, deadline=deadline, captures=True)
    return again


def _search(
    item: pytest.Function,
    pool: Pool,
    selection: Selection,
    name: str,
    kind: type,
    *,
    numbers: Iterator[int],
    seconds: float | None,
) -> MadeRecord:
    """Run a case on many examples of its drawn parameter; a failure is that of the shrunk example."""

    def run_example(example: Any, deadline: float | None) -> MadeRecord:
        one = _new_record(item, selection)
        one.parameters = {**one.parameters, name: example}
        deadline = min(deadline, _deadline(item, selection)) if deadline else None
        _run_one(item, pool, selection, one, number=next(numbers), deadline=deadline)
        return one

    made, launch = _new_record(item, selection), launch_of(item)
    search = drawing.Search(run_example)
    wrong_calls = selection.implementations[launch.implementation].traits.wrong_calls
    strategy = drawing.strategy_of(
        kind,
        capabilities=selection.capabilities[launch.implementation],
        wrong_calls=wrong_calls,
        world_size=launch.size,
    )
    seed = zlib.crc32(made.id.encode()) if seconds is None else random.SystemRandom().getrandbits(32)
    started = time.monotonic()
    examples = drawing.examples_of(kind, selection.effort)
    found = search.find(strategy, seed=seed, examples=examples, seconds=seconds)
    if found is not None:
        made = found.record
        if made.verdict.is_skip:
            return made
        deadline = _deadline(item, selection) if made.verdict == Verdict.HANG else None
        source = found.example.as_case(world_size=launch.size, requirements=requirements(item), deadline=deadline)
        made.text = drawing.report(found, examples=search.examples, case=source)
    made.examples, made.seconds = search.examples, time.monotonic() - started
    return made


def _run_one(
    item: pytest.Function,
    pool: Pool,
    selection: Selection,
    made: MadeRecord,
    *,
    number: int,
    deadline: float | None = None,
    captures: bool = False,
) -> None:
    """Run a case with the parameters of its record, and fill in the record.

    A world that does not start in time, or for lack of ranks or of space for temporary files, is the harness's error.
    """
    key = _world_key(item, selection, launch_of(item))
    try:
        with scratch.temporary("case-") as tmp_path:
            job = Job(
                number=number,
                module=item.module.__name__,
                path=str(pathlib.Path(item.module.__file__ or item.path)),
                function=item.function.__qualname__,
                implementation=made.implementation,
                parameters=dump_parameters(dict(made.parameters)),
                init_seed=made.seeds["init"],
                data_seed=made.seeds["data"],
                tmp_path=tmp_path,
                deadline=deadline or _deadline(item, selection),
                check_collectives=selection.check_collectives,
                simulates=launch_of(item).simulates,
                captures=captures,
                item=item.nodeid,
            )
            try:
                outcome = pool.run(key, job, alone=item.get_closest_marker("alone") is not None)
            finally:
                if key.isolation == item.nodeid:
                    pool.discard(key)
            made.take(outcome)
            if made.verdict == Verdict.HANG and outcome.dumps and (report := item.config.option.shardproof_report):
                _keep(outcome.dumps, made, pathlib.Path(report), re.sub(r"\W+", "-", item.nodeid)[-200:])
            made.results = outcome.results if captures else []
            if made.verdict == Verdict.PASS:
                made.fail_if(expected.compare([result.observations.expected_texts for result in outcome.results]))
            # While the case's own files are still there.
            _blame_a_full_directory(made)
    except (WorldDied, WaitedTooLong, TooFewRanks, OSError) as error:
        made.verdict, made.text = Verdict.HARNESS_ERROR, str(error)
        _blame_a_full_directory(made)


def _keep(dumps: Mapping[int, bytes], made: MadeRecord, report: pathlib.Path, case: str) -> None:
    """Write dumps of torch's flight recorder to a folder beside the run file, and its name to the record."""
    kept = f"{report.name}.flight/{case}"
    try:
        folders.write(report.parent, {f"{kept}/rank{rank}": dump for rank, dump in dumps.items()})
        text = f"dumps of torch's flight recorder: {kept}, next to the run file (torchfrtrace reads it)"
    except folders.NotWritten as error:
        text = f"dumps of torch's flight recorder are not kept: {error}"
    made.text = bounded(f"{made.text.rstrip()}\n{text}")


def _blame_a_full_directory(made: MadeRecord) -> None:
    """Call a failure the host's if no space is left: the implementation is not to blame for what ranks then raise."""
    if made.verdict != Verdict.PASS and scratch.is_full():
        full = f"no space is left in {scratch.where()}; free some, or set TMPDIR to a directory with space"
        made.verdict, made.text = Verdict.HARNESS_ERROR, f"{full}\n{made.text}"


def interrupted(item: pytest.Function, selection: Selection, why: str) -> MadeRecord:
    """Return the record of a case that an exception in the pytest process ended, as pytest-timeout raises one."""
    made = _new_record(item, selection)
    made.verdict, made.text = Verdict.HARNESS_ERROR, f"the pytest process stopped waiting for the case: {why}"
    return made


def interrupted_by_a_restart(item: pytest.Function, selection: Selection) -> MadeRecord:
    """Return the record of a case during which a torchrun job ended, before torchrun restarted it."""
    made = _new_record(item, selection)
    why = "the controller of the torchrun job ended while the case ran, and torchrun restarted the job"
    made.verdict, made.text = Verdict.CRASH, f"{why}; the case is not run again"
    return made


def _new_record(item: pytest.Function, selection: Selection) -> MadeRecord:
    launch = launch_of(item)
    made_id = case_id(item)
    # Without the parameters: their combinations then train one model on the same data, and share its baseline.
    seed = zlib.crc32(made_id.partition("[")[0].encode()) & 0x3FFF_FFFF
    return MadeRecord(
        id=made_id,
        nodeid=item.nodeid,
        implementation=launch.implementation,
        requirement=",".join(requirements(item)),
        world=launch.simulates or launch.size,
        device=selection.device,
        parameters=_own_parameters(item),
        seeds={"init": seed, "data": seed + 1},
        verdict=Verdict.PASS,
        seconds=0.0,
    )


def _world_key(item: pytest.Function, selection: Selection, launch: Launch) -> WorldKey:
    isolation = "case" if selection.isolate else selection.implementations[launch.implementation].traits.isolation
    names = {"shared": "", "adapter": launch.implementation, "case": item.nodeid}
    mark = item.get_closest_marker("world")
    kind = mark.kwargs if mark is not None else {}
    return WorldKey(launch.size, selection.device, isolation=names[isolation], backend=selection.backend, **kind)


def _deadline(item: pytest.Function, selection: Selection) -> float:
    mark = item.get_closest_marker("deadline")
    return float(mark.args[0]) if mark else selection.deadline


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec is not None else {}


def _own_parameters(item: pytest.Item) -> dict[str, Any]:
    return {name: value for name, value in _parameters(item).items() if name != "rank"}


def _names(mark: pytest.Mark) -> Iterator[str]:
    names = mark.args[0] if mark.args else mark.kwargs["argnames"]
    yield from (name.strip() for name in names.split(",")) if isinstance(names, str) else names
