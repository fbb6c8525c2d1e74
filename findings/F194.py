"""torch `fully_shard`: a load that assigns parameters unties a shared one

After `load_state_dict(assign=True)` two modules that share a parameter hold two parameters, until the next forward ties
them again. An optimizer that is made in between has both, and one of them is never trained.

torch 2.13.0. Seen by TIED-2. The reference did the same until this case existed.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["TIED-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = "`['0.weight', '0.bias', '1.bias']`, as before the load. `1.weight` is there as well."
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.reset_sharded_param",
# ]
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
