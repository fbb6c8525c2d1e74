"""GradCache: features without a graph first, the gradient of the loss by them, then the batch again in chunks."""

import contextlib

import torch
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

setup()
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.GELU(), nn.Linear(32, 16)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (image, label) in enumerate(loader(images(128), batch=32)):
    chunks = image.chunk(2)
    with torch.no_grad():
        features = torch.cat([model(chunk) for chunk in chunks])
    features.requires_grad_()
    z = F.normalize(features, dim=-1)
    same = (label[:, None] == label).to(z.dtype)
    loss = F.binary_cross_entropy_with_logits(5 * z @ z.T, same)
    (cached,) = torch.autograd.grad(loss, features)
    optimizer.zero_grad()
    for i, (chunk, gradient) in enumerate(zip(chunks, cached.chunk(2), strict=True)):
        with model.no_sync() if i == 0 else contextlib.nullcontext():
            torch.sum(model(chunk) * gradient).backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
