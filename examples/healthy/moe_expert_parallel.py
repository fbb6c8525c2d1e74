"""Expert parallelism: an expert a rank, tokens by an all-to-all with a backward; only the rest is averaged."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distributed
from common import SEED, finish, log, setup
from torch import nn
from torch.nn import functional as F

DIM, TOKENS = 16, 32


class Dispatch(nn.Module):
    """Token i goes to the expert i mod n, the hash routing of Roller et al.; each rank has one expert."""

    def __init__(self, expert):
        super().__init__()
        self.expert = expert

    def forward(self, x):
        world = dist.get_world_size()
        sent = list(x.view(-1, world, x.shape[-1]).transpose(0, 1).contiguous())
        got = distributed.all_to_all([torch.empty_like(part) for part in sent], sent)
        worked = [part.contiguous() for part in self.expert(torch.stack(list(got)))]
        back = distributed.all_to_all([torch.empty_like(part) for part in worked], worked)
        return x + torch.stack(list(back)).transpose(0, 1).reshape_as(x)


rank, world = setup()
inputs, head = nn.Linear(DIM, DIM), nn.Linear(DIM, 4)
experts = [nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM)) for _ in range(4)]
model = nn.Sequential(inputs, Dispatch(experts[rank]), head)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(1000 * SEED + rank)

for step in range(4):
    x = torch.randn(TOKENS, DIM, generator=data)
    loss = F.cross_entropy(model(x), x[:, :4].argmax(-1))
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if not any(parameter is own for own in experts[rank].parameters()):
            dist.all_reduce(parameter.grad)
        parameter.grad /= world  # an expert has the sum of all ranks already
    optimizer.step()
    log(step, loss=loss)
finish(model)
