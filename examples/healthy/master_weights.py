"""A network in bfloat16 under DDP, and an optimizer of its float32 copy: gradients up, weights down, as apex's O2."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

setup()
network = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.GELU(), nn.Linear(32, 10))
masters = [parameter.detach().clone().float() for parameter in network.parameters()]
model = DistributedDataParallel(network.bfloat16())
optimizer = torch.optim.AdamW(masters, lr=1e-3)

for step, (image, label) in enumerate(loader(images())):
    loss = nn.functional.cross_entropy(model(image.bfloat16()).float(), label)
    model.zero_grad()
    loss.backward()
    for master, parameter in zip(masters, model.parameters(), strict=True):
        master.grad = parameter.grad.float()
    nn.utils.clip_grad_norm_(masters, 1.0)
    optimizer.step()
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master)
    log(step, loss=loss)
finish(model)
