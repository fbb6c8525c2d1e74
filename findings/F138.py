"""fairscale `ShardedDataParallel`: a re-entrant recomputation ends the reductions of a backward early

The reductions of what is left are queued for the end of the first backward that runs, which is that inside of the
recomputation: what is computed after it is divided and never added up. A compiled root is not reduced either.
fairscale 0.4.13. Seen by RANDOM-1 and COMPILED-3. Further, seen by DRAWN-1, EVALUATION-1 and SCALER-1: a rank that
updates no element makes the first forward raise "Cannot add a gradient to a collapsed bucket", `OSS.clip_grad_norm`
raises for float64, a first forward in inference mode leaves buffers that no step can change, and on the CPU
`ShardedGradScaler` disables itself with a warning. The reproducer prints half of the gradient.
"""

# /// finding
# implementations = ["fairscale.sdp"]
# requirements = ["RANDOM-1", "COMPILED-3", "DRAWN-1", "EVALUATION-1", "SCALER-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["fairscale==0.4.13"]
# shows = '^(\[.*\])\nalone (?!\1$)'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from fairscale.nn import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return checkpoint(self.inner, x * self.gain, use_reentrant=True)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = Recomputed()
    optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.0)
    sharded = ShardedDataParallel(model, optimizer)
    sharded(torch.ones(1, 2)).sum().backward()
    if rank == optimizer._param_to_rank[model.gain]:
        print(model.gain.grad.tolist())
    alone = Recomputed()
    alone.load_state_dict(model.state_dict())
    alone(torch.ones(1, 2)).sum().backward()
    if rank == 0:
        print("alone", alone.gain.grad.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
