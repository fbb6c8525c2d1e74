"""torch `fully_shard`: backward may gather shards before the values that a script has written to them arrive

The streams of gathers wait for the current stream when the root's forward begins, and not again: a gather of backward
reads the shards while kernels that write to them are still queued. Between forward and backward a script may write to
them, after `reshard()`; what backward then computes with is the values before, in silence, whenever the device is
behind the host. Seen by TRAINING-11 on four H200.
"""

# /// finding
# implementations = ["torch.fully_shard", "lightning.fabric"]
# requirements = ["TRAINING-11"]
# gpus = 2
# reproduces = ["torch 2.11.0 cuda 2026-11-30"]
# severity = "silent"
# shows = '^gradient of the first weight, written at once: 1.0; written behind 200 ms of work: 2.0$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


def gradient(cycles):
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))).cuda()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    loss = model(torch.ones(1, 4, device="cuda")).sum()
    for layer in model:
        layer.reshard()
    torch.cuda._sleep(cycles)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    loss.backward()
    return model[0].weight.grad.full_tensor()[0, 0].item()


def main(rank, world, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    gradient(0)  # whose communicators take their time
    torch.cuda.synchronize()
    at_once = gradient(0)
    torch.cuda.synchronize()
    late = gradient(400_000_000)  # at 2 GHz
    if rank == 0:
        print(
            f"gradient of the first weight, written at once: {at_once}; written behind 200 ms of work: {late}",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
