"""The plan of a training beside the training itself: peaks of memory by phase, collectives and their bytes.

    python -m benchmarks plan [--model llama:0.9b] [--implementations reference,torch.fully_shard,...]
        [--dtypes float32,bfloat16] [--mesh 2] [--batch 2] [--sequence 2048] [--checkpointing] [--backend fake]
        [--blocking] [--together 4] [--json FILE]

Each training has processes of its own, whose allocator is empty before the model is made, and so has each simulation.
With as many GPUs as the mesh has ranks they train over NCCL. With fewer, or none, one process trains as rank 0 of a
world that is not there (``--backend fake``): its tensors are real and its collectives move nothing. Peaks are bytes
that were requested from the allocator of rank 0, after two steps, without the workspaces of cuBLAS, which are listed
apart; without a GPU only collectives are compared. `--dtypes bfloat16` gathers and computes in bfloat16 and reduces in
float32. `--blocking` waits for each kernel (CUDA_LAUNCH_BLOCKING), so that memory which streams were registered to use
(``record_stream``) goes back when the host frees it: without, it goes back some time later.
"""

import argparse
import concurrent.futures
import json
import math
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from training.processes import answer_in, names_in, start

NAMES = ("reference", "torch.fully_shard", "reference.flat", "torch.fsdp")
DTYPES = ("float32", "bfloat16")
_MIB = 1 << 20
#: Seconds that one process may take.
_LIMIT = 300


def main() -> None:
    """Run, print the tables, and write the JSON."""
    options = parse()
    mesh = [int(size) for size in options.mesh.split("x")]
    backend = options.backend or ("nccl" if _gpus() >= math.prod(mesh) else "fake")
    training = {"model": options.model, "mesh": mesh, "batch": options.batch}
    training |= {"sequence": options.sequence, "checkpointing": options.checkpointing}
    rows = [(name, dtype) for name in options.implementations for dtype in options.dtypes]
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(options.together) as several,
        # One at a time where several ranks of one training have a GPU each.
        concurrent.futures.ThreadPoolExecutor(options.together if backend == "fake" else 1) as trainings,
    ):
        plans, measured = [], []
        for name, dtype in rows:
            job = {**training, "implementation": name, "rank": 0}
            if dtype != "float32":
                job |= {"compute": dtype, "reduce": "float32"}
            plans.append(several.submit(run, [job | {"do": "simulate"}], blocking=False))
            count = 1 if backend == "fake" else math.prod(mesh)
            of_world = {"do": "measure", "backend": backend, "store": f"{folder}/{name}-{dtype}"}
            jobs = [job | of_world | {"rank": rank} for rank in range(count)]
            measured.append(trainings.submit(run, jobs, blocking=options.blocking))
        found = [
            {"implementation": name, "dtype": dtype, "plan": plan.result()[0], "measured": one.result()[0]}
            for (name, dtype), plan, one in zip(rows, plans, measured, strict=True)
        ]
    about = {**training, "backend": backend, "blocking": options.blocking}
    print(heading(about, found), end="")
    for one in found:
        print(table(one), end="", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"about": about, "rows": found}, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama:0.9b")
    parser.add_argument("--implementations", type=names_in(NAMES), default=list(NAMES))
    parser.add_argument("--dtypes", type=names_in(DTYPES), default=list(DTYPES))
    parser.add_argument("--mesh", default="2", help="ranks, or replicas x shards")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--backend", choices=["fake", "gloo", "nccl"])
    parser.add_argument("--blocking", action="store_true")
    parser.add_argument("--together", type=int, default=4, help="simulations, and trainings with `fake`, at a time")
    parser.add_argument("--json", type=pathlib.Path)
    return parser.parse_args()


def run(jobs: Sequence[dict[str, Any]], *, blocking: bool) -> list[dict[str, Any]]:
    """Start a process for each job, all at once, and return their answers; what failed says so."""
    environment = {"CUDA_LAUNCH_BLOCKING": "1"} if blocking else {}
    processes = [
        start("training.planned", json.dumps(job), environment=environment, stderr=subprocess.PIPE) for job in jobs
    ]
    return [_answer(process) for process in processes]


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        output, errors = process.communicate(timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        errors += f"\nno answer after {_LIMIT} s"
    found: dict[str, Any] | None = answer_in(output.splitlines())
    if found is None:
        lines = [line for line in errors.splitlines() if line.strip()] or ["it ended without a message"]
        return {"failed": lines[-1], "stderr": lines[-25:]}
    return found


def heading(about: dict[str, Any], found: Sequence[dict[str, Any]]) -> str:
    """What was trained, and where."""
    host = next((one["measured"] for one in found if "device" in one["measured"]), {})
    mesh = "x".join(map(str, about["mesh"]))
    where = f"rank 0 of a mesh of {mesh}, {about['backend']}{', blocking' if about['blocking'] else ''}"
    kept = ", activations recomputed" if about["checkpointing"] else ""
    return (
        f"{about['model']}, {about['batch']} x {about['sequence']} tokens{kept}, {where}, "
        f"torch {host.get('torch')}, {host.get('device')}\n"
    )


def table(row: dict[str, Any]) -> str:
    """One training: its peaks in MiB and its collectives, planned and measured."""
    plan, measured = row["plan"], row["measured"]
    lines = ["", f"{row['implementation']}, {row['dtype']}"]
    for name, one in (("plan", plan), ("training", measured)):
        if "failed" in one:
            lines += [f"  the {name} failed: {one['failed']}", *(f"    {line}" for line in one.get("stderr", ())[-12:])]
    if "peaks" in measured:
        lines += peaks(plan, measured)
    if "failed" in plan or "failed" in measured:
        return "\n".join(lines) + "\n"
    same = plan["traffic"] == measured["traffic"]
    count, nbytes = (sum(one[i] for one in measured["traffic"]) for i in (3, 4))
    lines.append(f"  collectives: {count} with {nbytes:,} B, {'as planned' if same else 'PLANNED OTHERWISE'}")
    if not same:
        lines += [f"    planned  {one}" for one in plan["traffic"] if one not in measured["traffic"]]
        lines += [f"    measured {one}" for one in measured["traffic"] if one not in plan["traffic"]]
    return "\n".join(lines) + "\n"


def peaks(plan: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """The peaks in MiB, and what is apart from them; without a plan, those that were measured alone."""
    lines = [f"  {'peak, MiB':<14}{'planned':>12}{'measured':>12}{'difference':>12}{'in blocks':>12}"]
    for phase, value in measured["peaks"].items():
        planned = plan.get("peaks", {}).get(phase)
        shown = "" if planned is None else f"{planned / _MIB:.1f}"
        apart = "" if planned is None else f"{planned / value - 1:+.2%}"
        blocks = measured["allocated"][phase] / _MIB
        lines.append(f"  {phase:<14}{shown:>12}{value / _MIB:>12.1f}{apart:>12}{blocks:>12.1f}")
    cublas, outside = (measured["workspaces"][name] / _MIB for name in ("cublas", "outside"))
    lines.append(f"  apart: cuBLAS {cublas:.1f} MiB; context, libraries and other processes {outside:.1f} MiB")
    return lines


def _gpus() -> int:
    # In a process of its own: this one holds no device.
    script = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else 0


if __name__ == "__main__":
    main()
