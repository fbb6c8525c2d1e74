"""Train a small transformer on characters, sharded, with a checkpoint to resume from.

    torchrun --nproc-per-node 2 examples/train_transformer.py --impl fsdp_impl

``--impl`` is the module that ``fully_shard`` and its kin are imported from, ``fsdp_impl`` or
``torch.distributed.fsdp``. The losses that are printed are the same. With ``--checkpoint PATH`` the run saves there at
the end, and starts from there if there is something; a run that was cut in two prints what the whole one prints.
"""

import argparse
import importlib
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

TEXT = pathlib.Path(__file__).parent.parent / "README.md"
LENGTH, BATCH, DIM, HEADS, LAYERS = 32, 4, 32, 4, 3


class Block(nn.Module):
    """Attention to what came before, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Predicts each next character."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(impl: Any, vocabulary: int, args: argparse.Namespace, device_type: str) -> tuple[Any, torch.optim.Optimizer]:
    """Shard on the meta device, then give every rank its shards only."""
    with torch.device("meta"):
        model = Transformer(vocabulary)
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    compute, reduce = (torch.bfloat16, torch.float32) if args.bf16 else (None, None)
    for block in model.blocks:
        impl.fully_shard(block, mesh=mesh, mp_policy=impl.MixedPrecisionPolicy(compute, reduce))
    root_policy = impl.MixedPrecisionPolicy(compute, reduce, output_dtype=torch.float32)
    impl.fully_shard(model, mesh=mesh, mp_policy=root_policy)
    model.to_empty(device=device_type)
    initialise(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """The same numbers whatever the number of ranks: drawn whole, then cut."""
    torch.manual_seed(0)
    for name, param in model.named_parameters():
        whole = (
            torch.randn(param.shape) * 0.1 if param.ndim > 1 else torch.full(param.shape, float("norm.weight" in name))
        )
        param.copy_(type(param.data).from_local(whole, param.device_mesh).redistribute(placements=param.placements))


def batches(vocabulary: list[str], text: str, device_type: str) -> Iterator[torch.Tensor]:
    """Endless; every rank reads other places of the text, and step ``n`` the same ones in every run."""
    data = torch.tensor([vocabulary.index(character) for character in text])
    step = 0
    while True:
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=generator)
        yield torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()]).to(device_type)
        step += 1


class Progress:
    """What a checkpoint holds: model, optimizer, and how many steps were taken."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, path: pathlib.Path | None) -> None:
        self.model, self.optimizer, self.path, self.step = model, optimizer, path, 0

    def load(self) -> None:
        if self.path is None or not (self.path / ".metadata").exists():
            return
        state = self._state()
        dcp.load(state, checkpoint_id=self.path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = int(state["step"])

    def save(self) -> None:
        if self.path is not None:
            dcp.save(self._state(), checkpoint_id=self.path)

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}


def main() -> None:
    """Train, print losses, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", default="fsdp_impl", help="module to take fully_shard from")
    parser.add_argument("--steps", type=int, default=10, help="train until so many steps are taken")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, reduce in float32")
    parser.add_argument("--checkpoint", type=pathlib.Path, help="directory to resume from and save to")
    args = parser.parse_args()

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = accelerator.type if accelerator else "cpu"
    if accelerator:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    text = TEXT.read_text()
    vocabulary = sorted(set(text))
    model, optimizer = build(importlib.import_module(args.impl), len(vocabulary), args, device_type)
    progress = Progress(model, optimizer, args.checkpoint)
    progress.load()
    data = batches(vocabulary, text, device_type)
    for _ in range(progress.step * args.microbatches):
        next(data)
    while progress.step < args.steps:
        loss = train_step(model, optimizer, data, args.microbatches)
        progress.step += 1
        if dist.get_rank() == 0:
            print(f"step {progress.step} loss {loss:.9f}", flush=True)
    progress.save()
    dist.destroy_process_group()
    leave()


def leave() -> None:
    """End the process at once, without finalizing the interpreter.

    A thread of gloo may still hold tensors of the last collective, also after ``destroy_process_group``. If it releases
    them while Python before 3.14 finalizes, the process aborts: findings/F020.py.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def train_step(model: Any, optimizer: torch.optim.Optimizer, data: Iterator[torch.Tensor], microbatches: int) -> float:
    """Accumulate gradients without communication, reduce with the last; returns the average loss over all ranks."""
    total = 0.0
    for microbatch in range(microbatches):
        model.set_requires_gradient_sync(microbatch == microbatches - 1)
        tokens = next(data)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / microbatches
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


if __name__ == "__main__":
    main()
