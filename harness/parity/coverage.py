"""Checks that the shards of all ranks make up the model: by positions nothing is missing or twice, and by sizes.

A comparison judges what an adapter shows. Pieces that cover nothing agree with every baseline, so the positions that
``cut`` gives are checked as well, once for each tensor of a run. A rank describes what it holds as spans of positions,
which travel with values that the ranks exchange anyway.

By size it is checked that an implementation divides what its adapter claims to divide. Bytes are counted in the rank's
memory once the model is sharded. Elements are counted where a training script sees them: in the registered parameters,
in their gradients, and in the state of the optimizer. Counting reads and does not wait for a device.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from shardproof.harness.adapters.base import Adapter, Config, Traits
from shardproof.harness.judging.finding import Divergence, Finding, Location, Stage, raise_first
from shardproof.harness.parity import protocol
from shardproof.harness.tensors import memory, trees
from shardproof.harness.tensors.pieces import (
    Piece,
    Spans,
    cut_before_sharding,
    index_at,
    original_name,
    spans_of,
    uncut,
)
from shardproof.harness.tensors.trees import local_of

#: How many shares of the parameters each member of ``traits.held_from_start`` is; what is gathered is counted apart.
_SHARES = {"master": 1, "gradients": 1, "optimizer": 2, "gathered": 0}

NOT_SHARDED = "the model is not sharded"
"""The title of failures about the size of what a rank holds."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What one rank may hold of a model's parameters, by what its adapter declares."""

    numel: int
    share: int  # the most elements of the model's parameters that are this rank's share, with padding
    padding: int  # the elements of the share by which units are padded
    byte_share: int  # the bytes of that share, with everything else that is declared as held from the start
    byte_limit: int  # the most bytes that a rank may hold once the model is sharded

    @property
    def can_tell(self) -> bool:
        """Whether a rank's share is less than the whole model, which padding may prevent if the model is tiny."""
        return 0 < self.share < self.numel


def sizes_of(model: nn.Module, config: Config, traits: Traits) -> Sizes:
    """Return what one rank may hold of a model that is not sharded yet."""
    parameters = list(model.parameters())
    itemsize = config.cast.itemsize if config.cast else max((value.element_size() for value in parameters), default=0)
    numel = sum(value.numel() for value in parameters)
    ignored = {id(model.get_parameter(name)) for name in config.ignored_params}
    shares = [
        value.numel() if id(value) in ignored else traits.local_numel(value.shape, config.shard_size)
        for value in parameters
    ]
    padding = traits.collective_padding * (len(config.units) + 1)
    share = sum(shares) + padding
    # What is held besides the parameters is a share too, never the full model.
    held = share * (1 + sum(_SHARES[what] for what in traits.held_from_start))
    if "gathered" in traits.held_from_start or config.sync_module_states:
        # What each of gloo's two threads has sent or gathered last stays allocated in full until it is released.
        held += config.shard_size * sum(sorted(shares)[-2:])
    # The margin is half of what sharding the parameters saves: bookkeeping tensors are smaller, an unsharded model
    # exceeds it.
    margin = max(numel - share, 0) // 2
    return Sizes(numel, share, padding, itemsize * held, itemsize * (held + margin))


@dataclasses.dataclass(frozen=True)
class Counts:
    """The elements that one rank holds of something and those of all of it; ``held`` is None if it was not counted."""

    held: int | None
    full: int

    @property
    def is_all(self) -> bool:
        """Whether the rank holds at least everything."""
        return self.held is not None and 0 < self.full <= self.held


def gradient_numel(adapter: Adapter) -> int:
    """Return the elements that this rank holds of the gradients of the registered parameters."""
    grads = (value.grad for value in adapter.module.parameters() if value.is_leaf)
    return local_numel(grad for grad in grads if grad is not None)


def state_numel(adapter: Adapter) -> int | None:
    """Return the elements of the optimizer's state on this rank, without its scalars; None if there is no optimizer.

    An optimizer around another one has no state itself. What the adapter reads of the other's then counts.
    """
    if adapter.optimizer is None:
        return None
    held = sum(local_numel(_tensors(state)) for state in adapter.optimizer.state.values())
    shown = adapter.optimizer_state() or {}
    read = local_numel(piece.tensor for pieces in shown.values() for piece in pieces.values() if piece.tensor.ndim)
    return held or read


def states_per_parameter(optimizer: torch.optim.Optimizer | None) -> int:
    """Return how many tensors, besides scalars, an optimizer keeps for one parameter."""
    return 0 if optimizer is None else max((len(_tensors(state)) for state in optimizer.state.values()), default=0)


def _tensors(state: dict[str, object]) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor) and value.ndim]


@torch.no_grad()
def local_numel(tensors: Iterable[torch.Tensor]) -> int:
    """Return the elements that this rank holds of tensors, each counted once."""
    found = {id(tensor): tensor for tensor in tensors}.values()
    return sum(local_of(one).numel() for one in found)


def kept_outside(model: nn.Module) -> list[str]:
    """Say what is held: the largest registered parameters, and tensors that modules keep in attributes of their own.

    Sharding replaces registered parameters, and does not know of such attributes, as of the list of its weights that
    ``nn.LSTM`` has: they keep the full ones.
    """
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return [
        *_largest_registered(model),
        *(line for name, module in model.named_modules() for line in _in_attributes(name, module, known)),
    ]


def _largest_registered(model: nn.Module) -> Iterator[str]:
    registered = [(original_name(name), local_of(one)) for name, one in model.named_parameters()]
    sizes = {name: memory.bytes_of([one]) for name, one in registered if memory.is_allocated(one)}
    if sizes:
        largest = ", ".join(
            f"{name!r} {sizes[name]}" for name in sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
        )
        yield f"registered parameters hold {sum(sizes.values())} bytes, the largest {largest}"


def _in_attributes(name: str, module: nn.Module, known: Collection[int]) -> Iterator[str]:
    for attribute, value in vars(module).items():
        if attribute in ("_parameters", "_buffers", "_modules") or not isinstance(value, (list, tuple, dict)):
            continue
        kept = [one for one in trees.tensors_of(value) if id(one) not in known and memory.is_allocated(one)]
        if nbytes := memory.bytes_of(kept):
            kind = type(module).__name__
            yield f"{name or 'the model'} ({kind}) keeps {nbytes} bytes of tensors in {attribute!r}"


def all_of(what: str, counts: Sequence[Counts]) -> Finding | None:
    """Return a finding if every rank holds all of a member of ``traits.shards``, which the implementation divides."""
    if not all(one.is_all for one in counts):
        return None
    named = "optimizer state" if what == "optimizer" else what
    them = "it" if what == "optimizer" else "them"
    text = f"the implementation claims to shard {named}, and every rank holds all of {them}"
    return Finding(Location(stage=Stage.SHARDING), f"{text} ({counts[0].full} elements)")


def check_sharded(shown: Sequence[tuple[Counts, Finding | None]]) -> None:
    """Raise a Divergence if every rank holds all parameters of a new run, or any rank more bytes than it may.

    ``shown`` has by rank the elements of the registered parameters, and the rank's own finding about its bytes.
    """
    everywhere = all_of("parameters", [counts for counts, _ in shown])
    raise_first([everywhere] if everywhere else [finding for _, finding in shown], title=NOT_SHARDED)


# What ranks hold, by positions.

Key = tuple[Stage, str]
"""A stage and the name of a parameter: a tensor of which each rank has a piece."""

_PARAMETER = Stage.PARAMETER


@dataclasses.dataclass
class Shown:
    """What one rank shows of the tensors that it has not shown before."""

    group: tuple[int, ...]  # the global ranks among which this rank's parameters are divided, this rank included
    replica: int  # the number of that group on the mesh
    spans: dict[Key, Spans] = dataclasses.field(default_factory=dict)
    # By parameter name, the positions of the tensor-parallel part that the group divides, where it is one.
    parts: dict[str, Spans] = dataclasses.field(default_factory=dict)
    wrong: tuple[Location, str] | None = None  # the first piece that makes no sense by itself, with the reason
    # By member of ``traits.shards``, the elements that the rank holds.
    counts: dict[str, Counts] = dataclasses.field(default_factory=dict)

    @property
    def who(self) -> str:
        """The group, for messages."""
        ranks = ", ".join(map(str, self.group))
        return f"replica {self.replica} (rank{'s' * (len(self.group) > 1)} {ranks})"


class Coverage:
    """Remembers which tensors a run has shown on one rank, and judges what all ranks show.

    The model is that before it is prepared and sharded; ``shapes`` has the full shape of each parameter by name.
    """

    def __init__(self, model: nn.Module, *, config: Config, traits: Traits, rank: int) -> None:
        self.sizes = sizes_of(model, config, traits)
        self.shapes = {original_name(name): value.shape for name, value in model.named_parameters()}
        self._traits, self._rank = traits, rank
        self._size, self._ignored = config.shard_size, frozenset(config.ignored_params)
        self._group, self._replica = _group_of(config, rank)
        self._cuts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._seen: dict[Key, torch.Size] = {}
        self._borrowed: tuple[Location, str] | None = None

    def note_tensor_parallel(self, prepared: nn.Module) -> None:
        """Note which parameters tensor parallelism has cut, and how, before the model is sharded."""
        for name, value in prepared.named_parameters():
            if (cut := cut_before_sharding(value)) is not uncut:
                self._cuts[original_name(name)] = cut

    def can_tell(self, frozen: Collection[str]) -> bool:
        """Whether a rank's share of what trains is less than all of it, which padding prevents where it is tiny."""
        trained = [shape for name, shape in self.shapes.items() if name not in frozen and name not in self._ignored]
        return self._share(trained) < sum(shape.numel() for shape in trained)

    def _share(self, shapes: Iterable[torch.Size]) -> int:
        return sum(self._traits.local_numel(shape, self._size) for shape in shapes) + self.sizes.padding

    # On one rank ----------------------------------------------------------------------------

    def note_borrowed(self, stage: Stage, pieces: Mapping[str, Piece | None], foreign: Callable[[], set[int]]) -> None:
        """Note a piece that lies in memory of the baseline or the oracle; only before anything was shown.

        Pieces are no copies, and ``foreign`` returns the addresses of those runs' storages.
        """
        if self._seen or self._borrowed:
            return
        addresses = foreign()
        for name, piece in pieces.items():
            if piece is not None and piece.tensor.numel() and piece.tensor.untyped_storage().data_ptr() in addresses:
                where = Location(stage=stage, rank=self._rank, name=name)
                self._borrowed = (where, "it shares its memory with the run that it is compared with")

    def show(self, stages: Iterable[tuple[Stage, Mapping[str, Piece | None] | None]], *, step: int) -> Shown:
        """Return what this rank holds of the tensors that it has not shown before."""
        shown = Shown(self._group, self._replica, wrong=self._borrowed)
        for stage, pieces in stages:
            for name, piece in (pieces or {}).items():
                text = None if piece is None else self._take(shown, (stage, name), piece)
                if text and shown.wrong is None:
                    shown.wrong = (Location(stage=stage, step=step, rank=self._rank, name=name), text)
        return shown

    def _take(self, shown: Shown, key: Key, piece: Piece) -> str | None:
        """Add one piece to what is shown; return what is wrong with the piece by itself, or None."""
        shape, known, name = piece.tensor.shape, self._seen.get(key), key[1]
        if known is not None:
            changed = f"the shard has shape {tuple(shape)}, and had {tuple(known)} in an earlier step"
            return changed if known != shape else None
        self._seen[key] = shape
        full = self.shapes[name]
        positions = torch.arange(full.numel(), device=piece.tensor.device).view(full)
        held = protocol.cut(piece, positions, name)
        if text := _wrong_cut(piece, held, positions, name):
            return text
        shown.spans[key] = spans_of(held)
        if name in self._cuts and name not in shown.parts:
            shown.parts[name] = spans_of(self._cuts[name](positions))
        return None

    # Over all ranks -------------------------------------------------------------------------

    def judge(self, everyone: Sequence[Shown]) -> None:
        """Check what all ranks show. Every rank must call it with the same values.

        Raises:
            Divergence: a piece makes no sense by itself; the pieces of a tensor do not cover it, or overlap; a rank
                holds more than its share; or every rank holds all of what the implementation claims to shard.
        """
        for shown in everyone:
            if shown.wrong is not None:
                where, text = shown.wrong
                raise Divergence(f"a piece is not a part of its tensor: {where}\n  {text}", where)
        self._check_covered(everyone)
        self._check_sharded(everyone)

    def _check_covered(self, everyone: Sequence[Shown]) -> None:
        """Check that the pieces of each group make up each tensor, and that no rank holds more than its share."""
        # Parameters first: a model is better described by them than by its gradients.
        keys = sorted({key for shown in everyone for key in shown.spans}, key=lambda key: (key[0] != _PARAMETER, key))
        for group in sorted({shown.group for shown in everyone}):
            members = {rank: everyone[rank] for rank in group}
            # A tensor that some rank of the group does not show is a gradient that it lacks, which a comparison finds.
            divided = [
                key for key in keys if all(key in one.spans for one in members.values()) and self._divides(key, members)
            ]
            self._check_shares([key for key in divided if key[0] == _PARAMETER], members)

    def _check_sharded(self, everyone: Sequence[Shown]) -> None:
        """Check that some rank holds less than all of what the implementation claims to shard."""
        for what in sorted(self._traits.shards):
            counts = [shown.counts[what] for shown in everyone if what in shown.counts]
            finding = all_of(what, counts) if len(counts) == len(everyone) else None
            if finding is not None:
                raise Divergence(finding.render(title=NOT_SHARDED), finding.location)

    def _divides(self, key: Key, members: Mapping[int, Shown]) -> bool:
        """Whether a group divides a tensor, or else each of its ranks holds the whole; Divergence if neither."""
        first = next(iter(members.values()))
        whole: Spans = ((0, self.shapes[key[1]].numel()),) if self.shapes[key[1]].numel() else ()
        part = first.parts.get(key[1], whole)
        held = [one.spans[key] for one in members.values()]
        if held[0] in (part, whole) and all(spans == held[0] for spans in held):
            return False
        # Experts are divided among other ranks than the rest, and all ranks together have all parts of them.
        parts = {one.parts.get(key[1], whole) for one in members.values()}
        if (joined := _joined(held)) is not None and joined in (part, whole, _joined(parts)):
            return True
        raise self._uncovered(key, part, members)

    def _uncovered(self, key: Key, part: Spans, members: Mapping[int, Shown]) -> Divergence:
        """Return the failure of a tensor whose pieces do not cover it exactly once; it names the first element."""
        stage, name = key
        shape, who = self.shapes[name], next(iter(members.values())).who
        wanted = _counted([part], shape.numel())
        found = _counted([one.spans[key] for one in members.values()], shape.numel())
        tensor = repr(name) if stage == _PARAMETER else f"the {stage.value} of {name!r}"
        missing, position = _first(found < wanted)
        if missing:
            element = index_at(position, shape)
            text = (
                f"the shards of {tensor} do not cover it: element {list(element)} is on no rank of {who}; "
                f"{missing} of {int(wanted.sum())} elements are missing"
            )
        else:
            more, position = _first(found > wanted)
            element = index_at(position, shape)
            owners = [rank for rank, one in members.items() if any(a <= position < b for a, b in one.spans[key])]
            on = f"rank{'s' * (len(owners) > 1)} {', '.join(map(str, owners))} of {who}"
            text = (
                f"the shards of {tensor} overlap: element {list(element)} is on {on}; {more} of {int(wanted.sum())} "
                "elements are on several ranks"
            )
            if len(owners) == 1:
                text = f"the shards of {tensor} have elements of another part, such as {list(element)} on {on}"
        where = Location(stage=Stage.SHARDING, name=name, element=element)
        return Divergence(text, where)

    def _check_shares(self, keys: Sequence[Key], members: Mapping[int, Shown]) -> None:
        """Check that no rank of a group holds more than its share of the parameters that the group divides."""
        if "parameters" not in self._traits.shards:
            return
        shapes = [self.shapes[name] for _, name in keys]
        share = self._share(shapes)
        full = sum(shape.numel() for shape in shapes)
        for rank, one in members.items():
            held = sum(stop - start for key in keys for start, stop in one.spans[key])
            # The margin of the check of bytes: half of what sharding saves.
            if held > share + max(full - share, 0) // 2:
                text = f"holds {held} of {full} elements of parameters that the ranks divide; its share is {share}"
                where = Location(stage=Stage.SHARDING, rank=rank)
                raise Divergence(f"{NOT_SHARDED}: {where}\n  {text}", where)


def _group_of(config: Config, rank: int) -> tuple[tuple[int, ...], int]:
    """Return the ranks among which this rank's parameters are divided, and the number of that replica."""
    ranks = config.mesh.mesh
    # An implementation may refuse a mesh of more dimensions, in words of its own.
    width = ranks.shape[-1] if config.shards or ranks.ndim > 1 else 1
    rows = ranks.reshape(-1, width).tolist()
    found = [(tuple(row), replica) for replica, row in enumerate(rows) if rank in row]
    if not found:
        raise ValueError(f"rank {rank} is not in the mesh, whose ranks are {ranks.flatten().tolist()}")
    return found[0]


def _wrong_cut(piece: Piece, held: torch.Tensor, positions: torch.Tensor, name: str) -> str | None:
    """Return why the cut of a tensor of positions does not select elements of it, or None if it does."""
    shape = piece.tensor.shape
    if held.dtype != torch.int64 or held.shape != shape or held.device != positions.device:
        return (
            f"its cut of int64 positions is {held.dtype} of shape {tuple(held.shape)} on {held.device}; expected int64 "
            f"of the piece's shape {tuple(shape)} on {positions.device}"
        )
    flat = held.flatten().sort().values
    if flat.numel() and not 0 <= int(flat[0]) <= int(flat[-1]) < positions.numel():
        return "its cut of positions has values that are no positions: a cut selects elements and computes none"
    twice = (flat[1:] == flat[:-1]).nonzero()
    if twice.numel():
        return f"its cut selects element {list(index_at(int(flat[twice[0]]), positions.shape))} more than once"
    for dtype in (torch.float32, torch.float64):
        other = protocol.cut(piece, positions.to(dtype), name)
        if other.dtype != dtype or not torch.equal(other.to(positions.device), held.to(dtype)):
            return f"its cut of {dtype} positions does not select the elements that its cut of int64 positions selects"
    return None


def _joined(held: Iterable[Spans]) -> Spans | None:
    """Return the union of several ranks' spans, or None if they overlap."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(span for spans in held for span in spans):
        if joined and start < joined[-1][1]:
            return None
        if joined and start == joined[-1][1]:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)


def _counted(held: Iterable[Spans], numel: int) -> torch.Tensor:
    """Return for each position how many of ``held`` contain it."""
    counts = torch.zeros(numel, dtype=torch.int64)
    for start, stop in (span for spans in held for span in spans):
        counts[start:stop] += 1
    return counts


def _first(mask: torch.Tensor) -> tuple[int, int]:
    """Return how many elements of a 1-D mask are set, and the position of the first, or -1."""
    found = mask.nonzero()
    return found.shape[0], int(found[0]) if found.shape[0] else -1
