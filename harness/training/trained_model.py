"""The training that is checked, in one process: a rank of the run, or the reference that trains on all microbatches.

The reference is made twice in a world of one rank. The *baseline* is what the user's ``parallelize`` makes of a mesh of
one rank: it has the casts of the run and no sharding. The *oracle* is the model in float64 without ``parallelize``;
what its wrapper's methods would do is nothing there.
"""

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardproof.harness.adapters.base import Adapter
from shardproof.harness.adapters.config import Clip, Config, Precision
from shardproof.harness.adapters.replicas import class_and_options
from shardproof.harness.judging import codes
from shardproof.harness.judging.finding import Stage
from shardproof.harness.planning.anatomy import choose_units
from shardproof.harness.planning.request import DTYPES
from shardproof.harness.planning.subject import Built, microbatch
from shardproof.harness.planning.tensor_parallel import split
from shardproof.harness.tensors.fingerprints import Box, K, digest
from shardproof.harness.tensors.layouts import Layout, layout_of, part_of
from shardproof.harness.tensors.memory import raw_bytes
from shardproof.harness.tensors.private import TorchDispatchMode
from shardproof.harness.tensors.trees import local_of, map_tensors, tensors_of
from shardproof.harness.training.evidence import flat_places
from shardproof.harness.training.request import Functions, NotCheckable, Request, axes_of
from shardproof.harness.watching.groups import sizes_of_flat
from shardproof.harness.watching.names import meshes_of_units, parameters_of
from shardproof.harness.watching.observation import ByKey, Key, Observation, Observed, key_of, of_parameter
from shardproof.harness.watching.records import StepRecord
from shardproof.harness.watching.watch import Watch

Role = Literal["run", "baseline", "oracle"]

_NARROW = (torch.bfloat16, torch.float16, torch.float32)

#: Methods that wrappers add to the root, and that have nothing to do in a world of one.
_NOTHING = (
    "set_requires_gradient_sync", "set_is_last_backward", "set_requires_all_reduce", "set_reshard_after_backward",
    "set_reshard_after_forward", "set_gradient_divide_factor", "set_reduce_scatter_divide_factor", "reshard",
    "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch", "set_unshard_in_backward",
    "set_post_optim_event", "register_comm_hook",
)  # fmt: skip


class KeepDouble(TorchDispatchMode):
    """Leaves float64 alone where user code says ``.float()`` or asks an operator for a narrower dtype."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _NARROW and any(one.dtype is torch.float64 for one in tensors_of((args, kwargs))):
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


class Narrowest(TorchDispatchMode):
    """Notes the floating-point dtype with the fewest bits in which anything is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = torch.float64

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tensors_of(made):
            if one.is_floating_point() and torch.finfo(one.dtype).eps > torch.finfo(self.dtype).eps:
                self.dtype = one.dtype
        return made


#: Functions of torch that choose among numbers, and the position of their choice in what they return.
_CHOICES = {"topk": 1, "sort": 1, "argmax": None, "argsort": None}


class Choices(TorchFunctionMode):
    """Notes which of their elements functions choose, as routers do, and from what: ``note(chosen, values)``."""

    def __init__(self, note: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _CHOICES and torch.is_grad_enabled():
            values = args[0] if args else (kwargs or {}).get("input")
            position = _CHOICES[name]
            chosen = made if position is None else made[position]
            if isinstance(values, torch.Tensor) and values.is_floating_point() and not isinstance(values, DTensor):
                self._note(chosen.detach(), values.detach())
        return made


def plain_root(model: nn.Module) -> None:
    """Give the modules of a model that nothing wraps the methods of wrappers, which do nothing."""

    class _Handle:
        def wait(self) -> None: ...

    for module in model.modules():
        own: dict[str, Any] = {name: lambda *args, **kwargs: None for name in _NOTHING}
        own |= {"no_sync": contextlib.nullcontext, "unshard": lambda *args, **kwargs: _Handle()}
        if module is model:
            own["module"] = model
            own["clip_grad_norm_"] = lambda max_norm, norm_type=2.0: nn.utils.clip_grad_norm_(
                model.parameters(), max_norm, norm_type
            )
        # Not by setattr, which would make the root a child of its own.
        vars(module).update({name: value for name, value in own.items() if not hasattr(module, name)})


@dataclasses.dataclass(frozen=True)
class Unsharded:
    """The model as user code makes it, before anything shards or moves it.

    Attributes:
        built: the model, with its loss and its data.
        is_deferred: whether parameters are on the meta device, so that what shards the model initializes them.
        shapes: those of its parameters in full, by name.
    """

    built: Built
    is_deferred: bool
    shapes: Mapping[str, torch.Size]

    @classmethod
    def of(cls, built: Built) -> "Unsharded":
        """Note what sharding changes."""
        is_deferred = any(one.is_meta for one in built.model.parameters())
        return cls(built, is_deferred, {name: one.shape for name, one in parameters_of(built.model)})


@dataclasses.dataclass(frozen=True)
class Made:
    """A model as it trains, with its optimizer.

    Attributes:
        adapter: drives both; None of those that user code makes.
        has_own_optimizer: whether ``parallelize`` has made the optimizer.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    adapter: Adapter | None = None
    has_own_optimizer: bool = False


class Maker:
    """Makes the model and the optimizer of a role from the model before sharding.

    Args:
        mesh: of the run's ranks, or of one rank with the same names.
    """

    def __init__(
        self, request: Request, functions: Functions, role: Role, mesh: DeviceMesh, device: torch.device
    ) -> None:  # fmt: skip
        self._request, self._functions, self._role, self._mesh = request, functions, role, mesh
        self._device = device

    def make(self, original: Unsharded, baseline: Made | None) -> Made:
        """Shard the model by ``parallelize`` or an adapter; for the oracle, leave it as it is, in its dtype.

        Args:
            baseline: for the oracle, that of the baseline.

        Raises:
            NotCheckable: what user code returns cannot be trained, or nothing of it can be seen.
        """
        model = original.built.model
        if not original.is_deferred:
            model.to(self._device, dtype=DTYPES[self._request.dtype])
        if self._role == "oracle":
            if original.is_deferred:
                model.to_empty(device=self._device)
            return self._plain(model.to(DTYPES[self._request.oracle]), baseline)
        if self._functions.adapter is not None:
            return self._adapted(self._functions.adapter, model)
        return self._parallelized(model)

    def _plain(self, model: nn.Module, baseline: Made | None) -> Made:
        plain_root(model)
        if self._functions.plain is not None:
            self._functions.plain(model)
        if baseline is not None and baseline.has_own_optimizer:
            return Made(model, _optimizer_like(baseline, model))
        return Made(model, self._optimizer(model))

    def _parallelized(self, model: nn.Module) -> Made:
        assert self._functions.parallelize is not None
        made = self._functions.parallelize(model, self._mesh, **axes_of(self._request))
        root, own = made if isinstance(made, tuple) else (made, None)
        if not isinstance(root, nn.Module):
            raise NotCheckable(f"check: parallelize() returned {type(root).__name__}: return the model, or the model "
                               "and its optimizer")  # fmt: skip
        optimizer = own or self._optimizer(root)
        mine = [id(one) for group in optimizer.param_groups for one in group["params"]]
        if not set(mine) & {id(one) for _, one in parameters_of(root)}:
            kind = type(optimizer).__name__
            raise NotCheckable(f"check: none of the {len(mine)} parameters of {kind} is the model's: "
                               f"it was made before sharding, or from another model [{codes.UNMOVED}]")  # fmt: skip
        return Made(root, optimizer, has_own_optimizer=own is not None)

    def _adapted(self, kind: type[Adapter], model: nn.Module) -> Made:
        request, own = self._request, self._functions.optimizer
        count = request.microbatches * (1 if self._role == "run" else request.data_size)
        others = [name for name, _ in request.mesh if name not in request.data_dims]
        if others:
            model = split(model, self._mesh[others[0]])
        config = Config(
            mesh=self._mesh[request.data_dims] if others else self._mesh, microbatches=count,
            units=tuple((name,) for name in choose_units(model)),
            precision=Precision(
                param_dtype=DTYPES.get(request.param_dtype), reduce_dtype=DTYPES.get(request.reduce_dtype),
            ),
            clip=Clip(request.max_norm) if request.max_norm else None,
        )  # fmt: skip
        adapter = kind(model, optimizer=None if own else self._by_name, config=config)
        if own is not None:
            adapter.optimizer = own(adapter.module)
        if adapter.optimizer is None:
            raise NotCheckable(f"check: {kind.name} hides its optimizer, so that nothing of its step can be seen")
        return Made(adapter.module, adapter.optimizer, adapter)

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self._functions.optimizer is None:
            return self._by_name(model.parameters())
        made = self._functions.optimizer(model)
        if not isinstance(made, torch.optim.Optimizer):
            raise NotCheckable(f"check: optimizer() returned {type(made).__name__}, not a torch.optim.Optimizer")
        return made

    def _by_name(self, parameters: Any) -> torch.optim.Optimizer:
        if self._request.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=1e-3)


def _optimizer_like(other: Made, model: nn.Module) -> torch.optim.Optimizer:
    """Make for a model the optimizer that ``parallelize`` has returned for another one."""
    kind, options = class_and_options(other.optimizer)
    names = {id(one): name for name, one in parameters_of(other.model)}
    mine = dict(parameters_of(model))
    groups = [
        group | {"params": [mine[names[id(one)]] for one in group["params"] if id(one) in names]}
        for group in other.optimizer.param_groups
    ]
    return kind(groups, **options)


@dataclasses.dataclass
class StepSeen:
    """One step as this process saw it: events, the state after it, and what else its judge needs."""

    events: ByKey  # of own gradients their sketches
    state: ByKey
    forwards: int
    norm_types: list[float]
    narrowest: torch.dtype
    is_fully_sharded: bool


class Observations:
    """The observations that a process keeps of the step under way.

    Args:
        role: of the training; the reference keeps among which numbers a function chooses as well.
        explains: whether the outputs of all modules and their gradients are kept too.

    Attributes:
        home: where gradients are kept; all else is kept on the host.
        events: the tensors of the step so far.
        records: those of steps that have ended and were not taken yet.
        errors: those of watching.
    """

    def __init__(self, role: Role, *, explains: bool) -> None:
        self._role, self._explains = role, explains
        self.home = torch.device("cpu")
        self.events: ByKey = {}
        self.records: list[StepRecord] = []
        self.errors: list[Exception] = []

    def see(self, seen: Observed) -> None:
        """Keep a tensor, as the sink of a watch."""
        stage = seen.stage
        if stage in (Stage.INPUT, Stage.INITIAL, Stage.PARAMETER, Stage.OPTIMIZER_STATE):
            return  # read between steps
        if stage in (Stage.MODULE_OUTPUT, Stage.OUTPUT_GRADIENT) and not self._explains and (
            seen.module or seen.call or stage == Stage.OUTPUT_GRADIENT
        ):  # fmt: skip
            return
        if stage == Stage.OWN_GRADIENT:
            # Eight numbers stand for it, because it is not sharded.
            box = seen.layout.box if seen.layout is not None else Box(tuple(seen.value.shape))
            self._add(dataclasses.replace(seen, value=digest(seen.value, box).numbers[:K]))
        elif stage in (Stage.GRADIENT, Stage.CLIPPED_GRADIENT):
            # Those after the last backward count.
            self._add(dataclasses.replace(seen, microbatch=0), self.home)
        else:
            self._add(seen)

    def note_choice(self, forward: int, chosen: torch.Tensor, values: torch.Tensor) -> None:
        """Keep which elements a function has chosen in a forward, and from what."""
        call = sum(key[0] == Stage.ROUTING and key[3] == forward and not key[6] for key in self.events)
        self._add(Observation(Stage.ROUTING, "", "", forward, call, 0, None, "", chosen))
        if self._role != "run":
            self._add(Observation(Stage.ROUTING, "", "", forward, call, 0, None, "values", values))

    def _add(self, seen: Observed, home: torch.device | str = "cpu") -> None:
        self.events[seen.key] = dataclasses.replace(seen, value=seen.value.detach().to(home, copy=True))


class Caller:
    """Calls the user's ``data`` and ``step``, or what stands for them.

    Args:
        mesh: of the run's ranks, or of one rank with the same names.
    """

    def __init__(
        self, request: Request, functions: Functions, original: Unsharded, made: Made, mesh: DeviceMesh,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.request, self.functions, self.original, self.mesh = request, functions, original, mesh
        self._made, self._device = made, device

    def data(self, step: int, rank: int, **more: Any) -> list[Any]:
        """Return the microbatches of a data rank, on the device."""
        if self.functions.data is not None:
            made = self.functions.data(step, rank, **more)
            if not isinstance(made, list) or not made:
                raise NotCheckable("check: data(step, rank) did not return a list of microbatches")
        else:
            options = {"step": step, "rank": rank, "batch": self.request.batch, "sequence": self.request.sequence}
            made = [microbatch(self.original.built, index=one, **options) for one in range(self.request.microbatches)]
        return [map_tensors(lambda one: one.to(self._device), arguments) for arguments in made]

    def step(self, microbatches: list[Any], **more: Any) -> None:
        """Train one optimizer step on microbatches."""
        model, optimizer = self._made.model, self._made.optimizer
        if self.functions.step is not None:
            self.functions.step(model, optimizer, microbatches, self.mesh, **more)
        elif self._made.adapter is not None:
            self._driven(self._made.adapter, microbatches)
        else:
            for arguments in microbatches:
                (self._loss(model, arguments) / len(microbatches)).backward()
            if self.request.max_norm:
                own = getattr(model, "clip_grad_norm_", None)
                if own is not None:
                    own(self.request.max_norm)
                else:
                    nn.utils.clip_grad_norm_(model.parameters(), self.request.max_norm)
            optimizer.step()
            optimizer.zero_grad()

    def _driven(self, adapter: Adapter, microbatches: list[Any]) -> None:
        """Train as an implementation's documentation says, through its adapter."""
        count = 1 if adapter.traits.divides_by_microbatches else len(microbatches)
        for number, arguments in enumerate(microbatches):
            with adapter.microbatch(is_last=number == len(microbatches) - 1):
                adapter.backward(self._loss(adapter.forward, arguments) / count)
        if self.request.max_norm and adapter.traits.clips == "call":
            adapter.clip()
        adapter.step()
        adapter.zero_grad(set_to_none=True)

    def _loss(self, forward: Callable[..., Any], arguments: Any) -> torch.Tensor:
        if isinstance(arguments, Mapping):
            output = forward(**arguments)
            loss = output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)
            return loss  # type: ignore[no-any-return]
        given = arguments if isinstance(arguments, (tuple, list)) else (arguments,)
        return self.original.built.loss(forward(*given), *given)


class TrainedModel:
    """A model that trains by a request's functions.

    Args:
        mesh: of the run's ranks, or of one rank with the same names.
        explains: whether the outputs of all modules and their gradients are seen too.
        baseline: for the oracle, the baseline, whose ``parallelize`` may have made the optimizer.
    """

    def __init__(
        self, request: Request, functions: Functions, role: Role, mesh: DeviceMesh, device: torch.device, *,
        explains: bool = False, baseline: "TrainedModel | None" = None,
    ) -> None:  # fmt: skip
        self.request, self.functions, self.role, self.mesh = request, functions, role, mesh
        self._observations = Observations(role, explains=explains)
        torch.manual_seed(request.seed)
        self.original = Unsharded.of(functions.subject.build(request.sequence))
        maker = Maker(request, functions, role, mesh, device)
        self._made: Made = maker.make(self.original, None if baseline is None else baseline._made)
        self._caller = Caller(request, functions, self.original, self._made, mesh, device)
        self.watch = Watch(
            self._observations.records.append, steps=range(request.steps + 1), optimizers=[self.optimizer],
            sink=self._observations.see, on_error=self._observations.errors.append, modules=True, digests=False,
        )  # fmt: skip
        self.watch.attach(self.model)
        self.flat = sizes_of_flat([self.model])
        if role != "run":
            self.know([self.flat], 0)
        #: Gradients that the optimizer is given in place of its own, so that its step is judged from equal ones.
        self.given: Mapping[str, torch.Tensor] | None = None
        if role != "run":
            self.optimizer.register_step_pre_hook(self._give)

    @property
    def model(self) -> nn.Module:
        """The model that trains."""
        return self._made.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that steps."""
        return self._made.optimizer

    @property
    def home(self) -> torch.device:
        """Where the gradients that it sees are kept; for the reference its state is too."""
        return self._observations.home

    @home.setter
    def home(self, home: torch.device) -> None:
        self._observations.home = home

    def know(self, flat: Sequence[Mapping[str, tuple[int, tuple[int, ...]]]], rank: int) -> None:
        """Take how many elements of flat parameters each rank holds."""
        self.watch.model.know(self.original.shapes, flat_places(flat, rank))

    def close(self) -> None:
        """Remove all hooks, and tear down what an adapter keeps."""
        self.watch.detach()
        if self._made.adapter is not None:
            self._made.adapter.teardown()

    # Data -----------------------------------------------------------------------------------

    def data(self, step: int, rank: int) -> list[Any]:
        """Return the microbatches of a data rank, on the device; those of the oracle are float64."""
        return self._caller.data(step, rank)

    def cast(self, microbatches: list[Any]) -> list[Any]:
        """Copy microbatches; for the oracle in its dtype."""
        wide = DTYPES[self.request.oracle] if self.role == "oracle" else None

        def one(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(wide, copy=True) if wide and tensor.is_floating_point() else tensor.clone()

        return [map_tensors(one, arguments) for arguments in microbatches]

    # A step ---------------------------------------------------------------------------------

    def step(self, microbatches: list[Any]) -> StepSeen:
        """Train one step, and return what was seen of it."""
        self._observations.events = {}
        self.watch.forget()  # calls of torch's functions that it has seen another model in training make
        narrow = Narrowest() if self.role == "baseline" else None
        keeps = self.role == "oracle" and self.request.oracle == "float64"
        double = KeepDouble() if keeps else contextlib.nullcontext()  # type: ignore[no-untyped-call]
        mode = narrow or double
        before = self.watch.step
        with mode, Choices(self._choose):
            self._caller.step(self.cast(microbatches))
        self.watch.end_step()
        if self._observations.errors:
            raise self._observations.errors[0]
        if (steps := self.watch.step - before) != 1 or not self._observations.records:
            raise NotCheckable(f"check: step() made {steps} optimizer steps that count: it must make one")
        record = self._observations.records.pop()
        events, self._observations.events = self._observations.events, {}
        return StepSeen(
            events, self.state(), record.forwards.count, [one.norm_type for one in record.norms.calls],
            narrow.dtype if narrow is not None else torch.float64, bool(meshes_of_units(self.model)),
        )  # fmt: skip

    # What is seen ---------------------------------------------------------------------------

    def _choose(self, chosen: torch.Tensor, values: torch.Tensor) -> None:
        self._observations.note_choice(self.watch.counts[0] - 1, chosen, values)

    @torch.no_grad()
    def state(self) -> ByKey:
        """Return the parameters, the optimizer's state and the buffers: copies of those of a run."""
        found: ByKey = {}
        # The reference trains no further before it is judged, so that its own tensors do.
        is_copied = self.role == "run"

        def add(stage: Stage, name: str, place: Layout | None, tensor: torch.Tensor, state: str = "") -> None:
            value = local_of(tensor.detach()).to(self.home, copy=is_copied)
            seen = of_parameter(stage, name, place, value, state=state)
            found[seen.key] = seen

        for name, parameter in self.watch.model.parameters():
            place = self.watch.model.place(name, parameter)
            add(Stage.PARAMETER, name, place, parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    its = place if value.ndim and not isinstance(value, DTensor) else layout_of(value)
                    add(Stage.OPTIMIZER_STATE, name, its, value, str(key))
        for name, buffer in self.model.named_buffers():
            add(Stage.BUFFER, name, layout_of(buffer), buffer)
        return found

    @torch.no_grad()
    def load(self, full: Mapping[Key, torch.Tensor]) -> None:
        """Take the state of the run: full tensors by the keys of :meth:`state`."""
        for name, parameter in self.watch.model.parameters():
            self._fill(parameter, full.get(key_of(Stage.PARAMETER, name)), name, parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    state = full.get(key_of(Stage.OPTIMIZER_STATE, name, str(key)))
                    self._fill(value, state, name, parameter)
        for name, buffer in self.model.named_buffers():
            self._fill(buffer, full.get(key_of(Stage.BUFFER, name)), name, buffer)

    def _fill(self, tensor: torch.Tensor, full: torch.Tensor | None, name: str, parameter: torch.Tensor) -> None:
        if full is None:
            return
        local = local_of(tensor)
        place = self.watch.model.place(name, parameter) if tensor.ndim else layout_of(tensor)
        mine = full if place is None else part_of(full, place.box).view(local.shape)
        # First to its device: the host would make float64 of it with one thread, and send twice as much.
        local.copy_(mine.to(local.device))

    @torch.no_grad()
    def _give(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.given is None:
            return
        for name, parameter in self.watch.model.parameters():
            full = self.given.get(name)
            if full is None:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._fill(parameter.grad, full, name, parameter)


def digest_of(arguments: Any) -> int:
    """Return what is equal for equal microbatches."""
    return zlib.crc32(b"".join(raw_bytes(one.detach().cpu()) for one in tensors_of(arguments)))


# What was seen, in a file.

_Place = tuple[Any, ...]


def save(path: str, seen: ByKey, **more: Any) -> None:
    """Write what was seen to a file that holds tensors and plain values alone."""
    events = [(key[0].name, *key[1:], _place_of(one.layout)) for key, one in seen.items()]
    torch.save({"events": events, "tensors": [one.value for one in seen.values()], **more}, path)


def read(path: str) -> tuple[ByKey, dict[str, Any]]:
    """Read what :func:`save` wrote; tensors are read when they are used."""
    made = torch.load(path, mmap=True, weights_only=True)
    found: ByKey = {}
    for (stage, module, parameter, number, call, index, key, place), tensor in zip(
        made.pop("events"), made.pop("tensors"), strict=True
    ):
        layout = None if place is None else Layout(Box(*place[:3]), place[3], place[4])
        seen = Observation(Stage[stage], module, parameter, number, call, index, layout, key, tensor)
        found[seen.key] = seen
    return found, made


def _place_of(layout: Layout | None) -> _Place | None:
    return None if layout is None else (*dataclasses.astuple(layout.box), layout.pending, layout.mesh)
