"""Looks at the followers of roots while steps are watched: whether, how and when they are written."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardproof.harness.judging import numerics
from shardproof.harness.tensors.fingerprints import bits_of_all, host_rows, strided
from shardproof.harness.tensors.layouts import layout_of, part_of, sharers_of
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching import calls
from shardproof.harness.watching.followers import MOST, FollowerSearch, LikePart
from shardproof.harness.watching.groups import sizes_of_flat
from shardproof.harness.watching.hooks import Hook, quiet
from shardproof.harness.watching.names import name_of, parameters_of
from shardproof.harness.watching.optimizers import STEPS, parameters_in
from shardproof.harness.watching.passes import writes
from shardproof.harness.watching.records import Follower, Look
from shardproof.harness.watching.samples import NARROW

#: How often followers are looked at, the first time when watching begins, and in how many of them new ones are found.
_LOOKS, _SEARCHES = 4, 3

#: The elements of a tensor, and the tensors of a follower, that are sampled.
_ELEMENTS, _TENSORS = 512, 256

#: Of several places in a root that a follower may be like, it is like the nearest.
_NO_PLACE = 2.0

#: The names of dtypes narrower than float32.
_NARROW = tuple(map(name_of, NARROW))

_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def is_dropout(module: nn.Module) -> bool:
    """Whether a module drops elements at random in training."""
    return isinstance(module, _DROPOUTS) and module.p > 0


def has_statistics(module: nn.Module) -> bool:
    """Whether a module is a norm of running statistics, which move in training."""
    if not isinstance(module, _NORMS) or not module.track_running_stats:
        return False
    return module.running_mean is not None and module.momentum != 0


@dataclasses.dataclass
class _Glance:
    """A look whose numbers are on their devices.

    Attributes:
        sample: of the follower and of the parameters.
        numbers: the squares of the distance and of the parameters; the product of the movement and of the way, and the
            square of the way, twice; the square of the movement; how many elements differ from what they follow, and
            how many of these are unchanged.
        mesh: the ranks that have parts of what it follows in full; empty where it has the same parts.
        sharers: the ranks that have the shards of it; empty where it has full tensors.
    """

    own: list[torch.Tensor]
    root: list[torch.Tensor]
    sample: tuple[torch.Tensor, torch.Tensor]
    numbers: torch.Tensor
    mesh: tuple[int, ...]
    likeness: torch.Tensor
    is_written: bool
    sharers: tuple[int, ...] = ()


class _One:
    """One follower of a root on this rank."""

    def __init__(self, found: LikePart, *, is_from_begin: bool) -> None:
        self.found, self.is_from_begin = found, is_from_begin
        self.dtype = min((name_of(own.dtype) for own, _ in self.pairs), key=lambda name: name not in _NARROW)
        self.looks: list[Look] = []
        self.writes: list[tuple[int, int]] = []
        self.calls = 0
        self.seen: dict[str, set[str]] = {"dropouts": set(), "norms": set()}
        self._glances: list[_Glance] = []
        self._last: _Glance | None = None
        self._versions = self._count()
        self._version_of_look = self._versions
        self._backwards = self._segments = 0
        self._gradients: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._gathers = 0

    @property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Its tensors that are still there, with the parameters."""
        pairs = [(own(), parameter()) for own, parameter in self.found.pairs]
        return [(own, parameter) for own, parameter in pairs if own is not None and parameter is not None]

    @property
    def is_there(self) -> bool:
        """Whether all of it still is."""
        return len(self.pairs) == len(self.found.pairs)

    def _count(self) -> int:
        return sum(writes(own.detach()) for own, _ in self.pairs)

    def note_backward(self) -> None:
        """Note whether it was written since the backward before."""
        now = self._count()
        self._segments += self._backwards > 0 and now != self._versions
        self._versions = now
        self._backwards += 1

    def end_step(self) -> None:
        """When the first backward after a step begins: end what is counted of it."""
        now = self._count()
        self._segments += now != self._versions
        self._versions = now
        if self._backwards:
            self.writes.append((self._backwards, self._segments))
        self._backwards = self._segments = 0

    @property
    def looks_begun(self) -> bool:
        """Whether it was looked at."""
        return bool(self._glances or self.looks)

    def look(self, sharers: Mapping[int, tuple[int, ...]]) -> None:
        """Look at it, and at what it follows; ``sharers`` are the ranks that have parts of a parameter, by its id."""
        pairs = self.pairs
        version = self._count()
        glance = _glance(pairs, self._last, is_written=version != self._version_of_look)
        glance.sharers = _sharers_of(pairs, sharers)
        self._version_of_look = version
        self._glances.append(glance)
        self._last = glance
        self._note_gradients(pairs)

    def _note_gradients(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Count gradients that were there at the look before, and to which something has added since."""
        gathers = 0
        now = {}
        for own, _ in pairs:
            if own.grad is not None:
                before = self._gradients.get(id(own))
                gathers += before is not None and before[0]() is own.grad and before[1] != own.grad._version
                now[id(own)] = weakref.ref(own.grad), own.grad._version
        self._gradients = now
        self._gathers = max(self._gathers, gathers)

    def go_on_with(self, found: LikePart) -> None:
        """Go on with tensors, or a container, that user code has put in the place of those that are gone."""
        self.found, self._versions, self._version_of_look = found, 0, -1
        self._versions = self._count()

    def is_replaced_by(self, found: LikePart) -> bool:
        """Whether it is gone, and something is found in its place: a container with new tensors, or of its name."""
        own = self.found
        is_alike = own.owner is None and (own.kind, own.place) == (found.kind, found.place) and not self.is_there
        return is_alike and (own.key == found.key or (bool(own.name) and own.name == found.name))

    def take(self, *, is_full: bool) -> Follower:
        """Return what was seen of it by now: the host reads what was computed on devices.

        Args:
            is_full: whether there may be others that are not looked at.
        """
        for one in self._glances:
            self.looks.append(_on_host(one))
        self._glances.clear()
        return Follower(
            self.found.name, self.found.kind, self.found.place, self.dtype, self.is_from_begin,
            tuple(self.looks), tuple(self.writes), self.calls,
            tuple(sorted(self.seen["dropouts"])), tuple(sorted(self.seen["norms"])), self._gathers,
            () if self._last is None else self._last.sharers, is_full,
        )  # fmt: skip


class _OfRoot:
    """The followers of one root."""

    def __init__(self, roots: Sequence[nn.Module], stepped: Container[torch.Tensor]) -> None:
        self._stepped = stepped
        self._roots = [weakref.ref(one) for one in roots]
        self._all: list[_One] = []
        self._searches = self._looks = 0
        self._is_closed = False
        # Flat parameters are gathered from a forward until its backward ends.
        self._waits_for_step = bool(sizes_of_flat(roots))
        self._has_stepped = self._is_due = False
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Look for the first time, or when the first step begins."""
        if self._waits_for_step:
            self._is_due = True
        else:
            self.look()

    def look(self) -> None:
        """Look for new ones, and at all of them."""
        if self._looks >= _LOOKS:
            return
        self._looks += 1
        self._is_due = False
        if self._searches < _SEARCHES and len(self._all) < MOST:
            self._searches += 1
            self._search(adds=True)
        elif self._has_gone:
            self._search(adds=False)
        self._look_at_all()

    def _look_at_all(self) -> None:
        there = [one for one in self._all if one.is_there]
        sharers = _sharers([one for ref in self._roots if (one := ref()) is not None]) if there else {}
        for follower in there:
            follower.look(sharers)

    @property
    def _has_gone(self) -> bool:
        """Whether tensors of a container that was looked at are gone, in whose place there may be others."""
        return any(one.found.owner is None and one.looks_begun and not one.is_there for one in self._all)

    def _search(self, *, adds: bool) -> None:
        roots = [one for ref in self._roots if (one := ref()) is not None]
        if len(roots) < len(self._roots):
            return
        for places in FollowerSearch(roots, self._stepped).find(self._known()):
            found = places[0] if len(places) == 1 else min(places, key=_distance)
            gone = next((one for one in self._all if one.is_replaced_by(found)), None)
            if gone is not None:
                gone.go_on_with(found)
            elif adds and len(self._all) < MOST:
                self._add(found)

    def _known(self) -> set[int]:
        """Return the ids of what was found and is there, and of the modules in it."""
        there = [one.found for one in self._all if one.is_there]
        owners = [owner for one in there if one.owner is not None and (owner := one.owner()) is not None]
        return {one.key for one in there} | {id(each) for owner in owners for each in owner.modules()}

    def _add(self, found: LikePart) -> None:
        owner = None if found.owner is None else found.owner()
        one = _One(found, is_from_begin=self._searches == 1)
        self._all.append(one)
        for name, module in [] if owner is None else owner.named_modules():
            if module is owner or is_dropout(module) or has_statistics(module):
                hook = Hook(functools.partial(self._on_forward, weakref.ref(one), name))
                self._handles.append(module.register_forward_pre_hook(hook))

    @quiet
    @torch.no_grad()
    def _on_forward(self, ref: weakref.ref[_One], name: str, module: nn.Module, args: Any) -> None:
        one = ref()
        if one is None or self._looks >= _LOOKS:
            return
        one.calls += not name
        if module.training and is_dropout(module):
            one.seen["dropouts"].add(name)
        elif module.training and has_statistics(module):
            one.seen["norms"].add(name)

    def on_backward(self) -> None:
        """Before a backward pass: the first one after a step sees what user code did after the step."""
        if self._looks >= _LOOKS or self._is_closed:
            return
        if self._has_stepped:
            self._has_stepped = False
            for one in self._all:
                one.end_step()
            self._is_due = True
            if not self._waits_for_step:
                self.look()
        for one in self._all:
            one.note_backward()

    def before_step(self) -> None:
        """Look now, if parameters are not readable before."""
        if self._waits_for_step and self._is_due and not self._is_closed:
            self.look()

    def parameters(self) -> set[int]:
        """Return the ids of the root's parameters."""
        return {id(one) for ref in self._roots if (root := ref()) is not None for one in root.parameters()}

    def on_step(self) -> None:
        """After a step of the root's parameters, or of copies of them."""
        self._has_stepped = True

    def take(self) -> list[Follower]:
        """Return what was seen of each that is like the root or was; after the watched steps, look at them now."""
        if self._is_closed:
            self._look_again()
        return [one.take(is_full=len(self._all) >= MOST) for one in self._all if one.looks_begun]

    @quiet
    @torch.no_grad()
    def _look_again(self) -> None:
        if self._has_gone:
            self._search(adds=False)
        self._all = [one for one in self._all if one.is_there]
        self._look_at_all()

    def close(self) -> None:
        """Remove all hooks; later looks still read those that are known."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._is_closed = True


class Followers(calls.Listener):
    """The followers of all roots of the process."""

    def __init__(self) -> None:
        self._of: dict[int, _OfRoot] = {}
        self._stepped = WeakTensorKeyDictionary()
        self._patches = contextlib.ExitStack()

    def begin(self, key: int, roots: Sequence[nn.Module]) -> Callable[[], list[Follower]]:
        """Look for the followers of a root, whose watching begins, and return what tells what is seen of them.

        Args:
            key: stands for its watch, of which earlier roots are forgotten.
            roots: its modules.
        """
        if not self._of:
            self._patches.enter_context(calls.witnessed(self))
            self._patches.callback(STEPS.add(self._before_step, self._after_step).remove)
        if key in self._of:
            self._of[key].close()
        one = self._of[key] = _OfRoot(roots, self._stepped)
        self._look(one)
        return one.take

    @quiet
    @torch.no_grad()
    def _look(self, one: _OfRoot) -> None:
        one.begin()

    @quiet
    @torch.no_grad()
    def on_backward(self, tensors: Sequence[torch.Tensor]) -> None:
        """Look at them, if a step has ended since the last look."""
        for one in self._of.values():
            one.on_backward()

    @quiet
    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for one in self._of.values():
            one.before_step()

    @quiet
    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        mine = parameters_in(optimizer)
        self._stepped.update(dict.fromkeys(mine))
        held = {id(one) for one in mine}
        owners = [one for one in self._of.values() if held & one.parameters()]
        for one in owners or self._of.values():
            one.on_step()

    def take(self) -> list[Follower]:
        """Return what was seen of those of all roots."""
        return [found for one in self._of.values() for found in one.take()]

    def close(self) -> None:
        """Remove all hooks, and forget everything."""
        self._patches.close()
        for one in self._of.values():
            one.close()
        self._of.clear()


def _sharers(roots: Sequence[nn.Module]) -> dict[int, tuple[int, ...]]:
    """Return the ranks that have the parts of each parameter that ranks divide, by its id."""
    found = {}
    for root in roots:
        flat = sizes_of_flat([root])
        for name, one in parameters_of(root):
            if ranks := sharers_of(one) or flat.get(name, (0, ()))[1]:
                found[id(one)] = ranks
    return found


def _sharers_of(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], sharers: Mapping[int, tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the ranks that have the shards of a follower; none of one that has full tensors."""
    divided = [(own, like) for own, like in pairs if id(like) in sharers]
    if any(local_of(own).shape != local_of(like).shape for own, like in divided):
        return ()
    # Of a few parameters, as biases of one element, a shard has the full shape; of flat ones that is not known.
    are_parts = (type(own) is type(like) or local_of(like).shape != like.shape or local_of(like) is like
                 for own, like in divided)  # fmt: skip
    return sharers[id(divided[0][1])] if divided and any(are_parts) else ()


def _sampled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a few elements of what a rank holds of a tensor, in the order of its positions, as float32."""
    own = strided(local_of(tensor.detach())).reshape(-1)
    return own[:: max(1, own.numel() // _ELEMENTS)][:_ELEMENTS].to(device=device, dtype=torch.float32)


def _samples(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return samples of a follower's tensors, and of the parameters, as the dtype of the follower has them."""
    own, root = [], []
    for one, parameter in pairs[:: max(1, -(-len(pairs) // _TENSORS))]:
        device = local_of(one).device
        own.append(_sampled(_same_part(one, parameter), device))
        root.append(_sampled(parameter, device).to(one.dtype).float())
    return own, root


def _same_part(one: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a full copy that the rank has of the parameter; a copy of the part as it is."""
    layout = layout_of(parameter) if local_of(one).shape != local_of(parameter).shape else None
    return one if layout is None else part_of(one.detach(), layout.box)


def _mesh_of(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[int, ...]:
    for one, parameter in pairs:
        if local_of(one).shape != local_of(parameter).shape and (layout := layout_of(parameter)) is not None:
            return layout.mesh
    return ()


def _likeness(own: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """Return the correlation of two samples; NaN where the elements of one are all equal."""
    a, b = own - own.mean(), root - root.mean()
    return (a * b).sum().div(torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))


def _glance(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], last: _Glance | None, *, is_written: bool) -> _Glance:
    own, root = _samples(pairs)
    device = own[0].device
    likeness = torch.stack([_likeness(a, b).to(device) for a, b in zip(own, root, strict=True)])
    one, other = (torch.cat([each.to(device) for each in some]) for some in (own, root))
    numbers = [(one - other).square().sum(), other.square().sum()]
    if last is None or last.sample[0].shape != one.shape:
        numbers += [one.new_zeros(())] * 7
    else:
        before, followed = last.sample
        moved = one - before
        for way in (followed - before, other - before):  # what it follows is that of before the step, or of after it
            numbers += [(moved * way).sum(), way.square().sum()]
        is_apart = (followed != before) & (other != before)
        numbers += [moved.square().sum(), is_apart.sum().float(), (is_apart & (one == before)).sum().float()]
    bits = [bits_of_all([local_of(each) for each in some]) for some in zip(*pairs, strict=True)]
    return _Glance(
        bits[0], bits[1], (one, other), torch.stack(numbers).double(), _mesh_of(pairs), likeness.nanmedian(), is_written
    )


def _on_host(glance: _Glance) -> Look:
    (numbers,), (likeness,) = host_rows([glance.numbers]), host_rows([glance.likeness])
    distance, root, *ways, moved, sampled, unchanged = numbers
    own, parameters = (hash(tuple(map(tuple, host_rows(some)))) for some in (glance.own, glance.root))
    cosines = [
        (product / math.sqrt(way * moved), product / way)
        for product, way in zip(ways[::2], ways[1::2], strict=True)
        if way * moved > 0
    ]
    toward, rate = max(cosines, default=(0.0, None))
    return Look(
        own, hash(glance.mesh) if glance.mesh else parameters, None if likeness != likeness else likeness,
        math.sqrt(distance / root) if root else 0.0, glance.is_written, toward, int(sampled), int(unchanged),
        rate if toward > numerics.COPY_FOLLOWS_BY else None,
    )  # fmt: skip


def _distance(found: LikePart) -> float:
    """Return how far a follower is from what it may be like, by the relative distance of samples."""
    held = [(own(), parameter()) for own, parameter in found.pairs]
    pairs = [(own, parameter) for own, parameter in held if own is not None and parameter is not None]
    one, other = (torch.cat([each.cpu() for each in some]) for some in _samples(pairs))
    return min(float((one - other).norm() / other.norm()), _NO_PLACE)
