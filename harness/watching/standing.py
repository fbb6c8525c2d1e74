"""Reads modes, buffers, generators and frozen values, which stand from step to step as parameters and states do.

They are read where an optimizer's step begins, in watched steps and in later ones. Values stay on their devices until
the step has ended.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shardproof.harness.tensors import devices
from shardproof.harness.tensors.fingerprints import bits_of_all, bits_on_host, host_rows
from shardproof.harness.tensors.trees import local_of
from shardproof.harness.watching.names import modules_of
from shardproof.harness.watching.records import StandingRecord
from shardproof.harness.watching.samples import some_of

#: How many seeds loaders may have drawn since the last time.
_MOST_SEEDS = 64


@dataclasses.dataclass
class Standing:
    """A reading; :meth:`record` copies it to the host."""

    found: StandingRecord
    buffers: dict[str, torch.Tensor]
    attributes: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor]
    distances: dict[str, torch.Tensor]

    def record(self) -> StandingRecord:
        """Return what a record has of it."""
        self.found.buffers, self.found.attributes = bits_on_host(self.buffers), bits_on_host(self.attributes)
        distances = dict(zip(self.distances, host_rows([*self.distances.values()]), strict=True))
        self.found.frozen = {name: (one, distances.get(name, 0.0)) for name, one in bits_on_host(self.frozen).items()}
        return self.found


class Standings:
    """Reads what stands, and remembers of it what a later reading is compared with on this rank."""

    def __init__(self) -> None:
        self._generator: torch.Tensor | None = None
        self._samples: dict[str, torch.Tensor] = {}

    def forget(self) -> None:
        """Forget the samples of a model that another one replaces."""
        self._samples.clear()

    @torch.no_grad()
    def read(
        self, roots: Sequence[nn.Module], parameters: Iterable[tuple[str, nn.Parameter]],
        buffers: dict[str, torch.Tensor], attributes: dict[str, torch.Tensor],
    ) -> Standing:  # fmt: skip
        """Read what stands now.

        Args:
            buffers: the bits of those of user code's modules, by name.
            attributes: the same of tensors that are plain attributes of them.
        """
        state = torch.get_rng_state()
        generators = {"cpu": _number_of(state.numpy().tobytes())}
        others = {"random": _number_of(repr(random.getstate()).encode())}
        if (numpy := sys.modules.get("numpy.random")) is not None and hasattr(numpy, "get_state"):
            others["numpy.random"] = _number_of(repr([bytes(numpy.get_state()[1]), numpy.get_state()[2]]).encode())
        if (own := devices.random_state()) != (0, 0):
            generators[devices.accelerator()] = _number_of(repr(own).encode())
        only_seeds = self._generator is None or _is_by_seeds(self._generator, state)
        self._generator = state
        frozen = {name: one for name, one in parameters if not one.requires_grad}
        return Standing(
            StandingRecord(generators, only_seeds, _training_modes(roots), others=others),
            buffers,
            attributes,
            dict(zip(frozen, bits_of_all([local_of(one) for one in frozen.values()]), strict=True)),
            {name: far for name, one in frozen.items() if (far := self._distance(name, one)) is not None},
        )

    def _distance(self, name: str, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return how far a sample of a parameter is from the first that was taken of it, relative to that."""
        own = some_of(parameter)
        if own is None or not own.is_floating_point():
            return None
        before = self._samples.get(name)
        if before is None or before.shape != own.shape or before.dtype != own.dtype or before.device != own.device:
            before = self._samples[name] = own.clone()
        size: torch.Tensor = before.double().norm()
        far: torch.Tensor = (own.double() - before.double()).norm() / size.clamp_min(torch.finfo(torch.float64).tiny)
        return far


def _training_modes(roots: Sequence[nn.Module]) -> dict[str, bool]:
    """Return whether modules are in training mode, of those whose forward looks at it, by canonical name."""
    found = (item for root in roots for item in modules_of(root))
    return {name: module.training for name, module in found if _has_modes(module)}


def _has_modes(module: nn.Module) -> bool:
    forward: Any = getattr(type(module).forward, "__code__", None)
    return forward is not None and "training" in forward.co_names and getattr(module, "p", None) != 0


def _number_of(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


def _is_by_seeds(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether a few seeds, as loaders and their samplers draw them, lead from one state of a generator to another."""
    generator = torch.Generator()
    generator.set_state(before)
    for _ in range(_MOST_SEEDS):
        if torch.equal(generator.get_state(), now):
            return True
        torch.empty((), dtype=torch.int64).random_(generator=generator)
    return False
