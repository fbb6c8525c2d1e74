"""torch `FullyShardedDataParallel`: the optimizer steps from the old values after a flat parameter got new data

With `use_orig_params=False`, `parameter.data = new` between two steps is used by the next forward and backward and lost
then: the unit registers the memory of before, from which the optimizer steps. With a compute dtype not even the forward
uses it. The same change in place holds, and so does new data of original parameters. Nothing is sharded with `NO_SHARD`,
where it is the same as with `FULL_SHARD`. Nothing is documented; a comment in torch's code says that a user should not
exchange a flat parameter's memory. As nothing is raised, we take it for a defect. torch 2.13.0. Seen by SHARDING-5. The
reproducer prints other losses in the third step.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["SHARDING-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^(\w+) True \[(.*), (.*)\]\n\1 False \[\2, (?!\3\])'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy


def train(strategy, in_place):
    torch.manual_seed(0)
    model = FSDP(nn.Linear(4, 4), sharding_strategy=strategy, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            if in_place:
                parameter.data.mul_(2)
            else:
                parameter.data = parameter.data * 2
        yield round(loss.item(), 4)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    for strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD):
        for in_place in (True, False):
            losses = list(train(strategy, in_place))
            if rank == 0:
                print(strategy.name, in_place, losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
