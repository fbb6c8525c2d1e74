"""torch 2.11 DTensor: the gradient of an uneven parameter that arrives in strides of its own is whole, mended in 2.13

Where autograd hands over the gradient of a gathered parameter as a view with other strides than the parameter's (expanded by a
`sum` over rows, or transposed), and the ranks' shards differ in size, `grad` is replicated: on every rank it has all rows,
and the optimizer's step raises or counts elements of others. Seen by TRAINING-1, RANDOM-1 and INIT-5 through torchtitan's
`simple_fsdp` on two H200s with torch 2.11; the script prints the same over NCCL and over gloo there, and `Shard(dim=0)`
throughout with 2.13.
"""

# /// finding
# implementations = ["torchtitan.simple_fsdp"]
# requirements = ["TRAINING-1", "RANDOM-1", "INIT-5"]
# fixed_in = "2.13"
# reproduces = ["torch 2.11.0 cpu 2026-11-23"]
# does_not_reproduce = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '\(Replicate\(\),?\)$'
# upstream = [
#     "https://github.com/pytorch/pytorch/pull/177174 closed: strides of uneven shards, so that such gradients stay sharded",
#     "https://github.com/pytorch/pytorch/issues/107661 open: `new_empty_strided` in backward, which became replicated as a first remedy",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for seed in (torch.ones(3, 5), torch.ones(5).expand(3, 5), torch.ones(5, 3).t()):
        weight = torch.nn.Parameter(distribute_tensor(torch.ones(3, 5), mesh, [Shard(0)]))
        weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]).backward(seed)
        print(rank, seed.stride(), weight.grad.placements)  # with torch 2.11 Shard, Replicate, Replicate
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
