"""Train a small convolutional classifier with DistributedDataParallel.

    torchrun --nproc-per-node 4 examples/loops/ddp.py [--accumulate N] [--clip torch|hand|none]

``no_sync`` is around all microbatches but the last.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, SIZE, CLASSES, MAX_NORM = 3, 8, 8, 10, 0.5

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--clip", choices=["torch", "hand", "none"], default="torch")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank = dist.get_rank()

torch.manual_seed(0)
network = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(16 * (SIZE // 4) ** 2, CLASSES),
)  # fmt: skip
model = DistributedDataParallel(network.to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(100 + rank)

for step in range(STEPS):
    total = 0.0
    for i in range(args.accumulate):
        images = torch.randn(BATCH, 1, SIZE, SIZE, generator=data).to(device)
        labels = images.flatten(1)[:, :CLASSES].argmax(-1)
        last = i == args.accumulate - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(images), labels) / args.accumulate
            loss.backward()
        total += loss.item()
    if args.clip == "torch":
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    elif args.clip == "hand":
        norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
        for p in model.parameters():
            p.grad.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {total:.4f}", flush=True)

dist.destroy_process_group()
