"""Installs the wheel of a folder into an empty environment, and runs its commands in an empty folder.

    python tests/released.py dist

The environment has what pip brings, and no extra: nothing of a clone is on its path.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: Two ranks under DDP; with a word more, gradients are never zeroed.
SCRIPT = """
import sys
import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(1 + torch.distributed.get_rank())
for step in range(4):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    if len(sys.argv) == 1:
        optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shardproof", "doctor")
RUN = (
    "run",
    "suites/test_training.py",
    "-k",
    "test_single_unit",
    "--device",
    "cpu",
    "--world",
    "2",
    "--effort",
    "quick",
)

#: What is run, and what it must print.
COMMANDS = (
    (("-m", "shardproof", "--help"), "usage: shardproof COMMAND"),
    ((*TORCHRUN, "train.py"), "no finding"),
    ((*TORCHRUN, "train.py", "wrong"), "[D11"),
    (("-m", "shardproof", *RUN, "--impl", "reference,torch.fully_shard", "--report", "run.json"), "reference: 1 pass"),
    (("-m", "shardproof", "report", "run.json"), "torch.fully_shard"),
    (("-m", "shardproof", "explain", "D11"), "D11"),
)


def main(folder: str) -> None:
    """Install and run; an exit code that is not 0, or other words, end it."""
    (wheel,) = Path(folder).resolve().glob("*.whl")
    with tempfile.TemporaryDirectory(prefix="shardproof-released-") as name:
        made, empty = Path(name, "environment"), Path(name, "empty")
        empty.mkdir()
        venv.create(made, with_pip=True)
        python = str(made / "bin/python")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        pins = [word for one in ("core", "torch") for word in ("-c", str(ROOT / f"constraints/{one}.txt"))]
        subprocess.run([python, "-m", "pip", "install", "-q", *pins, str(wheel)], env=environment, check=True)
        for words, said in COMMANDS:
            given = [python, *words]
            done = subprocess.run(given, cwd=empty, env=environment, capture_output=True, text=True, timeout=600)
            if done.returncode or said not in done.stdout + done.stderr:
                sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
            print("ok", *words, flush=True)
            (empty / "train.py").write_text(SCRIPT)


if __name__ == "__main__":
    main(sys.argv[1])
