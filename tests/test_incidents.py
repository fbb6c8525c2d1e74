"""The doctor names the mistake of each script of examples/incidents, and says nothing of the same script without it."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

#: What a finding must say, by script: check and signature, and what is wrong.
SAID = {
    "g02_no_sync": ("[D11, S2]", "is this rank's own gradient", "nothing was reduced over dp (ranks 0-3)"),
    "g03_sub_mesh": ("[D11, S3]", "is reduced over shard (ranks 0-1) only: ranks 2-3 are missing (c = 0.5"),
    "g04_zero_grad": ("[D11, S4]", "has the last of 4 microbatches only (c = 0.25"),
    "g06_local_norm": ("[D10, S6]", "is the norm of what rank 0 alone holds", "the scale differs between ranks"),
    "g07_early_optimizer": ("[D4, S7]", "none of the 14 parameters of AdamW is the model's"),
    "g08_untied": ("[D8, S8]", "'embed.weight'", "'head.weight'", "were one parameter and are 2"),
    "g09_sequence_parallel_norm": ("[D2, S9]", "ranks 0-1 and ranks 2-3 (tp)", "the sum over tp is missing"),
    "g10_detached_router": ("[D5, S10]", "'1.gate.weight', '2.gate.weight' get no gradient on any rank"),
}
LOOPS = {
    "ddp": ["--accumulate", "2"],
    "fsdp2": ["--accumulate", "2", "--clip", "torch"],
    "fsdp2-bf16": ["--bf16", "--clip", "hand"],
    "fsdp2_tp": ["--accumulate", "2", "--clip", "torch"],
    "hsdp": ["--clip", "torch"],
}


def _watched(script: pathlib.Path, *arguments: str) -> tuple[int, str]:
    """The exit code of four ranks under the doctor, and what they print."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", str(port)]
    command += ["-m", "shardproof", "doctor", "--strict", str(script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


def _findings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("shardproof doctor: step ")]


@pytest.mark.nightly
@pytest.mark.parametrize("name", SAID)
def test_the_mistake_is_named_and_its_healthy_twin_has_no_finding(name: str) -> None:
    script = EXAMPLES / "incidents" / f"{name}.py"
    code, text = _watched(script)
    assert code == 1, text
    missing = [words for words in SAID[name] if words not in text]
    assert not missing, f"{missing} is not in:\n{text}"
    # What follows from the mistake is no finding of its own.
    assert len([line for line in _findings(text) if line.endswith("]")]) == 1, text
    code, text = _watched(script, "healthy")
    assert code == 0, text
    assert "no finding" in text and not [line for line in _findings(text) if line.endswith("]")], text


def test_each_script_has_what_is_said_of_it() -> None:
    scripts = {path.stem for path in (EXAMPLES / "incidents").glob("*.py")}
    assert scripts == set(SAID)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LOOPS)
def test_loops_without_a_mistake_have_no_finding(name: str) -> None:
    code, text = _watched(EXAMPLES / "loops" / f"{name.partition('-')[0]}.py", *LOOPS[name])
    assert code == 0 and "no finding" in text and "c = " in text, text
