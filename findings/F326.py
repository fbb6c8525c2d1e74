"""torch `fully_shard`: a unit that runs twice under a re-entrant checkpoint has the gradients of one run alone

A unit that runs twice under `checkpoint(..., use_reentrant=True)`: the inner backward that the checkpoint starts for
the last run ends the unit's backward, and reduces the gradients of that run alone. The recomputation of the first run
finds a unit whose post-backward has run and registers nothing, so its gradients stay on unsharded parameters that
nothing frees. After backward `.grad` of the registered parameter is a plain tensor of this rank, without an error. With
`use_reentrant=False` it is right.

Seen by RECOMPUTATION-5.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["RECOMPUTATION-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = '`the gradient is a DTensor` on both ranks.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._register_post_backward_hook",
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_backward",
# ]
# shows = '^the gradient is a Tensor'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = fully_shard(nn.Linear(4, 4))

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard(Twice())
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    print(f"the gradient is a {type(model.layer.weight.grad).__name__}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
