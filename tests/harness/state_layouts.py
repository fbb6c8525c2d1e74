"""Loads one state under several implementations on the ranks of torchrun, and saves it in each format of each.

    torchrun --nproc-per-node 2 -m tests.harness.state_layouts FOLDER KIND ...

FOLDER/tied.pt and FOLDER/untied.pt have the state, and FOLDER/earlier-untied.pt that of a step before. What is written
goes to FOLDER/KIND-RANKS: ``state`` by ``shardproof.state()``, and each format by its name. Of flat parameters some
files are damaged: ``flat-zeros`` and others.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardproof
from tests.harness.state_trainings import made

#: Without cpu_offload, with which FSDP1 reads freed memory where parameters are on the CPU (torch 2.13).
FULL = StateDictOptions(full_state_dict=True)

#: Which implementations have one file of each rank, by the type of their state.
SHARDED = ("fsdp1", "fsdp2", "hsdp", "tp")
UNTIED = ("fsdp1", "flat")


class Adapted(nn.Module):
    """A frozen layer with an adapter, by the names of PEFT."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(16, 30).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(16, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, 30, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))  # type: ignore[no-any-return]


def write_full(saved: dict[str, Any], form: str, path: Path) -> None:
    """Write a full state in a format that one process writes."""
    model = {name: one.detach().clone().contiguous() for name, one in saved["model"].items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "pt":
        torch.save(saved, path)
    elif form == "dcp":
        dcp.save(saved, checkpoint_id=path, no_dist=True)
    elif form == "index":
        path.mkdir()
        names = [*model]
        files = {name: f"model-0000{1 + (number > len(names) // 2)}-of-00002.safetensors"
                 for number, name in enumerate(names)}  # fmt: skip
        for file in set(files.values()):
            save_file({name: one for name, one in model.items() if files[name] == file}, path / file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    elif form == "hf":
        path.mkdir()
        torch.save(model, path / "pytorch_model.bin")
        if "optimizer" in saved:
            torch.save(saved["optimizer"], path / "optimizer.pt")
    elif form == "peft":
        path.mkdir()
        renamed = {f"base_model.model.{name.replace('.default', '')}": one for name, one in model.items()}
        save_file(renamed, path / "adapter_model.safetensors")


def restored(kind: str, folder: Path, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model under an implementation, with a state that was saved."""
    saved = torch.load(folder / f"{name}.pt", weights_only=True)
    model = made(kind, saved["model"] if kind == "tp" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if kind == "tp":
        # torch 2.13 distributes no tensor whose rows two dimensions of a mesh share unevenly; the wrappers do.
        states = saved["optimizer"]["state"]
        like = {
            key: dict(made(kind, {name: one[key] for name, one in states.items()}).named_parameters())
            for key in ("exp_avg", "exp_avg_sq")
        }
        for own, parameter in model.named_parameters():
            moments = {key: some[own].detach().clone() for key, some in like.items()}
            optimizer.state[parameter] = {"step": states[own]["step"].clone(), **moments}
        return model, optimizer
    set_model_state_dict(model, saved["model"], options=FULL)
    set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=FULL)
    return model, optimizer


def save(kind: str, folder: Path, out: Path) -> None:
    """Write a state in all formats of an implementation."""
    model, optimizer = restored(kind, folder, "untied" if kind in UNTIED else "tied")
    shardproof.state(model, optimizer, out=out / "state", step=3)
    if kind == "flat":
        save_flat(model, optimizer, folder, out)
        return
    saved = {
        "model": get_model_state_dict(model, options=FULL),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL),
    }
    for form in ("pt", "index", "hf") if dist.get_rank() == 0 else ():
        write_full(saved, form, out / form)
    sharded = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(sharded, checkpoint_id=out / "dcp")
    if kind in SHARDED:
        (out / "sharded").mkdir(exist_ok=True)
        torch.save(sharded, out / f"sharded/rank_{dist.get_rank()}.pt")


def _zeros(mine: torch.Tensor, others: list[torch.Tensor], old: torch.Tensor, rank: int) -> torch.Tensor:
    return mine * (rank == 0)


def _swapped(mine: torch.Tensor, others: list[torch.Tensor], old: torch.Tensor, rank: int) -> torch.Tensor:
    return others[rank ^ 1] if rank ^ 1 < len(others) else mine


def _repeated(mine: torch.Tensor, others: list[torch.Tensor], old: torch.Tensor, rank: int) -> torch.Tensor:
    return others[0]


def _stale(mine: torch.Tensor, others: list[torch.Tensor], old: torch.Tensor, rank: int) -> torch.Tensor:
    return mine if rank == 0 else old


#: The part of each rank, as it is damaged.
OF_FLAT: dict[str, Callable[..., torch.Tensor]] = {
    "zeros": _zeros, "swapped": _swapped, "another rank's rows": _repeated, "stale": _stale,
}  # fmt: skip


def save_flat(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, out: Path) -> None:
    """Write files of flat parameters, and damaged ones."""
    rank = dist.get_rank()

    def local(of: nn.Module) -> dict[str, Any]:
        with FullyShardedDataParallel.state_dict_type(of, StateDictType.LOCAL_STATE_DICT):
            return of.state_dict()

    def part(saved: dict[str, Any]) -> torch.Tensor:
        return next(one for name, one in saved.items() if name.endswith("_flat_param")).local_shards()[0].tensor

    def write(name: str) -> None:
        (out / name).mkdir(exist_ok=True)
        torch.save({"model": saved, "optimizer": optimizer.state_dict()}, out / f"{name}/rank{rank}.pt")

    saved = local(model)
    write("flat")
    if dist.get_world_size() != 2:  # whose parts have one size
        return
    mine = part(saved)
    right = mine.detach().clone()
    others = [torch.empty_like(right) for _ in range(dist.get_world_size())]
    dist.all_gather(others, right)
    old = part(local(restored("flat", folder, "earlier-untied")[0])).detach()
    for name, change in OF_FLAT.items():
        with torch.no_grad():
            mine.copy_(change(right, others, old, rank))
        write(f"flat-{name.replace(' ', '-')}")


def save_adapter(kind: str, out: Path) -> None:
    """Write an adapter and the state that has it."""
    torch.manual_seed(0)
    model: nn.Module = Adapted()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp2":
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    model(torch.ones(2, 16)).square().sum().backward()
    optimizer.step()
    shardproof.state(model, optimizer, out=out / "adapted", step=1)
    full = get_model_state_dict(model, options=FULL)
    if dist.get_rank() == 0:
        write_full({"model": {name: one for name, one in full.items() if "lora_" in name}}, "peft", out / "peft")


def main(folder: Path, kinds: list[str]) -> None:
    dist.init_process_group("gloo")
    for kind in kinds:
        out = folder / f"{kind}-{dist.get_world_size()}"
        out.mkdir(exist_ok=True)
        save(kind, folder, out)
        if kind in ("ddp", "fsdp1", "fsdp2"):
            save_adapter(kind, out)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
