"""A linear warm-up whose first learning rate is 0: the first step moves nothing."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

setup()
model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))

for step, (inputs, labels) in enumerate(loader(text(96))):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    log(step, loss=loss)
finish(model)
