"""torch `clip_grad_norm_`: it raises where `fully_shard` ignores a parameter

With `ignored_params`, gradients of sharded parameters are DTensors and those of ignored ones are not.
`torch.nn.utils.clip_grad_norm_(model.parameters(), ...)` passes all of them to one `_foreach_norm`, which raises `got
mixed torch.Tensor and DTensor`.

torch 2.13.0. Seen by CLIPPING-1.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["CLIPPING-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# right = 'The total norm of both kinds of gradients, and nothing printed.'
# places = [
#     "torch.nn.utils.clip_grad:_get_total_norm",
# ]
# shows = '^\d aten\._foreach_norm\.Scalar got mixed torch\.Tensor and DTensor'
# related = [
#     "https://github.com/huggingface/accelerate/pull/4219 merged: Accelerate clips plain gradients and those of DTensors apart, for this error",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Linear(2, 2)
    fully_shard(model, ignored_params={model.bias})
    model(torch.ones(1, 2)).sum().backward()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except RuntimeError as error:
        print(rank, error)  # aten._foreach_norm.Scalar got mixed torch.Tensor and DTensor
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
