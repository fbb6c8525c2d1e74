"""One rank of one implementation: trains what the controller asks for, and measures.

Commands come as lines of JSON on standard input, and each has one answer. Between commands the process waits, so that
other implementations are measured undisturbed.
"""

import contextlib
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from training import models, traced
from training.implementations import COMPUTE, REDUCE, Trained, Unsupported, mesh_of, named, units_of
from training.models import Spec
from training.processes import answer

from shardproof.harness.tensors import private


class Worker:
    """What one rank of an implementation holds between commands."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.spec: Spec | None = None
        self.trained: Trained | None = None
        self.optimizer: Any = None
        self.done = 0
        self.losses: list[torch.Tensor] = []
        # Bytes that no garbage collection frees: after a large model `torch.fsdp:shown` had as many as a shard of it.
        self.left = 0

    def build(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Make the model and its optimizer."""
        self.drop()
        self.left = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        shape = spec.pop("shape")
        if shape and math.prod(shape) != dist.get_world_size():
            raise Unsupported(f"it is measured on {math.prod(shape)} ranks")
        self.spec = Spec(**spec, shape=tuple(shape) if shape else None)
        if self.name == "limits":
            return {}
        self.trained = named(self.name)(models.build(self.spec, self.device), self.spec, self.device)
        options: dict[str, Any] = {"fused": True} if self.device.type == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.trained.module.parameters(), lr=1e-4, **options)
        return {}

    def steps(self, count: int) -> dict[str, Any]:
        """Train so many steps: milliseconds of each, those of the host until the optimizer, and of its processor."""
        if self.name == "limits":
            assert self.spec is not None
            return limits(self.spec, self.device, count)
        rows = [self._step() for _ in range(count)]
        return {"ms": [row[0] for row in rows], "host_ms": [row[1] for row in rows], "cpu_ms": [row[2] for row in rows]}

    def memory(self, count: int) -> dict[str, Any]:
        """The peaks of so many steps, in bytes: blocks with tensors made since ``build`` began, and reserved memory."""
        if has_peaks := self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(count):
            self._step()
        if not has_peaks:
            return {}
        allocated = torch.cuda.max_memory_allocated() - self.left
        return {"allocated": allocated, "reserved": torch.cuda.max_memory_reserved()}

    def trace(self) -> dict[str, Any]:
        """Profile steps of one microbatch; see :func:`training.traced.trace`."""
        spec, trained = self.spec, self.trained
        assert spec is not None and trained is not None
        batch = models.batch(spec, 0, 0, dist.get_rank() // spec.tensor_parallel, self.device)

        def finish() -> None:
            self.optimizer.step()
            self.optimizer.zero_grad()

        return traced.trace(lambda: models.loss(spec, trained.run, batch), finish)

    def told_losses(self) -> dict[str, Any]:
        """The losses of all steps since the model was built, averaged over the ranks."""
        if not self.losses:
            return {"losses": []}
        losses = torch.stack(self.losses)
        dist.all_reduce(losses)
        return {"losses": (losses / dist.get_world_size()).tolist()}

    def drop(self) -> dict[str, Any]:
        """Forget the model."""
        self.spec, self.trained, self.optimizer, self.losses, self.done = None, None, None, [], 0
        # torch's models wait for the garbage collector, and their tensors' graphs may need another round.
        for _ in range(3):
            gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return {}

    def _step(self) -> tuple[float, float, float]:
        spec, trained = self.spec, self.trained
        assert spec is not None and trained is not None
        rank = dist.get_rank() // spec.tensor_parallel
        batches = [models.batch(spec, self.done, number, rank, self.device) for number in range(spec.microbatches)]
        synchronize(self.device)
        start, start_cpu = time.perf_counter(), time.process_time()
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches):
            last = number == spec.microbatches - 1
            with contextlib.nullcontext() if last else trained.accumulating():
                loss = models.loss(spec, trained.run, batch)
                loss.backward()
            total += loss.detach()
        host, host_cpu = time.perf_counter(), time.process_time()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(self.device)
        end = time.perf_counter()
        self.done += 1
        self.losses.append(total)
        return 1000 * (end - start), 1000 * (host - start), 1000 * (host_cpu - start_cpu)


# What bounds a step whatever the implementation: its compute alone, and its communication alone.


def limits(spec: Spec, device: torch.device, count: int) -> dict[str, Any]:
    """Milliseconds of ``count`` runs of each part.

    ``compute``: forward and backward of the model in bfloat16, on one rank's batch, without sharding. ``host``: the
    same, until the host has issued it. ``optimizer``: fused AdamW on a rank's share, one parameter for each unit.
    ``gather``: all gathers of one forward, in bfloat16. ``reduce``: all reduce-scatters of a step, in float32, and with
    replicas their all-reduces after them; neither where the other ranks are not there.
    """
    replicas, shards = None, dist.group.WORLD
    if spec.shape is not None:
        replicas, shards = mesh_of(spec, device).get_all_groups()
    world = dist.get_world_size(shards)
    model = models.build(spec, device).to(COMPUTE)
    sizes = [sum(parameter.numel() for parameter in unit.parameters()) for unit in units_of(model)]
    sizes.append(sum(parameter.numel() for parameter in model.parameters()) - sum(sizes))
    shares = [-(-size // world) for size in sizes if size]
    batch = models.batch(spec, 0, 0, dist.get_rank(), device)
    if batch.is_floating_point():
        batch = batch.to(COMPUTE)
    host: list[float] = []

    def compute() -> None:
        start = time.perf_counter()
        for _ in range(spec.microbatches):
            models.loss(spec, model, batch).backward()
        host.append(1000 * (time.perf_counter() - start))
        model.zero_grad()

    def gather() -> None:
        for share in shares:
            shard = torch.zeros(share, dtype=COMPUTE, device=device)
            dist.all_gather_into_tensor(shard.new_empty(share * world), shard, group=shards)

    def reduce() -> None:
        for share in shares:
            full = torch.zeros(share * world, dtype=REDUCE, device=device)
            reduced = full.new_empty(share)
            dist.reduce_scatter_tensor(reduced, full, group=shards)
            if replicas is not None:
                dist.all_reduce(reduced, group=replicas)

    found: dict[str, Any] = {"compute": _timed(compute, device, count), "host": host[-count:]}
    params = [nn.Parameter(torch.zeros(share, device=device)) for share in shares]
    options: dict[str, Any] = {"fused": True} if device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(params, lr=1e-4, **options)
    for param in params:
        param.grad = torch.zeros_like(param)
    found["optimizer"] = _timed(optimizer.step, device, count)
    del optimizer, params
    if dist.get_backend() != "fake":
        found |= {"gather": _timed(gather, device, count), "reduce": _timed(reduce, device, count)}
    return found


def _timed(action: Callable[[], object], device: torch.device, count: int) -> list[float]:
    found = []
    for _ in range(count + 2):
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        found.append(1000 * (time.perf_counter() - start))
    return found[2:]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def join(backend: str, device_type: str, rank: int, world: int, store: str) -> torch.device:
    """Join the ranks of this implementation; ``fake`` is a world of which there is this process alone."""
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "fake":
        private.need("torch.testing._internal.distributed.fake_pg")  # registers the backend
        dist.init_process_group("fake", rank=rank, world_size=world, store=dist.HashStore())
        return device
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        device_id=device if device.type == "cuda" else None,
    )
    return device


def main() -> None:
    """Answer commands until standard input ends."""
    name, backend, device_type, world, store, rank = sys.argv[1:]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    worker = Worker(name, join(backend, device_type, int(rank), int(world), store))
    about = {"torch": torch.__version__, "device": "cpu"}
    if worker.device.type == "cuda":
        about["device"] = torch.cuda.get_device_name()
    answer(about)
    commands = {
        "build": worker.build,
        "steps": worker.steps,
        "memory": worker.memory,
        "losses": worker.told_losses,
        "trace": worker.trace,
        "drop": worker.drop,
    }
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer(commands[command.pop("do")](**command))
        except Unsupported as reason:
            answer({"unsupported": str(reason)})
    # Without a barrier: the other ranks got the same end of input.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
