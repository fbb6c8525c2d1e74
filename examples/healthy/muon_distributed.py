"""Muon as in the speed runs of nanoGPT: no DDP, each rank orthogonalizes some matrices, and all-gathers share them."""

import torch
import torch.distributed as dist
from common import GPT, finish, loader, log, setup, text
from torch.nn import functional as F


def zeropower_via_newtonschulz5(g, steps=5):
    x = g / (g.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, rank=0, world=1):
        self.rank, self.world = rank, world
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = group["params"]
            padded = params + [torch.empty_like(params[-1])] * (-len(params) % self.world)
            for base in range(0, len(params), self.world):
                if base + self.rank < len(params):
                    p = params[base + self.rank]
                    state = self.state[p]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(p.grad)
                    state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                    g = p.grad.lerp(state["momentum_buffer"], group["momentum"])
                    p.add_(zeropower_via_newtonschulz5(g), alpha=-group["lr"])
                for owner, p in enumerate(padded[base : base + self.world]):
                    dist.broadcast(p, owner)


rank, world = setup()
model = GPT()
hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if not any(p is one for one in hidden)]
optimizers = [Muon(hidden, rank=rank, world=world), torch.optim.AdamW(others, lr=3e-3, betas=(0.8, 0.95))]

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    log(step, loss=loss)
finish(model)
