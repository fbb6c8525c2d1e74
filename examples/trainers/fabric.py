"""Lightning Fabric on CPUs: FSDP2 by its ModelParallelStrategy.

``--incident early-optimizer``: the optimizer is made before the model is sharded.
"""

import argparse
import os

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardproof
from shardproof.trainers.lightning import Watching


def main(options):
    def shard(model, mesh):
        policy = MixedPrecisionPolicy()
        if options.dtype == "bfloat16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (model[1], model):
            fully_shard(module, mesh=mesh["data_parallel"], mp_policy=policy)
        return model

    world = int(os.environ["WORLD_SIZE"])
    strategy = ModelParallelStrategy(parallelize_fn=shard, data_parallel_size=world, tensor_parallel_size=1)
    watching = []
    if options.watch:
        watching.append(Watching(shardproof.doctor() if options.watch == "doctor" else shardproof.record(out="run")))
    fabric = Fabric(
        accelerator="cpu", devices=world, strategy=strategy, plugins=[LightningEnvironment()], callbacks=watching
    )
    fabric.launch()
    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    early = torch.optim.AdamW(model.parameters())
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(early if options.incident else torch.optim.AdamW(model.parameters()))
    generator = torch.Generator().manual_seed(1000 * options.seed + fabric.global_rank)
    fabric.call("on_train_start")
    for _ in range(4):
        for _ in range(2):
            tokens = torch.randint(64, (2, 16), generator=generator)
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()) / 2
            fabric.backward(loss)
            fabric.print("loss", float(loss).hex(), flush=True)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    fabric.call("on_train_end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--incident", choices=("early-optimizer",))
    parser.add_argument("--watch", choices=("doctor", "record"), help="by a callback")
    main(parser.parse_args())
