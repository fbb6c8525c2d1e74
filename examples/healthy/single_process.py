"""The first program of all: one process, no process group, a model, a loader, an optimizer."""

import torch
from common import SEED, finish, images, log
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(SEED)
train_loader = DataLoader(images(), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(0.25), nn.Flatten(), nn.Linear(288, 10))
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

for _ in range(2):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        output = torch.log_softmax(model(data), dim=1)
        loss = nn.functional.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        log(batch_idx, loss=loss)
    scheduler.step()
finish(model)
