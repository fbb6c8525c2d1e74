"""torch `fully_shard`: one of several modules of a unit, trained by itself, stays gathered, and its gradients are not reduced

The units of one module each may be called by themselves. A unit that is complete when its last module has run is not, if
one of them is called alone: its output gets no hook for backward, so nothing at the end of backward frees the unit and
reduces what is left. Only where an input requires a gradient does the unit's other hook do both. With data as the input,
as for a head or an adapter that is trained alone, the module keeps a plain parameter with this rank's own gradient, of
which the optimizer, whose parameters are DTensors, sees nothing: it moves nothing, without an error. The next forward of
the root mends the unit. The documentation allows such calls, after a forward of the root in the same iteration, and tells
of their reductions (chunked losses, whose inputs require gradients). It does not exclude inputs that need no gradient, so
this is a defect. Seen with torch 2.13.0, by REGISTRATION-4; with 2.11.0 the case fails with an input that requires a
gradient as well, where the module finds its shards in the place of its parameters. The reproducer prints
`DTensor DTensor` for the unit of one module, and `Parameter Tensor` for the first of two.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["REGISTRATION-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
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
