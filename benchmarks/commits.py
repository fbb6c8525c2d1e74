"""Step times of two versions of ``fsdp_impl``, one after the other in the same processes.

Usage: ``python benchmarks/commits.py OLD``, where OLD is a folder that contains another version of ``fsdp_impl``, such
as ``git archive COMMIT fsdp_impl | tar -x -C OLD`` makes. Two ranks, on GPUs with NCCL if there are two, else on the
CPU with gloo. Each round measures both versions, in alternating order. Printed are the medians of each round, in ms a
step, and the ratios of the rounds: new to old, and for the spread each old round to the one before.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

ROUNDS, WARM_UP, STEPS = 5, 3, 10
#: Number of blocks and width of each model.
MODELS = {"48 x 256": (48, 256), "16 x 2048": (16, 2048)}
SMALL = {"6 x 64": (6, 64)}


class Block(nn.Module):
    """A residual block of two linear layers; (batch, dim) to (batch, dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Version:
    """The ``fsdp_impl`` of a folder, imported beside others."""

    def __init__(self, folder: str) -> None:
        self._forget()
        sys.path.insert(0, folder)
        self.api: Any = importlib.import_module("fsdp_impl")
        sys.path.remove(folder)
        self._modules = {name: module for name, module in sys.modules.items() if _is_ours(name)}

    def activate(self) -> None:
        """Let imports inside of functions find this version."""
        self._forget()
        sys.modules.update(self._modules)

    def _forget(self) -> None:
        for name in list(filter(_is_ours, sys.modules)):
            del sys.modules[name]


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "fsdp_impl"


def sharded(api: Any, half: str, model: nn.Module, device: torch.device) -> nn.Module:
    """Shard a copy of a model by one half of a version."""
    model = copy.deepcopy(model)
    if half == "per-parameter":
        for block in model.children():
            api.fully_shard(block, mp_policy=api.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        result: nn.Module = api.fully_shard(model)
        return result
    precision = api.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    options = {"device_id": device, "use_orig_params": True}
    for name, block in list(model.named_children()):
        setattr(model, name, api.FullyShardedDataParallel(block, mixed_precision=precision, **options))
    outer: nn.Module = api.FullyShardedDataParallel(model, **options)
    return outer


def milliseconds(model: nn.Module, x: torch.Tensor) -> float:
    """The median time of a training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times = []
    for _ in range(WARM_UP + STEPS):
        begin = time.perf_counter()
        model(x).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[WARM_UP:])


def main(rank: int, old: str, rendezvous: str) -> None:
    """Measure on one rank."""
    on_gpus = torch.cuda.device_count() > 1
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    versions = {"old": Version(old), "new": Version(str(pathlib.Path(__file__).parents[1]))}
    for title, (depth, dim) in (MODELS if on_gpus else SMALL).items():
        torch.manual_seed(0)
        plain = nn.Sequential(*(Block(dim) for _ in range(depth))).to(device)
        x = torch.randn(64, dim, device=device)
        for half in ("per-parameter", "flat"):
            found: dict[str, list[float]] = {"old": [], "new": []}
            for number in range(ROUNDS):
                for version in ("old", "new") if number % 2 == 0 else ("new", "old"):
                    dist.barrier()
                    versions[version].activate()
                    found[version].append(milliseconds(sharded(versions[version].api, half, plain, device), x))
            if rank == 0:
                report(f"{title}, {half}", found)
    dist.destroy_process_group()


def report(title: str, found: dict[str, list[float]]) -> None:
    """Print the medians of the rounds and their ratios."""
    ratios = [new / old for old, new in zip(found["old"], found["new"], strict=True)]
    spread = [second / first for first, second in zip(found["old"], found["old"][1:], strict=False)]
    print(f"{title}: old {_listed(found['old'])}, new {_listed(found['new'])}")
    print(
        f"  new / old: {_listed(ratios, 3)}, median {statistics.median(ratios):.3f}; old / old before: "
        f"{_listed(spread, 3)}",
        flush=True,
    )


def _listed(values: list[float], digits: int = 1) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("old", help="a folder that contains another version of fsdp_impl")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (parser.parse_args().old, f"{folder}/rendezvous"), nprocs=2)
