"""FSDP1 with ``use_orig_params``: two groups of parameters with different weight decay, in SHARD_GRAD_OP."""

import torch
from common import GPT, Block, finish, loader, log, setup, text
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

setup()
model = FSDP(
    GPT(tied=True),
    auto_wrap_policy=ModuleWrapPolicy({Block}),
    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    use_orig_params=True,
    device_id=torch.device("cpu"),
)
decayed = [p for name, p in model.named_parameters() if name.endswith("weight") and "norm" not in name]
others = [p for name, p in model.named_parameters() if not name.endswith("weight") or "norm" in name]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss=loss)
finish(model)
