"""A sanity check on the validation data before the first step, and a validation after each second one."""

import torch
import torch.distributed as dist
from common import GPT, finish, loader, log, setup, text
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

setup()
training, held_out = loader(text(96)), loader(text(32))
model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@torch.no_grad()
def validate():
    model.eval()
    losses = [F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()) for inputs, labels in held_out]
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    model.train()
    return mean / dist.get_world_size()


log(-1, validation=validate())
for step, (inputs, labels) in enumerate(training):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
    if step % 2 == 1:
        log(step, validation=validate())
finish(model)
