"""Replays the steps of a sharded run on the baseline and the oracle, or takes the results from the rank's cache."""

import collections
import copy
import dataclasses
import enum
import functools
import hashlib
import io
import marshal
import pickle
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn

from shardproof.harness.adapters.base import Adapter, Config, OptimizerFactory
from shardproof.harness.adapters.replicas import DdpAdapter, ReplicatedAdapter
from shardproof.harness.parity.coverage import states_per_parameter
from shardproof.harness.parity.oracle import Oracle, OracleStep
from shardproof.harness.parity.rank_state import Member, is_equal
from shardproof.harness.parity.run import Run, RunOptions, StepPicture
from shardproof.harness.tensors import notes
from shardproof.harness.tensors.memory import raw_bytes
from shardproof.harness.tensors.pieces import Piece, original_name, whole
from shardproof.harness.tensors.trees import map_tensors, on_host, tensors_of
from shardproof.harness.watching import capture
from shardproof.harness.watching.capture import Inputs
from shardproof.harness.watching.observation import Observed

# Digests of models, batches and functions: equal digests mean equal results of a deterministic replay.
#
# What cannot be digested safely has no digest: an object with state of its own, such as a counter in a hook or in a
# loss, would not be updated by a replay that is taken from a cache.

_BY_REFERENCE = (type, types.BuiltinFunctionType)
_BY_CONTENT = (nn.Module, functools.partial, torch.Size, torch.dtype, torch.device, enum.Enum, collections.OrderedDict)


def digest(value: Any) -> bytes | None:
    """Return a digest of all that a value consists of, 16 bytes comparable within one process, or None.

    It consists of modules, tensors, containers, dataclasses, partial functions, and functions without a closure; their
    code counts, and not what it refers to by global names.
    """
    stream = io.BytesIO()
    try:
        _Digester(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
    return hashlib.blake2b(stream.getbuffer(), digest_size=16).digest()


class _Digester(pickle.Pickler):
    """Writes values so that equal ones have equal bytes; nothing reads the result."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple, (("tensor", *_contents(value)),)
        if isinstance(value, types.FunctionType):
            if value.__closure__:
                raise pickle.PicklingError(f"{value.__qualname__} has state of its own")
            name, code = (value.__module__, value.__qualname__), marshal.dumps(value.__code__)
            return tuple, (("function", name, code, value.__defaults__, value.__kwdefaults__),)
        if isinstance(value, (*_BY_REFERENCE, *_BY_CONTENT)) or dataclasses.is_dataclass(value):
            return NotImplemented
        raise pickle.PicklingError(f"{type(value).__name__} may have state of its own")


def _contents(tensor: torch.Tensor) -> tuple[Any, ...]:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        raise pickle.PicklingError(f"the memory of a {type(tensor).__name__} is not its own")
    kind = type(tensor), tuple(tensor.shape), str(tensor.dtype), str(tensor.device), tensor.requires_grad
    return *kind, raw_bytes(tensor)


Baseline = Literal["ddp", "replicated", "single-process"]

_BASELINES: dict[str, type[Adapter]] = {"ddp": DdpAdapter, "replicated": ReplicatedAdapter}

State = dict[str, dict[str, torch.Tensor]]
"""By parameter, its full value under the key "" and the full tensors of its optimizer state, on the host."""

#: The fields of ``Config`` that no baseline looks at: how the implementation under test shards.
_SHARDING = frozenset(
    {
        *("mesh", "units", "reshard_after_forward", "accumulation", "offload", "flat_parameters"),
        *("backward_prefetch", "forward_prefetch", "limit_all_gathers"),
        *("init", "materializes", "as_groups", "default_mesh", "shard_dim", "unit_meshes", "wraps", "ignored_modules"),
        *("ignored_inside", "plain_root", "parameter_meshes"),
    }
)


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The results of one step, on the host; ``state_kinds``: the tensors that the optimizer keeps for one parameter."""

    baseline: StepPicture
    oracle: OracleStep
    state_kinds: int


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The results of one forward without autograd, on the host; ``captured`` is empty without capture."""

    baseline: list[torch.Tensor]
    oracle: Any
    captured: tuple[Sequence[Observed], Sequence[Observed]] = ((), ())


@dataclasses.dataclass(frozen=True)
class _Request:
    """A step or an evaluation to replay; ``mine`` is part of the caller's graph if inputs need gradients."""

    is_step: bool
    mine: Any
    everyone: list[Any]
    options: dict[str, Any]
    ahead: int
    start: State | None


class Replay:
    """The baseline and the oracle of one sharded run, made when a result is not in the cache.

    Every rank must call the methods that are marked as collective.

    Args:
        compared_as: the dtype to which the baseline's results are rounded, as in :class:`RunOptions`.
    """

    def __init__(
        self,
        member: Member,
        model: nn.Module,
        *,
        config: Config,
        optimizer: OptimizerFactory,
        baseline: Baseline,
        compared_as: torch.dtype | None = None,
    ) -> None:
        self._member = member
        self._config = config
        self._optimizer = optimizer
        self._baseline = baseline
        self._compared_as = compared_as
        self._initial = copy.deepcopy(model)
        self._made: tuple[Run | Oracle, Oracle] | None = None
        #: What the two have not replayed yet, because the results were in the cache.
        self._behind: list[_Request] = []
        #: Whether a replay has drawn random numbers. The runs then drew other ones, and are not comparable.
        self.draws_random_numbers = False
        self._key = self._first_key() if member.explainer is None else None
        self.is_single_process = baseline == "single-process"
        with notes.during("comparing"):
            self.is_adaptive = not isinstance(optimizer(self._initial.parameters()), torch.optim.SGD)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The baseline's run, if it was made."""
        return tuple(one for one in self._made or () if isinstance(one, Run))

    def _models(self) -> tuple[nn.Module, ...]:
        made = (one.adapter.module if isinstance(one, Run) else one.model for one in self._made or ())
        return tuple(made) or (self._initial,)

    def storages(self) -> set[int]:
        """The addresses of the storages of the baseline's and the oracle's parameters, which no other run may use."""
        return {value.untyped_storage().data_ptr() for model in self._models() for value in model.parameters()}

    def trained_numel(self) -> int:
        """The number of elements of the parameters that are trained."""
        return sum(value.numel() for value in self._models()[-1].parameters() if value.requires_grad)

    def frozen(self) -> frozenset[str]:
        """The names of the parameters that need no gradient now."""
        named = self._models()[-1].named_parameters()
        return frozenset(original_name(name) for name, value in named if not value.requires_grad)

    def expose(self) -> tuple[Run, Oracle]:
        """Return the baseline and the oracle as they are now, for a case that looks at or changes them (collective).

        From here on the results of this pair are neither taken from the cache nor kept in it.
        """
        self._key = None
        with notes.during("comparing"):
            self._catch_up()
            baseline, oracle = self._make()
        assert isinstance(baseline, Run), "the baseline is a single process, which is no run of this world"
        return baseline, oracle

    def step(
        self, microbatches: list[Inputs], *, options: dict[str, Any], ahead: int, start: State | None = None
    ) -> Replayed:
        """Replay a training step (collective), from another state than that of the step before if one is given."""
        return cast(Replayed, self._result(True, microbatches, options, ahead, start))

    def evaluate(self, inputs: Inputs, *, options: dict[str, Any], start: State | None = None) -> Evaluated:
        """Replay a forward without autograd (collective), from another state if one is given."""
        return cast(Evaluated, self._result(False, inputs, options, 0, start))

    def _result(self, is_step: bool, mine: Any, options: dict[str, Any], ahead: int, start: State | None) -> Any:
        cache = self._member.replays
        # Of inputs that need gradients the caller looks at the gradients.
        needs_gradient = any(tensor.requires_grad for tensor in tensors_of(mine))
        request_key = None if needs_gradient else digest((is_step, mine, options, ahead, start))
        key = None if self._key is None or request_key is None else self._key + request_key
        gathered = self._member.exchange_tensors((cache.version, key, mine))
        versions, keys, everyone = zip(*gathered, strict=True)
        if len(set(versions)) > 1:  # a rank failed between two results: what the ranks have may differ
            cache.clear(version=max(versions) + 1)
        self._key = None if None in keys else hashlib.blake2b(b"".join(keys), digest_size=16).digest()
        self._behind.append(_Request(is_step, mine, list(everyone), options, ahead, start))
        found = None if self._key is None else cache.get(self._key)
        if found is not None and not cache.is_due:
            return found.unpack()
        before = _random_state(self._member.device)
        result = self._catch_up()
        if found is not None and not is_equal(found.unpack(), result):
            raise RuntimeError(
                "the baseline and the oracle, computed again, differ from those of a case with the same model, "
                "batches and options: their results depend on something that the cache's key leaves out"
            )
        if not torch.equal(before, _random_state(self._member.device)):
            self._key = None  # a result that draws random numbers belongs to this case alone
            self.draws_random_numbers = True
        if found is None and self._key is not None:
            cache.put(self._key, result)
        return result

    def _catch_up(self) -> Any:
        """Replay what has not been replayed yet, and return the last result."""
        result = None
        behind, self._behind = self._behind, []
        with notes.during("comparing"):
            for request in behind:
                result = self._compute(request)
        return result

    def _compute(self, request: _Request) -> Any:
        baseline, oracle = self._make()
        if request.start is not None:
            for model, one in zip(self._models(), (baseline, oracle), strict=True):
                _write(model, one.adapter.optimizer if isinstance(one, Run) else one.optimizer, request.start)
        mine = map_tensors(torch.clone, request.mine)
        if not request.is_step:
            expected = oracle.evaluate(mine, submodule=request.options["submodule"])
            outputs = [*tensors_of(baseline.evaluate(map_tensors(torch.clone, mine), **request.options))]
            captured = capture.taken(baseline.capture), capture.taken(oracle.capture)
            return on_host(Evaluated(outputs, expected, captured))
        if self._member.implementation.traits.unused_gradient == "zero-unless-frozen":
            for value in (value for model in self._models() for value in model.parameters() if not value.requires_grad):
                value.grad = None  # the zeros of the step before
        batches = [request.everyone[index] for index in self._config.data_ranks]
        options = dict(request.options)
        global_loss = options.pop("global_loss", None) or options["loss"]
        if isinstance(baseline, Run):
            picture = baseline.settle(baseline.step(mine, ahead=request.ahead, **options))
        else:
            options["global_loss"] = global_loss
            position = self._config.data_ranks.index(self._member.index)
            picture = on_host(picture_of(baseline.step(batches, **options), position))
        expected = oracle.step(batches, **options)
        kinds = states_per_parameter(oracle.optimizer)
        return Replayed(dataclasses.replace(picture, coverage=None), on_host(expected), kinds)

    def _make(self) -> tuple[Run | Oracle, Oracle]:
        if self._made is None:
            captures = self._member.explainer is not None
            of_one: dict[str, Any] = {"optimizer": self._optimizer, "clip": self._config.clip, "captures": captures}
            oracle = Oracle(self._initial, **of_one)
            if self.is_single_process:
                self._made = Oracle(self._initial, dtype=torch.float32, **of_one), oracle
                return self._made
            options = RunOptions(optimizer=self._optimizer, compared_as=self._compared_as)
            kind = _BASELINES[self._baseline]
            self._made = Run(self._member, kind, self._initial, config=self._config, options=options), oracle
        return self._made

    def _first_key(self) -> bytes | None:
        """Return a digest of what shapes the results before the first step, or None if they must not be kept."""
        if self._member.implementation.traits.isolation != "shared":
            return None  # the adapter may have patched torch for good
        config, device = self._config, self._member.device
        fields = {field.name for field in dataclasses.fields(config)} - _SHARDING
        return digest(
            (
                self._initial,
                self._baseline,
                self._optimizer,
                self._compared_as,
                {name: getattr(config, name) for name in sorted(fields)},
                (config.mesh.mesh.tolist(), config.mesh.mesh_dim_names, str(device), self._member.index),
                (torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()),
                (torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled(device.type)),
            )
        )


@torch.no_grad()
def _write(model: nn.Module, optimizer: torch.optim.Optimizer | None, values: State) -> None:
    """Write full values, in the order of the model, to its parameters and to the state of their optimizer."""
    for parameter, full in zip(model.parameters(), values.values(), strict=True):
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, tensor in {"": parameter, **state}.items():
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(full[key].view_as(tensor))


def picture_of(step: OracleStep, position: int) -> StepPicture:
    """What the data-parallel rank at ``position`` has of a step of one process."""

    def pieces(values: Mapping[str, torch.Tensor | None]) -> dict[str, Piece | None]:
        return {name: None if value is None else whole(value) for name, value in values.items()}

    return StepPicture(
        outputs=[[*tensors_of(output)] for output in step.outputs[position]],
        losses=step.losses[position],
        gradients=pieces(step.gradients),
        norm=None if step.norm is None else step.norm.float(),
        clipped=None if step.norm is None else pieces(step.clipped),
        parameters=pieces(step.parameters),
        state={name: {key: whole(one) for key, one in state.items()} for name, state in step.state.items()},
        captured=step.captured[position],
    )


def _random_state(device: torch.device) -> torch.Tensor:
    """The states of the generators that a model may draw from."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(states)
