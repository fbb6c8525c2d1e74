"""examples/torchrun: the script for Slurm gives torchrun and shardproof what they take.

Slurm itself is not here: stand-ins of its commands print what they are given.
"""

import os
import pathlib
import subprocess

from torch.distributed.run import get_args_parser

from tests.harness.inner import ROOT

SCRIPT = ROOT / "examples/torchrun/slurm.sh"

JOB = {
    "SLURM_JOB_NODELIST": "node[3-4]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_JOB_ID": "77",
    "SLURM_SUBMIT_DIR": "/home/me/my runs",
}


def submit(folder: pathlib.Path, *arguments: str, listing: str = "printf 'node3\\nnode4\\n'"):
    for name, body in {"scontrol": listing, "srun": 'printf "%s\\n" "$TMPDIR" "$@"'}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o700)
    variables = {**os.environ, **JOB, "PATH": f"{folder}:{os.environ['PATH']}", "SHARED_TMPDIR": "/shared"}
    return subprocess.run(["bash", SCRIPT, *arguments], env=variables, capture_output=True, text=True, check=False)


def test_torchrun_starts_one_rank_for_each_gpu_of_each_node(tmp_path):
    done = submit(tmp_path, "suites/test_hybrid.py", "--impl", "reference", "-k", "counts or order")
    shared, *words = done.stdout.splitlines()
    assert shared == "/shared"
    command = words[words.index("torchrun") + 1 :]
    parsed = get_args_parser().parse_args(command)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("2", "8", 1)
    assert (parsed.rdzv_backend, parsed.rdzv_id, parsed.rdzv_endpoint) == ("c10d", "77", "node3:29400")
    assert parsed.module and parsed.training_script == "shardproof"
    assert parsed.training_script_args == [
        "run", "suites/test_hybrid.py", "--impl", "reference", "-k", "counts or order",
        "--report", "/home/me/my runs/run-77.json",
    ]  # fmt: skip


def test_without_arguments_all_suites_run_for_one_implementation(tmp_path):
    words = submit(tmp_path).stdout.splitlines()
    assert words[words.index("run") + 1 :][:2] == ["--impl", "torch.fully_shard"]


def test_nothing_starts_without_the_names_of_the_nodes(tmp_path):
    done = submit(tmp_path, listing="exit 1")
    assert done.returncode == 1 and done.stdout == ""
