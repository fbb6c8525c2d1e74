"""torch `fully_shard`: a reduce-scatter buffer allocated by user code must begin its block of memory

`ReduceScatter.allocate` of `set_custom_reduce_scatter` returns a view in the midst of a larger block, as a pool of memory
does. Gradients are cut out of the block, from its beginning, and not out of the view. torch 2.13.0. Seen by REDUCTION-9.
The reference did the same until this case existed.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["REDUCTION-9"]
# fixed_in = "2.15"
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.14.1 cpu 2026-11-25"]
# does_not_reproduce = ["torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d tensor\(\[\[0\., 0\.\],'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class OfAPool(ReduceScatter):
    def allocate(self, size, *, dtype, device):
        (numel,) = size
        return torch.zeros(numel + 8, dtype=dtype, device=device)[4:-4]

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=async_op)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard(nn.Linear(2, 8, bias=False))
    model.set_custom_reduce_scatter(OfAPool())
    model(torch.ones(1, 2)).sum().backward()
    print(rank, model.weight.grad.to_local())  # zeros in the first two rows; all are 1
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
