"""torch `FullyShardedDataParallel`: after an exception in forward the next one uses old parameters

Nothing is documented for a script to call after an exception. What was gathered when forward raised stays gathered, and
the next forward uses it, also if the optimizer has stepped in between. After an exception in backward the next forward
or `no_sync` raises. The adapter does not declare `recovery`, so no case fails for it. torch 2.13.0.
"""

# /// finding
# implementations = ["torch.fsdp"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^\d (tensor\(.*?\)) (?!\1$)tensor'
# related = [
#     "https://github.com/mosaicml/composer/pull/3030 merged: Composer reshards and cleans up by itself after running out of memory",
#     "https://github.com/pytorch/torchtitan/issues/1329 open: OOM recovery under multi-node FSDP/HSDP",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def output(*, raises):
    torch.manual_seed(0)
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    inner = FullyShardedDataParallel(nn.Linear(2, 2, bias=False), **options)
    model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(2, 2)), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 2)).sum().backward()
    if raises:
        try:
            with torch.no_grad():
                model(torch.ones(1, 3))  # an input of another size
        except RuntimeError:
            pass
    optimizer.step()
    return model(torch.ones(1, 2)).detach()


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    print(rank, output(raises=False), output(raises=True))  # differ: the second does not see the step
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
