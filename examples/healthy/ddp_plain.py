"""DistributedDataParallel in its plainest form: a loader with a sampler, cross entropy, SGD with momentum."""

import torch
from common import finish, images, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

rank, world = setup()
dataset = images()
sampler = DistributedSampler(dataset, shuffle=False)
loader = DataLoader(dataset, batch_size=16 // world, sampler=sampler)

model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 8 * 8, 10))
model = DistributedDataParallel(model)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

for epoch in range(1):
    sampler.set_epoch(epoch)
    for step, (image, label) in enumerate(loader):
        output = model(image)
        loss = criterion(output, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(step, loss=loss)
finish(model)
