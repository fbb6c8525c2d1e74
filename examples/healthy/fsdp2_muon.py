"""Muon under FSDP2: gradients are gathered for the orthogonalization, and each rank keeps its shard of the update."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(buffer, group["momentum"]).full_tensor())
                p.add_(distribute_tensor(update, p.device_mesh, p.placements), alpha=-group["lr"])


def orthogonalize(g, steps=5):
    x = g / (g.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


setup()
model = GPT()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]
others = [p for name, p in model.named_parameters() if p.ndim < 2 or "blocks" not in name]
optimizers = [Muon(matrices), torch.optim.AdamW(others, lr=3e-3)]

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    log(step, loss=loss)
finish(model)
