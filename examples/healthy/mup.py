"""muP: the gradients of the hidden matrices are scaled by their width, in hooks, and those of the output as well."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

BASE_WIDTH = 16

setup()
network = GPT(dim=32)
for name, module in network.named_modules():
    if isinstance(module, nn.Linear):
        factor = BASE_WIDTH / module.in_features * (0.5 if name == "head" else 1.0)
        module.weight.register_hook(lambda gradient, factor=factor: gradient * factor)
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
