"""The code of a rank process: it joins the process group of its world and then runs jobs in a loop."""

import ast
import contextlib
import datetime
import faulthandler
import functools
import importlib.util
import os
import pathlib
import pickle
import random
import signal
import sys
import threading
import traceback
import types
from collections.abc import Collection, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion.rewrite import rewrite_asserts

from shardproof.harness.adapters import registry
from shardproof.harness.adapters.base import Adapter, OwnTraining
from shardproof.harness.collectives.announce import Announcer
from shardproof.harness.collectives.board import Board
from shardproof.harness.collectives.recorder import UnknownCollective
from shardproof.harness.judging.explanation import Explanation
from shardproof.harness.judging.finding import Divergence, ProtocolError
from shardproof.harness.judging.texts import MOST_OF_A_RANK, bounded, readable
from shardproof.harness.parity import course
from shardproof.harness.parity.exchange import Exchange
from shardproof.harness.parity.rank import NotShared, Rank, Seeds
from shardproof.harness.parity.rank_state import RankState
from shardproof.harness.tensors import devices, memory, private
from shardproof.harness.worlds import flight_recorder, gloo, instruments, leftovers, probe
from shardproof.harness.worlds.jobs import BOARD, DUMPED, Job, RankSpec, Result, RollCall
from shardproof.harness.worlds.torchrun import meeting
from shardproof.harness.worlds.torchrun.meeting import Channel
from shardproof.runfile import Verdict

# Import of a case's module in a rank, under the controller's name and with pytest's assertion rewriting.


def load(name: str, path: pathlib.Path) -> types.ModuleType:
    """Import a case's module, once per process.

    A failing bare ``assert`` shows its operands, as it does in the controller. The module is registered in
    ``sys.modules`` under the controller's name, so that objects that the controller pickled by reference to that name
    can be unpickled here.
    """
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    source = path.read_bytes()
    tree = ast.parse(source, filename=str(path))
    rewrite_asserts(tree, source, str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec(compile(tree, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


#: The directories in which compilers keep their results between processes, by the variables that choose them.
_COMPILE_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
}

#: Timeout of the process groups. A collective that waits longer is stuck and not merely slow. The controller's deadline
#: expires first.
_TIMEOUT = datetime.timedelta(minutes=30)

#: Process groups that an implementation may create and abandon before the world is replaced. They are not destroyed:
#: that is not safe, because DTensor's caches return the mesh of an abandoned group again for an equal mesh.
_MOST_ABANDONED_GROUPS = 32

#: The most characters of an error that kept a case from being explained.
_MOST_OF_AN_ERROR = 500

#: Size in bytes above which a rank's output file is truncated before the next case.
_MOST_OUTPUT_BYTES = 1 << 20


def main(connection: Connection | Channel, spec: RankSpec) -> None:
    """Start this rank and run jobs until the connection closes.

    The rank sends ``("ready", pid)`` or ``("failed", traceback)``, and then one ``Result`` for each ``Job`` or
    ``RollCall`` that it receives; ``None`` ends the loop.
    """
    log = _redirect_output(pathlib.Path(spec.directory) / f"rank{spec.index}.out")
    faulthandler.enable(log)
    _dump_stacks_on_signal(log, pathlib.Path(spec.directory) / f"rank{spec.index}{DUMPED}")
    try:
        state = _start(spec)
    except probe.MovesNoData as error:
        connection.send(("failed", str(error)))
        return
    except Exception:
        connection.send(("failed", bounded(traceback.format_exc(), MOST_OF_A_RANK)))
        return
    patches = leftovers.Patches()
    memory.retire_objects()
    connection.send(("ready", os.getpid()))
    with contextlib.suppress(EOFError, OSError):
        while (message := connection.recv()) is not None:
            if isinstance(message, RollCall):
                connection.send(_answer(state, message))
                continue
            connection.send(run_job(state, message, patches))
            sys.stdout.flush()
            sys.stderr.flush()
            # The left-over check has seen what is alive now, and looks at later objects alone from here on. A model
            # that an implementation keeps until the next one takes its place must stay within reach of the collector.
            if not memory.module_names():
                memory.retire_objects()


def _dump_stacks_on_signal(log: Any, dumped: pathlib.Path) -> None:
    """Dump the stacks of all threads to ``log`` on SIGUSR1, and append a byte to ``dumped`` when the dump is complete.

    A dump has no end mark, and the controller must not read half of one. faulthandler calls the previous handler after
    the dump. That is the interpreter's own, which writes to the wakeup descriptor at once and in C, so that the byte is
    written even while the main thread runs native code.
    """
    descriptor = os.open(dumped, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)  # SIG_IGN would not write to the wakeup descriptor
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True, chain=True)


def _redirect_output(path: pathlib.Path) -> Any:
    """Redirect stdout and stderr, also of C code, to a file that the controller reads; return it, unbuffered."""
    log = path.open("ab", buffering=0)
    for number in (1, 2):
        os.dup2(log.fileno(), number)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    return log


def _start(spec: RankSpec) -> RankState:
    """Join the process group of the world, and wait until all of its ranks have."""
    key = spec.key
    for name in meeting.foreign(os.environ) if spec.environment else ():
        del os.environ[name]
    os.environ.update(spec.environment)
    if spec.search_path is not None:
        sys.path[:] = spec.search_path
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = key.debug_level
    if key.device == "cpu":
        # Otherwise torch.compile initialises the host's GPUs even for CPU graphs. That takes seconds, uses memory of a
        # shared device, and makes torch.utils.checkpoint raise an error if it happens inside a recomputed forward.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Compiled code of this world alone: a rank that is killed while it writes to a cache leaves half a file or a lock,
    # and what one torch has compiled another one may load.
    os.environ.update({name: f"{spec.directory}/compiled/{folder}" for name, folder in _COMPILE_CACHES.items()})
    if private.find(cache := "torch._dynamo.package.DynamoCache._path_prefix") is not None:
        # The forkserver's import has chosen another.
        private.put(cache, os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "dynamo"))
    dist.set_debug_level_from_env()
    torch.set_num_threads(1)
    device = torch.device("cpu") if key.device == "cpu" else torch.device(key.device, spec.device_index)
    if device.type != "cpu":
        torch.accelerator.set_device_index(spec.device_index)
    store = None if spec.meeting is None else meeting.store_of(spec.meeting)
    gloo.mend_groups()
    if key.backend == "nccl":
        flight_recorder.enable(spec.directory)
    dist.init_process_group(
        backend=key.backend,
        init_method=f"file://{spec.directory}/rendezvous" if store is None else None,
        store=store,
        rank=spec.index,
        world_size=key.size,
        timeout=_TIMEOUT,
        # Groups that a mesh splits off a bound one need options of NCCL. At the level DETAIL groups are wrapped, and a
        # wrapper cannot be split: a mesh of several dimensions would raise.
        device_id=device if key.backend == "nccl" and key.debug_level != "DETAIL" else None,
    )
    probe.check(device)
    nodes = spec.nodes or (0,) * key.size
    here = [rank for rank, node in enumerate(nodes) if node == nodes[spec.index]]
    # Constructed before the barrier, so that each rank finds the files of the others after it.
    within = Exchange(pathlib.Path(spec.directory), index=here.index(spec.index), size=len(here))
    announcer = Announcer(Board(pathlib.Path(spec.directory, BOARD), key.size), rank=spec.index)
    announcer.watch_process_groups()
    state = RankState(
        index=spec.index, size=key.size, device=device, directory=spec.directory,
        exchange=within if store is None else meeting.across(spec, within, store), announcer=announcer, nodes=nodes,
    )  # fmt: skip
    state.mesh((key.size,), ("dp",))
    dist.barrier()
    within.connect()
    return state


def run_job(state: RankState, job: Job, patches: leftovers.Patches) -> Result:
    """Run one case on this rank; the result has any exception of the case, its import or one of its threads."""
    result = Result(job.number, state.index, Verdict.PASS)
    try:
        function, parameters, implementation = _prepare(state, job)
    except Exception:
        result.verdict, result.text = Verdict.HARNESS_ERROR, bounded(traceback.format_exc(), MOST_OF_A_RANK)
        return result
    is_shared = implementation.traits.isolation == "shared"
    if not is_shared:
        patches = leftovers.Patches()  # what `prepare` and earlier cases have replaced is the adapter's
    state.stopwatch.restart()
    state.announcer.start_job(job.number, checking=job.check_collectives, patience=job.deadline)
    # Nothing is lost: the controller has already read the end of the output of each earlier case.
    if os.fstat(1).st_size > _MOST_OUTPUT_BYTES:
        os.ftruncate(1, 0)
    groups = state.foreign_groups()
    with state.stopwatch.during("leftovers"):
        before = leftovers.picture(state.device, groups=len(groups), directory=state.directory)
    with pytest.MonkeyPatch.context() as monkeypatch:
        rank = Rank(
            state, implementation=implementation, seeds=Seeds(job.init_seed, job.data_seed),
            tmp_path=pathlib.Path(job.tmp_path), monkeypatch=monkeypatch, captures=job.captures,
            simulates=job.simulates,
        )  # fmt: skip
        random.seed(job.init_seed)
        torch.manual_seed(job.init_seed)
        with _outcome(result, rank), _threads_watched():
            if job.simulates and (reason := rank.why_not_simulated()) is not None:
                result.verdict, result.text = Verdict.UNSUPPORTED, f"it cannot be simulated: {reason}"
            else:
                with instruments.attached(state.index, job):
                    function(rank, **parameters)
                rank.assert_compared()
        if job.captures:
            result.explanation = _explanation(rank, result)
        with _outcome(result):
            _finish(rank, result)
            if result.verdict == Verdict.PASS:
                _finish_queued(state.device)
    result.observations = rank.record
    if issubclass(implementation, OwnTraining):
        return result  # user code, in processes of its own
    with state.stopwatch.during("leftovers"):
        _examine(result, state, rank.driven, before=before, groups=len(groups))
    rank.record.spent = state.stopwatch.stop()
    # An adapter that has processes to itself may change them, but not stop halfway.
    if (is_shared or result.verdict != Verdict.PASS) and (replaced := patches.found()):
        result.left_behind.append(f"patched: {', '.join(replaced)}")
    return result


def _answer(state: RankState, call: RollCall) -> Result:
    """Answer a roll call; the answer passes if this rank is in step with the others."""
    result = Result(call.number, state.index, Verdict.PASS)
    with _outcome(result):
        _finish_queued(state.device)
        # A rank that has exchanged less than another reads here what the other wrote in its last exchange of the case.
        mine = pickle.dumps(call)
        assert state.exchange.gather(mine) == [mine] * state.size, "the ranks have not exchanged equally often"
        dist.barrier()
    return result


def _explanation(rank: Rank, result: Result) -> Explanation:
    """Explain where the runs of a case diverge; what goes wrong then is no fault of the case."""
    try:
        return rank.explain(in_step=result.agreed)
    except Exception as error:
        return Explanation(error=bounded(f"{type(error).__name__}: {error}", _MOST_OF_AN_ERROR))


def _finish(rank: Rank, result: Result) -> None:
    """Tear down the case's adapters; after a failure, what a teardown raises is added to the failure."""
    try:
        rank.finish()
    except BaseException as error:
        if result.verdict == Verdict.PASS:
            raise
        line = f"a teardown raised {type(error).__name__}"
        if not Verdict(result.verdict).is_skip:
            result.text = f"{result.text.rstrip()}\nafterwards {line}"
        # Even if all ranks agree on the failure, they can run no further case.
        result.left_behind.append(line)


def _examine(
    result: Result, state: RankState, driven: Collection[type[Adapter]], *, before: dict[str, Any], groups: int
) -> None:
    """Compare the state of the process with its state before the case, and sort the differences.

    What one of the implementations that the case has driven may leave behind, the case may.
    """
    leaves_groups = {implementation.traits.process_groups for implementation in driven}
    foreign = len(state.foreign_groups())
    counted = foreign if leaves_groups == {"none"} else groups
    after = leftovers.picture(state.device, groups=counted, directory=state.directory)
    names = {implementation.name for implementation in driven}
    first = () if names <= state.used else leftovers.AFTER_FIRST_USE
    frees_models = all(implementation.traits.frees_models for implementation in driven)
    for name, line in leftovers.differences(before, after).items():
        if name == "modules" and not frees_models:
            result.kept.append(line)
        else:
            (result.excused if name in first else result.left_behind).append(line)
    if counted != foreign:
        result.kept.append(f"process groups: {groups} became {foreign}")
    if lost := state.lost_groups():
        result.left_behind.append(f"process groups of the world are gone: {', '.join(lost)}")
    state.used |= names
    result.is_worn_out = "abandoned" in leaves_groups and foreign > _MOST_ABANDONED_GROUPS


def _finish_queued(device: torch.device) -> None:
    """Wait for the device: its errors and hangs are this case's, and collectives of two cases must not pair."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _prepare(state: RankState, job: Job) -> tuple[Any, dict[str, Any], type[Adapter]]:
    module = load(job.module, pathlib.Path(job.path))
    function = functools.reduce(getattr, job.function.split("."), module)
    implementation = registry.load(job.implementation)
    if implementation.traits.isolation != "shared":
        implementation.prepare(state.device.type)
    return function, pickle.loads(job.parameters), implementation


@contextlib.contextmanager
def _outcome(result: Result, rank: Rank | None = None) -> Iterator[None]:
    """Record an exception of the block in ``result``, unless ``result`` already holds a failure.

    The text of one that a case raised on a rank ends with the call of the training that raised it, and those before.
    """
    try:
        yield
    except BaseException as error:
        if result.verdict != Verdict.PASS:
            return
        # Bounded here: a text of any size would be pickled, sent and held by the controller.
        calls = ""
        if rank is not None and not isinstance(error, _EXPLAINED):
            result.location, calls = course.told(error, rank.courses, rank=rank.index)
        text = bounded(_describe(error), MOST_OF_A_RANK - len(calls))
        result.verdict, result.text = Verdict.FAIL, text.rstrip("\n") + calls
        if isinstance(error, (NotShared, UnknownCollective)):
            result.verdict = Verdict.HARNESS_ERROR
        if isinstance(error, Divergence):
            result.agreed = True
            result.location = error.location
        if complaint := private.complaint_of(error) or (rank and devices.missing_kernel(error, rank.device)):
            # The case is not to blame, nor the implementation.
            result.verdict, result.text = Verdict.UNMET, complaint
        if isinstance(error, pytest.skip.Exception):
            result.text = bounded(f"a case must not skip by itself: use @needs ({error})", MOST_OF_A_RANK)


@contextlib.contextmanager
def _threads_watched() -> Iterator[None]:
    """Raise a RuntimeError at the end of the block if an exception, its cause, has ended another thread."""
    failures: list[threading.ExceptHookArgs] = []
    before, threading.excepthook = threading.excepthook, failures.append
    try:
        yield
    finally:
        threading.excepthook = before
    if failures:
        name = failures[0].thread.name if failures[0].thread else "an unknown thread"
        error = failures[0].exc_value or failures[0].exc_type()
        raise RuntimeError(f"an exception ended {name}") from error


#: Errors whose texts say where they come from.
_EXPLAINED = (Divergence, NotShared, ProtocolError, UnknownCollective)


def _describe(error: BaseException) -> str:
    if isinstance(error, _EXPLAINED):
        return str(error)
    # Skip the frames of this file, which carry no information about the case.
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    try:
        return readable("".join(traceback.format_exception(type(error), error, frames)))
    except Exception as broken:
        return f"{type(error).__name__} (formatting the exception raised {type(broken).__name__})"
