"""What a tensor of a watched step is, for those that take each tensor as it appears: recordings and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from shardproof.harness.judging.finding import Stage
from shardproof.harness.tensors.fingerprints import strided
from shardproof.harness.tensors.layouts import Layout
from shardproof.harness.tensors.trees import local_of


@dataclasses.dataclass(frozen=True)
class Event:
    """One tensor of a watched step."""

    # INPUT, MODULE_OUTPUT, LOSS (on which backward begins), OUTPUT_GRADIENT, OWN_GRADIENT, GRADIENT (``.grad`` after
    # each backward, of which the last counts), TOTAL_NORM, CLIPPED_GRADIENT (``.grad`` at the optimizer's step),
    # INITIAL and PARAMETER (before and after the optimizer's step), OPTIMIZER_STATE.
    stage: Stage
    module: str  # the canonical name of the module that returned it, or that has the parameter; "" is the root
    parameter: str  # the canonical name of the parameter; empty for others
    microbatch: int  # the number of the forward or the backward in the step
    call: int  # the number of the module's call within the microbatch, or of the norm within the step
    index: int  # the number of the tensor among those of inputs and outputs
    # Which elements of the full tensor the rank has; None for plain inputs and outputs, and where it is not known.
    layout: Layout | None
    key: str = ""  # of optimizer state its key: "exp_avg"

    @classmethod
    def of(cls, stage: Stage, parameter: str, layout: Layout | None, microbatch: int = 0, *, key: str = "") -> Event:
        """Make the event of a parameter, its gradient or its state."""
        return cls(stage, parameter.rpartition(".")[0], parameter, microbatch, 0, 0, layout, key)


Sink = Callable[[Event, torch.Tensor], None]
"""Takes each event, in execution order, with this rank's plain local tensor, which is valid during the call only.

It is called under ``no_grad``, on the stream where the tensor appears, and does not wait for the host.
"""


@dataclasses.dataclass(frozen=True)
class Takes:
    """What is taken of the tensors of a watched step.

    Attributes:
        sink: takes each tensor, if there is one.
        modules: whether it takes the outputs of modules and their gradients as well.
        digests: whether records have digests of gradients and bits of parameters and states, which cost time.
    """

    sink: Sink | None = None
    modules: bool = False
    digests: bool = True

    @torch.no_grad()
    def emit(self, event: Event, tensor: torch.Tensor) -> None:
        """Hand a tensor to the sink."""
        if self.sink is not None:
            self.sink(event, strided(local_of(tensor).detach()))
