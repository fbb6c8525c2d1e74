"""VeOmni's clipping reduces an infinity norm twice

veomni 0.1.12, `veomni_clip_grad_norm` with fsdp2. `clip_grad_norm_` of torch reduces the norm for the factor and returns it
as it was, partial on each rank; `full_tensor()` then reduces it once more. Other norms come back reduced. Silent: one more
collective a step. Seen by CLIPPING-2 ("2 all_reduce instead of 1 in clip"). No report of it was found.
"""

# /// finding
# implementations = ["veomni.fsdp2"]
# requirements = ["CLIPPING-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# packages = ["veomni>=0.1.12"]
# shows = '^norm inf: 2 reductions$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp


def main(rank, world, path):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode
    from veomni.distributed.clip_grad_norm import veomni_clip_grad_norm
    from veomni.distributed.parallel_state import init_parallel_state

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = fully_shard(torch.nn.Linear(4, 4), mesh=init_parallel_state(dp_size=world, device_type="cpu").fsdp_mesh)
    for norm in (2.0, float("inf")):
        model(torch.ones(1, 4)).sum().backward()
        with CommDebugMode() as counted:
            veomni_clip_grad_norm(model, 0.01, norm)
        if rank == 0:
            print(f"norm {norm}: {counted.get_total_counts()} reductions\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
