"""The implementations with a planted bug: one for each edit, made on first use, and those that are no edit.

A bug is planted before the first model of a case is sharded, and taken back when the case has ended: the next one has
the same ranks.
"""

import contextlib
import dataclasses
import inspect
import math
import pathlib
import re
import sys
import types
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_impl.per_parameter.group import KEEP
from fsdp_impl.per_parameter.unit import unit_of
from planted import helped, ignoring, table
from shardproof.harness.adapters.base import Adapter, Config, OptimizerFactory, Piece, Traits, original_name, whole
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.flat import BoundedGradScaler
from shardproof.harness.adapters.reference import ReferenceAdapter, ReferenceFlatAdapter
from shardproof.harness.adapters.replicas import DdpAdapter, ReplicatedAdapter
from shardproof.harness.adapters.torch_zero_optimizer import TorchZeroOptimizerAdapter
from shardproof.harness.parity.rank import Rank

_replaced: list[tuple[Any, str, Any]] = []


def replace(owner: Any, name: str, new: Any) -> None:
    """Set an attribute of a module or class until the case ends."""
    _replaced.append((owner, name, inspect.getattr_static(owner, name)))
    setattr(owner, name, new)


def _undo() -> None:
    while _replaced:
        setattr(*_replaced.pop())


_finish = Rank.finish


def _finish_and_undo(rank: Rank) -> None:
    try:
        _finish(rank)
    finally:
        _undo()


class Planting(Adapter):
    """Plants a bug before the first model of a case is sharded, until the case ends; mixed into a sound adapter."""

    def plant(self) -> None:
        """Call :func:`replace`; once for a case, also where it shards several models."""
        raise NotImplementedError

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not _replaced:
            self.plant()
            # The case may have no adapter to tear down: one that refuses a model is none.
            replace(Rank, "finish", _finish_and_undo)
        super().__init__(*args, **kwargs)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            _undo()


class _Edited(Planting):
    """Has the edit of a row, wherever ``fsdp_impl`` holds the function."""

    bug: ClassVar[table.Bug]
    #: Whether there is an error at the place of the row instead of its edit.
    raises: ClassVar[bool]

    def plant(self) -> None:
        owner, name = self.bug.owner()
        found, edited = getattr(owner, name), self.bug.raising() if self.raises else self.bug.edited()
        replace(owner, name, edited)
        for module in [module for key, module in sys.modules.items() if key.partition(".")[0] == "fsdp_impl"]:
            for key, value in list(vars(module).items()):
                if value is found:
                    replace(module, key, edited)


class _Helped(Planting, ReferenceAdapter):
    """Torch's functions for state dicts make a mistake of :mod:`planted.helped`, that of the name of the class."""

    def plant(self) -> None:
        helped.plant(type(self).__name__, replace)


_SOUND = {"reference": ReferenceAdapter, "reference.flat": ReferenceFlatAdapter}


def __getattr__(name: str) -> type[Adapter]:
    """The adapter of an edit: the id of its row with underscores; with "elsewhere_" before it, raising at its place.

    With "without_" before it, a capability: the adapter that ignores it.
    """
    wanted = name.removeprefix(table.RAISES)
    if name == wanted and name.startswith(table.WITHOUT):
        capability = table.ignored_by(name)
        base = next(one for one in _SOUND.values() if capability in one.capabilities())
        own = ignoring.made(base, capability) | {"name": name.replace("_", "-"), "__module__": __name__}
        made: type[Adapter] = type(name, (base,), own)
    elif name != wanted and (wanted in globals() or wanted.startswith(table.WITHOUT)):
        sound = globals().get(wanted) or __getattr__(wanted)
        made = type(name, (sound,), {"name": name, "__init__": _raise, "__module__": __name__})
    else:
        bug = table.find(wanted.replace("_", "-"))
        if bug is None or bug.old is None:
            raise AttributeError(f"planted/*.toml has no edit of the id {wanted.replace('_', '-')}")
        base = _SOUND[bug.implementation]
        traits = dataclasses.replace(base.traits, isolation="adapter" if bug.own_ranks else "shared")
        own = {"name": name.replace("_", "-"), "bug": bug, "raises": name != wanted, "traits": traits}
        made = type(name, (_Edited, base), own | {"__module__": __name__})
    globals()[name] = made
    return made


def _raise(self: Adapter, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(table.ELSEWHERE)


class DeafToPrefetch(ReferenceAdapter):
    """Both setters of prefetching have no effect."""

    def prefetch(self, **_: Any) -> None:
        pass


class BiasesHiddenFromHooks(ReferenceAdapter):
    """A Linear has no bias while the forward hooks of user code run."""

    def __init__(self, model: nn.Module, *, optimizer: Any, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        for linear in (module for module in self.module.modules() if isinstance(module, nn.Linear)):
            hidden: list[Any] = []

            def hide(module: nn.Module, args: Any, hidden: list[Any] = hidden) -> None:
                hidden.append(module._parameters.pop("bias"))

            def show(module: nn.Module, args: Any, hidden: list[Any] = hidden) -> None:
                module._parameters["bias"] = hidden.pop()

            linear.register_forward_pre_hook(hide, prepend=True)
            linear.register_forward_pre_hook(show)


class ForgottenFlags(ReferenceAdapter):
    """No unit ever waits for the last microbatch."""

    def _accumulate(self, *_: Any, **__: Any) -> None:
        pass


class ScalerOfOneMesh(ReferenceAdapter):
    """The scaler asks the ranks of the first gradient's mesh alone, also where there are several meshes."""

    def grad_scaler(self, *, init_scale: float, growth_interval: int, **options: Any) -> torch.amp.GradScaler:
        kind = self.config.mesh.device_type
        return torch.amp.GradScaler(kind, init_scale=init_scale, growth_interval=growth_interval, **options)


class ScalerOfOneRank(ReferenceFlatAdapter):
    """The scale grows if several ranks have an infinite gradient, because their flags are added up."""

    class scaler(BoundedGradScaler):
        def _amp_update_scale_cpu_(self, found_inf: torch.Tensor) -> None:
            super()._amp_update_scale_cpu_(torch.where(found_inf == 1, found_inf, 0))


class ScalerOfAllRanks(ReferenceFlatAdapter):
    """The scaler's process group is ignored."""

    class scaler(BoundedGradScaler):
        def __init__(self, *args: Any, process_group: Any = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)


class ScalerOfRoundedSums(ReferenceFlatAdapter):
    """Entries of sparse gradients of one index are added up in their own dtype."""

    class scaler(BoundedGradScaler):
        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None and param.grad.is_sparse:
                        param.grad = param.grad.coalesce()
            super().unscale_(optimizer)


class ScalerOfOneOptimizer(ReferenceFlatAdapter):
    """The scale changes with each step of an optimizer."""

    class scaler(BoundedGradScaler):
        def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            found = super().step(optimizer, *args, **kwargs)
            super().update()
            return found

        def update(self, new_scale: Any = None) -> None:
            pass


class ScalerOfFloat32(ReferenceFlatAdapter):
    """Scaled losses in lower precision are float32."""

    class scaler(BoundedGradScaler):
        scale: Any = torch.amp.GradScaler.scale


class ScalerUnscalesTwice(ReferenceFlatAdapter):
    """A second call that unscales is ignored."""

    class scaler(BoundedGradScaler):
        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            with contextlib.suppress(RuntimeError):
                super().unscale_(optimizer)


class ScalerNeverSetToZero(ReferenceFlatAdapter):
    """A new scale of zero is taken for none."""

    class scaler(BoundedGradScaler):
        def update(self, new_scale: Any = None) -> None:
            super().update(new_scale or None)


class ScalerOfAnyFactor(ReferenceFlatAdapter):
    """Factors are not looked at when the scaler is made."""

    class scaler(BoundedGradScaler):
        def __init__(self, *args: Any, growth_factor: float = 2.0, backoff_factor: float = 0.5, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._growth_factor, self._backoff_factor = growth_factor, backoff_factor


class ScalerBlindToSparse(ReferenceFlatAdapter):
    """Sparse gradients are unscaled, and infinite ones among them are not noticed."""

    class scaler(BoundedGradScaler):
        def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, *args: Any) -> Any:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, *args)
            given = [one.grad for group in optimizer.param_groups for one in group["params"]]
            if any(one is not None and one.is_sparse for one in given):
                for flag in found.values():
                    flag.zero_()
            return found


class RatesKept(ReferenceAdapter):
    """Learning rates that are tensors are kept by their values, to be moved to the device once."""

    _rates: dict[float, torch.Tensor] | None = None

    def step(self) -> None:
        self._rates = self._rates or {}
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            if isinstance(group["lr"], torch.Tensor):
                group["lr"] = self._rates.setdefault(float(group["lr"]), group["lr"])
        super().step()


class SplitUnits(ReferenceAdapter):
    """The modules of one unit become units of their own."""

    def __init__(self, model: nn.Module, *, optimizer: Any, config: Config) -> None:
        apart = tuple((name,) for unit in config.units for name in unit)
        super().__init__(model, optimizer=optimizer, config=dataclasses.replace(config, units=apart))


class MethodNeverFrees(ReferenceAdapter):
    """A registered method gathers, and leaves its unit gathered."""

    @staticmethod
    def register(target: nn.Module, name: str) -> None:
        method = getattr(target, name)

        def wrapped(self: nn.Module, *args: Any) -> Any:
            unit: Any = unit_of(self)
            args, _ = unit.pre_forward(self, args, {})
            output = method(*args)
            before, unit.group.after_forward = unit.group.after_forward, KEEP
            output = unit.post_forward(self, args, output)
            unit.group.after_forward = before
            return output

        setattr(target, name, types.MethodType(wrapped, target))


class MethodNotHooked(ReferenceAdapter):
    """A registered method receives its inputs without the hook for backward."""

    @staticmethod
    def register(target: nn.Module, name: str) -> None:
        method = getattr(target, name)

        def wrapped(self: nn.Module, *args: Any) -> Any:
            unit: Any = unit_of(self)
            unit.pre_forward(self, args, {})
            return unit.post_forward(self, args, method(*args))

        setattr(target, name, types.MethodType(wrapped, target))


class FrozenThawed(ReferenceAdapter):
    """Sharding sets requires_grad of every parameter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.module.requires_grad_(True)


class GraphBreaks(ReferenceAdapter):
    """Sharding breaks the graph of every compiled block in two places."""

    def __init__(self, model: nn.Module, *, optimizer: Any, config: Config) -> None:
        for (unit,) in config.units:
            for name in ("qkv", "out"):
                child = getattr(model.get_submodule(unit), name)
                child.register_forward_pre_hook(torch._dynamo.disable(lambda module, args: None))
        super().__init__(model, optimizer=optimizer, config=config)


class NothingRecomputed(ReferenceAdapter):
    """Layers that their caller recomputes are called once, and keep their activations."""

    def __init__(self, model: Any, **options: Any) -> None:
        model.calls = "plain"
        super().__init__(model, **options)


class IgnoredOffload(ReferenceAdapter):
    """The policy that keeps shards on the CPU is not passed on."""

    def __init__(self, model: Any, *, optimizer: Any, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=dataclasses.replace(config, offload=None))


class DoubledMomentum(ReferenceAdapter):
    """The state of the optimizer is wrong after a step whose parameters are right."""

    def step(self) -> None:
        super().step()
        assert self.optimizer is not None
        for state in self.optimizer.state.values():
            if isinstance(found := state.get("exp_avg"), torch.Tensor):
                found.mul_(2)


class OwnCheckpoint(ReferenceAdapter):
    """Saves the shards of each rank in a file of its own, as engines do; the sound one."""

    traits = dataclasses.replace(ReferenceAdapter.traits, isolation="shared")

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return super().capabilities() | {Capability.OWN_CHECKPOINT}

    def save_own(self, directory: pathlib.Path) -> None:
        directory.mkdir(exist_ok=True)
        assert self.optimizer is not None
        model = self.module.state_dict()
        shards = {name: self.shard_of(value) for name, value in model.items()}
        layout = {name: (isinstance(value, DTensor), tuple(value.shape)) for name, value in model.items()}
        saved = {"model": shards, "layout": layout, "optimizer": self.local(self.optimizer.state_dict())}
        torch.save(saved, directory / f"{dist.get_rank()}.pt")
        dist.barrier()

    def load_own(self, directory: pathlib.Path) -> None:
        saved = torch.load(directory / f"{dist.get_rank()}.pt", weights_only=False)
        with torch.no_grad():
            for name, value in self.module.state_dict().items():
                self.shard_of(value).copy_(saved["model"][name])
        self.load_optimizer(saved["optimizer"])

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        """Restore the groups' options and the tensors of state, into those that there are."""
        assert self.optimizer is not None
        for group, one in zip(self.optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in one.items() if key != "params"})
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, state in saved["state"].items():
            for key, value in state.items():
                self.shard_of(self.optimizer.state[parameters[number]][key]).copy_(value)

    def consolidated(self, directory: pathlib.Path) -> dict[str, torch.Tensor]:
        files = [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(dist.get_world_size())]
        return {original_name(name): self.joined(name, files) for name in files[0]["model"]}

    def joined(self, name: str, files: list[dict[str, Any]]) -> torch.Tensor:
        """Put a tensor together from the parts of all ranks."""
        is_divided, shape = files[0]["layout"][name]
        parts = [file["model"][name] for file in files]
        return torch.cat(parts).view(shape) if is_divided else parts[0]

    @staticmethod
    def shard_of(value: torch.Tensor) -> torch.Tensor:
        """What this rank has of a tensor."""
        return value.to_local() if isinstance(value, DTensor) else value

    def local(self, state: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's state dict with what this rank has of each tensor."""
        kept = {
            number: {key: self.shard_of(value).clone() for key, value in one.items()}
            for number, one in state["state"].items()
        }
        return {"state": kept, "param_groups": [dict(group) for group in state["param_groups"]]}


class WithoutState(OwnCheckpoint):
    """Loads the weights and the options of the optimizer's groups, and leaves its states as they are."""

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        super().load_optimizer(saved | {"state": {}})


class WithoutRates(OwnCheckpoint):
    """Loads the states of the optimizer and leaves the options of its groups."""

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        assert self.optimizer is not None
        groups = [dict(group) for group in self.optimizer.param_groups]
        super().load_optimizer(saved | {"param_groups": groups})


class FirstShard(OwnCheckpoint):
    """Puts whole weights together from as many rows of each rank as the first has, as if sizes divided."""

    def joined(self, name: str, files: list[dict[str, Any]]) -> torch.Tensor:
        is_divided, shape = files[0]["layout"][name]
        parts = [file["model"][name] for file in files]
        if not is_divided:
            return parts[0]
        padded = [torch.cat([part, part.new_zeros(len(parts[0]) - len(part), *part.shape[1:])]) for part in parts]
        return torch.cat(padded[::-1])[: shape[0]]


class WithoutFrozen(OwnCheckpoint):
    """Makes whole weights of what is trained alone."""

    def consolidated(self, directory: pathlib.Path) -> dict[str, torch.Tensor]:
        trained = {name for name, value in self.named_parameters().items() if value.requires_grad}
        return {name: value for name, value in super().consolidated(directory).items() if name in trained}


class ZeroClaimsGradients(TorchZeroOptimizerAdapter):
    """Says that gradients are divided too, although DDP leaves them whole on every rank."""

    traits = dataclasses.replace(TorchZeroOptimizerAdapter.traits, shards=frozenset({"gradients", "optimizer"}))


class ZeroWholeState(TorchZeroOptimizerAdapter):
    """Says that the optimizer's state is divided, and makes an ordinary optimizer."""

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        super().__init__(model, optimizer=optimizer, config=config)
        self.optimizer = optimizer(self.module.parameters()) if optimizer else None


def _zero(**methods: Any) -> Any:
    """What makes a ``ZeroRedundancyOptimizer`` with other methods."""

    def make(parameters: Any, kind: Any, **options: Any) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return type("Zero", (ZeroRedundancyOptimizer,), methods)(parameters, kind, **options)

    return staticmethod(make)


def _step_without_loss(self: Any, closure: Any = None, **options: Any) -> None:
    super(type(self), self).step(closure, **options)


class ZeroStepWithoutLoss(TorchZeroOptimizerAdapter):
    """Its optimizer calls a closure and drops the loss."""

    zero_optimizer = _zero(step=_step_without_loss)


class ZeroWithoutBuckets(TorchZeroOptimizerAdapter):
    """Its optimizer leaves parameters where they are, whatever user code has chosen."""

    @staticmethod
    def zero_optimizer(parameters: Any, kind: Any, **options: Any) -> torch.optim.Optimizer:
        options.pop("parameters_as_bucket_view", None)
        return TorchZeroOptimizerAdapter.zero_optimizer(parameters, kind, **options)


def _hook_without_gradients(self: Any, **options: Any) -> Any:
    hook = super(type(self), self).join_hook(**options)
    step = hook.main_hook

    def main_hook() -> None:
        self.zero_grad()
        step()

    hook.main_hook = main_hook
    return hook


class ZeroEndedRanksClear(TorchZeroOptimizerAdapter):
    """Ranks that have ended clear gradients before they take part in the others' steps."""

    zero_optimizer = _zero(join_hook=_hook_without_gradients)


def _in_turn(self: Any, given: Any = None) -> Any:
    size = self.world_size
    is_new = given is None and not self._partition_parameters_cache
    turns = [self._all_params[rank::size] for rank in range(size)] if is_new else given
    return super(type(self), self)._partition_parameters(turns)


class ZeroInTurn(TorchZeroOptimizerAdapter):
    """Gives parameters to ranks in turn, whatever their sizes."""

    zero_optimizer = _zero(_partition_parameters=_in_turn)


class ZeroTakesSeveralTypes(TorchZeroOptimizerAdapter):
    """Leaves out parameters of another type than the first, without a word."""

    @staticmethod
    def zero_optimizer(parameters: Any, kind: Any, **options: Any) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        given = parameters if isinstance(parameters, torch.Tensor) else [*parameters]
        if isinstance(given, list):
            given = [one for one in given if isinstance(one, dict) or one.dtype == given[0].dtype]
        return ZeroRedundancyOptimizer(given, kind, **options)


class ZeroShowsItsOwnStates(TorchZeroOptimizerAdapter):
    """Shows the states of this rank alone, wherever all states were brought."""

    zero_optimizer = _zero(state_dict=lambda self: self.optim.state_dict())


class _Shown(ReferenceAdapter):
    """Shards like the reference, and shows other pieces."""

    def shown(self, name: str, piece: Piece) -> Piece:
        raise NotImplementedError

    @property
    def index(self) -> int:
        return self.config.mesh.get_local_rank(self.config.mesh.ndim - 1)

    def gradients(self) -> dict[str, Piece | None]:
        found = super().gradients()
        return {name: None if piece is None else self.shown(name, piece) for name, piece in found.items()}

    def parameters(self) -> dict[str, Piece]:
        return {name: self.shown(name, piece) for name, piece in super().parameters().items()}

    def optimizer_state(self) -> None:
        return None


def nothing_of(piece: Piece) -> Piece:
    return Piece(piece.tensor.flatten()[:0], lambda full: full.flatten()[:0])


class Nothing(_Shown):
    def shown(self, name: str, piece: Piece) -> Piece:
        return nothing_of(piece)


class NothingAndNoStep(Nothing):
    def step(self) -> None:
        pass


class NothingOnRankOne(_Shown):
    def shown(self, name: str, piece: Piece) -> Piece:
        return nothing_of(piece) if self.index == 1 else piece


class AllOnRankZero(_Shown):
    """Gathers everything on every rank and shows it on the first alone."""

    def gathered_pieces(self, found: dict[str, Any]) -> dict[str, Any]:
        full = {name: None if value is None else whole(value.full_tensor()) for name, value in found.items()}
        return {n: p if p is None or self.index == 0 else nothing_of(p) for n, p in full.items()}

    def gradients(self) -> dict[str, Piece | None]:
        return self.gathered_pieces({name: value.grad for name, value in self._held.items()})

    def parameters(self) -> dict[str, Piece]:
        return self.gathered_pieces({name: value.detach() for name, value in self._held.items()})


class ZerosCutFromZeros(_Shown):
    def shown(self, name: str, piece: Piece) -> Piece:
        shape = piece.tensor.shape
        return Piece(torch.zeros_like(piece.tensor), lambda full: full.new_zeros(shape))


class CutIsTheTensor(_Shown):
    def shown(self, name: str, piece: Piece) -> Piece:
        return Piece(piece.tensor, lambda full: piece.tensor.to(full.dtype))


class CutOfFloatsIsTheTensor(_Shown):
    """Positions are cut as they should be, floating-point tensors are not."""

    def shown(self, name: str, piece: Piece) -> Piece:
        def cut(full: torch.Tensor) -> torch.Tensor:
            return piece.tensor.to(full.dtype) if full.is_floating_point() else piece.cut(full)

        return Piece(piece.tensor, cut)


class RankZerosPieces(_Shown):
    """Every rank shows what the first holds."""

    def shown(self, name: str, piece: Piece) -> Piece:
        (full,) = [v for n, v in self._held.items() if n == name]
        value = full.grad if full.grad is not None and self._reading == "gradients" else full.detach()
        assert isinstance(value, DTensor)
        rows = math.ceil(full.shape[0] / self.config.shard_size)
        return Piece(value.full_tensor()[:rows].clone(), lambda one: one[:rows])

    def gradients(self) -> dict[str, Piece | None]:
        self._reading = "gradients"
        return super().gradients()

    def parameters(self) -> dict[str, Piece]:
        self._reading = "parameters"
        return super().parameters()


class FirstRowEverywhere(RankZerosPieces):
    """A rank's own rows, and the first row on the other ranks too."""

    def shown(self, name: str, piece: Piece) -> Piece:
        full = self._held[name]
        value = full.grad if self._reading == "gradients" else full.detach()
        assert isinstance(value, DTensor)
        gathered = value.full_tensor()

        def cut(one: torch.Tensor) -> torch.Tensor:
            mine = piece.cut(one)
            return mine if self.index == 0 else torch.cat([one[:1], mine])

        return Piece(cut(gathered), cut)


class NoGradients(_Shown):
    """The parameters are shown as they should be, the gradients' pieces are empty."""

    def parameters(self) -> dict[str, Piece]:
        return ReferenceAdapter.parameters(self)

    def shown(self, name: str, piece: Piece) -> Piece:
        return nothing_of(piece)


class LessFromTheSecondStep(_Shown):
    """From the second step on the pieces are empty."""

    _shown = 0

    def gradients(self) -> dict[str, Piece | None]:
        self._shown += 1
        return super().gradients()

    def shown(self, name: str, piece: Piece) -> Piece:
        return piece if self._shown == 1 else nothing_of(piece)


class _ClaimsAll(Adapter):
    """Declares nothing, which claims everything that a sharded implementation claims."""

    traits = Traits()

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return super().capabilities() | {Capability.SHARDED}


class PlainDdp(_ClaimsAll, DdpAdapter):
    """Claims everything, and shards nothing."""


class HoldsEverythingFromTheStart(PlainDdp):
    traits = Traits(held_from_start=frozenset({"master", "gradients", "gathered"}))


class PaddedByAPage(PlainDdp):
    """So much padding that a small model is not larger than a share of it."""

    traits = Traits(collective_padding=4096)


class HiddenCopy(_ClaimsAll, ReplicatedAdapter):
    """Registers no parameter: what it holds is found in memory only."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.hidden, self.module = self.module, torch.nn.Module()

    def forward(self, *args: Any, submodule: str = "") -> Any:
        return self.hidden.get_submodule(submodule)(*args)

    def named_parameters(self) -> Any:
        return dict(self.hidden.named_parameters())


class ClaimsOptimizerState(DdpAdapter):
    traits = Traits(shards=frozenset({"optimizer"}))


class ClaimsGradients(DdpAdapter):
    traits = Traits(shards=frozenset({"gradients"}))


globals().update({name: type(name, (_Helped,), {"__module__": __name__}) for name in helped.BUGS})

for _name, _kind in list(globals().items()):
    if isinstance(_kind, type) and issubclass(_kind, Adapter) and _kind.__module__ == __name__:
        _kind.name = re.sub(r"(?<=[A-Za-z])(?=[A-Z])", "-", _name).lower()
