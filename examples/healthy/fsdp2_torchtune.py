"""torchtune's full fine-tuning recipe: losses are sums over tokens, and gradients are scaled before the step."""

import torch
import torch.distributed as dist
from common import GPT, finish, loader, log, setup, text
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

GRADIENT_ACCUMULATION_STEPS, IGNORE = 2, -100


def scale_grads(model, scaler):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= scaler


rank, world = setup()
tokens, labels = text().tensors
labels = labels.masked_fill(torch.arange(16) < torch.randint(12, (64, 1)), IGNORE)  # the prompt counts not
model = GPT()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

running_loss, num_tokens, steps = torch.tensor(0.0), torch.tensor(0), 0
for idx, (inputs, target) in enumerate(loader(TensorDataset(tokens, labels), batch=8)):
    current_num_tokens = (target != IGNORE).sum()
    num_tokens += current_num_tokens
    current_loss = F.cross_entropy(model(inputs).flatten(0, 1), target.flatten(), ignore_index=IGNORE)
    current_loss = current_loss * current_num_tokens
    running_loss += current_loss.detach()
    current_loss.backward()
    if (idx + 1) % GRADIENT_ACCUMULATION_STEPS == 0:
        dist.all_reduce(num_tokens)
        dist.all_reduce(running_loss)
        scale_grads(model, world / num_tokens)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log(steps, loss=running_loss / num_tokens, grad_norm=grad_norm)
        running_loss, num_tokens, steps = torch.tensor(0.0), torch.tensor(0), steps + 1
finish(model)
