"""torch's composable ``replicate``: DDP without a wrapper, on a module that is then called as it is."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch.distributed._composable.replicate import replicate
from torch.nn import functional as F

setup()
model = replicate(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    log(step, loss=loss)
finish(model)
