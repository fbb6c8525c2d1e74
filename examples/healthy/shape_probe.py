"""A network whose features are run once on zeros, for the size of the classifier that follows them."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
        size = self.features(torch.zeros(1, 3, 8, 8)).shape[1]
        self.classifier = nn.Linear(size, 10)

    def forward(self, x):
        return self.classifier(self.features(x))


setup()
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for step, (image, label) in enumerate(loader(images())):
    loss = nn.functional.cross_entropy(model(image), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
