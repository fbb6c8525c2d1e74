"""Cases accuse no healthy library that has less than FSDP: one of flat chunks, or with one part of mixed precision.

Each adapter has the reference, declares what such a library can declare, and refuses what it does not declare: a case
that uses what it does not name fails there.
"""

import dataclasses

import pytest
import torch

from shardproof import contract
from shardproof.harness.adapters.base import original_name
from shardproof.harness.adapters.capability import OPTIONS, Capability
from shardproof.harness.adapters.flat import WrappingAdapter, flat_units, names_of
from shardproof.harness.adapters.reference import ReferenceFlatAdapter
from tests.harness.inner import name_of, run_cases

#: The parts of mixed precision, and what is seen beside one of them alone.
DTYPES = frozenset(one for one in OPTIONS if one.startswith("precision.") and one != "precision.output_dtype")


class Strict(ReferenceFlatAdapter):
    """Refuses what it does not declare."""

    def __init__(self, model, *, optimizer, config):
        wanted = {
            *(one for precision in (config.precision, *config.unit_precision.values()) for one in precision.needs()),
            *(["flat_parameters"] if config.flat_parameters else []),
            *([Capability.NO_SHARD] if not config.shards else []),
            *([Capability.HYBRID] if config.mesh.ndim > 1 else []),
            *(["ignored_params"] if config.ignored_params and not config.ignored_modules else []),
            *(["ignored_modules"] if config.ignored_modules else []),
            *(["sync_module_states"] if config.sync_module_states else []),
            *(["auto_wrap_policy"] if config.auto_wrap_policy else []),
            *(["as_groups"] if config.as_groups else []),
            *([Capability.OFFLOAD] if config.offload else []),
            *([Capability.DEFERRED_REDUCTION] if config.accumulation else []),
        }
        if Capability.MODEL_PRECISION in self.capabilities() and config.precision == _of_the_model(config):
            wanted -= DTYPES
        lacking = sorted(wanted - self.capabilities())
        assert not lacking, f"the case uses {', '.join(lacking)} and does not need it"
        super().__init__(model, optimizer=optimizer, config=config)


def _of_the_model(config):
    """The precision that a whole model can have."""
    return dataclasses.replace(config.precision, cast_forward_inputs=False, output_dtype=None, buffer_dtype=None)


class FlatChunks(Strict):
    """Modules register one chunk for each unit whatever a case wants, and no parameter of the model.

    A chunk of which a part is frozen is trained, with gradients of zero there, and stays as it is there.
    """

    name = "flat-chunks"

    @classmethod
    def capabilities(cls):
        return super().capabilities() - Capability.of(
            # What user code does with single parameters, or finds in the place of chunks.
            "ignored_params ignored_modules unreduced-gradients summon-full-params full-params-on-cpu step-in-backward "
            # State dicts have the names and the shapes of single parameters, and other calls of torch's interface.
            "distributed-checkpoint full-state-dict tensor-parallel-checkpoint optimizer-keys fsdp1-api any-combination"
        )

    def __init__(self, model, *, optimizer, config):
        names = [name for unit in config.units for name in unit]
        if len({*names}) < len(names):
            raise ValueError(f"a module is named twice in {names}")
        self._held_flat, self._frozen = [], set()
        self._train_all_of_a_chunk(model, config)
        super().__init__(model, optimizer=optimizer, config=dataclasses.replace(config, flat_parameters=True))
        self.config = config

    def _train_all_of_a_chunk(self, model, config):
        named = {original_name(name): parameter for name, parameter in model.named_parameters()}
        for unit in flat_units(model, [*names_of(config.units), ""]):
            parameters = [named[name] for name in unit.names]
            if len({parameter.requires_grad for parameter in parameters}) > 1:
                self._frozen |= {name for name in unit.names if not named[name].requires_grad}
                for parameter in parameters:
                    parameter.requires_grad_()

    def _frozen_of(self, read):
        """The frozen parts of what ``read`` returns of each chunk, where that is sharded."""
        pieces = self._flat_pieces(read)
        return [pieces[name].tensor for name in self._frozen if pieces[name] is not None]

    def backward(self, loss):
        super().backward(loss)
        chunks = [chunk for _, chunk in self._held_flat if chunk.grad is not None]
        if all(chunk.grad.numel() == chunk.numel() for chunk in chunks):  # otherwise they are reduced later
            for part in self._frozen_of(lambda chunk: chunk.grad):
                part.zero_()

    def step(self):
        before = [part.clone() for part in self._frozen_of(torch.Tensor.detach)]
        super().step()
        for part, values in zip(self._frozen_of(torch.Tensor.detach), before, strict=True):
            part.copy_(values)

    def named_parameters(self):
        return {name: chunk for unit, chunk in self._held_flat for name in unit.names}

    held_parameters = named_parameters
    parameters = WrappingAdapter.parameters

    def gradients(self):
        pieces = WrappingAdapter.gradients(self)
        return {name: None if name in self._frozen else piece for name, piece in pieces.items()}

    def optimizer_state(self):
        state = WrappingAdapter.optimizer_state(self)
        return state and {name: pieces for name, pieces in state.items() if name not in self._frozen}


class ParamDtypeAlone(Strict):
    name = "param-dtype-alone"

    @classmethod
    def capabilities(cls):
        return super().capabilities() - DTYPES | {"precision.param_dtype"}


class ReduceDtypeAlone(Strict):
    name = "reduce-dtype-alone"

    @classmethod
    def capabilities(cls):
        return super().capabilities() - DTYPES | {"precision.reduce_dtype"}


class BufferDtypeAlone(Strict):
    name = "buffer-dtype-alone"

    @classmethod
    def capabilities(cls):
        return super().capabilities() - DTYPES | {"precision.buffer_dtype"}


def accused(cases):
    """The records of cases that were run and did not pass, each with its text."""
    wrong = [case for case in cases if case["verdict"] not in ("pass", "unsupported", "unmet")]
    return [f"{case['id']} of {case['implementation']}: {case['failure']['text']}" for case in wrong]


@pytest.mark.nightly
def test_flat_chunks(tmp_path):
    cases, _ = run_cases(tmp_path, [name_of(FlatChunks)], "suites", "--effort", "quick", code=0)
    assert not accused(cases), "\n".join(accused(cases))
    assert sum(case["verdict"] == "pass" for case in cases) > 300


@pytest.mark.nightly
def test_parts_of_mixed_precision(tmp_path):
    alone = {name_of(one): one for one in (ParamDtypeAlone, ReduceDtypeAlone, BufferDtypeAlone)}
    chapters = [f"suites/test_{chapter}.py" for chapter in ("precision", "reduction")]
    cases, _ = run_cases(tmp_path, [*alone], *chapters, "--effort", "standard", code=0)
    assert not accused(cases), "\n".join(accused(cases))
    for name, adapter in alone.items():
        (part,) = adapter.capabilities() & DTYPES
        mine = [case for case in cases if case["implementation"] == name and case["verdict"] == "pass"]
        assert any(part in contract.items()[case["id"]].needs for case in mine), (
            f"{name} was asked nothing about {part}"
        )
