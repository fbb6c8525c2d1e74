"""A loss scale of its own: where gradients overflow on all ranks, the step is skipped and the scale falls."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

setup()
model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scale = torch.finfo(torch.get_default_dtype()).max

for step, (inputs, labels) in enumerate(loader(text(128))):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    (loss * scale).backward()
    if all(p.grad.isfinite().all() for p in model.parameters()):
        for p in model.parameters():
            p.grad.div_(scale)
        optimizer.step()
    else:
        scale = scale**0.25
    optimizer.zero_grad()
    log(step, loss=loss, scale=scale)
finish(model)
