"""What only a rank can see of a broken adapter fails with a sentence about the method, and without our own frames."""

import dataclasses
import types

import pytest
import torch
from torch import nn

from shardproof.harness.adapters.base import Config
from shardproof.harness.adapters.replicas import DdpAdapter
from shardproof.harness.judging.finding import ProtocolError
from shardproof.harness.parity import protocol
from shardproof.harness.tensors.pieces import Piece, whole
from tests.errors import error_of

pytestmark = pytest.mark.sampled

CONFIG = Config(mesh=types.SimpleNamespace(device_type="cpu"))


class Plain(DdpAdapter):
    """An adapter of one linear layer, with the answers that a test gives it."""

    name = "plain"
    answer: object = None

    def __init__(self, model, *, optimizer, config):
        self.config, self.module, self.optimizer = config, model, None

    def named_parameters(self):
        return dict(self.module.named_parameters())

    def gradients(self):
        return self.answer

    parameters = gradients


GOOD = {"weight": whole(torch.zeros(2, 2)), "bias": whole(torch.zeros(2))}


@pytest.mark.parametrize(
    ("method", "answer", "says"),
    [
        ("gradients", [*GOOD.values()], "gradients() returned a list; it returns a dict from parameter names to "
         "pieces"),
        ("parameters", None, "parameters() returned None; it returns a dict"),
        ("parameters", GOOD | {"bias": None}, "parameters()['bias'] is None; expected a Piece"),
        ("gradients", {"weight": None}, "gradients() returned other names than the original model's parameters have"
         "; missing: bias"),
        ("gradients", GOOD | {"module.bias": None}, "; unknown: module.bias"),
        ("parameters", GOOD | {"bias": torch.zeros(2)}, "parameters()['bias'] is a Tensor; expected a Piece, such as "
         "whole(tensor)"),
        ("parameters", GOOD | {"bias": whole([0.0, 0.0])}, "parameters()['bias'] has a list for a tensor"),
        ("gradients", GOOD | {"bias": whole(torch.zeros(2, device="meta"))}, "gradients()['bias'] has a tensor on "
         "meta; the mesh, on whose device pieces are, is on cpu"),
        ("parameters", GOOD | {"bias": Piece(torch.zeros(2), None)}, "parameters()['bias'] has None for a cut; a cut "
         "takes a full tensor and returns its elements at the places of the piece"),
    ],
)  # fmt: skip
def test_what_a_method_returns(method, answer, says):
    adapter = protocol.make(Plain, nn.Linear(2, 2), optimizer=None, config=CONFIG)
    adapter.answer = answer
    text = error_of(protocol.pieces_of, adapter, method, ["weight", "bias"], kind=ProtocolError)
    assert text.startswith(f"adapter 'plain': {method}()") and says in text


def test_what_a_method_should_return():
    adapter = protocol.make(Plain, nn.Linear(2, 2), optimizer=None, config=CONFIG)
    adapter.answer = GOOD | {"bias": None}
    assert protocol.pieces_of(adapter, "gradients", ["weight", "bias"]) == adapter.answer


class OtherArguments(Plain):
    def __init__(self, model):
        raise AssertionError("never called")


class Half(Plain):
    def __init__(self, model, *, optimizer, config):
        self.config, self.optimizer = config, None


class ListOfModules(Plain):
    def __init__(self, model, *, optimizer, config):
        super().__init__([model], optimizer=optimizer, config=config)


class Unfinished(Plain):
    def __init__(self, model, *, optimizer, config):
        self.module, self.optimizer = model, None


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        (OtherArguments, r"^adapter 'plain': __init__\(model, optimizer=.*\) raised TypeError: .*'optimizer'"),
        (Half, "^adapter 'plain': there is no attribute 'module'; __init__ sets it to the module that a training loop"),
        (ListOfModules, "^adapter 'plain': the attribute 'module' is a list; __init__ sets it to the module"),
        (Unfinished, "^adapter 'plain': there is no attribute 'config'; super"),
    ],
)
def test_what_a_constructor_leaves(adapter, says):
    with pytest.raises(ProtocolError, match=says):
        protocol.make(adapter, nn.Linear(2, 2), optimizer=None, config=CONFIG)


class Chunk(Plain):
    """Keeps one flat chunk, which no module registers."""

    def __init__(self, model, *, optimizer, config):
        self.chunk = nn.Parameter(nn.utils.parameters_to_vector(model.parameters()))
        for module in model.modules():
            module._parameters.clear()
        super().__init__(model, optimizer=optimizer, config=config)


class NamedChunk(Chunk):
    def named_parameters(self):
        return {"0.weight": self.chunk, "flat": self.chunk}


class ChunkOfEach(Chunk):
    def named_parameters(self):
        return dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"], self.chunk)


class HoldsLess(Plain):
    def held_parameters(self):
        return {"0.weight": self.module[0].weight}


class Lists(Plain):
    def named_parameters(self):
        return [*self.module.parameters()]


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        (Chunk, "named_parameters() lacks 4 of the original model's 4 parameters: 0.weight, 0.bias, 2.weight, 2.bias;"),
        (NamedChunk, "named_parameters() lacks 3 of the original model's 4 parameters: 0.bias, 2.weight, 2.bias;"),
        (HoldsLess, "held_parameters() lacks 3 of the original model's 4 parameters: 0.bias, 2.weight, 2.bias;"),
        (Lists, "named_parameters() returned a list; it returns a dict from names to parameters"),
    ],
)
def test_parameters_without_their_names(adapter, says):
    """Cases count parameters and read them by name: four of them failed for reasons of their own instead."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    text = error_of(protocol.make, adapter, model, optimizer=None, config=CONFIG, kind=ProtocolError)
    assert text.startswith(f"adapter 'plain': {says}") and "\n" not in text


@pytest.mark.parametrize("adapter", [Plain, ChunkOfEach])
def test_parameters_by_their_names(adapter):
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    protocol.make(adapter, model, optimizer=None, config=CONFIG)
    protocol.make(NamedChunk, nn.Linear(2, 2), optimizer=None, config=dataclasses.replace(CONFIG, flat_parameters=True))


def test_a_tied_parameter_has_one_of_its_names():
    class Second(Plain):
        def named_parameters(self):
            return {name: value for name, value in self.module.named_parameters(remove_duplicate=False) if "1" in name}

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight, model[0].bias = model[1].weight, model[1].bias
    protocol.make(Second, model, optimizer=None, config=CONFIG)


def test_a_type_error_inside_the_constructor_is_its_own():
    class Wrong(Plain):
        def __init__(self, model, *, optimizer, config):
            len(3)

    with pytest.raises(TypeError, match="has no len") as caught:
        protocol.make(Wrong, nn.Linear(2, 2), optimizer=None, config=CONFIG)
    assert not isinstance(caught.value, ProtocolError)


# In ranks

ADAPTERS = """
from shardproof.harness.adapters.base import Piece
from shardproof.harness.adapters.reference import ReferenceAdapter

class ParametersAreNone(ReferenceAdapter):
    name = "none"

    def parameters(self): return None

class CutRaises(ReferenceAdapter):
    name = "cut"

    def parameters(self): return {name: Piece(piece.tensor, self.cut) for name, piece in super().parameters().items()}

    def cut(self, full):
        raise LookupError("no such rows")

class CutReturnsRows(CutRaises):
    def cut(self, full): return [0, 1]
"""

CUTS = "a cut takes a full tensor and returns its elements at the places of the piece"
SAYS = {
    "ParametersAreNone": ["adapter 'none': parameters() returned None; it returns a dict from parameter names to pi*"],
    "CutRaises": [
        f"the cut of the piece of 'in_proj.bias' raised LookupError: no such rows; {CUTS}",
        '  File "*broken_in_ranks.py", line *, in cut',
        '    raise LookupError("no such rows")',
    ],
    "CutReturnsRows": [f"the cut of the piece of 'in_proj.bias' returned a list; {CUTS}"],
}

CASE = """
from shardproof.testing import models, world

@world(2)
def test_case(rank):
    pair = rank.pair(models.MLP(4))
    pair.step(rank.batch(0, (2, 4)))
    pair.check()
"""


def test_a_rank_says_it_without_a_traceback(run, pytester):
    pytester.makepyfile(broken_in_ranks=ADAPTERS)
    pytester.syspathinsert()
    names = ",".join(f"broken_in_ranks:{name}" for name in SAYS)
    result = run(CASE, "--impl", names, "--device", "cpu", own_process=True)
    result.assert_outcomes(failed=len(SAYS))
    for lines in SAYS.values():
        result.stdout.fnmatch_lines([*lines, "reproduce: *"], consecutive=True)
        assert f"fail: every rank of 2:\n{lines[0].removesuffix('*')}" in result.stdout.str()
    assert "Traceback" not in result.stdout.str()
