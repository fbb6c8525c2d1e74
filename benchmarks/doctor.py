"""What the doctor costs, and a recording: their steps beside one without them, the steps after, memory, import, disk.

    python -m benchmarks doctor [--device cpu] [--world 2] [--models ten,ten-wide] [--implementations ddp,fully_shard]
        [--rounds 2] [--steps 4] [--json FILE]

Each implementation trains a model of about 10 M parameters in processes of its own. In each round it trains so many
steps without the doctor, then so many that it watches, then so many after it has removed its hooks, then so many that
are recorded. Times are medians over all steps, of the slowest rank; `processor` is the time that its process spent,
which other processes of the host lengthen less. A watched step may take 1.5 times as long as an unwatched one, and
0.3 s more; a recorded one 1.3 times as long as a watched one. `memory` is what a watched step holds at its peak beyond
an unwatched one; 1 % of the parameters and 64 MiB are allowed.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from training.processes import FOLDER, answer_in, names_in, start

MODELS = ("ten", "ten-wide", "small", "deep", "large", "tiny")
IMPLEMENTATIONS = ("ddp", "fully_shard")
_MIB = 1 << 20

_IMPORT = """
import time, torch
start = time.perf_counter()
import torch.distributed.fsdp, torch.distributed.tensor, torch.nn.parallel
middle = time.perf_counter()
from shardproof import doctor
print(1000 * (middle - start), 1000 * (time.perf_counter() - middle))
"""


def main() -> None:
    """Run and print the table."""
    options = parse()
    print(imports(), flush=True)
    rows = []
    for model in options.models:
        for name in options.implementations:
            rows.append(measure(model, name, options))
            print(table(rows[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--models", type=names_in(MODELS), default=["ten", "ten-wide"])
    parser.add_argument("--implementations", type=names_in(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of each kind, in a round")
    parser.add_argument("--json", type=pathlib.Path)
    return parser.parse_args()


def imports() -> str:
    """What the import of the doctor takes, in a process of its own."""
    process = start("timeit", "-n", "1", "-r", "1", "pass")  # the bytecode of what everything imports is written
    process.communicate()
    found = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", _IMPORT], cwd=FOLDER.parent, capture_output=True, text=True)
        found.append([float(one) for one in done.stdout.split()])
    of_torch, own = (statistics.median(column) for column in zip(*found, strict=True))
    return f"import of the doctor: {own:.0f} ms after torch and its modules for sharding, which take {of_torch:.0f} ms"


def measure(model: str, implementation: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the seconds of each step on the slowest rank."""
    backend = "nccl" if options.device == "cuda" else "gloo"
    job = {"model": model, "implementation": implementation, "backend": backend, "device": options.device}
    job |= {"world": options.world, "rounds": options.rounds, "steps": options.steps}
    with tempfile.TemporaryDirectory() as folder:
        jobs = [json.dumps(job | {"rank": rank, "store": f"{folder}/store"}) for rank in range(options.world)]
        processes = [start("training.watched", one, stderr=subprocess.PIPE) for one in jobs]
        outputs = [process.communicate() for process in processes]
    answers = [answer_in(output.splitlines()) for output, _ in outputs]
    if None in answers:
        raise SystemExit(outputs[answers.index(None)][1])
    return job | {"ranks": answers}


def seconds(row: dict[str, Any], kind: str, number: int) -> list[float]:
    """The seconds of all steps of a kind, by the slowest rank; ``number`` is 1 for those of the processor."""
    found: list[float] = []
    for rounds in zip(*(one["rounds"] for one in row["ranks"]), strict=True):
        found += [max(step[number] for step in ranks) for ranks in zip(*(one[kind] for one in rounds), strict=True)]
    return found


def table(row: dict[str, Any]) -> str:
    """One training: times of its steps, and memory."""
    first = row["ranks"][0]
    lines = [
        f"\n{row['model']}, {row['implementation']}: {first['nbytes'] / 4e6:.1f} M parameters, {row['world']} ranks, "
        f"{first['device']}, torch {first['torch']}",
        f"  {'seconds of a step':<20}{'':>10}{'ratio':>8}{'more':>8}{'processor':>12}{'ratio':>8}{'more':>8}",
    ]
    for kind in ("unwatched", "watched", "after", "recorded"):
        line = f"  {kind:<20}"
        for number, width in ((0, 10), (1, 12)):
            plain, own = (statistics.median(seconds(row, one, number)) for one in ("unwatched", kind))
            line += f"{own:>{width}.4f}"
            line += f"{own / plain:>8.2f}{own - plain:>+8.3f}" if kind != "unwatched" else f"{'':>16}"
        lines.append(line.rstrip())
    for number, what in ((0, ""), (1, " of the processor")):
        plain, own = (statistics.median(seconds(row, kind, number)) for kind in ("unwatched", "watched"))
        allowed = 1.5 * plain + 0.3
        lines.append(f"  a watched step may take {allowed:.3f} s{what}: {'kept' if own <= allowed else 'NOT KEPT'}")
        recorded = statistics.median(seconds(row, "recorded", number)) / own
        lines.append(
            f"  a recorded step takes {recorded:.2f} of a watched one{what}: {'' if recorded <= 1.3 else 'NOT '}kept"
        )
    size, count = max(one["rounds"][0]["bytes"] for one in row["ranks"]), first["parameters"]
    lines.append(f"  recorded: {size / 1e6:.2f} MB a rank, {count} parameters, {row['steps']} steps")
    attach = statistics.median(one["rounds"][0]["attach"] for one in row["ranks"])
    slowest = max(seconds(row, "watched", 0))
    lines.append(f"  the longest watched step {slowest:.3f} s; attaching {attach:.3f} s")
    more = max(one["peaks"]["watched"] - one["peaks"]["unwatched"] for one in row["ranks"])
    room = first["nbytes"] / 100 + 64 * _MIB
    kept = "kept" if more <= room else "NOT KEPT"
    lines.append(f"  memory: {more / _MIB:.1f} MiB more at the peak of a step, of {room / _MIB:.1f}: {kept}")
    lines += [f"  FOUND: {text}" for text in sorted({text for one in first["rounds"] for text in one["findings"]})]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
