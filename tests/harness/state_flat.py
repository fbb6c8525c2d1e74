"""Writes states of FSDP1 with and without original parameters, and their files of flat ones; run on two ranks.

torchrun --nproc-per-node 2 -m tests.harness.state_flat FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardproof


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for kind in ("flat", "original"):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3))
        model = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(3, 5), inner), device_id=torch.device("cpu"), use_orig_params=kind == "original",
            auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        shardproof.state(model, optimizer, out=folder / kind)
        files = folder / f"{kind}-files"
        files.mkdir(parents=True, exist_ok=True)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            saved = {"model": model.state_dict()}
        if kind == "flat":
            saved["optimizer"] = optimizer.state_dict()
        torch.save(saved, files / f"rank{rank}.pt")
        if kind == "flat":
            (folder / "damaged-files").mkdir(exist_ok=True)
            with torch.no_grad():
                saved["model"]["_flat_param"].local_shards()[0].tensor.mul_(1 - rank)
            torch.save(saved, folder / f"damaged-files/rank{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
