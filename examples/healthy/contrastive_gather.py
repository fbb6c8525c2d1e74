"""CLIP's loss over the features of all ranks, gathered with a backward, as open_clip's ``gather_with_grad`` does it."""

import torch
import torch.distributed.nn.functional as distributed
from common import finish, images, loader, log, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.GELU(), nn.Linear(32, 16))
        self.text = nn.EmbeddingBag(10, 16)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, words):
        return F.normalize(self.visual(image), dim=-1), F.normalize(self.text(words), dim=-1), self.logit_scale.exp()


rank, world = setup()
model = DistributedDataParallel(Clip())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (image, label) in enumerate(loader(images())):
    image_features, text_features, scale = model(image, torch.stack([label, (label + 1) % 10], 1))
    all_images = torch.cat(distributed.all_gather(image_features))
    all_texts = torch.cat(distributed.all_gather(text_features))
    logits = scale * all_images @ all_texts.T
    target = torch.arange(len(logits))
    # Each rank computes the loss of all: DDP's mean of its gradients is the gradient of that loss.
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.module.logit_scale.clamp_(0, 4.6)
    log(step, loss=loss)
finish(model)
