"""FSDP1 with a validation before the first step, and full parameters read for a statistic after each epoch."""

import torch
from common import GPT, Block, finish, loader, log, setup, text
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

setup()
model = FSDP(GPT(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
held_out = loader(text(16))

for epoch in range(2):
    model.eval()
    with torch.no_grad():
        for inputs, labels in held_out:
            log(epoch, validation=F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()))
    model.train()
    for step, (inputs, labels) in enumerate(loader(text(32))):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log(step, loss=loss)
    with FSDP.summon_full_params(model, writeback=False):
        log(epoch, norm=torch.stack([p.detach().norm() for p in model.parameters()]).norm())
finish(model)
