"""One rank that trains alone, under the doctor and recorded, and measures all. Its answer is one line of JSON."""

import gc
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from shardproof.harness.training.doctor import doctor
from shardproof.harness.training.recording import record
from training import models
from training.implementations import units_of
from training.models import SPECS, Spec
from training.processes import answer
from training.worker import join, synchronize

#: Steps before the measured ones: everything that lives as long as the model has been made.
WARM_UP = 2


class Rank:
    """One rank that trains in float32."""

    def __init__(self, spec: Spec, implementation: str, device: torch.device) -> None:
        self.spec, self.device, self.done = spec, device, 0
        model: nn.Module = models.build(spec, device)
        self.nbytes = sum(one.numel() * one.element_size() for one in model.parameters())
        if implementation == "ddp":
            model = DistributedDataParallel(model)
        else:
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for unit in units_of(model):
                fully_shard(unit, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

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

    def round(self, steps: int) -> dict[str, Any]:
        """Train so many steps alone, under the doctor, after it has seen the last that it wants, and recorded."""
        found: dict[str, Any] = {"unwatched": [self.step() for _ in range(steps)]}
        start = time.perf_counter()
        with doctor(self.model, self.optimizer, steps=range(steps), on_finding="collect") as watching:
            found["attach"] = time.perf_counter() - start
            found["watched"] = [self.step() for _ in range(steps)]
            found["after"] = [self.step() for _ in range(steps)]
        found["findings"] = [one.render() for one in watching.findings]
        with tempfile.TemporaryDirectory() as folder:
            with record(self.model, self.optimizer, out=folder, steps=range(steps)):
                found["recorded"] = [self.step() for _ in range(steps)]
            found["bytes"] = sum(one.stat().st_size for one in pathlib.Path(folder).rglob("*") if one.is_file())
        return found

    def peak(self, *, watched: bool) -> int:
        """The most bytes that one step holds beyond what is held when it begins."""
        if watched:
            with doctor(self.model, self.optimizer, steps=(0,), on_finding="collect"):
                return self._peak()
        return self._peak()

    def _peak(self) -> int:
        gc.collect()
        if self.device.type == "cuda":
            synchronize(self.device)
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return torch.cuda.max_memory_allocated() - held
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.step()
        assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
        most = held = 0
        for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return most


def main() -> None:
    """Do the job that the first argument describes."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = join(job["backend"], job["device"], job["rank"], job["world"], job["store"])
    rank = Rank(SPECS[job["model"]], job["implementation"], device)
    for _ in range(WARM_UP):
        rank.step()
    found: dict[str, Any] = {"rounds": [rank.round(job["steps"]) for _ in range(job["rounds"])]}
    found["peaks"] = {"unwatched": rank.peak(watched=False), "watched": rank.peak(watched=True)}
    found |= {"nbytes": rank.nbytes, "parameters": len(list(rank.model.parameters())), "torch": torch.__version__}
    found["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    answer(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
