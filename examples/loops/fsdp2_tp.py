"""Train a small language model with tensor and sequence parallelism over two ranks, and fully_shard over two.

    torchrun --nproc-per-node 4 examples/loops/fsdp2_tp.py [--accumulate N] [--clip torch|hand|none]

Each microbatch reduces its gradients.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

STEPS, BATCH, LENGTH, DIM, VOCABULARY, MAX_NORM = 3, 4, 16, 32, 64, 0.5

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--clip", choices=["torch", "hand", "none"], default="torch")
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), Block(), Block(), nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY))
model.to(device)
plan = {
    "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "[12].norm": SequenceParallel(use_local_output=True),
    "[12].up": ColwiseParallel(input_layouts=Shard(1)),
    "[12].down": RowwiseParallel(output_layouts=Shard(1)),
    "3": SequenceParallel(use_local_output=True),
    "4": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
parallelize_module(model, mesh["tp"], plan)
for block in model[1:3]:
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(100 + mesh.get_local_rank("dp"))

for step in range(STEPS):
    total = 0.0
    for _ in range(args.accumulate):
        first = torch.randint(VOCABULARY, (BATCH, 1), generator=data)
        tokens = ((first + torch.arange(LENGTH + 1)) % VOCABULARY).to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / args.accumulate
        loss.backward()
        total += loss.item()
    if args.clip == "torch":
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    elif args.clip == "hand":
        norm = sum(p.grad.square().sum().full_tensor() for p in model.parameters()).sqrt()
        for p in model.parameters():
            p.grad.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step} loss {total:.4f}", flush=True)

dist.destroy_process_group()
