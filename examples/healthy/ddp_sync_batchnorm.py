"""BatchNorm over the batch of all ranks: an all-reduce with a backward, as SyncBatchNorm has on GPUs."""

import torch
import torch.distributed.nn.functional as distributed
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class SyncBatchNorm(nn.BatchNorm2d):
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        moments = torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))])
        mean, square = distributed.all_reduce(moments) / torch.distributed.get_world_size()
        variance = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance, self.momentum)
        x = (x - mean[:, None, None]) * torch.rsqrt(variance + self.eps)[:, None, None]
        return x * self.weight[:, None, None] + self.bias[:, None, None]


setup()
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, bias=False), SyncBatchNorm(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, bias=False),
    SyncBatchNorm(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10),
)  # fmt: skip
model = DistributedDataParallel(model, broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

for step, (image, label) in enumerate(loader(images())):
    loss = nn.functional.cross_entropy(model(image), label, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
