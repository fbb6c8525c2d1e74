"""DeepSpeed: an engine computes without the autocast that the script has entered, on CUDA devices alone

Unless its own configuration has a section `torch_autocast`, the engine disables autocast around the model's forward, with
one warning in the log of the first rank. It asks `torch.is_autocast_enabled()` without a device type, which is the state
of CUDA: on a CPU the same script computes in bfloat16. deepspeed 0.19.8. Seen by PRECISION-9 on two H200s.
"""

# /// finding
# implementations = ["deepspeed.zero1", "deepspeed.zero2", "deepspeed.zero3"]
# requirements = ["PRECISION-9"]
# reproduces = ["torch 2.11.0 cuda 2026-11-23"]
# gpus = 2
# packages = ["deepspeed>=0.19.8"]
# shows = '^\d torch\.float32$'
# ///

import os, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp


def main(rank, world, path):
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    import deepspeed

    model = torch.nn.Linear(4, 4).cuda()
    options = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=options
    )
    with torch.autocast("cuda", torch.bfloat16):
        print(rank, torch.nn.functional.linear(torch.ones(1, 4, device="cuda"), model.weight).dtype)  # torch.bfloat16
        print(rank, engine(torch.ones(1, 4, device="cuda")).dtype)  # torch.float32


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
