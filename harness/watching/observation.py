"""One tensor of a training step as a rank has it: what is kept of a step, and what every comparison begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from shardproof.harness.judging.finding import Stage
from shardproof.harness.tensors.fingerprints import strided
from shardproof.harness.tensors.layouts import Layout
from shardproof.harness.tensors.trees import local_of

Value = TypeVar("Value")

Key = tuple[Stage, str, str, int, int, int, str]
"""What tells the observations of a step apart: stage, module, parameter, microbatch, call, index, and optimizer state.

Equal in every run of one model, whatever its ranks and layouts.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Observation(Generic[Value]):
    """One tensor of a step on one rank.

    Attributes:
        stage: INPUT, MODULE_OUTPUT, LOSS (on which backward begins), OUTPUT_GRADIENT, OWN_GRADIENT, GRADIENT (``.grad``
            after each backward, of which the last counts), TOTAL_NORM, CLIPPED_GRADIENT (``.grad`` at the optimizer's
            step), INITIAL and PARAMETER (before and after the optimizer's step), OPTIMIZER_STATE; with ``--explain``
            GATHERED and BUFFER too, of check ROUTING.
        module: the canonical name of the module that returned the tensor, or that has the parameter; "" is the root.
        parameter: the canonical name of the parameter or buffer; empty for others.
        microbatch: the number of the forward or the backward in the step.
        call: the number of the module's call within the microbatch, or of the norm within the step.
        index: the number of the tensor among those of inputs and outputs.
        layout: which elements of the full tensor the rank has; None for plain inputs and outputs, and where it is not
            known.
        state: of optimizer state its key, such as "exp_avg".
        value: the local tensor, or what stands for it: a sketch (float64 [K]) or a fingerprint.
    """

    stage: Stage
    module: str
    parameter: str
    microbatch: int
    call: int
    index: int
    layout: Layout | None
    state: str
    value: Value

    @property
    def key(self) -> Key:
        """What tells it from the other observations of the step."""
        return self.stage, self.module, self.parameter, self.microbatch, self.call, self.index, self.state

    def bare(self) -> Observation[None]:
        """The same without its value, which is not kept alive then."""
        return Observation(*self.key[:6], self.layout, self.state, None)

    @property
    def name(self) -> str:
        """The name of the tensor for messages."""
        output = (self.module or "(root)") + (f", tensor {self.index}" if self.index else "")
        return self.parameter or output

    @property
    def where(self) -> str:
        """The microbatch and the call, where they are not the first."""
        parts = [f"microbatch {self.microbatch}"] if self.microbatch else []
        parts += [f"call {self.call} of the module"] if self.call else []
        return ", ".join(parts)


Observed = Observation[torch.Tensor]
"""With the tensor, or its sketch."""

ByKey = dict[Key, Observed]
"""What a rank has seen of a step, or of what is left after it."""


def of_parameter(
    stage: Stage, parameter: str, layout: Layout | None, value: Value, *, state: str = ""
) -> Observation[Value]:
    """Make the observation of a parameter, its gradient or its state."""
    return Observation(stage, parameter.rpartition(".")[0], parameter, 0, 0, 0, layout, state, value)


def key_of(stage: Stage, parameter: str, state: str = "") -> Key:
    """Return the key of a parameter, its gradient or its state."""
    return of_parameter(stage, parameter, None, None, state=state).key


Sink = Callable[[Observed], None]
"""Takes each observation, in execution order, with this rank's plain local tensor, which is valid during the call only.

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
    def emit(
        self, stage: Stage, tensor: torch.Tensor, layout: Layout | None, *, module: str = "", parameter: str = "",
        microbatch: int = 0, call: int = 0, index: int = 0, state: str = "",
    ) -> None:  # fmt: skip
        """Hand a tensor to the sink; of a parameter, its gradient or its state, the module is the one that has it."""
        if self.sink is not None:
            value = strided(local_of(tensor).detach())
            module = module or parameter.rpartition(".")[0]
            self.sink(Observation(stage, module, parameter, microbatch, call, index, layout, state, value))
