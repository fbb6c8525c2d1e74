"""accelerate's example for classification: an evaluation with ``gather_for_metrics`` before and after the epoch."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import SEED, finish, images, log
from torch import nn
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, mixed_precision="bf16")
set_seed(SEED)
network = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
size = 16 // accelerator.num_processes
training, held_out = DataLoader(images(), batch_size=size, shuffle=True), DataLoader(images(24), batch_size=size)
model, optimizer, training, held_out = accelerator.prepare(network, optimizer, training, held_out)


def accuracy():
    model.eval()
    hits = []
    for image, label in held_out:
        with torch.no_grad():
            prediction = model(image).argmax(-1)
        prediction, label = accelerator.gather_for_metrics((prediction, label))
        hits.append(prediction == label)
    model.train()
    return torch.cat(hits).float().mean()


log(-1, accuracy=accuracy())
for step, (image, label) in enumerate(training):
    loss = nn.functional.cross_entropy(model(image), label)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss=loss)
log(4, accuracy=accuracy())
finish(network)
