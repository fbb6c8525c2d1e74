"""FSDP1 in NO_SHARD, which is DDP by another name, with gradient checkpointing."""

import torch
from common import GPT, Block, finish, loader, log, setup, text
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.nn import functional as F

setup()
model = FSDP(GPT(), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu"))
apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
