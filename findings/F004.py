"""DeepSpeed ZeRO-3: a step that does not use a parameter updates it with the gradient of an earlier step

deepspeed 0.19.8, stage 3 only; stages 0 to 2 are right. The buffer that holds a parameter's reduced gradient is written
by the parameter's hook and never cleared, and every step applies all buffers. Silent. With several microbatches a
parameter that only a later one uses has the old gradient added. Seen by AUTOGRAD-1 and TRAINING-3 ("gradient of
'head1.bias' at step 3 on rank 0 ... sharded -0.021, baseline 0, oracle 0"). No report of it was found;
deepspeedai/DeepSpeed#1355 reports an error of older versions in the same situation. `python findings/F004.py 3` prints that
`b.weight` moves by 0.035263 in the steps that do not use it; `python findings/F004.py 2` that it does not move.
"""

# /// finding
# implementations = ["deepspeed.zero3"]
# requirements = ["AUTOGRAD-1", "TRAINING-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["deepspeed>=0.19.8"]
# arguments = ["3"]
# shows = 'UNUSED .* moved by 0\.0*[1-9]'
# related = [
#     "https://github.com/deepspeedai/DeepSpeed/issues/1355 open: errors of older versions where iterations use different parameters",
# ]
# ///

import os, sys, tempfile


def main(rank, world, stage, path):
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    from deepspeed.utils import safe_get_full_grad

    class Heads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x), self.b(x)

    torch.manual_seed(0)
    model = Heads()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),
        },
    )

    def b():
        with deepspeed.zero.GatheredParameters([model.b.weight], enabled=stage == 3):
            return model.b.weight.detach().clone()

    for step in range(4):
        before = b()
        out_a, out_b = engine(torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank)))
        loss = out_a.square().mean() + (out_b.square().mean() if step < 2 else 0)  # b is unused from step 2 on
        engine.backward(loss)
        grad = safe_get_full_grad(model.b.weight) if stage > 0 else model.b.weight.grad
        engine.step()
        moved = (b() - before).abs().max().item()
        if rank == 0:
            print(
                f"stage {stage} step {step}: b {'used  ' if step < 2 else 'UNUSED'}  gradient of b.weight "
                f"{'None' if grad is None else format(grad.abs().max().item(), '.6f')}, b.weight moved by {moved:.6f}",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing as mp

    mp.spawn(main, (2, int(sys.argv[1]), tempfile.mktemp()), nprocs=2)
