"""Which pieces of several ranks make up a tensor, without any rank."""

import functools
import re
import types

import pytest
import torch
from torch import nn

from shardproof.harness.adapters.base import Config, Traits
from shardproof.harness.judging.finding import Divergence, Stage
from shardproof.harness.parity.coverage import Coverage, _joined
from shardproof.harness.parity.rank import Rank
from shardproof.harness.tensors.pieces import Piece, spans_of, whole
from shardproof.testing import models, world

FULL = torch.arange(24.0).view(6, 4)
NOTHING = range(0)


def mesh_of(ranks):
    """The data-parallel mesh of these ranks, as far as the checks ask for it."""
    mesh = torch.tensor(ranks)
    return types.SimpleNamespace(ndim=mesh.ndim, mesh=mesh, size=lambda dim: mesh.shape[dim], device_type="cpu")


def rows(chosen):
    return Piece(FULL[list(chosen)], lambda full: full[list(chosen)])


def columns(chosen):
    return Piece(FULL[:, list(chosen)], lambda full: full[:, list(chosen)])


def judge(pieces, *, meshes=None, traits=None, parts=None, stage=Stage.PARAMETER):
    """Judge what ranks show of one parameter with six rows and four columns, one piece for each rank."""
    model = nn.Linear(4, 6, bias=False)
    coverage = []
    for rank in range(len(pieces)):
        config = Config(mesh=mesh_of(list(range(len(pieces)))) if meshes is None else mesh_of(meshes[rank]))
        coverage.append(Coverage(model, config=config, traits=traits or Traits(), rank=rank))
        if parts is not None:
            coverage[-1]._cuts["weight"] = parts[rank].cut
    shown = [one.show([(stage, {"weight": piece})], step=0) for one, piece in zip(coverage, pieces, strict=True)]
    coverage[0].judge(shown)


HYBRID = [[[0, 1], [2, 3]]] * 4
BESIDE_TP = [[0, 2], [1, 3], [0, 2], [1, 3]]
TP_ROWS = [rows(range(3)), rows(range(3, 6))] * 2
TP_COLUMNS = [columns(range(2)), columns(range(2, 4))] * 2


@pytest.mark.parametrize(
    ("pieces", "options"),
    [
        ([rows(range(3)), rows(range(3, 6))], {}),
        ([rows([4, 0, 2]), rows([1, 3, 5])], {}),
        ([columns([0, 1]), columns([2, 3])], {}),
        ([whole(FULL)] * 2, {}),
        ([whole(FULL)], {}),
        ([whole(FULL), rows(NOTHING)], {"traits": Traits(shards=frozenset({"optimizer"}))}),
        ([rows(range(3)), rows(range(3, 6))] * 2, {"meshes": HYBRID}),
        ([rows(range(2)), rows(range(3, 5)), rows([2]), rows([5])], {"meshes": BESIDE_TP, "parts": TP_ROWS}),
        ([TP_ROWS[0], TP_ROWS[1]] * 2, {"meshes": BESIDE_TP, "parts": TP_ROWS}),
        ([TP_COLUMNS[0], TP_COLUMNS[1]] * 2, {"meshes": BESIDE_TP, "parts": TP_COLUMNS}),
        ([whole(FULL)] * 4, {"meshes": BESIDE_TP, "parts": TP_ROWS}),
        # Each half of a pipeline has the model to itself.
        ([rows(range(3)), rows(range(3, 6))] * 2, {"meshes": [[0, 1], [0, 1], [2, 3], [2, 3]]}),
    ],
)
def test_what_makes_up_the_tensor(pieces, options):
    judge(pieces, **options)


@pytest.mark.parametrize(
    ("pieces", "options", "says"),
    [
        ([rows(NOTHING)] * 2, {}, "do not cover it: element [0, 0] is on no rank of replica 0 (ranks 0, 1); 24 of 24"),
        ([rows(NOTHING)], {}, "element [0, 0] is on no rank of replica 0 (rank 0); 24 of 24"),
        ([rows(range(3)), rows(NOTHING)], {}, "element [3, 0] is on no rank of replica 0 (ranks 0, 1); 12 of 24"),
        ([rows(range(3))] * 2, {}, "element [3, 0] is on no rank"),
        ([rows(range(4)), rows(range(3, 6))], {}, "overlap: element [3, 0] is on ranks 0, 1 of replica 0 (ranks 0, 1); "
         "4 of 24 elements are on several ranks"),
        ([whole(FULL), whole(FULL), rows([0])], {}, "overlap: element [0, 0] is on ranks 0, 1, 2 of replica 0"),
        ([whole(FULL), rows(NOTHING)], {}, "sharding on rank 0\n  holds 24 of 24 elements of parameters that the ranks "
         "divide; its share is 12"),
        # Sharded over all ranks where each replica should have everything.
        ([rows([0, 1]), rows([2]), rows([3, 4]), rows([5])], {"meshes": HYBRID}, "element [3, 0] is on no rank of "
         "replica 0 (ranks 0, 1); 12 of 24"),
        ([rows(range(3)), rows(range(3, 6)), rows(range(3)), rows(range(3))], {"meshes": HYBRID},
         "element [3, 0] is on no rank of replica 1 (ranks 2, 3)"),
        # The parts of tensor parallelism are exchanged.
        ([TP_ROWS[1], TP_ROWS[0]] * 2, {"meshes": BESIDE_TP, "parts": TP_ROWS}, "element [0, 0] is on no rank of "
         "replica 0 (ranks 0, 2)"),
        ([rows(range(4)), rows(range(3, 6)), rows(NOTHING), rows(NOTHING)],
         {"meshes": BESIDE_TP, "parts": TP_ROWS, "traits": Traits(shards=frozenset())},
         "have elements of another part, such as [3, 0] on rank 0 of replica 0 (ranks 0, 2)"),
        ([Piece(FULL[:1], lambda full: full.new_zeros(1, 4)), rows(range(1, 6))], {}, "its cut selects element [0, 0] "
         "more than once"),
        ([Piece(FULL[:1], lambda full: full[:1] + 24), rows(range(1, 6))], {}, "its cut of positions has values "
         "that are no positions"),
        ([Piece(FULL[:1], lambda full: full[:1].float()), rows(range(1, 6))], {}, "its cut of int64 positions is "
         "torch.float32 of shape (1, 4)"),
        ([Piece(FULL[:1], lambda full: full[:2]), rows(range(1, 6))], {}, "its cut of int64 positions is "
         "torch.int64 of shape (2, 4) on cpu; expected int64 of the piece's shape (1, 4)"),
        ([Piece(FULL[:1], lambda full: full[:1].double() if full.is_floating_point() else full[:1]), rows(range(1, 6))],
         {}, "its cut of torch.float32 positions does not select"),
    ],
)  # fmt: skip
def test_what_does_not(pieces, options, says):
    with pytest.raises(Divergence, match=re.escape(says)):
        judge(pieces, **options)


def test_gradients_are_named_as_such():
    with pytest.raises(Divergence, match=r"^the shards of the clipped gradient of 'weight' do not cover it"):
        judge([rows(NOTHING)] * 2, stage=Stage.CLIPPED_GRADIENT)


def test_a_gradient_that_one_rank_lacks_is_left_to_the_comparison():
    judge([rows(range(3)), None], stage=Stage.GRADIENT)


def test_spans():
    assert spans_of(torch.tensor([[5, 4], [0, 9]])) == ((0, 1), (4, 6), (9, 10))
    assert spans_of(torch.tensor([], dtype=torch.int64)) == ()
    assert _joined([((0, 2), (4, 6)), (), ((2, 4),)]) == ((0, 6),)
    assert _joined([((0, 3),), ((2, 4),)]) is None


# With ranks


@pytest.mark.parametrize(
    ("shape", "frozen", "ignored", "can_tell"),
    [
        ((6,), [], [], True),
        ((6,), ["gain"], [], True),
        # Each of two ranks holds one element of it, with padding.
        ((6,), ["matrix"], [], False),
        ((6,), [], ["matrix"], False),
        ((1,), [], [], False),
        ((6,), ["gain", "matrix"], [], False),
    ],
)
def test_what_trains_can_be_too_small_to_see_it_divided(shape, frozen, ignored, can_tell):
    model = nn.ParameterDict({"matrix": torch.ones(shape), "gain": torch.ones(1)})
    coverage = Coverage(model, config=Config(mesh=mesh_of([0, 1]), ignored_params=ignored), traits=Traits(), rank=0)
    assert coverage.can_tell(frozen) == can_tell


@world(2)
def test_evidence_costs_no_exchange(rank: Rank):
    """A check exchanges batches once, and findings, evidence and traces together."""
    pair = rank.pair(models.Tower(dim=9))
    sent = []
    exchange = rank.exchange
    rank.exchange = lambda value: sent.append(value) or exchange(value)
    for step in range(2):
        sent.clear()
        pair.step(rank.batch(step, (2, 9)))
        pair.check()
        assert len(sent) == 2, sent
        _, (shown,), _ = sent[-1]
        assert bool(shown.spans) == (step == 0), "each tensor is shown once"


@world(2)
def test_a_piece_in_memory_of_the_baseline_is_found_out(rank: Rank):
    pair = rank.pair(models.Tower(dim=9))

    def borrowed(own):
        pieces = own()
        (name,) = [name for name in pieces if name == "out.bias"]
        full = pair.baseline.adapter.named_parameters()[name].detach()
        return pieces | {name: Piece(pieces[name].cut(full), pieces[name].cut)}

    pair.adapter.gradients = functools.partial(borrowed, pair.adapter.gradients)
    pair.adapter.parameters = functools.partial(borrowed, pair.adapter.parameters)
    pair.step(rank.batch(0, (2, 9)))
    assert "it shares its memory with the run" in pair.sharded.coverage._borrowed[1]
    with pytest.raises(AssertionError):
        pair.check()
