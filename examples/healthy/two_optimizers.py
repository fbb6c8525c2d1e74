"""AdamW for the embeddings, SGD for the rest, each with a schedule of its own."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

setup()
model = DistributedDataParallel(GPT())
embeddings = [parameter for name, parameter in model.named_parameters() if "embed" in name or "position" in name]
others = [parameter for name, parameter in model.named_parameters() if "embed" not in name and "position" not in name]
optimizers = [torch.optim.AdamW(embeddings, lr=1e-2), torch.optim.SGD(others, lr=0.05, momentum=0.9)]
schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, gamma=0.9) for one in optimizers]

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    log(step, loss=loss)
finish(model)
