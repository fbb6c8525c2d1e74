"""A checkpoint that one torch has saved, loaded by another: for two environments, whose Pythons a variable names."""

import os

import pytest

from tests.harness.inner import QUIET, python

#: Two Pythons with torch and pytest, separated by os.pathsep, the older torch first.
PYTHONS = [path for path in os.environ.get("SHARDPROOF_PYTHONS", "").split(os.pathsep) if path]

CASES = """
import pathlib

import torch

from shardproof.testing import models, states, world
from shardproof.testing.train import optim

FOLDER = pathlib.Path(__file__).parent

def trained(rank, seed):
    torch.manual_seed(seed)
    model = models.Tower(dim=9)
    run = rank.run(model, units=model.units(), optimizer=optim.adamw())
    run.step([(rank.batch(seed, (4, 9)),)], loss=models.mean_square)
    return run

def tensors(run):
    state = run.adapter.checkpoint()
    named = dict(state["model"])
    for name, values in state["optimizer"]["state"].items():
        named |= {f"{name}.{key}": value for key, value in values.items()}
    return {name: getattr(named[name], "full_tensor", named[name].clone)().detach() for name in sorted(named)}

@world(2)
def test_saved(rank):
    run = trained(rank, 0)
    states.save(run, FOLDER / "checkpoint")
    full = tensors(run)
    if rank.index == 0:
        torch.save(full, FOLDER / "full.pt")

@world(2)
def test_loaded(rank):
    run, expected = trained(rank, 1), torch.load(FOLDER / "full.pt")
    others = [name for name, value in tensors(run).items() if not torch.equal(value, expected[name])]
    assert any("exp_avg" in name for name in others), "before loading the states must be others"
    states.load(run, FOLDER / "checkpoint")
    found = tensors(run)
    wrong = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    assert found.keys() == expected.keys() and not wrong, f"loaded with other values: {wrong}"
"""


@pytest.mark.nightly
@pytest.mark.skipif(len(PYTHONS) != 2, reason="SHARDPROOF_PYTHONS does not name the Pythons of two environments")
@pytest.mark.parametrize("implementation", ["reference", "reference.flat", "torch.fully_shard", "torch.fsdp"])
@pytest.mark.parametrize("older_saves", [True, False], ids=["older-saves", "newer-saves"])
def test_checkpoint(tmp_path, older_saves, implementation):
    """Values and states of one torch are those of the other, bit for bit, but for the error of F-301."""
    file = tmp_path / "test_cases.py"
    file.write_text(CASES)
    found = []
    for executable, case in zip(PYTHONS if older_saves else PYTHONS[::-1], ("test_saved", "test_loaded"), strict=True):
        options = ("--impl", implementation, "--device", "cpu")
        done = python("-m", "pytest", *QUIET, f"{file}::{case}", *options, executable=executable)
        found.append((done.returncode, done.stdout))
    assert found[0][0] == 0, found[0][1]
    if older_saves:
        assert found[1][0] == 0, found[1][1]
    else:
        assert "too many values to unpack (expected 5)" in found[1][1], found[1][1]
