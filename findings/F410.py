"""torch `FullyShardedDataParallel`: a forward within `summon_full_params` raises nothing and leaves other parameters

The documentation says that neither forward nor backward can begin within the context. With flat parameters leaving the
context raises; with original ones nothing does. The forward is right and reshards; at the end the context cuts this
rank's part out of the flat parameter, which is the shard by then, and writes it over the shard.
"""

# /// finding
# implementations = ["torch.fsdp"]
# reproduces = ["torch 2.13.0 cpu 2026-11-29", "torch 2.15.0 cpu 2026-11-29"]
# shows = '^1.weight is another parameter$'
# ///

import copy, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = FSDP(copy.deepcopy(plain), device_id=torch.device("cpu"), use_orig_params=True)
    x = torch.ones(2, 4)
    with FSDP.summon_full_params(model), torch.no_grad():
        assert torch.equal(model(x), plain(x))
    with FSDP.summon_full_params(model, writeback=False):
        names = [name for name, value in model.named_parameters() if not torch.equal(value, plain.get_parameter(name))]
    if rank == 0:
        print(*names, "is another parameter", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
