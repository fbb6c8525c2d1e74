"""What the scripts with a loop share: how they start, a block of their models, their data, and what is no mistake."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

MISTAKE = "healthy" not in sys.argv
LENGTH, DIM, VOCABULARY = 16, 32, 64
STEPS, CLASSES = 3, 10


def start():
    """Join the process group and seed the model; returns the type of this rank's device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
    return device


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def counting(sequences, data):
    """Sequences of tokens that each count up from a first one, with one token more than the model reads."""
    first = torch.randint(VOCABULARY, (sequences, 1), generator=data)
    return (first + torch.arange(LENGTH + 1)) % VOCABULARY


def classify(model, optimizer, data, *, batch=8):
    """Train ``model``, whose output classifies an input by its largest feature, for some steps, and end."""
    device = next(model.parameters()).device
    for step in range(STEPS):
        inputs = torch.randn(batch, DIM, generator=data).to(device)
        loss = F.cross_entropy(model(inputs), inputs[:, :CLASSES].argmax(-1))
        loss.backward()
        update(model, optimizer, step, loss.item())
    dist.destroy_process_group()


def update(model, optimizer, step, loss):
    """Clip the gradients, make a step, and print the loss."""
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(step, loss)


def report(step, loss):
    """Print the loss, on the first rank."""
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss:.4f}", flush=True)
