"""Public calls in any order: a sharded run and plain copies make the same ones, and agree bit for bit after each."""

import contextlib
import copy
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from shardproof.harness.adapters.base import (
    Clip,
    FullParams,
    OptimizerFactory,
    Settings,
    StateForm,
    tensors_of_state,
)
from shardproof.harness.judging.elements import exact_difference
from shardproof.harness.judging.finding import Finding, Location, Stage
from shardproof.harness.models import optim
from shardproof.harness.models.drawn import Block, DrawnModel, Part, Plan
from shardproof.harness.models.plain import copy_of, mean_square
from shardproof.harness.models.programs import Call, Program, Situation, accumulation_of, places
from shardproof.harness.parity.rank import Rank, Seeds
from shardproof.harness.tensors.pieces import Piece
from shardproof.testing.compare import each_once

__all__ = ["Block", "Call", "Part", "Plan", "Program", "make_calls"]

#: Far below the largest gradient and far above it; the inf-norm is the same in whatever order ranks compute it.
_CLIPS = {"low": 2.0**-12, "high": 2.0**12}


def make_calls(rank: Rank, program: Program) -> None:
    """Make the calls of a program on a sharded run and on plain copies, and compare both after each (collective).

    A few calls that end what is under way follow, and a step and an evaluation, in which what a call has left shows.

    Raises:
        Divergence: on every rank, at the first tensor that differs after a call; it names the call.
    """
    rank.seeds = Seeds(program.seed, program.seed + 1)
    torch.manual_seed(program.seed)
    both, situation = _Both(rank, program), Situation(program)
    both.check("sharding", situation)
    every = itertools.chain(program.calls, _ending(situation))
    for number, call in enumerate(every, 1):
        assert situation.allows(call), f"{call} is not legal as call {number}"
        try:
            both.make(call)
        except Exception as error:
            error.add_note(f"in call {number}, {call}, after {list(program.calls[: number - 1])}")
            raise
        situation.take(call)
        both.check(f"call {number}, {call}", situation)


def _ending(situation: Situation) -> Iterator[Call]:
    """What ends what is under way when the calls of a program are over, and shows what they have left."""
    if situation.waiting:
        yield Call("backward")
    yield from (Call("forward", "reduced"), Call("backward"), Call("step"), Call("evaluate", "no_grad"))


class _Both:
    """A sharded run and plain copies, one on each rank, whose gradients are averaged over all ranks."""

    def __init__(self, rank: Rank, program: Program) -> None:
        self._rank, self._program = rank, program
        replicas = program.replicas
        shape = (replicas, rank.world_size // max(1, replicas))
        mesh = rank.mesh(shape, ("replicate", "shard")) if replicas else rank.mesh()
        model = DrawnModel(program.plan)
        self._plain = copy_of(model).to(rank.device)
        self._factory = _factory(program)
        self._run = rank.run(
            model, units=program.plan.units(), mesh=mesh, optimizer=self._factory,
            reshard_after_forward=program.reshard_after_forward, microbatches=2,
            accumulation=accumulation_of(program, rank.implementation.capabilities()),
        )  # fmt: skip
        self._adapter = self._run.adapter
        self._groups: list[list[int]] = mesh.mesh.reshape(-1, self._adapter.config.shard_size).tolist()
        self._optimizer = self._factory(self._plain.parameters())
        self._microbatch = contextlib.ExitStack()
        self._waiting: tuple[torch.Tensor, torch.Tensor, bool] | None = None
        self._deferred: dict[str, torch.Tensor] = {}
        self._hooks: dict[int, list[Any]] = {}
        self._divisor = rank.world_size
        self._turn = itertools.count()
        self._saved: tuple[Call, Any, Any] | None = None
        self._wrong: list[tuple[Stage, str, str]] = []
        self._dtype = torch.float32

    def make(self, call: Call) -> None:
        """Make a call on both sides (collective)."""
        getattr(self, f"_{call.kind}")(call)

    # comparing ---------------------------------------------------------------------------

    def check(self, when: str, situation: Situation) -> None:
        """Compare all that can be seen in a situation (collective).

        Raises:
            Divergence: on every rank, at the first tensor that differs.
        """
        found = next(itertools.chain(self._wrong, self._differences(situation)), None)
        finding = None
        if found is not None:
            stage, name, text = found
            finding = Finding(Location(stage=stage, rank=self._rank.index, name=name), f"{text}, after {when}")
        # The title is the same after each call, so that a failure shrinks to one after another call.
        self._rank.agree(finding, title="the sharded run diverges from plain copies that make the same calls")

    def _differences(self, situation: Situation) -> Iterator[tuple[Stage, str, str]]:
        plain, held = dict(self._plain.named_parameters()), self._adapter.parameters()
        for name, gradient in ({} if situation.defers else self._adapter.gradients()).items():
            # A rank that has no element of a parameter may have no gradient of it.
            if gradient is not None or held[name].tensor.numel():
                yield from _difference(Stage.GRADIENT, name, gradient, plain[name].grad)
        for name, piece in held.items():
            yield from _difference(Stage.PARAMETER, name, piece, plain[name].detach())
        # What is frozen where an evaluation has left parameters gathered is so from the next forward on.
        for name, parameter in ({} if situation.left else self._adapter.held_parameters()).items():
            if parameter.requires_grad != plain[name].requires_grad:
                yield Stage.PARAMETER, name, f"requires_grad is {parameter.requires_grad}"
        yield from self._differences_of_states(plain, held)
        yield from self._differences_of_modules()

    def _differences_of_states(
        self, plain: dict[str, nn.Parameter], held: dict[str, Piece]
    ) -> Iterator[tuple[Stage, str, str]]:
        for name, state in (self._adapter.optimizer_state() or {}).items():
            if not held[name].tensor.numel():
                continue  # of what a rank holds nothing of it may have no state, or have made fewer steps
            others = tensors_of_state(self._optimizer.state.get(plain[name], {}))
            if state.keys() != others.keys():
                yield Stage.OPTIMIZER_STATE, name, f"has {sorted(state)}; that of the copies has {sorted(others)}"
            for key, piece in state.items():
                yield from _difference(Stage.OPTIMIZER_STATE, f"{name}: {key}", piece, others.get(key))

    def _differences_of_modules(self) -> Iterator[tuple[Stage, str, str]]:
        for name, buffer in self._plain.named_buffers():
            owner, _, key = name.rpartition(".")
            found = self._run.original_module(owner).get_buffer(key)
            yield from _bits(Stage.PARAMETER, f"buffer {name}", found, buffer)
        for name, module in self._plain.named_modules():
            if self._run.original_module(name).training != module.training:
                yield Stage.PARAMETER, f"module {name!r}", f"training is {not module.training}"

    def _compare(self, stage: Stage, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Note what differs; all ranks go on to the comparison after the call."""
        self._wrong += _bits(stage, name, found.detach(), expected.detach())

    # passes ------------------------------------------------------------------------------

    def _batch(self) -> tuple[torch.Tensor, int]:
        turn = next(self._turn)
        return self._rank.batch(turn, (self._program.rows, self._program.plan.dim)).to(self._dtype), turn

    def _called(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch, turn = self._batch()
        (found,), (expected,) = self._adapter.forward(batch, turn), self._plain(batch, turn)
        self._compare(Stage.OUTPUT, "output", found, expected)
        return found, expected

    def _evaluate(self, call: Call) -> None:
        contexts = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "dropped": contextlib.nullcontext}
        with contexts[call.how]():
            self._called()

    def _forward(self, call: Call) -> None:
        self._microbatch.enter_context(self._adapter.microbatch(is_last=call.how == "reduced"))
        found, expected = self._called()
        self._waiting = mean_square(found), mean_square(expected), call.how == "reduced"

    def _backward(self, call: Call) -> None:
        assert self._waiting is not None
        (loss, plain_loss, reduces), self._waiting = self._waiting, None
        self._adapter.backward(loss)
        self._microbatch.close()
        named = {name: one for name, one in self._plain.named_parameters() if one.requires_grad}
        found = torch.autograd.grad(plain_loss, [*named.values()], allow_unused=True)
        for name, gradient in zip(named, found, strict=True):
            if gradient is not None:
                self._deferred[name] = self._deferred[name] + gradient if name in self._deferred else gradient
        if reduces:
            for name, average in self._averages().items():
                earlier = named[name].grad
                named[name].grad = average if earlier is None else earlier + average

    def _averages(self) -> dict[str, torch.Tensor]:
        """The averages of what waits for a reduction: first over the ranks that divide a unit, then over replicas."""
        everyone, self._deferred = self._rank.exchange_tensors(self._deferred), {}
        found = {}
        for name in everyone[0]:
            sums = [functools.reduce(torch.add, [everyone[rank][name] for rank in ranks]) for ranks in self._groups]
            found[name] = functools.reduce(torch.add, sums) / self._divisor
        return found

    def _recover(self, call: Call) -> None:
        """Begin anew, as after an exception: what is not reduced yet is lost."""
        self._waiting, self._deferred = None, {}
        self._microbatch.close()
        self._adapter.recover()

    # gradients and the optimizer -----------------------------------------------------------

    def _everywhere(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter of the sharded run, as its optimizer has it, and of the copies."""
        yield from each_once(self._adapter.held_parameters()).items()
        yield from self._plain.named_parameters()

    def _step(self, call: Call) -> None:
        self._adapter.step()
        self._optimizer.step()

    def _zero_grad(self, call: Call) -> None:
        self._adapter.zero_grad(set_to_none=call.how == "none")
        self._optimizer.zero_grad(set_to_none=call.how == "none")

    def _clip(self, call: Call) -> None:
        clip = Clip(_CLIPS[call.how], math.inf)
        if hasattr(self._adapter, "api"):
            norm = cast(Any, self._adapter.module).clip_grad_norm_(clip.max_norm, clip.norm_type)
        else:
            norm = self._adapter.clip_parameters(self._adapter.held_parameters().values(), clip)
        expected = nn.utils.clip_grad_norm_(self._plain.parameters(), clip.max_norm, clip.norm_type)
        self._compare(Stage.TOTAL_NORM, "all gradients", self._adapter.norm_value(norm), expected)

    @torch.no_grad()
    def _scale_gradients(self, call: Call) -> None:
        for _, parameter in self._everywhere():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    @torch.no_grad()
    def _scale_parameters(self, call: Call) -> None:
        for _, parameter in self._everywhere():
            parameter.mul_(0.5)

    def _replace_gradient(self, call: Call) -> None:
        names = [name for name, one in self._plain.named_parameters() if one.requires_grad]
        chosen = names[call.place % len(names)]
        for name, parameter in self._everywhere():
            if name != chosen:
                continue
            if call.how == "drop":
                parameter.grad = None
            elif call.how == "set":
                parameter.grad = torch.full_like(parameter, 0.25)
            elif parameter.grad is not None:
                parameter.grad = parameter.grad * 2

    def _new_optimizer(self, call: Call) -> None:
        self._adapter.optimizer = self._factory(each_once(self._adapter.held_parameters()).values())
        self._optimizer = self._factory(self._plain.parameters())

    def _rate(self, call: Call) -> None:
        for optimizer in (self._adapter.optimizer, self._optimizer):
            assert optimizer is not None
            for group in optimizer.param_groups:
                group["lr"] *= 0.5 if call.how == "half" else 2.0

    # state dicts ---------------------------------------------------------------------------

    def _save(self, call: Call) -> None:
        state = self._adapter.checkpoint(form=cast(StateForm, call.how))
        # Later steps write to what a sharded state dict has.
        self._saved = call, copy.deepcopy(state), copy.deepcopy(self._plain_state())

    def _save_model(self, call: Call) -> None:
        with self._without_optimizer():
            self._save(call)

    def _plain_state(self) -> dict[str, Any]:
        return {"model": self._plain.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _load(self, call: Call) -> None:
        assert self._saved is not None
        # What a load takes it may write to: the same state can be loaded twice.
        (saved, state, plain) = copy.deepcopy(self._saved)
        with_optimizer = saved.kind == "save"
        with contextlib.nullcontext() if with_optimizer else self._without_optimizer():
            self._adapter.restore(state, form=cast(StateForm, saved.how))
        self._plain.load_state_dict(plain["model"])
        if with_optimizer:
            self._optimizer.load_state_dict(plain["optimizer"])

    @contextlib.contextmanager
    def _without_optimizer(self) -> Iterator[None]:
        optimizer, self._adapter.optimizer = self._adapter.optimizer, None
        try:
            yield
        finally:
            self._adapter.optimizer = optimizer

    # full parameters -----------------------------------------------------------------------

    def _unshard(self, call: Call) -> None:
        self._adapter.unshard()

    def _reshard(self, call: Call) -> None:
        self._adapter.reshard()

    def _read_units(self, call: Call) -> None:
        self._adapter.unshard(waits=True)
        self._compare_full({name: piece.tensor for name, piece in self._adapter.registered().items()})
        self._adapter.reshard()

    def _read(self, call: Call) -> None:
        first = call.how == "first-rank"
        with self._adapter.summon_full_params(FullParams(writeback=False, rank0_only=first)) as found:
            if not first or self._adapter.config.shard_index == 0:
                self._compare_full(found)

    def _compare_full(self, found: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._plain.named_parameters():
            self._compare(Stage.PARAMETER, f"full {name}", found[name], parameter)

    def _read_gradients(self, call: Call) -> None:
        with self._adapter.summon_full_params(FullParams(with_grads=True)) as found:
            for name, parameter in self._plain.named_parameters():
                gradient, expected = found[name].grad, parameter.grad
                if gradient is not None and expected is not None:
                    self._compare(Stage.GRADIENT, f"full {name}", gradient, expected)
                elif gradient is not expected:
                    has = "no gradient" if gradient is None else "a gradient"
                    self._wrong.append((Stage.GRADIENT, f"full {name}", f"has {has}, unlike that of the copies"))

    @torch.no_grad()
    def _write(self, call: Call) -> None:
        keeps = call.how == "kept"
        with self._adapter.summon_full_params(FullParams(writeback=keeps)) as found:
            for parameter in each_once(found).values():
                parameter.mul_(2.0)
        for parameter in self._plain.parameters() if keeps else ():
            parameter.mul_(2.0)

    # modules and their settings --------------------------------------------------------------

    def _place(self, call: Call) -> str:
        """The name of the module of a unit; "" is the root, whose own unit comes last."""
        names = [*(unit[0] for unit in self._program.plan.units()), ""]
        return names[call.place % places(self._program)]

    def _freeze(self, call: Call) -> None:
        unit = self._place(call)
        inner = [f"{name}." for name in (one[0] for one in self._program.plan.units()) if not unit]
        for name, parameter in self._shown(call):
            if name.startswith(f"{unit}." if unit else "") and not name.startswith(tuple(inner)):
                parameter.requires_grad_(False)

    def _thaw(self, call: Call) -> None:
        for _, parameter in self._shown(call):
            parameter.requires_grad_(True)

    def _shown(self, call: Call) -> Iterator[tuple[str, nn.Parameter]]:
        held = call.how == "held"
        yield from (self._adapter.held_parameters() if held else self._adapter.named_parameters()).items()
        yield from self._plain.named_parameters()

    def _mode(self, call: Call) -> None:
        for model in (self._adapter.module, self._plain):
            model.train(call.how == "train")

    def _convert(self, call: Call) -> None:
        for model in (self._adapter.module, self._plain):
            model.to(self._dtype if call.how == "dtype" else self._rank.device)

    def _cast(self, call: Call) -> None:
        self._dtype = torch.float64
        for model in (self._adapter.module, self._plain):
            model.to(torch.float64)

    def _hook(self, call: Call) -> None:
        """Halve the output of a unit, or end that; one that has such a hook gets no second one."""
        place, name = call.place % places(self._program), self._place(call)
        if call.how == "set" and place not in self._hooks:
            modules = self._run.original_module(name), self._plain.get_submodule(name)
            self._hooks[place] = [one.register_forward_hook(_halved) for one in modules]
        if call.how == "remove":
            for handle in self._hooks.pop(place, []):
                handle.remove()

    def _prefetch(self, call: Call) -> None:
        names = [unit[0] for unit in self._program.plan.units()]
        ordered = names if call.how == "next" else names[::-1]
        following: dict[str, list[str]] = {name: [] for name in names}
        if call.how != "none":
            following |= {name: [other] for name, other in itertools.pairwise(ordered)}
        self._adapter.prefetch(forward=following, backward=following)

    def _reshard_after_forward(self, call: Call) -> None:
        self._adapter.change(Settings(reshard_after_forward=call.how == "yes"), recurse=True)

    def _divide(self, call: Call) -> None:
        self._divisor = int(call.how)
        self._adapter.change(Settings(gradient_divide_factor=float(call.how)), recurse=True)


def _factory(program: Program) -> OptimizerFactory:
    factories = {"sgd": optim.sgd(momentum=0.0), "momentum": optim.sgd(), "adam": optim.adam()}
    return factories[program.optimizer]


def _halved(module: nn.Module, arguments: Any, output: Any) -> Any:
    return tuple(one * 0.5 for one in output) if isinstance(output, tuple) else output * 0.5


def _difference(
    stage: Stage, name: str, piece: Piece | None, full: torch.Tensor | None
) -> Iterator[tuple[Stage, str, str]]:
    if piece is None or full is None:
        if piece is not None or full is not None:
            yield stage, name, f"only {'the copies have' if piece is None else 'the sharded run has'} one"
        return
    yield from _bits(stage, name, piece.tensor, piece.cut(full))


def _bits(stage: Stage, name: str, found: torch.Tensor, expected: torch.Tensor) -> Iterator[tuple[Stage, str, str]]:
    if found.shape != expected.shape:
        yield stage, name, f"has shape {tuple(found.shape)}; that of the copies has {tuple(expected.shape)}"
    elif found.dtype != expected.dtype:
        yield stage, name, f"has dtype {found.dtype}; that of the copies has {expected.dtype}"
    elif difference := exact_difference(found, expected):
        index, one, other = difference
        yield stage, name, f"element {list(index)} is {one!r}; that of the copies is {other!r}"
