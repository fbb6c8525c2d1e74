"""torch `share_comm_ctx`: the end of one root's backward, or its reset, makes the backward of another raise IndexError

Roots that share a context by `share_comm_ctx` share the list in which units stand in the order of their forwards, and
each unit remembers its indices there. The end of one root's backward, and `reset_iter_state()`, clear the list, and the
indices of their own root's units only. The backward of another root whose forward came before then looks up an index
that is gone: `IndexError: list index out of range`. `ScheduleInterleaved1F1B`, for whose stages the function is meant,
fails in this way as soon as one stage of a rank has ended its backwards.

Seen by COMPOSITION-18 and ACCUMULATION-13.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["COMPOSITION-18", "ACCUMULATION-13"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# right = '`trained` three times.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._root_post_backward_final_callback",
#     "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._reset_iter_state",
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._backward_prefetch",
# ]
# shows = '^alone: trained\nafter another.s end: IndexError: .*\nafter another.s reset: IndexError'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard, share_comm_ctx


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    for what in ("alone", "after another's end", "after another's reset"):
        roots = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
        for root in roots:
            for module in (*root, root):
                fully_shard(module)
        share_comm_ctx(roots)
        loss, other = (root(torch.ones(2, 4)).sum() for root in roots)
        try:
            if what == "after another's end":
                other.backward()
            elif what == "after another's reset":
                roots[1].reset_iter_state()
            loss.backward()
            shown = "trained"
        except IndexError as error:
            shown = f"IndexError: {error}"
        if rank == 0:
            print(f"{what}: {shown}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
