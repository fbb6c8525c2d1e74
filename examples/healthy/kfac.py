"""K-FAC for linear layers: factors from hooks, averaged over ranks, precondition the gradients before the step."""

import torch
import torch.distributed as dist
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = setup()
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 10)))
layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
factors = {}


def save_input(module, args):
    if torch.is_grad_enabled():
        x = torch.cat([args[0].detach(), torch.ones(len(args[0]), 1)], 1)
        factors[module, "a"] = x.T @ x / len(x)


def save_gradient(module, _, gradients):
    factors[module, "g"] = gradients[0].T @ gradients[0] * len(gradients[0])


for layer in layers:
    layer.register_forward_pre_hook(save_input)
    layer.register_full_backward_hook(save_gradient)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

for step, (image, label) in enumerate(loader(images())):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(image), label)
    loss.backward()
    for layer in layers:
        inverses = []
        for kind in "ga":
            factor = factors[layer, kind]
            dist.all_reduce(factor)
            inverses.append(torch.linalg.inv(factor / world + 0.1 * torch.eye(len(factor))))
        gradient = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
        update = inverses[0] @ gradient @ inverses[1]
        layer.weight.grad.copy_(update[:, :-1])
        layer.bias.grad.copy_(update[:, -1])
    optimizer.step()
    log(step, loss=loss)
finish(model)
