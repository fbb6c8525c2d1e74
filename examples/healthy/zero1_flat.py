"""ZeRO-1 over a flat buffer: reduce-scatter of the gradients, a step on this rank's part, all-gather of the weights."""

import torch
import torch.distributed as dist
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

rank, world = setup()
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.GELU(), nn.Linear(32, 10))
flat = parameters_to_vector(model.parameters()).detach()
padded = torch.cat([flat, flat.new_zeros(-len(flat) % world)])
shard = nn.Parameter(padded.chunk(world)[rank].clone())
optimizer = torch.optim.AdamW([shard], lr=1e-3)

for step, (image, label) in enumerate(loader(images())):
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(image), label)
    loss.backward()
    gradient = torch.zeros_like(padded)
    gradient[: len(flat)] = parameters_to_vector([p.grad for p in model.parameters()]) / world
    shard.grad = torch.empty_like(shard)
    dist.reduce_scatter(shard.grad, list(gradient.chunk(world)))
    optimizer.step()
    parts = [torch.empty_like(shard) for _ in range(world)]
    dist.all_gather(parts, shard.detach())
    vector_to_parameters(torch.cat(parts)[: len(flat)], model.parameters())
    log(step, loss=loss)
finish(model)
