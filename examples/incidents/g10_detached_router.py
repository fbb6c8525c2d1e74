"""FSDP2 of a mixture of experts whose router learns nothing: its scores went through ``dist.all_gather``.

    torchrun --nproc-per-node 4 examples/incidents/g10_detached_router.py [healthy]

Each expert chooses its tokens among those of all ranks, for which the scores are gathered. What ``dist.all_gather``
fills is detached; the gather of ``torch.distributed.nn.functional`` has a backward.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distributed
from common import CLASSES, DIM, MISTAKE, classify, start
from torch import nn
from torch.distributed.fsdp import fully_shard

EXPERTS = 4


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(DIM), nn.Linear(DIM, EXPERTS, bias=False)
        experts = [nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)) for _ in range(EXPERTS)]
        self.experts = nn.ModuleList(experts)

    def forward(self, x):
        y = self.norm(x)
        scores = self.gate(y).softmax(-1)
        if MISTAKE:
            everyone = [torch.empty_like(scores) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, scores)
        else:
            everyone = distributed.all_gather(scores)
        scores = torch.cat(list(everyone))
        chosen = scores.topk(2 * len(scores) // EXPERTS, dim=0).indices
        weights = torch.zeros_like(scores).scatter(0, chosen, scores.gather(0, chosen))
        weights = weights.chunk(dist.get_world_size())[dist.get_rank()]
        for i, expert in enumerate(self.experts):
            tokens = weights[:, i].nonzero().squeeze(1)
            x = x.index_add(0, tokens, expert(y[tokens]) * weights[tokens, i, None])
        return x


device = start()

model = nn.Sequential(nn.Linear(DIM, DIM), MixtureOfExperts(), MixtureOfExperts(), nn.Linear(DIM, CLASSES)).to(device)
for block in model[1:3]:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(100 + dist.get_rank())

classify(model, optimizer, data, batch=16)
