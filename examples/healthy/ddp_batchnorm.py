"""A small ResNet under DDP: convolutions with a bias before BatchNorm, whose gradient is rounding noise, and SGD."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(y)))


setup()
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Residual(8), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    nn.Linear(32, 10),
)  # fmt: skip
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)

for step, (image, label) in enumerate(loader(images())):
    loss = nn.functional.cross_entropy(model(image), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    log(step, loss=loss)
finish(model)
