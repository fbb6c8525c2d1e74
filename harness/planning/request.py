"""What a plan is asked for: a model, an implementation, and what a step of training is."""

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

from shardproof.harness.adapters.base import Adapter
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.config import Precision

Optimizer = Literal["adamw", "sgd", "momentum"]
"""AdamW with two states for each parameter, SGD without any, SGD with momentum."""

#: States of the size of a parameter that an optimizer keeps.
STATES: dict[Optimizer, int] = {"adamw": 2, "sgd": 0, "momentum": 1}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
"""By the names that options take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A training step of which memory and traffic are wanted."""

    model: str  # a known shape, or ``module:function``
    implementation: str  # the adapter's name
    layers: int | None = None  # of a known shape, cut down to so many; ``dim`` likewise is its width
    dim: int | None = None
    batch: int = 1  # sequences of a rank's batch
    sequence: int | None = None  # tokens of each; None is the shape's own
    dtype: torch.dtype = torch.float32  # of the parameters, and so of shards, gradients and optimizer state
    compute: torch.dtype | None = None  # of gathered parameters and activations; None is ``dtype``
    reduce: torch.dtype | None = None  # in which gradients are reduced; None is the implementation's default
    optimizer: Optimizer = "adamw"
    reshard_after_forward: bool | int | None = None  # as in :class:`Config`; None is the implementation's default
    checkpointing: bool = False  # whether backward recomputes each unit's activations
    # Names of modules that are units, and of classes of which every module is one; without any, the units are the
    # repeated blocks.
    units: tuple[str, ...] = ()
    rank: int = 0  # whose step it is

    @property
    def precision(self) -> Precision:
        """The dtypes of every unit."""
        return Precision(param_dtype=self.compute, reduce_dtype=self.reduce)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer, by kernels that take no memory besides its state: those for lists of tensors do."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        momentum = 0.9 if self.optimizer == "momentum" else 0.0
        return torch.optim.SGD(parameters, lr=1e-4, momentum=momentum, foreach=False)


def check(request: PlanRequest, adapter: type[Adapter], *, dimensions: int) -> None:
    """Refuse, by a ValueError of one line, what an implementation cannot do on a mesh of as many dimensions."""
    reshards = request.reshard_after_forward
    needs: list[tuple[bool, str, str]] = [
        (dimensions > 1, Capability.HYBRID, "a mesh of replicas and shards"),
        (request.compute is not None, "precision.param_dtype", "--param-dtype"),
        (request.reduce is not None, "precision.reduce_dtype", "--reduce-dtype"),
        (isinstance(reshards, bool), Capability.RESHARD_AFTER_FORWARD, "--reshard-after-forward"),
        (type(reshards) is int, Capability.RESHARD_TO_SIZE, "--reshard-after-forward with a number"),
        (request.checkpointing, Capability.RECOMPUTATION, "--checkpointing"),
        (request.optimizer == "adamw", Capability.ADAM, "--optimizer adamw"),
    ]
    for is_needed, capability, what in needs:
        if is_needed and capability not in adapter.capabilities():
            raise ValueError(f"{request.implementation} lacks the capability {capability}: {what} cannot be planned")


# Meshes as a command line names them, and larger or smaller ones of the same kind.


_FORMS = "give ranks (512), or replicas x shards (64x8)"
_NAMES = {1: ("shard",), 2: ("replicate", "shard")}

Mesh = tuple[int, ...]
"""The sizes of (shard), or of (replicate, shard)."""


def names_of(mesh: Mesh) -> tuple[str, ...]:
    """The names of a mesh's dimensions."""
    return _NAMES[len(mesh)]


def parse(text: str) -> Mesh:
    """Read a mesh: ``8``, or ``64x8`` for 64 replicas of 8 shards; anything else is a ValueError of one line."""
    if not re.fullmatch(r"\d{1,9}(x\d{1,9})*", text):
        raise ValueError(f"--mesh {text!r} is not a mesh: {_FORMS}")
    mesh = tuple(map(int, text.split("x")))
    if len(mesh) not in _NAMES:
        raise ValueError(f"--mesh {text!r} has {len(mesh)} dimensions: {_FORMS}")
    if 0 in mesh:
        raise ValueError(f"--mesh {text!r} has no ranks: sizes begin at 1")
    return mesh


def parse_worlds(text: str) -> list[int]:
    """Read numbers of ranks, separated by commas; anything else is a ValueError of one line."""
    wrong = [one for one in text.split(",") if not re.fullmatch(r"0*[1-9]\d{0,8}", one.strip())]
    if wrong:
        raise ValueError(f"--worlds {text!r}: {wrong[0]!r} is no number of ranks; give several as 8,64,512")
    return sorted({int(one) for one in text.split(",")})


def scaled(mesh: Mesh, ranks: int) -> Mesh:
    """Return the mesh of the same kind for another number of ranks: more shards, or with replicas more of them.

    Ranks that do not divide into groups of as many shards are a ValueError of one line.
    """
    if len(mesh) == 1:
        return (ranks,)
    if ranks % mesh[-1]:
        raise ValueError(f"a world of {ranks} ranks does not divide into replicas of {mesh[-1]} shards")
    return (ranks // mesh[-1], mesh[-1])


def hosts_of(mesh: Mesh, node_size: int) -> int:
    """Return how many hosts of ``node_size`` ranks a mesh takes; a last one that is not full is a ValueError."""
    ranks = math.prod(mesh)
    if ranks > node_size and ranks % node_size:
        raise ValueError(f"a world of {ranks} ranks does not divide into hosts of {node_size} (--node-size)")
    return math.ceil(ranks / node_size)
