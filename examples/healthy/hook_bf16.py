"""DDP with gradients compressed to bfloat16 for the reduction, by the wrapper around the stock all-reduce hook."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

setup()
model = DistributedDataParallel(GPT(tied=True))
model.register_comm_hook(None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss=loss)
finish(model)
