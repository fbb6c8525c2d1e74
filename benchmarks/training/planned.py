"""One process: simulates a training, or trains it as one rank and measures. Its answer is one line of JSON.

A measured rank is one of a world over NCCL or gloo, or of a world that is not there (the backend ``fake``), in which
collectives move nothing and take the memory that they take elsewhere.
"""

import gc
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from training.processes import answer
from training.worker import join

from shardproof.harness.adapters import registry
from shardproof.harness.collectives.recorder import Recorder
from shardproof.harness.planning import anatomy, planned
from shardproof.harness.planning.request import DTYPES, Mesh, PlanRequest, names_of
from shardproof.harness.planning.subject import subject_of
from shardproof.harness.tensors import private
from shardproof.planfile import Traffic

#: Steps before the measured one: what lives as long as the model has been made.
WARM_UP = 2


def request_of(job: dict[str, Any]) -> PlanRequest:
    """The request that a job describes; dtypes are names."""
    dtypes = {name: DTYPES[job[name]] for name in ("compute", "reduce") if job.get(name)}
    names = ("model", "implementation", "batch", "sequence", "optimizer", "checkpointing", "rank")
    return PlanRequest(**{name: job[name] for name in names if name in job}, **dtypes)


def simulate(job: dict[str, Any]) -> dict[str, Any]:
    """The plan of a job: bytes by phase, with their kinds, and rows of traffic."""
    made = planned.plan(request_of(job), [tuple(job["mesh"])], node_size=8)
    (world,) = made.worlds
    return {
        "peaks": {phase.name: sum(phase.at_peak.values()) for phase in world.phases},
        "traffic": rows_of(world.traffic),
    }


def rows_of(traffic: Sequence[Traffic]) -> list[list[Any]]:
    """Group, kind, dtype, number and bytes of each row."""
    return sorted([one.group, one.kind, one.dtype, one.count, one.nbytes] for one in traffic)


class MeasuredRank:
    """One rank that trains and measures."""

    def __init__(self, request: PlanRequest, device: torch.device, mesh: Mesh) -> None:
        self.request, self.device = request, device
        self.mesh = init_device_mesh(device.type, mesh, mesh_dim_names=names_of(mesh))
        subject = subject_of(request.model)
        with torch.device("meta"):
            known = anatomy.examine(anatomy.build(request, subject).model, request.units)
        with device:
            built = anatomy.build(request, subject, known)
        self.sizes = request.batch, request.sequence or subject.length
        self.inputs, self.loss = built.inputs, built.loss
        config = anatomy.config_of(request, known, self.mesh)
        adapter = registry.load(request.implementation)
        self.adapter = adapter(built.model, optimizer=request.make_optimizer, config=config)

    def step(self, phase: Any) -> None:
        """Train one step; ``phase`` is called with the name of each phase when it begins, and at the end."""
        phase("forward")
        with self.device:
            given = self.inputs(*self.sizes)
        with self.adapter.microbatch(is_last=True):
            loss = self.loss(self.adapter.forward(*given), *given)
            phase("backward")
            self.adapter.backward(loss)
        del loss, given
        phase("step")
        self.adapter.step()
        self.adapter.zero_grad(set_to_none=True)
        phase("")

    def traffic(self) -> list[list[Any]]:
        """The collectives of one step."""
        recorder = Recorder()
        with recorder.during("step"):
            self.step(lambda name: None)
        groups = [tuple(dist.get_process_group_ranks(group)) for group in self.mesh.get_all_groups()]
        dimensions = dict(zip(names_of(tuple(self.mesh.shape)), groups, strict=True))
        return rows_of(planned.traffic_of(recorder.trace, dimensions, node_size=8))

    def peaks(self) -> dict[str, dict[str, int]]:
        """The most bytes of a CUDA allocator in each phase of one step: requested, and in blocks."""
        found: dict[str, dict[str, int]] = {}
        last = "between steps"
        # Waiting for the device lets the allocator take back what streams were registered to use.
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

        def phase(name: str) -> None:
            nonlocal last
            stats = torch.cuda.memory_stats()
            found[last] = {name: stats[f"{name}_bytes.all.peak"] for name in ("requested", "allocated")}
            last = name
            torch.cuda.reset_peak_memory_stats()

        self.step(phase)
        return found


def workspaces() -> dict[str, int]:
    """Bytes of cuBLAS in the allocator, and of everything else on the device outside of it: context, NCCL, others."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    private.need("torch._C._cuda_clearCublasWorkspaces")()
    after = torch.cuda.memory_stats()["requested_bytes.all.current"]
    free, total = torch.cuda.mem_get_info()
    return {"cublas": before - after, "outside": total - free - torch.cuda.memory_reserved()}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Train a job as one rank: traffic of a step and, on a GPU, its peaks."""
    backend = job["backend"]
    uses_gpu = torch.cuda.is_available() if backend == "fake" else backend == "nccl"
    device = join(backend, "cuda" if uses_gpu else "cpu", job["rank"], math.prod(job["mesh"]), job["store"])
    if device.type == "cuda":
        assert torch.cuda.memory_stats().get("requested_bytes.all.current", 0) == 0, "the allocator is not empty"
    rank = MeasuredRank(request_of(job), device, tuple(job["mesh"]))
    for _ in range(WARM_UP):
        rank.step(lambda name: None)
    found: dict[str, Any] = {"traffic": rank.traffic(), "torch": torch.__version__, "device": "cpu"}
    if device.type == "cuda":
        peaks = rank.peaks()
        found["peaks"] = {name: peaks[name]["requested"] for name in peaks}
        found["allocated"] = {name: peaks[name]["allocated"] for name in peaks}
        found |= {"workspaces": workspaces(), "device": torch.cuda.get_device_name()}
        # What cuBLAS keeps was in every peak.
        found["peaks"] = {name: nbytes - found["workspaces"]["cublas"] for name, nbytes in found["peaks"].items()}
    dist.destroy_process_group()
    return found


def main() -> None:
    """Do the job that the first argument describes."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        found = simulate(job) if job["do"] == "simulate" else measure(job)
    except ValueError as error:
        found = {"failed": str(error)}
    answer(found)


if __name__ == "__main__":
    main()
