"""A curvature estimate of Sophia's kind: Hutchinson's product of the Hessian and a random vector, every second step."""

import torch
import torch.distributed as dist
from common import SEED, finish, images, loader, log, setup
from torch import nn

rank, world = setup()
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 10))
parameters = list(model.parameters())
optimizer = torch.optim.SGD(parameters, lr=0.1)
curvature = [torch.ones_like(p) for p in parameters]
random = torch.Generator().manual_seed(SEED)

for step, (image, label) in enumerate(loader(images())):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(image), label)
    if step % 2 == 0:
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        probes = [torch.randint(2, p.shape, generator=random).to(p.dtype) * 2 - 1 for p in parameters]
        products = torch.autograd.grad(gradients, parameters, probes, retain_graph=True)
        for diagonal, product, probe in zip(curvature, products, probes, strict=True):
            estimate = product * probe
            dist.all_reduce(estimate)
            diagonal.lerp_(estimate / world, 0.1)
    loss.backward()
    for p, diagonal in zip(parameters, curvature, strict=True):
        dist.all_reduce(p.grad)
        p.grad.div_(world * diagonal.clamp(min=0.5))
    optimizer.step()
    log(step, loss=loss)
finish(model)
