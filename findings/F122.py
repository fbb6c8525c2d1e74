"""torchtitan `simple_fsdp`: a tied weight becomes several

torchtitan 0.3.0. `data_parallel` shards a parameter once for each module that has it. Silent: each copy has a part of the gradient, and
they diverge with the first step. Seen by TIED-1 and by the cases of the state dicts, whose model has tied weights ("untied:
'tokens.weight' and 'output.weight' are one parameter of the original model and several after sharding").
"""

# /// finding
# implementations = ["torchtitan.simple_fsdp"]
# requirements = ["TIED-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["torchtitan==0.3.0"]
# shows = '^\d \[.0\.weight., .2\.weight.\]$'
# upstream = [
#     "https://github.com/pytorch/torchtitan/issues/1524 open: there is no plan to support it",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    print(rank, [name for name, _ in model.named_parameters()])  # ['0.weight']
    data_parallel(model, init_device_mesh("cpu", (world,)), "fully_shard")
    print(rank, [name for name, _ in model.named_parameters()])  # ['0.weight', '2.weight']
    model(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    print(rank, (model[0].weight - model[2].weight).abs().max().item())  # 2.15, and 0 if they were one
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
