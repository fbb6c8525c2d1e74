"""Train a small residual network with fully_shard on a mesh of two replicas with two shards each.

    torchrun --nproc-per-node 4 examples/loops/hsdp.py [--accumulate N] [--clip torch|hand|none]

Each microbatch reduces its gradients over the shards, and the last over the replicas.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

STEPS, BATCH, DIM, CLASSES, MAX_NORM = 3, 8, 32, 10, 0.5

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
rank = dist.get_rank()
mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))

torch.manual_seed(0)
model = nn.Sequential(Block(), Block(), nn.Linear(DIM, CLASSES)).to(device)
for block in model[:2]:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(100 + rank)

for step in range(STEPS):
    total = 0.0
    for i in range(args.accumulate):
        inputs = torch.randn(BATCH, DIM, generator=data).to(device)
        labels = inputs[:, :CLASSES].argmax(-1)
        model.set_requires_all_reduce(i == args.accumulate - 1)
        loss = F.cross_entropy(model(inputs), labels) / args.accumulate
        loss.backward()
        total += loss.item()
    if args.clip == "torch":
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    elif args.clip == "hand":
        squares = sum(p.grad.to_local().square().sum() for p in model.parameters())
        dist.all_reduce(squares, group=mesh.get_group("shard"))
        for p in model.parameters():
            p.grad.mul_((MAX_NORM / (squares.sqrt() + 1e-6)).clamp(max=1.0))
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {total:.4f}", flush=True)

dist.destroy_process_group()
