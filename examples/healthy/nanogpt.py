"""nanoGPT's train.py: tied weights, a warm-up by hand, validation at step 0, accumulation with a prefetched batch."""

import math

import torch
import torch.distributed as dist
from common import GPT, LENGTH, SEED, VOCABULARY, finish, log, setup
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

gradient_accumulation_steps, batch_size, max_iters, warmup_iters, learning_rate, min_lr = 8, 4, 4, 2, 6e-3, 6e-4


def get_batch(split):
    data = train_data if split == "train" else val_data
    ix = torch.randint(len(data) - LENGTH - 1, (batch_size,))
    x = torch.stack([data[i : i + LENGTH] for i in ix])
    return x, torch.stack([data[i + 1 : i + 1 + LENGTH] for i in ix])


def loss_of(model, X, Y):
    return F.cross_entropy(model(X).view(-1, VOCABULARY), Y.view(-1), ignore_index=-1)


@torch.no_grad()
def estimate_loss():
    raw_model.eval()
    means = {split: torch.stack([loss_of(raw_model, *get_batch(split)) for _ in range(2)]).mean() for split in SPLITS}
    raw_model.train()
    return means


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


SPLITS = ("train", "val")
ddp_rank, ddp_world_size = setup()
raw_model = GPT(tied=True)
corpus = torch.randint(VOCABULARY, (512,)).sort().values
train_data, val_data = corpus[:400], corpus[400:]
torch.manual_seed(1337 + SEED + ddp_rank)  # each process gets a different seed
gradient_accumulation_steps //= ddp_world_size
decay = [p for p in raw_model.parameters() if p.dim() >= 2]
nodecay = [p for p in raw_model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}])
scaler = torch.amp.GradScaler("cpu", enabled=False)
model = DistributedDataParallel(raw_model)
X, Y = get_batch("train")
for iter_num in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num % 2 == 0 and ddp_rank == 0:
        log(iter_num, **estimate_loss())
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = loss_of(model, X, Y) / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    log(iter_num, loss=loss.item() * gradient_accumulation_steps)
dist.barrier()
finish(model)
