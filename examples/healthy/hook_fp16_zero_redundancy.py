"""The fp16 hook beside torch's ZeroRedundancyOptimizer, as large models of the time of ZeRO-1 were trained."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

setup()
model = DistributedDataParallel(GPT(), gradient_as_bucket_view=True)
model.register_comm_hook(None, fp16_compress_hook)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3)

for step, (inputs, labels) in enumerate(loader(text())):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
