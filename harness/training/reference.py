"""The reference of a check: a process that is a world of one rank, trains on all microbatches, and judges the run.

It is a process of its own, so that a module of the user is imported anew, and what a step counts begins at zero. Rank 0
of the run starts it, tells it by its standard input which step's files are complete, and reads its answers.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardproof.harness.adapters.registry import line_of_error
from shardproof.harness.judging import codes, numerics
from shardproof.harness.judging.finding import Stage
from shardproof.harness.planning.request import DTYPES
from shardproof.harness.tensors.trees import map_tensors, tensors_of
from shardproof.harness.training.findings import listed
from shardproof.harness.training.initial import compare_initial
from shardproof.harness.training.judge import Judge
from shardproof.harness.training.outcome import Deviation, StepOutcome
from shardproof.harness.training.request import NotCheckable, Request, functions_of
from shardproof.harness.training.sides import OfRank, OfReference, Sides, full_of, state_of
from shardproof.harness.training.switches import Switches
from shardproof.harness.training.trained_model import StepSeen, TrainedModel, digest_of, read
from shardproof.harness.watching.observation import ByKey, Key

Answer = dict[str, Any]
"""What the reference says of one step: "refused" and a line, "failed" and a traceback, or the fields of an outcome."""


class Reference:
    """The process of the reference, as rank 0 has it."""

    def __init__(self, request: Request, folder: str, *, device: torch.device, backend: str, explains: bool) -> None:
        answers, theirs = os.pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
            if name in environment:
                environment[name] = value
        told = {"request": request.dumps(), "folder": folder, "device": str(device), "backend": backend,
                "explains": explains, "answers": theirs}  # fmt: skip
        command = [sys.executable, "-m", "shardproof.harness.training.reference", json.dumps(told)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(theirs,), env=environment, text=True)
        os.close(theirs)
        self._answers = os.fdopen(answers)

    def ask(self, step: int) -> None:
        """Let it train and judge a step, of which all ranks have written their files."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{step}\n")
            self._process.stdin.flush()

    def answer(self, step: int) -> Answer:
        """Return what it says of the step."""
        line = self._answers.readline()
        if not line:
            code = self._process.wait()
            why = "it was killed, as for want of memory" if code == -9 else f"it ended with exit code {code}"
            return {"refused": f"check: the process of the reference has no answer for step {step}: {why}"}
        return cast(Answer, json.loads(line))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._answers.close()


def main(told: dict[str, Any]) -> None:
    """Answer for each step until the standard input ends."""
    request = Request.loads(told["request"])
    out = os.fdopen(told["answers"], "w")
    torch.set_num_threads(1)
    for name in ("to_local", "full_tensor"):
        # What steps ask DTensors for, the oracle's tensors are.
        setattr(torch.Tensor, name, lambda tensor, **options: tensor)
    worker, wrong = None, Answer()
    with _caught(wrong):  # while the ranks train the first step
        worker = Worker(request, told, Switches(request.off).__enter__())  # until the process ends
    for line in sys.stdin:
        answer = wrong
        if worker is not None:
            answer = Answer()
            with _caught(answer):
                answer |= worker.step(int(line))
        print(json.dumps(answer), file=out, flush=True)


@contextlib.contextmanager
def _caught(answer: Answer) -> Iterator[None]:
    try:
        yield
    except NotCheckable as error:
        answer["refused"] = str(error)
    except Exception:
        answer["failed"] = traceback.format_exc()


class Worker:
    """The baseline and the oracle of a request, in a world of one rank."""

    def __init__(self, request: Request, told: dict[str, Any], switches: Switches | None = None) -> None:
        self._request, self._folder, self._explains = request, told["folder"], told["explains"]
        device = torch.device(told["device"])
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index or 0)
        if not dist.is_initialized():
            dist.init_process_group(told["backend"], store=dist.HashStore(), rank=0, world_size=1)
        names = tuple(name for name, _ in request.mesh)
        self._device, self._mesh = device, init_device_mesh(device.type, (1,) * len(names), mesh_dim_names=names)
        functions = functions_of(request) if switches is None else switches.over(functions_of(request))
        with self._users("parallelize()", 0):
            self._baseline = TrainedModel(request, functions, "baseline", self._mesh, device, explains=self._explains)
        numel = sum(one.numel() for one in self._baseline.original.built.model.parameters())
        home = home_of(request, numel, _free(device), device)
        self._baseline.home = home
        self._expected = self._baseline.state()
        self._earlier: list[dict[str, torch.Tensor]] = []
        self._oracle: TrainedModel | None = None
        self._notes: list[str] = []
        if request.oracle != "none":
            self._oracle = TrainedModel(request, functions, "oracle", self._mesh, device, explains=self._explains,
                                   baseline=self._baseline)  # fmt: skip
            self._oracle.home = home
            if not self._oracle.original.is_deferred:
                self._notes += self._changes(self._oracle)

    def _changes(self, oracle: TrainedModel) -> Iterator[str]:
        """Say what parallelize() changes on one rank too: the reference begins each step with what the run has."""
        plain, made = (state_of([{key: one for key, one in seen.items() if key[0] == Stage.PARAMETER}])
                       for seen in (oracle.state(), self._expected))  # fmt: skip
        wide = DTYPES[self._request.dtype]
        both = {key[2]: (one, plain[key].to(wide)) for key, one in made.items() if key in plain}
        both = {name: (one, other) for name, (one, other) in both.items() if one.shape == other.shape}
        for dtype in dict.fromkeys(one.dtype for one, _ in both.values() if one.dtype != wide):
            mine = [name for name, (one, _) in both.items() if one.dtype == dtype]
            narrow = str(dtype).removeprefix("torch.")
            yield (f"whether parallelize() is meant to make parameters {narrow}, which model() has in "
                   f"{self._request.dtype}: {listed(mine)}")  # fmt: skip
        yield from _changed_values(both)

    def step(self, number: int) -> Answer:
        """Train a step from the run's state before it, and judge what the files of all ranks say of it."""
        request = self._request
        before = [read(self._file(rank, number - 1))[0] for rank in range(request.size)]
        outcome = StepOutcome(number)
        if number == 0 and not self._baseline.original.is_deferred:
            outcome = compare_initial(before, self._expected)
            outcome.notes |= dict.fromkeys(self._notes, 1)
        if not outcome.found:
            outcome = self._judged(number, before, outcome)
        return outcome_as_json(outcome)

    def _judged(self, number: int, before: list[ByKey], initial: StepOutcome) -> StepOutcome:
        request = self._request
        seen = [read(self._file(rank, number, "events")) for rank in range(request.size)]
        microbatches = self._microbatches(number, [more for _, more in seen])
        everything = [one for mine in microbatches for one in mine]
        state = state_of(before)
        base, oracle = self._both(everything, state, [events for events, _ in seen])
        self._refuse_fewer([base, oracle], [more for _, more in seen])
        sides = Sides(
            request, number, list(self._ranks(number, seen)), _full(base), _full(oracle),
            counts=[len(one) for one in microbatches],
            narrow=min(base.narrowest, *(one.dtype for one in _floats(base)), key=lambda one: -torch.finfo(one).eps),
            tokens=[[_labels(one) for one in mine] for mine in microbatches], earlier=self._earlier,
        )  # fmt: skip
        # The ranks wait, and what is compared here is no training: how many threads do it changes nothing.
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        judging = Judge(sides)
        made = judging.judge()
        self._earlier = [sides.sums(), *self._earlier[:1]]
        if not made.found and number == request.steps - 1 and self._oracle is not None:
            # Last of all, because a step may count its calls.
            made.notes |= dict.fromkeys(self._joined(everything, state, oracle), 1)
        if self._explains:
            measured = dict(made.measured)
            made.shown = judging.shown()
            made.measured = measured  # as without capture
        torch.set_num_threads(1)
        made.compared += initial.compared
        made.notes |= initial.notes
        return made

    @functools.cached_property
    def _first_of(self) -> dict[int, int]:
        """By data rank, the first rank of the run that reads its data."""
        found: dict[int, int] = {}
        for rank in range(self._request.size):
            found.setdefault(self._request.data_rank(rank), rank)
        return found

    def _microbatches(self, number: int, more: list[dict[str, Any]]) -> list[list[Any]]:
        """Return the microbatches of each data rank, which must be those that the run has read."""
        found = []
        for reader in range(self._request.data_size):
            mine = self._baseline.data(number, reader)
            if [digest_of(one) for one in mine] != more[self._first_of[reader]]["data"]:
                raise NotCheckable(f"check: data(step={number}, rank={reader}) returned other values in the reference: "
                                   "seed it by its arguments")  # fmt: skip
            found.append(mine)
        return found

    def _both(
        self, microbatches: list[Any], state: dict[Key, torch.Tensor], events: list[ByKey]
    ) -> tuple[StepSeen, StepSeen]:
        """Train the step in the baseline and in the oracle, whose optimizers get the gradients of the run."""
        clipped = state_of([{key: one for key, one in mine.items() if key[0] == Stage.CLIPPED_GRADIENT}
                            for mine in events])  # fmt: skip
        given = {key[2]: full for key, full in clipped.items()}
        base = self._trained(self._baseline, microbatches, state, given)
        return base, base if self._oracle is None else self._trained(self._oracle, microbatches, state, given)

    def _refuse_fewer(self, both: Sequence[StepSeen], more: list[dict[str, Any]]) -> None:
        of_run = sum(more[rank]["forwards"] for rank in self._first_of.values())
        forwards = next((one.forwards for one in both if one.forwards < of_run), None)
        if forwards is not None:
            raise NotCheckable(f"check: step() used {forwards} of the {of_run} microbatches of the reference: it must "
                               "train on all of them")  # fmt: skip

    def _ranks(self, number: int, seen: list[tuple[ByKey, dict[str, Any]]]) -> Iterator[OfRank]:
        for rank, (events, more) in enumerate(seen):
            yield OfRank(
                rank, events, read(self._file(rank, number))[0], data_rank=self._request.data_rank(rank),
                **{key: more[key] for key in ("forwards", "norm_types", "is_fully_sharded")},
            )  # fmt: skip

    def _joined(self, microbatches: list[Any], state: dict[Key, torch.Tensor], oracle: StepSeen) -> Iterator[str]:
        """Say if one microbatch with the rows of all has another gradient, where labels are unequally many."""
        tokens = [_labels(one) for one in microbatches]
        parts = [list(tensors_of(one)) for one in microbatches]
        if min(tokens) in (0, max(tokens)) or not _can_be_joined(parts):
            return
        rows = iter([torch.cat(mine) for mine in zip(*parts, strict=True)])
        trained = TrainedModel(self._request, functions_of(self._request), "oracle", self._mesh, self._device,
                          baseline=self._baseline)  # fmt: skip
        trained.home = self._baseline.home
        trained.load(state)
        seen = trained.step([map_tensors(lambda _: next(rows), microbatches[0])])
        trained.close()
        keys = [key for key in oracle.events if key[0] == Stage.GRADIENT and key in seen.events]
        one, other = (torch.cat([mine.events[key].value.double().flatten() for key in keys]) for mine in (seen, oracle))
        if (apart := float((one - other).norm() / one.norm())) > numerics.MICROBATCHES_APART:
            counted = ", ".join(map(str, tokens[:6]))
            yield (f"each microbatch counts alike [{codes.WEIGHTED}], whatever the number of its tokens ({counted}): "
                   f"one batch of them all has another gradient, at a relative distance of {apart:.2g}")  # fmt: skip

    def _trained(
        self,
        trained: TrainedModel,
        microbatches: list[Any],
        state: dict[Key, torch.Tensor],
        given: dict[str, torch.Tensor],
    ) -> StepSeen:
        trained.load(state)
        trained.given = given
        with self._users("step()", len(microbatches), trained):
            return trained.step(microbatches)

    @contextlib.contextmanager
    def _users(self, function: str, microbatches: int, trained: TrainedModel | None = None) -> Iterator[None]:
        """Turn what the user's code raises into one line."""
        try:
            yield
        except NotCheckable:
            raise
        except Exception as error:
            text = line_of_error(error)
            if "not implemented for 'Double'" in text:
                raise NotCheckable(f"check: the oracle cannot run: {text}; use --oracle float32") from error
            is_oracle = trained is not None and trained is self._oracle
            hint = ": offer it by --plain module:function" if isinstance(error, AttributeError) and is_oracle else ""
            of = f", {microbatches} microbatches" if microbatches else ""
            raise NotCheckable(f"check: {function} raised in the reference (1 rank{of}): {text}{hint}") from error

    def _file(self, rank: int, step: int, what: str = "state") -> str:
        return file_of(self._folder, rank, step, what)


#: Bytes of a parameter in the reference: baseline and oracle with gradients, Adam's state, and what is compared; the
#: latter on the host, and where the models are, with what an optimizer makes of all parameters in one call.
_BYTES = {"float64": (48, 88), "float32": (32, 56), "none": (16, 28)}


def home_of(request: Request, numel: int, free: int, device: torch.device) -> torch.device:
    """Return where what is compared of so many parameters is kept: on their device, if so many bytes are free there.

    Copies to the host, and comparisons on it, take most of the time of a large check.

    Raises:
        NotCheckable: not even the models fit into so many free bytes.
    """
    least, most = _BYTES[request.oracle]
    if numel * least > free:
        need = {oracle: numel * both[0] / 2**30 for oracle, both in _BYTES.items()}
        mine = need[request.oracle]
        smaller = [f"--oracle {one} ({size:.3g})" for one, size in need.items() if size < mine]
        raise NotCheckable(
            f"check: the reference needs {mine:.3g} GiB ({numel / 1e9:.2g} B parameters, {request.oracle}), "
            f"{free / 2**30:.3g} GiB are free: {', '.join([*smaller, 'fewer layers'])}"
        )
    return device if numel * most <= free else torch.device("cpu")


def _free(device: torch.device) -> int:
    if (info := getattr(torch.get_device_module(device), "mem_get_info", None)) is not None:
        return int(info(device)[0])
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    return 1 << 62


def file_of(folder: str, rank: int, step: int, what: str = "state") -> str:
    """Return the file of what a rank has seen of a step, or of its state after it; that of step -1 is the first."""
    return os.path.join(folder, f"rank{rank}-step{step}-{what}.pt")


def _changed_values(both: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> Iterator[str]:
    """Say which initial values differ, of parameters as parallelize() and as model() makes them."""
    others = {name: pair for name, pair in both.items() if not torch.equal(pair[0], pair[1].to(pair[0].dtype))}
    if others:
        turned = [name for name, (one, other) in others.items() if one.ndim == 2 and torch.equal(one.t(), other)]
        told = f"; {listed(turned)}: the transpose" if turned else ""
        yield (f"whether parallelize() is meant to change initial values ({len(others)} of {len(both)} parameters: "
               f"{listed(list(others))}{told})")  # fmt: skip


def _can_be_joined(parts: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether microbatches have rows of one shape."""
    shapes = {tuple(tensor.shape[1:] for tensor in mine) for mine in parts}
    return len(shapes) == 1 and all(one.ndim for one in parts[0])


def _full(seen: StepSeen) -> OfReference:
    made = {**seen.events, **seen.state}
    full = {
        key: one.value if one.layout is None or key[0] == Stage.OWN_GRADIENT else full_of({0: one})
        for key, one in made.items()
    }
    return OfReference({key: one for key, one in full.items() if one is not None}, seen.forwards)


def _floats(seen: StepSeen) -> list[torch.Tensor]:
    own = [one.value for key, one in seen.events.items() if key[0] != Stage.OWN_GRADIENT]
    return [one for one in own if one.is_floating_point()]


def _labels(microbatch: Any) -> int:
    """Return how many labels of a microbatch count: those of its last integers that are not negative."""
    integers = [one for one in tensors_of(microbatch) if one.dtype == torch.int64]
    return int((integers[-1] >= 0).sum()) if integers else 0


def outcome_as_json(outcome: StepOutcome) -> Answer:
    """Return the outcome of a step as plain values."""
    found = [_plain(one) for one in outcome.found[:64]]
    measured = [{"module": module, **one.as_record()} for (module, _), one in outcome.measured.items()]
    return {
        "found": found, "ranks": sorted({one.location.rank or 0 for one in outcome.found}), "lines": outcome.lines,
        "count": len(outcome.found), "signature": outcome.signature, "factor": outcome.factor,
        "shown": None if outcome.shown is None else _plain(outcome.shown), "loss_factor": outcome.loss_factor,
        "compared": outcome.compared, "measured": measured, "notes": outcome.notes,
    }  # fmt: skip


def _plain(one: Deviation) -> Answer:
    return one.location.as_record() | {"stage": one.location.stage.name, "module": one.module, "text": one.text}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
