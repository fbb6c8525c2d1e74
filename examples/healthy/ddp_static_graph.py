"""DDP with ``static_graph`` over reentrant gradient checkpointing, and gradients as views of its buckets."""

import torch
from common import GPT, finish, loader, log, setup, text
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Checkpointed(GPT):
    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))


setup()
model = DistributedDataParallel(Checkpointed(), static_graph=True, gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (inputs, labels) in enumerate(loader(text())):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss=loss)
finish(model)
