"""FSDP2 and tensor parallelism with LayerNorms whose statistics are summed over tp in bfloat16.

    F=examples/incidents/bf16_norm.py
    shardproof check --model $F:model --parallelize $F:parallelize --step $F:step --mesh dp=2,tp=2 --bisect

Each rank of tp sums its part of the features, x and the square of x, and the variance is the difference of two sums
over all features. Where activations are bfloat16, so are the sums, to send less. They have 8 bits, and where the mean
is several times the standard deviation their difference has none of them right. `--parallelize $F:healthy` sums in
float64.
"""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

DIM, VOCABULARY = 64, 64


class Norm(nn.LayerNorm):
    """A LayerNorm; with a mesh each of its ranks computes the statistics of a part of the features."""

    mesh, narrow = None, torch.bfloat16

    def forward(self, x):
        if self.mesh is None or self.mesh.size() == 1:
            return super().forward(x)
        part = DTensor.from_local(x, self.mesh, [Replicate()]).redistribute(placements=[Shard(-1)]).to_local().double()
        sums = torch.stack((part.sum(-1), part.square().sum(-1)))
        if x.dtype == torch.bfloat16:
            sums = sums.to(self.narrow)
        sums = DTensor.from_local(sums, self.mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()
        mean, square = (sums.double() / DIM).unsqueeze(-1)
        normed = (x - mean) * torch.rsqrt((square - mean.square()).clamp(min=0) + self.eps)
        return normed.type_as(x) * self.weight + self.bias


class Block(nn.Module):
    recompute = False

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = Norm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def mlp(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x):
        return x + (checkpoint(self.mlp, x, use_reentrant=False) if self.recompute else self.mlp(x))


def model():
    net = nn.Sequential(nn.Embedding(VOCABULARY, DIM), Block(), Block(), Norm(DIM), nn.Linear(DIM, VOCABULARY))
    with torch.no_grad():
        net[0].weight.add_(6)
    return net


def parallelize(net, mesh, narrow=torch.bfloat16, *, recompute=True, prefetch=True):
    plan = {"[12].up": ColwiseParallel(), "[12].down": RowwiseParallel()}
    parallelize_module(net, mesh["tp"], plan)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in net.modules():
        if isinstance(module, Norm):
            module.mesh, module.narrow = mesh["tp"], narrow
    for block in net[1:3]:
        block.recompute = recompute
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(net, mesh=mesh["dp"], mp_policy=policy)
    if prefetch:
        net[1].set_modules_to_forward_prefetch([net[2]])
    return net


def healthy(net, mesh, **axes):
    return parallelize(net, mesh, torch.float64, **axes)


def step(net, optimizer, microbatches, mesh):
    for (tokens,) in microbatches:
        logits = net(tokens).float().flatten(0, 1)
        (F.cross_entropy(logits, tokens.roll(-1, 1).flatten()) / len(microbatches)).backward()
    # Of one mesh each: those of tp lie on two dimensions.
    groups = {}
    for parameter in net.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    norms = [get_total_norm([p.grad for p in group]) for group in groups.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm=1.0, total_norm=torch.stack(norms).norm())
    optimizer.step()
    optimizer.zero_grad()
