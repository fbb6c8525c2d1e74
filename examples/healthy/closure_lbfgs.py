"""LBFGS, which calls its closure many times in a step, on one large batch a rank."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

setup()
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, 10)))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5, line_search_fn="strong_wolfe")

for step, (image, label) in enumerate(loader(images())):

    def closure(image=image, label=label):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(image), label)
        loss.backward()
        return loss

    # The loss of all ranks must decide each line search alike: DDP's gradients do, the loss is averaged here.
    def averaged(closure=closure):
        loss = closure().detach()
        torch.distributed.all_reduce(loss)
        return loss / torch.distributed.get_world_size()

    loss = optimizer.step(averaged)
    log(step, loss=loss)
finish(model)
