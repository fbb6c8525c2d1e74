"""An exponential moving average of the weights, updated after each step and used for validation."""

import copy

import torch
from common import GPT, finish, loader, log, setup, text
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

setup()
raw_model = GPT()
ema = copy.deepcopy(raw_model).eval().requires_grad_(False)
model = DistributedDataParallel(raw_model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@torch.no_grad()
def update(decay=0.9):
    for ours, theirs in zip(ema.parameters(), raw_model.parameters(), strict=True):
        ours.lerp_(theirs, 1 - decay)


for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    update()
    with torch.no_grad():
        validation = F.cross_entropy(ema(inputs).flatten(0, 1), labels.flatten())
    log(step, loss=loss, validation=validation)
finish(model, ema)
