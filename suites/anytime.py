"""Calls that change no training, by families, with what each returns, and the scenes in which they are made."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from shardproof.suites.apis import Own
from shardproof.testing import Capability, Rank, Run, models
from shardproof.testing.compare import Piece, exact_difference, full_of, original_name
from shardproof.testing.make import Clip, StateForm

#: The moments of a training in which calls are made.
MOMENTS = BEFORE, WAITING, DEFERRED, BETWEEN, REDUCED, STEPPED, EVALUATING = (
    "before the first forward", "before a deferred backward", "after a deferred backward",
    "between forward and backward", "between backward and step", "after a step", "in evaluation",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Held:
    """What a rank holds at the end of a step, or before the first; copies.

    Attributes:
        parameters: its parts of the parameters.
        state: its parts of the optimizer's state.
        gradients: its parts of the gradients that the step has used.
        output: what an evaluation after the step returned; before the first step, what its first forward did.
        batch: the input of that evaluation or forward.
    """

    parameters: dict[str, Piece]
    state: dict[str, dict[str, Piece]]
    gradients: dict[str, Piece | None]
    output: torch.Tensor
    batch: torch.Tensor

    def difference(self, other: "Held") -> str | None:
        """Return what differs first from another, or None."""
        for (name, mine), (another, its) in zip(self._tensors(), other._tensors(), strict=False):
            if name != another:
                return f"{name} instead of {another}"
            if mine.shape != its.shape:
                return f"{name} has the shape {tuple(mine.shape)} with the calls and {tuple(its.shape)} without"
            if (found := exact_difference(mine, its)) is not None:
                return f"{name}: element, with the calls and without: {found}"
        return None

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, gradient in sorted(self.gradients.items()):
            yield f"gradient of {name!r}", torch.empty(0) if gradient is None else gradient.tensor
        for name, piece in sorted(self.parameters.items()):
            yield f"parameter {name!r}", piece.tensor
        for name, pieces in sorted(self.state.items()):
            for key, piece in sorted(pieces.items()):
                yield f"{key} of {name!r}", piece.tensor
        yield "output of an evaluation", self.output


def _copied(pieces: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: None if piece is None else dataclasses.replace(piece, tensor=piece.tensor.detach().cpu().clone())
        for name, piece in pieces.items()
    }


@dataclasses.dataclass(frozen=True)
class Scene:
    """A moment of a training, and what another run of the same training, without calls, holds then.

    Attributes:
        rank: this rank.
        run: the run in which the calls are made.
        moment: one of :data:`MOMENTS`.
        step: the number of the step; 0 before the first.
        syncs: whether the next backward reduces.
        before: what the step before has left.
        now: what this step leaves.
        notes: what calls keep for later moments of the same training.
        wrong: what was wrong with what a call returned on this rank; all ranks go on to the end of the moment.
    """

    rank: Rank
    run: Run
    moment: str
    step: int
    syncs: bool
    before: Held
    now: Held
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note what is wrong unless something holds."""
        if not holds:
            self.wrong.append(otherwise)

    @property
    def model(self) -> Any:
        """What the training loop calls."""
        return self.run.adapter.module

    @property
    def units(self) -> list[Any]:
        """The modules that are units, the root among them; outer ones first."""
        return [one for one in self.model.modules() if hasattr(one, "unshard")]

    @property
    def inner(self) -> list[Any]:
        """The units below the root."""
        return [one for one in self.units if one is not self.model]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        assert self.run.adapter.optimizer is not None
        return self.run.adapter.optimizer

    @property
    def held(self) -> Held:
        """Has the values that parameters and optimizer have in this moment."""
        return self.now if self.moment in (STEPPED, EVALUATING) else self.before

    def check_parameters(self, values: Mapping[str, torch.Tensor]) -> None:
        """Check full or sharded values of the parameters, by their names (collective)."""
        self.check_all("", values, self.held.parameters)

    def check_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Check the full or sharded states of the optimizer, by the names of parameters (collective)."""
        for name, state in sorted(states.items()):
            self.check_all(f"{name}: ", state, self.held.state.get(name, {}))
        lacking = [name for name, pieces in self.held.state.items() if pieces and name not in states]
        self.expect(not lacking, f"no states of {lacking} are returned")

    def check_all(self, prefix: str, values: Mapping[str, Any], pieces: Mapping[str, Piece]) -> None:
        """Check full or sharded values by the names of pieces, of which ranks may have different ones (collective)."""
        whole = {
            name: full_of(one.detach()).cpu() for name, one in sorted(values.items()) if isinstance(one, torch.Tensor)
        }
        for name, piece in sorted(pieces.items()):
            if name not in whole:
                self.wrong.append(f"{prefix}{name} is not returned")
            elif (found := exact_difference(piece.cut(whole[name]), piece.tensor)) is not None:
                self.wrong.append(f"{prefix}{name}: element, returned and held: {found}")

    def largest_gradient(self) -> float:
        """The largest absolute value of a gradient on any rank (collective)."""
        pieces = (piece for piece in self.now.gradients.values() if piece is not None and piece.tensor.numel())
        mine = max((float(piece.tensor.abs().max()) for piece in pieces), default=0.0)
        return float(max(self.rank.exchange(mine)))


@dataclasses.dataclass(frozen=True)
class UserCall:
    """A call of user code.

    Attributes:
        name: how the call is written.
        make: makes it, and checks what it returns.
        moments: in which it is allowed.
        needs: the capabilities without which there is no such call.
        lacks: the capabilities with which the call means something else.
    """

    name: str
    make: Callable[[Scene], object]
    moments: tuple[str, ...] = MOMENTS
    needs: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()

    def applies(self, scene: Scene) -> bool:
        """Whether the implementation has the call, and allows it in this moment."""
        has = scene.rank.implementation.capabilities()
        return scene.moment in self.moments and self.needs <= has and not self.lacks & has


def _nothing(*_: Any) -> None:
    """Do nothing."""


def _each(method: str, *args: Any, **options: Any) -> Callable[[Scene], None]:
    """Call a method of each unit."""

    def make(scene: Scene) -> None:
        for unit in scene.units:
            getattr(unit, method)(*args, **options)

    return make


# Calls of units: resharding, settings that are in force already, listings


def _unshard(scene: Scene) -> None:
    for unit in scene.units:
        scene.expect(unit.unshard() is None, "unshard() returns something")
    scene.check_parameters(_named(scene))
    _each("reshard")(scene)


def _unshard_and_wait(scene: Scene) -> None:
    for handle in [unit.unshard(async_op=True) for unit in scene.units]:
        handle.wait()
        handle.wait()
    scene.check_parameters(_named(scene))
    _each("reshard")(scene)


def _unshard_and_drop(scene: Scene) -> None:
    for unit in scene.units:
        unit.unshard(async_op=True)
        unit.reshard()


def _named(scene: Scene) -> dict[str, torch.Tensor]:
    return {original_name(name): value for name, value in scene.model.named_parameters(remove_duplicate=False)}


def _reshard_after_forward(scene: Scene) -> None:
    for unit in scene.units:
        unit.set_reshard_after_forward(unit is not scene.model, recurse=False)
    for unit in scene.inner:
        unit.set_reshard_after_forward(True)


def _synchronizes(method: str) -> Callable[[Scene], None]:
    def make(scene: Scene) -> None:
        for unit in scene.units:
            getattr(unit, method)(scene.syncs, recurse=False)
        getattr(scene.model, method)(scene.syncs)

    return make


def _recursive(method: str, *args: Any) -> Callable[[Scene], None]:
    """Call a setter on the root for all units, and on each for itself."""

    def make(scene: Scene) -> None:
        getattr(scene.model, method)(*args)
        for unit in scene.units:
            getattr(unit, method)(*args, recurse=False)

    return make


def _factor(method: str) -> Callable[[Scene], None]:
    def make(scene: Scene) -> None:
        mesh = scene.run.adapter.config.mesh
        if mesh.ndim == 1:  # torch over gloo takes no other factor than the number of shards: findings/F039.py
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning | FutureWarning)  # type: ignore[arg-type]
                _each(method, float(mesh.size()))(scene)

    return make


def _of_replicas(method: str, value: int, *, refused: str = "") -> UserCall:
    """Set on replicated units what is about reduce-scatters, of which they have none; they may refuse it by a word."""

    def make(scene: Scene) -> None:
        for unit in scene.units:
            if not hasattr(unit, method):  # in older torch
                return
            try:
                getattr(unit, method)(value, recurse=unit is scene.model)
            except (AssertionError, ValueError) as error:
                scene.expect(bool(refused) and refused in str(error), f"it is refused by {error}")

    return UserCall(f"{method}({value})", make, lacks=_SHARDS)


def _reset(scene: Scene) -> None:
    """Begin an iteration anew, also while reductions are deferred."""
    scene.model.reset_iter_state()
    scene.model.set_requires_gradient_sync(False)
    scene.model.reset_iter_state()
    scene.model.set_requires_gradient_sync(scene.syncs)


def _own_collectives(scene: Scene) -> None:
    scene.inner[-1].set_custom_all_gather(Own())
    scene.inner[-1].set_custom_reduce_scatter(Own())


def _group_memory(scene: Scene) -> None:
    # Not the last unit, which has collectives of the case's own.
    for unit in scene.units[:-1]:
        unit.set_allocate_memory_from_process_group_for_comm(False)


def _prefetch(scene: Scene) -> None:
    """Every list is legal: the next unit, all units, itself, units before it; the last is empty again."""
    if scene.moment == BEFORE:
        for method in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
            getattr(scene.inner[0], method)([scene.inner[0], *scene.units[::-1]])
        return  # for the first step
    for unit, following in zip(scene.inner, scene.inner[1:], strict=False):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    for unit in scene.units:
        unit.set_modules_to_forward_prefetch([])
        unit.set_modules_to_backward_prefetch([])


def _hook(scene: Scene) -> None:
    for unit in scene.units:
        if scene.run.adapter.config.mesh.ndim == 1:
            unit.set_all_reduce_hook(_nothing, stream=torch.get_device_module(scene.rank.device).Stream())
        else:
            unit.set_all_reduce_hook(_nothing)


def _event(scene: Scene) -> None:
    event = torch.get_device_module(scene.rank.device).Event()
    event.record()
    scene.model.set_post_optim_event(event)


def _methods(scene: Scene) -> None:
    register = cast(Any, type(scene.run.adapter)).register
    register(scene.inner[0], "get_buffer")
    register(nn.Linear(1, 1), "nothing")  # which is no unit
    try:
        register(scene.inner[0], "nothing")
    except ValueError as error:
        scene.expect("nothing" in str(error), f"a method that there is not is refused by {error}")
    else:
        scene.expect(False, "a method that there is not is accepted")


def _share(scene: Scene) -> None:
    share = cast(Any, type(scene.run.adapter)).share_comm_ctx
    share([])
    share([scene.model])
    if scene.moment == BEFORE:
        share([scene.inner[0], scene.model])
    try:
        share([scene.model, nn.Linear(1, 1)])
    except ValueError as error:
        scene.expect("FSDPModule" in str(error), f"a module that is no unit is refused by {error}")
    else:
        scene.expect(False, "a module that is no unit is accepted")


def _clip(scene: Scene) -> None:
    adapter = scene.run.adapter
    adapter.clip_parameters(scene.model.parameters(), Clip(math.inf))
    if not all(scene.rank.exchange(all(one is None or one.tensor.numel() for one in scene.now.gradients.values()))):
        return  # torch's inf-norm raises on a rank with an empty shard: findings/F002.py
    expected = scene.largest_gradient()
    found = adapter.norm_value(adapter.clip_parameters(scene.model.parameters(), Clip(math.inf, math.inf)))
    scene.expect(float(found) == expected, f"the largest gradient is {expected}, and the inf-norm {float(found)}")


def _listing(scene: Scene) -> None:
    """Names, shapes and dtypes are the original model's; what is called on all modules does nothing."""
    shapes = scene.run.coverage.shapes
    found = {name: value.shape for name, value in _named(scene).items()}
    wrong = {
        name: (tuple(found.get(name, ())), tuple(shape)) for name, shape in shapes.items() if found.get(name) != shape
    }
    scene.expect(not wrong, f"these parameters are listed with other shapes: {wrong}")
    _unchanged(scene)


def _unchanged(scene: Scene) -> None:
    repr(scene.model)
    scene.model.apply(_nothing)
    scene.model.train(scene.model.training)
    scene.model.to(scene.rank.device)
    for one in scene.model.modules():
        list(one.named_parameters(prefix="a.", recurse=False)), list(one.named_buffers(recurse=True))


def _asynchronous(scene: Scene) -> None:
    """Gather in the current stream in some phases; not documented, and trainers call it."""
    if hasattr(scene.model, "_set_unshard_async_op"):
        scene.model._set_unshard_async_op(scene.moment in (BEFORE, REDUCED))


_SHARDS = frozenset({Capability.SHARDED})
_UNITS = (
    UserCall("reshard()", _each("reshard")),
    UserCall("unshard() and reshard()", _unshard),
    UserCall("unshard(async_op=True), wait() and reshard()", _unshard_and_wait),
    UserCall("set_is_last_backward(True)", _each("set_is_last_backward", True)),
    UserCall("set_requires_gradient_sync()", _synchronizes("set_requires_gradient_sync")),
    UserCall("set_requires_all_reduce()", _synchronizes("set_requires_all_reduce")),
    UserCall("set_reshard_after_forward()", _reshard_after_forward, needs=_SHARDS),
    UserCall("set_reshard_after_backward(True)", _recursive("set_reshard_after_backward", True)),
    UserCall("set_unshard_in_backward(True)", _each("set_unshard_in_backward", True)),
    UserCall("set_modules_to_forward_prefetch() and backward", _prefetch),
    UserCall("set_force_sum_reduction_for_comms(False)", _each("set_force_sum_reduction_for_comms", False)),
    UserCall(
        "set_reduce_scatter_unused_params(False)", _recursive("set_reduce_scatter_unused_params", False),
        needs=frozenset({Capability.RANKS_DIFFER}),
    ),
    UserCall(
        "set_reduce_scatter_max_input_buffers(1)", _recursive("set_reduce_scatter_max_input_buffers", 1),
        needs=frozenset({"settings.reduce_scatter_max_input_buffers"}),
    ),
    UserCall(
        "set_separate_reduce_scatter_group(False)", _recursive("set_separate_reduce_scatter_group", False),
        needs=frozenset({"settings.separate_reduce_scatter_group"}),
    ),
    UserCall("set_allocate_memory_from_process_group_for_comm(False)", _group_memory, needs=_SHARDS),
    _of_replicas("set_reduce_scatter_max_input_buffers", 0, refused="positive"),
    _of_replicas("set_reduce_scatter_max_input_buffers", 2),
    _of_replicas("set_reduce_scatter_max_input_buffers", 1),
    _of_replicas("set_separate_reduce_scatter_group", True, refused="FSDPMeshInfo"),
    _of_replicas("set_separate_reduce_scatter_group", False, refused="FSDPMeshInfo"),
    UserCall("set_gradient_divide_factor(ranks)", _factor("set_gradient_divide_factor")),
    UserCall("set_reduce_scatter_divide_factor(ranks)", _factor("set_reduce_scatter_divide_factor"), needs=_SHARDS),
    UserCall("set_custom_all_gather() and set_custom_reduce_scatter()", _own_collectives, needs=_SHARDS),
    UserCall("set_all_reduce_hook()", _hook),
    UserCall("set_post_optim_event()", _event, moments=(BEFORE, STEPPED)),
    UserCall("_set_unshard_async_op()", _asynchronous),
    UserCall("register_fsdp_forward_method()", _methods),
    UserCall("share_comm_ctx()", _share, needs=frozenset({Capability.SHARE_COMM_CTX})),
    UserCall(
        "reset_iter_state()", _reset, moments=(REDUCED, STEPPED, EVALUATING),
        needs=frozenset({Capability.RECOVERY}),
    ),
    UserCall("clip_grad_norm_(inf)", _clip, moments=(REDUCED, STEPPED)),
    UserCall("named_parameters(), apply(), train(), to()", _listing),
)  # fmt: skip


# State dicts


def _own_state_dict(scene: Scene) -> None:
    state = scene.model.state_dict()
    scene.check_parameters(state)
    scene.check_parameters(scene.model.state_dict(keep_vars=True))
    found = scene.model.load_state_dict(state)
    scene.expect(found == ([], []), f"a model does not load its own state dict: {found}")


def _model_state(options: StateDictOptions) -> Callable[[Scene], None]:
    def make(scene: Scene) -> None:
        state: Any = get_model_state_dict(scene.model, options=options)
        if not options.cpu_offload or scene.rank.index == 0 or not options.full_state_dict:
            scene.check_parameters(state)
        # torch cannot load full values of a module in two places: findings/F421.py.
        several = len([*scene.model.modules()]) < len([*scene.model.named_modules(remove_duplicate=False)])
        if not (options.full_state_dict and (options.cpu_offload or several)):
            found = set_model_state_dict(scene.model, state, options=options)
            scene.expect(found == ([], []), f"a model does not load its own state dict: {found}")

    return make


_OPTIONS = {
    "": StateDictOptions(),
    "full_state_dict": StateDictOptions(full_state_dict=True),
    "full_state_dict, cpu_offload": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "cpu_offload": StateDictOptions(cpu_offload=True),
    "strict=False": StateDictOptions(strict=False),
}
_MODELS = (
    UserCall("state_dict() and load_state_dict()", _own_state_dict),
    *(
        UserCall(f"get_model_state_dict({name}) and set_model_state_dict()", _model_state(options))
        for name, options in _OPTIONS.items()
    ),
)


def _optimizer_state(options: StateDictOptions) -> Callable[[Scene], None]:
    def make(scene: Scene) -> None:
        scene.run.adapter.reshard()  # torch's function does not find gathered parameters: findings/F401.py
        state: Any = get_optimizer_state_dict(scene.model, scene.optimizer, options=options)
        offloads = options.cpu_offload and options.full_state_dict
        if not options.flatten_optimizer_state_dict and (not offloads or scene.rank.index == 0):
            scene.check_states(state["state"])
        if not offloads:
            set_optimizer_state_dict(scene.model, scene.optimizer, state, options=options)

    return make


def _both_states(scene: Scene) -> None:
    scene.run.adapter.reshard()
    model, optimizer = cast(Any, get_state_dict(scene.model, scene.optimizer))
    scene.check_parameters(model)
    scene.check_states(optimizer["state"])
    set_state_dict(scene.model, scene.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def _own_optimizer_state(scene: Scene) -> None:
    scene.optimizer.load_state_dict(scene.optimizer.state_dict())


#: Not before the first step: what torch's functions then make counts as a step of the optimizer: findings/F400.py.
_LATER = MOMENTS[1:]
_FLATTENED = {"flatten_optimizer_state_dict": StateDictOptions(flatten_optimizer_state_dict=True)}
_OPTIMIZERS = (
    UserCall("state_dict() and load_state_dict() of the optimizer", _own_optimizer_state),
    UserCall("get_state_dict() and set_state_dict()", _both_states, moments=_LATER),
    *(
        UserCall(
            f"get_optimizer_state_dict({name}) and set_optimizer_state_dict()",
            _optimizer_state(options),
            moments=_LATER,
        )
        for name, options in (_OPTIONS | _FLATTENED).items()
    ),
)

# Calls of wrappers


def _kind(scene: Scene) -> Any:
    return cast(Any, scene.run.adapter).api.FullyShardedDataParallel


def _wrappers(scene: Scene) -> list[Any]:
    return [one for one in scene.model.modules() if hasattr(one, "check_is_root")]


def _roots(scene: Scene) -> None:
    wrappers, kind = _wrappers(scene), _kind(scene)
    scene.expect(kind.fsdp_modules(scene.model) == wrappers, "fsdp_modules() are others than the wrappers in the model")
    found = kind.fsdp_modules(scene.model, root_only=True)
    scene.expect(
        scene.moment == BEFORE or found == [scene.model], f"with root_only=True there are {len(found)} of them"
    )
    # Before the first forward the first wrapper that is asked becomes the root: findings/F402.py.
    roots = [one for one in (wrappers[:1] if scene.moment == BEFORE else wrappers) if one.check_is_root()]
    scene.expect(roots == [scene.model], f"{len(roots)} wrappers say that they are the root")


def _summoned(*, reads: bool = True, **options: bool) -> Callable[[Scene], None]:
    """Summon full parameters, check them and, with gradients, those; on the first rank alone where they are there."""

    def make(scene: Scene) -> None:
        if options.get("with_grads") and scene.run.adapter.config.flat_parameters:
            return  # refused, as documented
        with _kind(scene).summon_full_params(scene.model, **options):
            named = scene.run.adapter.named_parameters()
            if reads and (not options.get("rank0_only") or scene.run.adapter.config.shard_index == 0):
                scene.check_parameters(named)
            if options.get("with_grads") and scene.moment in (REDUCED, STEPPED):
                held = {name: piece for name, piece in scene.now.gradients.items() if piece is not None}
                scene.check_all("gradient of ", {name: value.grad for name, value in named.items()}, held)

    return make


def _waits(scene: Scene) -> None:
    with scene.model.no_sync():
        pass


def _clip_wrapper(scene: Scene) -> None:
    # In evaluation there are no gradients any more, of which torch warns.
    expected = 0.0 if scene.moment == EVALUATING else scene.largest_gradient()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = [float(scene.model.clip_grad_norm_(math.inf, norm_type=math.inf))]
        with scene.model.no_sync():
            found.append(float(scene.model.clip_grad_norm_(math.inf, norm_type=math.inf)))
    scene.expect(found == [expected] * 2, f"the largest gradient is {expected}, and the inf-norms are {found}")


def _forms(scene: Scene) -> None:
    kind, forms = _kind(scene), cast(Any, scene.run.adapter).api.StateDictType
    first = kind.get_state_dict_type(scene.model)
    with kind.state_dict_type(scene.model, forms.SHARDED_STATE_DICT):
        inside = kind.get_state_dict_type(scene.model).state_dict_type
    before = kind.set_state_dict_type(
        scene.model, first.state_dict_type, first.state_dict_config, first.optim_state_dict_config
    )
    scene.expect(inside is forms.SHARDED_STATE_DICT, f"in a context of sharded state dicts the form is {inside}")
    scene.expect(before.state_dict_type is first.state_dict_type, f"afterwards it is {before.state_dict_type}")


def _listed(scene: Scene) -> None:
    model = scene.model
    names = sorted(original_name(name.replace("_fsdp_wrapped_module.", "")) for name, _ in model.named_parameters())
    held = sorted(scene.held.parameters)
    scene.expect(scene.run.adapter.config.flat_parameters or names == held, f"the parameters are named {names}")
    buffers = {id(value) for one in model.modules() for value in one.buffers(recurse=False)}
    scene.expect({id(value) for _, value in model.named_buffers()} == buffers, "not all buffers are listed")
    model.apply(_nothing)
    model.train(model.training)
    repr(model)


_WRAPPERS = (
    UserCall("check_is_root() and fsdp_modules()", _roots),
    UserCall("summon_full_params()", _summoned()),
    UserCall("summon_full_params(writeback=False)", _summoned(writeback=False)),
    UserCall("summon_full_params(recurse=False)", _summoned(reads=False, recurse=False)),
    UserCall("summon_full_params(rank0_only=True, writeback=False)", _summoned(rank0_only=True, writeback=False)),
    UserCall(
        "summon_full_params(with_grads=True)", _summoned(with_grads=True),
        moments=(BEFORE, REDUCED, STEPPED, EVALUATING),
    ),
    UserCall("no_sync()", _waits),
    UserCall("clip_grad_norm_(inf, inf)", _clip_wrapper, moments=(REDUCED, STEPPED, EVALUATING)),
    UserCall("state_dict_type(), set_state_dict_type() and get_state_dict_type()", _forms),
    UserCall("named_parameters(), named_buffers(), apply(), train()", _listed),
)  # fmt: skip


def _forward(scene: Scene) -> None:
    if scene.moment == REDUCED and scene.run.adapter.config.shards:
        return  # torch's next forward would use what this one leaves gathered: findings/F029.py
    with torch.no_grad():
        output = scene.model.forward(scene.held.batch).cpu()
    difference = exact_difference(output, scene.held.output)
    scene.expect(difference is None, f"the output: element, by the method and of the training: {difference}")


def _reduction_hook(scene: Scene) -> None:
    """Reduce by a hook as the wrapper does; hybrid strategies have none, and a second one is refused at any moment."""
    config, reduced = scene.run.adapter.config, scene.notes.setdefault("reduced", [])

    def hook(sizes: list[int], gradient: torch.Tensor, shard: torch.Tensor | None = None) -> None:
        sizes.append(gradient.numel())
        group = config.mesh.get_group()
        if shard is None:
            dist.all_reduce(gradient, group=group)
        else:
            dist.reduce_scatter_tensor(shard, gradient, group=group)
        (gradient if shard is None else shard).div_(config.mesh.size())

    words = "hybrid" if config.mesh.ndim > 1 else "" if scene.moment == BEFORE else "already registered"
    try:
        scene.model.register_comm_hook(reduced, hook)
    except AssertionError as error:
        scene.expect(bool(words) and words in str(error), f"it is refused by {error}")
    else:
        scene.expect(not words, f"it is accepted, where an error should name {words}")
    if words == "already registered":
        count = len([one for one in _wrappers(scene) if any(value.requires_grad for value in _of_unit(one))])
        times = scene.step - (scene.moment not in (REDUCED, STEPPED, EVALUATING))
        scene.expect(
            len(reduced) == count * times,
            f"{count} units are reduced {times} times, and the hook has run {len(reduced)}",
        )


def _of_unit(wrapper: Any) -> list[nn.Parameter]:
    """The parameters of a wrapper that none inside it has."""
    inside = [one for one in wrapper.modules() if one is not wrapper and hasattr(one, "check_is_root")]
    others = {id(value) for one in inside for value in one.parameters()}
    return [one for one in wrapper.parameters() if id(one) not in others]


#: What wrappers do in training, by the method or by user code.
_TRAINING = (
    UserCall("register_comm_hook()", _reduction_hook),
    # Last: before the first forward there is none.
    UserCall("forward()", _forward, moments=(BEFORE, REDUCED, STEPPED, EVALUATING)),
)


def _in_form(form: StateForm) -> Callable[[Scene], None]:
    """Save and load the model's state dict in a form."""

    def make(scene: Scene) -> None:
        adapter = scene.run.adapter
        kind, forms = _kind(scene), cast(Any, adapter).api.StateDictType
        with kind.state_dict_type(scene.model, forms.FULL_STATE_DICT if form == "full" else forms.SHARDED_STATE_DICT):
            state = scene.model.state_dict()
            scene.check_parameters(state)
            # Between forward and backward a load writes what backward needs, as that of a plain model does.
            if scene.moment in (WAITING, BETWEEN) and (adapter.config.flat_parameters or not adapter.config.shards):
                return
            found = scene.model.load_state_dict(state)
        scene.expect(found == ([], []), f"a model does not load its own state dict: {found}")

    return make


_WRAPPED_MODELS = (
    UserCall("state_dict() and load_state_dict(), full", _in_form("full")),
    UserCall("state_dict() and load_state_dict(), sharded", _in_form("sharded")),
)


def _optim(form: StateForm) -> Callable[[Scene], None]:
    """Save and load the optimizer's state dict in a form, by each call."""

    def make(scene: Scene) -> None:
        kind, api = _kind(scene), cast(Any, scene.run.adapter).api
        model, optimizer = scene.model, scene.optimizer
        # Without the move to the CPU, where the states are already: findings/F171.py.
        configs = {
            "full": (
                api.StateDictType.FULL_STATE_DICT,
                api.FullStateDictConfig(),
                api.FullOptimStateDictConfig(offload_to_cpu=False),
            ),
            "sharded": (api.StateDictType.SHARDED_STATE_DICT,),
        }
        with kind.state_dict_type(model, *configs[form]):
            state = kind.optim_state_dict(model, optimizer)
            scene.check_states(state["state"])
            optimizer.load_state_dict(kind.optim_state_dict_to_load(model, optimizer, state))
            kind.optim_state_dict_to_load(model, optimizer, state, load_directly=True)

    return make


def _older(scene: Scene) -> None:
    """Those before ``optim_state_dict``, which know of no part of the ranks, and other keys for what they return."""
    if scene.run.adapter.config.mesh.size() < scene.rank.world_size:
        return
    kind, model, optimizer = _kind(scene), scene.model, scene.optimizer
    full = kind.full_optim_state_dict(model, optimizer, rank0_only=False)
    scene.check_states(full["state"])
    optimizer.load_state_dict(kind.shard_full_optim_state_dict(full, model, optim=optimizer))
    optimizer.load_state_dict(kind.scatter_full_optim_state_dict(full, model, optim=optimizer))
    if not scene.run.adapter.config.flat_parameters:  # which have no names of their own
        keys = cast(Any, scene.run.adapter).api.OptimStateKeyType
        numbered = kind.rekey_optim_state_dict(full, keys.PARAM_ID, model, optim=optimizer)
        named = kind.rekey_optim_state_dict(numbered, keys.PARAM_NAME, model, optim=optimizer)
        scene.expect(all(isinstance(key, int) for key in numbered["state"]), "by numbers there are names")
        scene.check_states(named["state"])
    sharded = kind.sharded_optim_state_dict(model, optimizer)
    optimizer.load_state_dict(kind.flatten_sharded_optim_state_dict(sharded, model, optimizer))


_WRAPPED_OPTIMIZERS = (
    UserCall("optim_state_dict() and optim_state_dict_to_load(), full", _optim("full"), moments=_LATER),
    UserCall("optim_state_dict() and optim_state_dict_to_load(), sharded", _optim("sharded"), moments=_LATER),
    UserCall("full_optim_state_dict() and sharded_optim_state_dict()", _older, moments=_LATER),
)

#: Unshards that are dropped before anybody has waited for them.
_DROPPED = (UserCall("unshard(async_op=True) and reshard()", _unshard_and_drop),)
#: Calls of units that are allowed on the meta device, before there are values.
ON_META = tuple(
    call
    for call in _UNITS
    if "unshard" not in call.name.partition("_")[0] and call.moments == MOMENTS and call.make is not _listing
)
FAMILIES: dict[str, tuple[UserCall, ...]] = {
    "dropped-unshards": _DROPPED,
    "modules": _UNITS, "state-dicts": _MODELS, "optimizer-states": _OPTIMIZERS, "wrappers": _WRAPPERS,
    "wrapped-state-dicts": _WRAPPED_MODELS, "wrapped-optimizer-states": _WRAPPED_OPTIMIZERS,
    "wrapped-training": _TRAINING,
}  # fmt: skip


# Trainings with calls


def train(rank: Rank, run: Run, batches: list[list[torch.Tensor]], act: Callable[..., None]) -> list[Held]:
    """Train a step on each list of microbatches and evaluate after it, and return what is held (collective).

    Args:
        rank: this rank.
        run: the run.
        batches: the microbatches of each step.
        act: called in each moment with it, the number of the step and whether the next backward reduces.
    """
    adapter, found = run.adapter, [_held(run, {}, torch.empty(0), batches[0][0])]
    act(BEFORE, 0, len(batches[0]) == 1)
    for step, microbatches in enumerate(batches, 1):
        for number, batch in enumerate(microbatches, 1):
            is_last = number == len(microbatches)
            with adapter.microbatch(is_last=is_last):
                output = adapter.forward(batch)
                if batch is batches[0][0]:
                    found[0] = dataclasses.replace(found[0], output=output.detach().cpu().clone())
                act(BETWEEN if is_last else WAITING, step, is_last)
                adapter.backward(models.mean_square(output))
                if not is_last:
                    act(DEFERRED, step, False)
        act(REDUCED, step, True)
        gradients = _copied(adapter.gradients())
        adapter.step()
        act(STEPPED, step, True)
        adapter.zero_grad(set_to_none=True)
        adapter.module.eval()
        with torch.no_grad():
            output = adapter.forward(microbatches[0]).cpu().clone()
        act(EVALUATING, step, True)
        adapter.module.train()
        found.append(_held(run, gradients, output, microbatches[0]))
    return found


def _held(run: Run, gradients: dict[str, Piece | None], output: torch.Tensor, batch: torch.Tensor) -> Held:
    state = {name: _copied(pieces) for name, pieces in (run.adapter.optimizer_state() or {}).items()}
    return Held(_copied(run.adapter.parameters()), state, gradients, output, batch)


def change_of(
    rank: Rank,
    make: Callable[[], Run],
    batches: list[list[torch.Tensor]],
    expected: list[Held],
    calls: Sequence[UserCall],
) -> str | None:
    """Make calls in all moments of a training, and return what they change, or how one fails (collective).

    ``expected`` is what a training without calls returns; None says that nothing differs from it.
    """
    run, notes = make(), dict[str, Any]()

    def act(moment: str, step: int, syncs: bool) -> None:
        if step not in (0, 2):  # the first step makes what the optimizer holds, and the third shows what they left
            return
        scene = Scene(rank, run, moment, step, syncs, expected[max(0, step - 1)], expected[step], notes)
        texts: list[str] = []
        for call in calls:
            if call.applies(scene):
                where = f"{call.name} {moment} in step {step}"
                try:
                    call.make(scene)
                except Exception as error:
                    texts.append(f"{where}: {type(error).__name__}: {error}")
                    break
                texts += [f"{where}: {one}" for one in scene.wrong]
                scene.wrong.clear()
        for found in rank.exchange(texts):
            if found:
                raise _Wrong(found[0])

    try:
        found = train(rank, run, batches, act)
        differences = (one.difference(other) for one, other in zip(found, expected, strict=True))
        text = next((f"after step {step}, {one}" for step, one in enumerate(differences) if one is not None), None)
    except Exception as error:
        text = str(error) if isinstance(error, _Wrong) else f"{type(error).__name__}: {error}"
    texts = rank.exchange(text)
    return next((one for one in texts if one is not None), None)


class _Wrong(Exception):
    """What was wrong with a call, on every rank."""
