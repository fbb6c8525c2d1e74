"""Trains one small model under several implementations on the ranks of torchrun, and writes the state of each.

    torchrun --nproc-per-node 2 -m tests.harness.state_trainings FOLDER KIND ...

Every rank has the same data, so that all trainings have the same bits whatever shards them, except where tensor
parallelism sums in another order. FOLDER/KIND is the state after three steps, FOLDER/KIND-2 that after two. Of some
kinds rank 0 saves the state after three steps as KIND.pt and KIND.safetensors too, and all ranks as KIND.dcp.
"""

import pathlib
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shardproof

WORDS = 50


class Net(nn.Module):
    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 30), nn.Linear(30, 16)
        self.head = nn.Linear(16, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.words.weight
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.head(self.norm(self.down(self.up(self.words(x)).relu())))  # type: ignore[no-any-return]


def made(kind: str, state: dict[str, torch.Tensor] | None = None) -> nn.Module:
    """The model under an implementation, with a state that it had before."""
    torch.manual_seed(0)
    model, world = Net(is_tied=kind not in ("fsdp1", "flat", "untied")), dist.get_world_size()
    model.load_state_dict(state or {}, strict=False)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind in ("fsdp1", "flat"):
        return FullyShardedDataParallel(model, use_orig_params=kind == "fsdp1", device_id=torch.device("cpu"))
    if kind in ("fsdp2", "hsdp", "tp"):
        shape, names = {"fsdp2": ((world,), ("dp",)), "hsdp": ((2, world // 2), ("rep", "dp"))}.get(
            kind, ((world // 2, 2), ("dp", "tp"))
        )
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if kind == "tp":
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            mesh = mesh["dp"]
        for one in (model.up, model.down, model):
            fully_shard(one, mesh=mesh)
    return model


def main(folder: pathlib.Path, kinds: list[str]) -> None:
    dist.init_process_group("gloo")
    for kind in kinds:
        model = made(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        keywords: dict[str, Any] = {"scheduler": scheduler, "extra": {"tokens": 7}}
        for step in range(3):
            if step == 2:
                shardproof.state(model, optimizer, out=folder / f"{kind}-2", step=step, **keywords)
            x = torch.randint(0, WORDS, (8,), generator=torch.Generator().manual_seed(step))
            nn.functional.cross_entropy(model(x), x).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        shardproof.state(model, optimizer, out=folder / kind, step=3, **keywords)
        if kind in ("fsdp2", "untied"):
            full = StateDictOptions(full_state_dict=True, cpu_offload=True)
            saved = {
                "model": get_model_state_dict(model, options=full),
                "optimizer": get_optimizer_state_dict(model, optimizer, options=full),
                "lr_scheduler": scheduler.state_dict(),
            }
            if dist.get_rank() == 0:
                torch.save(saved, folder / f"{kind}.pt")
                save_file({name: one.clone() for name, one in saved["model"].items()}, folder / f"{kind}.safetensors")
            sharded = {
                "model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer),
                "lr_scheduler": scheduler.state_dict(),
            }  # fmt: skip
            dcp.save(sharded, checkpoint_id=folder / f"{kind}.dcp")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
