"""Selective activation checkpointing: matrix products are kept, the rest is computed again in backward."""

import functools

import torch
from common import GPT, finish, loader, log, setup, text
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def policy(context, operator, *args, **kwargs):
    is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(GPT):
    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        context = functools.partial(create_selective_checkpoint_contexts, policy)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=context)
        return self.head(self.norm(x))


setup()
model = Checkpointed()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
