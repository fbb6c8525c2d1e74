"""The example prints the same losses whatever it imports, and after a resume."""

import os
import pathlib
import subprocess

import pytest

from tests import warm

ROOT = pathlib.Path(__file__).parents[2]


def run(*args: str) -> list[str]:
    """The lines that a run on two ranks prints."""
    command = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "train_transformer.py"), *args],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step")]


@pytest.mark.parametrize(
    "bf16", [pytest.param((), id="fp32"), pytest.param(("--bf16",), id="bf16", marks=pytest.mark.nightly)]
)
def test_the_same_losses_with_both_and_after_a_resume(tmp_path: pathlib.Path, bf16: tuple[str, ...]) -> None:
    whole = run("--impl", "torch.distributed.fsdp", "--steps", "4", *bf16)
    assert len(whole) == 4
    assert len({line.split()[-1] for line in whole}) == 4
    options = ("--impl", "fsdp_impl", "--checkpoint", str(tmp_path / "checkpoint"), *bf16)
    assert run(*options, "--steps", "2") + run(*options, "--steps", "4") == whole
