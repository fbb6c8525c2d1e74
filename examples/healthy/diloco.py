"""DiLoCo: inner AdamW steps on each rank, then an outer Nesterov step with the mean of what the ranks moved."""

import torch
import torch.distributed as dist
from common import GPT, finish, loader, log, setup, text
from torch.nn import functional as F

INNER = 2

rank, world = setup()
model = GPT(depth=1)
outer = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
inner_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
outer_optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)

for step, (inputs, labels) in enumerate(loader(text(96))):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    inner_optimizer.step()
    inner_optimizer.zero_grad()
    if (step + 1) % INNER == 0:
        for slow, fast in zip(outer, model.parameters(), strict=True):
            slow.grad = (slow - fast).detach()
            dist.all_reduce(slow.grad)
            slow.grad /= world
        outer_optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(outer, model.parameters(), strict=True):
                fast.copy_(slow)
    log(step, loss=loss)
finish(model)
