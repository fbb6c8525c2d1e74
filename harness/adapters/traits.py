"""Facts about an implementation that its adapter declares and that comparisons use."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch


def padded_to_rows(shape: torch.Size, size: int) -> int:
    """Return the number of elements of a rank's shard if dimension 0 is padded to a multiple of ``size``.

    This is the layout of per-parameter sharding, and the default of :attr:`Traits.local_numel`. The shard of a scalar
    has one element.
    """
    if not shape:
        return 1
    return math.ceil(shape[0] / size) * math.prod(shape[1:])


def padded_to_elements(shape: torch.Size, size: int) -> int:
    """Return a rank's share, in elements, of a tensor that is flattened, padded and cut into equal parts."""
    return math.ceil(math.prod(shape) / size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts about an implementation that the comparisons of the harness need; no value is good or bad in itself.

    Each default is the common case. A wrong trait makes correct cases fail, or makes checks too weak to find a bug.
    """

    shards: frozenset[Literal["parameters", "gradients", "optimizer"]] = frozenset(
        {"parameters", "gradients", "optimizer"}
    )
    """The tensors that are divided among the ranks; by default all three.

    The harness checks this against the bytes and the elements that each rank holds. An adapter declares
    :attr:`Capability.SHARDED` exactly if ``"parameters"`` is among them.
    """

    own_mesh: bool = False
    """Whether the implementation makes its own mesh, with the ranks of the given mesh and other dimension names."""

    reads: Literal["in-place", "gathering"] = "in-place"
    """How the adapter reads gradients, parameters and optimizer state.

    - ``"in-place"``: it returns the tensors in place, and calls no function of the implementation.
    - ``"gathering"``: it gathers them through the implementation, which may wait for the device and reshard units.
      Cases that need :attr:`Hardware.STREAMS` do not run, because reading could hide the bugs that they test for.
    """

    held_from_start: frozenset[Literal["master", "gradients", "gathered", "optimizer"]] = frozenset()
    """The memory of each rank in addition to its share of the parameters, from the moment the model is sharded.

    - ``"master"``: a copy of the share, which the optimizer updates instead of the parameters.
    - ``"gradients"``: a buffer for gradients, as large as the share.
    - ``"optimizer"``: the optimizer's state, up to two tensors as large as the share.
    - ``"gathered"``: the last parameters that were sent or all-gathered while the model was being sharded, in full
      size, as long as the threads of the communication library (gloo has two) keep references to them.
    """

    local_numel: Callable[[torch.Size, int], int] = padded_to_rows
    """The number of elements, padding included, that a rank holds of one parameter.

    The arguments are the full shape and the number of ranks that share the parameter. For one parameter a rank may hold
    more or fewer elements; for a unit it holds at most the sum over the unit's parameters. The number should be as
    small as the layout allows, because the harness identifies the unit of a collective by its size in bytes.
    """

    collective_padding: int = 0
    """The number of elements by which each rank's part of a unit may be padded, beyond ``local_numel``."""

    clips: Literal["call", "step"] = "call"
    """When gradients are clipped: by :meth:`Adapter.clip` before the step, or inside :meth:`Adapter.step`.

    For ``"step"`` the constructor sets the implementation up from :attr:`Config.clip`.
    """

    divides_by_microbatches: bool = False
    """Whether backward also divides gradients by the number of microbatches.

    The harness expects sums over microbatches, and therefore multiplies the losses by that number first.
    """

    sums_over_ranks: bool = False
    """Whether the implementation sums gradients over the ranks, so that :meth:`Adapter.backward` divides the loss.

    The gradient of an input, which is not reduced, is then divided by the number of ranks too.
    """

    unused_gradient: Literal["none", "zero", "zero-unless-frozen"] = "none"
    """The gradient of a parameter that no rank used in the step, or that is frozen: ``None``, or a tensor of zeros.

    Momentum moves a parameter whose gradient is zero, so with ``"zero"`` the baseline keeps zeros too where the case
    sets gradients to None. With ``"zero-unless-frozen"`` frozen parameters have None.
    """

    reduces_in: Literal["compute", "parameters"] = "compute"
    """The reduce dtype where :attr:`Precision.reduce_dtype` is None: that of compute or of the parameters.

    :meth:`Precision.reduced_in` has the rule.
    """

    keeps_computed_gradients: bool = False
    """Whether gradients keep the dtype in which autograd computes them until they are reduced or accumulated.

    If not, autograd rounds them to the compute dtype first.
    """

    rounds_microbatches: bool = False
    """Whether each gradient whose reduction is deferred is rounded to the reduce dtype before it is added.

    If not, only the sum is rounded, at each addition.
    """

    process_groups: Literal["none", "kept", "abandoned"] = "none"
    """The use of process groups that the implementation makes.

    - ``"none"``: it makes none. A group that a case leaves behind is a failure.
    - ``"kept"``: it reuses its groups until the process ends.
    - ``"abandoned"``: it never reuses its groups. The harness replaces the world once many groups have accumulated.
    """

    frees_models: bool = True
    """Whether every module of a model is freed once the case has no reference to the model.

    If not, the harness does not compare the live modules before and after a case.
    """

    isolation: Literal["shared", "adapter", "case"] = "shared"
    """The cases that may run in the same rank processes.

    - ``"shared"``: the cases of all implementations.
    - ``"adapter"``: the cases of this adapter only. :meth:`Adapter.prepare` may change the process.
    - ``"case"``: one case; each case gets new processes. :meth:`Adapter.prepare` may change the process.
    """

    simulates: bool = False
    """Whether the implementation is known to train in simulated worlds: without values, and without other ranks.

    If so, an error there fails the case. If not, the harness first tries it on a small model, and an error makes the
    cases ``unsupported``: the implementation may be wrong, or the simulation may lack a feature.
    """

    wrong_calls: frozenset[str] = frozenset()
    """Findings, such as "F-2", whose calls are left out of programs of drawn calls (``harness/models/programs.py``)."""

    def __post_init__(self) -> None:
        """Check the type of every trait; a wrong one raises a ValueError with one line about the expected value."""
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wanted = _unlike(value, hints[field.name])
            if wanted:
                raise ValueError(f"traits.{field.name} = {value!r}: expected {wanted}")


def _unlike(value: Any, hint: Any) -> str | None:
    """Return the expected value of a trait with this type annotation, or None if ``value`` is one."""
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
