"""What a check says of a step: its judge, its one-line refusals, and the options of its command.

Ranks are trained one after the other in a world of one, so that nothing is reduced between them; a step of the tests
gives each what a reduction would have given, or what a mistake makes of it.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from shardproof.harness.training import judge
from shardproof.harness.training.reference import Worker, file_of
from shardproof.harness.training.request import NotCheckable, Request, functions_of
from shardproof.harness.training.trainee import Trainee, digest_of, save

HERE = "tests.harness.test_checking"


# A training whose ranks are simulated: `mean` averages gradients over them, because it trains on all their data itself.


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.embed(tokens))))


def model():
    return Net()


def alone(model, mesh):
    return model


def data(step, rank):
    made = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(16, (2, 8), generator=made)
    labels = tokens.clone()
    labels[:, : 2 * rank + 2] = -100
    return [(tokens, labels), (tokens.flip(0), labels.flip(0))]


def sums(model, microbatches, by):
    for tokens, labels in microbatches:
        losses = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        (losses / by).backward()


RANK = [0]  # which rank trains; None is the reference
TOKENS = sum(int((labels >= 0).sum()) for rank in range(2) for _, labels in data(0, rank))


def train(model, optimizer, microbatches, *, by=float(TOKENS), scale=1.0, most=0.5):
    """Train as a rank whose gradients are reduced: those of the other are computed on a copy, which nobody sees."""
    sums(model, microbatches, by)
    if RANK[0] is not None:
        with torch.random.fork_rng():
            other = Net()
        other.load_state_dict(model.state_dict())
        losses = [F.cross_entropy(other(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
                  for tokens, labels in data(0, 1 - RANK[0])]  # fmt: skip
        gradients = torch.autograd.grad(sum(losses) / by, list(other.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = scale * (parameter.grad + gradient)
    nn.utils.clip_grad_norm_(model.parameters(), most)
    optimizer.step()
    optimizer.zero_grad()


def right(model, optimizer, microbatches, mesh):
    train(model, optimizer, microbatches)


def averaged(model, optimizer, microbatches, mesh):
    train(model, optimizer, microbatches, scale=0.5, most=1e3)


def unreduced(model, optimizer, microbatches, mesh):
    sums(model, microbatches, TOKENS)
    optimizer.step()
    optimizer.zero_grad()


def own_tokens(model, optimizer, microbatches, mesh):
    train(model, optimizer, microbatches, by=float(sum(int((y >= 0).sum()) for _, y in microbatches)))


def two_only(model, optimizer, microbatches, mesh):
    unreduced(model, optimizer, microbatches[:2], mesh)


def needs_method(model, optimizer, microbatches, mesh):
    if RANK[0] is None:
        model.my_sync()
    unreduced(model, optimizer, microbatches, mesh)


def never_steps(model, optimizer, microbatches, mesh):
    sums(model, microbatches, TOKENS)


CALLS = [0]


def other_data(step, rank):
    CALLS[0] += 1
    return data(step, CALLS[0])


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def answer(folder, *, seen=None, **fields):
    """What the reference says of the first step of two ranks."""
    given = {"model": f"{HERE}:model", "parallelize": f"{HERE}:alone", "data": f"{HERE}:data", "step": f"{HERE}:right"}
    request = Request(mesh=(("dp", 2),), data_dims=("dp",), steps=1, **given | fields)
    functions = functions_of(request)
    mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    for rank in range(2):
        RANK[0] = rank
        trainee = Trainee(request, functions, "run", mesh, torch.device("cpu"))
        save(file_of(str(folder), rank, -1), trainee.state())
        microbatches = trainee.data(0, rank)
        one = trainee.step(microbatches)
        if seen is not None:
            seen(rank, one)
        more = {"data": [digest_of(batch) for batch in microbatches], "forwards": one.forwards, "norm_types": [2.0]}
        save(file_of(str(folder), rank, 0, "events"), one.events, **more)
        save(file_of(str(folder), rank, 0), one.state)
        trainee.close()
    RANK[0] = None
    told = {"folder": str(folder), "explains": False, "device": "cpu", "backend": "gloo"}
    return Worker(request, told).step(0)


def test_a_right_step_has_no_finding_and_one_factor(world, tmp_path):
    said = answer(tmp_path)
    assert said["found"] == [] and said["lines"] == []
    assert said["factor"] == 1 and said["loss_factor"] == 1 and said["compared"] > 50
    assert {one["stage"] for one in said["measured"]} >= {"output", "loss", "gradient", "total norm",
                                                         "parameter after step", "optimizer state"}  # fmt: skip


def test_a_factor_is_named_by_the_size_of_the_mesh(world, tmp_path):
    said = answer(tmp_path, step=f"{HERE}:averaged")
    assert said["found"][0]["stage"] == "CLIPPED_GRADIENT" and said["signature"] == "S1" and said["factor"] == 0.5
    assert said["lines"][0].startswith("every gradient is exactly 0.5000 x the reference's (5 of 5 parameters")
    assert said["lines"][0].endswith("1/2 is 1 / the size of dp [S1]")
    assert "lies between backward and the gradients" in said["lines"][1]
    assert "averaged over the ranks again: multiply it by 2" in said["lines"][2]


def test_gradients_that_are_not_reduced_are_named(world, tmp_path):
    said = answer(tmp_path, step=f"{HERE}:unreduced")
    assert said["found"][0]["stage"] == "GRADIENT" and said["signature"] == "S2"
    assert "each gradient of every rank is this rank's own gradient" in said["lines"][0]


def test_means_over_own_tokens_are_named(world, tmp_path):
    said = answer(tmp_path, step=f"{HERE}:own_tokens")
    assert said["found"][0]["stage"] == "LOSS" and said["signature"] == "S5"
    assert (
        "each rank counts alike [S5]: the sum of its losses is divided by its own tokens (24, 16)" in said["lines"][1]
    )


def test_a_wrong_element_of_the_optimizers_step_is_found(world, tmp_path):
    def spoil(rank, one):
        for key, (event, tensor) in one.state.items():
            if rank == 1 and key[0].value == "parameter after step" and event.parameter == "hidden.weight":
                tensor[3, 2] += 1e-3

    said = answer(tmp_path, seen=spoil)
    (found,) = said["found"]
    assert (found["stage"], found["name"], found["rank"], found["element"]) == ("PARAMETER", "hidden.weight", 1, (3, 2))


def test_what_the_baseline_cannot_compute_judges_nothing(world, tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "ILL_CONDITIONED_ULPS", 0.01)
    said = answer(tmp_path, step=f"{HERE}:averaged", seen=None)
    assert any(text.startswith("ill-conditioned: gradient of ") for text in said["notes"])


REFUSED = {
    "two_only": "check: step() used 2 of the 4 microbatches of the reference: it must train on all that it is given",
    "needs_method": "check: step() raised in the reference (1 rank, 4 microbatches): AttributeError: 'Net' object has no "
    "attribute 'my_sync'",
    "never_steps": "check: step() made 0 optimizer steps that count: it must make one",
}


@pytest.mark.parametrize("step", REFUSED)
def test_a_step_that_cannot_be_checked_is_refused(world, tmp_path, step):
    with pytest.raises(NotCheckable) as raised:
        answer(tmp_path, step=f"{HERE}:{step}")
    assert str(raised.value).startswith(REFUSED[step]) and "\n" not in str(raised.value)


def test_data_that_change_are_refused(world, tmp_path):
    with pytest.raises(NotCheckable, match=r"^check: data\(step=0, rank=0\) returned other values in the reference"):
        answer(tmp_path, data=f"{HERE}:other_data")
