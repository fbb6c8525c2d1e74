"""Facts about an implementation that its adapter declares and that comparisons depend on."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch


def padded_to_rows(shape: torch.Size, size: int) -> int:
    """Return the elements that a rank holds of a tensor whose dimension 0 is padded to a multiple of ``size``.

    This is the layout of per-parameter sharding, and the default of :attr:`Traits.local_numel`. A scalar is held as one
    element.
    """
    if not shape:
        return 1
    return math.ceil(shape[0] / size) * math.prod(shape[1:])


def padded_to_elements(shape: torch.Size, size: int) -> int:
    """Return a rank's share, in elements, of a tensor that is flattened, padded and cut into equal parts."""
    return math.ceil(math.prod(shape) / size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts about an implementation that the harness needs for its comparisons and that are neither right nor wrong.

    Each default is the common case. A wrong trait makes correct cases fail, or makes checks too weak to find a bug.
    """

    shards: frozenset[Literal["parameters", "gradients", "optimizer"]] = frozenset(
        {"parameters", "gradients", "optimizer"}
    )
    """The tensors that are divided among the ranks; by default all, so that an adapter states what it does not divide.

    The harness checks this against the bytes and the elements that each rank holds. With ``"parameters"`` the adapter
    declares :attr:`Capability.SHARDED`, and without it does not.
    """

    own_mesh: bool = False
    """Whether the implementation makes its mesh, of the ranks of the given one, with names of its own."""

    reads: Literal["in-place", "gathering"] = "in-place"
    """How the adapter reads gradients, parameters and optimizer state.

    - ``"in-place"``: it returns the tensors where they lie, and calls nothing of the implementation.
    - ``"gathering"``: it gathers them through the implementation, which may wait for the device and free what was
      gathered. Cases that need :attr:`Hardware.STREAMS` do not run: what they look for could be repaired by reading.
    """

    held_from_start: frozenset[Literal["master", "gradients", "gathered", "optimizer"]] = frozenset()
    """What each rank holds besides its share of the parameters, from the moment the model is sharded.

    - ``"master"``: a copy of the share, which the optimizer updates in place of the parameters.
    - ``"gradients"``: a buffer for gradients, as large as the share.
    - ``"optimizer"``: the optimizer's state, up to two tensors as large as the share.
    - ``"gathered"``: the parameters that were sent or gathered last while the model was being sharded, in full size,
      for as long as the communication library's threads, of which gloo has two, keep references to them.
    """

    local_numel: Callable[[torch.Size, int], int] = padded_to_rows
    """The number of elements, padding included, that a rank holds of one parameter.

    It is called with the full shape and the number of ranks that share the parameter. For one parameter a rank may hold
    more or fewer elements; for a unit it holds at most the sum over the unit's parameters. The number should be as
    small as the layout allows, because the harness identifies the unit of a collective by its size in bytes.
    """

    collective_padding: int = 0
    """The number of elements by which each rank's part of a unit may be padded, beyond ``local_numel``."""

    clips: Literal["call", "step"] = "call"
    """When gradients are clipped: by :meth:`Adapter.clip` before the step, or inside :meth:`Adapter.step`.

    An implementation of the second kind is set up from :attr:`Config.clip` in the constructor.
    """

    divides_by_microbatches: bool = False
    """Whether backward also divides gradients by the number of microbatches.

    Everywhere else gradients are summed over microbatches, so the harness multiplies the losses by that number first.
    """

    sums_over_ranks: bool = False
    """Whether the implementation sums gradients over the ranks, so that :meth:`Adapter.backward` divides the loss.

    The gradient of an input, which is not reduced, is then divided by the number of ranks too.
    """

    unused_gradient: Literal["none", "zero", "zero-unless-frozen"] = "none"
    """The gradient of a parameter that no rank used in the step, or that is frozen: ``None``, or a tensor of zeros.

    Momentum moves a parameter whose gradient is zero, so with ``"zero"`` the baseline keeps zeros too where the case
    sets gradients to None. With ``"zero-unless-frozen"`` frozen ones have none.
    """

    reduces_in: Literal["compute", "parameters"] = "compute"
    """The dtype in which gradients are reduced where :attr:`Precision.reduce` names none: that of compute or of the
    parameters. :meth:`Precision.reduce_dtype` has the rule.
    """

    keeps_computed_gradients: bool = False
    """Whether gradients have the dtype in which autograd computes them until they are reduced or added up.

    Everywhere else autograd rounds them to the dtype of compute first.
    """

    rounds_microbatches: bool = False
    """Whether each gradient whose reduction is deferred is rounded to the dtype of the reduction before it is added.

    Everywhere else only the sum is rounded, each time that something is added to it.
    """

    process_groups: Literal["none", "kept", "abandoned"] = "none"
    """What happens to process groups that the implementation makes.

    - ``"none"``: it makes none. A group that a case leaves behind is a failure.
    - ``"kept"``: it reuses them for as long as the process lives.
    - ``"abandoned"``: it never uses them again. The harness replaces the world once many have accumulated.
    """

    frees_models: bool = True
    """Whether every module of a model is freed once the case holds no reference to it.

    If not, the harness does not compare the modules that are alive before and after a case.
    """

    isolation: Literal["shared", "adapter", "case"] = "shared"
    """The cases that may run in the same rank processes.

    - ``"shared"``: the cases of all implementations.
    - ``"adapter"``: the cases of this adapter only. :meth:`Adapter.prepare` may change the process.
    - ``"case"``: one case; each case gets new processes. :meth:`Adapter.prepare` may change the process.
    """

    simulates: bool = False
    """Whether the implementation is known to train in simulated worlds: without values, and without other ranks.

    What it raises there then fails the case. Otherwise it is tried on a small model first, and what it raises there
    makes its cases ``unsupported``: the error may be its own, or due to what a simulation lacks.
    """

    wrong_calls: frozenset[str] = frozenset()
    """The findings, such as "F-2", whose calls programs of drawn calls leave out (``harness/models/programs.py``)."""

    def __post_init__(self) -> None:
        """Check that every trait has a value of its kind; otherwise a ValueError says in one line what was expected."""
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wanted = _unlike(value, hints[field.name])
            if wanted:
                raise ValueError(f"traits.{field.name} = {value!r}: expected {wanted}")


def _unlike(value: Any, hint: Any) -> str | None:
    """Return what a trait with this type annotation should be, or None if ``value`` is such."""
    if hint == frozenset[str]:
        fits = isinstance(value, (set, frozenset)) and all(re.fullmatch(r"F-\d+", str(one)) for one in value)
        return None if fits else "a set of findings such as F-2"
    if get_origin(hint) is frozenset:
        words = get_args(get_args(hint)[0])
        fits = isinstance(value, (set, frozenset)) and value <= set(words)
        return None if fits else f"a set of words out of {', '.join(words)}"
    if get_origin(hint) is Literal:
        return None if value in get_args(hint) else f"one of {', '.join(get_args(hint))}"
    if hint is int:
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        return None if fits else "a number of elements, 0 or more"
    if hint is bool:
        return None if isinstance(value, bool) else "True or False"
    return None if callable(value) else "a function of a shape and a number of ranks"
