"""torch `fully_shard`: of a unit of several modules the last one's output alone brings its parameters back

`fully_shard([first, second])`: backward unshards the unit when it reaches the output of the module that ran last. If
the loss uses the output of the first module only, as with two heads of which one has no loss in this step, backward
fails on freed storage: `setStorage: ... out of bounds for storage of size 0`.

torch 2.13.0. Seen by COLLECTIVES-7. The reference did the same until this case existed.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["COLLECTIVES-7"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# right = 'Backward ends and nothing is printed, as with a unit for each head.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_state:_register_group_forward_hooks",
# ]
# shows = '^\d setStorage: .* out of bounds for storage of size 0'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.entry(x)
        return self.first(x), self.second(x)


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = Heads()
    fully_shard([model.first, model.second])
    fully_shard(model)
    try:
        model(torch.ones(2, 4))[0].sum().backward()
    except RuntimeError as error:
        print(rank, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
