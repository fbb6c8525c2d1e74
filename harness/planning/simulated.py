"""Simulates a training step of one rank: what it holds in each phase, and the collectives that it issues."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.adapters.base import Adapter
from shardproof.harness.collectives.trace import Trace
from shardproof.harness.planning import anatomy
from shardproof.harness.planning.anatomy import Anatomy
from shardproof.harness.planning.request import Mesh, Request, names_of
from shardproof.harness.planning.subject import ModelError, Subject, why
from shardproof.harness.simulation.memory import Kind, extremes
from shardproof.harness.simulation.tensors import Tensors
from shardproof.harness.simulation.training import Simulation, why_not
from shardproof.harness.simulation.world import simulated_world

KINDS = {
    Kind.SHARDS: "what the rank holds of the parameters",
    Kind.GRADIENTS: "what it holds of the gradients that the optimizer reads",
    Kind.OPTIMIZER: "the optimizer's state",
    Kind.GATHERED: "whole parameters of units, and the buffers of their gathers",
    Kind.WHOLE_GRADIENTS: "gradients of whole parameters before they are reduced",
    Kind.REDUCTION: "what reductions read and write",
    Kind.ACTIVATIONS: "what forward saves for backward, temporary tensors, inputs and buffers of modules",
}
"""The kinds of memory, in the order of the tables."""

ASSUMPTIONS = (
    "memory is counted from the call that allocates a tensor to the call that frees it, in bytes that are asked for; "
    "what allocators round up and keep, workspaces of libraries (NCCL, cuBLAS), temporary memory within one operator "
    "and the CUDA context come on top",
    "the second step, which is like all later ones; operators are the CPU's: a device may save other tensors for "
    "backward, in attention above all",
)

BETWEEN = "between steps"

#: The phases that are shown, by those of a simulation that they consist of.
_PHASES = {"forward": ("inputs", "forward"), "backward": ("backward", "around"), "step": ("clip", "step", "zero")}


@dataclasses.dataclass(frozen=True)
class Phase:
    """What the rank holds in one phase.

    Attributes:
        name: "between steps", "forward", "backward" or "step".
        at_peak: the bytes of each kind when the rank holds most.
        most: the most bytes of each kind, each at its own moment.
    """

    name: str
    at_peak: dict[str, int]
    most: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Simulated:
    """What one rank does on one mesh.

    Attributes:
        phases: the phases, in order.
        trace: the collectives of a step.
        groups: the global ranks of its group along each dimension of the mesh.
    """

    phases: tuple[Phase, ...]
    trace: Trace
    groups: list[tuple[int, ...]]

    @property
    def step(self) -> Phase:
        """The phase in which the optimizer steps."""
        return self.phases[-1]


def examined(request: Request, subject: Subject) -> Anatomy:
    """Build the model once, without memory, and find its units.

    Raises:
        ValueError: the model cannot be built without data, or has no such units; one line.
    """
    with Tensors().without_memory():
        return anatomy.examine(anatomy.build(request, subject).model, request.units)


def simulate(
    request: Request,
    subject: Subject,
    known: Anatomy,
    adapter: type[Adapter],
    mesh: Mesh,
    *,
    as_on_a_device: bool = True,
) -> Simulated:
    """Train two steps on one rank of a simulated world.

    Args:
        request: what is trained.
        subject: its model.
        known: what the model consists of.
        adapter: the implementation.
        mesh: the sizes of the mesh's dimensions, whose ranks are all of the world.
        as_on_a_device: whether buffers live as long as on a device with streams; False is what a CPU does.

    Raises:
        ValueError: the model or the implementation cannot be simulated; one line.
    """
    script = _Script(request, subject, known)
    with (
        _in_one_line(request),
        simulated_world(math.prod(mesh), rank=request.rank) as world,
    ):
        device_mesh = world.mesh(mesh, names_of(mesh))
        config = anatomy.config_of(request, known, device_mesh)
        one = Simulation(
            world,
            adapter,
            script.build,
            config=config,
            optimizer=request.make_optimizer,
            as_on_a_device=as_on_a_device,
        )
        one.step(script.inputs, loss=script.loss)
        between = one.held()
        trace = one.step(script.inputs, loss=script.loss)
        found = extremes(one.ledger, step=1, parts=list(_PHASES.values()))
        groups = [tuple(dist.get_process_group_ranks(group)) for group in device_mesh.get_all_groups()]
        one.close()
    phases = [Phase(BETWEEN, _named(between.by_kind), _named(between.by_kind))]
    phases += [Phase(name, _named(most.at_peak), _named(most.most)) for name, most in zip(_PHASES, found, strict=True)]
    return Simulated(tuple(phases), trace, groups)


def _named(by_kind: Mapping[Kind, int]) -> dict[str, int]:
    return {str(kind): nbytes for kind, nbytes in by_kind.items() if nbytes}


class _Script:
    """What a training script does itself: it builds the model, makes inputs and computes the loss."""

    def __init__(self, request: Request, subject: Subject, known: Anatomy) -> None:
        self._request, self._subject, self._known = request, subject, known
        self._given: tuple[Any, ...] = ()

    def build(self) -> nn.Module:
        built = anatomy.build(self._request, self._subject, self._known)
        self._inputs, self._loss = built.inputs, built.loss
        return built.model

    def inputs(self) -> tuple[Any, ...]:
        self._given = self._inputs(self._request.batch, self._request.sequence or self._subject.length)
        return self._given

    def loss(self, output: Any) -> torch.Tensor:
        given, self._given = self._given, ()
        return self._loss(output, *given)


def refuse(request: Request, adapter: type[Adapter]) -> None:
    """Refuse an implementation that cannot be simulated.

    Raises:
        ValueError: it fails with a small model too; one line, with the error.
    """
    reason = why_not(adapter)
    if reason is not None:
        raise ValueError(f"implementation {request.implementation!r} cannot be simulated: {reason}")


@contextlib.contextmanager
def _in_one_line(request: Request) -> Iterator[None]:
    """Turn what a model raises where it meets tensors without memory into a ValueError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        under = f"--model {request.model!r} cannot be simulated under {request.implementation}"
        raise ValueError(f"{under}: {why(error)}") from error
