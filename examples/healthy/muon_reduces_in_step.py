"""Optimizers that reduce in their step, as nanochat's do: reduce-scatter of the gradients, a step, an all-gather."""

import torch
import torch.distributed as dist
from common import GPT, finish, loader, log, setup, text
from torch.nn import functional as F


class DistAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.8, 0.95), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            (beta1, beta2), eps = group["betas"], group["eps"]
            for p in group["params"]:
                if p.shape[0] % world:  # a small one: all ranks step it
                    grad, slice_ = p.grad.clone(), p.data
                    dist.all_reduce(grad)
                else:
                    slice_ = p.data.chunk(world)[rank]
                    grad = torch.empty_like(slice_)
                    dist.reduce_scatter_tensor(grad, p.grad)
                grad /= world
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(grad), exp_avg_sq=torch.zeros_like(grad))
                state["step"] += 1
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** state["step"])
                square = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
                slice_ -= group["lr"] * mean / (square.sqrt() + eps)
                if p.shape[0] % world == 0:
                    dist.all_gather_into_tensor(p.data, slice_.clone())


rank, world = setup()
model = GPT()
optimizer = DistAdamW(model.parameters())

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    log(step, loss=loss)
finish(model)
