"""R-Drop: a batch goes through the model twice, with two masks of dropout, and both outputs must agree."""

import torch
from common import SEED, finish, images, loader, log, setup
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

rank, world = setup()
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 10))
model = DistributedDataParallel(model)
torch.manual_seed(1000 * SEED + rank)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for step, (image, label) in enumerate(loader(images())):
    logits1, logits2 = model(image), model(image)
    cross = (F.cross_entropy(logits1, label) + F.cross_entropy(logits2, label)) / 2
    p, q = F.log_softmax(logits1, -1), F.log_softmax(logits2, -1)
    divergence = F.kl_div(p, q, log_target=True, reduction="batchmean")
    divergence = divergence + F.kl_div(q, p, log_target=True, reduction="batchmean")
    loss = cross + 0.5 * divergence
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss=loss)
finish(model)
