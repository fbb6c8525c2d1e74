"""muP under SGD: after backward the gradients of matrices are scaled by their width, and that of the head by half."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

BASE_WIDTH = 16

setup()
network = GPT(dim=32)
factors = {}
for name, module in network.named_modules():
    if isinstance(module, nn.Linear):
        factors[module.weight] = BASE_WIDTH / module.in_features * (0.5 if name == "head" else 1.0)
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    for weight, factor in factors.items():
        weight.grad.mul_(factor)
    optimizer.step()
    log(step, loss=loss)
finish(model)
