"""torch `fully_shard`: one of several modules of a unit, trained by itself, stays gathered, and its gradients are not reduced

`fully_shard([first, second])`, and then `first` is called and trained by itself, after a forward of the root, with an
input that needs no gradient (data, or the output of a frozen part). The group's post-forward hook waits for all of its
modules, so that the output gets no pre-backward hook and no final callback is queued: after backward the module keeps
its unsharded parameter, with this rank's own gradient, which is never reduced. The optimizer holds the DTensor, whose
gradient is None, and moves nothing. No error. A unit of one module handles the same call.

Where an input requires a gradient the unit's other hook frees and reduces. The next forward of the root mends the unit.
The documentation allows such calls, after a forward of the root in the same iteration, and tells of their reductions
(chunked losses, whose inputs require gradients). It does not exclude inputs that need no gradient, so this is a defect.
Seen with torch 2.13.0, by REGISTRATION-4; with 2.11.0 the case fails with an input that requires a gradient as well,
where the module finds its shards in the place of its parameters.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["REGISTRATION-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = '`DTensor DTensor` for both modules. For module 0 it prints `Parameter Tensor`.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_state:_register_group_forward_hooks",
# ]
# shows = '^\d 0 Parameter Tensor$'
# related = [
#     "https://github.com/pytorch/pytorch/pull/180428 closed: Support partial forward of [norm, head] for chunked loss, which calls the head with inputs that require gradients",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    fully_shard([model[0], model[1]])
    fully_shard(model[2])
    fully_shard(model)
    batch = torch.full((1, 4), float(rank))
    model(batch).sum().backward()
    model.zero_grad()
    for number in (2, 0):
        model[number](batch).sum().backward()
        weight = model[number].weight
        print(rank, number, type(weight).__name__, type(weight.grad).__name__)  # 0 is no DTensor
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
