"""Distillation under FSDP2: the teacher is sharded and frozen, and runs under ``no_grad`` before the student."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

setup()
teacher = GPT(depth=3).eval().requires_grad_(False)
student = GPT(depth=1)
for model in (teacher, student):
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)

for step, (inputs, labels) in enumerate(loader(text())):
    with torch.no_grad():
        target = teacher(inputs).log_softmax(-1)
    logits = student(inputs).log_softmax(-1)
    loss = F.kl_div(logits, target, log_target=True, reduction="none").sum(-1).mean()
    loss = loss + F.nll_loss(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss=loss)
finish(student)
