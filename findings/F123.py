"""torchtitan `simple_fsdp`: recurrent modules keep whole weights

torchtitan 0.3.0. `nn.RNN` and its kin keep a list of their weights, which `data_parallel` does not replace: until the first forward it
has the unsharded ones, later the last that were gathered. Training is right, memory is not saved. Seen by TRAINING-1
("holds 1488 bytes of parameters after sharding; its share is 552"), until the adapter declared what threads of gloo may
keep (`held_from_start`), which is as large in so small a model. No case fails of it any more, and no entry of the known
failures names it.
"""

# /// finding
# implementations = ["torchtitan.simple_fsdp"]
# requirements = ["TRAINING-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["torchtitan==0.3.0"]
# shows = '^\d \[\(4, 2\), \(4, 4\), \(4,\), \(4,\)\]$'
# unlisted = "no case fails of it any more: what the adapter lets threads of gloo keep is as large"
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    model = nn.Sequential(nn.RNN(2, 4))
    data_parallel(model, init_device_mesh("cpu", (world,)), "fully_shard")
    model(torch.ones(1, 2))[0].sum().backward()
    print(rank, [tuple(one.to_local().shape) for one in model.parameters()])  # [(2, 2), (2, 4), (2,), (2,)]
    print(rank, [tuple(one.shape) for one in model[0]._flat_weights])  # [(4, 2), (4, 4), (4,), (4,)]
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
