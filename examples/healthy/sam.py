"""Sharpness-aware minimization: each batch forward and backward twice, at the weights and a little above them."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.detach().clone()
                p.add_(p.grad, alpha=group["rho"] / (norm.item() + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()
        self.zero_grad()


setup()
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.Tanh(), nn.Linear(32, 10)))
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)

for step, (image, label) in enumerate(loader(images())):
    loss = nn.functional.cross_entropy(model(image), label)
    loss.backward()
    optimizer.first_step()
    nn.functional.cross_entropy(model(image), label).backward()
    optimizer.second_step()
    log(step, loss=loss)
finish(model)
