"""What the doctor costs, and a recording: their steps beside one without them, and the steps after.

    torchrun --nproc-per-node 2 -m benchmarks doctor [--model ten] [--implementation ddp] [--steps 4] [--state]

Ranks train in float32, over NCCL where there are GPUs and over gloo otherwise. In each round they train so many steps
without the doctor, then so many that it watches, then so many after it has removed its hooks, then so many that are
recorded. Times are medians over all steps, of the slowest rank; `processor` is the time that its process spent, which
other processes of the host lengthen less. A watched step may take 1.5 times as long as an unwatched one, and 0.3 s
more; a recorded one 1.3 times as long as a watched one. On GPUs, what a watched step holds at its peak beyond an
unwatched one may be 1 % of the parameters and 64 MiB. With ``--state`` the state is written after a step as well, by
``shardproof.state()`` with the optimizer, which may take a tenth of a step; its peak of memory is told on GPUs.
"""

import argparse
import gc
import pathlib
import tempfile
import time
from collections import defaultdict

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import models
from training.implementations import units_of
from training.worker import synchronize

from shardproof import doctor, record, state

#: Steps before the measured ones: everything that lives as long as the model has been made.
WARM_UP = 2


class TrainingRank:
    """One rank of a training."""

    def __init__(self, spec: models.Spec, implementation: str, device: torch.device) -> None:
        self.spec, self.device, self.done = spec, device, 0
        model = models.build(spec, device)
        self.nbytes = sum(one.numel() * one.element_size() for one in model.parameters())
        if implementation == "ddp":
            model = DistributedDataParallel(model)
        else:
            for unit in [*units_of(model), model]:
                fully_shard(unit)
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(self) -> tuple[float, float]:
        """Train one step; return its seconds, and those of this process's processor."""
        given = models.batch(self.spec, self.done, 0, dist.get_rank(), self.device)
        dist.barrier()
        synchronize(self.device)
        start, start_cpu = time.perf_counter(), time.process_time()
        models.loss(self.spec, self.model, given).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(self.device)
        self.done += 1
        return time.perf_counter() - start, time.process_time() - start_cpu

    def round(self, steps: int) -> dict[str, list[tuple[float, float]]]:
        """Train so many steps of each kind; return what :meth:`step` returns of each."""
        found = {"unwatched": [self.step() for _ in range(steps)]}
        with doctor(self.model, self.optimizer, steps=range(steps), on_finding="collect") as watching:
            found["watched"] = [self.step() for _ in range(steps)]
            found["after"] = [self.step() for _ in range(steps)]
        assert not watching.findings, watching.findings
        with tempfile.TemporaryDirectory() as folder:
            with record(self.model, self.optimizer, out=folder, steps=range(steps)):
                found["recorded"] = [self.step() for _ in range(steps)]
            self.recorded = sum(one.stat().st_size for one in pathlib.Path(folder).rglob("*") if one.is_file())
        return found

    def state(self) -> tuple[float, float]:
        """Write the state; return its seconds, and those of this process's processor."""
        with tempfile.TemporaryDirectory() as folder:
            dist.barrier()
            synchronize(self.device)
            start, start_cpu = time.perf_counter(), time.process_time()
            state(self.model, self.optimizer, out=folder, step=self.done)
            synchronize(self.device)
            seconds = time.perf_counter() - start, time.process_time() - start_cpu
            self.written = sum(one.stat().st_size for one in pathlib.Path(folder).rglob("*") if one.is_file())
        return seconds

    def peak_of_state(self) -> int:
        """The most bytes that writing the state holds."""
        gc.collect()
        synchronize(self.device)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.state()
        return torch.cuda.max_memory_allocated() - held

    def peak(self) -> int:
        """The most bytes that one step holds beyond what is held when it begins."""
        gc.collect()
        synchronize(self.device)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        return torch.cuda.max_memory_allocated() - held


def main() -> None:
    """Train, and print what the steps took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=models.SPECS, default="ten")
    parser.add_argument("--implementation", choices=("ddp", "fully_shard"), default="ddp")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of each kind, in a round")
    parser.add_argument("--state", action="store_true", help="measure shardproof.state() too")
    options = parser.parse_args()
    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
    rank = TrainingRank(models.SPECS[options.model], options.implementation, device)
    for _ in range(WARM_UP):
        rank.step()
    times = defaultdict(list)
    for _ in range(options.rounds):
        for kind, steps in rank.round(options.steps).items():
            times[kind] += steps
        if options.state:
            times["state"] += [rank.state() for _ in range(options.steps)]
    slowest = torch.tensor([times[kind] for kind in times], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if device.type == "cuda":
        alone = rank.peak()
        with doctor(rank.model, rank.optimizer, steps=(0,), on_finding="collect"):
            more, room = rank.peak() - alone, rank.nbytes / 100 + (64 << 20)
        peak_of_state = rank.peak_of_state() if options.state else 0
    if dist.get_rank() == 0:
        print(f"{options.model}, {options.implementation}, {dist.get_world_size()} ranks, {device.type}")
        print(f"  {'seconds of a step':<20}{'':>10}{'ratio':>8}{'processor':>12}{'ratio':>8}")
        medians = dict(zip(times, slowest.median(1).values, strict=True))
        for kind, found in medians.items():
            ratio = found / medians["unwatched"]
            print(f"  {kind:<20}{found[0]:>10.4f}{ratio[0]:>8.2f}{found[1]:>12.4f}{ratio[1]:>8.2f}")
        allowed = 1.5 * medians["unwatched"][0] + 0.3, 1.3 * medians["watched"][0]
        print(f"  allowed: {allowed[0]:.3f} s for a watched step, {allowed[1]:.3f} s for a recorded one")
        if options.state:
            part, size = medians["state"][0] / medians["unwatched"][0], rank.written / 1e6
            print(f"  state: {part:.3f} of a step, of 0.1; {size:.2f} MB of this rank")
            if device.type == "cuda":
                print(f"  memory of the state: {peak_of_state / 2**20:.1f} MiB at its peak")
        print(f"  recorded: {rank.recorded / 1e6:.2f} MB, {options.steps} steps")
        if device.type == "cuda":
            print(f"  memory: {more / 2**20:.1f} MiB more at the peak of a step, of {room / 2**20:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
