"""DeepSpeed ZeRO stage 1: whole weights of a checkpoint lack frozen parameters

`get_fp32_state_dict_from_zero_checkpoint`, and the script `zero_to_fp32.py` that an engine writes beside a checkpoint,
return no frozen parameter, and no error; with stages 2 and 3 they return them. DeepSpeed 0.19.8, torch 2.13.0. Seen by
RESUME-5. The names are those of the reproducer's model; the engine's own `load_checkpoint` restores them.
"""

# /// finding
# implementations = ["deepspeed.zero1"]
# requirements = ["RESUME-5"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["deepspeed>=0.19.8"]
# shows = '^\d 1 \[(?!.*.0\.weight.)'
# ///

import os, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn


def main(rank, world, path):
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=world)
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for stage in (1, 2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].weight.requires_grad_(False)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
        config["zero_optimization"] = {"stage": stage}
        optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad])
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        engine.save_checkpoint(f"{path}/{stage}", tag="saved")
        found = get_fp32_state_dict_from_zero_checkpoint(f"{path}/{stage}", tag="saved")
        print(rank, stage, sorted(found), flush=True)  # with stage 1 without 0.weight
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mkdtemp()), nprocs=2)
