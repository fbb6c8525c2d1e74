"""torch `fully_shard`: a load that assigns parameters unties a shared one

After `load_state_dict(assign=True)`, until the next forward, the modules hold two parameters in the place of one: an
optimizer that is made in between has both, one of which nothing trains. torch 2.13.0. Seen by TIED-2. The reference did
the same until this case existed.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["TIED-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d \[.*.1\.weight.'
# ///

import tempfile, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    fully_shard(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    print(rank, [name for name, _ in model.named_parameters()])  # "1.weight" too: an optimizer has it beside "0.weight"
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
