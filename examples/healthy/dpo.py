"""Direct preference optimization: chosen and rejected in one batch, and a frozen copy as reference."""

import copy

import torch
from common import GPT, VOCABULARY, finish, loader, log, setup, text
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def log_probability(model, inputs, labels):
    logits = model(inputs).log_softmax(-1)
    return logits.gather(-1, labels[..., None]).squeeze(-1).sum(-1)


setup()
network = GPT()
reference = copy.deepcopy(network).eval().requires_grad_(False)
policy = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)

for step, (inputs, chosen) in enumerate(loader(text())):
    rejected = (chosen + 7) % VOCABULARY
    both, labels = torch.cat([inputs, inputs]), torch.cat([chosen, rejected])
    with torch.no_grad():
        base = log_probability(reference, both, labels)
    ratio = log_probability(policy, both, labels) - base
    on_chosen, on_rejected = ratio.chunk(2)
    loss = -F.logsigmoid(0.1 * (on_chosen - on_rejected)).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    log(step, loss=loss)
finish(policy)
