"""A unit's sharded parameters: one flat parameter, and with ``use_orig_params`` the original ones as views of it."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_impl.common import dtensor, modes
from fsdp_impl.common.changes import Changes
from fsdp_impl.common.owner import Owner
from fsdp_impl.flat.layout import Span, alignment_of, build_flat_layout, flattened, shaped, stride_of
from fsdp_impl.flat.ranks import Ranks

# Note: held by modules
# What the modules hold instead of a parameter:
# - outside of forward and backward, and between them: with `use_orig` the original parameter, a view of the shard
#   (FlatShards.register); else only the wrapped module holds the flat one, and the rest find plain views of the
#   unsharded parameter, of which only the shapes are there (FlatGroup.register).
# - while a unit computes: plain tensors, views of the unsharded parameter that autograd differentiates through
#   (FlatGroup.register_unsharded).
# - inside summon_full_params: parameters, views of a whole copy (summon.py).
# - inside `.to()` and the like: only the wrapped module holds the flat one, which owns the memory (summon.py).
# Optimizers, zero_grad and state dicts so find sharded parameters also where unsharded values are kept after forward.
# A user may put another parameter, or other data, instead of a sharded one: FlatShards.adopt takes it over.

#: The name under which a wrapped module holds its unit's flat parameter.
FLAT_PARAM = "_flat_param"


class Holder(NamedTuple):
    """A parameter that optimizers have, and which one it is: ``None`` stands for the flat one."""

    param: nn.Parameter
    which: int | None


class FlatShards:
    """This rank's shard of a unit's parameters.

    Attributes:
        names: of the parameters, from the wrapped module, without what wrappers add.
        owners: where each is registered; the first is where it was found first.
        offloads: whether the shard lives on the CPU wherever it is computed with.
        use_orig: whether the modules hold the original parameters, else only ``module`` holds the flat one.
        originals: the original parameters; with ``use_orig`` they live as views of the shard.
        specs: for parameters that are DTensors, how their local part is placed; else ``None``.
        flat: 1-D, ``layout.shard_numel``, on the device where shards live.
        changes: of the sharded parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        params: dict[nn.Parameter, list[Owner]],
        names: Sequence[str],
        ranks: Ranks,
        *,
        use_orig: bool,
        compute_dtype: torch.dtype | None,
        offloads: bool,
        pins: bool,
    ) -> None:
        self.module = module
        self.names = tuple(names)
        self.owners = tuple(tuple(owners) for owners in params.values())
        self.ranks = ranks
        self.use_orig = use_orig
        self.offloads = offloads
        self.changes = Changes()
        check_uniform(self.names, list(params), use_orig=use_orig)
        self.specs = tuple(param._spec if isinstance(param, DTensor) else None for param in params)
        locals_ = [dtensor.local_part(param) for param in params]
        dtype = compute_dtype or locals_[0].dtype
        self.layout = build_flat_layout(
            [local.size() for local in locals_],
            [stride_of(local) for local in locals_],
            ranks.size,
            alignment=alignment_of(dtype) if use_orig else 1,
        )
        self.spans = tuple(self.layout.span(index, ranks.rank) for index in range(len(locals_)))
        home = torch.device("cpu") if offloads else locals_[0].device
        shard = self.cut([local.detach() for local in locals_], locals_[0].dtype, home)
        if pins:
            shard = shard.pin_memory()
        self.flat = nn.Parameter(shard, requires_grad=any(param.requires_grad for param in params))
        # A DTensor cannot be a view of a shard: plain parameters take the places.
        self.originals = [_plain(param) for param in params] if use_orig else []

    def take_over(self) -> None:
        """Take the places of the parameters in the modules, once and for all (Note: held by modules)."""
        for param in (self.flat, *self.originals):
            self._manage(param)
        for owners in self.owners:
            for owner in owners:
                if (replaced := owner.module._parameters.get(owner.name)) is not None:
                    self._manage(replaced)
                if not self.use_orig:
                    owner.module._parameters.pop(owner.name, None)
        if self.use_orig:
            self.register()
        else:
            self.module._parameters[FLAT_PARAM] = self.flat

    def _manage(self, param: nn.Parameter) -> None:
        """Mark ``param``, for other wrappers and for optimizers, as one of this unit."""
        param._fsdp_flat_managed = True  # type: ignore[attr-defined]
        self.changes.watch(param)

    @property
    def is_sharded(self) -> bool:
        return self.ranks.size > 1

    def cut(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """This rank's shard (1-D, ``layout.shard_numel``) of whole ``tensors``, one for each parameter."""
        shard = torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
        assert len(tensors) == len(self.spans)
        for index, tensor in enumerate(tensors):
            self.put(index, tensor, shard)
        return shard

    def put(self, index: int, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Copy what :meth:`cut_one` takes of ``whole`` to its place in ``shard`` (1-D, ``layout.shard_numel``)."""
        span = self.spans[index]
        if span.numel:
            shard[span.offset : span.offset + span.numel].copy_(self.cut_one(index, whole))

    def cut_one(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """The elements of ``whole``, of the size of parameter ``index``, that lie in this rank's shard: 1-D."""
        piece, span = self.layout.pieces[index], self.spans[index]
        if whole.stride() != piece.stride:
            ordered = torch.empty_strided(piece.size, piece.stride, dtype=whole.dtype, device=whole.device)
            whole = ordered.copy_(whole)
        return flattened(whole)[span.start : span.start + span.numel]

    def part(self, index: int | None, shard: torch.Tensor) -> torch.Tensor:
        """What ``shard`` (1-D, ``layout.shard_numel``) holds of a parameter, as its holder shows it.

        1-D where shards may cut anywhere, in the parameter's own shape where nothing is sharded.
        """
        if index is None:
            return shard
        span = self.spans[index]
        return self.like_part(index, shard[span.offset : span.offset + span.numel])

    def parts(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """:meth:`part` of each original parameter."""
        pieces = shard.split(self._extents)
        return [self.like_part(index, pieces[2 * index + 1]) for index in range(len(self.spans))]

    @cached_property
    def _extents(self) -> list[int]:
        """Sizes that cut the shard: of what lies before each original parameter's part, and of the part."""
        extents, end = [], 0
        for span in self.spans:
            extents += [span.offset - end if span.numel else 0, span.numel]
            end += sum(extents[-2:])
        return [*extents, self.layout.shard_numel - end]

    def elements(self, index: int, held: torch.Tensor) -> torch.Tensor:
        """The reverse of :meth:`part`: 1-D, in the order of the shard, of what is laid out like an original parameter.

        Optimizers may have made ``held`` with other strides.
        """
        return self.cut_one(index, held) if held.size() == self.layout.pieces[index].size else held.reshape(-1)

    def like_part(self, index: int, elements: torch.Tensor) -> torch.Tensor:
        """``elements``, which lie in this rank's shard (1-D), as :meth:`part` shows them."""
        return elements if self.is_sharded else shaped(elements, self.layout.pieces[index])

    def holders(self) -> Iterator[Holder]:
        """The parameters that gradients are given to: the flat one, or the trainable original ones on this rank."""
        if not self.use_orig:
            yield Holder(self.flat, None)
            return
        for index, (param, span) in enumerate(zip(self.originals, self.spans, strict=True)):
            if span.numel and param.requires_grad:
                yield Holder(param, index)

    @modes.without_func
    def register(self) -> None:
        """Let the modules hold the original parameters as views of the shard; only with ``use_orig``."""
        if not self.use_orig:
            return
        with torch.no_grad():
            data = self.flat.detach()
            home = home_of(data)
            for index, (param, span, owners) in enumerate(zip(self.originals, self.spans, self.owners, strict=True)):
                # A parameter that has no element on any rank is a view of any memory, in its whole shape at first.
                is_whole = span.numel == 0 and param.ndim != 1 and self.is_sharded
                if is_whole or not lies_at(param, home, span):
                    param.data = self.part(index, data)
                for owner in owners:
                    owner.hold(param)

    def sync_requires_grad(self) -> None:
        """Frozen originals freeze the flat parameter if all of them are."""
        if self.use_orig:
            self.flat.requires_grad_(any(param.requires_grad for param in self.originals))

    def adopt(self) -> bool:
        """Take what the modules hold now for the originals, and write moved values back to the shard.

        A user may have assigned another parameter, or other ``data``; the shard keeps its memory. Returns whether there
        was any, on this rank or another; then the shard may have been written to, on the current stream.

        Raises:
            RuntimeError: if the new value has another shape than the one on this rank.
            NotImplementedError: if a shared parameter was replaced in some places only.
        """
        if not self.use_orig:
            return self.adopt_flat()
        found, home = False, home_of(self.flat)
        for index, span in enumerate(self.spans):
            held = self._held(index)
            if held is None:
                continue
            is_there = lies_at(held, home, span)
            if held is self.originals[index] and is_there:
                continue
            # On a rank without elements too: whether it trains decides whether gradients are reduced. Conversions swap
            # the parameter with another one, whose attributes the object has then.
            self.originals[index], found = held, True
            self._manage(held)
            if is_there:
                continue
            # `data`: a write that the ranks with elements alone make must not count there (see Note: stale values).
            place = self.part(index, self.flat.data)
            if span.numel and held.size() != place.size():
                raise RuntimeError(
                    f"Cannot writeback when the parameter shape changes\nExpects {place.size()} but got {held.size()} "
                    f"for {self.names[index]}"
                )
            with torch.no_grad():
                if span.numel:
                    place.copy_(held.detach())
                held.data = place
        if found:
            self.changes.note()
        return found

    def adopt_flat(self) -> bool:
        """Take what ``module`` holds now for the flat parameter, and return whether that is another one.

        Raises:
            RuntimeError: if it has another size.
        """
        held = self.module._parameters.get(FLAT_PARAM)
        if held is None:
            return False
        # Conversions may swap it with another one, whose attributes the object has then.
        self._manage(held)
        if held is self.flat:
            return False
        if held.numel() != self.layout.shard_numel:
            raise RuntimeError(
                "Cannot writeback when the parameter shape changes\n"
                f"Expects {torch.Size([self.layout.shard_numel])} but got {held.size()} for {FLAT_PARAM}"
            )
        self.flat = held
        self.changes.note()
        return True

    def has_changed(self) -> bool:
        """Whether a user has replaced originals or their data: the same on ranks that hold none of their elements."""
        if not self.use_orig:
            return self.module._parameters.get(FLAT_PARAM, self.flat) is not self.flat
        held, home = [self._held(index) for index in range(len(self.spans))], home_of(self.flat)
        return any(
            param is not None and (param is not original or not lies_at(param, home, span))
            for param, original, span in zip(held, self.originals, self.spans, strict=True)
        )

    def _held(self, index: int) -> nn.Parameter | None:
        """What the modules hold instead of an original; ``None`` if unsharded parameters stand there."""
        owner, *others = self.owners[index]
        held = owner.module._parameters.get(owner.name)
        if not isinstance(held, nn.Parameter):
            return None
        if others and any(other.module._parameters.get(other.name) is not held for other in others):
            raise NotImplementedError(f"Changing shared parameters is not supported yet: {self.names[index]}")
        return held


def set_tensor(owner: Owner, tensor: torch.Tensor, *, as_param: bool) -> None:
    """Let ``owner`` hold the plain ``tensor``; ``as_param`` where it stands instead of a registered parameter."""
    module = owner.module
    parameters: dict[str, Any] = module._parameters
    if type(module).__setattr__ is not nn.Module.__setattr__:
        # The class has to see what is set (recurrent layers keep lists of their weights), and nn.Module takes
        # only a Parameter for what is registered as one.
        parameters.pop(owner.name, None)
        setattr(module, owner.name, tensor)
    elif as_param:
        parameters[owner.name] = tensor
    else:
        module.__dict__[owner.name] = tensor


class Home(NamedTuple):
    """Where a shard lies: its storage's address, where it begins there, and its dtype."""

    storage: int
    offset: int
    dtype: torch.dtype


def home_of(flat: torch.Tensor) -> Home:
    return Home(flat.untyped_storage()._cdata, int(flat.storage_offset()), flat.dtype)


def lies_at(param: torch.Tensor, home: Home, span: Span) -> bool:
    """Whether ``param`` lies at ``span`` in the memory of a shard."""
    return (
        param.untyped_storage()._cdata == home.storage
        # Where a rank has nothing of a parameter any place does, and its memory tells whether it has new data.
        and (span.numel == 0 or param.storage_offset() == home.offset + span.offset)
        and param.numel() == span.numel
        and param.dtype == home.dtype
    )


def is_managed(param: torch.Tensor) -> bool:
    return getattr(param, "_fsdp_flat_managed", False)


def check_uniform(names: Sequence[str], params: Sequence[nn.Parameter], *, use_orig: bool) -> None:
    """Refuse, by a ``ValueError``, parameters that cannot be parts of one tensor."""
    first = params[0]
    for name, param in zip(names, params, strict=True):
        if param.ndim == 0:
            raise ValueError(
                f"FSDP doesn't support scalar parameters. Change {name} to a 1D tensor with numel equal to 1."
            )
        if not param.is_floating_point():
            raise ValueError(f"Cannot flatten integer dtype tensors: {name} is {param.dtype}")
        if param.dtype != first.dtype:
            raise ValueError(
                f"Must flatten tensors with uniform dtype but got {first.dtype} and {param.dtype} (of {name})"
            )
        if not use_orig and param.requires_grad != first.requires_grad:
            raise ValueError(
                "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`, but "
                f"{names[0]} has {first.requires_grad} and {name} has {param.requires_grad}"
            )
        if param.device != first.device:
            raise ValueError(
                f"Must flatten tensors on the same device but got both {first.device} and {param.device}, the latter "
                f"for {name}"
            )


def _plain(param: nn.Parameter) -> nn.Parameter:
    if not isinstance(param, DTensor):
        return param
    return nn.Parameter(dtensor.local_part(param).detach(), param.requires_grad)
