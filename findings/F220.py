"""torch `fully_shard`: gradients lose the graph that a backward was asked for

After `backward(create_graph=True)` no gradient of a sharded parameter has a graph, and nothing says so. A penalty on the
gradients that a script adds to a loss then changes nothing. The `replicate` of FSDP's modules does the same. torch documents that `FullyShardedDataParallel` "does not work
with double backwards" and raises there; the documentation of `fully_shard` does not say it. torch 2.13.0. Seen by
REDUCTION-4. The reference did the same until this case existed, and raises now.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["REDUCTION-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# shows = '^\d True False$'
# related = [
#     "https://github.com/pytorch/pytorch/issues/172543 closed: `torch.autograd.grad` with `create_graph=True` raises, because parameters are freed that the graph needs; `set_reshard_after_backward(False)` helps there",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    for shards in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        if shards:
            fully_shard(model)
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward(create_graph=True)
        print(rank, shards, model.weight.grad.requires_grad)  # True without sharding, False with it
        model.weight.grad = None
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
