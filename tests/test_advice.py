"""The table of advice: for each signature, the mend that is printed was applied, and the training became right.

Most rows are loops or incidents whose healthy form has the printed mend and nothing else; their own tests run both
forms. Of S1 the number that is printed is applied here.
"""

import pathlib
import re

import pytest

from shardproof.harness.judging import codes
from tests.harness import test_doctor_gathers
from tests.harness.inner import python
from tests.test_incidents import CHECKED, COMPARED, SAID

#: By signature the rows of the tables of loops and incidents, and what the mend is.
APPLIED = {
    "S1": {"g01_divided_twice": "the loss times the ranks", "g13_tokens_of_all_ranks": "the tokens of dp alone"},
    "S2": {
        "never-synchronized": "the last backward outside of no_sync()",
        "not-wrapped": "the wrapped module is called",
    },
    "S3": {"g03_sub_mesh": "the mesh of all data-parallel ranks", "group-of-one-rank": "the same"},
    "S4": {"zeroed-between": "zero_grad() after the step", "first-synchronized": "the last backward reduces"},
    "S5": {"g05_means_of_means": "the loss divided by the tokens of the step"},
    "S6": {"g06_local_norm": "the norm of all ranks"},
    "S7": {"g07_early_optimizer": "the optimizer after sharding", "optimizer-of-gathered-parameters": "the same"},
    "S8": {"g08_untied": "tied again"},
    "S9": {"g09_sequence_parallel_norm": "the sum over tp"},
    "S10": {"g10_detached_router": "a collective with a gradient"},
    "S11": {"sampler-without-ranks": "DistributedSampler", "tensor-parallel-without-names": "one seed for both ranks"},
    "S12": {"g12_reversed_shards": "shards in the order of ranks", "g15_stale_reduction": "the wait in its own step"},
    "S13": {},  # a dtype that is named is what is chosen otherwise; nothing is advised
}


def test_each_signature_has_mends_that_were_applied() -> None:
    assert list(APPLIED) == list(codes.SIGNATURES)
    known = {*test_doctor_gathers.LOOPS, *SAID, *COMPARED, *CHECKED}
    assert {row for rows in APPLIED.values() for row in rows} <= known


#: A training in which gradients are scaled after backward, by the ranks over the tokens of all.
RECIPE = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

def model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

def parallelize(model, mesh):
    return fully_shard(model, mesh=mesh["dp"])

def data(step, rank):
    made = torch.Generator().manual_seed(100 * step + rank)
    return [(torch.randn(6, 8, generator=made), torch.randint(4, (6,), generator=made)) for _ in range(2)]

def step(model, optimizer, microbatches, mesh):
    count = torch.tensor(sum(len(labels) for _, labels in microbatches))
    dist.all_reduce(count)
    size = mesh["dp"].size()
    for inputs, labels in microbatches:
        (LOSS * F.cross_entropy(model(inputs), labels, reduction="sum")).backward()
    for parameter in model.parameters():
        parameter.grad.mul_(STEP / count)
    CLIP
    optimizer.step()
    optimizer.zero_grad()
"""
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.05)"


def checked(folder: pathlib.Path, loss: str, step: str, clip: str) -> tuple[int, str]:
    script = folder / "recipe.py"
    script.write_text(RECIPE.replace("LOSS", loss).replace("STEP", step).replace("CLIP", clip))
    functions = [word for one in ("model", "parallelize", "data", "step") for word in (f"--{one}", f"{script}:{one}")]
    done = python("-m", "shardproof", "check", "--mesh", "dp=2", "--device", "cpu", *functions, OMP_NUM_THREADS="1")
    return done.returncode, done.stdout + done.stderr


#: The loss's factor and that of gradients before the step, with the mistake: too much at the step, with clipping and
#: without, and too little in the loss.
WRONG = {
    "at-the-step": ("1", "size * size", ""),
    "clipped": ("1", "size * size", CLIP),
    "after-backward": ("1", "1", ""),
    "clipped-after-backward": ("1", "1", CLIP),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", WRONG)
def test_the_number_that_is_printed_is_right(tmp_path: pathlib.Path, name: str) -> None:
    loss, step, clip = WRONG[name]
    code, text = checked(tmp_path, loss, step, clip)
    assert code == 1 and "[S1]" in text, text
    # A number would scale the step of one process too, which the reference runs: the words are sizes of the mesh.
    said = r"multiply (.*) by ((?:1 / )?the size of dp) \([\d.]+ here, and 1 on one rank\)"
    ((what, factor),) = re.findall(said, text)
    factor = factor.replace("the size of dp", "size")
    if what == "gradients":
        step = f"({step}) * {factor}"
    else:
        loss = f"{loss} * {factor}"
    code, text = checked(tmp_path, loss, step, clip)
    assert code == 0, text
