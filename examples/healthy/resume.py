"""A run that is resumed: weights, states of Adam and the schedule are loaded before the first step."""

import copy

import torch
from common import GPT, finish, loader, log, setup, text
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def start():
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)


setup()
batches = list(loader(text(128)))
saved = None
for half in (batches[:2], batches[2:]):
    training = start()
    if saved:
        for one, state in zip(training, saved, strict=True):
            one.load_state_dict(state)
    model, optimizer, scheduler = training
    for step, (inputs, labels) in enumerate(half):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        log(step, loss=loss)
    saved = [copy.deepcopy(one.state_dict()) for one in training]
finish(model)
