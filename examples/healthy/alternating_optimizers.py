"""Two optimizers that take turns: even batches train the features, odd batches the classifier."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

setup()
features = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU())
classifier = nn.Linear(32, 10)
model = DistributedDataParallel(nn.Sequential(features, classifier))
slow = torch.optim.SGD(features.parameters(), lr=0.02)
fast = torch.optim.SGD(classifier.parameters(), lr=0.1)

for step, (image, label) in enumerate(loader(images(96))):
    loss = nn.functional.cross_entropy(model(image), label)
    model.zero_grad()
    loss.backward()
    (slow if step % 2 == 0 else fast).step()
    log(step, loss=loss)
finish(model)
