"""ZeRO stage 3 with flat, padded shards. Put your implementation in its place."""

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class ZeroThree:
    """Shards a model in place: each parameter is flattened, padded, and cut into one equal part for each rank.

    The model is one unit, of the parameters that are in no other. Then make the optimizer of ``model.parameters()``.
    """

    def __init__(self, model: nn.Module, units: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
        self.group, chosen = group, {*units, model}
        self.units: list[Unit] = []
        # A module comes before those inside it: reversed, inner units take their parameters first.
        for module in filter(chosen.__contains__, reversed(list(model.modules()))):
            self.units.append(Unit(module, model, {shard for unit in self.units for shard in unit.shards}, group))

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Surround a microbatch; gradients are added up, and reduced in the backward of the last one."""
        for unit in self.units:
            unit.defers = not is_last
        yield
        for unit in self.units:
            unit.free(*unit.gathered)
            # A unit that the last microbatch did not use.
            parts = unit.reduce(()) if is_last and any(one is not None for one in unit.waiting) else ()
            for shard, part in zip(unit.shards, parts, strict=False):
                if part is not None:
                    shard.grad = part if shard.grad is None else shard.grad + part

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients by their norm, that of all ranks' shards together, and return it."""
        if norm_type != 2.0:
            raise NotImplementedError(f"ZeroThree clips by the 2-norm alone, not by {norm_type}")
        shards = [shard for unit in self.units for shard in unit.shards]
        norm = nn.utils.get_total_norm([shard.grad for shard in shards if shard.grad is not None]).square()
        dist.all_reduce(norm, group=self.group)
        nn.utils.clip_grads_with_norm_(shards, max_norm, norm.sqrt_())
        return norm


class Unit:
    """The parameters of a module that are gathered, and reduced, together."""

    def __init__(self, module: nn.Module, model: nn.Module, taken: set[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.group, self.ranks, self.defers = group, group.size(), False
        numbers: dict[nn.Parameter, int] = {}
        # Several of a parameter that modules share. Weak, or the hooks of a module would keep it alive.
        self.places: list[tuple[weakref.ref[nn.Module], str, int]] = []
        for owner in module.modules():
            for name, one in owner.named_parameters(recurse=False, remove_duplicate=False):
                if one not in taken:
                    self.places.append((weakref.ref(owner), name, numbers.setdefault(one, len(numbers))))
        outside = {one for owner in {*model.modules()} - {*module.modules()} for one in owner.parameters(False)}
        if len(dtypes := {one.dtype for one in numbers}) > 1 or outside & numbers.keys():
            names = [name for _, name, _ in self.places]
            raise ValueError(f"a unit has parameters of one dtype that are in no other unit, not {names} of {dtypes}")
        self.shapes = [one.shape for one in numbers]
        rank = group.rank()
        self.shards = [nn.Parameter(self.parts(one.detach())[rank].clone(), one.requires_grad) for one in numbers]
        self.waiting: Sequence[torch.Tensor | None] = [None] * len(numbers)  # full gradients of earlier microbatches
        self.gathered: list[list[torch.Tensor]] = []  # of each forward whose backward is running
        self.running: list[list[torch.Tensor]] = []  # of each forward that is running
        self.register(self.shards)
        if numbers:
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward, always_call=True)

    def parts(self, full: torch.Tensor) -> torch.Tensor:
        """Return the ranks' parts of a parameter or gradient as rows, the end padded with zeros."""
        return nn.functional.pad(full.flatten(), (0, -full.numel() % self.ranks)).view(self.ranks, -1)

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let the modules have the shards, or full parameters."""
        for reference, name, number in self.places:
            if owner := reference():
                delattr(owner, name)
                setattr(owner, name, tensors[number])

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Gather."""
        full: list[torch.Tensor] = []
        gathered = Gather.apply(self, full, *self.shards)
        full.extend(one.data for one in gathered)  # the same memory, without a graph
        self.running.append(full)
        self.register(gathered)
        if not any(shard.requires_grad for shard in self.shards):  # else Gather.backward frees
            for one in tensors_in([args, kwargs]):
                if one.requires_grad:
                    one.register_hook(lambda gradient: self.free(full))

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Free the memory. Autograd has saved the tensors, whose backward begins at the output and needs it again."""
        full = self.running.pop()
        self.free(full)
        for tensor in tensors_in(output):
            # Of a view that is changed in place, backward comes to the base alone.
            for one in (tensor, tensor._base):
                if one is not None and one.requires_grad:
                    one.register_hook(functools.partial(self.before_backward, full))

    def before_backward(self, full: list[torch.Tensor], gradient: torch.Tensor) -> None:
        """Gather again, into the tensors that autograd has saved."""
        if not any(one is full for one in self.gathered):
            self.gathered.append(full)
            for one, values in zip(full, self.gather(), strict=True):
                one.untyped_storage().resize_(values.untyped_storage().size())
                one.copy_(values)
            self.register(full)

    def free(self, *several: list[torch.Tensor]) -> None:
        """Free full parameters; the modules have shards again, unless another backward of the unit is running."""
        for full in several:
            self.gathered = [one for one in self.gathered if one is not full]
            for one in full:
                one.untyped_storage().resize_(0)
            self.register(self.gathered[-1] if self.gathered else self.shards)

    def gather(self) -> list[torch.Tensor]:
        """Return full parameters, by one collective."""
        mine = torch.cat([shard.detach() for shard in self.shards])
        everyone = mine.new_empty(self.ranks * len(mine))
        dist.all_gather_into_tensor(everyone, mine, group=self.group)
        columns = everyone.view(self.ranks, -1).split([*map(len, self.shards)], dim=1)
        return [one.flatten()[: size.numel()].view(size) for one, size in zip(columns, self.shapes, strict=True)]

    def reduce(self, grads: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Return this rank's parts of the averages, by one collective; before the last microbatch only add up."""
        pairs = itertools.zip_longest(self.waiting, grads)
        sums = [old if new is None else new if old is None else old + new for old, new in pairs]
        self.waiting = sums if self.defers else [None] * len(sums)
        if self.defers:
            return [None] * len(sums)
        zero = self.shards[0].new_zeros
        full = [zero(size) if one is None else one for one, size in zip(sums, self.shapes, strict=True)]
        everyone = torch.cat([self.parts(one) for one in full], dim=1)
        mine = everyone.new_empty(everyone.shape[1])
        dist.reduce_scatter_tensor(mine, everyone.flatten(), group=self.group)
        parts = mine.div_(self.ranks).split([*map(len, self.shards)])
        return [None if one is None else part for one, part in zip(sums, parts, strict=True)]


class Gather(torch.autograd.Function):
    """Full parameters of shards, and in backward this rank's shards of the gradients, which autograd adds up."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, full: list[torch.Tensor], *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit, ctx.full = unit, full
        ctx.set_materialize_grads(False)  # a parameter that was not used has no gradient
        pairs = list(zip(unit.gather(), shards, strict=True))
        ctx.mark_non_differentiable(*(one for one, shard in pairs if not shard.requires_grad))
        return tuple(one for one, _ in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.unit.free(ctx.full)
        return (None, None, *ctx.unit.reduce(grads))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in what a module takes or returns."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = vars(value)
    members = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [one for member in members for one in tensors_in(member)]
