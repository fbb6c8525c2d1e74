"""torch `clip_grad_norm_`: the inf-norm raises on a rank with an empty shard, and the others wait for it

If a rank holds an empty shard (a parameter with fewer rows than ranks, or 9 rows on 4 ranks: 3, 3, 3, 0),
`clip_grad_norm_` with `norm_type=inf` raises `_foreach_norm cannot compute the infinity norm on an empty tensor` on
that rank, before the all-reduce that the other ranks have entered. In a job whose failing rank lives on, the others
wait until the timeout of the process group. The 2-norm works.

Seen by CLIPPING-3; the entry expects `fail`, not `hang`, because a rank that raised is the cause and its peers are
waited for only two seconds. The reproducer prints it on rank 3, and on the others that the connection was closed,
because rank 3 exits.
"""

# /// finding
# implementations = ["torch.fully_shard", "torchtitan.simple_fsdp", "megatron_fsdp.experimental"]
# requirements = ["CLIPPING-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "hang"
# right = 'Every rank prints the same finite norm; an empty shard contributes 0.'
# places = [
#     "torch.nn.utils.clip_grad:_get_total_norm",
# ]
# shows = 'cannot compute the infinity norm on an empty tensor'
# related = [
#     "https://github.com/pytorch/pytorch/pull/173238 closed: the check that raises, added for empty tensors in general",
#     "https://github.com/meta-pytorch/torchrec/pull/3891 closed: TorchRec filters empty gradients before it calls torch's `clip_grad_norm_`, for this error",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard(nn.Linear(4, 5), mesh=init_device_mesh("cpu", (world,)))
    model(torch.randn(2, 4)).sum().backward()
    try:
        print(rank, nn.utils.clip_grad_norm_(model.parameters(), 1.0, float("inf")))
    except RuntimeError as error:
        print(rank, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (4, tempfile.mktemp()), nprocs=4)
