"""Train a small transformer with fully_shard.

    torchrun --nproc-per-node 4 examples/loops/fsdp2.py [--accumulate N] [--clip torch|hand|none] [--bf16]
        [--impl torch.distributed.fsdp|fsdp_impl]

The gradients of all microbatches but the last stay unsharded and are not reduced. ``--impl`` is the module from which
``fully_shard`` is taken; with the reference implementation the losses are the same.
"""

import argparse
import importlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

STEPS, BATCH, LENGTH, DIM, VOCABULARY, MAX_NORM = 3, 4, 16, 32, 64, 0.5

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--clip", choices=["torch", "hand", "none"], default="torch")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--impl", default="torch.distributed.fsdp")
args = parser.parse_args()
impl = importlib.import_module(args.impl)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, DIM), nn.Parameter(torch.zeros(LENGTH, DIM))
        options = {"dim_feedforward": 4 * DIM, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(DIM, nhead=4, **options) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank = dist.get_rank()

torch.manual_seed(0)
model = Transformer().to(device)
options = {"mp_policy": impl.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)} if args.bf16 else {}
for layer in model.layers:
    impl.fully_shard(layer, **options)
impl.fully_shard(model, **options)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(100 + rank)

for step in range(STEPS):
    total = 0.0
    for i in range(args.accumulate):
        first = torch.randint(VOCABULARY, (BATCH, 1), generator=data)
        tokens = ((first + torch.arange(LENGTH + 1)) % VOCABULARY).to(device)
        model.set_requires_gradient_sync(i == args.accumulate - 1)
        logits = model(tokens[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / args.accumulate
        loss.backward()
        total += loss.item()
    if args.clip == "torch":
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    elif args.clip == "hand":
        squares = sum(p.grad.to_local().square().sum() for p in model.parameters())
        dist.all_reduce(squares)
        for p in model.parameters():
            p.grad.mul_((MAX_NORM / (squares.sqrt() + 1e-6)).clamp(max=1.0))
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {total:.4f}", flush=True)

dist.destroy_process_group()
