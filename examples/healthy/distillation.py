"""Distillation of a frozen teacher into a smaller student, with soft targets and labels."""

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TEMPERATURE = 2.0

setup()
teacher = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10)).eval().requires_grad_(False)
student = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 10)))
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)

for step, (image, label) in enumerate(loader(images())):
    with torch.no_grad():
        target = F.softmax(teacher(image) / TEMPERATURE, -1)
    logits = student(image)
    soft = F.kl_div(F.log_softmax(logits / TEMPERATURE, -1), target, reduction="batchmean") * TEMPERATURE**2
    loss = 0.5 * soft + 0.5 * F.cross_entropy(logits, label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(student)
