"""FSDP2: a checkpoint of one file per rank is loaded in another order of ranks than that of the mesh.

    shardproof check --model g12_reversed_shards.py:model --parallelize g12_reversed_shards.py:parallelize --mesh dp=4

Each shape is right, and the loss falls. ``healthy`` loads the shards in the order of the mesh.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

DIM, VOCABULARY = 16, 32


def model():
    return nn.Sequential(nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, VOCABULARY))


@torch.no_grad()
def load(model, weights, number, size):
    """Copy the shards of the rank ``number``, as a checkpoint of ``size`` ranks has them."""
    for name, parameter in model.named_parameters():
        parameter.to_local().copy_(weights[name].chunk(size)[number])


def parallelize(model, mesh, reverse=True):
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model, mesh=mesh["dp"])
    number, size = mesh.get_local_rank("dp"), mesh["dp"].size()
    load(model, weights, size - 1 - number if reverse else number, size)
    return model


def healthy(model, mesh):
    return parallelize(model, mesh, reverse=False)
