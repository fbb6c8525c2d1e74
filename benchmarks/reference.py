"""The reference beside torch's own, side by side in one run: time of a step, of the host, peak memory, and the limits.

    python -m benchmarks reference [--device cuda] [--world 2] [--models large,deep,small]
        [--implementations reference,torch.fully_shard,...] [--rounds 4] [--steps 10] [--seconds 450] [--json FILE]
        [--profile FOLDER]

Each implementation has processes of its own, which live as long as the run and wait while another is measured. In each
round all of them train so many steps, in an order that is reversed from round to round. Times are medians over all
steps, with the smallest and largest median of a round; of several ranks the slowest counts. `host` is how long the host
takes to issue forward and backward. A peak counts the blocks with tensors of a process's allocator, without blocks from
before the model was made; `reserved` is the memory that the allocator took from the device. `time`, `host` and `peak`
behind them are ratios to torch's own; `limit` is the ratio of time to compute and optimizer alone. A model that does
not fit into the seconds is left out, and named. `--backend fake` trains one rank of a world that is not there: one GPU
is enough, no collective takes time or moves data, and losses mean nothing. Then `host` is the time of the processor,
which other processes do not lengthen, and with the models `thin` and `thin-small` the time of the implementation
alone.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

FOLDER = pathlib.Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

from training.implementations import NAMES  # noqa: E402
from training.models import SPECS, Spec  # noqa: E402
from training.processes import answer_in, names_in, start  # noqa: E402
from training.traced import exposed, picture  # noqa: E402

#: What an implementation is compared with.
PARTNERS = {
    "reference": "torch.fully_shard",
    "reference.flat": "torch.fsdp",
    "reference.flat:shown": "torch.fsdp:shown",
}
#: Steps before the measured ones: everything that lives as long as the model has been made.
WARM_UP = 4
#: So many steps are trained in all, whose losses are compared.
COMPARED = 50


class RankProcesses:
    """The processes of one implementation."""

    def __init__(self, name: str, backend: str, device: str, world: int, folder: pathlib.Path) -> None:
        self.name = name
        self.errors = folder / f"{name}.stderr"
        self.failed: str | None = None
        self.is_fake = backend == "fake"
        #: On a GPU nobody fills what is gathered.
        self.has_losses = not self.is_fake or device == "cpu"
        of_all = ("training.worker", name, backend, device, world, folder / name)
        with self.errors.open("w") as errors:
            self.processes = [
                start(*of_all, rank, stdin=subprocess.PIPE, stderr=errors)
                for rank in range(1 if self.is_fake else world)
            ]

    def send(self, **command: Any) -> None:
        """Give all ranks one command."""
        for process in self.processes if self.failed is None else ():
            with contextlib.suppress(BrokenPipeError):  # its answer will be missing
                process.stdin.write(json.dumps(command) + "\n")
                process.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        """What each rank answers to the last command; empty once one of them has died."""
        found: list[dict[str, Any]] = []
        for process in self.processes if self.failed is None else ():
            if (answer := answer_in(process.stdout)) is None:
                self._give_up()
                return []
            found.append(answer)
        return found

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """Send, and wait for the answers."""
        self.send(**command)
        return self.answers()

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()

    def _give_up(self) -> None:
        # The others may wait for the one that died.
        for process in self.processes:
            process.kill()
        lines = [line for line in self.errors.read_text().splitlines() if line.strip()]
        self.failed = lines[-1] if lines else "it ended without a message"
        print(f"{self.name} failed:\n" + "\n".join(lines[-25:]), file=sys.stderr)


def main() -> None:
    """Run, print the tables, and write the JSON."""
    options = parse()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        backend = options.backend or ("nccl" if options.device == "cuda" else "gloo")
        has_limits = options.backend != "fake" or options.device != "cpu"
        names = [*options.implementations, *(["limits"] if has_limits else [])]
        ranks = [RankProcesses(name, backend, options.device, options.world, pathlib.Path(folder)) for name in names]
        about = [one.answers() for one in ranks]
        host = next((answer[0] for answer in about if answer), {})
        result: dict[str, Any] = {"about": host | {"world": options.world, "backend": backend, "rows": []}}
        devices = 1 if backend == "fake" else options.world
        print(f"torch {host.get('torch')}, {devices} x {host.get('device')}, {backend}\n", flush=True)
        left_out = []
        for spec in map(SPECS.__getitem__, options.models):
            if time.monotonic() - began > options.seconds:
                left_out.append(spec.name)
                continue
            row = measure(spec, ranks, options)
            result["about"]["rows"].append(row)
            print(table(row), flush=True)
        result["left_out"] = left_out
        for one in ranks:
            one.close()
    if left_out:
        print(f"left out after {options.seconds} s: {', '.join(left_out)}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--backend", choices=["fake"], help="one rank of a world that is not there")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--models", type=names_in(tuple(SPECS)), default=["large", "deep", "small"])
    parser.add_argument("--implementations", type=names_in(NAMES), default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each implementation in a round")
    parser.add_argument("--seconds", type=float, default=450, help="begin no further model after so many")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--profile", type=pathlib.Path, help="a folder for profiles of each model and a picture")
    return parser.parse_args()


def measure(spec: Spec, ranks: Sequence[RankProcesses], options: argparse.Namespace) -> dict[str, Any]:
    """One row: all implementations on one model."""
    host = "cpu_ms" if all(one.is_fake for one in ranks) else "host_ms"
    row: dict[str, Any] = {"model": spec.name, "units": spec.units, "host": host, "implementations": {}}
    taking_part = []
    for one in ranks:
        one.send(do="build", spec=dataclasses.asdict(spec))
    for one in ranks:
        built = one.answers()
        if built and "unsupported" in built[0]:
            row["implementations"][one.name] = built[0]
        elif built and one.name != "limits":
            row["implementations"][one.name] = {"rounds": []}
            taking_part.append(one)
    together(taking_part, do="steps", count=WARM_UP)
    for number in range(options.rounds):
        for one in taking_part if number % 2 == 0 else taking_part[::-1]:
            answers = one.ask(do="steps", count=options.steps)
            if answers:
                slowest = {key: [max(step) for step in zip(*(a[key] for a in answers), strict=True)] for key in TIMES}
                row["implementations"][one.name]["rounds"].append(slowest)
    for one, answers in together(taking_part, do="memory", count=2):
        row["implementations"][one.name]["peak"] = worst(answers)
    trained = WARM_UP + options.rounds * options.steps + 2
    together(taking_part, do="steps", count=max(COMPARED - trained, 0))
    for one, answers in together([one for one in taking_part if one.has_losses], do="losses"):
        row["implementations"][one.name]["losses"] = answers[0]["losses"]
    if options.profile is not None:
        row["streams"] = profiles(spec, taking_part, options.profile)
    for one in ranks:
        is_limits = one.name == "limits" and spec.tensor_parallel == 1 and one.name not in row["implementations"]
        if is_limits and (answers := one.ask(do="steps", count=options.steps)):
            row["limits"] = {key: max(statistics.median(answer[key]) for answer in answers) for key in answers[0]}
        if one.failed is not None:
            row["implementations"][one.name] = {"failed": one.failed}
    together(ranks, do="drop")
    return row


def profiles(spec: Spec, ranks: Sequence[RankProcesses], folder: pathlib.Path) -> dict[str, Any]:
    """Write what the first rank of each implementation spends a step on; milliseconds of its streams."""
    name, steps = re.sub(r"\W+", "-", spec.name), {}
    folder.mkdir(parents=True, exist_ok=True)
    for one in ranks:
        for answer in one.ask(do="trace")[:1]:
            (folder / f"{name}-{one.name}.txt").write_text(answer["text"])
            steps[one.name] = answer["spans"]
    (folder / f"{name}.svg").write_text(picture(spec.name, steps))
    return {name: exposed(spans) for name, spans in steps.items() if spans}


TIMES = ("ms", "host_ms", "cpu_ms")


def together(ranks: Sequence[RankProcesses], **command: Any) -> list[tuple[RankProcesses, list[dict[str, Any]]]]:
    """Let all of them do something at the same time; those that answered, and their answers."""
    for one in ranks:
        one.send(**command)
    return [(one, answers) for one in ranks if (answers := one.answers())]


def worst(answers: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The largest of each figure over the ranks."""
    return {name: max(one[name] for one in answers) for name in answers[0]}


# The table

HEADER = (
    f"{'implementation':21}{'ms a step':>20}{'host':>8}{'us/unit':>9}{'MiB':>9}{'reserved':>10}"
    f"{'time':>18}{'host':>6}{'peak':>7}{'limit':>7}"
)


def table(row: dict[str, Any]) -> str:
    """One model as text: a line for each implementation, its ratios to its partner and to the limit, and the limits."""
    lines = [f"{row['model']}: {row['units']} units", HEADER]
    for name, found in row["implementations"].items():
        lines.append(f"{name:21}{line(name, found, row)}".rstrip())
    if "limits" in row:
        parts = ", ".join(f"{key} {value:.1f}" for key, value in row["limits"].items())
        lines.append(f"limits, ms: {parts}")
    for name, found in row.get("streams", {}).items():
        lines.append(f"streams of {name}, ms: " + ", ".join(f"{key} {value:.1f}" for key, value in found.items()))
    lines += differing_losses(row)
    return "\n".join(lines) + "\n"


def line(name: str, found: dict[str, Any], row: dict[str, Any]) -> str:
    """The figures of one implementation: milliseconds a step and of the host, peaks, and the ratios."""
    if not found.get("rounds"):
        return "  " + next((found[why] for why in ("unsupported", "failed") if why in found), "nothing was measured")
    host = median(found, row["host"])
    peak = found.get("peak", {})
    cells = [f"{spread(found):>20}{host:>8.1f}{1000 * host / row['units']:>9.0f}"]
    cells.append(f"{peak['allocated'] / 2**20:>9.1f}{peak['reserved'] / 2**20:>10.1f}" if peak else " " * 19)
    partner = row["implementations"].get(PARTNERS.get(name, ""), {})
    if partner.get("rounds"):
        cells.append(f"{ratio(found, partner):>18}{host / median(partner, row['host']):>6.2f}")
        cells.append(f"{peak['allocated'] / partner['peak']['allocated']:>7.3f}" if peak else " " * 7)
    else:
        cells.append(" " * 31)
    if "limits" in row:
        cells.append(f"{median(found, 'ms') / (row['limits']['compute'] + row['limits']['optimizer']):>7.2f}")
    return "".join(cells)


def median(found: dict[str, Any], key: str) -> float:
    """Over all steps of all rounds."""
    return statistics.median(value for one in found["rounds"] for value in one[key])


def spread(found: dict[str, Any]) -> str:
    """The median of the steps' times, with the smallest and largest of the rounds."""
    medians = [statistics.median(one["ms"]) for one in found["rounds"]]
    return f"{median(found, 'ms'):.1f} ({min(medians):.1f}-{max(medians):.1f})"


def ratio(found: dict[str, Any], partner: dict[str, Any]) -> str:
    """The median of the rounds' ratios of time, with the smallest and the largest."""
    pairs = zip(found["rounds"], partner["rounds"], strict=False)
    ratios = [statistics.median(one["ms"]) / statistics.median(other["ms"]) for one, other in pairs]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def differing_losses(row: dict[str, Any]) -> list[str]:
    """For each implementation, how far its losses are from those of torch.fully_shard, or of the first."""
    losses = {name: found["losses"] for name, found in row["implementations"].items() if found.get("losses")}
    base = "torch.fully_shard" if "torch.fully_shard" in losses else next(iter(losses), None)
    found = []
    for name in losses:
        if base is not None and name != base:
            pairs = zip(losses[name], losses[base], strict=True)
            largest = max(abs(one - other) / abs(other) for one, other in pairs)
            found.append(f"{name} {largest:.1e}")
    if not found:
        return []
    return [f"losses of {len(losses[base])} steps, largest relative difference to {base}: {', '.join(found)}"]


if __name__ == "__main__":
    main()
