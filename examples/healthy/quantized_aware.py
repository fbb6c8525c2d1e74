"""Training with fake quantization: int8 weights in the forward, and a straight-through gradient."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class QuantLinear(nn.Linear):
    def forward(self, x):
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 127
        rounded = (self.weight / scale).round().clamp(-127, 127) * scale
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


setup()
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), QuantLinear(192, 32), nn.ReLU(), QuantLinear(32, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for step, (image, label) in enumerate(loader(images())):
    loss = F.cross_entropy(model(image), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
