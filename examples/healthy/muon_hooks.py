"""Muon as in the speed runs of nanoGPT: hooks reduce gradients while backward runs, and last layers begin at zero."""

import torch
import torch.distributed as dist
from common import GPT, finish, loader, log, setup, text
from torch import nn
from torch.nn import functional as F


class Muon(torch.optim.Optimizer):
    """Each rank has the momentum of some matrices, orthogonalizes these, and sends them."""

    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                owner = number % world
                if owner == rank:
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    x = p.grad.lerp(buffer, group["momentum"])
                    x = x / (x.norm() + 1e-7)
                    for _ in range(5):
                        a = x @ x.T
                        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                    p.add_(x, alpha=-group["lr"])
                dist.broadcast(p.detach(), owner)


rank, world = setup()
model = GPT()
for block in model.blocks:
    for matrix in [p for p in block.parameters() if p.ndim == 2][1::2]:
        nn.init.zeros_(matrix)
nn.init.zeros_(model.head.weight)  # so that no other parameter has a gradient in the first step
handles = []


def reduce(p):
    p.grad.div_(world)
    handles.append(dist.all_reduce(p.grad, async_op=True))


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(reduce)
hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if not any(p is one for one in hidden)]
optimizers = [torch.optim.Adam(others, lr=3e-3, betas=(0.8, 0.95)), Muon(hidden)]

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    while handles:
        handles.pop().wait()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    log(step, loss=loss)
finish(model)
