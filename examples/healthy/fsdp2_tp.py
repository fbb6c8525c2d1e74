"""FSDP2 with tensor and sequence parallelism of a Llama-like block, as in torch's 2D tutorial."""

import torch
from common import SEED, VOCABULARY, finish, log, setup
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F


class FeedForward(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(dim, 64, False), nn.Linear(64, dim, False), nn.Linear(dim, 64, False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Model(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed, self.norm, self.ffn = nn.Embedding(VOCABULARY, dim), nn.RMSNorm(dim), FeedForward(dim)
        self.last, self.output = nn.RMSNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.output(self.last(x + self.ffn(self.norm(x))))


rank, world = setup()
tp = min(world, 2)
mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
plan = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "ffn.w1": ColwiseParallel(),
    "ffn.w2": RowwiseParallel(output_layouts=Shard(1)),
    "ffn.w3": ColwiseParallel(),
    "last": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
model = parallelize_module(Model(), mesh["tp"], plan)
fully_shard(model.ffn, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
dp_rank, dp_size = mesh["dp"].get_local_rank(), mesh["dp"].size()
data = torch.Generator().manual_seed(SEED)

for step in range(4):
    tokens = torch.randint(VOCABULARY, (8, 17), generator=data).chunk(dp_size)[dp_rank]
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss=loss)
finish(model)
