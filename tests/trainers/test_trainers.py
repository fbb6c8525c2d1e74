"""Trainers that people use, unchanged, under the doctor: healthy ones have no finding, and their incidents are named.

They need packages of their own: `tox -e trainers` runs them. Losses are printed in full, and compared by their bits.
"""

import pathlib
import re
from collections.abc import Sequence

import pytest

from tests.harness.inner import ROOT, python, torchrun

TRAINERS = ROOT / "examples/trainers"

#: The trainers, and what of them is run: each precision that they have.
HEALTHY = {
    "huggingface": ((), ("--dtype", "bfloat16")),
    "fabric": ((), ("--dtype", "bfloat16")),
    "lightning_trainer": ((), ("--dtype", "bfloat16")),
    "titan": ((), ("--tp", "2"), ("--dtype", "bfloat16")),
    "zero2": ((), ("--dtype", "float32"), ("--stage", "1"), ("--stage", "3")),
}
#: What the doctor says of a mistake, by trainer: check, signature and words.
INCIDENTS = {
    "huggingface": ("same-data", "[D9, S11]", "the 2 ranks of dp (ranks 0-1) read the same data in the step"),
    "fabric": ("early-optimizer", "[D4, S7]", "none of the 7 parameters of AdamW is the model's"),
    "titan": ("local-norm", "[D10, S6]", "each rank scales its gradients by the norm of its own shards"),
    "zero2": ("boundary", "[D11, S4]", "has the last of 2 microbatches only"),
}
#: What a comparison says of the same mistake.
COMPARED = {"fabric": "[S7]", "titan": "total norm in step 0", "zero2": "it has the last of 2 microbatches only"}


def run(trainer: str, *arguments: str, under: Sequence[str] = (), cwd: pathlib.Path) -> str:
    """Run a trainer on two ranks, and return what it prints."""
    done = torchrun(2, *under, TRAINERS / f"{trainer}.py", *arguments, cwd=cwd, HF_HUB_OFFLINE="1", code=0)
    return done.stdout + done.stderr


def losses(text: str) -> list[str]:
    """The losses of the first rank, in hexadecimal."""
    found = [line.partition("loss ")[2] for line in text.splitlines() if line.startswith("loss 0x")]
    assert len(found) >= 4, text
    return found


def findings(text: str) -> list[str]:
    return [line for line in text.splitlines() if "shardproof doctor: step " in line]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("trainer", "arguments"),
    [pytest.param(one, given, id="-".join((one, *given))) for one, every in HEALTHY.items() for given in every],
)
def test_a_healthy_trainer_has_no_finding(
    trainer: str, arguments: tuple[str, ...], seed: int, tmp_path: pathlib.Path
) -> None:
    arguments += ("--seed", str(seed))
    text = run(trainer, *arguments, under=("-m", "shardproof", "doctor"), cwd=tmp_path)
    assert not findings(text) and "; no finding" in text, text
    (norms,) = re.findall(r"^  norm      (.*), recomputed from all gradients", text, re.MULTILINE)
    assert "reduced   every gradient is " in text and all(float(norm) > 0.1 for norm in norms.split()), text
    if seed == 0:
        assert losses(run(trainer, *arguments, cwd=tmp_path)) == losses(text)


@pytest.mark.parametrize("trainer", INCIDENTS)
def test_an_incident_is_named(trainer: str, tmp_path: pathlib.Path) -> None:
    incident, *said = INCIDENTS[trainer]
    text = run(trainer, "--incident", incident, under=("-m", "shardproof", "doctor"), cwd=tmp_path)
    missing = [words for words in said if words not in text]
    assert not missing and len(findings(text)) == 1, text


@pytest.mark.parametrize("trainer", ["huggingface", "fabric", "lightning_trainer", "titan"])
def test_callbacks_watch_as_the_command_does(trainer: str, tmp_path: pathlib.Path) -> None:
    text = run(trainer, "--watch", "doctor", cwd=tmp_path)
    assert "; no finding" in text and "reduced   every gradient is " in text, text
    run(trainer, "--watch", "record", cwd=tmp_path)
    assert (tmp_path / "run/rank00001/done").exists()


@pytest.mark.parametrize("trainer", COMPARED)
def test_two_runs_are_compared(trainer: str, tmp_path: pathlib.Path) -> None:
    incident = INCIDENTS[trainer][0]
    for out, arguments in (("ref", ()), ("again", ()), ("mistake", ("--incident", incident))):
        run(trainer, *arguments, under=("-m", "shardproof", "record", "--out", out), cwd=tmp_path)
    said = []
    for other in ("again", "mistake"):
        done = python("-m", "shardproof", "compare", "ref", other, cwd=tmp_path)
        said.append(done.stdout + done.stderr)
    assert "no divergence (largest distance 0)" in said[0], said[0]
    assert "first divergence on rank 0: " in said[1] and COMPARED[trainer] in said[1], said[1]
