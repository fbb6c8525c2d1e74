"""A training that is saved and goes on, and one that is resumed from its checkpoint, each on ranks of its own.

states/step<n>, states/saved     what the run had after n steps, and after save()
states/resumed, states/after<n>  what the resumed training had after load(), and after n steps of its own
run, again                       recordings of both
<part>-rank<n>.calls             calls of user code, so that one that fails or hangs is named
<part>-rank<n>.json              generators before and after each step, and what objects are
"""

import contextlib
import dataclasses
import hashlib
import inspect
import json
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof import folders
from shardproof.harness.judging.finding import Divergence, Location, Stage
from shardproof.harness.states.snapshot import state
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.training import checkpointing, restored, user_calls
from shardproof.harness.training.recording import Recording
from shardproof.harness.training.request import BY_NAME, NotCheckable, Request, by_name, functions_of
from shardproof.harness.training.restored import AGAIN, LOADER, RUN, SCHEDULER
from shardproof.harness.training.trained_model import Caller, Made, Maker, Unsharded
from shardproof.harness.training.user_calls import Calls
from shardproof.harness.watching.names import parameters_of

Exchange = Callable[[Any], list[Any]]


def resumption(
    request: Request, *, rank: int, mesh: DeviceMesh, device: torch.device, exchange: Exchange,
    note: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """Train one of the two parts; after the second, judge both (collective).

    Args:
        note: takes what the run file has of it.

    Raises:
        Divergence: on every rank, with the text of what was not restored, or of what cannot be checked.
    """
    part, told = None, ""
    try:
        part = TrainingPart(request, rank, mesh, device)
    except NotCheckable as error:
        told = str(error)
    if refused := [one for one in exchange(told) if one]:
        raise Divergence(refused[0], Location(stage=Stage.SHARDING))
    assert part is not None
    with contextlib.ExitStack() as stack:
        stack.callback(part.close)
        if not request.readers:
            part.go_on(exchange)
            return
        part.resume(exchange)
    answer = restored.judge(Path(request.shared), request) if rank == 0 else None
    (found,) = [one for one in exchange(answer) if one is not None]
    note(found.own)
    if found.lost:
        raise Divergence(found.text, Location(stage=Stage.RESUMPTION, step=request.save_and_resume, name=found.lost[0]))


class TrainingPart:
    """The training of one rank: made by the user's functions, with a recording and states.

    Args:
        mesh: of its ranks.

    Raises:
        NotCheckable: a function needs what is not there, or returns what cannot be used.
    """

    def __init__(self, request: Request, rank: int, mesh: DeviceMesh, device: torch.device) -> None:
        self._request, self._rank, self._mesh = request, rank, mesh
        self._name = AGAIN if request.readers else RUN
        self._folder = Path(request.shared)
        self._calls = Calls(user_calls.file_of(self._folder, request, rank))
        functions = functions_of(request)
        torch.manual_seed(request.seed)
        with self._calls.of("model()"):
            original = Unsharded.of(functions.subject.build(request.sequence))
        with self._calls.of("parallelize() or optimizer()" if functions.optimizer else "parallelize()"):
            self._made: Made = Maker(request, functions, "run", mesh, device).make(original, None)
        self._caller = Caller(request, functions, original, self._made, mesh, device)
        self.objects = self._objects()
        self._generators: list[dict[str, dict[str, str]]] = []
        self._recording: Recording | None = None
        more = {"objects": self.objects, **self.objects}
        for function in (functions.save, functions.load):
            by_name(function, dict.fromkeys(BY_NAME) | more)
        by_name(functions.step, self.objects, 4)
        by_name(functions.data, self.objects, 2)

    def _objects(self) -> dict[str, Any]:
        function = self._caller.functions.objects
        if function is None:
            return {}
        given = {"model": self._made.model, "optimizer": self._made.optimizer, "mesh": self._mesh}
        with self._calls.of("objects()"):
            made = function(**by_name(function, given))
        if not isinstance(made, Mapping) or not all(isinstance(one, str) for one in made):
            raise NotCheckable(f"check: objects() returned {type(made).__name__}: return a dict of objects by their "
                               'names, such as {"scheduler": scheduler}')  # fmt: skip
        if taken := sorted(set(made) & {*BY_NAME, "objects", "microbatches"}):
            raise NotCheckable(
                f"check: objects() has an object {taken[0]!r}, which is an argument of the functions already"
            )
        return dict(made)

    def close(self) -> None:
        """Remove all hooks."""
        if self._recording is not None:
            self._recording.close()
        if self._made.adapter is not None:
            self._made.adapter.teardown()

    # The two parts --------------------------------------------------------------------------

    def go_on(self, exchange: Exchange) -> None:
        """Train, save, and train on."""
        request = self._request
        after, last = request.save_and_resume, request.save_and_resume + request.steps
        self._state("step0", 0)
        self._record(range(last))
        for step in range(after):
            self._train(step)
            self._state(f"step{step + 1}", step + 1)
        folders.make(self._folder / "checkpoint")
        handle = self._called("save")
        self._state("saved", after)
        exchange(None)
        for step in range(after, last):
            self._train(step)
            self._state(f"step{step + 1}", step + 1)
        if callable(wait := getattr(handle, "result", None)):
            with self._calls.of("the result() of save()"):
                wait()
        self._end({})

    def resume(self, exchange: Exchange) -> None:
        """Load, and train the steps that the run has trained after its checkpoint."""
        returned = self._called("load")
        exchange(None)
        start = self._start_of(returned)
        self._state("resumed", self._request.save_and_resume)
        more = {"start": start, "narrow": dict(self._narrow())}
        self._record(range(self._request.steps))
        for number in range(self._request.steps):
            self._train(start + number)
            self._state(f"after{number + 1}", self._request.save_and_resume + number + 1)
        self._end(more)
        exchange(None)

    def _called(self, name: str) -> Any:
        """Call the user's function "save" or "load", or else that of torch's checkpoints."""
        own, folder = getattr(self._caller.functions, name), self._folder / "checkpoint"
        with self._calls.of(f"{name}()"):
            if own is None:
                return getattr(checkpointing, name)(self._made.model, self._made.optimizer, folder, self.objects)
            return own(**by_name(own, self._given(folder)))

    def _given(self, folder: Path) -> dict[str, Any]:
        return {
            "model": self._made.model, "optimizer": self._made.optimizer, "mesh": self._mesh, "folder": str(folder),
            "step": self._request.save_and_resume, "objects": self.objects, **self.objects,
        }  # fmt: skip

    def _start_of(self, returned: Any) -> int:
        """Return the step with which the training goes on, and replace the objects that ``load`` has made anew."""
        if isinstance(returned, Mapping):
            made = {name: one for name, one in returned.items() if type(one) is type(self.objects.get(name))}
            self.objects |= {name: one for name, one in made.items() if not isinstance(one, (dict, list))}
            returned = returned.get("step")
        is_step = isinstance(returned, int) and not isinstance(returned, bool)
        return returned if is_step else self._request.save_and_resume

    # A step -----------------------------------------------------------------------------------

    def _train(self, step: int) -> None:
        begin = _generators()
        functions = self._caller.functions
        more = by_name(functions.step, self.objects, 4)
        with self._calls.of(f"data() of step {step}"):
            microbatches = self._microbatches(step)
        with self._calls.of(f"step() of step {step}"):
            self._caller.step(microbatches, **more)
        self._generators.append({"begin": begin, "end": _generators()})

    def _microbatches(self, step: int) -> list[Any]:
        """Return the microbatches of a step: on another number of ranks those of the run, divided anew."""
        request, mine = self._request, self._request.data_rank(self._rank)
        more = by_name(self._caller.functions.data, self.objects, 2)
        if more or request.readers in (0, request.data_size):
            return self._caller.data(step, mine, **more)
        every = [one for reader in range(request.readers) for one in self._caller.data(step, reader)]
        each, rest = divmod(len(every), request.data_size)
        if rest or not each:
            raise Divergence(
                f"check: --resume-mesh {request.resume_mesh}: {request.data_size} ranks cannot divide the {len(every)} "
                f"microbatches of a step: give the run a multiple of {request.data_size}",
                Location(stage=Stage.SHARDING),
            )
        return every[mine * each : (mine + 1) * each]

    # What is seen -----------------------------------------------------------------------------

    def _record(self, steps: range) -> None:
        self._recording = Recording(self._made.model, self._made.optimizer, out=self._folder / self._name, steps=steps)

    def _state(self, name: str, step: int) -> None:
        state(self._made.model, self._made.optimizer, out=self._folder / "states" / name, step=step,
              scheduler=_Stateful(self.objects))  # fmt: skip

    def _narrow(self) -> Iterator[tuple[str, str]]:
        """Yield optimizer states all of whose values a narrower dtype has, by parameter and key."""
        for name, parameter in parameters_of(self._made.model):
            found = self._made.optimizer.state.get(parameter, {})
            for key, value in {"": parameter, **found}.items():
                if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64) and value.ndim:
                    local = local_of(value.detach())
                    for dtype in (torch.bfloat16, torch.float16):
                        if bool(local.count_nonzero()) and torch.equal(local.to(dtype).to(local.dtype), local):
                            yield f"{key} of {name}" if key else name, str(dtype).removeprefix("torch.")

    def _end(self, more: Mapping[str, Any]) -> None:
        if self._recording is not None:
            self._recording.close()
        kinds = {name: _kind_of(one) for name, one in self.objects.items()}
        text = json.dumps({"process": os.getpid(), "generators": self._generators, "objects": kinds, **more})
        folders.write_file(self._folder / f"{self._name}-rank{self._rank}.json", text)


def _kind_of(one: Any) -> str:
    if isinstance(one, torch.optim.lr_scheduler.LRScheduler):
        return SCHEDULER
    is_container = isinstance(one, (Mapping, list, tuple, nn.Module, torch.Tensor))
    return LOADER if not is_container and (hasattr(one, "__iter__") or hasattr(one, "__next__")) else ""


@dataclasses.dataclass
class _Stateful:
    """The objects of a training, as one that has a state dict."""

    objects: Mapping[str, Any]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each object but loaders, by its name."""
        return {name: _content_of(one) for name, one in self.objects.items() if _kind_of(one) != LOADER}


def _content_of(one: Any) -> Any:
    if isinstance(one, (Mapping, list, tuple, torch.Tensor, int, float)):
        return one
    if callable(getattr(one, "state_dict", None)) and not inspect.isclass(one):
        return one.state_dict()
    # Of an object that says nothing of its state, numbers may be of the process alone, as times are.
    return (
        {key: kept for key, value in vars(one).items() if (kept := _tensors_in(value)) is not None}
        if hasattr(one, "__dict__")
        else {}
    )


def _tensors_in(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return value.state_dict()
    if isinstance(value, Mapping):
        return {key: kept for key, one in value.items() if (kept := _tensors_in(one)) is not None}
    if isinstance(value, (list, tuple)):
        return [kept for one in value if (kept := _tensors_in(one)) is not None]
    return value if isinstance(value, torch.Tensor) else None


def _generators() -> dict[str, str]:
    """Return a digest of each generator's state, without drawing from it."""
    found = {"torch": torch.get_rng_state().numpy().tobytes(), "random": pickle.dumps(random.getstate())}
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None:
        found[device.type] = torch.get_device_module(device).get_rng_state().numpy().tobytes()
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy"] = pickle.dumps(numpy.random.get_state())
    return {name: hashlib.sha256(state).hexdigest()[:16] for name, state in found.items()}
