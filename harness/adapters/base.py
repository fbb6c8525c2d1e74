"""The protocol that every adapter implements, and what it declares about itself.

It fits implementations that wrap modules, that only rewrite parameters, and engines that own backward, clipping and the
step. docs/adapters.md tells in which order the harness calls what.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.harness.adapters.capability import Capability

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Units = tuple[tuple[str, ...], ...]


#: How ``checkpoint_wrapper`` names the module that it wraps.
_RECOMPUTED = "_checkpoint_wrapped_module."


def original_name(name: str) -> str:
    """A parameter's name in the model before activation checkpointing wrapped parts of it."""
    return name.replace(_RECOMPUTED, "")


def padded_to_rows(shape: torch.Size, size: int) -> int:
    """Elements a rank holds of a tensor whose dimension 0 is padded to a multiple of ``size``."""
    if not shape:
        return 1
    return math.ceil(shape[0] / size) * math.prod(shape[1:])


def inner_first(units: Units) -> list[tuple[str, ...]]:
    """Units so that a module's parts come before the module itself; otherwise in the case's order."""
    return sorted(units, key=lambda unit: -max(name.count(".") for name in unit))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """How an implementation differs from the plain case, where no verdict depends on it."""

    shards: frozenset[Literal["parameters", "gradients", "optimizer"]] = frozenset()
    """What is divided among the ranks; checked against the bytes that a rank holds."""

    held_from_start: frozenset[Literal["master", "gradients", "gathered"]] = frozenset()
    """What a rank has besides its share of the parameters once they are sharded: as large again, a copy that
    the optimizer updates instead, or a buffer for gradients; whole, the parameter that was gathered last,
    as long as a thread of the communication library has not let go of it."""

    local_numel: Callable[[torch.Size, int], int] = padded_to_rows
    """A rank's share of one parameter in elements, padding included: (shape, world size). A rank may hold
    more of one parameter and less of another; what it holds of a unit is at most the sum of the shares."""

    collective_padding: int = 0
    """Further elements by which a unit's flat buffer may be padded on each rank."""

    clips: Literal["call", "step"] = "call"
    """Whether clipping is a call of its own or part of the step, set up in advance."""

    divides_by_microbatches: bool = False
    """Whether gradients are averaged over microbatches too; the harness scales the loss back."""

    unused_gradient: Literal["none", "zero"] = "none"
    """What a parameter that no rank used has for a gradient."""

    process_groups: Literal["none", "kept", "abandoned"] = "none"
    """What becomes of groups that it makes: kept for reuse as long as the process lives, or never used
    again, so that the world is replaced when there are many."""

    frees_models: bool = True
    """Whether nothing of a model stays in the process once nobody has it any more."""

    isolation: Literal["shared", "adapter", "case"] = "shared"
    """Which cases may run in the same processes: all, this adapter's only, or each alone."""


@dataclasses.dataclass(frozen=True)
class Clip:
    """Clip the norm of all gradients together: ``max_norm`` > 0, ``norm_type`` > 0 or inf."""

    max_norm: float
    norm_type: float = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accumulation:
    """What the backwards before the last microbatch's leave to that one.

    Needs :attr:`Capability.DEFERRED_REDUCTION`, and what the fields say.
    """

    units: Literal["all", "root-only"] | tuple[str, ...] = "all"
    """Which ones: all, the root's own alone, or these modules. Needs :attr:`Capability.DEFERRED_PER_UNIT`."""

    skips: Literal["reduction", "all-reduce"] = "reduction"
    """The whole reduction, or that over the replicas only. Needs :attr:`Capability.DEFERRED_ALL_REDUCE`."""

    keeps_gathered: bool = False
    """Parameters stay gathered after these backwards. Needs :attr:`Capability.KEEP_AFTER_BACKWARD`."""

    marks_last: bool = False
    """The last backward is marked as the last. Needs :attr:`Capability.MARKED_LAST_BACKWARD`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a case wants the model sharded; equal for every implementation."""

    mesh: DeviceMesh
    """The data-parallel mesh, over which gradients are averaged: 1-D, or 2-D (replicate, shard), which needs
    :attr:`Capability.HYBRID`. It need not have all ranks of the world."""

    units: Units = ()
    """Each entry names the modules gathered by one collective; the root's own unit is implicit."""

    reshard_after_forward: bool | int | None = None
    """``None`` leaves it to the implementation's default."""

    microbatches: int = 1
    """Microbatches in one optimizer step."""

    accumulation: Accumulation | None = None
    """``None`` leaves it to the implementation when it reduces the gradients of several microbatches."""

    offload: Literal["pageable", "pinned"] | None = None
    """The CPU memory where shards live. Needs :attr:`Capability.OFFLOAD`."""

    clip: Clip | None = None

    find_unused: bool = False
    """Some parameters may get no gradient in a step."""

    cast: torch.dtype | None = None
    """Cast the module to this dtype once it is sharded, before the optimizer is made."""

    flat_parameters: bool = False
    """The optimizer has one flat parameter a unit. Needs :attr:`Capability.FLAT_PARAMETERS`."""

    sync_states: bool = False
    """Every rank takes the parameters and buffers of the first data-parallel rank. Needs
    :attr:`Capability.SYNC_STATES`."""

    @property
    def shard_size(self) -> int:
        """The number of ranks that share a unit."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The global ranks whose gradients are averaged, this one among them, in the mesh's order."""
        return tuple(self.mesh.mesh.flatten().tolist())


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one rank holds of one named tensor.

    ``tensor`` has any shape; ``cut`` takes a tensor of the full, unsharded shape and returns
    the same elements in the same shape, so that a baseline is cut instead of shards gathered.
    """

    tensor: torch.Tensor
    cut: Callable[[torch.Tensor], torch.Tensor]


def whole(tensor: torch.Tensor) -> Piece:
    """The piece of a rank that holds the full tensor."""
    return Piece(tensor, lambda full: full)


class Adapter(ABC):
    """One model, sharded by one implementation, on one rank.

    Subclasses shard in ``__init__`` (a collective over ``config.mesh``) and set ``module``, what
    the training loop calls, and ``optimizer``. The model arrives in float32 on ``config.mesh``'s
    device and belongs to the adapter.
    """

    name: ClassVar[str]
    traits: ClassVar[Traits] = Traits()

    module: nn.Module
    optimizer: torch.optim.Optimizer | None

    @classmethod
    @abstractmethod
    def availability(cls, device_type: str) -> str | None:
        """Why the implementation cannot run here on ``device_type``, in one line, or None."""

    @classmethod
    @abstractmethod
    def capabilities(cls) -> frozenset[Capability]:
        """What it can do, by the versions installed here."""

    @classmethod
    def version(cls) -> str:
        """The version of what is driven, for the run file."""
        return torch.__version__

    @classmethod
    def prepare(cls, device_type: str) -> None:
        """Change a rank's process for good: environment variables, imports that patch.

        Called before each case, where ``traits.isolation`` gives the implementation ranks of its own,
        and before the picture with which the process is compared after the case.
        """
        return None

    @abstractmethod
    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        self.config = config

    # one training step -------------------------------------------------------------------

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """The context of one microbatch's forward and backward."""
        yield

    def submodule(self, name: str) -> nn.Module:
        """What a training loop calls to run only the module ``name`` ("" is the root)."""
        return self.module.get_submodule(name)

    def forward(self, *args: Any, submodule: str = "") -> Any:
        """Run forward of the root or of one submodule."""
        return self.submodule(submodule)(*args)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward from a scalar loss; gradients are averaged over the data-parallel ranks."""
        loss.backward()

    def clip(self) -> torch.Tensor:
        """Clip as ``config.clip`` says; the total norm, in whatever form the implementation returns it."""
        assert self.config.clip is not None
        clip = self.config.clip
        return nn.utils.clip_grad_norm_(self.module.parameters(), clip.max_norm, clip.norm_type)

    def norm_value(self, norm: torch.Tensor) -> torch.Tensor:
        """The scalar, equal on all ranks, that ``clip`` meant; outside the trace, may communicate."""
        return norm

    def step(self) -> None:
        """Run the optimizer."""
        if self.optimizer is not None:
            self.optimizer.step()

    def norm_after_step(self) -> torch.Tensor | None:
        """The total norm that the step clipped by, where ``traits.clips`` is "step"."""
        return None

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Forget the gradients, or fill them with zeros."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        else:
            self.module.zero_grad(set_to_none=set_to_none)

    # pictures, taken outside the trace -----------------------------------------------------

    @abstractmethod
    def gradients(self) -> dict[str, Piece | None]:
        """Per parameter name of the original model, what this rank holds; None: no gradient."""

    @abstractmethod
    def parameters(self) -> dict[str, Piece]:
        """Per parameter name of the original model, what this rank holds of its value."""

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The registered parameters by the original model's names."""
        return {original_name(name): value for name, value in self.module.named_parameters()}

    def gathered(self) -> dict[str, bool]:
        """Per parameter name, whether ``module.parameters()`` shows it gathered.

        Needs :attr:`Capability.REGISTERED_STATE`.
        """
        raise AssertionError(f"{self.name} does not declare {Capability.REGISTERED_STATE!r}")

    def registered(self) -> dict[str, Piece]:
        """Per parameter name, what ``module.parameters()`` shows, gathered or not.

        Needs :attr:`Capability.REGISTERED_STATE`.
        """
        raise AssertionError(f"{self.name} does not declare {Capability.REGISTERED_STATE!r}")

    def own_gradients(self, names: Sequence[str]) -> list[torch.Tensor]:
        """What this rank's optimizer will use of the gradients of these parameters, to be changed in place.

        Ranks that hold the same share of the same parameters have tensors of the same sizes, in one order. Needs
        :attr:`Capability.TENSOR_PARALLEL`.
        """
        raise AssertionError(f"{self.name} does not declare {Capability.TENSOR_PARALLEL!r}")

    def reshard(self) -> None:
        """Free all gathered parameters. Needs :attr:`Capability.MANUAL_RESHARD`."""
        raise AssertionError(f"{self.name} does not declare {Capability.MANUAL_RESHARD!r}")

    def unshard(self) -> None:
        """Start to gather all parameters, without waiting. Needs :attr:`Capability.ASYNC_UNSHARD`."""
        raise AssertionError(f"{self.name} does not declare {Capability.ASYNC_UNSHARD!r}")

    def prefetch(self, *, forward: Mapping[str, Sequence[str]], backward: Mapping[str, Sequence[str]]) -> None:
        """Have the unit of each module gather those of the modules it maps to ahead of its own computation.

        Needs :attr:`Capability.EXPLICIT_PREFETCH`.
        """
        raise AssertionError(f"{self.name} does not declare {Capability.EXPLICIT_PREFETCH!r}")

    def register_forward_method(self, submodule: str, method: str) -> None:
        """Gather and free around this method too. Needs :attr:`Capability.FORWARD_METHOD`."""
        raise AssertionError(f"{self.name} does not declare {Capability.FORWARD_METHOD!r}")

    def after_step(self, event: torch.Event) -> None:
        """The next gathers wait for ``event`` only. Needs :attr:`Capability.POST_OPTIM_EVENT`."""
        raise AssertionError(f"{self.name} does not declare {Capability.POST_OPTIM_EVENT!r}")

    def checkpoint(self) -> dict[str, Any]:
        """What ``torch.distributed.checkpoint`` saves of model and optimizer, under these two names (collective).

        Needs :attr:`Capability.DISTRIBUTED_CHECKPOINT`.
        """
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.module, self._checkpointed_optimizer())
        return {"model": model, "optimizer": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        """Take what :meth:`checkpoint` returned, with other values in it (collective)."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(
            self.module,
            self._checkpointed_optimizer(),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _checkpointed_optimizer(self) -> torch.optim.Optimizer:
        assert self.optimizer is not None, f"{self.name} keeps its optimizer to itself"
        return self.optimizer

    def teardown(self) -> None:
        """Undo what the implementation keeps outside the model."""
        return None
