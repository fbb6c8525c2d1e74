"""Post-local SGD: after some steps a rank uses its own gradients, and parameters are averaged at times."""

import torch
import torch.distributed as dist
from common import finish, images, loader, log, setup
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

WARMUP = 4

rank, world = setup()
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10)))
alone, _ = dist.new_subgroups(group_size=1)
state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=WARMUP)
model.register_comm_hook(state, post_localSGD_hook)
averager = PeriodicModelAverager(period=2, warmup_steps=WARMUP)
optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), averager)

for step, (image, label) in enumerate(loader(images(128))):
    loss = nn.functional.cross_entropy(model(image), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
